"""Each private interface of Triton that ``private_launch.py`` uses, in the installed version.

A failure names what a new version of Triton has changed. If all pass, add the version to ``KNOWN_VERSIONS`` after
``launches_without_gpu.py`` and a run on a GPU.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("triton")
import triton
from triton.backends.nvidia import driver

from softplus_attention.kernels import private_launch

IS_3_6 = triton.__version__.startswith("3.6.")
COMMON = ["gridX", "gridY", "gridZ", "stream", "function", "self.launch_cooperative_grid", "self.launch_pdl"]
HOOKS = ["kernel_metadata", "launch_metadata", "launch_enter_hook", "launch_exit_hook"]
SCRATCH = ["global_scratch", "profile_scratch"]
ORDER = (
    [*COMMON, *SCRATCH, *HOOKS, "*args"]
    if IS_3_6
    else [*COMMON, *HOOKS, *SCRATCH, "self.arg_annotations", "self.kernel_signature", "args"]
)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    private_launch.is_known.cache_clear()
    yield
    private_launch.is_known.cache_clear()


def launcher_calls() -> list[list[str]]:
    """The arguments of ``self.launch`` in Triton's launcher, as text."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(driver.CudaLauncher.__call__)))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [[ast.unparse(x) for x in call.args] for call in calls if ast.unparse(call.func) == "self.launch"]


def test_installed_version_is_known() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert private_launch.is_known()


def test_launcher_passes_arguments_in_this_order() -> None:
    assert launcher_calls() == [ORDER]


def test_launcher_has_the_attributes() -> None:
    source = inspect.getsource(driver.CudaLauncher.__init__)
    names = ["launch", "global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl"]
    names += [] if IS_3_6 else ["arg_annotations", "kernel_signature"]
    assert [name for name in names if f"self.{name} =" not in source] == []


def test_descriptors_are_made_by_a_closure() -> None:
    wrapped = driver.wrap_handle_tensordesc("the C function", {0: "tensordesc<bf16[64, 64]>"}, ["metadata"])
    inside = inspect.getclosurevars(wrapped).nonlocals
    assert (inside["launcher"], inside["tensordesc_meta"]) == ("the C function", ["metadata"])
    assert driver.wrap_handle_tensordesc("the C function", {0: "*bf16"}, []) == "the C function"


def test_descriptor_reads_only_what_is_described() -> None:
    """Without metadata it is passed on in parts; with metadata the driver fills a descriptor from the same fields."""
    assert list(inspect.signature(driver.make_tensordesc_arg).parameters) == ["arg", "metadata"]
    tile: Any = private_launch.Described(4096, None, (8, 64), (64, 1), 8)
    made = driver.make_tensordesc_arg(tile, None)
    assert made[0] is tile
    assert made[1:5] == [8, 64, 64, 1]


def test_hooks_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not private_launch.has_hooks()
    monkeypatch.setattr(triton.knobs.runtime.launch_enter_hook, "calls", [print])
    assert private_launch.has_hooks()


def test_unknown_version_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "__version__", "9.9.9")
    with pytest.warns(RuntimeWarning, match=r"triton 9\.9\.9 is none of 3\.6\.0, 3\.7\.1: kernels are launched by"):
        assert not private_launch.is_known()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not private_launch.is_known()


def test_switch_turns_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(private_launch.SWITCH, "1")
    assert not private_launch.is_known()
