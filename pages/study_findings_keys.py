"""What the study found of pass keys, inside the attention and of time, and what it has not measured."""

from __future__ import annotations

import json

from claims import MissingError, between, each, holds, hundredths, listed, percent, seeds
from page_blocks import PageError, plain
from study_facts import (
    LOCAL_SOFTMAX,
    LOCAL_SOFTMAX_WIDE,
    LOG_MIX,
    LOGN,
    LOGN_MIX,
    P3,
    P15,
    RISING,
    ROOT,
    Facts,
    Study,
)
from study_findings_mix import ALL_ELSE_EQUAL, NARROW_TOO, millions
from study_runs import timed
from study_sizes import OURS, OURS_WIDE, THEIRS, THEIRS_WIDE, step_ratio

from softplus_attention.report.study import MIX

ENOUGH = 0.9
RELIABLE = 0.8
UP_TO_16X = (1, 2, 4, 16)
SINK = 0.01  # of the weight on the first key
SYNTHETIC = ROOT / "results" / "synthetic"


def at_least_nine_of_ten(facts: Facts, arm: str) -> bool:
    return all(facts.passkey(arm, multiple) >= ENOUGH for multiple in UP_TO_16X)


def two_find_them_at_each_size(study: Study) -> None:
    for name, arms in {"10m-keys": (LOG_MIX, LOCAL_SOFTMAX), "25m-keys": (LOG_MIX, OURS)}.items():
        for arm in arms:
            holds(at_least_nine_of_ten(study[name], arm), f"{arm} finds at least 90% of pass keys to 16x at {name}")
    holds(not at_least_nine_of_ten(study["10m-keys"], OURS), f"{OURS} does not find 90% of pass keys at 10m-keys")


def practice_was_too_short(study: Study) -> str:
    pairs = []
    for name in ("10m", "25m"):
        ours, theirs = (study[name].passkey(arm, 16) for arm in (OURS, THEIRS))
        holds(ours < theirs, f"at {name} the best LSSAR finds fewer keys than softmax at 16x")
        pairs.append(f"{percent(ours)} against {percent(theirs)}% at {name}")
    large = study["85m"]
    at_once = [large.passkey(arm, 1) for arm in (OURS, THEIRS)]
    holds(max(at_once) < RELIABLE, "at 85m neither finds pass keys reliably even at 1x")
    length = large.size.any_run.config["sequence_length"]
    return (
        "**Pass keys have to be practised at length.** The documents to practise on at 10m, 25m and 85m were at most "
        "375 tokens long. With them the best LSSAR finds fewer keys than softmax in the mix (at 16x "
        f"{', '.join(pairs)}), and at 85m, where sequences have {length:,} tokens, neither finds them reliably even "
        f"at 1x ({each(at_once, percent)}%)."
    )


def longer_practice(study: Study) -> str:
    two_find_them_at_each_size(study)
    facts = study["10m-keys"]
    mixed = facts.found(LOCAL_SOFTMAX, 64)
    softmax = facts.found(THEIRS, 64)
    log = facts.found(LOG_MIX, 16)
    return (
        "**With documents of 300 to 500 tokens two LSSAR arms at each of two sizes find at least 90%** at 1, 2, 4 "
        f"and 16x. At 10m-keys: p = 0.6 log N ({seeds(len(log))} of {log[0][1]} trials a length), and, on the mean of "
        f"{seeds(facts.count(LOCAL_SOFTMAX))}, learned factors in the layers that see everything beside softmax in "
        f"the local ones (at 16x {each(facts.passkeys(LOCAL_SOFTMAX, 16), percent)}%; at 64x {right_of(mixed)}, "
        f"softmax {right_of(softmax)}). Learned factors in every layer do not ({percent(facts.passkey(OURS, 16))}% at "
        "16x)."
    )


def right_of(found: list[tuple[int, int]]) -> str:
    return f"{sum(right for right, _ in found)} of {sum(trials for _, trials in found)}"


def longer_practice_of_the_larger(study: Study) -> str:
    two_find_them_at_each_size(study)
    facts = study["25m-keys"]
    return (
        f"**At 25m-keys learned factors in every layer do**: {percent(facts.passkey(OURS, 16))}% at 16x on the mean "
        f"of {seeds(facts.count(OURS))} ({each(facts.passkeys(OURS, 16), percent)}%), and p = 0.6 log N "
        f"{percent(facts.passkey(LOG_MIX, 16))}% ({seeds(facts.count(LOG_MIX))}), where softmax finds "
        f"{percent(facts.passkey(THEIRS, 16))}%."
    )


def no_sink(study: Study) -> str:
    masses = [
        mass for size in study.sizes for run in size.runs for entry in run.inside.values()
        if (mass := entry.get("sink")) is not None
    ]  # fmt: skip
    if not masses:
        raise MissingError("the mass on the first key")
    holds(max(masses) < SINK, "no arm has an attention sink")
    return (
        "**No arm has an attention sink** worth the name at these sizes, on the average over heads and layers, "
        f"softmax included (the first key has at most {100 * max(masses):.1f}% of the weight), so its absence says "
        "nothing for LSSAR here."
    )


def grown(facts: Facts, arm: str, word: str) -> float:
    return facts.inside(arm, word, 16) - facts.inside(arm, word, 1)


def entropy_of_stage_1(study: Study) -> str:
    facts = study["10m"]
    for arm in (RISING, P15, P3, "lssa"):
        grows, keys = grown(facts, arm, "stage1_entropy"), grown(facts, arm, "log_keys")
        holds(grows > 0.98 * keys, f"the entropy of stage 1 of {arm} grows as log N does or faster")
        held = grown(facts, arm, "stage1_entropy_frozen")
        holds(0.9 * held < grows <= held, f"the entropy of stage 1 of {arm} grows nearly as much as with log N held")
    for name in ("10m", "10m-again"):
        with_log, held = (grown(study[name], LOGN, word) for word in ("entropy", "stage1_entropy_frozen"))
        holds(with_log <= 0 < held, f"log N keeps the entropy of softmax from growing at {name}")
    fifteen, rising, three = (entropies(facts, arm) for arm in (P15, RISING, P3))
    holds(grown(facts, P3, "entropy") > grown(facts, P3, "log_keys"), "the power 3 does not hold the entropy")
    holds(grown(facts, P15, "entropy") < 1 and grown(facts, RISING, "entropy") < 1, "the power 15 holds the entropy")
    return (
        "**log N does not hold the entropy of stage 1**: with rotary positions it grows as log N does or faster, and "
        "nearly as much as with log N held at its value of 1x. The power 15 holds the entropy of the final weights "
        f"({fifteen} from 1x to 16x, {rising} where it was raised in training), the power 3 does not ({three}). In "
        "softmax log N does what it is said to do."
    )


def entropies(facts: Facts, arm: str) -> str:
    return " to ".join(plain(facts.inside(arm, "entropy", multiple), 1) for multiple in (1, 16))


def ratio_of_the_best(facts: Facts) -> float | None:
    """None where they were not alone on the GPU."""
    for arm in (OURS, THEIRS):
        facts.runs(arm)  # an error that names the one which is not there
    return step_ratio(facts.size)


def step_ratios(study: Study) -> tuple[str, str]:
    """Times of a step over that of softmax of cosines with log N in the same layers: at 10m with one power for all
    heads, at 85m with learned ones, beside scales that are learned."""
    times, learned = timed(study["10m"].size), ratio_of_the_best(study["85m"])
    pairs = [(arm, LOGN) for arm in (P3, P15, RISING)] + [("lssar-global3", LOGN_MIX)]
    missing = [arm for arm in {arm for pair in pairs for arm in pair} if arm not in times]
    if missing or learned is None:
        raise MissingError("times of a training step at 10m and 85m, of runs alone on the GPU")
    ratios = [times[ours].mean / times[theirs].mean for ours, theirs in pairs]
    holds(min(*ratios, learned) > 1, "a training step of LSSAR takes longer than softmax's")
    return between(ratios, hundredths), hundredths(learned)


def step_times(study: Study) -> str:
    one_power, learned = step_ratios(study)
    names = ("10m-keys", *ALL_ELSE_EQUAL)
    alone = [name for name in names if any(run.processes == 1 for run in study[name].size.of_kind(MIX).runs)]
    holds(not alone, f"the step alone is not timed yet at {listed(names)}")
    return (
        f"At 10m a training step of LSSAR with one power for all heads takes {one_power} times that of softmax with "
        "QK-norm and log N in the same layers (the table of speed). The best recipe at "
        f"{millions(study['85m'])} took {learned} times the step of softmax with learned scales in "
        "the same mix, one run each: the kernels for a power per head were slower than those for one integer. They "
        "have since become faster ([kernels.md](kernels.md#hopper-the-log), "
        f"[performance.md](performance.md#gpu-training)); the models of {listed(names)} were trained several at a "
        "time, so their step alone is not timed yet."
    )


def recall_at_64x(attention: str, *, pairs: bool) -> float:
    """Associative recall of models of their own, with a number of pairs or as many as fit."""
    for path in sorted(SYNTHETIC.glob("synthetic--recall+*.json")):
        found = json.loads(path.read_text())
        if found["model"]["attention"] == attention and bool(found["settings"]["pairs"]) == pairs:
            return float(
                next(entry["accuracy"] for entry in found["results"]["lengths"] if round(entry["times"]) == 64)
            )
    raise PageError(f"{SYNTHETIC} lacks a recall of {attention}")


def one_seed(study: Study) -> str:
    """Sizes and arms that have no second one."""
    words = []
    for size in study.sizes:
        single = [arm for arm, runs in size.arms.items() if len(runs) == 1]
        if single:
            arms = "every arm" if len(single) == len(size.arms) else f"{len(single)} of {len(size.arms)} arms"
            words.append(f"{arms} of {size.name}")
    return listed(words) if words else ""


def not_measured(study: Study) -> str:
    ours, theirs = (recall_at_64x(attention, pairs=False) for attention in ("lssar", LOGN))
    few = recall_at_64x("lssar", pairs=True)
    holds(
        ours >= 0.95 and abs(ours - theirs) < 0.005,
        "recall reaches its target, with softmax + QK-norm + log N as with LSSAR",
    )
    for name in ("25m", "85m", "25m-keys", "85m-again", "300m-again"):
        mixed_alone = study[name].size.kinds == [MIX] and not any(map(study[name].size.options, study[name].size.arms))
        holds(mixed_alone, f"windows, YaRN and other attentions are not measured at {name}")
    single = one_seed(study)
    seconds = f", and second seeds ({single} have one)" if single else ""
    return (
        f"The windows, YaRN and other attentions at the larger sizes{seconds}. Associative recall, whose target was "
        "95% at 64x, is measured with [small models of their own](evaluation.md#synthetic-tasks): "
        f"{plain(100 * ours, 1)}% with LSSAR, and as much with softmax + QK-norm + log N, where the number of pairs "
        f"grows with the length; {percent(few)}% with 8 pairs. Stability at high learning rates and in float16 has [a "
        "page of its own](stability.md)."
    )


def of_every_size(study: Study, *, wide: bool) -> list[tuple[Facts, str, str]]:
    """Sizes that differ in nothing else, and the two arms there."""
    names, pair = (ALL_ELSE_EQUAL, (OURS_WIDE, THEIRS_WIDE)) if wide else (NARROW_TOO, (OURS, THEIRS))
    return [(study[name], *pair) for name in names]


def at_every_size(study: Study) -> str:
    far = []
    for wide in (False, True):
        sizes = of_every_size(study, wide=wide)
        for facts, ours, _ in sizes:
            found = at_least_nine_of_ten(facts, ours)
            holds(found, f"{ours} finds at least 90% of pass keys to 16x at {facts.size.name}")
        for facts, ours, theirs in sizes[1 if wide else 0 :]:
            fewer = facts.passkey(ours, 64) < facts.passkey(theirs, 64)
            holds(fewer, f"{ours} finds fewer pass keys than softmax at 64x at {facts.size.name}")
        sides = (each((facts.passkey(arms[side], 64) for facts, *arms in sizes), percent) for side in (0, 1))
        far.append(" against ".join(f"{side}%" for side in sides) + f" with heads of {128 if wide else 64}")
    facts = study["85m-again"]
    holds(at_least_nine_of_ten(facts, LOCAL_SOFTMAX_WIDE), f"{LOCAL_SOFTMAX_WIDE} finds at least 90% of pass keys")
    return (
        f"**So they do at {listed(ALL_ELSE_EQUAL)}**, on the same text: at least 90% at 1, 2, 4 and 16x with "
        f"{listed(millions(study[name]) for name in ALL_ELSE_EQUAL)} parameters. At 64x LSSAR finds fewer than softmax "
        f"with heads of 64 and, from {millions(study['25m-keys'])} on, with heads of 128: size by size {listed(far)}. "
        f"With softmax in the local layers ({millions(facts)}, heads of 128) it finds "
        f"{percent(facts.passkey(LOCAL_SOFTMAX_WIDE, 64))}% there."
    )


KEY_FINDINGS = (practice_was_too_short, longer_practice, longer_practice_of_the_larger, at_every_size)
INSIDE_FINDINGS = (no_sink, entropy_of_stage_1)
