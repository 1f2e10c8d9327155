"""The sentences of README.md that speak of what was measured: numbers of the results, and checked claims.

What the study found is computed by the functions of study_findings*.py, so that no claim is made in two ways.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from attention_rows import (
    BASELINE,
    FASTEST,
    LEARNED,
    LONG,
    LONG_CACHE,
    OURS,
    SHORT,
    UNIT_KEYS,
    Row,
    column,
    over,
    rows_of,
)
from attention_words import HOST, host_times, long_caches, the_fastest
from claims import (
    MissingError,
    between,
    each,
    gaps,
    holds,
    hundredths,
    listed,
    nats,
    number,
    percent,
    seeds,
    sentences,
    tenths,
)
from newton_page import ENGINES, groups, laws_found
from page_blocks import table_text
from stability_page import loss_of
from study_facts import LOGN, P15, RISING, Facts, Study
from study_facts import LONG as FAR
from study_findings import keys_far_out, nothing_clearly_better, the_best_of_the_mix
from study_findings_ablations import level_in_the_demo
from study_findings_far import FAR_PAIRS, the_far_context
from study_findings_gap import (
    a_few_thousandths,
    behind_with_wide_heads,
    size_does_not_close_it,
    the_gap,
    wide_heads,
)
from study_findings_keys import at_every_size, at_least_nine_of_ten, no_sink, of_every_size, step_ratios
from study_findings_mix import ALL_ELSE_EQUAL, millions, the_best_sharpness, the_loss_falls, what_did_not_help
from study_findings_rotary import (
    FAILING,
    a_power_that_grows,
    lengths,
    passes_at,
    rises_of_the_power_15,
    softmax_ahead_again,
    softmax_ahead_up_to_8x,
    the_context_is_not_used,
    the_headline,
)
from study_runs import SMALL
from study_sizes import OURS as BEST

from softplus_attention.report.study import ROTARY

ABLATIONS = "books"
NAMES_OF_THE_DEMO = ("LSSAR", "softmax + QK-norm + log N", "softmax")
NORMALISED = ("softmax-qknorm-logn", "lssar")
Found = dict[str, Any]


@dataclass(frozen=True)
class Measured:
    study: Study
    attention: Sequence[Row]
    cpu: Found
    demo: Found
    newton: Sequence[Found]  # by preset
    stability: Sequence[Found]


def the_demo(measured: Measured) -> str:
    demo, settings, books = measured.demo, measured.demo["settings"], measured.study[ABLATIONS]
    level_in_the_demo(demo["loss"])
    ours, logn, softmax = (demo["loss"][name][-1] - demo["loss"][name][0] for name in NAMES_OF_THE_DEMO)
    holds(ours < logn < softmax, "in the demo softmax climbs, with QK-norm and log N a little, LSSAR least")
    powers = settings["arms"]["LSSAR"]["power"].split(",")
    first, last = powers[0], powers[-1].partition("@")[0]
    config = books.size.any_run.config
    shape = ("layers", "width", "sequence_length")
    holds(all(config[word] == settings[word] for word in shape), "the ablations are models as large as the demo's")
    length = config["sequence_length"]
    parameters = f"{books.size.any_run.parameters / 1e6:.1f}M"
    return (
        f"<sub>`make demo`: {number(len(settings['arms']))} byte-level models of {parameters} parameters, trained on "
        f"{length} bytes at a time for {settings['steps']} steps, one seed; {demo['seconds']:.0f} s on "
        f"{number(demo['machine']['cores'])} slow cores of an {demo['machine']['cpu']} beside other work, torch "
        f"{demo['versions']['torch'].partition('+')[0]}; data in [results/demo.json](results/demo.json). The recipe "
        f"matters (here the power rises from {first} to {last} during training, and there are {settings['heads']} "
        f"heads): with the power 15 from the first step on, {config['heads']} heads and another learning rate LSSAR "
        f"rises by {hundredths(books.rise(P15, 16))} from {length} to {16 * length:,} bytes "
        "([ablations](docs/results.md#ablations-what-each-part-does)).</sub>"
    )


def cost_of_the_power(study: Study) -> str:
    """Of the power 15 at the training length, beside the best softmax with rotary positions."""
    once = study["10m"]
    softmaxes = [arm for arm in once.size.of_kind(ROTARY).arms if arm.startswith("softmax")]
    best = all(once.loss(LOGN, 1) <= once.loss(arm, 1) for arm in softmaxes)
    holds(best, "softmax with QK-norm and log N is the best softmax with rotary positions at 1x")
    return gaps((study[size].behind(P15, LOGN, 1) for size in ("10m", "10m-again")), 2)


def which_power(measured: Measured) -> str:
    study = measured.study
    for finding in (the_headline, nothing_clearly_better, wide_heads, the_best_sharpness, the_gap, step_ratios):
        finding(study)
    return (
        "**Which power?** The default, 15, is the paper's. It suits models with rotary positions in every layer: the "
        f"loss stays nearly level on long text, and is {cost_of_the_power(study)} nats above the best softmax's at "
        "the training length. In a model of your own take local and global layers, powers that heads learn, and heads "
        "of 128, as the preset `small` of `softplus-attention train` has them; the best power that is not learned was "
        "`PowerByLength.log_n(0.6)` there. Where the loss is all that counts, softmax of cosines times log N "
        "(`softmax-qknorm-logn` of the catalogue) in the same mix of layers is as good or a little better, and faster "
        "([the study](docs/results.md))."
    )


def models(measured: Measured) -> str:
    study, facts = measured.study, measured.study["10m"]
    length = facts.size.any_run.config["sequence_length"]
    large = [size for size in study.sizes if size.name not in SMALL]
    arms = {arm for size in large for arm in size.arms}
    tokens = facts.size.any_run.tokens
    largest = max((Facts(size) for size in large), key=lambda one: one.size.any_run.parameters)
    return (
        f"Validation loss in nats per token, means over seeds. The models have {millions(facts)} parameters where the "
        f"table does not say more, were trained on {tokens / 1e6:.0f}M tokens, {length} at a time, and read at up to "
        f"{length * facts.size.longest:,}; the row marked * is of another text. [docs/results.md](docs/results.md) has "
        f"the findings and the noise, [docs/results-tables.md](docs/results-tables.md) all {len(arms)} arms at sizes "
        f"to {millions(largest)}, beside {len(study[ABLATIONS].size.arms)} ablations."
    )


def nearly_constant_loss(measured: Measured) -> str:
    the_headline(measured.study)
    the_context_is_not_used(measured.study)
    once, again = rises_of_the_power_15(measured.study)
    length = measured.study["10m"].size.any_run.config["sequence_length"]
    return (
        f"**Holds.** With rotary positions in every layer LSSAR with p = 15 is {once} to {again} nats higher at 64 "
        f"times the training length than at it, where {listed([*FAILING.values(), 'LSSAR with p = 3'])} fail within a "
        f"few training lengths. But a softmax with a sliding window of {length} tokens is below all of them from 16 "
        "times on"
    )


def better_than_softmax(measured: Measured) -> str:
    softmax_ahead_up_to_8x(measured.study)
    softmax_ahead_again(measured.study)
    a_power_that_grows(measured.study)
    once, again = measured.study["10m"], measured.study["10m-again"]
    for arm in (P15, RISING):
        beyond = once.below(arm, "softmax", lengths(once, least=2)) and once.below("softmax", arm, (1,))
        holds(beyond, f"{arm} is better than plain softmax, beyond the training length alone")
    gap = {arm: gaps((again.behind(arm, LOGN, multiple) for multiple in FAR), 2) for arm in (P15, RISING)}
    passes = " or ".join(str(multiple) for multiple in sorted({passes_at(once, arm) for arm in (P15, RISING)}))
    return (
        "**Only than plain softmax, beyond the training length.** Softmax of cosines times log N, the baseline that "
        "the paper lacks, has a lower loss at every length: beside a power that is raised in training by "
        f"{gap[RISING]} from {FAR[0]} times on, beside p = 15 by {gap[P15]}, and by "
        f"{gaps([again.behind(P15, LOGN, 1)], 2)} at the training length. Where the raised power also grows at "
        f"inference, LSSAR is lower at 32 and 64 times; on the text marked *, with {seeds(once.count(LOGN))} of that "
        f"softmax, it was from {passes} times on"
    )


def the_context_is_used(measured: Measured) -> str:
    the_context_is_not_used(measured.study)
    the_loss_falls(measured.study)
    the_far_context(measured.study)
    study, length = measured.study, measured.study["10m"].size.any_run.config["sequence_length"]
    ours, theirs = (
        between((study[name].far_gain(pair[i], 64) for name, *pair in FAR_PAIRS), hundredths) for i in (0, 1)
    )
    return (
        "**Not with rotary positions**, by any attention: beyond a few training lengths the same tokens are predicted "
        f"better from the last {length} alone. **With local and global layers some of it is**: at 64 times the "
        f"training length the whole text is worth {ours} nats to LSSAR and {theirs} to softmax (with "
        f"{listed(millions(study[name]) for name, *_ in FAR_PAIRS)} parameters), most of it from the first few lengths"
    )


def pass_keys_are_found(measured: Measured) -> str:
    study = measured.study
    at_every_size(study)
    for wide in (False, True):
        softmax_too = all(at_least_nine_of_ten(facts, theirs) for facts, _, theirs in of_every_size(study, wide=wide))
        holds(softmax_too, "softmax finds at least 90% of pass keys to 16x too")
    short = study["10m"]
    holds(not at_least_nine_of_ten(short, BEST), f"{BEST} does not find 90% of pass keys after short practice at 10m")
    return (
        "**Yes, with local and global layers** and practice at length: the best recipe finds at least 90% at 1, 2, 4 "
        "and 16 times the training length, as softmax does, with "
        f"{listed(millions(study[name]) for name in ALL_ELSE_EQUAL)} parameters (after shorter practice, on the text "
        f"marked *, {percent(short.passkey(BEST, 16))}% at 16 times). At 64 times it finds fewer than softmax, "
        f"{keys_far_out(study)} over all runs"
    )


def no_attention_sink(measured: Measured) -> str:
    no_sink(measured.study)
    return "True of every attention at these sizes, on the average over heads and layers"


def the_law_is_found(found: Found) -> int:
    """By every pre-trained arm without a window, with the most labels; how many labels these are."""
    most, arms = max(cell["labels"] for cell in found["cells"]), []
    for (labels, pretrained, arm), cells in groups(found["cells"]).items():
        if labels == most and pretrained and "-window" not in arm:
            arms.append(arm)
            whole = f"{len(cells)} of {len(cells)}"
            both = all(laws_found(cells, "ln_force", engine) == whole for engine in ENGINES)
            holds(both, f"{arm} finds Newton's law with {labels:,} labels ({found['experiment']['preset']})")
    if "softmax" not in arms or len(arms) < 2:
        raise MissingError(f"pre-trained arms of newton, softmax among them ({found['experiment']['preset']})")
    return most


def roll_outs(found: Found, arm: str, multiple: int) -> list[float]:
    """How far from the ellipse, of each seed."""
    rows = [row for run in found["long"] if run["arm"] == arm for row in run["roll_out"]]
    errors = [row["median_ellipse_error"] for row in rows if row["multiple"] == multiple]
    if not errors:
        raise MissingError(f"roll-outs of {arm} at {multiple}x")
    return errors


def newtons_law(measured: Measured) -> str:
    labels = {the_law_is_found(found) for found in measured.newton}
    gpu = next(found for found in measured.newton if found["experiment"]["preset"] == "gpu")
    for arm in NORMALISED:
        for multiple in (2, 4):
            longer = max(roll_outs(gpu, arm, multiple)) < min(roll_outs(gpu, "softmax", multiple))
            holds(longer, f"roll-outs of {arm} stay on the orbit longer than plain softmax's, at {multiple}x")
    return (
        "**Every pre-trained attention that sees the whole orbit does**, softmax too, with "
        f"{' and '.join(f'{count:,}' for count in sorted(labels))} labels, on systems of ours whose masses can be seen "
        "from the orbit ([docs/newton.md](docs/newton.md) has the controls and the published form). "
        "Roll-outs of LSSAR with p = 15, and of softmax + QK-norm + log N, stay on the orbit longer than plain "
        "softmax's"
    )


def numerical_stability(measured: Measured) -> str:
    if not measured.stability:
        raise MissingError("runs of runs/stability.py")
    for size, precision in {(run["size"], run["precision"]) for run in measured.stability}:
        alike = [run for run in measured.stability if (run["size"], run["precision"]) == (size, precision)]
        highest = max(run["learning_rate"] for run in alike)
        scores, losses = {}, {}
        for run in (run for run in alike if run["learning_rate"] == highest):
            loss = loss_of(run)
            losses[run["arm"]] = math.inf if loss is None else loss
            scores[run["arm"]] = math.inf if run["stopped"] else run["largest_score"]
        if "softmax" not in scores or len(scores) < 2:
            raise MissingError(f"runs of softmax and another arm at {highest:g} ({size}, {precision})")
        plain_loss, plain_score = losses.pop("softmax"), scores.pop("softmax")
        bounded = max(scores.values()) < 2 * min(scores.values()) and max(scores.values()) < plain_score / 5
        worst = max(losses.values()) < plain_loss
        holds(bounded and worst, f"normalised queries and keys bring stability ({size}, {precision}, {highest:g})")
    return "Normalised queries and keys bring it, with softmax as with LSSAR ([docs/stability.md](docs/stability.md))"


CLAIMS: dict[str, Callable[[Measured], str]] = {
    "nearly constant loss far beyond the training length": nearly_constant_loss,
    "better than softmax": better_than_softmax,
    "the long context is used": the_context_is_used,
    "pass keys are found": pass_keys_are_found,
    "no attention sink": no_attention_sink,
    "a GPT on orbits lets symbolic regression find Newton's law": newtons_law,
    "numerical stability": numerical_stability,
}


def claims_table(measured: Measured) -> str:
    columns = [list(CLAIMS), sentences(CLAIMS.values(), measured)]
    return table_text(["the paper's claim", "what we measured"], columns, "---")


def the_best_recipe(measured: Measured) -> str:
    study = measured.study
    for finding in (a_few_thousandths, size_does_not_close_it, what_did_not_help):
        finding(study)
    to_16 = [m for m in study["10m-again"].size.multiples if m <= 16]
    near = [gap for multiple in to_16 for gap in behind_with_wide_heads(study, multiple)]
    far = behind_with_wide_heads(study, 64)
    return (
        "The best recipe, learned powers in that mix of layers, is the default of the presets `tiny` and `small`, the "
        "second with heads of 128. It comes within a few thousandths of a nat of the strongest softmax and does not "
        f"beat it: with heads of 128 and {listed(millions(study[name]) for name in ALL_ELSE_EQUAL)} parameters it is "
        f"behind by {gaps(near)} up to 16 times the training length, and between {nats(-min(far))} ahead and "
        f"{nats(max(far))} behind at 64 times. Neither size nor anything else that was tried closes the gap. (It was "
        f"chosen among {number(the_best_of_the_mix(study))} LSSAR arms by its loss on these same texts.)"
    )


def times(measured: Measured) -> str:
    rows = measured.attention
    every = column(rows_of(rows, OURS), "ratio")
    holds(min(every) > 1, "training is slower than with FlashAttention-2")
    the_fastest(rows)
    flex = rows_of(rows, "flex lssar p=15", "compile", length=SHORT)[0]
    ours = rows_of(rows, OURS, head_dim=flex["head_dim"], length=SHORT)[0]
    slower = flex["forward_ratio"] / ours["forward_ratio"]
    tens = 10 * int(slower // 10)
    holds(tens >= 10, "FlexAttention takes over 10 times as long for the same")
    learned = over(rows, LEARNED, OURS, least=LONG)
    raw = column(rows_of(rows, OURS, "decode", least=LONG_CACHE), "forward_ratio")
    short = [
        x for name in (OURS, UNIT_KEYS) for x in column(rows_of(rows, name, "decode", length=SHORT), "forward_ratio")
    ]
    holds(min(short) > 1, "over short caches a decode step takes longer than softmax's")
    on_cpu = between((row["ratio"] for row in measured.cpu["time"]), tenths)
    short_steps = rows_of(rows, OURS, length=SHORT)
    return "\n".join(
        (
            f"- **Training is slower than with FlashAttention-2**: at {SHORT:,} tokens a step takes "
            f"{each(column(short_steps, 'ratio'), hundredths)} times as long with heads of "
            f"{each(column(short_steps, 'head_dim'), str)}, and {between(over(rows, OURS, FASTEST), tenths)} times "
            "that of cuDNN's attention, the fastest there. Powers that heads learn take "
            f"{between(learned, tenths)} times as long as the power 15 from {LONG:,} tokens on.",
            "- **Decoding over a long cache takes no longer than softmax's** where it holds unit keys, as our GPT's "
            f"does (as a CUDA graph, {long_caches(rows)}), since only values that have weight are read. Over raw keys, "
            f"which other models keep, it takes {between(raw, hundredths)} times as long, and over short caches, which "
            f"are bound by launches, {between(short, tenths)} times ({SHORT:,} keys).",
            f"- **On a CPU** the op takes {on_cpu} times SDPA's time.",
            f"- **FlexAttention** takes over {tens} times as long for the same (forward, {SHORT:,} tokens, of an "
            "earlier run).",
        )
    )


def the_host(measured: Measured) -> str:
    rows = measured.attention
    forward, backward = host_times(rows, OURS)
    sums = [[sum(column(rows_of(rows, name), word)) for name in (OURS, BASELINE)] for word in HOST.values()]
    holds(all(ours > theirs for ours, theirs in sums), "FlashAttention-2 takes the host less time")
    return (
        f"- In the benchmark on an H200 a forward of p = 15 took the host {forward} ms, launches included, and a "
        f"backward {backward}, on the mean {each((ours / theirs for ours, theirs in sums), tenths)} times what "
        "FlashAttention-2 takes it ([docs/performance.md](docs/performance.md#gpu-training))."
    )


WORDS: dict[str, Callable[[Measured], str]] = {
    "demo": the_demo,
    "power": which_power,
    "models": models,
    "claims": claims_table,
    "recipe": the_best_recipe,
    "times": times,
    "host": the_host,
}
