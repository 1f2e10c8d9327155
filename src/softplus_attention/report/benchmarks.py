"""Tables and charts of benchmark results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from softplus_attention.charts.model import Cell, LineChart, Series, SeriesStyles, Table, cell_text
from softplus_attention.report.discovery import Result, ResultSet, is_numbers, is_table
from softplus_attention.report.sections import Block, checked
from softplus_attention.utils.untrusted import count_of, number, number_of, rows_of, text_of


def speed_blocks(found: ResultSet) -> list[Block]:
    return [block for blocks in checked(found, "speed", read_speed) for block in blocks]


def read_speed(result: Result) -> list[Block]:
    styles = SeriesStyles()
    rows = result.data.get("rows")
    is_attention = is_table(rows) and all("section" in row and "contender" in row for row in rows or [])
    blocks: list[Block] = [f"{result.path}: {describe(result)}"]
    if is_attention:
        for section in dict.fromkeys(text_of(row, "section") for row in rows_of(result.data, "rows")):
            blocks += attention_blocks(result, section, styles)
    else:
        for name, value in result.data.items():
            title = f"{result.path}: {name.replace('_', ' ')}"
            if is_table(value):
                blocks.append(flat_table(title, value))
            elif is_numbers(name, value):
                blocks.append(Table(title, ["", "value"], [[key, item] for key, item in value.items()]))
    return blocks


def describe(result: Result) -> str:
    """Machine, versions, commit, date and command in one line."""
    data = result.data
    machine = data.get("machine")
    parts = [", ".join(str(value) for value in machine.values())] if isinstance(machine, dict) else [str(machine or "")]
    versions = data.get("versions")
    if isinstance(versions, dict):
        parts += [f"{name} {version}" for name, version in versions.items()]
    parts += [f"commit {str(data['commit'])[:12]}"] if data.get("commit") else []
    parts += [str(data["date"])] if data.get("date") else []
    command = f". Command: {data['command']}" if data.get("command") else ""
    return "; ".join(part for part in parts if part) + command


TIMES = (("total_ms", "forward + backward"), ("forward_ms", "forward"), ("step_mib", "memory of one step"))


def attention_blocks(result: Result, section: str, styles: SeriesStyles) -> list[Block]:
    """Results of benchmarks/attention.py: a table and a chart per head dimension."""
    rows = [row for row in rows_of(result.data, "rows") if row["section"] == section and row.get("status") == "ok"]
    blocks: list[Block] = []
    for width in sorted({count_of(row, "head_dim") for row in rows}):
        those = [row for row in rows if row["head_dim"] == width]
        title = f"{section}, head dimension {width} ({result.path})"
        lengths = sorted({count_of(row, "length") for row in those})
        contenders = list(dict.fromkeys(text_of(row, "contender") for row in those))
        for name, label in TIMES:
            cells = {(row["contender"], row["length"]): number_of(row, name) for row in those}
            if all(value is None for value in cells.values()):
                continue
            unit = "MiB" if name.endswith("mib") else "ms"
            body = [[c, *(cells.get((c, n)) for n in lengths)] for c in contenders]
            head = ["attention", *(f"T = {n}" for n in lengths)]
            blocks.append(Table(f"{label} in {unit}: {title}", head, body))
            if name == "step_mib" or len(lengths) < 2 or (name == "forward_ms" and "total_ms" in those[0]):
                continue
            series = [Series(c, lengths, [cells.get((c, n)) for n in lengths], None, styles.of(c)) for c in contenders]
            blocks.append(
                LineChart(f"{label}: {title}", "length (tokens)", "ms", series, x_scale="log2", y_scale="log")
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
    """Table of any list of objects: plain values and lists of up to 3 numbers; raw samples are left out."""
    names = list(dict.fromkeys(name for row in rows for name, value in row.items() if is_plain(value)))
    body = [[format_cell(row.get(name)) for name in names] for row in rows]
    return Table(title, [name.replace("_", " ") for name in names], body)


def is_plain(value: Any) -> bool:
    return not isinstance(value, dict | list) or (
        isinstance(value, list) and len(value) <= 3 and all(isinstance(item, int | float) for item in value)
    )


def format_cell(value: Any) -> Cell:
    if isinstance(value, list):
        return " / ".join(cell_text(format_cell(item)) for item in value) if is_plain(value) else ""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "" if value is None or isinstance(value, dict) else str(value)
    return number(value, "cell")
