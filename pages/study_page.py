"""Writes the findings, tables and figures of docs/results.md and docs/results-tables.md from files of runs/study.py.

    python pages/study_page.py            rewrites what stands between <!-- begin: NAME --> and <!-- end: NAME -->
    python pages/study_page.py --check    writes nothing; exit status 1, naming what is out of date

What people wrote outside of the markers stays as it is. Figures need matplotlib and are left alone without it; the CSV
file beside a figure is written with it, so it says which numbers the drawing shows.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path

from page_blocks import PageError, parts_of_several, plain, rewritten, signed, table
from study_figures import FIGURES, figure_data, stale_figures, write_figures
from study_findings import PROSE, prose_of
from study_runs import (
    BASELINE,
    SMALL,
    Curve,
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
from study_sizes import (
    LEAST_SIZES,
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

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results" / "study"
PAGES = [ROOT / "docs" / "results.md", ROOT / "docs" / "results-tables.md"]  # each block is on one of them
NOTHING = "No runs yet."
SHORTEST_LONG = 16  # the targets speak of "16x on" and "to 16x"
LEAST_PASSKEY = 0.9
MOST_BEHIND = 0.01


def cell(value: Spread | None, show: Callable[[float], str] = plain, *, bold: bool = False) -> str:
    if value is None:
        return "-"
    mean = f"**{show(value.mean)}**" if bold else show(value.mean)
    return f"{mean} ± {plain(value.half_range)}" if value.count > 1 else mean


def column(
    values: Sequence[Spread | None], show: Callable[[float], str] = plain, best: Callable[..., float] | None = min
) -> list[str]:
    """Cells with the best in bold; what reads the same as the best is as good."""
    finite = [value.mean for value in values if value is not None and math.isfinite(value.mean)]
    winner = show(best(finite)) if best is not None and finite else None
    return [cell(value, show, bold=value is not None and show(value.mean) == winner) for value in values]


def caption(size: Size, kind: str) -> list[str]:
    return [f"**{size.name}, trained at {size.any_run.config['sequence_length']} tokens, {kind}**", ""]


def title(size: Size) -> list[str]:
    return [f"**{size.name}**, trained at {size.any_run.config['sequence_length']} tokens", ""]


def distinct(values: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(values))


def commit_words(commit: str) -> str:
    name, dirty, _ = commit.partition("-dirty")
    return f"`{name[:12]}`" + (" with changes" if dirty else "")


def of_several_seeds(size: Size, arms: Iterable[str]) -> list[str]:
    counts = {arm: len(size.arms[arm]) for arm in arms}
    several = [f"`{arm}` ({count})" for arm, count in counts.items() if count > 1]
    if len(several) == len(counts) > 1 and len(set(counts.values())) == 1:
        several = [f"{next(iter(counts.values()))} of every arm"]
    words = "± is half the range between the lowest and the highest seed, around the mean; seeds: "
    return [words + ", ".join(several) + ".", ""] if several else []


def runs_block(size: Size) -> list[str]:
    run, config = size.any_run, size.any_run.config
    parameters = sorted({other.parameters for other in size.runs})
    between = " to ".join(f"{number:,}" for number in (parameters[:1] + parameters[1:][-1:]))
    seeds = [f"`{arm}` ({', '.join(str(run.seed) for run in runs)})" for arm, runs in size.arms.items()]
    *more, fewest = sorted({other.config["heads"] for other in size.runs}, reverse=True)
    heads = " or ".join(filter(None, (", ".join(map(str, more)), str(fewest))))
    packages = ("python", "torch", "cuda", "triton", "transformers")
    versions = [", ".join(f"{name} {other.versions.get(name)}" for name in packages) for other in size.runs]
    used = run.used
    facts = {
        "model": f"{config['layers']} layers, width {config['width']}, {heads} heads; {between} parameters",
        "training": f"{config['sequence_length']} tokens, {config['steps']:,} steps of {config['batch_size']} "
        f"sequences: {run.tokens:,} tokens, the same in the same order for every arm",
        "measured on": f"{used['sequences']} texts of {used['longest']:,} tokens; "
        f"validation documents that are as long: {used['documents']}",
        "arms (seeds)": ", ".join(seeds),
        "machine": distinct(other.machine for other in size.runs),
        "commit": distinct(commit_words(other.commit) for other in size.runs),
        "versions": distinct(versions),
    }
    return table([size.name, ""], [list(facts), list(facts.values())], "---")


def headline_block(size: Size) -> list[str]:
    parts = [(kind, size.of_kind(kind)) for kind in size.kinds]
    return [line for kind, part in parts for line in caption(part, kind) + headline_table(part)]


def headline_table(size: Size) -> list[str]:
    curves, longest = [size.curves(arm) for arm in size.arms], size.longest
    columns = [[f"`{arm}`" for arm in size.arms]]
    columns += [column([loss_at(own, multiple) for own in curves]) for multiple in size.multiples]
    columns.append(column([rise(own, longest) for own in curves], signed))
    head = ["arm", *(f"{multiple}x" for multiple in size.multiples), f"{longest}x - 1x"]
    for multiple in sorted({SHORTEST_LONG, longest} & set(size.multiples)):
        columns += gain_columns(curves, multiple)
        head += [f"gain at {multiple}x", "its standard error"]
    return table(head, columns) + of_several_seeds(size, size.arms)


def gain_columns(curves: Sequence[Sequence[Curve]], multiple: int) -> list[list[str]]:
    """The gain of each arm there, and its standard error."""
    errors = [gain_error_at(own, multiple) for own in curves]
    return [
        column([gain_at(own, multiple) for own in curves], signed, max),
        ["-" if error is None else plain(error.mean) for error in errors],
    ]


def far_block(size: Size) -> list[str]:
    """The control over the last quarter of each text, of the arms that have it."""
    arms = [arm for arm in size.arms if any(curve.gain for curve in size.far(arm))]
    if not arms:
        return []
    curves = [size.far(arm) for arm in arms]
    columns, head = [[f"`{arm}`" for arm in arms]], ["gain"]
    for multiple in sorted({multiple for own in curves for curve in own for multiple in curve.gain}):
        columns += gain_columns(curves, multiple)
        head += [f"at {multiple}x", "its standard error"]
    targets = {count for arm in arms for run in size.arms[arm] for count in run.far_targets}
    words = " to ".join(f"{number:,}" for number in sorted({min(targets), max(targets)}))
    return title(size) + table(head, columns) + [f"{words} target tokens.", "", *of_several_seeds(size, arms)]


def inference_block(size: Size) -> list[str]:
    rows = []
    for arm in size.arms:
        options = size.options(arm)
        if options:
            rows += [(f"`{arm}`", size.curves(arm))]
            rows += [(f"`{arm}`, {option_words(option)}", size.curves(arm, option)) for option in options]
    if not rows:
        return []
    every = [curve for arm in size.arms for option in size.options(arm) for curve in size.curves(arm, option)]
    multiples = sorted({multiple for curve in every for multiple in curve.loss})
    columns = [[name for name, _ in rows]]
    columns += [column([loss_at(curves, multiple) for _, curves in rows], best=None) for multiple in multiples]
    columns.append(column([gain_at(curves, multiples[-1]) for _, curves in rows], signed, None))
    head = ["", *(f"{multiple}x" for multiple in multiples), f"gain at {multiples[-1]}x"]
    return title(size) + table(head, columns) + of_several_seeds(size, filter(size.options, size.arms))


def best_baseline(size: Size, multiple: int) -> tuple[str, float] | None:
    """The lowest mean loss there of any baseline, as trained or changed at inference."""
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
    figures = signed(gain.mean, 4) + ("" if error is None else f", standard error {plain(error.mean, 4)}")
    unsure = error is not None and abs(gain.mean) < 2 * error.mean
    return f"not told from 0: {figures}" if unsure else verdict(gain.mean > 0, figures)


def targets_of(size: Size, arm: str) -> list[str]:
    """One cell per target; "not measured" where a figure is missing."""
    curves, longest = size.curves(arm), size.longest
    cells = ["not measured"] * 5
    own_rise, at_once, best_at_once = rise(curves, longest), loss_at(curves, 1), best_baseline(size, 1)
    if own_rise is not None and longest > 1:
        cells[0] = verdict(own_rise.mean <= 0, signed(own_rise.mean, 4))
    if at_once is not None and best_at_once is not None:
        behind = at_once.mean - best_at_once[1]
        cells[1] = verdict(behind <= MOST_BEHIND, signed(behind, 4))
    long = [multiple for multiple in size.multiples if multiple >= SHORTEST_LONG]
    pairs = [(multiple, loss_at(curves, multiple), best_baseline(size, multiple)) for multiple in long]
    ahead = {multiple: own.mean - best[1] for multiple, own, best in pairs if own is not None and best is not None}
    if long and len(ahead) == len(long):
        figures = ", ".join(f"{multiple}x {signed(value, 4)}" for multiple, value in ahead.items())
        cells[2] = verdict(all(value <= 0 for value in ahead.values()), figures)
    runs = size.arms[arm]
    gain = gain_at(curves, longest)
    if gain is not None:
        cells[3] = gain_verdict(gain, gain_error_at(curves, longest))
    far = gain_at(size.far(arm), longest)
    if far is not None:
        cells[3] += f"; over the last quarter {gain_verdict(far, gain_error_at(size.far(arm), longest))}"
    shares = {multiple: passkey_at(runs, multiple) for run in runs for multiple in sorted(run.passkey)}
    found = {multiple: share for multiple, share in shares.items() if share is not None and multiple <= SHORTEST_LONG}
    if SHORTEST_LONG in found:
        lowest = min(found, key=lambda multiple: found[multiple])
        cells[4] = verdict(found[lowest] >= LEAST_PASSKEY, f"lowest {100 * found[lowest]:.1f}% at {lowest}x")
    return cells


def targets_block(size: Size) -> list[str]:
    arms = size.of_family("lssar")
    if not arms:
        return []
    head = [
        "arm", f"{size.longest}x - 1x at most 0.00", f"1x - best softmax's at most {MOST_BEHIND}",
        f"at or below the best softmax from {SHORTEST_LONG}x on", f"full context better at {size.longest}x",
        f"pass key at least {100 * LEAST_PASSKEY:.0f}% to {SHORTEST_LONG}x",
    ]  # fmt: skip
    cells = [targets_of(size, arm) for arm in arms]
    lines = title(size) + table(head, [[f"`{arm}`" for arm in arms], *zip(*cells, strict=True)], "---")
    places = [multiple for multiple in size.multiples if multiple == 1 or multiple >= SHORTEST_LONG]
    bests = [(multiple, best_baseline(size, multiple)) for multiple in places]
    named = [f"{multiple}x {best[0]} ({plain(best[1])})" for multiple, best in bests if best is not None]
    return lines + ([f"The best softmax: {'; '.join(named)}.", ""] if named else [])


def passkey_block(size: Size) -> list[str]:
    multiples = sorted({multiple for run in size.runs for multiple in run.passkey})
    if not multiples:
        return []
    columns = [[f"`{arm}`" for arm in size.arms]]
    for multiple in multiples:
        shares = [passkey_at(runs, multiple) for runs in size.arms.values()]
        columns.append(["-" if share is None else f"{100 * share:.1f}" for share in shares])
    counts = []
    for runs in size.arms.values():
        tried = {sum(n for run in runs for _, n in run.passkey.get(multiple, [])) for multiple in multiples}
        counts.append(" to ".join(str(number) for number in sorted({min(tried), max(tried)})))
    head = ["right, %", *(f"{multiple}x" for multiple in multiples), "trials at each length"]
    return title(size) + table(head, [*columns, counts])


INSIDE: dict[str, tuple[str, Callable[[float], str]]] = {
    "log_keys": ("log N", lambda value: plain(value, 2)),
    "stage1_entropy": ("entropy of stage 1", lambda value: plain(value, 2)),
    "stage1_entropy_frozen": ("with log N held at 1x", lambda value: plain(value, 2)),
    "entropy": ("entropy of the weights", lambda value: plain(value, 2)),
    "sink": ("mass on the first key", plain),
    "effective_keys": ("effective keys", lambda value: plain(value, 1)),
    "zeros": ("zeros, %", lambda value: plain(100 * value, 1)),
}


def inside_block(size: Size) -> list[str]:
    multiples = sorted({multiple for run in size.runs for multiple in run.inside})
    if not multiples:
        return []
    looked_into = {arm: runs for arm, runs in size.arms.items() if any(run.inside for run in runs)}
    columns = [[f"`{arm}`" for arm in looked_into]]
    for word, (_, show) in INSIDE.items():
        cells = []
        for runs in looked_into.values():
            means = [spread(run.inside.get(multiple, {}).get(word) for run in runs) for multiple in multiples]
            cells.append(" / ".join("-" if mean is None else show(mean.mean) for mean in means))
        columns.append(cells)
    shown = " / ".join(f"{multiple}x" for multiple in multiples)
    return title(size) + table([f"at {shown}", *(words for words, _ in INSIDE.values())], columns)


QUANTITIES = {"power": "power", "power_per_log": "factor of log N", "ssmax_scale": "scale"}


def learned_rows(run: Run) -> list[list[str]]:
    """One row, or one for each quantity where layers have learned different ones."""
    names = dict.fromkeys(name for layer in run.learned for name in layer)
    return [
        [f"`{run.arm}`, seed {run.seed}", QUANTITIES.get(name, name)]
        + [range_of(layer.get(name, [])) for layer in run.learned]
        for name in names
    ]


def range_of(heads: Sequence[float]) -> str:
    if not heads:
        return "-"
    return " to ".join(dict.fromkeys((plain(min(heads), 2), plain(max(heads), 2))))


def layer_heads(runs: Sequence[Run]) -> list[str]:
    """Those that see everything are marked where they are the same in every run."""
    every = {run.config.get("global_every") for run in runs}
    step = every.pop() if len(every) == 1 else None
    layers = range(1, len(runs[0].learned) + 1)
    return [f"layer {layer}" + (", sees everything" if step and layer % step == 0 else "") for layer in layers]


def learned_block(size: Size) -> list[str]:
    lines = []
    for kind in size.kinds:
        runs = [run for run in size.of_kind(kind).runs if learned_rows(run)]
        rows = [row for run in runs for row in learned_rows(run)]
        if rows:
            head = ["lowest to highest head", "learned", *layer_heads(runs)]
            lines += caption(size, kind) + table(head, list(zip(*rows, strict=True)))
    return lines


def speed_block(size: Size) -> list[str]:
    times = timed(size)
    if not times:
        return []
    milliseconds = [plain(time.mean, 1) for time in times.values()]
    ratios = [plain(time.mean / times["softmax"].mean, 2) for time in times.values()]
    lines = table(["arm", "ms a step", "times softmax's"], [[f"`{arm}`" for arm in times], milliseconds, ratios])
    return title(size) + lines


def noise_block(size: Size) -> list[str]:
    places = dict.fromkeys((1, size.longest))
    several = [arm for arm, runs in size.arms.items() if len(runs) > 1]
    errors = [error for run in size.runs for error in run.own.error.values() if error is not None]
    over_texts = f"the standard error over texts is {plain(max(errors))} at most" if errors else ""
    if several:
        apart = []
        for multiple in places:
            spreads = [loss_at(size.curves(arm), multiple) for arm in several]
            widest = max((2 * found.half_range for found in spreads if found is not None), default=None)
            if widest is not None:
                apart.append(f"{plain(widest)} at {multiple}x")
        named = ", ".join(f"`{arm}`" for arm in several)
        sentence = f"two seeds of one arm ({named}) are at most {' and '.join(apart)} apart"
        sentence += f", and {over_texts}" if over_texts else ""
    else:
        sentence = f"each arm has one seed, so how far seeds differ is not known here; {over_texts or 'one text alone'}"
    return [f"**{size.name}**: {sentence}.", ""]


# What is changed in LSSAR with the power 15, or what else stands beside it.
ABLATED: dict[str, str] = {
    "lssar-p15": "the whole: softplus, log d, log N, times N, less 1, ReLU, the power 15",
    "lssar-without-log-d": "scores without log d",
    "lssar-without-log-n": "scores without log N",
    "lssar-without-qk-norm": "queries and keys not normalised",
    "lssar-with-exp": "exp in place of softplus",
    "lssar-with-sigmoid": "sigmoid in place of softplus",
    "lssar-with-relu": "ReLU in place of softplus",
    "lssar-with-elu1": "ELU + 1 in place of softplus",
    "lssar-without-l1": "stage 1 not normalised",
    "lssar-without-times-n": "stage 1 not multiplied by N: nothing is above 1",
    "lssar-without-offset": "no 1 subtracted: every key keeps some weight",
    "lssar-then-exp": "exp in place of ReLU and power",
    "lssar-p1": "power 1",
    "lssar-p2": "power 2",
    "lssar-p3": "power 3",
    "lssar-p4": "power 4",
    "lssar-p7": "power 7",
    "lssar-p11": "power 11",
    "lssar-p23": "power 23",
    "lssar-p31": "power 31",
    "lssa": "stage 1 alone",
    "lssa-without-log-d": "stage 1 alone, without log d",
    "lssa-without-log-n": "stage 1 alone, without log N",
    "lssa-without-qk-norm": "stage 1 alone, queries and keys not normalised",
    "softmax": "plain softmax",
    "softmax-qknorm": "softmax of cosines",
    "softmax-logn": "softmax, scores times log N",
    "softmax-qknorm-logn": "softmax of cosines times log N",
    "softmax-qknorm-logn-learned": "the same, with a learned scale per head",
    "softmax-reweighted": "softmax, then stage 2 with the power 15",
    "sigmoid-l1": "sigmoid, normalised",
    "sigmoid-l1-reweighted": "sigmoid, normalised, then stage 2",
    "relu-l1-reweighted": "ReLU of plain scores, normalised, then stage 2",
}
WHOLE = "lssar-p15"


def ablations_block(size: Size) -> list[str]:
    arms = [arm for arm in ABLATED if arm in size.arms]
    curves = [size.curves(arm) for arm in arms]
    whole = loss_at(size.curves(WHOLE), 1) if WHOLE in size.arms else None
    multiples = [multiple for multiple in (1, 4, 16) if multiple in size.multiples]
    columns = [[f"`{arm}`" for arm in arms], [ABLATED[arm] for arm in arms]]
    columns += [column([loss_at(own, multiple) for own in curves]) for multiple in multiples]
    columns.append(column([rise(own, multiples[-1]) for own in curves], signed))
    behind = [None if whole is None else spread(one.loss[1] - whole.mean for one in own) for own in curves]
    columns.append(column(behind, signed))
    head = ["arm", "attention", *(f"{multiple}x" for multiple in multiples)]
    head += [f"{multiples[-1]}x - 1x", f"1x, less `{WHOLE}`'s"]
    return title(size) + table(head, columns) + of_several_seeds(size, arms)


def best_block(sizes: Sequence[Size]) -> list[str]:
    """The strongest softmax of the mix and the best LSSAR, heads of 128, from the smallest model to the largest."""
    trained = [size for size in sizes if {OURS_WIDE, THEIRS_WIDE} <= size.arms.keys()]
    if not trained:
        return []
    multiples = sorted(set.intersection(*(set(size.multiples) for size in trained)))
    rows = [
        (f"{parameters(size) / 1e6:.0f}M", words, size.curves(arm))
        for size in sorted(trained, key=parameters)
        for arm, words in ((THEIRS_WIDE, "softmax"), (OURS_WIDE, "LSSAR"))
    ]
    columns = [[model for model, *_ in rows], [words for _, words, _ in rows]]
    columns += [[cell(loss_at(curves, multiple)) for *_, curves in rows] for multiple in multiples]
    columns.append([cell(rise(curves, multiples[-1]), signed) for *_, curves in rows])
    columns.append([str(len(curves)) for *_, curves in rows])
    head = ["parameters", "", *(f"{multiple}x" for multiple in multiples), f"{multiples[-1]}x - 1x", "seeds"]
    return table(head, columns)


def sizes_block(sizes: Sequence[Size]) -> list[str]:
    """The best LSSAR beside the strongest softmax, size by size, one table for each text and width of heads."""
    lines = []
    for heads, trained in (("", sizes), (", heads of 128", with_wide_heads(sizes))):
        for group in on_one_text(trained):
            what = "all else equal" if alike(group) else "lengths and amounts of text differ too"
            names = ", ".join(size.name for size in group)
            lines += [f"**{names}{heads}**: one text, {what}", "", *sizes_table(group)]
    if lines:
        lines += [
            f"Loss of `{OURS}` less that of `{THEIRS}`, or of these with `-wide`. ± is one standard error of the "
            "slope, from how far seeds differ; step times are of runs that had the GPU to themselves.",
            "",
        ]
    return lines


def sizes_table(sizes: Sequence[Size]) -> list[str]:
    """At the lengths that all of them have."""
    shared = set.intersection(*(set(size.multiples) for size in sizes))
    multiples = [multiple for multiple in sorted(shared) if multiple == 1 or multiple >= SHORTEST_LONG]
    columns = [
        [*(size.name for size in sizes), "slope"],
        [*(f"{parameters(size) / 1e6:.0f}M" for size in sizes), "for each factor of ten"],
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
    head = ["size", "parameters", "trained at", "tokens of training", "seeds", *(f"{m}x" for m in multiples)]
    head.append("step time, times softmax's")
    columns.append([*("-" if (ratio := step_ratio(size)) is None else plain(ratio, 2) for size in sizes), ""])
    if len(sizes) < LEAST_SIZES:
        return table(head, [column[:-1] for column in columns])
    freedom = degrees_of_freedom(sizes, 1)
    degrees = f"{freedom} degree{'' if freedom == 1 else 's'} of freedom"
    return [*table(head, columns), f"Errors of these slopes rest on {degrees}.", ""]


def figures_block(size: Size) -> list[str]:
    shown = [(name, figure.title(size)) for name, figure in FIGURES.items() if figure.lines(size)]
    return [f"![{words}](figures/{name}-{size.name}.svg)" for name, words in shown] + [""]


BLOCKS: dict[str, Callable[[Size], list[str]]] = {
    "runs": runs_block,
    "headline": headline_block,
    "figures": figures_block,
    "far": far_block,
    "inference": inference_block,
    "targets": targets_block,
    "passkey": passkey_block,
    "inside": inside_block,
    "learned": learned_block,
    "speed": speed_block,
    "noise": noise_block,
    "ablations": ablations_block,
}
# Of all sizes together.
BLOCKS_OF_ALL: dict[str, Callable[[Sequence[Size]], list[str]]] = {"best": best_block, "sizes": sizes_block}


def blocks_of(sizes: Sequence[Size], *, whole: bool = False) -> dict[str, str]:
    """By name. With `whole` every run that a sentence speaks of has to be there."""
    made = {}
    for name, block in BLOCKS.items():
        shown = [size for size in sizes if name == "runs" or (name == "ablations") == (size.name in SMALL)]
        made[name] = "\n".join(line for size in shown for line in block(size)).strip() or NOTHING
    for name, block_of_all in BLOCKS_OF_ALL.items():
        made[name] = "\n".join(block_of_all(sizes)).strip() or NOTHING
    return made | prose_of(sizes, NOTHING, whole=whole)


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 where it would")
    parser.add_argument("--results", type=Path, default=RESULTS, help="files of runs/study.py")
    parser.add_argument("--page", type=Path, nargs="+", default=PAGES, help="that have all blocks among them")
    parser.add_argument("--figures", type=Path, default=ROOT / "docs" / "figures")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parsed(arguments)
    try:
        # A clone without runs has no such folder: git keeps no empty ones. A folder that was named has to be there.
        if options.results != RESULTS and not options.results.is_dir():
            raise PageError(f"{options.results} is not a folder")
        sizes = read_study(options.results)
        pages = parts_of_several(options.page, [*BLOCKS, *BLOCKS_OF_ALL, *PROSE])
        blocks = blocks_of(sizes, whole=bool(sizes) and options.results == RESULTS)
    except PageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    written = {page: rewritten(text, places, blocks) for page, (text, places) in pages.items()}
    data = figure_data([size for size in sizes if size.name not in SMALL])
    if options.check:
        stale = [f"block {name}" for _, changed in written.values() for name in changed]
        stale += [f"figure {stem}" for stem in stale_figures(options.figures, data)]
        if stale:
            print(f"out of date: {', '.join(stale)}; run python pages/study_page.py", file=sys.stderr)
        return 1 if stale else 0
    for page, (text, changed) in written.items():
        page.write_text(text)
        print(f"{page}: {', '.join(changed) or 'nothing'} changed")
    if data and find_spec("matplotlib") is None:
        print("the figures are left as they are: matplotlib is not installed")
    elif data:
        write_figures(options.figures, data)
        print(f"{options.figures}: {', '.join(data)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
