"""What the study found of the context beyond the training length, in the mix of layers."""

from __future__ import annotations

from claims import gaps, holds, listed, nats, number
from page_blocks import plain
from study_facts import LONG, Facts, Study
from study_findings_heads import WIDTHS
from study_findings_mix import SIZES_OF_THE_MIX, arms_of_the_mix, millions
from study_sizes import OURS, OURS_192, OURS_WIDE, THEIRS, THEIRS_192, THEIRS_WIDE

# Pairs of which the control was measured over the last quarter of each text.
FAR_PAIRS = (("25m-keys", OURS_WIDE, THEIRS_WIDE), ("85m-again", OURS_192, THEIRS_192))


def told_at_16(study: Study) -> str:
    every = [(study[name], arm) for name in SIZES_OF_THE_MIX for arm in arms_of_the_mix(study[name])]
    told = sum(facts.gain(arm, 16) > 0 and facts.gain_told_from_none(arm, 16) for facts, arm in every)
    holds(told > len(every) / 2, "most gains at 16x in the mix are more than two standard errors")
    for name in SIZES_OF_THE_MIX:
        holds(min(study[name].gain(arm, 16) for arm in (OURS, THEIRS)) > 0, f"the context helps both to 16x at {name}")
    few = sum(facts.gain_told_from_none(arm, 64) for facts, arm in every if facts.size.name != "85m")
    holds(few == 0, "over half a training length no gain at 64x is told from zero")
    return f"{told} of the {len(every)} gains at 16x in the mix are more than two standard errors"


def the_far_context_is_used(study: Study) -> None:
    """At every length that was measured, by LSSAR and by softmax, by more than two standard errors."""
    for name, *pair in FAR_PAIRS:
        for arm in pair:
            for multiple in (4, *LONG):
                told = study[name].far_gain(arm, multiple) > 2 * study[name].far_error(arm, multiple)
                holds(told, f"over the last quarter the gain of {arm} is told from zero at {multiple}x ({name})")
            half = study[name].far_gain(arm, 4) > study[name].far_gain(arm, 64) / 2
            holds(half, f"most of what {arm} gains at 64x it gains at 4x ({name})")


def worth_of_the_last_doubling(facts: Facts, side: int) -> list[float]:
    """Of each run with heads of 128 and more, LSSAR (0) or softmax (1): what the second half of each text gains by the
    first, where a text of 64x is read whole in place of as two. The loss falls by half of that, since the first half is
    read the same."""
    curves = [run.own.loss for pair in WIDTHS.values() for run in facts.runs(pair[side])]
    return [2 * (loss[32] - loss[64]) for loss in curves]


def the_last_doubling(study: Study) -> str:
    facts = study["85m-again"]
    ours, theirs = (worth_of_the_last_doubling(facts, side) for side in (0, 1))
    holds(min(ours) > 0 > max(theirs), "from 32x to 64x every LSSAR gains and every softmax loses at 85m-again")
    return (
        f"worth {gaps(ours)} nats to LSSAR, in each of {number(len(ours))} runs, and costs softmax "
        f"{gaps(-value for value in theirs)}, in each of {number(len(theirs))}"
    )


def gained_at(facts: Facts, arm: str, multiple: int) -> str:
    return f"{nats(facts.far_gain(arm, multiple))} ± {plain(facts.far_error(arm, multiple))}"


def the_far_context(study: Study) -> str:
    to_16 = told_at_16(study)
    the_far_context_is_used(study)
    words = []
    for name, ours, theirs in FAR_PAIRS:
        facts = study[name]
        holds(facts.far_gain(ours, 4) < facts.far_gain(theirs, 4), f"LSSAR gains less than softmax at 4x ({name})")
        words.append(f"{gained_at(facts, ours, 64)} to LSSAR and {gained_at(facts, theirs, 64)} to softmax at {name}")
    near = [study[name].far_gain(arm, 4) for name, *pair in FAR_PAIRS for arm in pair]
    return (
        "**Context beyond the training length is used, most of it from the first few lengths**, by LSSAR's best recipe "
        f"and by softmax. Over the last half of a training length {to_16}, but none at 64x, where the texts differ too "
        "much. Over the last quarter of each text ([below](#the-far-context-over-more-tokens)) all are that were "
        f"measured so: at 64x the whole text is worth {listed(words)} more than the last 1x (± one standard error over "
        f"texts). At 4x it is worth {gaps(near)} already."
    )


def beyond_32x(study: Study) -> str:
    small = study["25m-keys"]
    doubled = [2 * (small.loss(arm, 32) - small.loss(arm, 64)) for arm in (OURS_WIDE, THEIRS_WIDE)]
    return (
        f"**Beyond 32x LSSAR still gains, and with {millions(study['85m-again'])} parameters softmax loses.** To the "
        "second half of each text of 64x the first half is, with heads of 128 and more (85m-again), "
        f"{the_last_doubling(study)}. That is why LSSAR is ahead at 64x there. With {millions(small)} (25m-keys, heads "
        f"of 128) it is worth {nats(doubled[0])} to LSSAR and {nats(doubled[1])} to softmax."
    )


FAR_FINDINGS = (the_far_context, beyond_32x)
