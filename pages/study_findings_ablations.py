"""What the ablations found, how much is noise, and what such short runs cannot tell."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from claims import each, holds, hundredths, nats, seeds
from study_facts import LOGN, P15, ROOT, THEIRS_SOFT, Facts, Study
from study_findings_mix import SEARCH, gain_of_a_softer_start
from study_sizes import THEIRS

DEMO = ROOT / "results" / "demo.json"
HELD = 0.5  # nats between 1x and 16x
NEARLY = 0.15  # of that, in a rise of 0.35
LITTLE = {1: 0.01, 16: 0.05}  # nats


def held(facts: Facts, arms: Iterable[str]) -> bool:
    return all(facts.rise(arm, 16) < HELD for arm in arms)


def none_held(facts: Facts, arms: Iterable[str]) -> bool:
    return all(facts.rise(arm, 16) > HELD for arm in arms)


def held_nearly_as(facts: Facts, arms: Iterable[str]) -> bool:
    """As the power 15 does, in the loss from 1x to 16x."""
    return all(facts.rise(arm, 16) < facts.rise(P15, 16) + NEARLY for arm in arms)


def how_sure(study: Study) -> str:
    facts = study["books"]
    counts = {facts.count(arm) for arm in facts.size.arms}
    words = seeds(counts.pop()) if len(counts) == 1 else f"{seeds(min(counts))} to {max(counts)}"
    return (
        f"{words[0].upper()}{words[1:]}, and {facts.size.any_run.config['steps']} steps: differences of a few "
        "hundredths say little here, those at 16x are mostly larger than that."
    )


def the_power_decides(study: Study) -> str:
    facts = study["books"]
    low, high = [f"lssar-p{power}" for power in (1, 2, 3, 4)], [f"lssar-p{power}" for power in (11, 15, 23)]
    seven, most = "lssar-p7", "lssar-p31"
    holds(all(facts.below("lssa", arm, (16,)) for arm in low), "powers of 1 to 4 win nothing at 16x over stage 1 alone")
    holds(facts.below(seven, "lssa", (16,)), "the power 7 wins something at 16x over stage 1 alone")
    at_once = [facts.loss(arm, 1) for arm in (seven, *high)]
    holds(held(facts, high) and at_once == sorted(at_once), "high powers hold, and cost more at 1x the higher they are")
    holds(facts.below(high[-1], most, (1, 16)), "the power 31 is worse again at 1x and at 16x")
    rises = each((facts.rise(arm, 16) for arm in high), hundredths)
    return (
        "**The power decides about length.** Powers of 1 to 4 win nothing at 16x over stage 1 alone, 7 something; "
        f"11, 15 and 23 keep the loss within {rises} of 1x, and pay for it at the training length, the more the "
        "higher; 31 is worse again at both."
    )


def softmax_without_a_power(study: Study) -> str:
    facts = study["books"]
    holds(facts.below(LOGN, P15, (1, 2, 4)), "softmax of cosines with log N is below lssar-p15 up to 4x")
    apart = max(facts.apart(arm, 16) for arm in (LOGN, P15))
    holds(abs(facts.behind(LOGN, P15, 16)) <= apart, "softmax of cosines with log N is level with lssar-p15 at 16x")
    holds(all(facts.below("lssar-p23", arm, (16,)) for arm in (LOGN, P15)), "at 16x the power 23 is below both")
    return (
        "**Softmax of cosines with log N holds nearly as well without a power**: it is below `lssar-p15` up to 4x "
        "and, as far as seeds tell, level with it at 16x, where the power 23 is below both."
    )


def normalised_queries(study: Study) -> str:
    facts = study["books"]
    holds(none_held(facts, ["lssar-without-qk-norm"]), "without normalised queries and keys the power 15 does not hold")
    on_top = ("softmax-reweighted", "sigmoid-l1-reweighted", "relu-l1-reweighted")
    holds(none_held(facts, on_top), "the second stage on top of plain softmax, sigmoid or ReLU does not hold")
    return (
        "**Normalised queries and keys are the other half.** Without them the power 15 does not hold, and the second "
        "stage on top of plain softmax, sigmoid or ReLU does not either."
    )


def softplus_is_not_needed(study: Study) -> str:
    facts = study["books"]
    holds(held_nearly_as(facts, ["lssar-with-relu", "lssar-with-elu1"]), "ReLU and ELU + 1 do what softplus does")
    holds(none_held(facts, ["lssar-with-sigmoid"]), "sigmoid in the place of softplus fails")
    exp, every = "lssar-with-exp", facts.size.arms
    holds(min(every, key=lambda arm: facts.rise(arm, 16)) == exp, "exp in the place of softplus holds best")
    holds(max(every, key=lambda arm: facts.loss(arm, 1)) == exp, "exp in the place of softplus learns worst")
    return (
        "**Softplus is not needed for it**: ReLU and ELU + 1 in its place do the same; sigmoid, which levels off "
        "above, fails, and exp holds best and learns worst at this length of training."
    )


def nor_the_offset(study: Study) -> str:
    facts = study["books"]
    left_out = ("lssar-without-offset", "lssar-without-l1")
    holds(
        held_nearly_as(facts, left_out), "without the offset, or the first normalisation, the loss holds nearly as well"
    )
    holds(
        all(facts.below(arm, P15, (1,)) for arm in left_out),
        "without the offset, or the first normalisation, it is lower at 1x",
    )
    level = all(facts.level("lssar-without-times-n", "lssa", multiple) for multiple in (1, 16))
    holds(level, "without the factor N what remains is stage 1")
    return (
        "**Nor is the offset, nor the first normalisation.** Without the 1 that is subtracted, or with stage 1 left "
        "as it is, the loss holds nearly as well and is lower at the training length: it is the power that sharpens. "
        "Without the factor N nothing is above 1, and what remains is stage 1."
    )


def exp_in_place_of_the_power(study: Study) -> str:
    holds(none_held(study["books"], ["lssar-then-exp"]), "exp in the place of ReLU and power does not hold")
    return "**exp in place of ReLU and power** (a softmax of N a) does not hold."


def log_d_and_log_n(study: Study) -> str:
    facts = study["books"]
    for arm in ("lssar-without-log-d", "lssar-without-log-n"):
        for multiple, little in LITTLE.items():
            holds(abs(facts.behind(arm, P15, multiple)) < little, f"{arm} differs little from lssar-p15 at {multiple}x")
    help_ = all(facts.below("lssa", arm, (1,)) for arm in ("lssa-without-log-d", "lssa-without-log-n"))
    holds(help_, "log d and log N help stage 1 alone at the training length")
    strongest = sorted(facts.size.arms, key=lambda arm: facts.loss(arm, 1))[:2]
    holds(all(arm.startswith(LOGN) for arm in strongest), "log N is part of the strongest rows of the ablations at 1x")
    return (
        "**log d and log N change little** in LSSAR with the power 15; in stage 1 alone both help at the training "
        "length. In softmax of cosines log N is part of the strongest rows of the table."
    )


def level_in_the_demo(losses: Mapping[str, Sequence[float]]) -> None:
    ours = losses["LSSAR"]
    holds(ours[-1] - ours[0] < 0.05, "in the demo LSSAR stays level")


def not_the_demo(study: Study) -> str:
    study["books"]
    found = json.loads(DEMO.read_text())["loss"]
    level_in_the_demo(found)
    losses = found["LSSAR"]
    return (
        "These runs are not the demo's: there the power rises to 15 during training, with 2 heads in place of 4 and "
        f"another learning rate, and LSSAR stays level on its texts ({hundredths(losses[0])} at 1x, "
        f"{hundredths(losses[-1])} at 16x; [results/demo.json](../results/demo.json)). And these runs were made when "
        "Muon iterated in bfloat16 on a CPU too, in place of float32, which makes other digits."
    )


def not_repeatable(study: Study) -> str:
    runs = {run.seed: run.own.loss for run in study["10m-keys"].runs(THEIRS)}
    again = {run["seed"]: run["loss"] for run in search("runs_again_at_10m") if run["seed"] in runs}
    away = {m: [abs(loss[f"{m}x"] - runs[seed][m]) for seed, loss in again.items()] for m in (1, 16, 64)}
    words = ", ".join(f"{each(values)} at {multiple}x" for multiple, values in away.items())
    return (
        f"A run is not repeatable to the digit either: {seeds(len(again))} of `{THEIRS}` at 10m-keys, trained once "
        f"more, came out away by {words} ([log](log.md))."
    )


def search(name: str) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = json.loads(SEARCH.read_text())[name]["runs"]
    return runs


def small_vocabulary(start: str) -> float:
    """Of softmax with a learned scale at 1x, after 500 steps on a CPU."""
    runs = json.loads(SEARCH.read_text())["learning_speed_on_a_small_vocabulary"]["of_500_steps"]["runs"]
    first = next(index for index, run in enumerate(runs) if run["arm"].startswith("softmax"))
    return float(next(run for run in runs[first:] if run["arm"].endswith(f"{start} at first"))["loss"]["1"])


def one_set_of_settings(study: Study) -> str:
    larger = study["25m-keys"]
    small = small_vocabulary("1") - small_vocabulary("0.6")
    worse = larger.behind(THEIRS_SOFT, THEIRS, 1)
    return (
        "The settings of the optimizer are one set for all arms, not the best for each. Nor are the starts of what "
        f"heads learn: softmax's learned scale was {nats(small)} nats better in a small model on a CPU, and "
        f"{nats(gain_of_a_softer_start(study))} at 10m-keys (one seed), when it began at 0.6 in place of the 1 that "
        f"it has in most arms here, but {nats(worse)} worse at 25m-keys ({seeds(larger.count(THEIRS_SOFT))}), and "
        "LSSAR's factor no better for another start ([log](log.md))."
    )


ABLATION_FINDINGS = (
    the_power_decides, softmax_without_a_power, normalised_queries, softplus_is_not_needed, nor_the_offset,
    exp_in_place_of_the_power, log_d_and_log_n,
)  # fmt: skip
