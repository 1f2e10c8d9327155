"""The results file of benchmarks/attention.py: its header, its table, and its figures as SVG and PNG.

python benchmarks/figures.py results/attention.json            draws into docs/figures (needs matplotlib)
python benchmarks/figures.py results/attention.json --table    prints the table again
python benchmarks/figures.py NEW.json --fill OLD.json --sections decode,compile
                                                               adds missing rows of these sections from another run
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
Row = dict[str, Any]
Data = dict[str, Any]
COLOURS = {"lssar p=15": "#c1272d", "lssar p=15 unit keys": "#e08e0b", "lssa": "#e08e0b", "sdpa flash": "#1f4e79"}
OTHERS = ("#5b8c5a", "#7a5195", "#8c8c8c", "#17a2b8", "#a0522d", "#444444")


def first_output(*command: str) -> str:
    """The first line that a command prints, or "unknown"."""
    try:
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=20)
        return result.stdout.strip().splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown"


def made_by(script: str, device: str, commit: str | None = None) -> Data:
    """The command, machine, versions and commit of a measurement."""
    import torch

    import softplus_attention
    from softplus_attention.utils import provenance

    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = "none"
    return {
        "command": provenance.command(script),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit or provenance.commit(),
        "machine": {
            "gpu": torch.cuda.get_device_name(0) if device == "cuda" else "none",
            "driver": first_output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
            "system": f"{platform.system()} {platform.machine()}",
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "triton": triton_version,
            "softplus_attention": softplus_attention.__version__,
        },
    }


def header(settings: Any, commit: str | None = None) -> Data:
    """The results of benchmarks/attention.py without rows."""
    return made_by("benchmarks/attention.py", settings.device, commit) | {
        "inputs": "random",
        "baseline": settings.baseline,
        "settings": dataclasses.asdict(settings) | {"dtype": str(settings.dtype).removeprefix("torch.")},
        "flops": "forward 4 B H D T^2 / 2, backward 2.5 times that, for every contender",
        "step_mib": "peak of forward and backward beyond q, k, v and the output's gradient; output and gradients count",
        "rows": [],
    }


def write(data: Data, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n")


def read(path: Path) -> Data:
    data = json.loads(path.read_text())
    if not isinstance(data, dict) or "rows" not in data:
        raise ValueError(f"{path} is not a results file of benchmarks/attention.py")
    return data


def rows_in(data: Data, *sections: str) -> list[Row]:
    return [row for row in data["rows"] if row["section"] in sections]


def find_baseline(data: Data, row: Row, name: str) -> Row | None:
    """The row that a ratio refers to: the softmax baseline of the same shape; for decode, the fastest torch SDPA."""
    peers = [x for x in data["rows"] if x.get(name) and x.get("length") == row.get("length")]
    if row["section"] == "decode":
        peers = [x for x in peers if x["section"] == "decode" and x["contender"].startswith("sdpa")]
        return min(peers, key=lambda x: x[name], default=None)
    peers = [x for x in peers if x["contender"] == data["baseline"] and x["head_dim"] == row.get("head_dim")]
    own = [x for x in peers if (x["section"], x.get("inputs")) == (row["section"], row.get("inputs"))]
    shared = [x for x in peers if x["section"] in ("train", "lengths") and row["section"] == "compile"]
    return (own or shared or [None])[0]


def derive(data: Data) -> None:
    """Adds TFLOP/s and ratios to the baseline; ratios are per sequence, so that different batch sizes compare."""
    for row in data["rows"]:
        if row.get("backward_ms"):
            row["total_ms"] = row["forward_ms"] + row["backward_ms"]
        for direction, share in (("forward", 1), ("backward", 2.5), ("total", 3.5)):
            if row.get(f"{direction}_ms") and row["section"] != "decode":
                flops = share * 2 * row["batch"] * row["heads"] * row["head_dim"] * row["length"] ** 2
                row[f"{direction}_tflops"] = flops / row[f"{direction}_ms"] / 1e9
    ratios = {
        "total_ms": "ratio",
        "forward_ms": "forward_ratio",
        "backward_ms": "backward_ratio",
        "step_mib": "step_ratio",
    }
    for row in data["rows"]:
        for name, ratio in ratios.items():
            base = find_baseline(data, row, name) if row.get(name) else None
            if base is not None:
                row[ratio] = (row[name] / row["batch"]) / (base[name] / base["batch"])


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"[:300]


def number(x: float | None, unit: str = "") -> str:
    if x is None:
        return "-"
    return (f"{x:,.0f}" if x >= 100 else f"{x:.3g}") + unit


def reason(row: Row, width: int = 60) -> str:
    return "" if row["status"] == "ok" else f"{row['status']}: {row['error']}"[:width].replace("|", "/")


def format_row(row: Row) -> str:
    """A row as a line of progress."""
    shape = " ".join(
        f"{short}={row[x]}" for x, short in (("head_dim", "D"), ("length", "T"), ("batch", "B")) if x in row
    )
    units = {"forward_ms": "ms forward", "backward_ms": "ms backward", "kept_mib": "MiB kept", "step_mib": "MiB step"}
    parts = [f"{number(row[name])} {unit}" for name, unit in units.items() if row.get(name) is not None]
    parts += [x for x in (row["note"], row.get("timing", ""), reason(row, 100)) if x]
    return f"{row['section']}: {row['contender']} {shape}: " + ", ".join(parts)


def grid(columns: list[str], lines: list[list[str]]) -> list[str]:
    rule = "|---|" + "---:|" * (len(columns) - 1)
    return ["| " + " | ".join(columns) + " |", rule, *("| " + " | ".join(line) + " |" for line in lines), ""]


def pivot(rows: list[Row], column: Callable[[Row], str], cell: Callable[[Row], str]) -> list[str]:
    """A table with one row per contender and one column per shape."""
    columns, names = (list(dict.fromkeys(f(row) for row in rows)) for f in (column, lambda row: row["contender"]))
    cells = {(row["contender"], column(row)): reason(row, 24) or cell(row) for row in rows}
    return grid(["", *columns], [[name, *(cells.get((name, x), "") for x in columns)] for name in names])


def training_tables(data: Data) -> list[str]:
    lines = []
    rows = rows_in(data, "train", "compile")
    for head_dim, length in sorted({(row["head_dim"], row["length"]) for row in rows}):
        group = [row for row in rows if (row["head_dim"], row["length"]) == (head_dim, length)]
        cells = []
        for row in group:
            name = row["contender"] + (f" ({row['note']})" if row["note"] else "")
            times = [number(row.get(f"{x}_ms")) for x in ("forward", "backward", "total")]
            speed = number(row.get("total_tflops", row.get("forward_tflops")))
            ratio = number(row.get("ratio", row.get("forward_ratio")))
            if row["status"] != "ok":
                times[1 if "forward_ms" in row else 0] = reason(row)
            cells.append([name, *times, speed, ratio, number(row.get("step_mib"))])
        lines.append(f"D={head_dim} T={length} H={group[0]['heads']} B={group[0]['batch']}")
        lines += grid(["", "forward ms", "backward ms", "both", "TFLOP/s", "ratio", "step MiB"], cells)
    return lines


def decode_cell(row: Row) -> str:
    ratio = f" ({number(row['forward_ratio'])})" if "forward_ratio" in row else ""
    return number(row["forward_ms"]) + ("" if row["timing"] == "cuda graph" else "*") + ratio


def table(data: Data) -> str:
    """All rows as Markdown, in at most 12,000 characters."""
    machine, versions = data["machine"], data["versions"]
    done = "" if data.get("complete") else "; not complete"
    lines = [
        f"{machine['gpu']}, torch {versions['torch']}, triton {versions['triton']}, {data['settings']['dtype']}, "
        f"causal, inputs {data['inputs']}; ratios are to {data['baseline']}, per sequence{done}",
        "",
        *training_tables(data),
    ]
    for about in dict.fromkeys(row["inputs"] for row in rows_in(data, "trained")):
        lines += [f"On q, k, v of a trained model ({about}): forward + backward ms (ratio)", ""]
        rows = [row for row in rows_in(data, "trained") if row["inputs"] == about]
        cell = lambda row: f"{number(row['total_ms'])} ({number(row.get('ratio'))})"  # noqa: E731
        lines += pivot(rows, lambda row: f"D={row['head_dim']} T={row['length']}", cell)
    if rows := rows_in(data, "lengths"):
        lines += ["Against T at D=64: forward + backward ms (step MiB)", ""]
        lines += pivot(rows, lambda r: f"{r['length']}", lambda r: f"{number(r['total_ms'])} ({number(r['step_mib'])})")
    for row in rows_in(data, "million"):
        finite = "finite" if row.get("finite") else "NOT finite"
        what = reason(row) or f"{number(row['forward_ms'], ' ms')}, {number(row['forward_mib'], ' MiB')}, {finite}"
        lines.append(f"forward of T={row['length']:,} (B=1 H=1 D=64) {row['contender']}: {what}")
    if rows := rows_in(data, "decode"):
        shape = " ".join(f"{x}={rows[0][y]}" for x, y in (("B", "batch"), ("H", "heads"), ("H_kv", "kv_heads")))
        lines += ["", f"Decode, one token over a cache, {shape} D={rows[0]['head_dim']}: ms (ratio to the best SDPA)"]
        lines += [
            "* without a CUDA graph" if any(x.get("timing", "cuda graph") != "cuda graph" for x in rows) else "",
            "",
        ]
        lines += pivot(rows, lambda row: f"{row['length']}", decode_cell)
    if rows := rows_in(data, "memory"):
        lines += ["Memory in MiB beyond inputs: forward without gradients / kept for the backward / training step", ""]
        sizes = ("forward_mib", "kept_mib", "step_mib")
        cell = lambda row: " / ".join(number(row.get(x)) for x in sizes)  # noqa: E731
        lines += pivot(rows, lambda row: f"D={row['head_dim']} T={row['length']}", cell)
    text = "\n".join(lines)
    return text if len(text) <= 12000 else text[:11900] + "\n... truncated; the JSON has all rows"


def fill(data: Data, earlier: Data, sections: Sequence[str]) -> None:
    """Adds shapes that are missing or incomplete in these sections from an earlier run.

    The rows keep the commit, date and ratios of the earlier run: no ratio mixes two runs.
    """
    for name in ("machine", "versions"):
        if data[name] != earlier[name]:
            raise ValueError(f"the earlier results differ in {name}: {earlier[name]}, not {data[name]}")
    for section in sections:
        if not (rows := rows_in(earlier, section)):
            raise ValueError(f"the earlier results have no rows of {section}")
        new, old = by_shape(rows_in(data, section)), by_shape([row for row in rows if row["status"] == "ok"])
        missing = {shape for shape in old if not old[shape] <= new.get(shape, set())}
        kept = [row for row in data["rows"] if row["section"] != section or row_shape(row) not in missing]
        origin = {"commit": earlier["commit"], "date": earlier["date"]}
        data["rows"] = [*kept, *({**origin, **row} for row in rows if row_shape(row) in missing)]


def row_shape(row: Row) -> tuple[int | None, int | None]:
    return row.get("head_dim"), row.get("length")


def by_shape(rows: Sequence[Row]) -> dict[tuple[int | None, int | None], set[str]]:
    """The contenders of each shape."""
    found: dict[tuple[int | None, int | None], set[str]] = {}
    for row in rows:
        found.setdefault(row_shape(row), set()).add(row["contender"])
    return found


def caption(data: Data, rows: Sequence[Row] = ()) -> str:
    gpu, versions = data["machine"]["gpu"], data["versions"]
    commits = dict.fromkeys(row.get("commit", data["commit"])[:12] for row in rows or [{}])
    return f"{gpu}, torch {versions['torch']}, triton {versions['triton']}, commit {', '.join(commits)}"


@dataclasses.dataclass(frozen=True)
class Figure:
    name: str
    title: str
    sections: tuple[str, ...]  # for each head dimension, the first section that has rows of it
    value: str
    axis: str
    across: str = "tokens T"


TRAINING = ("lengths", "train")
FIGURES = (
    Figure("attention-time", "Training step, causal", TRAINING, "total_ms", "forward + backward, ms"),
    Figure("attention-tflops", "Speed, causal", TRAINING, "total_tflops", "TFLOP/s, forward + backward"),
    Figure("attention-memory", "Memory of a training step", TRAINING, "step_mib", "MiB beyond the inputs"),
    Figure("decode-time", "Decode, one token per sequence", ("decode",), "forward_ms", "ms", "keys in the cache"),
)


def panels(figure: Figure, data: Data) -> dict[int, list[Row]]:
    """The rows to draw, by head dimension."""
    found: dict[int, list[Row]] = {}
    for section in figure.sections:
        rows = [row for row in rows_in(data, section) if row.get(figure.value) is not None]
        for head_dim in {row["head_dim"] for row in rows} - set(found):
            found[head_dim] = [row for row in rows if row["head_dim"] == head_dim]
    return dict(sorted(found.items()))


def draw(figure: Figure, data: Data, folder: Path, pyplot: Any) -> list[Path]:
    """One panel per head dimension, with a shared y axis; writes no file if there is nothing to draw."""
    shown = panels(figure, data)
    if not shown:
        return []
    # Time and memory of a batch that was reduced for memory are scaled to the full batch.
    canvas, all_axes = pyplot.subplots(
        1, len(shown), figsize=(6.4 * len(shown), 4.2), layout="constrained", sharey=True, squeeze=False
    )
    names = list(dict.fromkeys(row["contender"] for rows in shown.values() for row in rows))
    others = iter(OTHERS * 3)
    colours = {name: COLOURS.get(name) or next(others) for name in names}
    for axes, (head_dim, rows) in zip(all_axes[0], shown.items(), strict=True):
        batches = {
            length: max(x["batch"] for x in rows if x["length"] == length) for length in {x["length"] for x in rows}
        }
        for name in dict.fromkeys(row["contender"] for row in rows):
            points = []
            for row in sorted((x for x in rows if x["contender"] == name), key=lambda x: x["length"]):
                share = 1 if figure.value.endswith("tflops") else batches[row["length"]] / row["batch"]
                points.append((row["length"], row[figure.value] * share))
            ours = name.startswith("lss")
            style = {"color": colours[name], "linewidth": 2.2 if ours else 1.4, "linestyle": "-" if ours else "--"}
            axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=name, **style)
        axes.set_xscale("log", base=2)
        axes.set_yscale("linear" if figure.value.endswith("tflops") else "log")
        axes.set(xlabel=figure.across, title=f"{figure.title}, D={head_dim}, H={rows[0]['heads']}")
        lengths = sorted({row["length"] for row in rows})
        axes.set_xticks(lengths, [f"{x // 1024}K" if x >= 1024 else str(x) for x in lengths])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize=8)
    all_axes[0][0].set_ylabel(figure.axis)
    tokens = "" if figure.sections == ("decode",) else f"B T = {data['settings']['tokens']:,} tokens; "
    drawn = [row for rows in shown.values() for row in rows]
    canvas.supxlabel(tokens + caption(data, drawn), fontsize=7, color="#666666")
    paths = [folder / f"{figure.name}.{kind}" for kind in ("svg", "png")]
    for path in paths:
        canvas.savefig(path, dpi=160, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(canvas)
    return paths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="?", default=ROOT / "results" / "attention.json")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "figures", help="the folder to draw into")
    parser.add_argument("--table", action="store_true", help="print the table and draw nothing")
    parser.add_argument(
        "--fill",
        type=Path,
        metavar="EARLIER",
        help="add missing rows of --sections from this file, and draw nothing",
    )
    parser.add_argument("--sections", help="with --fill: sections to fill, such as train,decode")
    chosen = parser.parse_args()
    if (chosen.fill is None) != (chosen.sections is None):
        parser.error("--fill and --sections must be given together")
    try:
        data = read(chosen.results)
        if chosen.fill is not None:
            fill(data, read(chosen.fill), chosen.sections.split(","))
            write(data, chosen.results)
            return
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if chosen.table:
        print(table(data))
        return
    try:
        import matplotlib
    except ImportError:
        sys.exit("figures need matplotlib: python -m pip install matplotlib")
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "softplus-attention"
    from matplotlib import pyplot

    chosen.output.mkdir(parents=True, exist_ok=True)
    for figure in FIGURES:
        paths = draw(figure, data, chosen.output, pyplot)
        print(*(paths or [f"{figure.name}: the results have no such rows"]), sep="\n")


if __name__ == "__main__":
    main()
