"""What the study found of the context beyond the training length, in the mix of layers."""

from __future__ import annotations

from claims import gaps, holds, listed, nats, number
from page_blocks import plain
from study_facts import LONG, Facts, Study
from study_findings_gap import WIDTHS
from study_findings_mix import SIZES_OF_THE_MIX, arms_of_the_mix, millions
from study_sizes import OURS, OURS_192, OURS_WIDE, THEIRS, THEIRS_192, THEIRS_WIDE

# Pairs of which the control was measured over the last quarter of each text.
FAR_PAIRS = (
    ("25m-keys", OURS_WIDE, THEIRS_WIDE),
    ("85m-again", OURS_192, THEIRS_192),
    ("300m-again", OURS_WIDE, THEIRS_WIDE),
)


def told_at_16(study: Study) -> str:
    every = [(study[name], arm) for name in SIZES_OF_THE_MIX for arm in arms_of_the_mix(study[name])]
    told = sum(facts.gain(arm, 16) > 0 and facts.gain_told_from_none(arm, 16) for facts, arm in every)
    holds(told > len(every) / 2, "most gains at 16x in the mix are more than two standard errors")
    for facts, arm in every:
        if arm in (OURS, THEIRS, OURS_WIDE, THEIRS_WIDE):
            holds(facts.gain(arm, 16) > 0, f"the context helps {arm} to 16x at {facts.size.name}")
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


def worth_of_the_last_doubling(facts: Facts, arm: str) -> list[float]:
    """Of each run: what the second half of each text gains by the first, where a text of 64x is read whole in place of
    as two. The loss falls by half of that, since the first half is read the same."""
    return [2 * (run.own.loss[32] - run.own.loss[64]) for run in facts.runs(arm)]


def the_last_doubling(study: Study) -> str:
    """Of runs with heads of 128 and more."""
    facts = study["85m-again"]
    ours, theirs = (
        [worth for pair in WIDTHS.values() for worth in worth_of_the_last_doubling(facts, pair[side])]
        for side in (0, 1)
    )
    holds(min(ours) > 0 > max(theirs), "from 32x to 64x every LSSAR gains and every softmax loses at 85m-again")
    others = [
        worth
        for name in ("25m-keys", "300m-again")
        for arm in (OURS_WIDE, THEIRS_WIDE)
        for worth in worth_of_the_last_doubling(study[name], arm)
    ]
    holds(min(others) > 0, "from 32x to 64x LSSAR and softmax gain at 25m-keys and 300m-again")
    return (
        f"worth {gaps(ours)} nats to LSSAR with {millions(facts)} parameters, in each of {number(len(ours))} runs, and "
        f"costs softmax {gaps(-value for value in theirs)}, in each of {number(len(theirs))}; with "
        f"{millions(study['25m-keys'])} and {millions(study['300m-again'])} both gain ({gaps(others)})"
    )


def gained_at(facts: Facts, arm: str, multiple: int) -> str:
    return f"{nats(facts.far_gain(arm, multiple))} ± {plain(facts.far_error(arm, multiple))}"


def gained_by_each(study: Study, multiple: int) -> str:
    """By LSSAR and by softmax, size by size."""
    return listed(
        f"{gained_at(study[name], ours, multiple)} and {gained_at(study[name], theirs, multiple)} with "
        f"{millions(study[name])}"
        for name, ours, theirs in FAR_PAIRS
    )


def the_far_context(study: Study) -> str:
    to_16 = told_at_16(study)
    the_far_context_is_used(study)
    near = [study[name].far_gain(arm, 4) for name, *pair in FAR_PAIRS for arm in pair]
    return (
        "**Context beyond the training length is used, most of it from the first few lengths**, by LSSAR's best recipe "
        "and by softmax. Over the last quarter of each text "
        "([table](results-tables.md#the-far-context-over-more-tokens)) the whole of 64x predicts better than the last "
        f"1x by {gained_by_each(study, 64)} (LSSAR and softmax, ± one standard error over texts); at 4x by "
        f"{gaps(near)} already. Over the last half of a training length alone {to_16}, and none at 64x is, where the "
        "texts differ too much. "
        f"To the second half of each text of 64x the first half is {the_last_doubling(study)}."
    )


FAR_FINDINGS = (the_far_context,)
