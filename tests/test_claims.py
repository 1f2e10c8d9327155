"""Numbers that README and docs state in prose: one line each, with what results/ has. Tables are written by `make pages`.

A line fails when the results change, and when the words do. Every decimal and percentage in the prose of the pages below
has to be in one of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from experiments.study.records import (
    Curve,
    Run,
    Size,
    gain_at,
    gain_error_at,
    loss_at,
    passkey_at,
    read_study,
    spread,
    timed,
)
from experiments.study.sizes import (
    OURS,
    OURS_192,
    OURS_256,
    OURS_WIDE,
    THEIRS,
    THEIRS_192,
    THEIRS_256,
    THEIRS_WIDE,
    alike,
    on_one_text,
    slope_at,
    with_wide_heads,
)
from softplus_attention.report.study import MIX, ROTARY
from tools.tables.benchmarks import read_attention, select

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
LOGN, P15, P3, RISING = "softmax-qknorm-logn", "lssar-p15", "lssar-p3", "lssar-rising"
GROWING, YARN, WINDOW = f"{RISING}+power=grow:15,2", f"{LOGN}+rope=yarn:16", f"{LOGN}+window=512"
LOG, FIXED = "lssar-log-global3", ("lssar-p2-global3", "lssar-p3-global3", "lssar-global3")
LOCAL = f"{OURS}-local-softmax-learned"
SOFT, WITHOUT_OFFSET = f"{LOCAL}-soft", "lssar-without-offset-learned-log-global3"
SAME_TEXT = ("10m-again", "25m-keys", "85m-again", "300m-again")  # by size, all else equal
# Where the control was measured over the last quarter of each text.
FAR_OURS = (("25m-keys", OURS_WIDE), ("85m-again", OURS_192), ("300m-again", OURS_WIDE))
FAR_THEIRS = (("25m-keys", THEIRS_WIDE), ("85m-again", THEIRS_192), ("300m-again", THEIRS_WIDE))
Values = Iterable[float]


@cache
def study() -> dict[str, Size]:
    return {size.name: size for size in read_study(RESULTS / "study")}


def runs(size: str, arm: str) -> list[Run]:
    return study()[size].arms[arm]


def curves(size: str, arm: str) -> list[Curve]:
    """An arm is named as in the study, or as `arm+option` where it was changed at inference."""
    name, _, option = arm.partition("+")
    return study()[size].curves(name, option or None)


def mean(value: Any) -> float:
    assert value is not None, "nothing was measured there"
    return float(value.mean)


def loss(size: str, arm: str, multiple: int) -> float:
    return mean(loss_at(curves(size, arm), multiple))


def seeds(size: str, arm: str, multiple: int) -> list[float]:
    return [curve.loss[multiple] for curve in curves(size, arm)]


def apart(size: str, arm: str, other: str, multiple: int) -> float:
    return loss(size, arm, multiple) - loss(size, other, multiple)


def rise(size: str, arm: str, multiple: int) -> float:
    return loss(size, arm, multiple) - loss(size, arm, 1)


def far(size: str, arm: str, multiple: int = 64) -> tuple[float, float]:
    """The gain over the last quarter of each text, and its standard error."""
    found = study()[size].far(arm)
    return mean(gain_at(found, multiple)), mean(gain_error_at(found, multiple))


def keys(size: str, arm: str, multiple: int) -> float:
    """Passkeys found, in percent."""
    found = passkey_at(runs(size, arm), multiple)
    assert found is not None
    return 100 * found


def keys_of_seeds(size: str, arm: str, multiple: int) -> list[float]:
    return sorted((100 * float(passkey_at([run], multiple) or 0) for run in runs(size, arm)), reverse=True)


def all_keys(best: str, multiple: int) -> float:
    """Over all runs of the mix, heads of every width."""
    arms = (best, *(f"{best}-wide{width}" for width in ("", 192, 256)))
    found = [run for size in SAME_TEXT for arm in arms for run in study()[size].arms.get(arm, [])]
    cells = [cell for run in found for cell in run.passkey[multiple]]
    return float(100 * Fraction(sum(right for right, _ in cells), sum(trials for _, trials in cells)))


def inside(size: str, arm: str, name: str, multiple: int) -> float:
    return mean(spread(run.inside.get(multiple, {}).get(name) for run in runs(size, arm)))


def gaps(multiple: int, *, wide: bool = True) -> list[float]:
    ours, theirs = (OURS_WIDE, THEIRS_WIDE) if wide else (OURS, THEIRS)
    return [apart(size, ours, theirs, multiple) for size in SAME_TEXT]


def narrow_gaps(*multiples: int) -> list[float]:
    sizes = [name for name, size in study().items() if {OURS, THEIRS} <= size.arms.keys()]
    pairs = [(size, multiple) for size in sizes for multiple in multiples if multiple in runs(size, OURS)[0].own.loss]
    return [apart(size, OURS, THEIRS, multiple) for size, multiple in pairs]


def second_half(size: str, arms: Iterable[str]) -> list[float]:
    """What the first half of a text of 64x is worth to its second, run by run: the first half is read the same."""
    return [2 * (run.own.loss[32] - run.own.loss[64]) for arm in arms for run in runs(size, arm)]


def step_ratios() -> list[float]:
    """With one power for all heads, over softmax with QK-norm and log N in the same layers."""
    times = timed(study()["10m"])
    pairs = [*((arm, LOGN) for arm in (P3, P15, RISING)), ("lssar-global3", f"{LOGN}-global3")]
    return [times[ours].mean / times[theirs].mean for ours, theirs in pairs]


def gains(multiple: int) -> list[tuple[float, float]]:
    """Of every arm of the mix, over the last half of a training length, with the standard errors."""
    names = ("10m", "25m", "85m", "10m-keys", *SAME_TEXT)
    own = [size.curves(arm) for name in names for size in [study()[name].of_kind(MIX)] for arm in size.arms]
    own = [found for found in own if multiple in found[0].gain]
    return [(mean(gain_at(found, multiple)), mean(gain_error_at(found, multiple))) for found in own]


def lowest_keys(*arms: str) -> float:
    """At any length up to 16x, at any size of the same text."""
    sizes = [name for name in SAME_TEXT for arm in arms if arm in study()[name].arms]
    return min(keys(size, arm, m) for size in sizes for arm in arms if arm in study()[size].arms for m in (1, 2, 4, 16))


def ends(values: Values, sign: int = 1) -> tuple[float, float]:
    found = [sign * value for value in values]
    return min(found), max(found)


@cache
def benchmark(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


def speed(contender: str, name: str, section: str = "train", **place: int) -> list[float]:
    return [row[name] for row in select(read_attention(RESULTS), contender, section, **place)]


def time_ratios(ours: str, theirs: str, **place: int) -> list[float]:
    pairs = zip(speed(ours, "total_ms", **place), speed(theirs, "total_ms", **place), strict=True)
    return [mine / other for mine, other in pairs]


def cpu_p15() -> list[Any]:
    return [row for row in benchmark("cpu.json")["time"] if row["setting"] == "p15"]


def cpu_decode(keys: int) -> float:
    """Time relative to SDPA of one float32 request over a cache of unit keys, p = 15."""
    plain = {"keys": keys, "dtype": "float32", "batch": 1, "heads_per_key_head": 1, "power": "15", "unit_keys": True}
    rows = benchmark("decode-op-cpu.json")["rows"]
    (ratio,) = [row["ratio"] for row in rows if plain.items() <= row.items()]
    return float(ratio)


README, RESULTS_PAGE, TABLES = "README.md", "docs/results.md", "docs/dev/study-tables.md"
CHOOSING, PERFORMANCE = "docs/choosing.md", "docs/performance.md"

# fmt: off
CLAIMS: list[tuple[str, str, Callable[[], Any]]] = [
    (README, "the loss *falls* up to 64 times the training length, by {:.2f} to {:.2f} nats", lambda: ends((rise(s, a, 64) for s in SAME_TEXT for a in (OURS_WIDE, THEIRS_WIDE)), -1)),
    (README, "in local and global layers the two are within {:.3f} nats of each other", lambda: max(abs(gap) for m in (1, 2, 4, 8, 16, 32, 64) for gap in gaps(m))),
    (README, "After `softplus-attention build` a CPU takes {:.1f} to {:.1f} times SDPA's time", lambda: ends(row["native_ratio"] for row in benchmark("cpu.json")["time"])),
    (README, "and generates {:.1f} to {:.1f} times as many tokens per second as with softmax", lambda: ends(row["ratio"] for row in benchmark("serving-cpu.json")["rows"])),
    (README, "Short decode caches (1,024 keys) take {:.1f} to {:.1f} times the fastest SDPA's time", lambda: ends(speed("lssar p=15", "forward_ratio", "decode", length=1024) + speed("lssar p=15 unit keys", "forward_ratio", "decode", length=1024))),
    (RESULTS_PAGE, "the loss *falls* up to 64x, by {:.3f} with softmax and by {:.3f} with LSSAR (30M", lambda: (-rise("10m-again", THEIRS_WIDE, 64), -rise("10m-again", OURS_WIDE, 64))),
    (RESULTS_PAGE, "lower than that of LSSAR with p = 15 by {:.3f} at 1x and by {:.3f} at 64x", lambda: (apart("10m-again", P15, LOGN, 1), apart("10m-again", P15, LOGN, 64))),
    (RESULTS_PAGE, "LSSAR comes within {:.3f} nats of softmax", lambda: max(abs(gap) for m in (1, 2, 4, 8, 16, 32, 64) for gap in gaps(m))),
    (CHOOSING, "LSSAR comes within {:.3f} nats of softmax at every length", lambda: max(abs(gap) for m in (1, 2, 4, 8, 16, 32, 64) for gap in gaps(m))),
    (RESULTS_PAGE, "the whole text is worth {:.3f} to {:.3f} nats to LSSAR at 64x", lambda: ends(far(*pair)[0] for pair in FAR_OURS)),
    (RESULTS_PAGE, "the best LSSAR finds at least 90% up to 16x. At 64x it finds {:.0f}%, softmax {:.0f}%", lambda: (all_keys(OURS, 64), all_keys(THEIRS, 64))),
    (RESULTS_PAGE, "**LSSAR costs time**: {:.2f} to {:.2f} times softmax's training step", lambda: ends(step_ratios())),
    (RESULTS_PAGE, "With one power for all heads a training step of LSSAR takes {:.2f} to {:.2f} times", lambda: ends(step_ratios())),
    (RESULTS_PAGE, "LSSAR with p = 15 is {:.2f} higher at 64x than at 1x", lambda: rise("10m-again", P15, 64)),
    (RESULTS_PAGE, "the first key has at most {:.1f}% of the weight", lambda: 100 * max(inside(n, a, "sink", m) for n, s in study().items() for a, own in s.arms.items() for m in own[0].inside)),
    (RESULTS_PAGE, "**p = 15 costs {:.3f} at the training length** compared with p = 3", lambda: apart("10m", P15, P3, 1)),
    (RESULTS_PAGE, "(3, 7, 15) recovers {:.3f} of that", lambda: apart("10m", P15, RISING, 1)),
    (RESULTS_PAGE, "of p = 15 by {:.3f} at 1x and {:.3f} at 16x", lambda: (apart("10m-again", P15, LOGN, m) for m in (1, 16))),
    (RESULTS_PAGE, "of the rising power by {:.3f} at 1x and by {:.3f} to {:.3f} from 16x on", lambda: (apart("10m-again", RISING, LOGN, 1), *ends(apart("10m-again", RISING, LOGN, m) for m in (16, 32, 64)))),
    (RESULTS_PAGE, "softmax is {:.3f} to {:.3f} lower from 16x on than that one seed", lambda: ends(loss("10m", LOGN, m) - loss("10m-again", LOGN, m) for m in (16, 32, 64))),
    (RESULTS_PAGE, "and LSSAR differs by at most {:.3f}", lambda: max(abs(loss("10m", a, m) - loss("10m-again", a, m)) for a in (P15, RISING) for m in (1, 2, 4, 8, 16, 32, 64))),
    (RESULTS_PAGE, "softmax with YaRN is {:.3f} to {:.3f} above the same softmax with a sliding window", lambda: ends(apart(s, YARN, WINDOW, m) for s in ("10m", "10m-again") for m in (16, 32, 64))),
    (RESULTS_PAGE, "and {:.3f} and {:.3f} below it at 32x and 64x", lambda: (-apart("10m-again", GROWING, LOGN, m) for m in (32, 64))),
    (RESULTS_PAGE, "It stays {:.3f} to {:.3f} above the sliding window", lambda: ends(apart("10m-again", GROWING, WINDOW, m) for m in (16, 32, 64))),
    (RESULTS_PAGE, "a learned factor of log N per head improves that by {:.3f} at 1x", lambda: apart("10m", LOG, OURS, 1)),
    (RESULTS_PAGE, "At 64x LSSAR gains {:.3f} and softmax {:.3f} with 30M parameters, {:.3f} and {:.3f} with 124M", lambda: (apart(s, a, f"{a}-wide", 64) for s in ("10m-again", "85m-again") for a in (OURS, THEIRS))),
    (RESULTS_PAGE, "{:.3f} to {:.3f} at 1x, {:.3f} to {:.3f} from 16x on", lambda: (*ends(narrow_gaps(1)), *ends(narrow_gaps(16, 32, 64)))),
    (RESULTS_PAGE, "the loss of LSSAR by {:.3f} ± {:.3f} (51M), {:.3f} ± {:.3f} (124M, head dimension 192) and {:.3f} ± {:.3f} (354M)", lambda: sum((far(*pair) for pair in FAR_OURS), ())),
    (RESULTS_PAGE, "that of softmax by {:.3f} ± {:.3f}, {:.3f} ± {:.3f} and {:.3f} ± {:.3f}", lambda: sum((far(*pair) for pair in FAR_THEIRS), ())),
    (RESULTS_PAGE, "At 4x the gain is already {:.3f} to {:.3f}", lambda: ends(far(*pair, 4)[0] for pair in (*FAR_OURS, *FAR_THEIRS))),
    (RESULTS_PAGE, "lowers LSSAR's loss on the second half by {:.3f} to {:.3f} with 124M parameters", lambda: ends(second_half("85m-again", (OURS_WIDE, OURS_192, OURS_256)))),
    (RESULTS_PAGE, "It raises softmax's loss by {:.3f} to {:.3f}, in all five", lambda: ends(second_half("85m-again", (THEIRS_WIDE, THEIRS_192, THEIRS_256)), -1)),
    (RESULTS_PAGE, "With 51M and 354M both gain {:.3f} to {:.3f}", lambda: ends(d for s in ("25m-keys", "300m-again") for d in second_half(s, (OURS_WIDE, THEIRS_WIDE)))),
    (RESULTS_PAGE, "{:.3f} better at 10m-keys", lambda: -apart("10m-keys", LOCAL, OURS, 16)),
    (RESULTS_PAGE, "but {:.3f} to {:.3f} worse with 124M parameters and head dimension 128", lambda: ends(apart("85m-again", f"{LOCAL}-wide", OURS_WIDE, m) for m in (1, 2, 4, 8, 16, 32, 64))),
    (RESULTS_PAGE, "{:.3f} to {:.3f} above softmax from 16x on at 25m-keys", lambda: ends(apart("25m-keys", SOFT, THEIRS, m) for m in (16, 32, 64))),
    (RESULTS_PAGE, "and {} and {} of 30 passkeys found at 16x", lambda: (sum(c for c, _ in run.passkey[16]) for run in runs("25m-keys", SOFT))),
    (RESULTS_PAGE, "(at 16x {:.0f} against {:.0f}% at 10m, {:.0f} against {:.0f}% at 25m)", lambda: (keys(s, a, 16) for s in ("10m", "25m") for a in (OURS, THEIRS))),
    (RESULTS_PAGE, "neither finds them reliably even at 1x ({:.0f} and {:.0f}%)", lambda: (keys("85m", a, 1) for a in (OURS, THEIRS))),
    (RESULTS_PAGE, "{:.0f}, {:.0f}, {:.0f} and {:.0f}% against {:.0f}, {:.0f}, {:.0f} and {:.0f}% with head dimension 128", lambda: (keys(s, a, 64) for a in (OURS_WIDE, THEIRS_WIDE) for s in SAME_TEXT)),
    (RESULTS_PAGE, "With softmax in the local layers (124M) it finds {:.0f}%", lambda: keys("85m-again", f"{LOCAL}-wide", 64)),
    (RESULTS_PAGE, "there learned factors in every layer find {:.0f}% at 16x", lambda: keys("10m-keys", OURS, 16)),
    (RESULTS_PAGE, "With softmax in the local layers they find {:.0f} and {:.0f}% (two seeds)", lambda: keys_of_seeds("10m-keys", LOCAL, 16)),
    (RESULTS_PAGE, "p = 15 holds the entropy of the final weights ({:.1f} to {:.1f} from 1x to 16x)", lambda: (inside("10m", P15, "entropy", m) for m in (1, 16))),
    (RESULTS_PAGE, "p = 3 does not ({:.1f} to {:.1f})", lambda: (inside("10m", P3, "entropy", m) for m in (1, 16))),
    (RESULTS_PAGE, "The best recipe, with a learned factor of log N per head, took {:.2f} times softmax's step with 124M parameters", lambda: runs("85m", OURS)[0].step_seconds / runs("85m", THEIRS)[0].step_seconds),
    (RESULTS_PAGE, "The models have {:.1f}M parameters and train for {} steps", lambda: (runs("books", P15)[0].parameters / 1e6, runs("books", P15)[0].config["steps"])),
    (RESULTS_PAGE, "11, 15 and 23 rise by {:.2f}, {:.2f} and {:.2f} from 1x", lambda: (rise("books", f"lssar-p{p}", 16) for p in (11, 15, 23))),
    (RESULTS_PAGE, "({:.2f} and {:.2f}, [results/demo.json]", lambda: (benchmark("demo.json")["loss"]["LSSAR"][0], benchmark("demo.json")["loss"]["LSSAR"][-1])),
    (RESULTS_PAGE, "and here it rises by {:.2f}", lambda: rise("books", P15, 16)),
    (PERFORMANCE, "take {:.2f} to {:.2f} times as long as FlashAttention-2 at D = 128 and {:.2f} to {:.2f} times at D = 64", lambda: (*ends(speed("lssar p=15", "ratio", head_dim=128, least=4096)), *ends(speed("lssar p=15", "ratio", head_dim=64, least=4096)))),
    (PERFORMANCE, "with {:.2f} to {:.2f} of its memory", lambda: ends(speed("lssar p=15", "step_ratio"))),
    (PERFORMANCE, "A training step of GPT-2 small takes {:.2f} times as long", lambda: benchmark("training-h200.json")["rows"][1]["time_to_softmax"]),
    (PERFORMANCE, "over 32K keys and more, {:.2f} to {:.2f} of the time of the fastest SDPA backend", lambda: ends(speed("lssar p=15 unit keys", "forward_ratio", "decode", least=32768))),
    (PERFORMANCE, "Over 1,024 keys, unit or raw, {:.1f} to {:.1f} times", lambda: ends(speed("lssar p=15", "forward_ratio", "decode", length=1024) + speed("lssar p=15 unit keys", "forward_ratio", "decode", length=1024))),
    (PERFORMANCE, "training and prefill take {:.1f} to {:.1f} times SDPA's time, and {:.1f} to {:.1f} times without the C++ kernels", lambda: (*ends(row["native_ratio"] for row in cpu_p15()), *ends(row["torch_ratio"] for row in cpu_p15()))),
    (PERFORMANCE, "takes {:.2f} of SDPA's time over 16,384 keys, but {:.1f} times as long over 64 keys", lambda: (cpu_decode(keys) for keys in (16384, 64))),
    (TABLES, "{} of the {} gains at 16x in a mix of layers are more than two standard errors", lambda: (sum(gain > 2 * error for gain, error in gains(16)), len(gains(16)))),
]
# Statements without a number, and what has to hold for them.
FACTS: list[tuple[str, str, Callable[[], bool]]] = [
    (README, "LSSAR stays nearly level", lambda: max(abs(rise("10m-again", P15, m)) for m in (2, 4, 8, 16, 32, 64)) < 0.07),
    (README, "has a lower loss at every length", lambda: all(apart("10m-again", a, LOGN, m) > 0 for a in (P15, RISING) for m in (1, 2, 4, 8, 16, 32, 64))),
    (README, "with rotary positions it rises from 4 times the training length on", lambda: all(loss("10m-again", a, 4) < loss("10m-again", a, 8) < loss("10m-again", a, 16) < loss("10m-again", a, 64) for a in (P15, LOGN))),
    (README, "Training is slower than with FlashAttention-2", lambda: min(speed("lssar p=15", "ratio")) > 1),
    (RESULTS_PAGE, "With rotary positions in every layer it rises, with every attention", lambda: all(rise("10m", arm, 64) > 0 for arm in study()["10m"].of_kind(ROTARY).arms)),
    (RESULTS_PAGE, "no arm gains from context beyond a few training lengths", lambda: all(mean(gain_at(curves("10m", arm), 64)) < 0 for arm in study()["10m"].of_kind(ROTARY).arms)),
    (RESULTS_PAGE, "The control (below) is negative for all of them at 64x", lambda: all(mean(gain_at(curves(s, arm), 64)) < 0 for s in ("10m", "10m-again") for arm in study()[s].of_kind(ROTARY).arms)),
    (RESULTS_PAGE, "a softmax with a sliding window is below all of them from 16x on", lambda: all(apart(s, WINDOW, arm, m) < 0 for s in ("10m", "10m-again") for arm in study()[s].of_kind(ROTARY).arms for m in (16, 32, 64))),
    (RESULTS_PAGE, "softmax, LSSA, SSMax, sigmoid, ReLU and LSSAR with p = 3 fail within a few lengths", lambda: min(rise("10m", arm, 8) for arm in ("softmax", "lssa", "ssmax", "sigmoid", "relu", P3)) > 0.25),
    (RESULTS_PAGE, "softmax with QK-norm and log N has a lower loss at every length", lambda: all(apart("10m-again", a, LOGN, m) > 0 for a in (P15, RISING) for m in (1, 2, 4, 8, 16, 32, 64))),
    (RESULTS_PAGE, "the best LSSAR finds at least 90% up to 16x", lambda: lowest_keys(OURS_WIDE) >= 90),
    (RESULTS_PAGE, "LSSAR with learned factors finds at least 90% at 1, 2, 4 and 16x, with 30M, 51M, 124M and 354M", lambda: lowest_keys(OURS, OURS_WIDE) >= 90),
    (RESULTS_PAGE, "p = 0.6 log N at least 90% (one seed)", lambda: min(keys("10m-keys", LOG, m) for m in (1, 2, 4, 16)) >= 90),
    (RESULTS_PAGE, "as often as softmax up to 16x, less often at 64x", lambda: lowest_keys(THEIRS, THEIRS_WIDE) >= 90 and all_keys(OURS, 64) < all_keys(THEIRS, 64)),
    (RESULTS_PAGE, "Each of its three seeds is below each of the three seeds of the rising power, at every length", lambda: all(max(seeds("10m-again", LOGN, m)) < min(seeds("10m-again", RISING, m)) for m in (1, 2, 4, 8, 16, 32, 64))),
    (RESULTS_PAGE, "LSSAR overtook it at 16x (rising power) or 32x (p = 15)", lambda: [next(m for m in (1, 2, 4, 8, 16, 32, 64) if apart("10m", a, LOGN, m) < 0) for a in (RISING, P15)] == [16, 32]),
    (RESULTS_PAGE, "the rising power is level with softmax at 16x", lambda: abs(apart("10m-again", GROWING, LOGN, 16)) <= 0.005),
    (RESULTS_PAGE, "Its mean is below that of softmax with YaRN, but not every seed of YaRN is above it", lambda: all(apart("10m-again", GROWING, YARN, m) < 0 for m in (16, 32, 64)) and min(seeds("10m-again", YARN, 64)) < loss("10m-again", GROWING, 64)),
    (RESULTS_PAGE, "Adding the re-weighting stage to a trained LSSA makes it worse", lambda: all(apart("10m", "lssa+reweight", "lssa", m) > 0 for m in (1, 16, 32, 64))),
    (RESULTS_PAGE, "with p = 3 the loss rises faster than softmax's", lambda: all(rise("10m", P3, m) > rise("10m", "softmax", m) for m in (2, 4, 8, 16, 32, 64))),
    (RESULTS_PAGE, "p = 0.6 log N is better than the constants 2, 3 and 15 at every length", lambda: all(apart("10m", LOG, a, m) < 0 for a in FIXED for m in (1, 2, 4, 8, 16, 32, 64))),
    (RESULTS_PAGE, "Head dimensions 192 and 256 change nothing more", lambda: all(abs(apart("85m-again", a, b, 16)) < 0.002 for a, b in ((OURS_192, OURS_WIDE), (OURS_256, OURS_WIDE), (THEIRS_192, THEIRS_WIDE), (THEIRS_256, THEIRS_WIDE)))),
    (RESULTS_PAGE, "none of the slopes with all else equal differs from 0 by more than one standard error", lambda: all(abs(line.value) < (line.error or 0) for line in equal_slopes())),
    (RESULTS_PAGE, "The loss falls with length** for LSSAR", lambda: all(rise(s, a, 16) < 0 for s in ("10m", *SAME_TEXT) for a in study()[s].of_kind(MIX).arms)),
    (RESULTS_PAGE, "Without them p = 15 does not hold", lambda: rise("books", "lssar-without-qk-norm", 16) > 2 * rise("books", P15, 16)),
    (RESULTS_PAGE, "exp holds best and learns worst", lambda: all(rise("books", "lssar-with-exp", 16) < rise("books", a, 16) and apart("books", "lssar-with-exp", a, 1) > 0 for a in ("lssar-with-relu", "lssar-with-elu1", "lssar-with-sigmoid", P15))),
    (RESULTS_PAGE, "below `lssar-p15` up to 4x", lambda: all(apart("books", LOGN, P15, m) < 0 for m in (1, 2, 4))),
    (TABLES, "and none at 64x is", lambda: not any(abs(gain) >= 2 * error for gain, error in gains(64))),
]
# fmt: on


def equal_slopes() -> list[Any]:
    sizes = list(study().values())
    groups = [group for trained in (sizes, with_wide_heads(sizes)) for group in on_one_text(trained) if alike(group)]
    return [line for group in groups for m in (1, 16, 32, 64) if (line := slope_at(group, m)) is not None]


@cache
def prose(page: str) -> str:
    """Without tables, code and addresses of links; one space between words."""
    text = re.sub(r"<!-- begin: (\S+) -->\n.*?<!-- end: \1 -->", "", (ROOT / page).read_text(), flags=re.DOTALL)
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return re.sub(r"\s+", " ", text)


def stated(words: str, value: Any) -> str:
    return words.format(*(value if isinstance(value, Iterable) else (value,)))


@pytest.mark.parametrize(("page", "words", "value"), CLAIMS, ids=[words[:40] for _, words, _ in CLAIMS])
def test_claim(page: str, words: str, value: Callable[[], Any]) -> None:
    assert stated(words, value()) in prose(page)


@pytest.mark.parametrize(("page", "words", "holds"), FACTS, ids=[words[:40] for _, words, _ in FACTS])
def test_statement(page: str, words: str, holds: Callable[[], bool]) -> None:
    assert words in prose(page)
    assert holds()


# Versions, names, settings, and numbers of logs whose files are not kept.
ALLOWED = {
    README: [r"Python 3\.11 and torch 2\.11", r"Apache-2\.0"],
    RESULTS_PAGE: [r"initialized at 0\.6", r"softmax's? learned scale was .*?\(two seeds\)", r"differed by 0\.001 at 1x.*? at 64x"],
}  # fmt: skip


@pytest.mark.parametrize("page", ALLOWED)
def test_every_number_in_the_prose_is_a_claim(page: str) -> None:
    text = re.sub(r"`[^`]*`", "", re.sub(r"\]\([^)\s]*\)", "]", prose(page)))
    for of_page, words, value in CLAIMS:
        if of_page == page:
            text = text.replace(re.sub(r"`[^`]*`", "", re.sub(r"\]\([^)\s]*\)", "]", stated(words, value()))), "")
    for of_page, words, _ in FACTS:
        if of_page == page:
            text = text.replace(words, "")
    for pattern in ALLOWED[page]:
        assert re.search(pattern, text, re.IGNORECASE), f"{pattern!r} is not there"
        text = re.sub(pattern, "", text, flags=re.IGNORECASE)
    assert re.findall(r"\S*\d\.\d+\S*|\d+ ?%", text) == []
