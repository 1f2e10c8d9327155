"""What the study found with heads of 128 and more, in the mix of layers."""

from __future__ import annotations

import math
from itertools import chain
from statistics import fmean, variance

from claims import MissingError, each, gaps, holds, listed, nats, number, percent, seeds
from page_blocks import plain, signed
from study_facts import LONG, Facts, Study
from study_findings_mix import ALL_ELSE_EQUAL, long_gaps, millions, slope_all_else_equal, up_to_16
from study_sizes import (
    OURS,
    OURS_192,
    OURS_256,
    OURS_WIDE,
    THEIRS,
    THEIRS_192,
    THEIRS_256,
    THEIRS_WIDE,
    degrees_of_freedom,
    with_wide_heads,
)

TOLD = 1.9  # standard errors: what is called ahead or behind
WIDTHS = {128: (OURS_WIDE, THEIRS_WIDE), 192: (OURS_192, THEIRS_192), 256: (OURS_256, THEIRS_256)}


def won_by_wide_heads(facts: Facts) -> str:
    """What heads of 128 bring beside heads of 64, LSSAR and softmax."""
    words = []
    for multiple in (1, 16, 64):
        ours, theirs = facts.behind(OURS, OURS_WIDE, multiple), facts.behind(THEIRS, THEIRS_WIDE, multiple)
        words.append(f"{nats(ours)} at {multiple}x (softmax {nats(theirs)})")
    return listed(words)


def wide_heads(study: Study) -> str:
    facts = study["10m-again"]
    for ours, narrow in ((OURS_WIDE, OURS), (THEIRS_WIDE, THEIRS)):
        holds(facts.below(ours, narrow, facts.size.multiples), f"{ours} is below {narrow} at every length")
    holds(
        facts.every_seed_below(OURS_WIDE, OURS, facts.size.multiples),
        "every seed of LSSAR with heads of 128 is below every seed with heads of 64",
    )
    holds(facts.below(THEIRS_WIDE, OURS_WIDE, facts.size.multiples), "softmax with heads of 128 stays ahead of LSSAR")
    level = all(facts.behind(OURS_WIDE, THEIRS, m) <= 0.0005 for m in LONG)
    holds(level, "LSSAR with heads of 128 is level with softmax with heads of 64 from 16x on, or below it")
    found = min(facts.passkey(OURS_WIDE, multiple) for multiple in (1, 2, 4, 16, 64))
    return (
        "**Heads of 128 in place of 64 help both** (10m-again, half as many heads, "
        f"{seeds(facts.count(OURS_WIDE))} each). LSSAR wins {won_by_wide_heads(facts)}. Then it is behind softmax with "
        f"such heads by {nats(facts.behind(OURS_WIDE, THEIRS_WIDE, 1))} at 1x and by "
        f"{gaps(long_gaps(facts, OURS_WIDE, THEIRS_WIDE))} from 16x on, and there it is level with softmax with heads "
        f"of 64, or below it ({nats(facts.behind(THEIRS, OURS_WIDE, 64))} at 64x). It finds at least {percent(found)}% "
        "of the pass keys at every length to 64x."
    )


def gaps_to_16(facts: Facts) -> str:
    """Of the two with heads of 128."""
    return gaps(facts.behind(OURS_WIDE, THEIRS_WIDE, multiple) for multiple in up_to_16(facts))


def level_with_wide_heads(study: Study) -> str:
    facts = study["85m-again"]
    level = all(facts.level(OURS_WIDE, THEIRS_WIDE, m) for m in facts.size.multiples)
    holds(level, "with heads of 128 LSSAR is level with softmax at 85m-again")
    holds(facts.below(THEIRS_WIDE, OURS_WIDE, up_to_16(facts)), "there softmax is a little ahead to 16x")
    same = plain(facts.loss(OURS_WIDE, 32)) == plain(facts.loss(THEIRS_WIDE, 32))
    holds(same, "there LSSAR and softmax with heads of 128 have the same loss at 32x")
    holds(facts.every_seed_below(OURS_WIDE, THEIRS_WIDE, (64,)), "there every seed of LSSAR is below softmax's at 64x")
    to_16 = min(facts.passkey(OURS_WIDE, multiple) for multiple in (1, 2, 4, 16))
    fewest = min(facts.count(arm) for arm in (OURS, THEIRS))
    return (
        f"**With {millions(facts)} parameters and such heads LSSAR is level with softmax** (85m-again, "
        f"{seeds(facts.count(OURS_WIDE))} each). It is behind softmax with such heads by "
        f"{gaps_to_16(facts)} from 1x to 16x, where seeds of it are up to "
        f"{plain(max(facts.apart(OURS_WIDE, m) for m in up_to_16(facts)))} apart, has the same loss at 32x, and is "
        f"{nats(facts.behind(THEIRS_WIDE, OURS_WIDE, 64))} below at 64x, where each seed of it is below each of "
        f"softmax's. Beside heads of 64, of which there is {seeds(fewest)}, LSSAR wins {won_by_wide_heads(facts)}. It "
        f"finds at least {percent(to_16)}% of the pass keys to 16x and {percent(facts.passkey(OURS_WIDE, 64))}% at "
        f"64x, softmax {percent(facts.passkey(THEIRS_WIDE, 64))}% there."
    )


def slope_words(study: Study, multiple: int) -> str:
    slope = slope_all_else_equal(with_wide_heads(study.sizes), multiple)
    return f"{signed(slope.value)} ± {plain(slope.error or 0)} at {multiple}x"


def no_slope_with_wide_heads(study: Study) -> str:
    """Of heads of 128, all else equal."""
    sizes = [study[name] for name in ALL_ELSE_EQUAL]
    at = {m: [facts.behind(OURS_WIDE, THEIRS_WIDE, m) for facts in sizes] for m in (1, 16, 64)}
    for multiple in (1, *LONG):
        slope = slope_all_else_equal(with_wide_heads(study.sizes), multiple)
        none = abs(slope.value) < 2 * (slope.error or 0)
        holds(none, f"a slope of the gap with heads of 128 is not told from none at {multiple}x")
    fewest = min(facts.count(arm) for facts in sizes for arm in (OURS_WIDE, THEIRS_WIDE))
    slopes = listed(slope_words(study, multiple) for multiple in at)
    freedom = degrees_of_freedom(with_wide_heads([facts.size for facts in sizes]), 1)
    return (
        f"**With such heads a slope with size is not told from none either.** With {listed(map(millions, sizes))} "
        f"parameters, all else equal ({seeds(fewest)} each), LSSAR less softmax is {each(at[1], signed)} at 1x, "
        f"{each(at[16], signed)} at 16x and {each(at[64], signed)} at 64x. For each factor of ten in parameters that "
        f"is {slopes} ({number(freedom)} degrees of freedom): the last may be something, and is one of several lengths."
    )


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


def paired_gaps(facts: Facts, multiple: int) -> list[float]:
    """LSSAR less softmax of the same seed and width, which read the same text in the same order."""
    found = []
    for ours, theirs in WIDTHS.values():
        beside = {run.seed: run.own.loss[multiple] for run in facts.runs(theirs)}
        found += [run.own.loss[multiple] - beside[run.seed] for run in facts.runs(ours) if run.seed in beside]
    return found


def pooled_in_words(facts: Facts, once: str = "1x", times: str = "x") -> str:
    """Behind, level and ahead, length by length; `once` and `times` are what the training length and a multiple of it
    are called."""
    pooled = {multiple: pooled_gap(facts, multiple) for multiple in facts.size.multiples}
    to_16 = {multiple: pooled[multiple][0] for multiple in up_to_16(facts)}
    for multiple in to_16:
        told = pooled[multiple][0] > TOLD * pooled[multiple][1]
        holds(told, f"over the widths softmax is ahead at {multiple}x")
    holds(abs(pooled[32][0]) < pooled[32][1], "over the widths LSSAR is level with softmax at 32x")
    holds(pooled[64][0] < -TOLD * pooled[64][1], "over the widths LSSAR is ahead at 64x")
    holds(max(paired_gaps(facts, 64)) < 0 < min(paired_gaps(facts, 4)), "pairs of one seed agree at 4x and at 64x")
    most = max(to_16, key=lambda multiple: to_16[multiple])
    return (
        f"behind by {gaps(to_16.values())} from {once} to 16{times} (most at {most}{times}, "
        f"{pooled_words(facts, most)}), level at 32{times}, and {pooled_words(facts, 64)} ahead at 64{times}"
    )


def keys_at_64(facts: Facts, side: int) -> str:
    return each((facts.passkey(pair[side], 64) for pair in WIDTHS.values()), percent)


def heads_wider_still(study: Study) -> str:
    facts = study["85m-again"]
    for ours, theirs in WIDTHS.values():
        for arm, first in ((ours, OURS_WIDE), (theirs, THEIRS_WIDE)):
            same = all(facts.level(arm, first, multiple) for multiple in facts.size.multiples)
            holds(same, f"{arm} is level with {first} at 85m-again")
    at_16 = [each((facts.loss(pair[side], 16) for pair in WIDTHS.values()), plain) for side in (0, 1)]
    keys = [min(facts.passkey(ours, multiple) for multiple in (1, 2, 4, 16)) for ours, _ in WIDTHS.values()]
    pairs = {multiple: paired_gaps(facts, multiple) for multiple in (4, 64)}
    apart = max(facts.apart(ours, 64) for ours, _ in WIDTHS.values())
    return (
        f"**Heads wider than 128 change nothing more** (85m-again; {each(WIDTHS, str)} numbers a head, at most "
        f"{seeds(max(facts.count(arm) for pair in WIDTHS.values() for arm in pair))}). At 16x LSSAR has {at_16[0]} "
        f"with them, softmax {at_16[1]}. So the {runs_pooled(facts)} can be taken together: LSSAR is "
        f"{pooled_in_words(facts)} (± one standard error over runs, on these texts; seeds of one arm are up to "
        f"{plain(apart)} apart at 64x). Beside softmax of the same seed and width it is behind in each of "
        f"{number(len(pairs[4]))} pairs at 4x, by {plain(fmean(pairs[4]))} on the mean, and ahead in each at 64x, by "
        f"{plain(-fmean(pairs[64]))}. It finds at least {each(keys, percent)}% of the pass keys to 16x, and "
        f"{keys_at_64(facts, 0)}% at 64x where softmax finds {keys_at_64(facts, 1)}%."
    )


HEAD_FINDINGS = (wide_heads, level_with_wide_heads, no_slope_with_wide_heads, heads_wider_still)
