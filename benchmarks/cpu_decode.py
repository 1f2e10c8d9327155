"""One decode step of the op on a CPU compared with scaled_dot_product_attention, on q, k and v of a trained model.

    softplus-attention build
    python benchmarks/cpu_decode.py --output results/decode-op-cpu.json

The vectors are the inputs of the two global layers of checkpoints/bytes-2.7m on two stretches of unseen text: eight
heads, each with its learned factor of log N. With several query heads per key head, these are the queries of the last
tokens over the same keys. "read" is the fraction of values that have weight in some head of the group, "error" the
largest difference from the float64 reference, which reads all values, and "limit" its bound: twice the error of the
float32 reference rounded to the dtype, plus one unit in the last place. Calls of ours and of SDPA alternate, on one
thread.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

# Read when torch loads: waiting threads must not spin.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
import torch.nn.functional as F
from torch import Tensor

from softplus_attention import attention_weights, softplus_attention_decode
from softplus_attention.charts import LineChart, Series
from softplus_attention.charts.draw import draw
from softplus_attention.data.builtin import builtin_text
from softplus_attention.huggingface import SoftplusGPTForCausalLM, modeling_softplus_gpt
from softplus_attention.kernels.cpu import native
from softplus_attention.utils import provenance
from softplus_attention.utils.timing import alternate, medians

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")
HEADS, POWERS = 8, ("learned", "15")
LEFT_OUT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-14}  # docs/method.md
Vectors = tuple[Tensor, Tensor, Tensor, Tensor]


@torch.inference_mode()
def record(tokens: int) -> Vectors:
    """q, k, v (8, tokens, 64) and the factors of log N (8,)."""
    from transformers import AutoTokenizer

    folder = ROOT / "checkpoints" / "bytes-2.7m"
    model, tokenizer = SoftplusGPTForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    text = "".join(builtin_text()[1]).encode()
    found: list[Vectors] = []
    attend = modeling_softplus_gpt.attend

    def recorded(chosen: Any, q: Tensor, k: Tensor, v: Tensor, *sight: Any, **options: Any) -> Tensor:
        if chosen.window(None) is None:
            found.append((q[0], k[0], v[0], options["parameters"]["power_per_log"]))
        return attend(chosen, q, k, v, *sight, **options)

    modeling_softplus_gpt.attend = recorded
    for begin in (0, len(text) - 2 * tokens):
        ids = tokenizer(text[begin : begin + 2 * tokens].decode(errors="ignore"), return_tensors="pt").input_ids
        model(ids[:, :tokens])
    modeling_softplus_gpt.attend = attend
    return tuple(torch.cat([one[i] for one in found])[:HEADS].clone() for i in range(4))  # type: ignore[return-value]


def case(vectors: Vectors, keys: int, dtype: torch.dtype, group: int, batch: int, power: str, unit: bool) -> Any:
    """q (batch, 8 * group, 1, D), k and v (batch, 8, keys, D), and the power of each head."""
    q, k, v, per_log = vectors
    q = q[:, keys - group : keys].flatten(0, 1)[None, :, None]
    k, v = (x[None, :, :keys] for x in (F.normalize(k, dim=-1) if unit else k, v))
    q, k, v = (x.expand(batch, -1, -1, -1).to(dtype).contiguous() for x in (q, k, v))
    given = (per_log * math.log(keys)).clamp(min=1).repeat_interleave(group) if power == "learned" else float(power)
    return q, k, v, given


def share_read(q: Tensor, k: Tensor, power: Any, group: int, least: float, together: int = 1) -> float:
    """The fraction of values read for the first sequence, if ``together`` neighbours are read as one."""
    keys = k.shape[2]
    q, k = q[:1].double(), k[:1].double()
    power = power.double() if isinstance(power, Tensor) else power
    weights = attention_weights(q, k, power=power, enable_gqa=True)[0, :, 0].unflatten(0, (-1, group))
    counts = (weights >= least / keys * weights.amax(-1, keepdim=True)) & (weights > 0)
    return float(counts.any(1)[:, : keys // together * together].unflatten(1, (-1, together)).any(2).double().mean())


def errors(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, options: dict[str, Any]) -> tuple[float, float]:
    """The error of the output, and its limit."""

    def run(dtype: torch.dtype, impl: str) -> Tensor:
        given = options["power"]
        power = given.to(dtype) if isinstance(given, Tensor) else given
        pieces = (x[:1].to(dtype) for x in (q, k, v))
        return softplus_attention_decode(*pieces, lengths[:1], **{**options, "power": power}, impl=impl)  # type: ignore[arg-type]

    exact = run(torch.float64, "reference")
    low = run(torch.float32, "reference").to(q.dtype)
    ours = softplus_attention_decode(q, k, v, lengths, **options)[:1]
    far = lambda x: float((x.double() - exact).abs().max())  # noqa: E731
    return far(ours), 2 * far(low) + torch.finfo(q.dtype).eps * float(exact.abs().max())


@torch.inference_mode()
def measure(vectors: Vectors, keys: int, dtype: torch.dtype, group: int, batch: int, power: str, unit: bool) -> Any:
    q, k, v, given = case(vectors, keys, dtype, group, batch, power, unit)
    lengths = torch.full((batch,), keys, dtype=torch.int32)
    options = {"power": given, "normalized_keys": unit, "enable_gqa": True}
    works = {
        "lssar": lambda: softplus_attention_decode(q, k, v, lengths, **options),
        "softmax": lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=group > 1),
    }
    for work in works.values():
        work()
    times = medians(alternate(works, CPU, 400, seconds=1.5))
    error, limit = errors(q, k, v, lengths, options)
    read = share_read(q, k, given, group, LEFT_OUT[dtype])
    row = {"keys": keys, "dtype": str(dtype).removeprefix("torch."), "heads_per_key_head": group, "batch": batch}
    row |= {"power": power, "unit_keys": unit, **{f"{name}_us": round(1e3 * ms, 1) for name, ms in times.items()}}
    row |= {
        "ratio": round(times["lssar"] / times["softmax"], 3),
        "read": round(read, 3),
        "error": error,
        "limit": limit,
    }
    values = batch * HEADS * keys * v.shape[-1] * v.element_size()
    return row | {"lssar_bytes": round(values * (1 + read)), "softmax_bytes": 2 * values}


def cases(quick: bool) -> list[tuple[int, torch.dtype, int, int, str, bool]]:
    lengths = (64, 256) if quick else (64, 256, 1024, 4096, 16384)
    found = [(n, torch.float32, 1, 1, power, True) for n in lengths for power in POWERS]
    found += [(n, torch.bfloat16, 1, 1, "learned", True) for n in lengths]
    for n in lengths[::2] if quick else (64, 1024, 16384):
        found += [(n, torch.float32, group, 1, "learned", True) for group in (3, 8)]
        found += [(n, torch.float32, 1, 8, "learned", True), (n, torch.float32, 1, 1, "learned", False)]
    return found


def figure(rows: list[dict[str, Any]], folder: Path) -> list[Path]:
    plain = [row for row in rows if row["dtype"] == "float32" and row["unit_keys"]]
    plain = [row for row in plain if row["heads_per_key_head"] == row["batch"] == 1]
    names = {"learned": "LSSAR, learned factors of log N", "15": "LSSAR, p = 15"}
    charts = []
    for kind, label, scale in (
        ("us", "time of a step, microseconds", 1.0),
        ("bytes", "keys and values read, MiB", 2.0**-20),
    ):
        lines = []
        for look, (power, name) in enumerate(names.items()):
            own = [row for row in plain if row["power"] == power]
            lines.append(Series(name, [x["keys"] for x in own], [x[f"lssar_{kind}"] * scale for x in own], look=look))
        own = [row for row in plain if row["power"] == "learned"]
        softmax = [x[f"softmax_{kind}"] * scale for x in own]
        lines.append(Series("softmax (SDPA)", [x["keys"] for x in own], softmax, look=2))
        title = "A decode step on one CPU thread" if kind == "us" else "Memory read"
        charts.append(LineChart(title, "keys in the cache", label, lines, x_scale="log2", y_scale="log"))
    return draw(charts, folder / "decode-cpu")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="the JSON file to write")
    parser.add_argument("--figures", type=Path, help="the folder for decode-cpu.svg and .png")
    parser.add_argument("--vectors", type=Path, help="a file that caches the recorded vectors: recording takes a while")
    parser.add_argument(
        "--quick", action="store_true", help="short caches, to test the script; the numbers mean nothing"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    tokens = 256 if options.quick else 16384
    if options.vectors and options.vectors.exists():
        vectors = torch.load(options.vectors)
    else:
        vectors = record(tokens)
        if options.vectors:
            torch.save(vectors, options.vectors)
    about = {"command": provenance.command("benchmarks/cpu_decode.py"), "commit": provenance.commit()}
    about |= {"machine": provenance.machine(), "versions": provenance.versions()}
    ops = native.status().ops
    about |= {"kernels": "PyTorch operations" if ops is None else f"C++: {ops.instructions()}"}
    about |= {"shape": {"key_heads": HEADS, "head_dim": vectors[0].shape[-1], "threads": 1}}
    granules = []
    for power in POWERS:
        *pair, _, given = case(vectors, tokens, torch.float32, 1, 1, power, True)
        shares = {n: round(share_read(*pair, given, 1, LEFT_OUT[torch.float32], n), 3) for n in (1, 4, 8, 16)}
        granules.append({"power": power, "keys": tokens, "read": shares})
        print(f"power {power}: fraction of values read, by number of neighbours read as one: {shares}", flush=True)
    rows = []
    for chosen in cases(options.quick):
        rows.append(row := measure(vectors, *chosen))
        print(
            f"{row['keys']:6} keys {row['dtype']:8} {row['heads_per_key_head']} heads per key head, "
            f"batch {row['batch']}, power {row['power']:7} {'unit' if row['unit_keys'] else 'raw '} keys: "
            f"{row['lssar_us']:9.1f} us, SDPA {row['softmax_us']:9.1f}, ratio {row['ratio']:.2f}; "
            f"read {row['read']:.0%}, error {row['error']:.1e} of {row['limit']:.1e}",
            flush=True,
        )
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps({**about, "granules": granules, "rows": rows}, indent=1) + "\n")
    if options.figures:
        print(*figure(rows, options.figures), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
