"""The sentences of README.md: their numbers are those of the results, and what these do not bear is named."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from study_cases import curve, imported, record

ROOT = Path(__file__).parents[1]
BEST, SOFTMAX = "lssar-learned-log-global3", "softmax-qknorm-logn-learned-global3"
LOGN = "softmax-qknorm-logn"
Measured = Any


@pytest.fixture(scope="module")
def scripts() -> Iterator[SimpleNamespace]:
    names = ("claims", "study_facts", "study_runs", "readme_page", "readme_words")
    with imported("readme_page"):
        modules = {}
        for name in names:
            with imported(name) as module:
                modules[name] = module
        yield SimpleNamespace(**modules)


@pytest.fixture(scope="module")
def measured_there(scripts: SimpleNamespace) -> Measured:
    results = ROOT / "results"
    return scripts.readme_page.measured_in(results, scripts.readme_page.read_study(results / "study"))


@pytest.fixture
def measured(measured_there: Measured) -> Measured:
    """Of the repository, to be changed."""
    return copy.deepcopy(measured_there)


def made(scripts: SimpleNamespace, losses: dict[str, dict[str, list[list[float]]]]) -> Measured:
    """A study alone: by size and arm the losses of each seed at 1x, 16x and 64x."""
    sizes = []
    for size, arms in losses.items():
        runs = {
            arm: [
                scripts.study_runs.run_of(
                    record(arm, seed, curve(own, 0.0, 0.1), [[9, 9], [9, 9]], step_seconds=0.1) | {"size": size}
                )
                for seed, own in enumerate(of_seeds)
            ]
            for arm, of_seeds in arms.items()
        }
        sizes.append(scripts.study_runs.Size(size, runs))
    return scripts.readme_words.Measured(scripts.study_facts.Study(sizes), [], {}, {}, [], [])


def step(contender: str, head_dim: int, length: int, total: float, base: float, host: float) -> dict[str, Any]:
    return {
        "section": "train", "contender": contender, "head_dim": head_dim, "length": length, "total_ms": total,
        "ratio": total / base, "forward_ratio": total / base, "forward_host_ms": host, "backward_host_ms": 3 * host,
    }  # fmt: skip


def timed(scripts: SimpleNamespace, measured: Measured) -> Measured:
    """Rows that can be reckoned with by hand."""
    rows = []
    for head_dim, length, base, slower in ((64, 1024, 1.0, 1.5), (64, 4096, 2.0, 1.75), (128, 1024, 4.0, 1.25)):
        rows += [
            step("sdpa flash", head_dim, length, base, base, 0.1),
            step("sdpa cudnn", head_dim, length, 0.5 * base, base, 0.1),
            step("lssar p=15", head_dim, length, slower * base, base, 0.15 if length == 1024 else 0.3),
            step("lssar learned", head_dim, length, 1.2 * slower * base, base, 0.5),
        ]
    flex = step("flex lssar p=15", 64, 1024, 0.0, 1.0, 0.1) | {"section": "compile", "forward_ratio": 49.0}
    decode = [
        step(f"lssar p=15{keys}", 128, length, total, 1.0, 0.0) | {"section": "decode"}
        for keys, length, total in (
            ("", 1024, 2.5),
            (" unit keys", 1024, 2.1),
            ("", 32768, 1.1),
            (" unit keys", 32768, 0.9),
        )
    ]
    return replace(measured, attention=[*rows, flex, *decode], cpu={"time": [{"ratio": 1.96}, {"ratio": 3.04}]})


def test_times(scripts: SimpleNamespace) -> None:
    said = scripts.readme_words.times(timed(scripts, made(scripts, {})))
    assert "at 1,024 tokens a step takes 1.50 and 1.25 times as long with heads of 64 and 128" in said
    assert "and 2.5 to 3.5 times that of cuDNN's" in said
    assert "takes over 30 times as long for the same" in said  # 49 / 1.5 is 32.7
    assert "Powers that heads learn take 1.2 times as long as the power 15 from 4,096 tokens on" in said
    assert "the op takes 2.0 to 3.0 times SDPA's time." in said
    assert "takes no longer than softmax's** where" in said
    assert "(as a CUDA graph, 0.90 times as long at 32,768 keys)" in said
    assert "Over raw keys, which other models keep, it takes 1.10 times as long" in said
    assert "bound by launches, 2.1 to 2.5 times (1,024 keys)." in said


def test_the_host(scripts: SimpleNamespace) -> None:
    said = scripts.readme_words.the_host(timed(scripts, made(scripts, {})))
    assert "took the host 0.15 to 0.30 ms, launches included, and a backward 0.45 to 0.90" in said
    assert "on the mean 2.0 and 2.0 times what FlashAttention-2 takes it" in said  # (0.15 + 0.3 + 0.15) / 0.3


def test_models_are_counted(scripts: SimpleNamespace) -> None:
    one = [[4.0, 4.0, 4.0]]
    study = {"books": {"lssar-p1": one}, "10m": {"lssa": one, "relu": one}, "25m": {"relu": one, BEST: one}}
    said = scripts.readme_words.models(made(scripts, study))
    assert "all 3 arms at sizes to " in said
    assert said.endswith(", beside 1 ablations.")


def test_the_cost_of_the_power(scripts: SimpleNamespace) -> None:
    arms = {"softmax": [[4.2, 5, 6]], LOGN: [[4.0, 5, 6], [4.1, 5, 6]], "lssar-p15": [[4.1, 5, 6]]}
    again = {LOGN: [[4.0, 5, 6]], "lssar-p15": [[4.07, 5, 6]]}
    study = made(scripts, {"10m": arms, "10m-again": again}).study
    assert scripts.readme_words.cost_of_the_power(study) == "0.05 to 0.07", "the mean over seeds"
    worse = made(scripts, {"10m": arms | {"softmax": [[4.0, 5, 6]]}, "10m-again": again}).study
    with pytest.raises(scripts.claims.ClaimError, match="the best softmax with rotary positions at 1x"):
        scripts.readme_words.cost_of_the_power(worse)


def stable(arm: str, loss: float, score: float, stopped: str | None = None) -> dict[str, Any]:
    words = {"arm": arm, "size": "tiny", "precision": "fp32", "learning_rate": 0.1, "stopped": stopped}
    return words | {"losses": [[1, loss]], "largest_score": None if stopped else score}


@pytest.mark.parametrize(
    ("softmax", "normalised", "true"),
    [
        (stable("softmax", 3.0, 100.0), stable(LOGN, 2.0, 12.0), True),
        (stable("softmax", 3.0, 1.0, "not finite"), stable(LOGN, 2.0, 12.0), True),
        (stable("softmax", 2.0, 100.0), stable(LOGN, 2.5, 12.0), False),
        (stable("softmax", 3.0, 20.0), stable(LOGN, 2.0, 12.0), False),
        (stable("softmax", 3.0, 100.0), stable(LOGN, 2.0, 1.0, "not finite"), False),
    ],
)
def test_stability(softmax: dict[str, Any], normalised: dict[str, Any], true: bool, scripts: SimpleNamespace) -> None:
    runs = [softmax, normalised, stable("lssar-p15", 2.1, 11.0)]
    found = replace(made(scripts, {}), stability=runs)
    if true:
        assert scripts.readme_words.numerical_stability(found).startswith("Normalised queries and keys bring it")
    else:
        with pytest.raises(scripts.claims.ClaimError, match=r"bring stability \(tiny, fp32, 0.1\)"):
            scripts.readme_words.numerical_stability(found)


def runs_of(measured: Measured, size: str, arm: str) -> list[Any]:
    return next(one for one in measured.study.sizes if one.name == size).arms[arm]


def raise_loss(size: str, arm: str, multiple: int, by: float) -> Callable[[Measured], None]:
    def change(measured: Measured) -> None:
        for run in runs_of(measured, size, arm):
            run.own.loss[multiple] += by

    return change


def rows_change(contender: str, word: str, value: float) -> Callable[[Measured], None]:
    def change(measured: Measured) -> None:
        for row in measured.attention:
            if row["contender"] == contender and word in row:
                row[word] = value

    return change


def keys_of_softmax(measured: Measured) -> None:
    runs_of(measured, "25m-keys", SOFTMAX)[0].passkey[4] = [(0, 10)] * 3


def a_law_that_is_lost(measured: Measured) -> None:
    gpu = measured.newton[1]
    cell = next(cell for cell in gpu["cells"] if cell["arm"] == "softmax" and cell["labels"] == 2000)
    assert cell["pretrained"]
    cell["laws"]["ln_force"][0]["operon"]["chosen"]["within"]["law"] = "m1 / r"


def an_orbit_that_is_left(measured: Measured) -> None:
    run = next(run for run in measured.newton[1]["long"] if run["arm"] == "lssar")
    run["roll_out"][0]["median_ellipse_error"] = 1.0


def a_demo_that_rises(measured: Measured) -> None:
    measured.demo["loss"]["LSSAR"][-1] += 0.1


def another_demo(measured: Measured) -> None:
    measured.demo["settings"]["width"] = 256


def slower_softmax(measured: Measured) -> None:
    for run in runs_of(measured, "10m", "softmax-qknorm-logn-global3"):
        object.__setattr__(run, "step_seconds", 1.0)


def a_sink(measured: Measured) -> None:
    runs_of(measured, "85m", BEST)[0].inside[1]["sink"] = 0.2


BROKEN: dict[str, Callable[[Measured], None]] = {
    "the_demo: in the demo LSSAR stays level": a_demo_that_rises,
    "the ablations are models as large as the demo's": another_demo,
    "LSSAR with the power 15 stays nearly level to 64x": raise_loss("10m", "lssar-p15", 64, 0.03),
    "lssar-p15 is better than plain softmax, beyond the training": raise_loss("10m", "lssar-p15", 1, -0.07),
    "at 10m-again softmax stays ahead of lssar-rising to 64x": raise_loss("10m-again", "lssar-rising", 64, -0.03),
    "softmax finds at least 90% of pass keys to 16x too": keys_of_softmax,
    "no_attention_sink: no arm has an attention sink": a_sink,
    "softmax finds Newton's law with 2,000 labels (gpu)": a_law_that_is_lost,
    "roll-outs of lssar stay on the orbit longer than plain softmax's, at 2x": an_orbit_that_is_left,
    "which_power: a factor of log N that each head learns is the best": raise_loss("10m", BEST, 16, 0.05),
    "lssar-log-global3 is not clearly better than lssar-learned-log-global3 at 1x (25m-keys)": raise_loss(
        "25m-keys", "lssar-log-global3", 1, -0.02
    ),
    "a training step of LSSAR takes longer than softmax's": slower_softmax,
    "training is slower than with FlashAttention-2": rows_change("lssar p=15", "ratio", 0.9),
    "takes no longer than softmax's": rows_change("lssar p=15 unit keys", "forward_ratio", 1.1),
    "FlashAttention-2 takes the host less time": rows_change("sdpa flash", "forward_host_ms", 9.0),
}


@pytest.mark.parametrize("claim", BROKEN)
def test_a_claim_that_no_longer_holds(claim: str, scripts: SimpleNamespace, measured: Measured) -> None:
    written = scripts.claims.written
    written(scripts.readme_words.WORDS, measured, "the words")
    BROKEN[claim](measured)
    with pytest.raises(scripts.claims.PageError, match=f"do not bear what the words says: .*{re.escape(claim)}"):
        written(scripts.readme_words.WORDS, measured, "the words")


def no_pretrained_arm(measured: Measured) -> None:
    for cell in measured.newton[1]["cells"]:
        cell["pretrained"] = False


def no_roll_out(measured: Measured) -> None:
    found = measured.newton[1]
    found["long"] = [run for run in found["long"] if run["arm"] != "lssar"]


def no_stability_of_softmax(measured: Measured) -> None:
    kept = [run for run in measured.stability if run["arm"] != "softmax"]
    object.__setattr__(measured, "stability", kept)


def no_cudnn_at_the_longest(measured: Measured) -> None:
    kept = [row for row in measured.attention if (row["contender"], row["length"]) != ("sdpa cudnn", 16384)]
    object.__setattr__(measured, "attention", kept)


LOST: dict[str, Callable[[Measured], None]] = {
    r"pre-trained arms of newton, softmax among them \(gpu\)": no_pretrained_arm,
    "roll-outs of lssar at 2x": no_roll_out,
    "runs of softmax and another arm at": no_stability_of_softmax,
    "sdpa cudnn in the section train, D 64, T 16384": no_cudnn_at_the_longest,
}


@pytest.mark.parametrize("what", LOST)
def test_what_a_sentence_speaks_of_and_is_not_there(what: str, scripts: SimpleNamespace, measured: Measured) -> None:
    LOST[what](measured)
    with pytest.raises(scripts.claims.PageError, match=what):
        scripts.claims.written(scripts.readme_words.WORDS, measured, "the words")


def test_all_broken_claims_are_named_at_once(scripts: SimpleNamespace, measured: Measured) -> None:
    a_demo_that_rises(measured)
    a_sink(measured)
    a_law_that_is_lost(measured)
    with pytest.raises(scripts.claims.PageError, match=r"LSSAR stays level.*attention sink.*Newton's law"):
        scripts.claims.written(scripts.readme_words.WORDS, measured, "the words")
