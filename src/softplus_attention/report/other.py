"""Sections for the demo, the Newton experiment and the speed tables, and the record of every run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from softplus_attention.charts.model import LineChart, Series, SeriesStyles, Table, shown
from softplus_attention.report.reading import (
    Result,
    ResultSet,
    UnreadableError,
    count_of,
    is_numbers,
    is_table,
    mapping,
    number,
    number_of,
    numbers_of,
    rows_of,
    text_of,
    typed,
)
from softplus_attention.report.sections import Block, Picture, checked
from softplus_attention.utils import untrusted

LARGEST_PICTURE = 4 << 20
PNG = b"\x89PNG\r\n\x1a\n"


DEMO_CAPTION = (
    "Models that differ in their attention alone, on the same works cut to longer and longer pieces{}. A flat line "
    "does not show by itself that the long context is used: the same tokens would have to be harder without it."
)


def demo_blocks(found: ResultSet, styles: SeriesStyles) -> list[Block]:
    return list(checked(found, "demo", lambda r: demo_chart(r.data, f"Demo: loss by length ({r.path})", styles)))


def demo_chart(data: dict[str, Any], title: str, styles: SeriesStyles) -> LineChart:
    lengths = numbers_of(data, "lengths")
    if not lengths or any(length is None or length <= 0 for length in lengths):
        raise UnreadableError("`lengths` must be numbers above 0")
    places = [length for length in lengths if length is not None]
    losses, errors = mapping(data, "loss"), data.get("standard_error")
    series = []
    for name in losses:
        values = numbers_of(losses, name)
        bars = numbers_of(errors, name) if isinstance(errors, dict) and name in errors else None
        if len(values) != len(places) or (bars is not None and len(bars) != len(places)):
            raise UnreadableError(f"`loss` of {name} must have a number for each length")
        series.append(Series(name, places, values, bars, styles.of(name)))
    texts = f" ({data['texts']} texts from {data.get('documents')} works)" if data.get("texts") else ""
    return LineChart(
        title,
        "length (bytes)",
        "validation loss (nats)",
        series,
        DEMO_CAPTION.format(texts),
        x_scale="log2",
        times_of=places[0],
    )


def newton_blocks(found: ResultSet, styles: SeriesStyles) -> list[Block]:
    def read(result: Result) -> list[Block]:
        blocks: list[Block] = [newton_table(result)]
        many = len(found.of("newton")) > 1
        folder = f" ({result.path})" if many else ""
        for key, name, title, label, scale in LONG:
            series = long_series(result, key, name, styles)
            if series:
                wide = scale if all(y is None or y > 0 for line in series for y in line.y) else "linear"
                blocks.append(
                    LineChart(
                        f"{title}{folder}",
                        "steps / trained steps",
                        label,
                        series,
                        "Beyond 1 the sequences are longer than those trained on.",
                        x_scale="log2",
                        y_scale=wide,
                    )
                )
        return [*blocks, *pictures(result, found.folder)]

    return [block for blocks in checked(found, "newton", read) for block in blocks]


LONG = (
    ("force", "r2", "R² of the force, by length", "R²", "linear"),
    ("next_place", "error", "Error of the next place, by length", "error (AU)", "log"),
    ("roll_out", "median_ellipse_error", "Roll-outs off the ellipse, by length", "median / semi-major axis", "log"),
)
EXPONENTS = ("m1", "m2", "r")


def newton_table(result: Result) -> Table:
    body = []
    for row in rows_of(result.data, "table"):
        powers = mapping(row, "exponents") if "exponents" in row else {}
        laws = mapping(row, "laws") if "laws" in row else {}
        said = mapping(laws, "within") if "within" in laws else {}
        words = "; ".join(f"{scale}: {', '.join(map(str, typed(said, scale, list, 'a list')))}" for scale in said)
        body.append(
            [
                str(row.get("arm")),
                shown(number_of(row, "labels")),
                "yes" if row.get("pretrained") else "no",
                middle(row, "r2_ln_force"),
                *(middle(powers, name) for name in powers_named(powers)),
                words,
            ]
        )
    head = ["arm", "labels", "pre-trained", "R² of ln F", "power of m1", "power of m2", "power of r", "law found"]
    caption = "Means over seeds. Newton's law has the powers 1, 1 and -2."
    return Table(f"Newton from orbits: {result.path}", head, body, caption)


def powers_named(powers: dict[str, Any]) -> list[str]:
    return list(powers)[:3] if len(powers) >= 3 else list(EXPONENTS)


def middle(row: dict[str, Any], name: str) -> str:
    value = row.get(name)
    return shown(number_of(value, "mean")) if isinstance(value, dict) else ""


def long_series(result: Result, key: str, name: str, styles: SeriesStyles) -> list[Series]:
    found = []
    for run in rows_of(result.data, "long") if "long" in result.data else []:
        rows: Any = run.get(key)
        if isinstance(rows, dict):
            rows = next((those for label, those in rows.items() if label.startswith("tuned")), None)
        if not is_table(rows):
            continue
        arm = str(run.get("arm"))
        places = [number_of(row, "multiple") for row in rows]
        if any(place is None or place <= 0 for place in places):
            raise UnreadableError("`multiple` must be a number above 0")
        values = [number_of(row, name) for row in rows]
        found.append(Series(f"{arm}, seed {run.get('seed')}", [p for p in places if p], values, None, styles.of(arm)))
    return found


def pictures(result: Result, folder: Path) -> list[Block]:
    """Figures that a result names, where they lie beside it: PNG files inside the folder, nothing else."""
    names = result.data.get("figures")
    blocks: list[Block] = []
    for name in map(str, names if isinstance(names, list) else []):
        here = folder / result.group
        places = (here / name, here / Path(result.path).stem / Path(name).name)
        png = next((png for place in places if (png := read_png(place, folder)) is not None), None)
        if png is not None:
            blocks.append(Picture(f"{result.path}: {Path(name).stem.replace('_', ' ')}", png))
    return blocks


def read_png(path: Path, folder: Path) -> bytes | None:
    try:
        path = path.resolve()
        if not path.is_relative_to(folder.resolve()):
            return None
        png = untrusted.read_bytes(path, LARGEST_PICTURE)
    except (OSError, ValueError):
        return None
    return png if png.startswith(PNG) else None


def speed_blocks(found: ResultSet) -> list[Block]:
    return [block for blocks in checked(found, "speed", read_speed) for block in blocks]


def read_speed(result: Result) -> list[Block]:
    styles = SeriesStyles()
    rows = result.data.get("rows")
    is_attention = is_table(rows) and all("section" in row and "contender" in row for row in rows or [])
    blocks: list[Block] = [f"{result.path}: {about(result)}"]
    if is_attention:
        for section in dict.fromkeys(text_of(row, "section") for row in rows_of(result.data, "rows")):
            blocks += attention_blocks(result, section, styles)
    else:
        for name, value in result.data.items():
            title = f"{result.path}: {name.replace('_', ' ')}"
            if is_table(value):
                blocks.append(flat_table(title, value))
            elif is_numbers(name, value):
                blocks.append(Table(title, ["", "value"], [[key, shown(item)] for key, item in value.items()]))
    return blocks


def about(result: Result) -> str:
    """Machine, versions and commit in a line: a number without them says little."""
    data = result.data
    machine = data.get("machine")
    words = [", ".join(str(value) for value in machine.values())] if isinstance(machine, dict) else [str(machine or "")]
    versions = data.get("versions")
    if isinstance(versions, dict):
        words += [f"{name} {version}" for name, version in versions.items()]
    words += [f"commit {str(data['commit'])[:12]}"] if data.get("commit") else []
    words += [str(data["date"])] if data.get("date") else []
    made = f". Made by: {data['command']}" if data.get("command") else ""
    return "; ".join(word for word in words if word) + made


TIMES = (("total_ms", "forward + backward"), ("forward_ms", "forward"), ("step_mib", "memory of a step"))


def attention_blocks(result: Result, section: str, styles: SeriesStyles) -> list[Block]:
    """benchmarks/attention.py: a table and a figure per head dimension."""
    rows = [row for row in rows_of(result.data, "rows") if row["section"] == section and row.get("status") == "ok"]
    blocks: list[Block] = []
    for width in sorted({count_of(row, "head_dim") for row in rows}):
        those = [row for row in rows if row["head_dim"] == width]
        title = f"{section}, head dimension {width} ({result.path})"
        lengths = sorted({count_of(row, "length") for row in those})
        contenders = list(dict.fromkeys(text_of(row, "contender") for row in those))
        for name, words in TIMES:
            cells = {(row["contender"], row["length"]): number_of(row, name) for row in those}
            if all(value is None for value in cells.values()):
                continue
            unit = "MiB" if name.endswith("mib") else "ms"
            body = [[c, *(shown(cells.get((c, n))) for n in lengths)] for c in contenders]
            head = ["attention", *(f"T = {n}" for n in lengths)]
            blocks.append(Table(f"{words} in {unit}: {title}", head, body))
            if name == "step_mib" or len(lengths) < 2 or (name == "forward_ms" and "total_ms" in those[0]):
                continue
            series = [Series(c, lengths, [cells.get((c, n)) for n in lengths], None, styles.of(c)) for c in contenders]
            blocks.append(
                LineChart(f"{words}: {title}", "length (tokens)", "ms", series, x_scale="log2", y_scale="log")
            )
    failed = sorted(
        {
            f"{row['contender']}: {row.get('error') or row.get('status')}"
            for row in rows_of(result.data, "rows")
            if row["section"] == section and row.get("status") != "ok"
        }
    )
    if failed:
        blocks.append(f"Not measured in {result.path}, {section}: " + "; ".join(failed))
    return blocks


def flat_table(title: str, rows: Sequence[dict[str, Any]]) -> Table:
    """Any list of objects: its plain values, and lists of a few numbers. Raw samples stay in the file."""
    names = list(dict.fromkeys(name for row in rows for name, value in row.items() if is_plain(value)))
    body = [[cell_text(row.get(name)) for name in names] for row in rows]
    return Table(title, [name.replace("_", " ") for name in names], body)


def is_plain(value: Any) -> bool:
    return not isinstance(value, dict | list) or (
        isinstance(value, list) and len(value) <= 3 and all(isinstance(item, int | float) for item in value)
    )


def cell_text(value: Any) -> str:
    if isinstance(value, list):
        return " / ".join(cell_text(item) for item in value) if is_plain(value) else ""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "" if value is None or isinstance(value, dict) else str(value)
    return shown(number(value, "cell"))


# One run: its title, a line about it, and all of its record that is not measurements.
RunRecord = tuple[str, str, str]


def run_records(found: ResultSet) -> list[RunRecord]:
    return [run_record(result) for result in found.results]


def run_record(result: Result) -> RunRecord:
    data = result.data
    model = data.get("model")
    name = f"{model.get('name')}: {result.kind}" if isinstance(model, dict) else result.kind
    made = data.get("made") if isinstance(data.get("made"), dict) else data
    assert made is not None
    starts = data.get("starts")
    command = starts[-1].get("command") if starts and is_table(starts) else made.get("command")
    words = [str(command)] if command else []
    if data.get("complete") is False or data.get("finished") is False:
        words.append("not finished")
    kept = {key: value for key, value in data.items() if key not in MEASUREMENTS and not is_table(value)}
    if is_table(starts):
        kept["starts"] = starts
    return f"{name} ({result.path})", "; ".join(words), json.dumps(kept, indent=1, ensure_ascii=False)


MEASUREMENTS = {
    "results", "loss", "standard_error", "rows", "table", "cells", "controls", "pretraining", "probes", "long",
    "figures", "time", "memory", "evaluation", "training", "losses", "gradient_norms",
}  # fmt: skip
