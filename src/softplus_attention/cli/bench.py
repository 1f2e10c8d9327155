"""``softplus-attention bench``: time and memory on this machine, compared with scaled_dot_product_attention."""

from __future__ import annotations

import argparse
import functools
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Read when torch loads: the profiler does not log its start, and waiting threads do not spin.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from softplus_attention.cli.info import DTYPES
from softplus_attention.cli.options import parse_integers
from softplus_attention.functional import softplus_attention, softplus_attention_decode
from softplus_attention.power import power_by_log
from softplus_attention.reference import compute_dtype
from softplus_attention.utils import counted
from softplus_attention.utils.timing import Work, alternate, medians, peak_bytes
from softplus_attention.validation import LARGEST_HEAD_DIM, check_installed

if TYPE_CHECKING:
    from softplus_attention.charts.model import LineChart

Row = dict[str, Any]
Attention = Callable[..., Tensor]
BASELINE = "sdpa"
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
BACKENDS |= {"efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH}
MODELS = {"softmax": None, "lssar": "learned-log"}  # attention -> power
MIB = 2**20


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "bench",
        help="compare time and memory with PyTorch's attention on this machine",
        description="Measures time and memory of the op (forward; forward and backward), of a decode step over a "
        "key/value cache and of the training step of a small GPT, next to scaled_dot_product_attention and each of its "
        "backends. Calls alternate in one process; the tables show medians. Writes bench.json and, with matplotlib, "
        "bench.png and bench.svg. Attentions that cannot run here are listed with the reason.",
    )
    add = parser.add_argument
    add("--sections", type=sections, default="op,decode,model", help="sections to measure (default: %(default)s)")
    add("--lengths", metavar="N,N", help="tokens (default: 512,1024,2048 on a CPU; 1024,4096,16384 on a GPU)")
    add("--batch", type=positive, metavar="N", help="sequences (default: 1 on a CPU; 32768 tokens in all on a GPU)")
    add("--heads", type=positive, metavar="N", help="attention heads (default: 8 on a CPU; 16 on a GPU)")
    add("--head-dim", type=positive, metavar="N", help="head dimension (default: 64 on a CPU; 128 on a GPU)")
    add("--dtype", choices=DTYPES, help="default: float32 on a CPU; bfloat16 on a GPU")
    add("--device", help="for example cpu or cuda:0 (default: cuda if available)")
    add("--preset", default="tiny", help="preset of `train` for the section model (default: %(default)s)")
    add("--seconds", type=positive, metavar="N", default=45, help="approximate measuring time (default: %(default)s)")
    add("--repetitions", type=positive, metavar="N", default=9,
        help="maximum number of timed calls of each (default: %(default)s)")  # fmt: skip
    add("--output", type=Path, default=Path("bench"), metavar="FOLDER",
        help="folder for the results (default: %(default)s)")  # fmt: skip
    parser.set_defaults(run=run)


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not 1 or more")
    return number


def sections(text: str) -> list[str]:
    chosen = text.split(",")
    if unknown := [name for name in chosen if name not in SECTIONS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(SECTIONS)}")
    return chosen


def run(options: argparse.Namespace) -> int:
    from softplus_attention.utils.device import check_device, resolve_device
    from softplus_attention.utils.files import check_no_strangers, write_json
    from softplus_attention.utils.results import run_metadata

    check_device(options.device)
    device = resolve_device(options.device)
    set_defaults(options, device)
    if options.head_dim > LARGEST_HEAD_DIM:
        raise ValueError(f"--head-dim {options.head_dim} is too large: the op takes up to {LARGEST_HEAD_DIM}")
    file = options.output / "bench.json"
    check_no_strangers("--output", options.output, (file.name,))
    chosen = list(options.sections)
    if "model" in chosen:
        missing = [name for name in ("transformers", "accelerate") if find_spec(name) is None]
        if missing and chosen == ["model"]:
            check_installed(*missing)
        if missing:
            chosen.remove("model")
            print(f"the section model is skipped: {missing[0]} is not installed "
                  "(pip install 'softplus-attention[huggingface]')", file=sys.stderr)  # fmt: skip
    began = time.monotonic()
    rows: list[Row] = []
    for place, section in enumerate(chosen):
        left = options.seconds - (time.monotonic() - began)
        rows += SECTIONS[section](options, device, max(left, 0.0) / (len(chosen) - place))
    data = run_metadata(device) | {"baseline": BASELINE, "rows": rows}
    options.output.mkdir(parents=True, exist_ok=True)
    write_json(file, data)
    print(format_rows(rows, options, device))
    written = [file, *draw(rows, options.output / "bench")]
    print("\nwritten: " + ", ".join(str(path) for path in written))
    return 0


def set_defaults(options: argparse.Namespace, device: torch.device) -> None:
    """Defaults that depend on the device."""
    gpu = device.type == "cuda"
    defaults = {
        "lengths": "1024,4096,16384" if gpu else "512,1024,2048", "heads": 16 if gpu else 8,
        "head_dim": 128 if gpu else 64, "dtype": "bfloat16" if gpu else "float32",
    }  # fmt: skip
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    options.lengths = parse_integers("--lengths", options.lengths)


def choose_batch(options: argparse.Namespace, device: torch.device, length: int) -> int:
    return options.batch or (max(1, 32768 // length) if device.type == "cuda" else 1)


def sdpa_with(backend: SDPBackend, **options: Any) -> Attention:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, **options)

    return attend


def attentions() -> dict[str, Attention]:
    """The baseline first."""
    found: dict[str, Attention] = {BASELINE: functools.partial(F.scaled_dot_product_attention, is_causal=True)}
    found |= {f"sdpa {name}": sdpa_with(backend, is_causal=True) for name, backend in BACKENDS.items()}
    found |= {"lssar p=15": functools.partial(softplus_attention, is_causal=True), "lssar learned": learned}
    return found | {"lssa": functools.partial(softplus_attention, power=None, is_causal=True)}


def learned(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """LSSAR with a learned factor of log N per head: one power per row, with a gradient."""
    factors = torch.linspace(0.4, 1.0, q.shape[1], device=q.device, dtype=compute_dtype(q.dtype)).requires_grad_()
    counts = torch.arange(1, q.shape[2] + 1, device=q.device)[None, None]
    return softplus_attention(q, k, v, power=power_by_log(factors, counts), is_causal=True)


def cached_attentions(length: int) -> dict[str, Attention]:
    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        lengths = torch.full((q.shape[0],), length, dtype=torch.int32, device=q.device)
        return softplus_attention_decode(q, k, v, lengths, normalized_keys=True)

    found: dict[str, Attention] = {BASELINE: F.scaled_dot_product_attention}
    found |= {f"sdpa {name}": sdpa_with(backend) for name, backend in BACKENDS.items()}
    return found | {"lssar p=15": ours}


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def runnable(rows: list[Row], works: dict[str, Work], common: Row) -> dict[str, Work]:
    """Calls each once and returns those that run here; the others are added to ``rows`` with their error."""
    found = {}
    for name, work in works.items():
        try:
            work()
            found[name] = work
        except (RuntimeError, ValueError) as error:
            reason = "this backend does not support these inputs here" if "sdpa" in name else first_line(error)
            rows.append(common | {"contender": name, "status": "error", "error": reason})
    return found


def compare(
    rows: list[Row], works: dict[str, Any], common: Row, prefix: str, device: torch.device, *limits: Any
) -> None:
    """Measures each, and adds its median time and peak memory to its row."""
    found = runnable(rows, works, common)
    samples = alternate(found, device, *limits)
    for name, middle in medians(samples).items():
        row = next((row for row in rows if row["contender"] == name and row.items() >= common.items()), None)
        if row is None:
            rows.append(row := common | {"contender": name, "status": "ok"})
        row |= {f"{prefix}_ms": middle, f"{prefix}_samples_ms": samples[name]}
        if common["section"] != "decode":  # a decode step allocates almost nothing beyond its inputs
            row[f"{prefix}_mib"] = peak_bytes(found[name], device) / MIB


def training_step(attend: Attention, inputs: Sequence[Tensor], grad: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(attend(*inputs), inputs, grad)


def run_op(options: argparse.Namespace, device: torch.device, seconds: float) -> list[Row]:
    rows: list[Row] = []
    began = time.monotonic()
    for place, length in enumerate(options.lengths):
        shape = (choose_batch(options, device, length), options.heads, length, options.head_dim)
        common = dict(zip(("batch", "heads", "length", "head_dim"), shape, strict=True)) | {"section": "op"}
        q, k, v, grad = (torch.randn(shape, device=device, dtype=DTYPES[options.dtype]) for _ in range(4))
        inputs = [x.requires_grad_() for x in (q, k, v)]
        left = seconds - (time.monotonic() - began)
        if place and left < 0:
            print(f"op: {length:,} tokens and more are skipped: --seconds is used up", file=sys.stderr)
            break
        # The remaining time is divided among the lengths in proportion to their tokens.
        share = max(0.0, left * length / sum(options.lengths[place:]))
        plain = [x.detach() for x in inputs]
        works: dict[str, Work] = {name: functools.partial(attend, *plain) for name, attend in attentions().items()}
        compare(rows, works, common, "forward", device, options.repetitions, 0.3 * share)
        ran = {row["contender"] for row in rows if row.items() >= common.items() and row["status"] == "ok"}
        works = {name: functools.partial(training_step, attend, inputs, grad)
                 for name, attend in attentions().items() if name in ran}  # fmt: skip
        compare(rows, works, common, "step", device, options.repetitions, 0.7 * share)
        log_progress("op", length)
    return rows


def run_decode(options: argparse.Namespace, device: torch.device, seconds: float) -> list[Row]:
    rows: list[Row] = []
    for length in options.lengths:
        batch = options.batch or (8 if device.type == "cuda" else 1)
        sizes: Any = {"dtype": DTYPES[options.dtype], "device": device}
        q = torch.randn(batch, options.heads, 1, options.head_dim, **sizes)
        k, v = (torch.randn(batch, options.heads, length, options.head_dim, **sizes) for _ in range(2))
        common = {"section": "decode", "batch": batch, "heads": options.heads, "length": length}
        common |= {"head_dim": options.head_dim}
        k = F.normalize(k.float(), dim=-1).to(k.dtype)
        with torch.no_grad():
            works = {name: functools.partial(attend, q, k, v) for name, attend in cached_attentions(length).items()}
            limits = (20 * options.repetitions, seconds / len(options.lengths))
            compare(rows, works, common, "forward", device, *limits)
        log_progress("decode", length)
    return rows


def run_model(options: argparse.Namespace, device: torch.device, seconds: float) -> list[Row]:
    from softplus_attention.huggingface import SoftplusGPTForCausalLM
    from softplus_attention.huggingface.loading import silence_transformers
    from softplus_attention.training.config import configured
    from softplus_attention.training.run import model_config

    silence_transformers()
    rows: list[Row] = []
    works: dict[str, Work] = {}
    common: Row = {"section": "model", "preset": options.preset}
    for attention, power in MODELS.items():
        changes = {"data": "", "output": "", "attention": attention, "power": power}
        config = configured({k: v for k, v in changes.items() if v is not None}, preset=options.preset)
        model = SoftplusGPTForCausalLM(model_config(config, 1024, None)).to(device, DTYPES[options.dtype])
        ids = torch.randint(1024, (8, config.sequence_length), device=device)
        common |= {"batch": 8, "length": config.sequence_length, "parameters": model.num_parameters()}
        common |= {"heads": config.heads, "head_dim": config.width // config.heads}
        works[BASELINE if attention == "softmax" else "lssar learned"] = functools.partial(model_step, model, ids)
    compare(rows, works, common, "step", device, options.repetitions, seconds)
    log_progress("model", common["length"])
    return rows


def model_step(model: Any, ids: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(model(input_ids=ids, labels=ids).loss, [*model.parameters()])


def log_progress(section: str, length: int) -> None:
    print(f"measured: {section}, {length:,} tokens", file=sys.stderr, flush=True)


SECTIONS: dict[str, Callable[[argparse.Namespace, torch.device, float], list[Row]]] = {
    "op": run_op, "decode": run_decode, "model": run_model,
}  # fmt: skip
TITLES = {
    "op": "The op: forward; forward and backward (step)", "decode": "Decode: one new token over a cache",
    "model": "Training step of a GPT",
}  # fmt: skip
COLUMNS = {"forward_ms": "forward ms", "step_ms": "step ms", "forward_mib": "forward MiB", "step_mib": "step MiB"}


def format_rows(rows: Sequence[Row], options: argparse.Namespace, device: torch.device) -> str:
    """A table for each section, with ratios to the baseline in parentheses."""
    where = (
        torch.cuda.get_device_name(device) if device.type == "cuda" else counted(torch.get_num_threads(), "CPU thread")
    )
    lines = [f"{options.dtype} on {where}, torch {torch.__version__}; in parentheses: relative to {BASELINE}"]
    for section in dict.fromkeys(row["section"] for row in rows):
        those = [row for row in rows if row["section"] == section]
        good = [row for row in those if row["status"] == "ok"]
        columns = [name for name in COLUMNS if any(name in row for row in good)]
        shape = f"H={those[0]['heads']} D={those[0]['head_dim']}"
        if section == "model":
            shape = f"`{options.preset}`, {those[0]['parameters'] / 1e6:.1f}M parameters, {shape}"
        lines += ["", f"{TITLES[section]}, {shape}", ""]
        body = [[f"{row['batch']} x {row['length']:,}", row["contender"],
                 *(cell(row, name, good) for name in columns)] for row in good]  # fmt: skip
        lines += aligned([["B x T", "attention", *(COLUMNS[name] for name in columns)], *body])
        failed = {row["contender"]: row["error"] for row in those if row["status"] != "ok"}
        lines += [f"not measured: {name}: {reason}" for name, reason in failed.items()]
    return "\n".join(lines)


def cell(row: Row, name: str, rows: Sequence[Row]) -> str:
    if name not in row:
        return ""
    same = (x for x in rows if x["contender"] == BASELINE and x["length"] == row["length"])
    base = next((x.get(name) for x in same), None)
    ratio = f" ({row[name] / base:.2f})" if base else ""
    return f"{row[name]:.3g}{ratio}" if row[name] < 1000 else f"{row[name]:.0f}{ratio}"


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(word.rjust(width) if column != 1 else word.ljust(width)
                        for column, (word, width) in enumerate(zip(row, widths, strict=True))).rstrip()  # fmt: skip


def charts(rows: Sequence[Row]) -> list[LineChart]:
    from softplus_attention.charts.model import LineChart, Series, SeriesStyles

    styles, found = SeriesStyles(), []
    titles = {("op", "step_ms"): "Forward and backward", ("op", "step_mib"): "Memory of forward and backward",
              ("op", "forward_ms"): "Forward", ("decode", "forward_ms"): "Decode step"}  # fmt: skip
    for (section, name), title in titles.items():
        those = [row for row in rows if row["section"] == section and name in row]
        lengths = sorted({row["length"] for row in those})
        cells = {(row["contender"], row["length"]): row[name] for row in those}
        series = [Series(who, lengths, [cells.get((who, n)) for n in lengths], look=styles.of(who))
                  for who in dict.fromkeys(row["contender"] for row in those)]  # fmt: skip
        if series:
            unit = "MiB" if name.endswith("mib") else "ms"
            found.append(LineChart(title, "length (tokens)", unit, series, x_scale="log2", y_scale="log"))
    return found


def draw(rows: Sequence[Row], path: Path) -> list[Path]:
    if find_spec("matplotlib") is None:
        print("the figure is skipped: matplotlib is not installed (pip install 'softplus-attention[plots]')",
              file=sys.stderr)  # fmt: skip
        return []
    from softplus_attention.charts.draw import draw as draw_charts

    drawn = charts(rows)
    return draw_charts(drawn, path, columns=2) if drawn else []
