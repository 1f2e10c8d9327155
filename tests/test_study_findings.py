"""The sentences about the study: their numbers are those of the runs, and what the runs do not bear is named."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from study_cases import curve, imported, record

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "docs" / name for name in ("results.md", "results-tables.md")]
OURS, THEIRS = "lssar-learned-log-global3", "softmax-qknorm-logn-learned-global3"
WIDE = f"{OURS}-wide"
Sizes = list[Any]


@pytest.fixture(scope="module")
def scripts() -> Iterator[SimpleNamespace]:
    names = ("facts", "findings", "findings_gap", "findings_keys", "findings_mix", "findings_rotary", "runs", "page")
    with imported("study_page"):
        modules = {}
        for name in ("claims", *(f"study_{name}" for name in names)):
            with imported(name) as module:
                modules[name.removeprefix("study_")] = module
        yield SimpleNamespace(**modules)


@pytest.fixture(scope="module")
def sizes_there(scripts: SimpleNamespace) -> Sizes:
    return scripts.runs.read_study(ROOT / "results" / "study")


@pytest.fixture
def sizes(sizes_there: Sizes) -> Sizes:
    """Those of the repository, to be changed."""
    return copy.deepcopy(sizes_there)


def made(scripts: SimpleNamespace, size: str, losses: Mapping[str, Sequence[Sequence[float]]], **words: Any) -> Any:
    """A study of one size: by arm the losses of each seed at 1x, 16x and 64x."""
    arms = {
        arm: [
            scripts.runs.run_of(
                record(arm, seed, curve(own, 0.0, 0.1), [[10, 10], [9, 8]], step_seconds=0.1, global_every=2, **words)
                | {"size": size}
            )
            for seed, own in enumerate(of_seeds)
        ]
        for arm, of_seeds in losses.items()
    }
    return scripts.facts.Study([scripts.runs.Size(size, arms)])


POWERS = {"lssar-p3": [[4.0, 5, 6]], "lssar-p15": [[4.08, 5, 6]], "lssar-rising": [[4.03, 5, 6]]}


def test_a_number_follows_the_runs(scripts: SimpleNamespace) -> None:
    def said(losses: Mapping[str, Sequence[Sequence[float]]]) -> str:
        return scripts.findings_rotary.the_cost_of_the_power(made(scripts, "10m", losses))

    assert "length**, 0.080 beside the power 3, and raising it during training (3, 7, 15) wins 0.050 of" in said(POWERS)
    assert "length**, 0.080 beside the power 3" in said(POWERS | {"lssar-rising": [[4.02, 5, 6]]})
    assert "wins 0.060 of" in said(POWERS | {"lssar-rising": [[4.02, 5, 6]]})
    assert "wins 0.055 of" in said(POWERS | {"lssar-rising": [[4.02, 5, 6], [4.03, 5, 6]]}), "the mean over seeds"


def test_a_claim_that_does_not_hold(scripts: SimpleNamespace) -> None:
    study = made(scripts, "10m", POWERS | {"lssar-rising": [[4.05, 5, 6]]})
    with pytest.raises(scripts.claims.ClaimError, match="raising the power during training wins most of its cost"):
        scripts.findings_rotary.the_cost_of_the_power(study)


def test_a_difference_of_the_other_sign(scripts: SimpleNamespace) -> None:
    study = made(scripts, "10m-keys", {f"{OURS}-local-softmax-learned": [[4.0, 4.0, 4.0]], OURS: [[4.0, 3.99, 3.9]]})
    with pytest.raises(scripts.claims.ClaimError, match=r"the words give a difference of -0\.0100 the other sign"):
        scripts.findings_mix.local_softmax(study_of(scripts, study, wide_study(scripts)))


@pytest.mark.parametrize("arm", POWERS)
def test_an_arm_that_is_not_there(arm: str, scripts: SimpleNamespace) -> None:
    study = made(scripts, "10m", {name: losses for name, losses in POWERS.items() if name != arm})
    with pytest.raises(scripts.claims.MissingError, match=f"{arm} at 10m"):
        scripts.findings_rotary.the_cost_of_the_power(study)


def study_of(scripts: SimpleNamespace, *studies: Any) -> Any:
    return scripts.facts.Study([size for study in studies for size in study.sizes])


def wide_study(scripts: SimpleNamespace, **losses: Sequence[Sequence[float]]) -> Any:
    """The size at which softmax in the local layers was tried with heads of 128."""
    arms = {
        WIDE: [[3.9, 3.8, 3.7], [3.902, 3.802, 3.702]],
        f"{OURS}-local-softmax-learned-wide": [[3.903, 3.805, 3.709]],
    }
    return made(scripts, "85m-again", arms | losses)


def test_softmax_in_the_local_layers(scripts: SimpleNamespace) -> None:
    losses = {f"{OURS}-local-softmax-learned": [[4.015, 4.0, 4.0]], OURS: [[4.018, 4.001, 4.0]]}
    small = made(scripts, "10m-keys", losses)
    said = scripts.findings_mix.local_softmax(study_of(scripts, small, wide_study(scripts)))
    assert "at 10m-keys 0.001 to 0.003 below LSSAR in every layer" in said
    assert said.endswith("and heads of 128 (one seed) 0.002 to 0.008 above it")
    better = {f"{OURS}-local-softmax-learned-wide": [[3.9, 3.8, 3.7]]}
    with pytest.raises(scripts.claims.ClaimError, match=f"softmax-learned-wide is above {WIDE} at every length"):
        scripts.findings_mix.local_softmax(study_of(scripts, small, wide_study(scripts, **better)))


def test_the_gap_with_heads_of_128(scripts: SimpleNamespace) -> None:
    """By size, LSSAR less softmax, on the mean over seeds."""
    theirs = [[4.0, 3.9, 3.8], [4.0, 3.9, 3.8]]
    gaps = {"10m-again": 0.003, "25m-keys": 0.002, "85m-again": 0.004, "300m-again": 0.001}
    studies = []
    for size, gap in gaps.items():
        ours = [[loss + gap + apart for loss in theirs[0]] for apart in (-0.0005, 0.0005)]
        studies.append(made(scripts, size, {WIDE: ours, f"{THEIRS}-wide": theirs}))
    study = study_of(scripts, *studies)
    assert scripts.findings_gap.behind_with_wide_heads(study, 16) == pytest.approx(list(gaps.values()))
    scripts.findings_gap.a_few_thousandths(study)
    assert scripts.findings_gap.seeds_of_the_wide(study) == "two seeds of each"
    one = made(scripts, "300m-again", {WIDE: [[4.001, 3.901, 3.801]], f"{THEIRS}-wide": theirs})
    fewer = study_of(scripts, *studies[:3], one)
    assert scripts.findings_gap.seeds_of_the_wide(fewer) == "two seeds of each, one of the largest"
    ahead = made(scripts, "300m-again", {WIDE: [[3.999, 3.899, 3.8]], f"{THEIRS}-wide": theirs})
    with pytest.raises(scripts.claims.ClaimError, match="softmax is ahead at every size at 1x"):
        scripts.findings_gap.a_few_thousandths(study_of(scripts, *studies[:3], ahead))


def test_keys_by_seed(scripts: SimpleNamespace) -> None:
    study = made(scripts, "25m-keys", {OURS: [[4.0, 4.0, 4.0]] * 3})
    facts = study["25m-keys"]
    assert facts.passkey(OURS, 16) == pytest.approx(0.85)
    assert facts.found(OURS, 16) == [(17, 20)] * 3
    assert scripts.findings_keys.right_of(facts.found(OURS, 16)) == "51 of 60"
    with pytest.raises(scripts.claims.MissingError, match=f"pass keys at 64x of {OURS} at 25m-keys"):
        facts.passkey(OURS, 64)


def test_arms_and_seeds_are_counted(scripts: SimpleNamespace) -> None:
    size = made(scripts, "10m", POWERS | {"lssa": [[4.0, 4.0, 4.0]] * 2}).sizes[0]
    assert scripts.findings.seeds_of(size) == "10m 4 (three with one seed, one with two seeds)"
    assert scripts.findings.seeds_of(made(scripts, "10m", POWERS).sizes[0]) == "10m 3 (one seed each)"
    assert scripts.findings_keys.one_seed(made(scripts, "10m", POWERS)) == "every arm of 10m"
    assert scripts.findings_keys.one_seed(scripts.facts.Study([size])) == "3 of 4 arms of 10m"


def test_every_sentence_is_on_the_page(scripts: SimpleNamespace, sizes: Sizes) -> None:
    prose = scripts.findings.prose_of(sizes, "nothing", whole=True)
    assert set(prose) == set(scripts.findings.PROSE)
    assert "nothing" not in prose.values()
    pages = "".join(page.read_text() for page in PAGES)
    for name, text in prose.items():
        assert f"<!-- begin: {name} -->\n{text}\n<!-- end: {name} -->" in pages


def runs_of(sizes: Sizes, size: str, arm: str) -> list[Any]:
    return next(one for one in sizes if one.name == size).arms[arm]


def raise_loss(size: str, arm: str, multiple: int, by: float, option: str | None = None) -> Callable[[Sizes], None]:
    def change(sizes: Sizes) -> None:
        for run in runs_of(sizes, size, arm):
            (run.own if option is None else run.variants[option]).loss[multiple] += by

    return change


def help_of_the_context(sizes: Sizes) -> None:
    runs_of(sizes, "10m", "relu")[0].own.gain[64] = 0.1


def help_of_the_context_at_inference(sizes: Sizes) -> None:
    runs_of(sizes, "10m", "lssar-p15")[0].variants["power=31"].gain[64] = 0.01


def far_gain_of(run: Any, multiple: int, gain: float) -> None:
    run.far.gain[multiple] = gain


def no_help_of_the_far_context(sizes: Sizes) -> None:
    for run in runs_of(sizes, "85m-again", f"{OURS}-wide192"):
        far_gain_of(run, 64, 0.01)


def no_help_at_4x(sizes: Sizes) -> None:
    for run in runs_of(sizes, "25m-keys", f"{THEIRS}-wide"):
        far_gain_of(run, 4, 0.02)


def keys_found_by_all(sizes: Sizes) -> None:
    for size in ("10m-again", "25m-keys", "85m-again"):
        for arm in (OURS, WIDE):
            for run in runs_of(sizes, size, arm):
                run.passkey[64] = [(10, 10)] * 3


def a_sink(sizes: Sizes) -> None:
    runs_of(sizes, "85m", OURS)[0].inside[1]["sink"] = 0.2


def keys_not_found(sizes: Sizes) -> None:
    runs_of(sizes, "25m-keys", "lssar-log-global3")[0].passkey[4] = [(8, 10)] * 3


def keys_not_found_by_the_largest(sizes: Sizes) -> None:
    runs_of(sizes, "85m-again", OURS)[0].passkey[2] = [(8, 10)] * 3


def one_bad_seed(sizes: Sizes) -> None:
    runs_of(sizes, "10m-again", "softmax-qknorm-logn")[1].own.loss[8] += 0.02


BROKEN: dict[str, Callable[[Sizes], None]] = {
    "LSSAR with the power 15 stays nearly level to 64x": raise_loss("10m", "lssar-p15", 64, 0.03),
    "fail within a few training lengths": raise_loss("10m", "ssmax", 8, -0.1),
    "every seed of softmax is below every one of the raised power": one_bad_seed,
    "relu gets nothing from the context beyond a few training lengths (10m)": help_of_the_context,
    "the control of lssar-p15+power=31 is negative at 64x (10m)": help_of_the_context_at_inference,
    "softmax+window=512 is below": raise_loss("10m", "softmax", 16, 0.1, "window=512"),
    "in the mix p = 0.6 log N is better than lssar-p2-global3": raise_loss("10m", "lssar-p2-global3", 16, -0.02),
    "LSSAR is behind softmax in the mix at 25m": raise_loss("25m", OURS, 32, -0.02),
    "lssar-log-global3 finds at least 90% of pass keys to 16x at 25m-keys": keys_not_found,
    f"{OURS} finds at least 90% of pass keys to 16x at 85m-again": keys_not_found_by_the_largest,
    "with heads of 64 no slope of the gap is told at 16x": raise_loss("85m-again", OURS, 16, 0.05),
    "with heads of 128 no slope of the gap is told at 64x": raise_loss("300m-again", WIDE, 64, -0.02),
    "with heads of 128 softmax is ahead at every size at 16x": raise_loss("10m-again", WIDE, 16, -0.01),
    "with heads of 128 the gap is small at 4x": raise_loss("85m-again", WIDE, 4, 0.01),
    f"{WIDE} is below {OURS} at every length at 85m-again": raise_loss("85m-again", OURS, 16, -0.02),
    f"{OURS}-local-softmax-learned-wide is above {WIDE}": raise_loss("85m-again", WIDE, 16, 0.01),
    f"{WIDE}256 is level with {WIDE} at 85m-again": raise_loss("85m-again", f"{WIDE}256", 2, 0.01),
    "over the widths softmax is ahead at 16x": raise_loss("85m-again", f"{WIDE}192", 16, -0.004),
    "over the widths LSSAR is ahead at 64x": raise_loss("85m-again", f"{WIDE}192", 64, 0.003),
    "from 32x to 64x LSSAR and softmax gain at 25m-keys and 300m-again": raise_loss("300m-again", WIDE, 64, 0.005),
    "from 32x to 64x every LSSAR gains and every softmax loses": raise_loss("85m-again", f"{WIDE}192", 32, -0.0025),
    f"the gain of {WIDE}192 is told from zero at 64x (85m-again)": no_help_of_the_far_context,
    f"most of what {THEIRS}-wide gains at 64x it gains at 4x (25m-keys)": no_help_at_4x,
    f"{OURS} finds fewer pass keys than softmax at 64x at 10m-again": keys_found_by_all,
    "LSSAR wins more by heads of 128 than softmax at 16x (10m-again)": raise_loss("10m-again", THEIRS, 16, 0.01),
    "no arm has an attention sink": a_sink,
    "the power 31 is worse again at 1x and at 16x": raise_loss("books", "lssar-p31", 1, -0.1),
    "exp in the place of softplus holds best": raise_loss("books", "lssar-p23", 16, -0.1),
}


@pytest.mark.parametrize("claim", BROKEN)
def test_a_claim_of_the_page_that_no_longer_holds(claim: str, scripts: SimpleNamespace, sizes: Sizes) -> None:
    BROKEN[claim](sizes)
    with pytest.raises(scripts.page.PageError, match=f"do not bear what .*{re.escape(claim)}"):
        scripts.findings.prose_of(sizes, "nothing", whole=False)


def test_all_broken_claims_are_named_at_once(scripts: SimpleNamespace, sizes: Sizes) -> None:
    a_sink(sizes)
    keys_not_found(sizes)
    with pytest.raises(scripts.page.PageError, match=r"90% of pass keys.*no arm has an attention sink"):
        scripts.findings.prose_of(sizes, "nothing", whole=False)


def test_blocks_whose_runs_are_not_there(scripts: SimpleNamespace, sizes: Sizes) -> None:
    del next(size for size in sizes if size.name == "books").arms["lssar-p31"]
    prose = scripts.findings.prose_of(sizes, "nothing", whole=False)
    assert {name for name, text in prose.items() if text == "nothing"} == {"answer", "ablation-findings"}
    with pytest.raises(scripts.page.PageError, match=r"speaks of what is not there: lssar-p31 at books$"):
        scripts.findings.prose_of(sizes, "nothing", whole=True)


def test_no_size_at_all(scripts: SimpleNamespace) -> None:
    assert set(scripts.findings.prose_of([], "nothing", whole=False).values()) == {"nothing"}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """The study's files and page, to be changed."""
    shutil.copytree(ROOT / "results" / "study", tmp_path / "study")
    for page in PAGES:
        shutil.copy(page, tmp_path)
    return tmp_path


def checked(page: ModuleType, files: Path) -> int:
    pages = [str(files / page.name) for page in PAGES]
    return page.main(["--check", "--results", str(files / "study"), "--page", *pages])


def change_loss(files: Path, run: str, by: float) -> None:
    """At 1x."""
    path = files / "study" / f"{run}.json"
    found = json.loads(path.read_text())
    found["evaluation"]["lengths"]["lengths"][0]["loss"] += by
    path.write_text(json.dumps(found))


def test_the_command_names_what_is_out_of_date(
    scripts: SimpleNamespace, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert checked(scripts.page, files) == 0
    change_loss(files, "10m-keys-lssar-learned-log-global3-local-softmax-learned-seed0", 0.002)
    assert checked(scripts.page, files) == 1
    assert "out of date: block mix-findings, block headline, block targets" in capsys.readouterr().err


def test_the_command_stops_at_a_claim(
    scripts: SimpleNamespace, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change_loss(files, "85m-lssar-learned-log-global3-seed0", -0.01)
    assert checked(scripts.page, files) == 2
    assert "LSSAR is behind softmax in the mix at 85m" in capsys.readouterr().err


def test_a_run_that_the_study_has_lost(
    scripts: SimpleNamespace, files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (files / "study" / "85m-lssar-learned-log-global3-seed0.json").unlink()
    assert checked(scripts.page, files) == 1, "a study of somebody else's has other runs"
    capsys.readouterr()
    monkeypatch.setattr(scripts.page, "RESULTS", files / "study")
    assert checked(scripts.page, files) == 2
    assert f"speaks of what is not there: {OURS} at 85m" in capsys.readouterr().err


# What people may write with digits: how models were made and measured, never what came of it.
CONFIGURATION = [
    r"\b(10m|25m|85m|300m)\b",
    r"\b(1|16|32|64)x\b",
    r"16 times the training length",
    r"64 times 512 tokens are 32,768",
    r"3 at first, 7 from a tenth of the training on, 15 from",
    r"the power (2|3|15)\b( or (3|15)\b)?",
    r"powers from 1 to 31\b",
    r"\b(0\.6|1|3) at first",
    r"\b(0\.6 log N|start at 0\.6|from 0\.6)(?= )",
    r"the 1 that is subtracted",
    r"\bl1-normalised",
    r"1,200 to 2,000 characters",
    r"at most 1,500 and two",
    r"about 375 tokens at most",
    r"300 to 500\b",
    r"1 / sum of",
    r"exactly 0\b",
    r"told from 0\b",
    r"\btokenizers 0\.\d+\.\d+( and 0\.\d+\.\d+)?",
    r"\b(a9999b3|2c9d9b1|849df44|e4fd189|81888d7)\b",
    r"128 (numbers each )?in place of 64",
    r"of 192 and of 256",
    r"heads of (128|256)",
    r"sequences of 512 tokens",
]


def by_hand(text: str) -> list[str]:
    """Numbers that neither a command wrote nor belong to the configuration."""
    text = re.sub(r"<!-- begin: (\S+) -->\n.*?<!-- end: \1 -->", "", text, flags=re.DOTALL)
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    text = re.sub(r"`[^`\n]*`", "", text)
    for words in CONFIGURATION:
        text = re.sub(words, "", text)
    return re.findall(r"\S*\d\S*", text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_measured_number_is_written_by_hand(page: Path) -> None:
    assert by_hand(page.read_text()) == []


@pytest.mark.parametrize(
    "words",
    [
        "ahead by 0.016",
        "93%",
        "finds 58 of 60",
        "18 arms",
        "0.6 higher",
        "0.65 log N",
        "1.05 times",
        "at 16x 0.4",
        "4.103",
    ],
)
def test_a_number_by_hand_is_found(words: str) -> None:
    page = f"# A page\n\nIt is {words} at 64x.\n"
    assert by_hand(page)
    assert by_hand(f"<!-- begin: answer -->\n{words}\n<!-- end: answer -->\n{page}"), "outside of the markers too"
    assert not by_hand(f"# A page\n\n<!-- begin: answer -->\n{words}\n<!-- end: answer -->\n```sh\n{words}\n```\n")
