"""A stand-in for a Triton kernel, for tests of what launches one: a compiled one needs a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


class Kernel:
    """What Triton's kernels are to ``launch``: compiled by the first call, which gives back the binary."""

    function, packed_metadata = "function", "metadata"

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.runs: list[Any] = []
        no_scratch = {"global_scratch_size": 0, "profile_scratch_size": 0}
        types = {"arg_annotations": "annotations", "kernel_signature": "signature"}
        flags = {"launch_cooperative_grid": False, "launch_pdl": False}
        self.run = SimpleNamespace(launch=self.launch, **no_scratch, **types, **flags)

    def launch(self, *arguments: Any) -> None:
        *others, last = arguments  # since 3.7 those of the kernel are one
        self.runs.append((*others, *last) if isinstance(last, tuple) else arguments)

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        def run(*arguments: Any, **options: Any) -> Kernel:
            self.calls.append((grid, arguments, options))
            self.binary = Kernel()
            return self.binary

        return run
