"""The tables of docs/extend.md, from results of experiments/extend/ and benchmarks/extend.py."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tools.tables.markdown import TableError, plain, read_results, signed, table

PROGRAM = "experiments/extend/measure.py"
LENGTHS = (2048, 4096, 8192, 16384, 32768, 65536)
NAMES = {
    "original": "original model",
    "yarn:factor=4": "YaRN 4",
    "yarn:factor=8": "YaRN 8",
    "ntk": "dynamic NTK",
    "selfextend": "SelfExtend, configured for 64K",
    "selfextend:length=16384": "SelfExtend, configured for 16K",
    "rerope": "ReRoPE",
    "window": "StreamingLLM, window 4,096",
    "duo": "DuoAttention's split, 24 heads unchanged",
    "duo:heads=all": "original model, our cache",
}
OURS = ("heads:level=yes,log_n=far", "heads:far=group,near=2048")
SHORT = ("original", "yarn:factor=4", "yarn:factor=8", "selfextend", "rerope", "window", *reversed(OURS))
KINDS = ("novel", "essay", "scripture", "manual")


def format_method(method: str) -> str:
    if method in NAMES:
        return NAMES[method]
    kind, _, given = method.partition(":")
    settings = dict(pair.split("=") for pair in given.split(",") if pair)
    if kind == "rerope":
        parts = ["ReRoPE"]
    else:
        far = settings.pop("far", "clip")
        heads = settings.pop("heads", "12")
        parts = [f"{heads} far heads, {'LSSAR' if far == 'lssar' else far}"]
    text = {"near": "exact to {}", "window": "window {}", "fit": "fitted to {} tokens", "factor": "YaRN {}"}
    text["ranking"] = "ranked by {} alone"
    for key, value in settings.items():
        if key == "level":
            parts.append("levelled")
        elif key == "log_n":
            parts.append("log N on all keys" if value == "all" else "log N on the far keys")
        else:
            parts.append(text[key].format(f"{int(value):,}" if value.isdigit() else value))
    return f"**{', '.join(parts)}**" if method in OURS else ", ".join(parts)


def merged(files: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for file in files:
        for method, own in file["methods"].items():
            mine = found.setdefault(method, {"loss": {}, "cache_bytes": {}})
            mine["loss"] |= own["loss"]
            mine["cache_bytes"] |= own["cache_bytes"]
    return found


def mean_cell(values: list[float]) -> str:
    return plain(statistics.fmean(values)) if values else "-"


def difference(ours: list[float], theirs: list[float]) -> str:
    """The mean difference on the same documents, with its standard error."""
    each = [x - y for x, y in zip(ours, theirs, strict=True)]
    return f"{signed(statistics.fmean(each))} ± {plain(statistics.stdev(each) / len(each) ** 0.5)}"


def cache_share(methods: dict[str, dict[str, Any]], method: str) -> str:
    """The cache at 64K relative to that of the original model."""
    size = methods[method]["cache_bytes"].get("65536")
    return "-" if size is None else f"{100 * size / methods['original']['cache_bytes']['65536']:.0f}%"


def context_table(methods: dict[str, dict[str, Any]], long: int) -> str:
    rows = [(method, own) for method, own in methods.items() if own["loss"]]
    columns = [[format_method(method) for method, _ in rows]]
    for length in LENGTHS:
        columns.append([mean_cell(own["loss"].get(str(length), [])[:long]) for _, own in rows])
    columns.append([cache_share(methods, method) for method, _ in rows])
    head = ["loss at", *(f"{length // 1024}K" for length in LENGTHS), "cache at 64K"]
    return table(head, columns)


def short_table(methods: dict[str, dict[str, Any]], files: list[dict[str, Any]], long: int) -> str:
    """The main rows; needles with ten per haystack, which were measured for all methods."""
    asked = {
        method: own["needles"]
        for file in files
        if file["needles"] == 10
        for method, own in file["methods"].items()
        if own["needles"]
    }
    columns = [[format_method(method) for method in SHORT]]
    for length in (2048, 16384, 65536):
        columns.append([mean_cell(methods[method]["loss"].get(str(length), [])[:long]) for method in SHORT])
    for length in (8192, 16384, 32768):
        columns.append([found_cell(asked.get(method, {}).get(str(length), [])) for method in SHORT])
    columns.append([cache_share(methods, method) for method in SHORT])
    losses = [f"loss at {length}K" for length in (2, 16, 64)]
    return table(["", *losses, "found at 8K, %", "at 16K, %", "at 32K, %", "cache at 64K"], columns)


def readme_table(methods: dict[str, dict[str, Any]], cost: dict[str, Any], long: int) -> str:
    shown = ("original", "yarn:factor=8", "selfextend", "window", OURS[1])
    columns = [["**`extend --heads 12`**" if method == OURS[1] else format_method(method) for method in shown]]
    for length in (8192, 65536):
        columns.append([mean_cell(methods[method]["loss"][str(length)][:long]) for method in shown])
    columns.append([cache_share(methods, method) for method in shown])
    # The cache of transformers is copied at every token, so the original model is timed with our cache.
    speed = (cost["decode"]["65536"].get("duo:heads=all" if method == "original" else method) for method in shown)
    columns.append(["" if row is None else f"{row['tokens_per_second']:.1f}" for row in speed])
    head = ["at 64K, trained at 8K", "loss at 8K", "loss", "cache", "tokens/s in our cache, one CPU core"]
    return table(head, columns)


def found_cell(asked: list[dict[str, Any]]) -> str:
    hits = [hit for one in asked for hit in one["found"]]
    if not hits:
        return "-"
    share = statistics.fmean(hits)
    return f"{100 * share:.0f} ± {100 * (share * (1 - share) / len(hits)) ** 0.5:.0f}"


def needles_table(files: list[dict[str, Any]]) -> str:
    rows = [(file["needles"], method, own["needles"]) for file in files for method, own in file["methods"].items()]
    rows = [row for row in rows if row[2]]
    columns = [[format_method(method) for _, method, _ in rows], [str(count) for count, _, _ in rows]]
    for length in LENGTHS:
        columns.append([found_cell(asked.get(str(length), [])) for _, _, asked in rows])
    return table(["found, %", "needles per haystack", *(f"{length // 1024}K" for length in LENGTHS)], columns)


def paired_table(methods: dict[str, dict[str, Any]], ours: str, long: int) -> str:
    rivals = ["original", "yarn:factor=4", "yarn:factor=8", "selfextend", "rerope"]
    columns = [[f"minus {format_method(rival)}" for rival in rivals]]
    for length in map(str, LENGTHS):
        mine = methods[ours]["loss"][length][:long]
        columns.append([difference(mine, methods[rival]["loss"][length][:long]) for rival in rivals])
    return table([format_method(ours), *(f"{length // 1024}K" for length in LENGTHS)], columns)


def kinds_table(methods: dict[str, dict[str, Any]], documents: list[dict[str, Any]], chosen: list[str]) -> str:
    """Loss at 32K by kind of document, over all documents of that length."""
    columns = [[f"{kind} ({sum(one['kind'] == kind for one in documents)})" for kind in KINDS]]
    for method in chosen:
        losses = methods[method]["loss"]["32768"]
        by_kind = {kind: [x for x, one in zip(losses, documents, strict=True) if one["kind"] == kind] for kind in KINDS}
        columns.append([mean_cell(by_kind[kind]) for kind in KINDS])
    return table(["loss at 32K", *map(format_method, chosen)], columns)


def tasks_table(paths: Iterable[Path], models: Sequence[str], names: Sequence[str]) -> str:
    """Accuracy on short tasks, in percent with standard errors, of each of ``models``."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for path in sorted(paths):
        result = read_results(path, "softplus-attention evaluate downstream")
        rows = {row["task"]: row for row in result["results"]["tasks"] if row["metric"] == "acc"}
        found.setdefault(result["model"]["name"], {}).update(rows)
    columns: list[list[str]] = [[], [], [], *([] for _ in models)]
    for task, row in found[models[0]].items():
        if task.startswith("mmlu_"):
            continue
        parts = [one["samples"] or 0 for name, one in found[models[0]].items() if name.startswith(f"{task}_")]
        columns[0].append(task)
        columns[1].append(f"{row['samples'] or sum(parts):,}")
        columns[2].append(f"{100 * row['chance']:.0f}")
        for column, model in zip(columns[3:], models, strict=True):
            own = found[model][task]
            column.append(f"{100 * own['value']:.1f} ± {100 * own['standard_error']:.1f}")
    return table(["accuracy, %", "questions", "chance", *names], columns)


def read_cost(path: Path) -> dict[str, Any]:
    """The file's header, and its measurements by section, tokens and model."""
    found = read_results(path, "benchmarks/extend.py")
    sections: dict[str, dict[str, dict[str, Any]]] = {"decode": {}, "prefill": {}}
    for row in found["rows"]:
        sections[row["section"]].setdefault(str(row["tokens"]), {})[row["model"]] = row
    return found | sections


def cost_table(found: dict[str, Any]) -> str:
    lines: list[list[str]] = [[], [], [], [], [], []]
    for length in sorted({*found["decode"], *found["prefill"]}, key=int):
        prefills = found["prefill"].get(length, {})
        for name in {**found["decode"].get(length, {}), **prefills}:
            row, own = found["decode"].get(length, {}).get(name), prefills.get(name)
            part = "" if own is None or "layers" not in own else f" for {own['layers']} layers"
            lines[0].append(f"{int(length):,}")
            lines[1].append(format_method(name))
            lines[2].append("-" if row is None else f"{row['cache_bytes'] / 2**20:,.0f} MiB")
            lines[3].append("-" if row is None else f"{row['tokens_per_second']:.1f}")
            lines[4].append("-" if own is None else f"{own['seconds']:.0f} s{part}")
            lines[5].append("-" if own is None or part else f"{own['peak_bytes'] / 2**20:,.0f} MiB")
    about = (
        f"{found['machine']['cpu']}, {found['threads']} thread{'s' if found['threads'] > 1 else ''}, "
        f"{found['time']} time, {found['dtype']}, torch {found['versions']['torch']}, {found['commit'][:7]}."
    )
    head = ["tokens", "model", "cache", "decode, tokens/s", "prefill", "peak memory of a prefill"]
    return table(head, lines) + f"\n\n{about}"


def gpu_table(path: Path) -> str:
    found = read_results(path, PROGRAM)
    rows = [(int(n), name, own) for name, by in found["methods"].items() for n, own in by["speed"].items()]
    rows.sort(key=lambda row: row[0])
    columns = [[f"{length:,}" for length, _, _ in rows], [format_method(name) for _, name, _ in rows]]
    columns.append([f"{own['tokens_per_second']:.1f}" for *_, own in rows])
    columns.append([f"{own['prefill_seconds']:.2f} s" for *_, own in rows])
    columns.append([f"{own['peak_bytes'] / 2**20:,.0f} MiB" for *_, own in rows])
    about = f"{found['machine']['gpu']}, {found['dtype']}, torch {found['versions']['torch']}, {found['commit'][:7]}."
    return table(["tokens", "model", "decode, tokens/s", "prefill", "peak memory"], columns) + f"\n\n{about}"


def make_tables(results: Path) -> dict[str, str]:
    folder = results / "extend"
    files = [read_results(path, PROGRAM) for path in sorted(folder.glob("context-*.json"))]
    if not files:
        raise TableError(f"{folder} has no context-*.json: {PROGRAM} writes them")
    methods, documents = merged(files), files[0]["documents"]
    long = sum(one["tokens"] >= LENGTHS[-1] for one in documents)
    best = OURS[1]
    cost = read_cost(folder / "cpu.json")
    return {
        "extend-readme": readme_table(methods, cost, long),
        "extend-short": short_table(methods, files, long),
        "extend-context": context_table(methods, long),
        "extend-paired": paired_table(methods, best, long),
        "extend-needles": needles_table(files),
        "extend-kinds": kinds_table(methods, documents, ["yarn:factor=4", "selfextend", "rerope", "heads", best]),
        "extend-cost": cost_table(cost),
        "extend-tasks": tasks_table(
            folder.glob("downstream--*.json"), ("smollm2", "extended"), ("original model", "extended")
        ),
        "tasks-bytes": tasks_table([results / "downstream--bytes-2.7m.json"], ["bytes-2.7m"], ["bytes-2.7m"]),
        "extend-gpu": gpu_table(folder / "speed-h200.json"),
    }
