"""What the study found in the mix of layers: two local ones for each that sees everything and has no positions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise

from claims import MissingError, each, gaps, holds, listed, nats, number, seeds
from page_blocks import plain, signed
from study_facts import (
    LEVEL,
    LOCAL_SOFTMAX,
    LOCAL_SOFTMAX_SOFT,
    LOG_MIX,
    LOGN,
    LOGN_MIX,
    LONG,
    ROOT,
    THEIRS_SOFT,
    WINDOW,
    WITHOUT_OFFSET,
    Facts,
    Study,
)
from study_runs import Size
from study_sizes import OURS, THEIRS, Slope, alike, on_one_text, slope_at

from softplus_attention.report.study import MIX

SEARCH = ROOT / "docs" / "log" / "recipe-search.json"
ALL_ELSE_EQUAL = ("10m-again", "25m-keys", "85m-again")
SIZES_OF_THE_MIX = ("10m", "25m", "85m", "10m-keys", *ALL_ELSE_EQUAL)
CONSTANT = ("lssar-p2-global3", "lssar-p3-global3", "lssar-global3")
NEARLY_MEET = 0.002  # nats
PLAIN_SCALE, LEARNED_SCALE = LOGN, f"{LOGN}-learned"  # of the ablations


def arms_of_the_mix(facts: Facts) -> list[str]:
    return list(facts.size.of_kind(MIX).arms)


def long_gaps(facts: Facts, arm: str = OURS, other: str = THEIRS) -> list[float]:
    return [facts.behind(arm, other, multiple) for multiple in LONG if multiple in facts.size.multiples]


def better_softmax(facts: Facts, multiple: int) -> float:
    return min(facts.loss(arm, multiple) for arm in (LOGN_MIX, THEIRS))


def the_loss_falls(study: Study) -> None:
    for name in SIZES_OF_THE_MIX:
        facts = study[name]
        for arm in arms_of_the_mix(facts):
            falling = all(facts.loss(arm, b) < facts.loss(arm, a) for a, b in pairwise(up_to_16(facts)))
            holds(falling, f"in the mix the loss of {arm} falls with length to 16x ({name})")


def positions_are_most_of_it(study: Study) -> str:
    the_loss_falls(study)
    found = [study[name].passkey(arm, 16) for name in ("10m", "25m") for arm in arms_of_the_mix(study[name])]
    most = sum(share > 0.5 for share in found) > len(found) / 2
    holds(most, "most arms of the mix find most pass keys at 16x at 10m and 25m")
    return (
        "**The loss falls with length.** With two local layers for each global one, and no positions in the global "
        "ones, the loss *falls* with length for LSSAR and for softmax with QK-norm and log N (the others were not "
        "tried there), to 16x or beyond, and at 10m and 25m most arms find pass keys far beyond the training length."
    )


def the_best_sharpness(study: Study) -> str:
    facts = study["10m"]
    multiples = facts.size.multiples
    for arm in CONSTANT:
        holds(facts.below(LOG_MIX, arm, multiples), f"in the mix p = 0.6 log N is better than {arm}")
    rising, low = "lssar-global3", CONSTANT[:2]
    holds(all(facts.below(arm, rising, multiples) for arm in low), "in the mix a high power only costs")
    better = facts.every_seed_below(OURS, LOG_MIX, (1,))
    holds(better, "learned factors of log N are a little better than 0.6 log N at 1x")
    beyond = [m for m in multiples if m > 1]
    meet = all(min(facts.losses(LOG_MIX, m)) - max(facts.losses(OURS, m)) < NEARLY_MEET for m in beyond)
    holds(meet, "beyond 1x the seeds of learned factors and of 0.6 log N nearly meet")
    learned, three = "lssar-learned-global3", "lssar-p3-global3"
    holds(facts.below(three, learned, multiples), "a constant that heads learn is no better than the constant 3")
    return (
        "**A high power only costs**, and the best sharpness is a little of log N: p = 0.6 log N is better than the "
        "constants that were tried (2, 3, rising to 15) at every length, and a factor of log N that each head learns "
        f"is a little better at 1x (by {nats(facts.behind(LOG_MIX, OURS, 1))}); beyond it the seeds of the two nearly "
        "meet. A constant that heads learn is no better than the constant 3."
    )


def near_to_softmax(study: Study) -> str:
    facts = study["10m"]
    holds(facts.level(OURS, LOGN_MIX, 1), "learned factors bring LSSAR level with softmax + QK-norm + log N at 1x")
    window = gaps(-facts.behind(OURS, WINDOW, multiple) for multiple in LONG)
    return (
        "**With learned factors of log N LSSAR is level with softmax + QK-norm + log N at the training length** "
        f"(10m), and behind it by {gaps(long_gaps(facts, OURS, LOGN_MIX))} from 16x on. It is below the sliding "
        f"window there, by {window}."
    )


def the_learned_scale(study: Study) -> str:
    facts, larger, books = study["10m"], study["25m"], study["books"]
    others = [arm for arm in facts.size.arms if arm != THEIRS]
    strongest = all(facts.below(THEIRS, arm, facts.size.multiples) for arm in others)
    holds(strongest, "softmax with a learned scale per head is the strongest arm at 10m")
    holds(all(larger.level(THEIRS, LOGN_MIX, m) for m in larger.size.multiples), "at 25m the scale makes no difference")
    small = [abs(books.behind(LEARNED_SCALE, PLAIN_SCALE, m)) for m in (1, 4, 16)]
    noise = [max(LEVEL, books.apart(LEARNED_SCALE, m)) for m in (1, 4, 16)]
    holds(all(a <= b for a, b in zip(small, noise, strict=True)), "in the ablations the scale makes no difference")
    better = [size.loss(OURS, m) - better_softmax(size, m) for size in (facts, larger) for m in LONG]
    return (
        "**Softmax with a learned scale per head is the strongest arm** at 10m, and below the same without that scale "
        f"by {gaps(facts.behind(LOGN_MIX, THEIRS, m) for m in facts.size.multiples)}; at 25m and in the ablations the "
        f"scale makes no difference. LSSAR is behind the better of the two by {gaps(better)} from 16x on, at 10m and "
        "at 25m: it comes near to softmax in the mix; it does not beat it."
    )


def gaps_by_seed(facts: Facts, multiple: int) -> str:
    """Each seed of LSSAR beside softmax of the same seed."""
    theirs = {run.seed: run.own.loss[multiple] for run in facts.runs(THEIRS)}
    own = [run for run in facts.runs(OURS) if run.seed in theirs]
    return each((run.own.loss[multiple] - theirs[run.seed] for run in own), signed)


def the_gap_with_other_text(study: Study) -> str:
    facts = study["25m-keys"]
    apart = all(facts.apart(OURS, m) > facts.behind(OURS, THEIRS, m) for m in (1, 16))
    holds(apart, "at 25m-keys seeds of LSSAR are further apart than it is from softmax")
    by_seed = ", ".join(f"{gaps_by_seed(facts, multiple)} at {multiple}x" for multiple in (1, 16, 64))
    return (
        f"**With other text (25m-keys, {seeds(facts.count(OURS))}) seeds of LSSAR are further apart than it is from "
        f"softmax.** It is behind by {nats(facts.behind(OURS, THEIRS, 1))} at 1x and by {gaps(long_gaps(facts))} from "
        f"16x on; its seeds are {nats(facts.apart(OURS, 1))} apart at 1x and {nats(facts.apart(OURS, 16))} at 16x. "
        f"Each seed less softmax of the same seed: {by_seed}."
    )


def slope_all_else_equal(sizes: Sequence[Size], multiple: int) -> Slope:
    """Of the gap, for each factor of ten in parameters."""
    groups = [group for group in on_one_text(sizes) if alike(group)]
    slope = slope_at(groups[0], multiple) if groups else None
    if slope is None or slope.error is None or [size.name for size in groups[0]] != list(ALL_ELSE_EQUAL):
        raise MissingError(f"both arms, and two seeds of one, at {listed(ALL_ELSE_EQUAL)}")
    return slope


def no_effect_of_size(study: Study) -> str:
    for facts in (study[name] for name in SIZES_OF_THE_MIX):
        holds(
            facts.below(THEIRS, OURS, facts.size.multiples), f"LSSAR is behind softmax in the mix at {facts.size.name}"
        )
    equal = [study[name] for name in ALL_ELSE_EQUAL]
    slopes = {multiple: slope_all_else_equal(study.sizes, multiple) for multiple in (1, *LONG)}
    for multiple, slope in slopes.items():
        holds(slope.error is not None and abs(slope.value) < slope.error, f"no slope of the gap is seen at {multiple}x")
    small, middle, large = (study[name] for name in ("10m", "25m", "85m"))
    ratio = large.behind(OURS, THEIRS, 16) / small.behind(OURS, THEIRS, 16)
    holds(1.5 < ratio < 2.5, "at 85m the gap at 16x is about twice that of 10m")
    by_size = {m: each((facts.behind(OURS, THEIRS, m) for facts in equal), nats) for m in (1, 16, 64)}
    by_ten = listed(f"{signed(slopes[m].value)} ± {plain(slopes[m].error or 0)} at {m}x" for m in (16, 64))
    fewest = min(large.count(arm) for arm in (OURS, THEIRS))
    return (
        f"**No effect of size on the gap is seen.** With {listed(map(millions, equal))} parameters on one text, all "
        f"else equal ({listed(ALL_ELSE_EQUAL)}), LSSAR is behind by {by_size[1]} at 1x, by {by_size[16]} at 16x and by "
        f"{by_size[64]} at 64x; for each factor of ten in parameters that is {by_ten}, within the error, which is not "
        f"small. On the first text it was {nats(small.behind(OURS, THEIRS, 16))} at 16x "
        f"with {millions(small)} and {nats(middle.behind(OURS, THEIRS, 16))} with {millions(middle)}; about twice as "
        f"much with {millions(large)} ({nats(large.behind(OURS, THEIRS, 16))}), in runs of {seeds(fewest)} with "
        "sequences twice as long, twice the text and windows of twice the length."
    )


def up_to_16(facts: Facts) -> list[int]:
    return [multiple for multiple in facts.size.multiples if multiple <= 16]


def millions(facts: Facts) -> str:
    return f"{facts.size.any_run.parameters / 1e6:.0f}M"


def local_softmax(study: Study) -> str:
    facts = study["10m-keys"]
    layers, every = facts.size.any_run.config["layers"], facts.runs(LOCAL_SOFTMAX)[0].config["global_every"]
    return (
        f"**Softmax in the local layers does not close the gap.** With LSSAR in the {number(layers // every)} of "
        f"{number(layers)} layers that see everything, and softmax with learned scales in the others, the loss is "
        f"{nats(facts.behind(LOCAL_SOFTMAX, THEIRS, 1))} above softmax at 1x and "
        f"{nats(facts.behind(LOCAL_SOFTMAX, THEIRS, 16))} at 16x (10m-keys), which is "
        f"{gaps(facts.behind(OURS, LOCAL_SOFTMAX, m) for m in (1, 16))} below LSSAR in every layer: what LSSAR lacks, "
        "it lacks where a row sees everything. Nor is it sharpness that grows too slowly: another growth beyond the "
        "training length is worse either way ([log](log.md))."
    )


def started_softer(loss: str) -> float:
    """Of softmax at 10m-keys, seed 0, with scales that start at 0.6."""
    runs = json.loads(SEARCH.read_text())["scales_and_starts_at_10m"]["runs"]
    return float(next(run for run in runs if run["arm"].startswith("softmax"))["loss"][loss])


def gain_of_a_softer_start(study: Study) -> float:
    first = next(run for run in study["10m-keys"].runs(THEIRS) if run.seed == 0)
    return first.own.loss[1] - started_softer("1x")


def beside_a_softer_softmax(study: Study) -> str:
    facts = study["25m-keys"]
    above = {m: [loss - facts.loss(THEIRS, m) for loss in facts.losses(LOCAL_SOFTMAX_SOFT, m)] for m in (1, *LONG)}
    near = [facts.passkey(LOCAL_SOFTMAX_SOFT, multiple) for multiple in (1, 2, 4)]
    holds(max(abs(share - 1 / 3) for share in near) < 0.05, f"{LOCAL_SOFTMAX_SOFT} finds a third of the keys to 4x")
    far = facts.found(LOCAL_SOFTMAX_SOFT, 16)
    holds(
        sum(right for right, _ in far) <= 0.1 * sum(trials for _, trials in far),
        f"{LOCAL_SOFTMAX_SOFT} finds few keys at 16x",
    )
    words = each([right for right, _ in far], str)
    return (
        "**With a softmax in the local layers that starts softer it failed at 25m-keys.** With scales of the local "
        f"softmax at 0.6 at first in place of 1, its seeds are {each(above[1], nats)} above softmax at 1x and "
        f"{gaps(v for m in LONG for v in above[m])} from 16x on, and find only keys that lie within a local window (a "
        f"third of the trials to 4x, {words} of {far[0][1]} at 16x). Whether the start or the size did it is not "
        "known: with a start of 1 it was not trained there. Softmax itself is no better for that start there "
        f"({nats(facts.behind(THEIRS_SOFT, THEIRS, 1))} above the other at 1x, "
        f"{nats(facts.behind(THEIRS_SOFT, THEIRS, 16))} at 16x; at 10m-keys one seed was "
        f"{nats(gain_of_a_softer_start(study))} below)."
    )


def without_the_offset(study: Study) -> str:
    facts = study["10m-keys"]
    for m in (1, 16):
        without, whole = facts.losses(WITHOUT_OFFSET, m), facts.losses(OURS, m)
        holds(
            min(without) < min(whole) and max(without) > max(whole),
            f"without the 1 seeds lie on both sides of LSSAR's at {m}x",
        )
    at = {m: f"{each(facts.losses(WITHOUT_OFFSET, m))} against {each(facts.losses(OURS, m))} at {m}x" for m in (1, 16)}
    return (
        "**Leaving out the 1 that is subtracted does not close the gap either.** In small models it learns faster "
        f"([log](log.md)); at 10m-keys its seeds lie on both sides of LSSAR's ({at[1]}, {at[16]}). So it is no better "
        "a model, and no worse than its seeds tell; it needs one pass over the keys in place of two "
        "([kernels](kernels.md#without-the-1-that-is-subtracted))."
    )


MIX_FINDINGS = (
    positions_are_most_of_it, the_best_sharpness, near_to_softmax, the_learned_scale, the_gap_with_other_text,
    no_effect_of_size, local_softmax, beside_a_softer_softmax, without_the_offset,
)  # fmt: skip
