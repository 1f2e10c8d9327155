"""A stand-in for a Triton kernel, for tests of what launches one: a compiled one needs a GPU."""

from __future__ import annotations

from typing import Any


class Launcher:
    """What Triton calls to launch a binary, and what that calls in the end."""

    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid = launch_pdl = False
    arg_annotations, kernel_signature = "annotations", "signature"

    def __init__(self) -> None:
        self.called: list[Any] = []
        self.launched: list[Any] = []

    def __call__(self, *arguments: Any) -> None:
        self.called.append(arguments)

    def launch(self, *arguments: Any) -> None:
        *others, last = arguments  # since 3.7 those of the kernel are one
        self.launched.append((*others, *last) if isinstance(last, tuple) else arguments)


class Kernel:
    """What Triton's kernels are to ``launch``: compiled by the first call, which gives back the binary."""

    function, packed_metadata = "function", "metadata"

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.run = Launcher()

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        def run(*arguments: Any, **options: Any) -> Kernel:
            self.calls.append((grid, arguments, options))
            self.binary = Kernel()
            return self.binary

        return run
