"""Tables of docs/performance.md, huggingface.md and serving.md, from the results of the programs in benchmarks/."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.tables.markdown import TableError, hundredths, read_results, table, table_by_cells, value_range

ATTENTION, CPU, TRAINING = "attention-h200.json", "cpu.json", "training-h200.json"
DECODE_GPU, DECODE_CPU, SERVING = "decode-h200.json", "decode-cpu.json", "serving-cpu.json"
DECODE_OP_CPU = "decode-op-cpu.json"
OURS, BASELINE, FASTEST = "lssar p=15", "sdpa flash", "sdpa cudnn"
LEARNED, STAGE_1, UNIT_KEYS = "lssar learned", "lssa", "lssar p=15 unit keys"
SHOWN_IN_DECODE = (FASTEST, BASELINE, "flex softmax", UNIT_KEYS, OURS)
SHORT, LONG, LONG_CACHE = 1024, 4096, 32768
NAMES = {
    "sdpa flash": "SDPA, FlashAttention-2",
    "sdpa cudnn": "SDPA, cuDNN",
    "flex softmax": "FlexAttention, softmax",
    "flex lssar p=15": "FlexAttention, LSSAR in two passes, forward only",
    "lssar p=15": "LSSAR, p = 15",
    "lssar p=3": "LSSAR, p = 3",
    "lssar learned": "LSSAR, learned powers",
    "lssar p=15 without offset": "LSSAR, p = 15, `offset=False`",
    "lssar learned without offset": "LSSAR, learned powers, `offset=False`",
    "lssa": "LSSA",
    "lssar p=15 compiled": "LSSAR, p = 15, compiled",
    "reference p=15": "reference, eager",
    "reference compiled": "reference, compiled",
    "lssar p=15 unit keys": "LSSAR, p = 15, cache of unit keys",
}
IN_DECODE = NAMES | {"lssar p=15": "LSSAR, p = 15, cache of raw keys"}
Row = dict[str, Any]


def read_attention(results: Path) -> list[Row]:
    """The rows that did not fail."""
    rows = read_results(results / ATTENTION, "benchmarks/attention.py")["rows"]
    return [row for row in rows if row["status"] == "ok"]


def select(
    rows: Sequence[Row],
    contender: str,
    section: str = "train",
    *,
    head_dim: int | None = None,
    length: int | None = None,
    least: int = 0,
) -> list[Row]:
    """The matching rows, sorted by head dimension and length; raises an error if there are none."""
    found = [
        row
        for row in rows
        if (row["section"], row["contender"]) == (section, contender)
        and head_dim in (None, row["head_dim"])
        and length in (None, row["length"])
        and row["length"] >= least
    ]
    if not found:
        raise TableError(f"{ATTENTION} has no row of {contender} in the section {section}")
    return sorted(found, key=lambda row: (row["head_dim"], row["length"]))


def number(x: float | None) -> str:
    if x is None:
        return ""
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def times(row: Row | None) -> str:
    if row is None:
        return ""
    return " / ".join(number(row[name]) for name in ("forward_ms", "backward_ms") if row.get(name) is not None)


def ratio(row: Row | None) -> str:
    return "" if row is None else f"{row.get('ratio', row['forward_ratio']):.2f}"


def by_length(rows: Sequence[Row], section: str, head_dim: int = 64) -> str:
    """One row per contender, columns by length: times, and the ratio to FlashAttention-2."""
    found = {
        (row["contender"], row["length"]): row
        for row in rows
        if (row["section"], row["head_dim"]) == (section, head_dim)
    }
    shown = [name for name in NAMES if any(contender == name for contender, _ in found)]
    lengths = sorted({length for _, length in found})
    if not lengths:
        raise TableError(f"{ATTENTION} has no rows in the section {section}")
    columns, head = [[NAMES[name] for name in shown]], [""]
    for length in lengths:
        head += [f"T = {length}", "ratio"]
        columns += [[cell(found.get((name, length))) for name in shown] for cell in (times, ratio)]
    head.append(f"step MiB, T = {lengths[0]}")
    columns.append([number(found.get((name, lengths[0]), {}).get("step_mib")) for name in shown])
    return table(head, columns)


def decode_table(rows: Sequence[Row]) -> str:
    found = {name: select(rows, name, "decode") for name in SHOWN_IN_DECODE}
    columns = [[IN_DECODE[name] for name in found]]
    for cells in zip(*found.values(), strict=True):
        columns.append([f"{number(row['forward_ms'])} ({row['forward_ratio']:.2f})" for row in cells])
    return table(["", *(f"{row['length']:,}" for row in found[OURS])], columns)


@dataclass(frozen=True)
class Goal:
    """Some measured ratios, with a limit and a goal for the highest of them."""

    name: str
    ratios: list[float]
    limit: float
    goal: float

    @property
    def met(self) -> str:
        return "goal" if max(self.ratios) <= self.goal else "yes" if max(self.ratios) <= self.limit else "no"


def column(rows: Sequence[Row], name: str) -> list[float]:
    return [row[name] for row in rows]


def training_goals(rows: Sequence[Row], section: str = "train") -> list[Goal]:
    def of(contender: str, name: str, **place: int) -> list[float]:
        return column(select(rows, contender, section, **place), name)

    return [
        *(
            Goal(f"LSSAR forward + backward, D = {d}, T from {LONG}", of(OURS, "ratio", head_dim=d, least=LONG), *ends)
            for d, *ends in ((128, 1.3, 0.95), (64, 1.6, 1.15))
        ),
        Goal(f"the same at T = {SHORT}, both D", of(OURS, "ratio", length=SHORT), 1.7, 1.4),
        *(
            Goal(f"LSSAR forward alone, D = {d}, all T", of(OURS, "forward_ratio", head_dim=d), *ends)
            for d, *ends in ((128, 1.3, 0.9), (64, 1.6, 1.2))
        ),
        *(
            Goal(f"LSSA forward, D = {d}, all T", of(STAGE_1, "forward_ratio", head_dim=d), 0.85, 0.7)
            for d in (128, 64)
        ),
        Goal("memory of a training step", of(OURS, "step_ratio"), 1.5, 1.3),
    ]


def other_goals(rows: Sequence[Row]) -> list[Goal]:
    cached = column(select(rows, UNIT_KEYS, "decode", least=LONG_CACHE), "forward_ratio")
    compiled = select(rows, "reference compiled", "compile")
    shares = []
    for row in compiled:
        ours = select(rows, OURS, head_dim=row["head_dim"], length=row["length"])[0]
        # Per sequence: the reference may need a smaller batch.
        shares.append((ours["total_ms"] / ours["batch"]) / (row["total_ms"] / row["batch"]))
    lengths = ", ".join(str(row["length"]) for row in compiled)
    return [
        Goal("decode from 32K keys, unit keys / the fastest SDPA", cached, 1.2, 0.9),
        Goal(f"LSSAR forward + backward / compiled reference, T = {lengths}", shares, 0.2, 0.1),
    ]


def goals_table(rows: Sequence[Row]) -> str:
    on_a_model = {goal.name: value_range(goal.ratios, hundredths) for goal in training_goals(rows, "trained")}
    cells: dict[str, Callable[[Goal], str]] = {
        "": lambda goal: goal.name,
        "measured": lambda goal: value_range(goal.ratios, hundredths),
        "on a trained model's inputs": lambda goal: on_a_model.get(goal.name, ""),
        "limit": lambda goal: f"{goal.limit:g}",
        "goal": lambda goal: f"{goal.goal:g}",
        "met": lambda goal: goal.met,
    }
    return table_by_cells([*training_goals(rows), *other_goals(rows)], cells)


def host_table(rows: Sequence[Row]) -> str:
    """Host time (Python and launches) per call, over all head dimensions and lengths."""
    shown = (BASELINE, OURS, LEARNED)
    columns = [[NAMES[name] for name in shown]]
    for key in ("forward_host_ms", "backward_host_ms"):
        columns.append([value_range(column(select(rows, name), key), hundredths) for name in shown])
    return table(["host time, ms", "forward", "backward"], columns)


CPU_SETTINGS = {
    "p15": "p = 15",
    "learned": "learned factors of log N",
    "lssa": "LSSA",
    "window": "p = 15, window of 512",
}


def cpu_time_table(rows: Sequence[Row]) -> str:
    """Ratios to SDPA of the C++ kernels and, in parentheses, of PyTorch operations."""
    found = {(row["setting"], row["direction"], row["threads"], row["length"]): row for row in rows}
    places = sorted({place[2:] for place in found}, reverse=True, key=lambda place: (place[0], -place[1]))
    lines = list(dict.fromkeys(place[:2] for place in found))
    columns = [[f"{CPU_SETTINGS[setting]}, {direction.replace('+', ' + ')}" for setting, direction in lines]]
    for place in places:
        cells = [found.get((*line, *place)) for line in lines]
        columns.append([f"{x['native_ratio']:.2f} ({x['torch_ratio']:.2f})" if x else "" for x in cells])
    return table(["", *(f"T = {length}, {threads} thread{'s' * (threads > 1)}" for threads, length in places)], columns)


def cpu_half_table(rows: Sequence[Row]) -> str:
    cells: dict[str, Callable[[Row], str]] = {
        "": lambda row: f"{CPU_SETTINGS[row['setting']]}, {row['direction'].replace('+', ' + ')}",
        "T": lambda row: str(row["length"]),
        "bfloat16 ms": lambda row: f"{row['native_ms']:.1f}",
        "float32 ms": lambda row: f"{row['float32_ms']:.1f}",
        "ratio": lambda row: hundredths(row["ratio"]),
        "PyTorch's operations ms": lambda row: f"{row['torch_ms']:.1f}",
        "SDPA ms": lambda row: f"{row['sdpa_ms']:.1f}",
    }
    return table_by_cells(rows, cells)


def cpu_packed_table(rows: Sequence[Row]) -> str:
    cells: dict[str, Callable[[Row], str]] = {
        "threads": lambda row: str(row["threads"]),
        "": lambda row: row["direction"].replace("+", " + "),
        "packed ms": lambda row: f"{row['native_ms']:.1f}",
        "one document ms": lambda row: f"{row['whole_ms']:.1f}",
        "visible pairs, relative": lambda row: f"{100 * row['pairs']:.0f}%",
        "time per pair, relative": lambda row: hundredths(row["ratio"]),
    }
    return table_by_cells(rows, cells)


def cpu_memory_table(rows: Sequence[Row]) -> str:
    """In MiB; the reference is not measured at every length."""
    found = {(row["implementation"], row["direction"], row["length"]): row["bytes"] for row in rows}
    lengths = sorted({length for *_, length in found})
    head, columns = ["T"], [[str(length) for length in lengths]]
    names = {"native": "C++", "torch": "PyTorch's operations", "sdpa": "SDPA", "reference": "reference"}
    for implementation, name in names.items():
        for direction in ("forward", "forward+backward"):
            head.append(f"{name}, {direction.replace('+', ' + ')}")
            sizes = [found.get((implementation, direction, length)) for length in lengths]
            columns.append(["" if size is None else f"{size / 2**20:.1f}" for size in sizes])
    return table(head, columns)


def training_table(rows: Sequence[Row]) -> str:
    names = {"softmax": "softmax (SDPA)", "lssar": "LSSAR, power 15"}
    cells: dict[str, Callable[[Row], str]] = {
        "attention": lambda row: names[row["attention"]],
        "step": lambda row: f"{row['step_ms']:.1f} ms",
        "tokens/s": lambda row: f"{row['tokens_per_second']:,.0f}",
        "MFU": lambda row: f"{100 * row['mfu']:.1f}%",
        "MFU, causal half": lambda row: f"{100 * row['mfu_causal']:.1f}%",
        "memory": lambda row: f"{row['peak_memory_gib']:.1f} GiB",
        "relative to softmax": lambda row: hundredths(row["time_to_softmax"]),
    }
    return table_by_cells(rows, cells)


def token_table(rows: Sequence[Row]) -> str:
    """Milliseconds per generated token on a GPU."""
    found = {(row["way"], row["model"], row["batch"], row["context"]): row for row in rows}
    places = [place for way, *place in found if way == "graph"]
    head = ["model", "batch", "context"]
    columns = [[str(model) for model, *_ in places], [str(batch) for _, batch, _ in places]]
    columns.append([f"{context:,}" for *_, context in places])
    for way in ("graph", "eager"):
        chosen = [found[way, *place] for place in places]
        head += [f"softmax, {way}", f"LSSAR, {way}", "ratio"]
        columns += [[hundredths(row[key]) for row in chosen] for key in ("softmax", "lssar", "ratio")]
    return table(head, columns)


def token_table_cpu(rows: Sequence[Row]) -> str:
    cells: dict[str, Callable[[Row], str]] = {
        "context": lambda row: f"{row['context']:,}",
        "softmax ms": lambda row: f"{row['softmax']:.0f}",
        "LSSAR ms": lambda row: f"{row['lssar']:.0f}",
        "ratio": lambda row: hundredths(row["ratio"]),
    }
    return table_by_cells(rows, cells)


def decode_op_table(rows: Sequence[Row]) -> str:
    """Microseconds per decode step of the op on a CPU."""
    powers = {"learned": "learned", "15": "p = 15"}
    cells: dict[str, Callable[[Row], str]] = {
        "keys": lambda row: f"{row['keys']:,}",
        "dtype": lambda row: row["dtype"],
        "requests": lambda row: str(row["batch"]),
        "query heads per key head": lambda row: str(row["heads_per_key_head"]),
        "power": lambda row: powers[row["power"]],
        "cache": lambda row: "unit keys" if row["unit_keys"] else "raw keys",
        "LSSAR us": lambda row: f"{row['lssar_us']:,.0f}",
        "SDPA us": lambda row: f"{row['softmax_us']:,.0f}",
        "ratio": lambda row: hundredths(row["ratio"]),
        "values read": lambda row: f"{row['read']:.0%}",
        "error / limit": lambda row: hundredths(row["error"] / row["limit"]),
    }
    return table_by_cells(sorted(rows, key=lambda row: (row["dtype"] != "float32", row["keys"])), cells)


def serving_table(rows: Sequence[Row]) -> str:
    """Generated tokens per second on a CPU."""
    cells: dict[str, Callable[[Row], str]] = {
        "through": lambda row: {"vllm": "vLLM"}.get(row["way"], f"{row['way']} cache"),
        "requests": lambda row: str(row["batch"]),
        "context": lambda row: f"{row['context']:,}",
        "softmax": lambda row: hundredths(row["softmax"]),
        "LSSAR": lambda row: hundredths(row["lssar"]),
        "ratio": lambda row: hundredths(row["ratio"]),
    }
    return table_by_cells(rows, cells)


def make_tables(results: Path) -> dict[str, str]:
    rows = read_attention(results)
    cpu = read_results(results / CPU, "benchmarks/cpu.py")
    training, on_gpu, on_cpu, op_on_cpu, serving = (
        read_results(results / file, f"benchmarks/{program}.py")["rows"]
        for file, program in (
            (TRAINING, "training"),
            (DECODE_GPU, "decode"),
            (DECODE_CPU, "decode"),
            (DECODE_OP_CPU, "cpu_decode"),
            (SERVING, "serving"),
        )
    )
    return {
        "attention-d64": by_length(rows, "train", 64),
        "attention-d128": by_length(rows, "train", 128),
        "attention-host": host_table(rows),
        "attention-compiled": by_length(rows, "compile"),
        "attention-goals": goals_table(rows),
        "attention-trained-d64": by_length(rows, "trained", 64),
        "attention-trained-d128": by_length(rows, "trained", 128),
        "attention-decode": decode_table(rows),
        "cpu-time": cpu_time_table(cpu["time"]),
        "cpu-half": cpu_half_table(cpu["half"]),
        "cpu-packed": cpu_packed_table(cpu["packed"]),
        "cpu-memory": cpu_memory_table(cpu["memory"]),
        "training-times": training_table(training),
        "decode-gpu": token_table(on_gpu),
        "decode-cpu": token_table_cpu(on_cpu),
        "decode-op-cpu": decode_op_table(op_on_cpu),
        "serving-cpu": serving_table(serving),
    }
