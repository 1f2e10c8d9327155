"""How far the best LSSAR of the mix is from the strongest softmax: by size, and by the width of heads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean, variance

from claims import MissingError, each, gaps, holds, listed, nats, number, seeds
from page_blocks import plain, signed
from study_facts import LONG, Facts, Study
from study_findings_mix import ALL_ELSE_EQUAL, FIRST_TEXT, NARROW_TOO, millions, up_to_16
from study_runs import Size
from study_sizes import (
    OURS,
    OURS_192,
    OURS_256,
    OURS_WIDE,
    THEIRS,
    THEIRS_192,
    THEIRS_256,
    THEIRS_WIDE,
    Slope,
    alike,
    degrees_of_freedom,
    on_one_text,
    slope_at,
    with_wide_heads,
)

A_FEW_THOUSANDTHS = 0.0055  # nats
TOLD = 1.9  # standard errors: what is called ahead or behind
WIDTHS = {128: (OURS_WIDE, THEIRS_WIDE), 192: (OURS_192, THEIRS_192), 256: (OURS_256, THEIRS_256)}


@dataclass(frozen=True)
class Behind:
    """With heads of 64, over sizes and texts; and seeds of LSSAR from each other."""

    at_once: list[float]
    far: list[float]
    seeds_apart: list[float]  # at 16x


def behind_with_narrow_heads(study: Study) -> Behind:
    sizes = [study[name] for name in (*FIRST_TEXT, *NARROW_TOO)]
    for facts in sizes:
        behind = facts.below(THEIRS, OURS, facts.size.multiples)
        holds(behind, f"LSSAR is behind softmax in the mix at {facts.size.name}")
    return Behind(
        [facts.behind(OURS, THEIRS, 1) for facts in sizes],
        [facts.behind(OURS, THEIRS, m) for facts in sizes for m in LONG if m in facts.size.multiples],
        [facts.apart(OURS, 16) for facts in sizes],
    )


def behind_with_wide_heads(study: Study, multiple: int) -> list[float]:
    """By size, all else equal."""
    return [study[name].behind(OURS_WIDE, THEIRS_WIDE, multiple) for name in ALL_ELSE_EQUAL]


def a_few_thousandths(study: Study) -> None:
    for multiple in study["10m-again"].size.multiples:
        found = behind_with_wide_heads(study, multiple)
        holds(max(map(abs, found)) < A_FEW_THOUSANDTHS, f"with heads of 128 the gap is small at {multiple}x")
        if multiple <= 16:
            holds(min(found) > 0, f"with heads of 128 softmax is ahead at every size at {multiple}x")


def the_strongest_softmax(study: Study) -> None:
    facts = study["10m"]
    others = [arm for arm in facts.size.arms if arm != THEIRS]
    strongest = all(facts.below(THEIRS, arm, facts.size.multiples) for arm in others)
    holds(strongest, "softmax with a learned scale per head is the strongest arm at 10m")


def seeds_of_the_wide(study: Study) -> str:
    """Of LSSAR and softmax alike; the last size may have fewer."""
    counts = [min(study[name].count(arm) for arm in (OURS_WIDE, THEIRS_WIDE)) for name in ALL_ELSE_EQUAL]
    *first, last = counts
    words = f"at least {seeds(min(first))} of each" if len(set(first)) > 1 else f"{seeds(first[0])} of each"
    return words if last >= min(first) else f"{words}, {number(last)} of the largest"


def the_gap(study: Study) -> str:
    a_few_thousandths(study)
    the_strongest_softmax(study)
    narrow = behind_with_narrow_heads(study)
    largest, smallest = study[NARROW_TOO[-1]], study[NARROW_TOO[0]]
    sizes = [study[name] for name in ALL_ELSE_EQUAL]
    at = {m: each(behind_with_wide_heads(study, m), signed) for m in (1, 16, 64)}
    return (
        "**LSSAR is a few thousandths of a nat behind softmax.** The strongest softmax in the mix is that of cosines "
        "times log N and a scale that each head learns. With heads of 128 and "
        f"{listed(map(millions, sizes))} parameters, all else equal ({seeds_of_the_wide(study)}), LSSAR less softmax "
        f"is {at[1]} at 1x, {at[16]} at 16x and {at[64]} at 64x. With heads of 64 ({millions(smallest)} to "
        f"{millions(largest)}, two texts) it is behind by {gaps(narrow.at_once)} at 1x and by {gaps(narrow.far)} from "
        f"16x on, where its seeds are up to {plain(max(narrow.seeds_apart))} apart."
    )


def slope_all_else_equal(sizes: Sequence[Size], names: Sequence[str], multiple: int) -> Slope:
    """Of the gap, for each factor of ten in parameters."""
    groups = {tuple(size.name for size in group): group for group in on_one_text(sizes) if alike(group)}
    slope = slope_at(groups.get(tuple(names), []), multiple)
    if slope is None or slope.error is None:
        raise MissingError(f"both arms, and two seeds of one, at {listed(names)}")
    return slope


def size_does_not_close_it(study: Study) -> str:
    words = []
    for width, sizes, names in ((64, study.sizes, NARROW_TOO), (128, with_wide_heads(study.sizes), ALL_ELSE_EQUAL)):
        slopes = {m: slope_all_else_equal(sizes, names, m) for m in (1, *LONG)}
        for multiple, slope in slopes.items():
            none = abs(slope.value) < 2 * (slope.error or 0)
            holds(none, f"with heads of {width} no slope of the gap is told at {multiple}x")
        by_ten = listed(f"{signed(slopes[m].value)} ± {plain(slopes[m].error or 0)} at {m}x" for m in (1, 16, 64))
        freedom = degrees_of_freedom([size for size in sizes if size.name in names], 1)
        words.append(f"{by_ten} with heads of {width} ({number(freedom)} degrees of freedom)")
    changes = " and by ".join(words)
    return (
        f"**Size does not change that.** For each factor of ten in parameters the gap changes by {changes}: none is "
        "told from no change ([table](#size-does-the-gap-close))."
    )


def won_by_wide_heads(facts: Facts) -> str:
    """What heads of 128 bring beside heads of 64, LSSAR and softmax."""
    words = []
    for multiple in (1, 16, 64):
        ours, theirs = facts.behind(OURS, OURS_WIDE, multiple), facts.behind(THEIRS, THEIRS_WIDE, multiple)
        words.append(f"{nats(ours)} at {multiple}x (softmax {nats(theirs)})")
    return listed(words)


def wide_heads(study: Study) -> str:
    sizes = [study[name] for name in ("10m-again", "85m-again")]
    for facts in sizes:
        for wide, narrow in ((OURS_WIDE, OURS), (THEIRS_WIDE, THEIRS)):
            better = facts.below(wide, narrow, facts.size.multiples)
            holds(better, f"{wide} is below {narrow} at every length at {facts.size.name}")
        for m in (1, 16, 64):
            more = facts.behind(OURS, OURS_WIDE, m) > facts.behind(THEIRS, THEIRS_WIDE, m)
            holds(more, f"LSSAR wins more by heads of 128 than softmax at {m}x ({facts.size.name})")
    won = "; ".join(f"{won_by_wide_heads(facts)} with {millions(facts)}" for facts in sizes)
    return f"**Heads of 128 in place of 64 help both, LSSAR more**: it wins {won}. {heads_wider_still(study)}"


def pooled_gap(facts: Facts, multiple: int) -> tuple[float, float]:
    """Of all runs with heads of 128 and more: LSSAR less softmax, and one standard error over runs."""
    ours, theirs = (
        list(chain.from_iterable(facts.losses(pair[side], multiple) for pair in WIDTHS.values())) for side in (0, 1)
    )
    if min(len(ours), len(theirs)) < 2:
        raise MissingError(f"several runs with heads of 128 and more at {facts.size.name}")
    error = math.sqrt(variance(ours) / len(ours) + variance(theirs) / len(theirs))
    return fmean(ours) - fmean(theirs), error


def pooled_words(facts: Facts, multiple: int) -> str:
    value, error = pooled_gap(facts, multiple)
    return f"{nats(abs(value))} ± {plain(error)}"


def runs_pooled(facts: Facts) -> str:
    ours, theirs = (sum(facts.count(pair[side]) for pair in WIDTHS.values()) for side in (0, 1))
    return f"{number(ours)} runs of LSSAR and {number(theirs)} of softmax"


def pooled_in_words(facts: Facts) -> str:
    """Behind, level and ahead, length by length."""
    pooled = {multiple: pooled_gap(facts, multiple) for multiple in facts.size.multiples}
    to_16 = {multiple: pooled[multiple][0] for multiple in up_to_16(facts)}
    for multiple in to_16:
        told = pooled[multiple][0] > TOLD * pooled[multiple][1]
        holds(told, f"over the widths softmax is ahead at {multiple}x")
    holds(abs(pooled[32][0]) < pooled[32][1], "over the widths LSSAR is level with softmax at 32x")
    holds(pooled[64][0] < -TOLD * pooled[64][1], "over the widths LSSAR is ahead at 64x")
    return f"behind by {gaps(to_16.values())} from 1x to 16x, level at 32x, and {pooled_words(facts, 64)} ahead at 64x"


def heads_wider_still(study: Study) -> str:
    facts = study["85m-again"]
    for ours, theirs in WIDTHS.values():
        for arm, first in ((ours, OURS_WIDE), (theirs, THEIRS_WIDE)):
            same = all(facts.level(arm, first, multiple) for multiple in facts.size.multiples)
            holds(same, f"{arm} is level with {first} at 85m-again")
    at_16 = [each((facts.loss(pair[side], 16) for pair in WIDTHS.values()), plain) for side in (0, 1)]
    return (
        f"Wider ones change nothing more: with {millions(facts)} and heads of {each(WIDTHS, str)} LSSAR has {at_16[0]} "
        f"at 16x, softmax {at_16[1]}. Taken together ({runs_pooled(facts)}), LSSAR is {pooled_in_words(facts)} "
        "(± one standard error over runs)."
    )


GAP_FINDINGS = (the_gap, size_does_not_close_it, wide_heads)
