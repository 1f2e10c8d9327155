"""Tables of docs/results.md and docs/dev/study-tables.md, from the results of experiments/study/run.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from experiments.study.figures import FIGURES
from experiments.study.records import (
    BASELINE,
    SMALL,
    Curve,
    RecordError,
    Run,
    Size,
    Spread,
    gain_at,
    gain_error_at,
    loss_at,
    option_words,
    passkey_at,
    read_study,
    rise,
    spread,
    timed,
)
from experiments.study.sizes import (
    MIN_SIZES,
    OURS,
    OURS_WIDE,
    THEIRS,
    THEIRS_WIDE,
    alike,
    degrees_of_freedom,
    gap_at,
    on_one_text,
    parameters,
    slope_at,
    step_ratio,
    with_wide_heads,
)
from tools.tables.markdown import TableError, plain, signed, table_lines

NOTHING = "No runs yet."
SHORTEST_LONG = 16  # the targets are stated from 16x on, and for passkeys up to 16x
MIN_PASSKEY = 0.9
MAX_BEHIND = 0.01
Cells = list[str]


def cell(value: Spread | None, show: Callable[[float], str] = plain, *, bold: bool = False) -> str:
    if value is None:
        return "-"
    mean = f"**{show(value.mean)}**" if bold else show(value.mean)
    return f"{mean} ± {plain(value.half_range)}" if value.count > 1 else mean


def column(
    values: Sequence[Spread | None], show: Callable[[float], str] = plain, best: Callable[..., float] | None = min
) -> Cells:
    """Cells with the best in bold, and all with the same text as the best."""
    finite = [value.mean for value in values if value is not None and math.isfinite(value.mean)]
    winner = show(best(finite)) if best is not None and finite else None
    return [cell(value, show, bold=value is not None and show(value.mean) == winner) for value in values]


def title(size: Size, kind: str = "") -> list[str]:
    trained = f"trained at {size.any_run.config['sequence_length']} tokens"
    return [f"**{size.name}, {trained}{f', {kind}' if kind else ''}**", ""]


def code(names: Iterable[str]) -> Cells:
    return [f"`{name}`" for name in names]


def distinct(values: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(values))


def short_commit(commit: str) -> str:
    name, dirty, _ = commit.partition("-dirty")
    return f"`{name[:12]}`" + (" with changes" if dirty else "")


def runs_table(size: Size) -> list[str]:
    run, config = size.any_run, size.any_run.config
    counts = sorted({other.parameters for other in size.runs})
    between = " to ".join(f"{number:,}" for number in (counts[:1] + counts[1:][-1:]))
    seeds = [f"`{arm}` ({', '.join(str(run.seed) for run in runs)})" for arm, runs in size.arms.items()]
    heads = " or ".join(str(count) for count in sorted({other.config["heads"] for other in size.runs}, reverse=True))
    packages = ("python", "torch", "cuda", "triton", "transformers")
    versions = [", ".join(f"{name} {other.versions.get(name)}" for name in packages) for other in size.runs]
    used = run.used
    facts = {
        "model": f"{config['layers']} layers, width {config['width']}, {heads} heads; {between} parameters",
        "training": f"{config['steps']:,} steps of {config['batch_size']} sequences of {config['sequence_length']} "
        f"tokens: {run.tokens:,} tokens",
        "measured on": f"{used['sequences']} texts of {used['longest']:,} tokens, from {used['documents']} documents",
        "arms (seeds)": ", ".join(seeds),
        "machine": distinct(other.machine for other in size.runs),
        "commit": distinct(short_commit(other.commit) for other in size.runs),
        "versions": distinct(versions),
    }
    return table_lines([size.name, ""], [list(facts), list(facts.values())], "---")


def gain_columns(curves: Sequence[Sequence[Curve]], multiple: int) -> list[Cells]:
    """The gain of each arm at this multiple, and its standard error."""
    errors = [gain_error_at(own, multiple) for own in curves]
    return [
        column([gain_at(own, multiple) for own in curves], signed, max),
        ["-" if error is None else plain(error.mean) for error in errors],
    ]


def loss_table(size: Size) -> list[str]:
    lines = []
    for kind in size.kinds:
        part = size.of_kind(kind)
        curves, longest = [part.curves(arm) for arm in part.arms], part.longest
        columns = [code(part.arms), [str(len(own)) for own in curves]]
        columns += [column([loss_at(own, multiple) for own in curves]) for multiple in part.multiples]
        columns.append(column([rise(own, longest) for own in curves], signed))
        head = ["arm", "seeds", *(f"{multiple}x" for multiple in part.multiples), f"{longest}x - 1x"]
        for multiple in sorted({SHORTEST_LONG, longest} & set(part.multiples)):
            columns += gain_columns(curves, multiple)
            head += [f"gain at {multiple}x", "its standard error"]
        lines += title(part, kind) + table_lines(head, columns)
    return lines


def far_table(size: Size) -> list[str]:
    """The control over the last quarter of each text, for the arms that have it."""
    arms = [arm for arm in size.arms if any(curve.gain for curve in size.far(arm))]
    if not arms:
        return []
    curves = [size.far(arm) for arm in arms]
    columns, head = [code(arms), [str(len(own)) for own in curves]], ["gain", "seeds"]
    for multiple in sorted({multiple for own in curves for curve in own for multiple in curve.gain}):
        columns += gain_columns(curves, multiple)
        head += [f"at {multiple}x", "its standard error"]
    return title(size) + table_lines(head, columns)


def inference_table(size: Size) -> list[str]:
    """Arms as trained, and with changes at inference."""
    rows: list[tuple[str, list[Curve]]] = []
    for arm in size.arms:
        options = size.options(arm)
        if options:
            rows += [(f"`{arm}`", size.curves(arm))]
            rows += [(f"`{arm}`, {option_words(option)}", size.curves(arm, option)) for option in options]
    if not rows:
        return []
    every = [curve for arm in size.arms for option in size.options(arm) for curve in size.curves(arm, option)]
    multiples = sorted({multiple for curve in every for multiple in curve.loss})
    columns = [[name for name, _ in rows], [str(len(curves)) for _, curves in rows]]
    columns += [column([loss_at(curves, multiple) for _, curves in rows], best=None) for multiple in multiples]
    columns.append(column([gain_at(curves, multiples[-1]) for _, curves in rows], signed, None))
    head = ["", "seeds", *(f"{multiple}x" for multiple in multiples), f"gain at {multiples[-1]}x"]
    return title(size) + table_lines(head, columns)


def best_baseline(size: Size, multiple: int) -> tuple[str, float] | None:
    """The baseline with the lowest mean loss at this multiple, as trained or changed at inference, and this loss."""
    found = []
    for arm in size.of_family(BASELINE):
        for option in (None, *size.options(arm)):
            loss = loss_at(size.curves(arm, option), multiple)
            if loss is not None and math.isfinite(loss.mean):
                found.append((f"`{arm}`" + (f", {option_words(option)}" if option else ""), loss.mean))
    return min(found, key=lambda pair: pair[1], default=None)


def verdict(met: bool, figures: str) -> str:
    return f"{'met' if met else 'not met'}: {figures}"


def gain_verdict(gain: Spread, error: Spread | None) -> str:
    figures = signed(gain.mean, 4) + ("" if error is None else f" ± {plain(error.mean, 4)}")
    if error is not None and abs(gain.mean) < 2 * error.mean:
        return f"within two standard errors of 0: {figures}"
    return verdict(gain.mean > 0, figures)


def target_cells(size: Size, arm: str) -> Cells:
    """One cell per target; "not measured" if a number is missing."""
    curves, longest = size.curves(arm), size.longest
    cells = ["not measured"] * 5
    own_rise, at_once, best_at_once = rise(curves, longest), loss_at(curves, 1), best_baseline(size, 1)
    if own_rise is not None and longest > 1:
        cells[0] = verdict(own_rise.mean <= 0, signed(own_rise.mean, 4))
    if at_once is not None and best_at_once is not None:
        behind = at_once.mean - best_at_once[1]
        cells[1] = verdict(behind <= MAX_BEHIND, signed(behind, 4))
    long = [multiple for multiple in size.multiples if multiple >= SHORTEST_LONG]
    pairs = [(multiple, loss_at(curves, multiple), best_baseline(size, multiple)) for multiple in long]
    ahead = {multiple: own.mean - best[1] for multiple, own, best in pairs if own is not None and best is not None}
    if long and len(ahead) == len(long):
        figures = ", ".join(f"{multiple}x {signed(value, 4)}" for multiple, value in ahead.items())
        cells[2] = verdict(all(value <= 0 for value in ahead.values()), figures)
    runs = size.arms[arm]
    gain, far = gain_at(curves, longest), gain_at(size.far(arm), longest)
    if gain is not None:
        cells[3] = gain_verdict(gain, gain_error_at(curves, longest))
    if far is not None:
        cells[3] += f"; over the last quarter {gain_verdict(far, gain_error_at(size.far(arm), longest))}"
    shares = {multiple: passkey_at(runs, multiple) for run in runs for multiple in sorted(run.passkey)}
    found = {multiple: share for multiple, share in shares.items() if share is not None and multiple <= SHORTEST_LONG}
    if SHORTEST_LONG in found:
        lowest = min(found, key=lambda multiple: found[multiple])
        cells[4] = verdict(found[lowest] >= MIN_PASSKEY, f"lowest {100 * found[lowest]:.1f}% at {lowest}x")
    return cells


def targets_table(size: Size) -> list[str]:
    arms = size.of_family("lssar")
    if not arms:
        return []
    head = [
        "arm", f"{size.longest}x - 1x at most 0.00", f"1x - best softmax's at most {MAX_BEHIND}",
        f"at or below the best softmax from {SHORTEST_LONG}x on", f"full context better at {size.longest}x",
        f"passkey at least {100 * MIN_PASSKEY:.0f}% to {SHORTEST_LONG}x",
    ]  # fmt: skip
    lines = title(size) + table_lines(head, [code(arms), *zip(*(target_cells(size, arm) for arm in arms), strict=True)])
    places = [multiple for multiple in size.multiples if multiple == 1 or multiple >= SHORTEST_LONG]
    bests = [(multiple, best_baseline(size, multiple)) for multiple in places]
    named = [f"{multiple}x {best[0]} ({plain(best[1])})" for multiple, best in bests if best is not None]
    return lines + ([f"Best softmax: {'; '.join(named)}.", ""] if named else [])


def passkey_table(size: Size) -> list[str]:
    multiples = sorted({multiple for run in size.runs for multiple in run.passkey})
    if not multiples:
        return []
    columns = [code(size.arms)]
    for multiple in multiples:
        shares = [passkey_at(runs, multiple) for runs in size.arms.values()]
        columns.append(["-" if share is None else f"{100 * share:.1f}" for share in shares])
    counts = []
    for runs in size.arms.values():
        tried = {sum(n for run in runs for _, n in run.passkey.get(multiple, [])) for multiple in multiples}
        counts.append(" to ".join(str(number) for number in sorted({min(tried), max(tried)})))
    head = ["correct, %", *(f"{multiple}x" for multiple in multiples), "trials at each length"]
    return title(size) + table_lines(head, [*columns, counts])


INSIDE: dict[str, tuple[str, Callable[[float], str]]] = {
    "log_keys": ("log N", lambda value: plain(value, 2)),
    "stage1_entropy": ("entropy of stage 1", lambda value: plain(value, 2)),
    "stage1_entropy_frozen": ("with log N held at 1x", lambda value: plain(value, 2)),
    "entropy": ("entropy of the weights", lambda value: plain(value, 2)),
    "sink": ("mass on the first key", plain),
    "effective_keys": ("effective keys", lambda value: plain(value, 1)),
    "zeros": ("zeros, %", lambda value: plain(100 * value, 1)),
}


def inside_table(size: Size) -> list[str]:
    multiples = sorted({multiple for run in size.runs for multiple in run.inside})
    if not multiples:
        return []
    measured = {arm: runs for arm, runs in size.arms.items() if any(run.inside for run in runs)}
    columns = [code(measured)]
    for name, (_, show) in INSIDE.items():
        cells = []
        for runs in measured.values():
            means = [spread(run.inside.get(multiple, {}).get(name) for run in runs) for multiple in multiples]
            cells.append(" / ".join("-" if mean is None else show(mean.mean) for mean in means))
        columns.append(cells)
    shown = " / ".join(f"{multiple}x" for multiple in multiples)
    return title(size) + table_lines([f"at {shown}", *(label for label, _ in INSIDE.values())], columns)


QUANTITIES = {"power": "power", "power_per_log": "factor of log N", "ssmax_scale": "scale"}


def learned_rows(run: Run) -> list[Cells]:
    """One row for each learned quantity."""
    names = dict.fromkeys(name for layer in run.learned for name in layer)
    return [
        [f"`{run.arm}`, seed {run.seed}", QUANTITIES.get(name, name)]
        + [head_range(layer.get(name, [])) for layer in run.learned]
        for name in names
    ]


def head_range(heads: Sequence[float]) -> str:
    return " to ".join(dict.fromkeys((plain(min(heads), 2), plain(max(heads), 2)))) if heads else "-"


def layer_heads(runs: Sequence[Run]) -> Cells:
    """Column titles of the layers; global layers are marked if they are the same in every run."""
    every = {run.config.get("global_every") for run in runs}
    step = every.pop() if len(every) == 1 else None
    layers = range(1, len(runs[0].learned) + 1)
    return [f"layer {layer}" + (", global" if step and layer % step == 0 else "") for layer in layers]


def learned_table(size: Size) -> list[str]:
    lines = []
    for kind in size.kinds:
        runs = [run for run in size.of_kind(kind).runs if learned_rows(run)]
        rows = [row for run in runs for row in learned_rows(run)]
        if rows:
            head = ["lowest to highest head", "learned", *layer_heads(runs)]
            lines += title(size, kind) + table_lines(head, list(zip(*rows, strict=True)))
    return lines


def speed_table(size: Size) -> list[str]:
    times = timed(size)
    if not times:
        return []
    milliseconds = [plain(time.mean, 1) for time in times.values()]
    ratios = [plain(time.mean / times["softmax"].mean, 2) for time in times.values()]
    return title(size) + table_lines(["arm", "ms per step", "relative to softmax"], [code(times), milliseconds, ratios])


def noise_table(sizes: Sequence[Size]) -> list[str]:
    """The largest range of losses over the seeds of one arm, and the largest standard error over texts."""
    rows = []
    for size in sizes:
        several = [arm for arm, runs in size.arms.items() if len(runs) > 1]
        ranges = [
            max(
                (2 * found.half_range for arm in several if (found := loss_at(size.curves(arm), multiple))),
                default=None,
            )
            for multiple in (1, SHORTEST_LONG, size.longest)
        ]
        errors = [error for run in size.runs for error in run.own.error.values() if error is not None]
        rows.append(
            [
                f"{size.name} ({size.longest}x)",
                f"{len(several)} of {len(size.arms)}",
                *("-" if value is None else plain(value) for value in (*ranges, max(errors, default=None))),
            ]
        )
    head = ["size (longest)", "arms with several seeds", "1x", f"{SHORTEST_LONG}x", "longest", "error over texts"]
    return table_lines(head, list(zip(*rows, strict=True))) if rows else []


# How each ablation differs from LSSAR with p = 15, or what other attention it is.
ABLATED: dict[str, str] = {
    "lssar-p15": "unchanged: softplus, log d, log N, times N, minus 1, ReLU, power 15",
    "lssar-without-log-d": "scores without log d",
    "lssar-without-log-n": "scores without log N",
    "lssar-without-qk-norm": "queries and keys not normalized",
    "lssar-with-exp": "exp in place of softplus",
    "lssar-with-sigmoid": "sigmoid in place of softplus",
    "lssar-with-relu": "ReLU in place of softplus",
    "lssar-with-elu1": "ELU + 1 in place of softplus",
    "lssar-without-l1": "stage 1 not normalized",
    "lssar-without-times-n": "stage 1 not multiplied by N: nothing is above 1",
    "lssar-without-offset": "no offset: every key keeps some weight",
    "lssar-then-exp": "exp in place of ReLU and power",
    **{f"lssar-p{power}": f"power {power}" for power in (1, 2, 3, 4, 7, 11, 23, 31)},
    "lssa": "stage 1 only",
    "lssa-without-log-d": "stage 1 only, without log d",
    "lssa-without-log-n": "stage 1 only, without log N",
    "lssa-without-qk-norm": "stage 1 only, queries and keys not normalized",
    "softmax": "plain softmax",
    "softmax-qknorm": "softmax of cosines",
    "softmax-logn": "softmax, scores times log N",
    "softmax-qknorm-logn": "softmax of cosines times log N",
    "softmax-qknorm-logn-learned": "the same, with a learned scale per head",
    "softmax-reweighted": "softmax, then stage 2 with power 15",
    "sigmoid-l1": "sigmoid, normalized",
    "sigmoid-l1-reweighted": "sigmoid, normalized, then stage 2",
    "relu-l1-reweighted": "ReLU of plain scores, normalized, then stage 2",
}
WHOLE = "lssar-p15"


def ablations_table(size: Size) -> list[str]:
    arms = [arm for arm in ABLATED if arm in size.arms]
    curves = [size.curves(arm) for arm in arms]
    whole = loss_at(size.curves(WHOLE), 1) if WHOLE in size.arms else None
    multiples = [multiple for multiple in (1, 4, 16) if multiple in size.multiples]
    columns = [code(arms), [ABLATED[arm] for arm in arms], [str(len(own)) for own in curves]]
    columns += [column([loss_at(own, multiple) for own in curves]) for multiple in multiples]
    columns.append(column([rise(own, multiples[-1]) for own in curves], signed))
    behind = [None if whole is None else spread(one.loss[1] - whole.mean for one in own) for own in curves]
    columns.append(column(behind, signed))
    head = ["arm", "attention", "seeds", *(f"{multiple}x" for multiple in multiples)]
    head += [f"{multiples[-1]}x - 1x", f"1x, minus `{WHOLE}`"]
    return title(size) + table_lines(head, columns)


def best_table(sizes: Sequence[Size]) -> list[str]:
    """The best softmax and the best LSSAR of the mix with heads of 128, from the smallest model to the largest."""
    trained = [size for size in sizes if {OURS_WIDE, THEIRS_WIDE} <= size.arms.keys()]
    if not trained:
        return []
    multiples = sorted(set.intersection(*(set(size.multiples) for size in trained)))
    rows = [
        (f"{parameters(size) / 1e6:.0f}M", name, size.curves(arm))
        for size in sorted(trained, key=parameters)
        for arm, name in ((THEIRS_WIDE, "softmax"), (OURS_WIDE, "LSSAR"))
    ]
    columns = [[model for model, *_ in rows], [name for _, name, _ in rows]]
    columns += [[cell(loss_at(curves, multiple)) for *_, curves in rows] for multiple in multiples]
    columns.append([cell(rise(curves, multiples[-1]), signed) for *_, curves in rows])
    columns.append([str(len(curves)) for *_, curves in rows])
    head = ["parameters", "", *(f"{multiple}x" for multiple in multiples), f"{multiples[-1]}x - 1x", "seeds"]
    return table_lines(head, columns)


def sizes_tables(sizes: Sequence[Size]) -> list[str]:
    """The gap between the best LSSAR and the best softmax by size: one table per training text and head width."""
    lines = []
    for heads, trained in (("", sizes), (", heads of 128", with_wide_heads(sizes))):
        for group in on_one_text(trained):
            what = "all else equal" if alike(group) else "lengths and amounts of text differ too"
            names = ", ".join(size.name for size in group)
            lines += [f"**{names}{heads}**: one text, {what}", "", *gap_table(group)]
    return lines


def gap_table(sizes: Sequence[Size]) -> list[str]:
    """Gaps at the lengths that all sizes have, and their slope over sizes."""
    shared = set.intersection(*(set(size.multiples) for size in sizes))
    multiples = [multiple for multiple in sorted(shared) if multiple == 1 or multiple >= SHORTEST_LONG]
    with_slope = len(sizes) >= MIN_SIZES
    freedom = f"for each factor of ten; {degrees_of_freedom(sizes, 1)} degrees of freedom"
    columns = [
        [*(size.name for size in sizes), "slope"],
        [*(f"{parameters(size) / 1e6:.0f}M" for size in sizes), freedom],
        [*(f"{size.any_run.config['sequence_length']:,}" for size in sizes), ""],
        [*(f"{size.any_run.tokens / 1e6:.0f}M" for size in sizes), ""],
        [*(" and ".join(str(len(size.arms[arm])) for arm in (OURS, THEIRS)) for size in sizes), ""],
    ]
    for multiple in multiples:
        gaps = [gap_at(size, multiple) for size in sizes]
        slope = slope_at(sizes, multiple)
        line = "-"
        if slope is not None:
            line = signed(slope.value, 4) + ("" if slope.error is None else f" ± {plain(slope.error, 4)}")
        columns.append([*("-" if gap is None else signed(gap, 4) for gap in gaps), line])
    columns.append([*("-" if (ratio := step_ratio(size)) is None else plain(ratio, 2) for size in sizes), ""])
    head = ["size", "parameters", "trained at", "tokens of training", "seeds", *(f"{m}x" for m in multiples)]
    head.append("step, relative to softmax")
    return table_lines(head, columns if with_slope else [column[:-1] for column in columns])


def figure_links(size: Size) -> list[str]:
    shown = [(name, figure.title(size)) for name, figure in FIGURES.items() if figure.lines(size)]
    return [f"![{alt}](../figures/{name}-{size.name}.svg)" for name, alt in shown] + [""]


BY_SIZE: dict[str, Callable[[Size], list[str]]] = {
    "runs": runs_table,
    "headline": loss_table,
    "figures": figure_links,
    "far": far_table,
    "inference": inference_table,
    "targets": targets_table,
    "passkey": passkey_table,
    "inside": inside_table,
    "learned": learned_table,
    "study-speed": speed_table,
    "ablations": ablations_table,
}
OF_ALL: dict[str, Callable[[Sequence[Size]], list[str]]] = {
    "best": best_table,
    "sizes": sizes_tables,
    "noise": noise_table,
}


def study_tables(sizes: Sequence[Size]) -> dict[str, str]:
    made = {}
    for name, write in BY_SIZE.items():
        shown = [size for size in sizes if name == "runs" or (name == "ablations") == (size.name in SMALL)]
        made[name] = [line for size in shown for line in write(size)]
    for name, write_all in OF_ALL.items():
        made[name] = write_all([size for size in sizes if size.name not in SMALL])
    return {name: "\n".join(lines).strip() or NOTHING for name, lines in made.items()}


def make_tables(results: Path) -> dict[str, str]:
    try:
        return study_tables(read_study(results / "study"))
    except RecordError as error:
        raise TableError(str(error)) from error
