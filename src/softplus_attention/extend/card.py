"""The model card of an extended model and the figure of its heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from softplus_attention.charts.model import HeatMap
from softplus_attention.extend.ranking import Ranking
from softplus_attention.extend.tuning import describe_tuning
from softplus_attention.huggingface.extension.settings import Extension
from softplus_attention.utils.files import clean_text, write_whole

PICTURE = "heads"
FORM_TEXT = {
    "clip": "exact to a distance of {near:,}, clipped to it beyond",
    "group": "exact to a distance of {near:,}, divided by {group} beyond",
    "yarn": "YaRN with a factor of {factor:g}",
    "rope": "unchanged",
    "lssar": "YaRN with a factor of {factor:g}; fitted LSSAR in place of softmax",
}


def heads_pictures(ranking: Ranking, extension: Extension) -> list[HeatMap]:
    """Heat maps of the far heads and of the scores that chose them."""
    far = [[float(head in row) for row in extension.far_heads] for head in range(len(ranking.scores["mass"][0]))]
    panels = [("Far heads: they attend to all tokens", "1: far", far, 1.0)]
    for name, title, label in (
        ("mass", "Attention from an answer to the sentence that contains it", "mass"),
        ("text", "Loss reduction on ordinary text by full attention", "nats"),
    ):
        values = [list(row) for row in zip(*ranking.scores[name], strict=True)]
        panels.append((title, label, values, max(max(row) for row in values) or 1.0))
    layers = [str(layer) for layer in range(len(extension.far_heads))]
    return [
        HeatMap(
            title, "layer", "key head", layers, [str(head) for head in range(len(values))], values, label, 0.0, high
        )
        for title, label, values, high in panels
    ]


def results_table(measured: Mapping[str, Any]) -> list[str]:
    """Markdown of {method: {"loss": {length: [...]}, "needles": ..., "cache_bytes": ..., ...}}."""
    lengths = sorted({int(length) for own in measured.values() for length in own["loss"]})
    lines = ["| | " + " | ".join(f"{length:,} tokens" for length in lengths) + " |", "|---|" + "---:|" * len(lengths)]

    def row(name: str, cells: Sequence[str]) -> None:
        if any(cells):
            lines.append(f"| {name} | {' | '.join(cells)} |")

    for key, what in (("loss", "loss"), ("needles", "needles found"), ("cache_bytes", "cache"),
                      ("prefill_seconds", "prefill"), ("tokens_per_second", "decode")):  # fmt: skip
        for method, own in measured.items():
            row(
                f"{what}, {'extended' if method == 'heads' else method}",
                [cell(key, own.get(key, {}).get(str(length))) for length in lengths],
            )
    return lines


def cell(key: str, value: Any) -> str:
    if value is None:
        return ""
    if key == "loss":
        return f"{sum(value) / len(value):.3f}"
    if key == "needles":
        hits = [hit for one in value for hit in one["found"]]
        return f"{sum(hits)} of {len(hits)}"
    if key == "cache_bytes":
        return f"{value / 2**20:.1f} MiB"
    return f"{value:.1f} s" if key == "prefill_seconds" else f"{value:.1f} tokens/s"


def describe(extension: Extension) -> str:
    far = sum(map(len, extension.far_heads))
    positions = FORM_TEXT[extension.far].format(near=extension.near, group=extension.group, factor=extension.factor)
    if extension.level:
        positions += f"; with log N, and no more weight in total than {extension.trained - extension.near:,} tokens"
    window = f"the last {extension.window:,} tokens and the first {extension.sink}"
    return f"{far} key heads attend to all tokens (positions: {positions}). The others attend to {window}."


def write_card(folder: Path, source: str, extension: Extension | None, method: str, report: Mapping[str, Any]) -> None:
    """Writes README.md into ``folder``."""
    name = clean_text(source)
    is_local = Path(source).exists()
    lines = ["---", "library_name: transformers", "pipeline_tag: text-generation"]
    lines += [] if is_local else [f"base_model: {name}"]
    lines += ["tags: [long-context, softplus-attention]", "---", ""]
    name = Path(name).name.removesuffix(".gguf") if is_local else name
    lines += [f"# {Path(name).name} for {report['to']:,} tokens", ""]
    if extension is None:
        lines += [f"`{name}` with rotary positions scaled by {method}. The weights are unchanged."]
    else:
        lines += [f"`{name}`, trained at {extension.trained:,} tokens and extended to {extension.length:,}."]
        lines += [describe(extension)]
        if tuned := report.get("tuned"):
            lines += [f"It was {describe_tuning(tuned)}."]
        elif extension.far != "lssar":
            lines += ["The weights are unchanged; nothing was trained."]
        lines += ["", f"![heads]({PICTURE}.png)"] if (folder / f"{PICTURE}.png").exists() else []
    needs = "  # pip install 'softplus-attention[huggingface]'" if extension is not None else ""
    code = ", trust_remote_code=True" if extension is not None else ""
    lines += ["The license is that of the original model.", "", "```python"]
    lines += ["from transformers import AutoModelForCausalLM, AutoTokenizer", ""]
    lines += [f'model = AutoModelForCausalLM.from_pretrained("this folder"{code}){needs}']
    lines += ['tokenizer = AutoTokenizer.from_pretrained("this folder")', "```", ""]
    if report.get("measured"):
        lines += ["## Measured", "", *results_table(report["measured"]), ""]
        lines += [
            f"Loss in nats per token, over the last {report['targets']:,} tokens of the same text, by context length."
        ]
        lines += ["`extend.json` has all numbers, the machine and the versions.", ""]
    if extension is not None:
        lines += [
            "## Limits",
            "",
            "Use `generate` of transformers. vLLM and `generate_batch` do not support this cache and raise an error.",
            "The cache drops tokens that leave the window. Assisted decoding removes tokens, so it raises an error.",
            "",
        ]
    write_whole(folder / "README.md", "\n".join(lines))
