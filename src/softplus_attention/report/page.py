"""The HTML page of a report: one file, nothing loaded from anywhere, every word from a file escaped."""

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
# Of a table this long only the CSV file has all rows.
MAX_ROWS = 400
# A table of so many columns can stand beside a figure.
NARROW = 4

escape = html.escape


def asset(name: str) -> str:
    return (resources.files("softplus_attention.report") / "assets" / name).read_text(encoding="utf-8")


class Document:
    """Gathers the page's parts; ``files`` says under which name each figure lies beside the page."""

    def __init__(self, files: Mapping[int, str], folder: str) -> None:
        self.files = files  # by id() of the figure or table
        self.folder = folder
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
            f'<p class="caption">{escape(chart.caption)} {self.links(chart, ("png", "svg", "csv"))}</p>'
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
            f"<li>{escape(maps.title)} {self.links(maps, ('png', 'svg', 'csv'))}</li>" for maps in explorer.maps
        )
        return (
            f'<div class="wide-block explorer" data-explorer="{place}"></div>'
            '<div class="wide-block"><p class="caption">A row is a query, a column a key it sees. '
            f"{escape(row_sums(explorer.maps))} Weights that are exactly 0 have the colour of the page, keys that "
            "cannot be seen are grey. Hover, touch, or move with the arrow keys to read a weight.</p>"
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
    words = escape(block.description, quote=True)
    return (
        f'<figure class="chart"><img alt="{words}" src="data:image/png;base64,{data}">'
        f'<figcaption class="caption">{words}</figcaption></figure>'
    )


def table(head: Sequence[str], body: Rows) -> str:
    first = "".join(f'<th scope="col">{cell(words)}</th>' for words in head)
    rows = "".join(
        f'<tr><th scope="row">{cell(row[0])}</th>' + "".join(f"<td>{cell(words)}</td>" for words in row[1:]) + "</tr>"
        for row in aligned_rows(body[:MAX_ROWS])
    )
    more = f"<p>{len(body) - MAX_ROWS} more rows are in the CSV file.</p>" if len(body) > MAX_ROWS else ""
    content = f"<table><thead><tr>{first}</tr></thead><tbody>{rows}</tbody></table>"
    return f'<div class="scroll" tabindex="0">{content}</div>{more}'


def cell(words: str) -> str:
    return escape(words).replace("\n", " ").replace(" ± ", "\u00a0±\u00a0")


def maps_json(maps: AttentionMaps) -> dict[str, Any]:
    return {
        "model": maps.model,
        "text": maps.text,
        "tokens": list(maps.tokens),
        "cell": maps.tokens_per_cell,
        "heads": [{"layer": layer, "head": head, **packed(rows)} for (layer, head), rows in sorted(maps.maps.items())],
    }


def row_sums(explored: Sequence[AttentionMaps]) -> str:
    """What the weights of a row add up to, which is 1 only where the attention normalises them."""
    models: dict[str, list[str]] = {}
    for maps in explored:
        sums = [sum(row) for rows in maps.maps.values() for row in rows]
        # The files hold four digits of each weight.
        ends = [1.0 if abs(end - 1) < 2e-3 else end for end in (min(sums, default=0.0), max(sums, default=0.0))]
        words = f"{ends[0]:.3g}" if ends[0] == ends[1] else f"between {ends[0]:.3g} and {ends[1]:.3g}"
        models.setdefault(words, []).append(maps.model)
    if len(models) == 1:
        return f"The weights of a row add up to {next(iter(models))}."
    return " ".join(f"The weights of a row add up to {words} in {', '.join(names)}." for words, names in models.items())


def packed(rows: Sequence[Sequence[float]]) -> dict[str, Any]:
    """The triangle as 32-bit floats: all digits of the file. A weight above 0 stays above 0."""
    flat = [max(weight, SMALLEST_FLOAT) if weight > 0 else 0.0 for row in rows for weight in row]
    largest = min(max(flat, default=0.0), LARGEST_FLOAT)
    words = array("f", [min(weight, LARGEST_FLOAT) for weight in flat])
    if sys.byteorder == "big":
        words.byteswap()
    return {"largest": largest, "weights": base64.b64encode(words.tobytes()).decode()}


def runs(records: Sequence[RunRecord]) -> str:
    """What all of a kind have is written once."""
    entries = []
    for kind in dict.fromkeys(record.kind for record in records):
        those = [record for record in records if record.kind == kind]
        shared = dict(set.intersection(*(set(record.settings.items()) for record in those))) if len(those) > 1 else {}
        if shared:
            entries.append(run_entry(f"The same in all {len(those)} of {kind}", "", shared))
        for record in those:
            own = {name: value for name, value in record.settings.items() if name not in shared}
            entries.append(run_entry(record.title, record.line, own))
    return f'<div class="wide-block runs">{"".join(entries)}</div>'


def run_entry(title: str, line: str, settings: Mapping[str, str]) -> str:
    words = "\n".join(f"{name}: {value}" for name, value in settings.items())
    line = f"<p><code>{escape(line)}</code></p>" if line else ""
    return f'<details><summary>{escape(title)}</summary>{line}<pre tabindex="0">{escape(words)}</pre></details>'


def problems(entries: Sequence[tuple[str, str]], working_files: int) -> str:
    listed = "".join(f"<li><code>{escape(path)}</code>: {escape(words)}</li>" for path, words in entries)
    some = f'<ul class="problems">{listed}</ul>' if entries else "<p>Every result file could be read.</p>"
    also = f"<p>{working_files} JSON files of checkpoints and data were passed over.</p>" if working_files else ""
    return f'<div class="wide-block">{some}{also}</div>'


def script_json(data: Any) -> str:
    """JSON that cannot end the script element it stands in, nor open another."""
    text = json.dumps(data, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def policy(script: str, style: str) -> str:
    """Only this script and this style may run, and nothing may be loaded: whatever stands in a file stays text."""
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
<p class="hint">Point at a figure, or use the arrow keys on it, to read its values; names below it switch lines.</p>
<noscript><p class="note">Figures are drawn by a script inside this page. Without it the numbers stand below each title,
and the figures as files beside the page.</p></noscript></header>
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
