"""The sentences of docs/results.md about what the study found: each number is read from the runs, each claim checked.

A block is written where every run that it speaks of is there. A claim that the runs no longer bear is an error that
names it: then the sentence has to be rewritten, here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from claims import ClaimError, MissingError, each, gaps, holds, listed, nats, number, percent, seeds, sentences
from page_blocks import PageError, signed
from study_facts import LOGN, P15, RISING, WINDOW, Finding, Study
from study_findings_ablations import (
    ABLATION_FINDINGS,
    how_sure,
    nor_the_offset,
    normalised_queries,
    not_repeatable,
    not_the_demo,
    one_set_of_settings,
    softplus_is_not_needed,
    the_power_decides,
)
from study_findings_far import FAR_FINDINGS, gained_by_each, the_far_context, the_last_doubling
from study_findings_gap import (
    GAP_FINDINGS,
    WIDTHS,
    a_few_thousandths,
    behind_with_narrow_heads,
    behind_with_wide_heads,
    size_does_not_close_it,
)
from study_findings_keys import (
    INSIDE_FINDINGS,
    KEY_FINDINGS,
    at_every_size,
    not_measured,
    practice_was_too_short,
    step_ratios,
    step_times,
)
from study_findings_mix import (
    ALL_ELSE_EQUAL,
    MIX_FINDINGS,
    SIZES_OF_THE_MIX,
    millions,
    the_best_sharpness,
    the_loss_falls,
    what_did_not_help,
)
from study_findings_rotary import (
    ROTARY_FINDINGS,
    passes_at,
    rises_of_the_power_15,
    softmax_ahead_again,
    softmax_ahead_up_to_8x,
    the_context_is_not_used,
    those_that_fail,
)
from study_runs import Size
from study_sizes import OURS, OURS_WIDE, THEIRS, WIDE

from softplus_attention.report.study import MIX, ROTARY


def seeds_of(size: Size) -> str:
    counts = Counter(len(runs) for runs in size.arms.values())
    if len(counts) == 1:
        words = f"{seeds(*counts)} each"
    else:
        words = ", ".join(f"{number(arms)} with {seeds(count)}" for count, arms in sorted(counts.items()))
    return f"{size.name} {len(size.arms)} ({words})"


def what_was_trained(study: Study) -> str:
    large = [study[name] for name in ALL_ELSE_EQUAL]
    farthest = {size.name: f"{size.longest}x" for size in study.sizes}
    most = max((size.longest for size in study.sizes), default=0)
    less = [f"{name} to {words}" for name, words in farthest.items() if words != f"{most}x"]
    to_less = f" ({listed(less)})" if less else ""
    return (
        "Sizes are named by their parameters without the embedding; with it 10m, 25m, 85m and 300m have "
        f"{listed(map(millions, large))}. Those whose names end in -keys or -again were trained on other text than "
        f"the rest, {listed(ALL_ELSE_EQUAL)} on one and the same; the ablations are of a smaller model (books). They "
        f"are measured to {most}x the training length{to_less}. Arms: {'; '.join(map(seeds_of, study.sizes))} "
        "([all tables](results-tables.md))."
    )


def falls_by_itself(study: Study) -> str:
    """The mean loss over positions, of a model that sees nothing new at any length."""
    return gaps(-study[name].rise(WINDOW, 64) for name in ("10m", "10m-again"))


def answer_headline(study: Study) -> str:
    once, again = rises_of_the_power_15(study)
    return (
        f"**Holds: the loss stays nearly level.** With rotary positions in every layer {those_that_fail(study)} fail "
        f"within a few training lengths, and LSSAR with the power 15 rises by {once} from 1x to 64x ({again} where it "
        f"was trained on other text). A softmax with a sliding window falls by {falls_by_itself(study)}, since fewer "
        "tokens have little before them: that, not 0, is what a model that loses nothing has."
    )


def answer_baseline(study: Study) -> str:
    softmax_ahead_up_to_8x(study)
    softmax_ahead_again(study)
    facts = study["10m-again"]
    for arm in (P15, RISING):
        passes_at(study["10m"], arm)
    gap = {arm: gaps(facts.behind(arm, LOGN, multiple) for multiple in facts.size.multiples) for arm in (P15, RISING)}
    return (
        "**Does not hold: that it is better than softmax, once softmax has QK-norm and log N.** That baseline, which "
        "was missing, is ahead of every LSSAR up to 8x. With more seeds (10m-again) it is ahead at every length to "
        f"64x: of the power 15 by {gap[P15]}, of a power that is raised in training by {gap[RISING]}. At 10m, with "
        f"{seeds(study['10m'].count(LOGN))} of it, LSSAR passes it beyond 8x."
    )


def answer_context(study: Study) -> str:
    the_context_is_not_used(study)
    return (
        "**Level is not the same as using the text.** With rotary positions no arm gets anything from the context "
        "beyond a few training lengths: the control is negative for all of them at 64x, and softmax with a sliding "
        "window, which costs nothing, is below all of them from 16x on."
    )


def the_best_of_the_mix(study: Study) -> int:
    """How many LSSAR arms there are to choose from."""
    facts = study["10m"]
    arms = [arm for arm in facts.size.of_kind(MIX).arms if arm.startswith("lssar")]
    best = all(facts.below(OURS, arm, facts.size.multiples) for arm in arms if arm != OURS)
    holds(best, "a factor of log N that each head learns is the best LSSAR in the mix at 10m")
    return len(arms)


def nothing_clearly_better(study: Study) -> None:
    """Than the recipe of the presets, of LSSAR in the mix with such heads, at any size: by more than seeds of it are
    apart there."""
    the_best_of_the_mix(study)
    for facts in (study[name] for name in SIZES_OF_THE_MIX):
        for arm in facts.size.of_kind(MIX).arms:
            best = OURS_WIDE if WIDE in arm else OURS
            if arm.startswith("lssar") and arm != best:
                for multiple in facts.size.multiples:
                    better = facts.behind(best, arm, multiple) > facts.apart(best, multiple)
                    holds(not better, f"{arm} is not clearly better than {best} at {multiple}x ({facts.size.name})")


def answer_positions(study: Study) -> str:
    the_loss_falls(study)
    the_best_sharpness(study)
    nothing_clearly_better(study)
    facts = study["10m"]
    ours, theirs = (-facts.rise(arm, 64) for arm in (OURS, THEIRS))
    return (
        "**New: positions are most of it.** In a mix of two local layers for each global one, and no positions in "
        f"the global ones, the loss *falls* with length, further than with a window (from 1x to 64x at 10m by "
        f"{nats(ours)} for LSSAR, by {nats(theirs)} for softmax). There a high power only costs; the best for LSSAR is "
        "a factor of log N that each head learns."
    )


def answer_mix(study: Study) -> str:
    a_few_thousandths(study)
    size_does_not_close_it(study)
    what_did_not_help(study)
    narrow = behind_with_narrow_heads(study)
    at = {m: behind_with_wide_heads(study, m) for m in (1, 16, 64)}
    return (
        "**In that mix LSSAR comes within a few thousandths of a nat of softmax and does not beat it.** With heads of "
        f"128 and {listed(millions(study[name]) for name in ALL_ELSE_EQUAL)} parameters, all else equal, it is behind "
        f"by {gaps(at[1])} at the training length and by {gaps(at[16])} at 16x; at 64x the difference is "
        f"{each(at[64], signed)}. With heads of 64 it is behind by {gaps(narrow.at_once)} and, from 16x on, by "
        f"{gaps(narrow.far)}. Neither size nor anything else that was tried closes the gap."
    )


def answer_far_context(study: Study) -> str:
    the_far_context(study)
    return (
        "**In that mix context beyond the training length is used, most of it from the first few lengths**: with the "
        "whole text of 64x the same tokens are predicted better than from the last 1x, by "
        f"{gained_by_each(study, 64)} (LSSAR and softmax, ± one standard error over texts). Going from 32x to 64x is "
        f"{the_last_doubling(study)}."
    )


def no_keys_with_rotary_positions(study: Study) -> None:
    for name in ("10m", "10m-again"):
        facts = study[name]
        for arm in facts.size.of_kind(ROTARY).arms:
            holds(facts.passkey(arm, 16) == 0, f"with rotary positions {arm} finds no pass key at 16x ({name})")


def keys_far_out(study: Study) -> str:
    """Of the best recipe and the strongest softmax with heads of every width, all sizes that differ in nothing else."""
    found = []
    for side in ((OURS, *(ours for ours, _ in WIDTHS.values())), (THEIRS, *(theirs for _, theirs in WIDTHS.values()))):
        facts_and_arms = [(study[name], arm) for name in ALL_ELSE_EQUAL for arm in side]
        tried = [trial for facts, arm in facts_and_arms if arm in facts.size.arms for trial in facts.found(arm, 64)]
        found.append(sum(right for right, _ in tried) / sum(trials for _, trials in tried))
    holds(found[0] < found[1] - 0.05, "LSSAR finds fewer pass keys than softmax at 64x")
    return f"{percent(found[0])} against {percent(found[1])}%"


def answer_keys(study: Study) -> str:
    at_every_size(study)
    no_keys_with_rotary_positions(study)
    practice_was_too_short(study)
    return (
        "**Pass keys are found in that mix, where they were practised at length**: the best LSSAR finds at least 90% "
        f"at 1, 2, 4 and 16x with {listed(millions(study[name]) for name in ALL_ELSE_EQUAL)} parameters. At 64x it "
        "finds fewer than softmax "
        f"({keys_far_out(study)}, over all runs of {listed(ALL_ELSE_EQUAL)}), and so it does after short "
        "practice; with rotary positions no arm finds any at 16x."
    )


def answer_parts(study: Study) -> str:
    for finding in (the_power_decides, normalised_queries, softplus_is_not_needed, nor_the_offset):
        finding(study)
    return (
        "**What holds the length is the power, and normalised queries and keys.** Softplus, the 1 that is subtracted "
        "and the first normalisation are not needed for it (small models, short training: "
        "[ablations](#ablations-what-each-part-does))."
    )


def answer_time(study: Study) -> str:
    one_power, learned = step_ratios(study)
    return (
        f"**It costs time.** A training step of LSSAR takes {one_power} times that of softmax with QK-norm and log N "
        "with one power for all heads, "
        f"and took {learned} times with powers that heads learn; the kernels for these have become faster since."
    )


@dataclass(frozen=True)
class Block:
    """Bullets, and paragraphs before and after them."""

    bullets: Sequence[Finding] = ()
    before: Sequence[Finding] = ()
    after: Sequence[Finding] = ()

    def text(self, study: Study) -> str:
        made = sentences((*self.before, *self.bullets, *self.after), study)
        first, last = len(self.before), len(self.before) + len(self.bullets)
        bullets = "\n".join(f"- {text}" for text in made[first:last])
        parts = [*made[:first], bullets, *made[last:]]
        return "\n\n".join(filter(None, parts))


ANSWERS = (
    answer_headline, answer_baseline, answer_context, answer_positions, answer_mix, answer_far_context, answer_keys,
    answer_parts, answer_time,
)  # fmt: skip
PROSE: dict[str, Block] = {
    "answer": Block(ANSWERS, after=[what_was_trained]),
    "rotary-findings": Block(ROTARY_FINDINGS),
    "mix-findings": Block((*MIX_FINDINGS, *GAP_FINDINGS, what_did_not_help, *FAR_FINDINGS)),
    "key-findings": Block(KEY_FINDINGS),
    "inside-findings": Block(INSIDE_FINDINGS),
    "time-findings": Block(before=[step_times]),
    "not-measured": Block(before=[not_measured]),
    "ablation-findings": Block(ABLATION_FINDINGS, before=[how_sure], after=[not_the_demo]),
    "noise-findings": Block(before=[not_repeatable]),
    "settings": Block([one_set_of_settings]),
}


def prose_of(sizes: Sequence[Size], nothing: str, *, whole: bool) -> dict[str, str]:
    """The blocks by name. With `whole` a run that is not there is an error; otherwise its block says `nothing`."""
    study, made = Study(sizes), {}
    missing, broken = [], []
    for name, block in PROSE.items():
        try:
            made[name] = block.text(study)
        except MissingError as error:
            made[name] = nothing
            missing.append(str(error))
        except ClaimError as error:
            broken.append(str(error))
    if broken:
        raise PageError(f"the runs do not bear what pages/study_findings*.py says: {'; '.join(broken)}")
    if missing and whole:
        raise PageError(f"pages/study_findings*.py speaks of what is not there: {'; '.join(dict.fromkeys(missing))}")
    return made
