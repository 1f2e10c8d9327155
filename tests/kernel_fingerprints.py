"""Fingerprints of every GPU kernel: hashes of its PTX for compute capability 9.0 and of its launches, without a GPU.

    python tests/kernel_fingerprints.py [WORD...] [--write]

compares the cases whose names contain every word with tests/kernels/fingerprints.json, or writes that file. A case is a
call of the op. Each of its launches is a line: the kernel, a hash of its PTX without names, paths and line numbers, and
a hash of its grid and arguments. Run it as a program, since Triton's interpreter must be off.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import launches_without_gpu as without_gpu
import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime import driver

from softplus_attention import softplus_attention, softplus_attention_decode, softplus_attention_varlen
from softplus_attention.kernels import launch_cache
from softplus_attention.kernels.hopper import launch as hopper_launch
from softplus_attention.kernels.triton import decode_launch

FILE = Path(__file__).parent / "kernels" / "fingerprints.json"
BATCH, HEADS, LENGTH = 2, 4, 256
BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
binaries: list[str] = []  # fingerprints, indexed by the function handle that the stub driver returns
launched: list[tuple[str, tuple[Any, ...]]] = []


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def instructions(ptx: str) -> str:
    """PTX without names, paths and line numbers."""
    code = ptx.split("\t.section\t.debug")[0]
    code = re.sub(r"//.*|^\s*\.(loc|file)\b.*", "", code, flags=re.MULTILINE)
    names = re.findall(r"\.(?:entry|func)\s+(?:\([^)]*\)\s*)?(\w+)", code)
    for i, name in enumerate(sorted(set(names), key=names.index)):
        code = re.sub(rf"\b{name}(?=_param|\b)", f"f{i}", code)
    return "\n".join(line.strip() for line in code.splitlines() if line.strip())


class Utils(without_gpu.Utils):
    @staticmethod
    def load_binary(name: str, ptx: bytes, shared: int, device: int) -> tuple[int, ...]:
        binaries.append(f"{name} {digest(f'{shared} {instructions(ptx.decode())}')}")
        return (1, len(binaries) - 1, 0, 0, 1024)


class Launcher(without_gpu.Launcher):
    def record(self, *arguments: Any) -> None:
        super().record(*arguments)
        launched.append(without_gpu.launched.pop())


class Driver(without_gpu.Driver):
    utils = Utils()
    launcher_cls = Launcher


def without_assembler(backend: Any = None, stages: Any = None, *_: Any) -> tuple[str, str] | None:
    """Use PTX in place of the binary: ptxas takes most of the time, and the fingerprint does not need it."""
    if stages is None:
        return ("ptx", "ptx")
    stages["cubin"] = lambda ptx, metadata: ptx.encode()
    return None


def normalise(x: Any, addresses: list[int]) -> Any:
    """Replace an address, which differs between runs, by its index among the addresses of the launch."""
    if isinstance(x, without_gpu.Descriptor):
        return ("tiles", address_index(x.address, addresses), *(str(part) for part in x.described))
    if not isinstance(x, Tensor):
        return x
    return address_index(x.data_ptr(), addresses), str(x.dtype), tuple(x.shape), x.stride()


def address_index(address: int, addresses: list[int]) -> int:
    if address not in addresses:
        addresses.append(address)
    return addresses.index(address)


def launches(call: Callable[[], object]) -> Iterator[str]:
    """Fingerprints of a call's launches by Triton's own launcher."""
    for cache in (launch_cache._binaries, launch_cache._relaunches, launch_cache._calls, launched):
        cache.clear()
    call()
    for _, (x, y, z, _stream, function, *others) in launched:
        addresses: list[int] = []
        yield f"{binaries[function]} {digest(repr([x, y, z, *(normalise(other, addresses) for other in others)]))}"


def make_power(name: str, rows: int = HEADS) -> Any:
    return {"p=15": 15, "LSSA": None, "learned": torch.full((rows,), 3.0, requires_grad=True)}[name]


def step(dtype: torch.dtype, d: int, mode: str, power: str, kv_heads: int, gradients: bool) -> None:
    """A forward, and a backward if ``gradients``."""
    tensors = [torch.zeros(BATCH, h, LENGTH, d, dtype=dtype) for h in (HEADS, kv_heads, kv_heads)]
    p = make_power(power)
    options: dict[str, Any] = {"impl": "triton", "power": p, "enable_gqa": kv_heads < HEADS, "is_causal": True}
    wanted = [x.requires_grad_(gradients) for x in tensors]
    if mode == "packed":
        packed = [x.transpose(1, 2).reshape(-1, x.shape[1], d) for x in wanted]
        cu = torch.arange(0, BATCH * LENGTH + 1, LENGTH // 2, dtype=torch.int32)
        out = softplus_attention_varlen(*packed, cu, cu, LENGTH // 2, LENGTH // 2, **options)
    else:
        options |= {"window": {"window": 100}, "mask": {"attn_mask": torch.ones(LENGTH, LENGTH).bool()}}.get(mode, {})
        options |= {"no offset": {"offset": False}, "full": {"is_causal": False}}.get(mode, {})
        out = softplus_attention(*wanted, **options)
    if gradients:
        torch.autograd.grad(out, wanted + [p] * isinstance(p, Tensor), torch.zeros_like(out))


def decode(dtype: torch.dtype, d: int, power: str, normalized: bool, window: int | None) -> None:
    q = torch.zeros(BATCH, HEADS, 1, d, dtype=dtype)
    k, v = torch.zeros(2, BATCH, HEADS // 2, LENGTH, d, dtype=dtype).unbind()
    lengths, starts = torch.tensor([200, 90]), None if window else torch.tensor([0, 16])
    options: dict[str, Any] = {"normalized_keys": normalized, "window": window, "enable_gqa": True, "impl": "triton"}
    with torch.no_grad():
        softplus_attention_decode(q, k, v, lengths, cache_starts=starts, power=make_power(power), **options)


def cases() -> Iterator[tuple[str, Callable[[], object]]]:
    prefill = [
        *[(BFLOAT16, "causal", power, HEADS) for power in ("p=15", "learned", "LSSA")],
        *[(BFLOAT16, mode, power, HEADS) for mode in ("window", "packed") for power in ("p=15", "learned")],
        (BFLOAT16, "full", "p=15", 2), (FLOAT16, "causal", "p=15", HEADS), (FLOAT16, "packed", "LSSA", HEADS),
    ]  # fmt: skip
    plain = [(FLOAT32, mode, "p=15", HEADS) for mode in ("causal", "window", "packed")]
    plain += [(FLOAT32, "causal", power, HEADS) for power in ("learned", "LSSA")]
    plain += [(BFLOAT16, mode, "p=15", HEADS) for mode in ("mask", "no offset")]
    for room, given in (("hopper", prefill), ("triton", prefill + plain)):
        for d in (64, 128):
            for dtype, mode, power, kv_heads in given:
                name = f"{room} D{d} {str(dtype)[6:]} {mode} {power}" + (f" GQA {kv_heads}" * (kv_heads < HEADS))
                yield name, partial(step, dtype, d, mode, power, kv_heads, True)
            name = f"{room} D{d} bfloat16 causal p=15 inference"
            yield name, partial(step, BFLOAT16, d, "causal", "p=15", HEADS, False)
    for d in (64, 128):
        for dtype in (BFLOAT16, FLOAT16, FLOAT32):
            name = f"decode D{d} {str(dtype)[6:]}"
            for power in ("p=15", "learned", "LSSA"):
                yield f"{name} {power}", partial(decode, dtype, d, power, False, None)
            yield f"{name} window p=15 unit keys", partial(decode, dtype, d, "p=15", True, 50)
            rows = torch.zeros(BATCH, HEADS, LENGTH, d, dtype=dtype)
            yield f"{name} unit vectors", partial(decode_launch.unit_vectors, rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="WORD", help="select cases whose names contain every word")
    parser.add_argument("--write", action="store_true", help="record the fingerprints instead of comparing them")
    options = parser.parse_args()
    driver.set_active(Driver())
    without_gpu.allow_cpu_tensors()
    knobs.runtime.add_stages_inspection_hook = without_assembler
    recorded = json.loads(FILE.read_text())["cases"] if FILE.exists() else {}
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        knobs.cache.dir = folder
        for name, call in cases():
            if all(word in name for word in options.words):
                hopper_launch.available = lambda device, name=name: name.startswith("hopper")
                found[name] = list(launches(call))
                print(f"{name}: {len(found[name])} launches", flush=True)
    if options.write:
        FILE.write_text(json.dumps({"triton": triton.__version__, "cases": found}, indent=1) + "\n")
        return 0
    for name, lines in found.items():
        for ours, theirs in zip(lines, recorded.get(name, []), strict=False):
            if ours != theirs:
                print(f"CHANGED {name}: {theirs} -> {ours}")
        if len(lines) != len(recorded.get(name, [])):
            print(f"CHANGED {name}: {len(recorded.get(name, []))} launches -> {len(lines)}")
    changed = [name for name, lines in found.items() if lines != recorded.get(name)]
    print(f"{len(found) - len(changed)} of {len(found)} cases as recorded")
    return 1 if changed or not found else 0


if __name__ == "__main__":
    sys.exit(main())
