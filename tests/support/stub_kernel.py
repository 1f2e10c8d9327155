"""A stub of a Triton kernel for tests of the launch code, since a compiled kernel needs a GPU."""

from __future__ import annotations

from typing import Any


class Launcher:
    """Triton's launcher of a binary: records calls of the launcher and of its C function ``launch``."""

    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid = launch_pdl = False
    arg_annotations, kernel_signature = "annotations", "signature"

    def __init__(self) -> None:
        self.called: list[Any] = []
        self.launched: list[Any] = []

    def __call__(self, *arguments: Any) -> None:
        self.called.append(arguments)

    def launch(self, *arguments: Any) -> None:
        *others, last = arguments  # since 3.7 the kernel's arguments are one tuple
        self.launched.append((*others, *last) if isinstance(last, tuple) else arguments)


class Kernel:
    """A kernel that the first call compiles; the call returns the binary."""

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
