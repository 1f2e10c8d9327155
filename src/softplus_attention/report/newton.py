"""The Newton experiment: the powers and laws found, and errors by length."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

from softplus_attention.charts.model import LineChart, Number, Series, SeriesStyles, Table
from softplus_attention.report.discovery import Result, ResultSet, is_table
from softplus_attention.report.sections import Block, Picture, checked
from softplus_attention.utils import untrusted
from softplus_attention.utils.untrusted import UnreadableError, mapping, number_of, rows_of, typed

LARGEST_PICTURE = 4 << 20
MAX_PIXELS, PAGE_WIDTH, COLOURS = 40_000_000, 1000, 64
PNG = b"\x89PNG\r\n\x1a\n"


def newton_blocks(found: ResultSet, styles: SeriesStyles) -> list[Block]:
    def read(result: Result) -> list[Block]:
        blocks: list[Block] = [newton_table(result)]
        suffix = f" ({result.path})" if len(found.of("newton")) > 1 else ""
        for key, name, title, label, scale in LONG:
            series = long_series(result, key, name, styles)
            if series:
                y_scale = scale if all(y is None or y > 0 for line in series for y in line.y) else "linear"
                blocks.append(
                    LineChart(
                        f"{title}{suffix}",
                        "steps / trained steps",
                        label,
                        series,
                        "Beyond 1 the sequences are longer than those trained on.",
                        x_scale="log2",
                        y_scale=y_scale,
                    )
                )
        return [*blocks, *pictures(result, found.folder)]

    return [block for blocks in checked(found, "newton", read) for block in blocks]


LONG = (
    ("force", "r2", "R² of the force, by length", "R²", "linear"),
    ("next_place", "error", "Error of the next position, by length", "error (AU)", "log"),
    (
        "roll_out",
        "median_ellipse_error",
        "Roll-outs off the ellipse, by length",
        "median / semi-major axis",
        "log",
    ),
)
EXPONENTS = ("m1", "m2", "r")


def newton_table(result: Result) -> Table:
    body = []
    for row in rows_of(result.data, "table"):
        powers = mapping(row, "exponents") if "exponents" in row else {}
        laws = mapping(row, "laws") if "laws" in row else {}
        found = mapping(laws, "within") if "within" in laws else {}
        law = "; ".join(f"{scale}: {', '.join(map(str, typed(found, scale, list, 'a list')))}" for scale in found)
        body.append(
            [
                str(row.get("arm")),
                number_of(row, "labels"),
                "yes" if row.get("pretrained") else "no",
                mean_value(row, "r2_ln_force"),
                *(mean_value(powers, name) for name in power_names(powers)),
                law,
            ]
        )
    head = ["arm", "labels", "pre-trained", "R² of ln F", "power of m1", "power of m2", "power of r", "law found"]
    caption = "Means over seeds. Newton's law has the powers 1, 1 and -2."
    return Table(f"Newton from orbits: {result.path}", head, body, caption)


def power_names(powers: dict[str, Any]) -> list[str]:
    return list(powers)[:3] if len(powers) >= 3 else list(EXPONENTS)


def mean_value(row: dict[str, Any], name: str) -> Number:
    value = row.get(name)
    return number_of(value, "mean") if isinstance(value, dict) else None


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
    """PNG figures that a result names, if they are next to it and inside the folder."""
    names = result.data.get("figures")
    blocks: list[Block] = []
    for name in map(str, names if isinstance(names, list) else []):
        here = folder / result.group
        paths = (here / name, here / Path(result.path).stem / Path(name).name)
        png = next((png for path in paths if (png := read_png(path, folder)) is not None), None)
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
    return compress(png) if png.startswith(PNG) else None


def compress(png: bytes) -> bytes:
    """Reduce to the width of the page and few colours; unchanged if that is not smaller or the image is invalid."""
    from PIL import Image

    try:
        with Image.open(BytesIO(png), formats=["PNG"]) as whole:
            if whole.width * whole.height > MAX_PIXELS:
                return png
            picture = whole.convert("RGB")
        picture.thumbnail((PAGE_WIDTH, 4 * PAGE_WIDTH))
        small = BytesIO()
        picture.quantize(COLOURS).save(small, format="PNG", optimize=True)
    except (OSError, ValueError, SyntaxError):
        return png
    return min(png, small.getvalue(), key=len)
