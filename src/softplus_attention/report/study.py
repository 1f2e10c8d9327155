"""Results of `experiments/study`, grouped by model size, training text and kind of layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Any, NamedTuple

from softplus_attention.charts.model import Cell, HeatMaps, Number, Series, SeriesStyles, Table, percent_words
from softplus_attention.evaluation import layers
from softplus_attention.evaluation.measures import inside, lengths, passkey
from softplus_attention.evaluation.measures.loaded import LoadedResult, by_length
from softplus_attention.report.discovery import Result, ResultSet
from softplus_attention.report.sections import Block, checked
from softplus_attention.utils.untrusted import UnreadableError, count_of, mapping, number_of, rows_of, text_of

ROTARY = "rotary positions in every layer"
MIX = "mix of layers"
KINDS = (ROTARY, MIX)
Rows = list[dict[str, Any]]


def layer_kind(config: Mapping[str, Any]) -> str:
    """A mix has global layers without positions and local layers with a window."""
    return MIX if config.get("global_every") else ROTARY


class Group(NamedTuple):
    """Runs compared in one chart; ``size`` is the record's name for model and text together."""

    size: str
    kind: str
    parameters: str
    data: str


@dataclass(frozen=True)
class StudyRun:
    group: Group
    lengths: LoadedResult
    passkey: passkey.Cells
    inside: LoadedResult
    variants: dict[str, LoadedResult]  # by the change at inference

    @property
    def name(self) -> str:
        return self.lengths.name


def read_run(result: Result) -> StudyRun:
    data = result.data
    config, evaluation = mapping(data, "config"), mapping(data, "evaluation")
    length = count_of(config, "sequence_length")
    if not length:
        raise UnreadableError("`sequence_length` must be above 0")
    name = f"{text_of(data, 'arm')}, seed {count_of(data, 'seed')}"

    model = {"attention": str(config.get("attention") or ""), "parameters": number_of(evaluation, "parameters")}

    def loaded(content: Any, own: str = name) -> LoadedResult:
        return LoadedResult(own, length, True, {}, {}, content, model=model)

    changed = mapping(evaluation, "variants") if "variants" in evaluation else {}
    measured = {option: lengths.read(mapping(changed, option)) for option in changed}
    group = Group(text_of(data, "size"), layer_kind(config), format_parameters(evaluation), str(data.get("data")))
    return StudyRun(
        group,
        loaded(lengths.read(mapping(evaluation, "lengths"))),
        passkey.accuracy_cells(rows_of(evaluation, "passkey") if "passkey" in evaluation else [], share_found),
        loaded(read_inside(evaluation)),
        {option: loaded(rows, option) for option, rows in measured.items()},
    )


def format_parameters(evaluation: dict[str, Any]) -> str:
    """Rounded, because parameters learned per head make small differences between runs of one size."""
    millions = (number_of(evaluation, "parameters") or 0) / 1e6
    return f"{millions:.{0 if millions >= 1 else 1}f}M" if millions else ""


def share_found(cell: dict[str, Any]) -> Number:
    found, trials = number_of(cell, "correct"), number_of(cell, "trials")
    return found / trials if found is not None and trials else None


def read_inside(evaluation: dict[str, Any]) -> Rows:
    """In the format of `evaluate inside`, with one head per group of layers (one for all layers without groups)."""
    rows = []
    for row in rows_of(evaluation, "inside") if "inside" in evaluation else []:
        groups = rows_of(row, "groups") if "groups" in row else [row]
        heads = [{**group, "layer": number, "head": 0} for number, group in enumerate(groups)]
        rows.append({"length": row.get("length"), "log_keys": row.get("log_keys"), "heads": heads})
    return inside.read({"lengths": rows})


def read_runs(found: ResultSet) -> list[StudyRun]:
    return checked(found, "study", read_run)


def study_blocks(runs: Sequence[StudyRun], styles: SeriesStyles) -> list[Block]:
    """Separate charts for each size, training text and kind of layers."""
    groups = {run.group._replace(kind=kind): None for run in runs for kind in KINDS}
    names, blocks = text_names([run.group for run in runs]), list[Block]()
    for group in groups:
        those = [run for run in runs if run.group == group]
        if those:
            blocks += charts(those, styles, "Study, " + group_title(group, names))
    return blocks


def text_names(groups: Sequence[Group]) -> dict[str, str]:
    """A letter for each training text, if there are several."""
    texts = list(dict.fromkeys(group.data for group in groups if group.parameters))
    return dict(zip(texts, ascii_uppercase, strict=False)) if len(texts) > 1 else {}


def group_title(group: Group, names: Mapping[str, str]) -> str:
    text = f", text {names[group.data]}" if group.data in names else ""
    return f"{group.parameters or group.size}{text}"


def charts(runs: Sequence[StudyRun], styles: SeriesStyles, title: str) -> list[Block]:
    kind, base = runs[0].group.kind, runs[0].lengths.training_length
    members = [run.lengths for run in runs]
    gains = [lengths.gain_series(m, styles) for m in members]
    blocks: list[Block] = [
        by_length(
            f"{title}: loss by length, {kind}",
            "mean loss (nats)",
            [lengths.loss_series(m, styles) for m in members],
            "The same documents cut to each length.",
            base,
        ),
        by_length(
            f"{title}: gain from far context, {kind}",
            "gain (nats)",
            gains,
            "The loss of the same tokens with 1x context only, minus that with the full context.",
            base,
            baseline=0,
        ),
        *variant_blocks([run for run in runs if run.variants], title),
    ]
    with_passkeys = [run for run in runs if run.passkey]
    if with_passkeys:
        places = sorted({length for run in with_passkeys for length, _ in run.passkey})
        means = [passkey.mean_series(run.name, run.passkey, places, styles.of(run.name)) for run in with_passkeys]
        blocks.append(passkey.means_chart(f"{title}: passkeys found, by length, {kind}", means, base))
        maps = [(run.name, passkey.depth_map(run.name, run.passkey, places, base)) for run in with_passkeys]
        blocks.append(HeatMaps(f"{title}: passkeys by depth, {kind}", maps, passkey.DEPTH_CAPTION))
    return blocks + inside_tables([run.inside for run in runs if run.inside.content], title, kind)


def variant_blocks(runs: Sequence[StudyRun], title: str) -> list[Block]:
    """Runs that were also evaluated with changes at inference."""
    curves = {run.name: {"as trained": run.lengths, **run.variants} for run in runs}
    blocks: list[Block] = []
    for name, those in curves.items():
        series = [Series(change, *lengths.loss_points(m), None, look) for look, (change, m) in enumerate(those.items())]
        heading = f"{title}: {name}, changed at inference"
        caption = "The same weights on the same documents."
        blocks.append(by_length(heading, "mean loss (nats)", series, caption, runs[0].lengths.training_length))
    if not blocks:
        return []
    places = sorted({row["length"] for those in curves.values() for m in those.values() for row in m.content})
    body = [[name, change, *cells(m, places)] for name, those in curves.items() for change, m in those.items()]
    head = ["run", "at inference", *(f"loss at {length}" for length in places), f"gain at {places[-1]}"]
    caption = "In nats; the gain is from far context, with its standard error."
    return [*blocks, Table(f"{title}: changed at inference, {runs[0].group.kind}", head, body, caption)]


def cells(m: LoadedResult, places: Sequence[int]) -> list[Cell]:
    rows = {row["length"]: row for row in m.content}
    losses = [number_of(rows[length], "loss") if length in rows else None for length in places]
    control = rows.get(places[-1], {}).get("control") or {}
    return [*losses, (number_of(control, "gain"), number_of(control, "standard_error"))]


COLUMNS = (
    ("log_keys", "log N"), ("stage1_entropy", "stage 1"), (inside.HELD, "stage 1, log N fixed"),
    ("entropy", "final"), ("sink", "first token, %"), ("effective_keys", "effective keys"), ("zeros", "zeros, %"),
    ("empty_tiles", "empty tiles, %"),
)  # fmt: skip
SHARES = {"sink", "zeros", "empty_tiles"}


def inside_tables(members: Sequence[LoadedResult], title: str, kind: str) -> list[Block]:
    parts = [inside.Part(m, group) for m in members for group in layers.layer_groups(m.content)]
    if not parts:
        return []
    body = [
        [part.name, row["length"], *(inside_cell(row, part.group, name) for name, _ in COLUMNS)]
        for part in parts
        for row in part.rows
    ]
    means = "Means over rows, layers and heads"
    if kind == MIX and any(not part.group.label for part in parts):
        means += ", over local and global layers together if they are not named"
    head = ["run", "length", *(label for _, label in COLUMNS)]
    table = Table(f"{title}: inside the attention, {kind}", head, body, f"Entropies in nats. {means}.")
    steady = inside.steady_table(parts, "")
    heading = f"{title}: {steady.title[0].lower()}{steady.title[1:]}, {kind}"
    return [table, Table(heading, steady.head, steady.body, f"{steady.caption} {means}.")] if steady.body else [table]


def inside_cell(row: dict[str, Any], group: layers.LayerGroup, name: str) -> Cell:
    value = layers.mean_over_heads(row, group, name)
    return percent_words(value) if name in SHARES else value
