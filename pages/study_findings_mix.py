"""What the study found in the mix of layers: two local ones for each that sees everything and has no positions."""

from __future__ import annotations

import json
from itertools import pairwise

from claims import each, gaps, holds, nats, seeds
from study_facts import (
    LOCAL_SOFTMAX,
    LOCAL_SOFTMAX_SOFT,
    LOCAL_SOFTMAX_WIDE,
    LOG_MIX,
    LONG,
    ROOT,
    THEIRS_SOFT,
    WITHOUT_OFFSET,
    Facts,
    Study,
)
from study_sizes import OURS, OURS_WIDE, THEIRS

from softplus_attention.report.study import MIX

SEARCH = ROOT / "docs" / "log" / "recipe-search.json"
# Sizes that differ in nothing but their parameters, and those of them that have heads of 64 too.
ALL_ELSE_EQUAL = ("10m-again", "25m-keys", "85m-again", "300m-again")
NARROW_TOO = ALL_ELSE_EQUAL[:3]
FIRST_TEXT = ("10m", "25m", "85m", "10m-keys")
SIZES_OF_THE_MIX = (*FIRST_TEXT, *ALL_ELSE_EQUAL)
CONSTANT = ("lssar-p2-global3", "lssar-p3-global3", "lssar-global3")
NEARLY_MEET = 0.002  # nats


def arms_of_the_mix(facts: Facts) -> list[str]:
    return list(facts.size.of_kind(MIX).arms)


def up_to_16(facts: Facts) -> list[int]:
    return [multiple for multiple in facts.size.multiples if multiple <= 16]


def millions(facts: Facts) -> str:
    return f"{facts.size.any_run.parameters / 1e6:.0f}M"


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


def started_softer(loss: str) -> float:
    """Of softmax at 10m-keys, seed 0, with scales that start at 0.6."""
    runs = json.loads(SEARCH.read_text())["scales_and_starts_at_10m"]["runs"]
    return float(next(run for run in runs if run["arm"].startswith("softmax"))["loss"][loss])


def gain_of_a_softer_start(study: Study) -> float:
    first = next(run for run in study["10m-keys"].runs(THEIRS) if run.seed == 0)
    return first.own.loss[1] - started_softer("1x")


def local_softmax(study: Study) -> str:
    """At 10m-keys a little better than LSSAR in every layer, with 124M parameters and heads of 128 not."""
    small, large = study["10m-keys"], study["85m-again"]
    multiples = large.size.multiples
    worse = large.below(OURS_WIDE, LOCAL_SOFTMAX_WIDE, multiples)
    holds(worse, f"{LOCAL_SOFTMAX_WIDE} is above {OURS_WIDE} at every length at 85m-again")
    return (
        "Softmax in the local layers beside LSSAR in those that see everything: at 10m-keys "
        f"{gaps(small.behind(OURS, LOCAL_SOFTMAX, m) for m in (1, 16))} below LSSAR in every layer, but with "
        f"{millions(large)} parameters and heads of 128 ({seeds(large.count(LOCAL_SOFTMAX_WIDE))}) "
        f"{gaps(large.behind(LOCAL_SOFTMAX_WIDE, OURS_WIDE, m) for m in multiples)} above it"
    )


def softer_starts(study: Study) -> str:
    facts = study["25m-keys"]
    above = [loss - facts.loss(THEIRS, m) for m in LONG for loss in facts.losses(LOCAL_SOFTMAX_SOFT, m)]
    far = facts.found(LOCAL_SOFTMAX_SOFT, 16)
    few = sum(right for right, _ in far) <= 0.1 * sum(trials for _, trials in far)
    holds(few, f"{LOCAL_SOFTMAX_SOFT} finds few keys at 16x")
    return (
        "scales of that softmax that start at 0.6 in place of 1: at 25m-keys "
        f"{gaps(above)} above softmax from 16x on, with {each([right for right, _ in far], str)} of {far[0][1]} keys "
        f"found at 16x (softmax itself is {nats(facts.behind(THEIRS_SOFT, THEIRS, 16))} worse at 16x for that start)"
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
        f"no 1 subtracted: at 10m-keys its seeds lie on both sides of LSSAR's ({at[1]}, {at[16]}); in small models it "
        "learns faster, and it needs one pass over the keys in place of two "
        "([kernels](kernels.md#without-the-1-that-is-subtracted))"
    )


def what_did_not_help(study: Study) -> str:
    tried = "; ".join(finding(study) for finding in (local_softmax, softer_starts, without_the_offset))
    return (
        f"**What did not close the gap.** {tried}. Sharpness that grows faster or slower beyond the training length, "
        "another learning rate, and heads of two kinds did not either ([log](log.md))."
    )


MIX_FINDINGS = (positions_are_most_of_it, the_best_sharpness)
