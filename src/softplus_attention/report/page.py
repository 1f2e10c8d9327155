"""One HTML page that needs nothing beside it: figures inside, light and dark, readable on a phone."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Sequence
from pathlib import Path

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #ffffff; --faint: #59636e; --line: #d1d9e0; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --paper: #0d1117; --faint: #9198a1; --line: #3d444d; } }
body { font: 16px/1.55 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 0 auto;
       max-width: 56rem; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.6rem; line-height: 1.25; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .8rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
caption { text-align: left; color: var(--faint); padding: .3rem 0; }
figure { margin: 1rem 0; } figure img { max-width: 100%; height: auto; background: #ffffff; border-radius: 6px; }
figcaption, footer { color: var(--faint); font-size: .9rem; } code, pre { font-family: ui-monospace, monospace; }
pre { overflow-x: auto; padding: .8rem; border: 1px solid var(--line); border-radius: 6px; font-size: .85rem; }
"""


def paragraph(text: str) -> str:
    return f"<p>{html.escape(text)}</p>"


def heading(text: str) -> str:
    return f"<h2>{html.escape(text)}</h2>"


def preformatted(text: str) -> str:
    return f"<pre>{html.escape(text)}</pre>"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], caption: str) -> str:
    first = "".join(f'<th scope="col">{html.escape(cell)}</th>' for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    note = f"<caption>{html.escape(caption)}</caption>"
    return f'<div class="wide"><table>{note}<thead><tr>{first}</tr></thead><tbody>{body}</tbody></table></div>'


def picture(path: Path, description: str) -> str:
    """A PNG inside the page; ``description`` stands for it where it cannot be seen."""
    data = base64.b64encode(path.read_bytes()).decode()
    words = html.escape(description, quote=True)
    return f'<figure><img alt="{words}" src="data:image/png;base64,{data}"><figcaption>{words}</figcaption></figure>'


def page(title: str, parts: Iterable[str], footer: str) -> str:
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style></head>\n<body><h1>{html.escape(title)}</h1>\n"
        + "\n".join(parts)
        + f"\n<footer>{html.escape(footer)}</footer></body></html>\n"
    )
