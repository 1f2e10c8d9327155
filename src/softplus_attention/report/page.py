"""The HTML page of a report: one self-contained file that loads nothing and escapes all text from result files."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import sys
from array import array
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any
from urllib.parse import quote

from softplus_attention.charts.model import AttentionMaps, Chart, HeatMaps, Rows, Table, aligned_rows, to_json
from softplus_attention.report.runs import RunRecord
from softplus_attention.report.sections import Block, Explorer, Picture, Section

SCRIPTS = ("common.js", "charts.js", "explorer.js")
SMALLEST_FLOAT, LARGEST_FLOAT = 1e-44, 3e38
MAX_ROWS = 400  # of a table on the page; its CSV file has all rows
NARROW = 4  # tables with up to this many columns share a line with a figure

escape = html.escape


def asset(name: str) -> str:
    return (resources.files("softplus_attention.report") / "assets" / name).read_text(encoding="utf-8")


class Document:
    """Collects the page's parts; ``files`` has the file name of each figure next to the page."""

    def __init__(self, files: Mapping[int, str], folder: str, formats: Sequence[str]) -> None:
        self.files = files  # by id() of the figure or table
        self.folder, self.formats = folder, formats
        self.figures: dict[str, Any] = {}
        self.explorers: list[dict[str, Any]] = []

    def section(self, section: Section, place: int) -> str:
        body = "\n".join(self.block(block) for block in section.blocks)
        name = f"part-{place}"
        return (
            f'<section id="{name}" aria-labelledby="{name}-title"><h2 id="{name}-title">{escape(section.title)}</h2>'
            f'<div class="blocks">{body}</div></section>'
        )

    def block(self, block: Block) -> str:
        if isinstance(block, str):
            return f'<p class="note">{escape(block)}</p>'
        if isinstance(block, Picture):
            return picture(block)
        if isinstance(block, Explorer):
            return self.explorer(block)
        if isinstance(block, Table):
            links = self.links(block, ("csv",))
            wide = "wide-block" if len(block.head) > NARROW else "chart"
            rows = table(*block.table())
            return (
                f'<figure class="{wide}"><figcaption><h3>{escape(block.title)}</h3></figcaption>{rows}'
                f'<p class="caption">{escape(block.caption)} {links}</p></figure>'
            )
        assert not isinstance(block, AttentionMaps), "maps are shown by an explorer"
        return self.chart(block)

    def chart(self, chart: Chart | HeatMaps) -> str:
        name = f"figure-{len(self.figures)}"
        if isinstance(chart, HeatMaps):
            plots = "".join(f"<div><h4>{escape(title)}</h4>{self.plot(one)}</div>" for title, one in chart.maps)
            plots, width = f'<div class="heats">{plots}</div>', "wide-block" if len(chart.maps) > 1 else "chart"
        else:
            plots, width = self.plot(chart), "chart"
        return (
            f'<figure class="{width} {chart.kind}" id="{name}"><figcaption><h3>{escape(chart.title)}</h3></figcaption>'
            f"{plots}"
            f'<p class="caption">{escape(chart.caption)} {self.links(chart, (*self.formats, "csv"))}</p>'
            f"<details><summary>Numbers</summary>{table(*chart.table())}</details></figure>"
        )

    def plot(self, chart: Chart) -> str:
        name = f"figure-{len(self.figures)}"
        self.figures[name] = to_json(chart)
        return f'<div class="plot" data-figure="{name}"></div>'

    def explorer(self, explorer: Explorer) -> str:
        place = len(self.explorers)
        self.explorers.append({"maps": [maps_json(maps) for maps in explorer.maps]})
        files = " ".join(
            f"<li>{escape(maps.title)} {self.links(maps, (*self.formats, 'csv'))}</li>" for maps in explorer.maps
        )
        return (
            f'<div class="wide-block explorer" data-explorer="{place}"></div>'
            '<div class="wide-block"><p class="caption">Rows are queries, columns are keys. '
            f"{escape(row_sums(explorer.maps))} Weights that are exactly 0 have the colour of the page, masked keys "
            "are grey. Hover, touch, or use the arrow keys to read a weight.</p>"
            f'<details><summary>All heads as files</summary><ul class="files">{files}</ul></details></div>'
        )

    def links(self, figure: Any, kinds: Sequence[str]) -> str:
        name = self.files.get(id(figure))
        if name is None:
            return ""
        links = " ".join(
            f'<a href="{escape(quote(self.folder), quote=True)}/{name}.{kind}">{kind.upper()}</a>' for kind in kinds
        )
        return f'<span class="files">{links}</span>'


def picture(block: Picture) -> str:
    data = base64.b64encode(block.png).decode()
    caption = escape(block.description, quote=True)
    return (
        f'<figure class="chart"><img alt="{caption}" src="data:image/png;base64,{data}">'
        f'<figcaption class="caption">{caption}</figcaption></figure>'
    )


def table(head: Sequence[str], body: Rows) -> str:
    columns = "".join(f'<th scope="col">{cell(name)}</th>' for name in head)
    rows = "".join(
        f'<tr><th scope="row">{cell(row[0])}</th>' + "".join(f"<td>{cell(text)}</td>" for text in row[1:]) + "</tr>"
        for row in aligned_rows(body[:MAX_ROWS])
    )
    more = f"<p>{len(body) - MAX_ROWS} more rows are in the CSV file.</p>" if len(body) > MAX_ROWS else ""
    content = f"<table><thead><tr>{columns}</tr></thead><tbody>{rows}</tbody></table>"
    return f'<div class="scroll" tabindex="0">{content}</div>{more}'


def cell(text: str) -> str:
    return escape(text).replace("\n", " ").replace(" ± ", "\u00a0±\u00a0")


def maps_json(maps: AttentionMaps) -> dict[str, Any]:
    return {
        "model": maps.model,
        "text": maps.text,
        "tokens": list(maps.tokens),
        "cell": maps.tokens_per_cell,
        "heads": [{"layer": layer, "head": head, **packed(rows)} for (layer, head), rows in sorted(maps.maps.items())],
    }


def row_sums(explored: Sequence[AttentionMaps]) -> str:
    """The range of row sums of each model, which is 1 only if the attention normalises its weights."""
    models: dict[str, list[str]] = {}
    for maps in explored:
        sums = [sum(row) for rows in maps.maps.values() for row in rows]
        # The files have four digits of each weight.
        ends = [1.0 if abs(end - 1) < 2e-3 else end for end in (min(sums, default=0.0), max(sums, default=0.0))]
        total = f"{ends[0]:.3g}" if ends[0] == ends[1] else f"between {ends[0]:.3g} and {ends[1]:.3g}"
        models.setdefault(total, []).append(maps.model)
    if len(models) == 1:
        return f"Rows sum to {next(iter(models))}."
    return " ".join(f"Rows sum to {total} in {', '.join(names)}." for total, names in models.items())


def packed(rows: Sequence[Sequence[float]]) -> dict[str, Any]:
    """The lower triangle as 32-bit floats, which keep all digits of the file. Weights above 0 stay above 0."""
    flat = [max(weight, SMALLEST_FLOAT) if weight > 0 else 0.0 for row in rows for weight in row]
    largest = min(max(flat, default=0.0), LARGEST_FLOAT)
    floats = array("f", [min(weight, LARGEST_FLOAT) for weight in flat])
    if sys.byteorder == "big":
        floats.byteswap()
    return {"largest": largest, "weights": base64.b64encode(floats.tobytes()).decode()}


def runs(records: Sequence[RunRecord]) -> str:
    """Settings shared by all runs of a kind are listed once."""
    entries = []
    for kind in dict.fromkeys(record.kind for record in records):
        those = [record for record in records if record.kind == kind]
        shared = dict(set.intersection(*(set(record.settings.items()) for record in those))) if len(those) > 1 else {}
        if shared:
            entries.append(run_entry(f"Shared by all {len(those)} results of kind {kind}", "", shared))
        for record in those:
            own = {name: value for name, value in record.settings.items() if name not in shared}
            entries.append(run_entry(record.title, record.line, own))
    return f'<div class="wide-block runs">{"".join(entries)}</div>'


def run_entry(title: str, line: str, settings: Mapping[str, str]) -> str:
    text = "\n".join(f"{name}: {value}" for name, value in settings.items())
    line = f"<p><code>{escape(line)}</code></p>" if line else ""
    return f'<details><summary>{escape(title)}</summary>{line}<pre tabindex="0">{escape(text)}</pre></details>'


def problems(entries: Sequence[tuple[str, str]], working_files: int) -> str:
    items = "".join(f"<li><code>{escape(path)}</code>: {escape(reason)}</li>" for path, reason in entries)
    listed = f'<ul class="problems">{items}</ul>' if entries else "<p>All result files could be read.</p>"
    skipped = f"<p>{working_files} JSON files of checkpoints and data were skipped.</p>" if working_files else ""
    return f'<div class="wide-block">{listed}{skipped}</div>'


def script_json(data: Any) -> str:
    """JSON that cannot close its script element or open another."""
    text = json.dumps(data, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def policy(script: str, style: str) -> str:
    """Content-Security-Policy: only this script and this style, and nothing is loaded."""
    digest = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (script, style)]
    return (
        f"default-src 'none'; script-src 'sha256-{digest[0]}'; style-src 'sha256-{digest[1]}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def page(title: str, lead: str, parts: Sequence[tuple[str, str]], document: Document, footer: str) -> str:
    """``parts`` are (title, HTML of the section), in the order of the ids part-0, part-1, ..."""
    script = "\n".join(asset(name) for name in SCRIPTS)
    script = f"(function () {{\n'use strict';\n{script}\n}})();\n"
    style = asset("report.css")
    links = "".join(f'<li><a href="#part-{place}">{escape(name)}</a></li>' for place, (name, _) in enumerate(parts))
    data = script_json({"figures": document.figures, "explorers": document.explorers})
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy(script, style)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title><style>{style}</style></head>
<body><a class="skip" href="#content">Skip to the results</a>
<header><div class="top"><h1>{escape(title)}</h1><button type="button" id="theme" hidden>Theme: auto</button></div>
<p class="lead">{escape(lead)}</p><nav aria-label="Parts of this page"><ul>{links}</ul></nav>
<p class="hint">To read values, point at a figure or use its arrow keys. Click a legend entry to hide its line.</p>
<noscript><p class="note">Figures are drawn by a script inside this page. Without scripts, see the numbers below each
title and the figure files next to the page.</p></noscript></header>
<main id="content">
{"".join(body for _, body in parts)}
</main>
<footer>{escape(footer)}</footer>
<script type="application/json" id="report-data">{data}</script>
<script>{script}</script>
</body></html>
"""


def plain_section(title: str, place: int, body: str) -> str:
    return (
        f'<section id="part-{place}" aria-labelledby="part-{place}-title"><h2 id="part-{place}-title">{escape(title)}'
        f'</h2><div class="blocks">{body}</div></section>'
    )
