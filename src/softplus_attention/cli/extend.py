"""``softplus-attention extend``: gives a pretrained model a longer context and a smaller cache without training."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from softplus_attention.utils import DOCS
from softplus_attention.validation import fail

FAR = ("group", "clip", "yarn", "rope", "lssar", "auto")
METHODS = ("heads", "yarn", "ntk", "selfextend", "window")
WINDOW, NEAR, NEAR_CLIP = 2048, 2048, 4096
MIN_FIT = 2048
PROMPT = 1536  # tokens of a ranking prompt


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "extend",
        help="extend the context of a pretrained model",
        description="Writes a model that reads --to tokens, with the weights of a pretrained one. A few key heads (the "
        "far heads) attend to all tokens, the others only to a window and the first tokens, which makes the cache "
        "smaller. Ctrl-C stops the command; run it again to resume. "
        f"{DOCS}/extend",
    )
    parser.add_argument("model", metavar="MODEL", help="folder of a saved model, name on the Hub, or GGUF file")
    parser.add_argument("--to", required=True, type=int, metavar="TOKENS", help="context length of the new model")
    parser.add_argument("--output", required=True, type=Path, metavar="DIR", help="folder to write the model to")
    parser.add_argument(
        "--method",
        choices=METHODS,
        default="heads",
        help="heads: far heads, and a window in the others. For comparison: yarn and ntk (scaled rotary positions), "
        "selfextend (grouped positions in all heads), window (no far heads) (default: %(default)s)",
    )
    parser.add_argument(
        "--heads",
        default="auto",
        metavar="N|auto|all",
        help="number of far heads; auto: as many as --budget allows (default: %(default)s)",
    )
    parser.add_argument(
        "--budget",
        default="20%",
        metavar="PERCENT",
        help="with --heads auto: size of the cache at --to tokens, as a percentage of the original model's "
        "(default: 20%%)",
    )
    parser.add_argument(
        "--far",
        choices=FAR,
        default="group",
        help="distances that far heads use. group: exact up to --near, divided by an integer beyond; clip: exact up to "
        "--near, clipped to it beyond; yarn: YaRN; rope: unchanged; lssar: YaRN, with LSSAR in place of softmax; auto: "
        "the one of group, clip and, with --fit, lssar that has the lowest loss (default: %(default)s)",
    )
    parser.add_argument(
        "--fit",
        type=int,
        default=0,
        metavar="TOKENS",
        help=f"tokens of text to fit LSSAR heads to, at least {MIN_FIT}; required by --far lssar",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=0.0,
        metavar="MINUTES",
        help="time to tune the weights after they are written, on the original's logits and on text beyond the "
        "trained length (default: 0, no tuning)",
    )
    parser.add_argument(
        "--tune",
        choices=("far", "all"),
        default="far",
        help="weights that --minutes tunes: those of the far heads, or all (default: %(default)s)",
    )
    parser.add_argument(
        "--near",
        type=int,
        metavar="TOKENS",
        help=f"distance up to which far heads use exact positions (default: {NEAR}, {NEAR_CLIP} for --far clip, less "
        "for models trained on short sequences)",
    )
    parser.add_argument(
        "--window",
        type=int,
        metavar="TOKENS",
        help=f"last tokens that the other heads attend to (default: {WINDOW}, at most a quarter of the trained length)",
    )
    parser.add_argument(
        "--sink",
        type=int,
        default=4,
        metavar="TOKENS",
        help="first tokens that the other heads attend to (default: %(default)s)",
    )
    parser.add_argument(
        "--text",
        nargs="+",
        default=[],
        metavar="FILE",
        help="UTF-8 text files, one half to rank, fit and tune on, the other to measure on (default: the package's own "
        "text)",
    )
    parser.add_argument(
        "--prompts", type=int, default=6, metavar="N", help="prompts to rank the heads by (default: %(default)s)"
    )
    parser.add_argument(
        "--measure",
        nargs="+",
        metavar="TOKENS",
        help="context lengths to measure at, or none (default: 1/4, 1 and 2 times the trained length, at most --to)",
    )
    parser.add_argument(
        "--documents", type=int, default=2, metavar="N", help="documents to measure on (default: %(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed for prompts, needles and tuning (default: %(default)s)"
    )
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="data type of the weights (default: as saved; bfloat16 for a GGUF file)",
    )
    parser.add_argument("--device", help="such as cpu or cuda:0 (default: cuda if available)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    for name, least in (("to", 2), ("prompts", 1), ("documents", 1), ("sink", 0)):
        if getattr(options, name) < least:
            fail(f"--{name}", f"at least {least}", getattr(options, name))
    if options.far == "lssar" and not options.fit:
        fail("--fit", "given with --far lssar: a number of tokens such as 15000", "nothing")
    if options.fit and (options.fit < MIN_FIT or options.far not in ("lssar", "auto")):
        fail("--fit", f"at least {MIN_FIT} tokens, with --far lssar or auto", options.fit)
    if not 0 <= options.minutes < float("inf"):
        fail("--minutes", "a number of minutes, or 0 for no tuning", options.minutes)
    if options.minutes and (options.method != "heads" or options.heads == "0"):
        fail("--minutes", "0 unless --method is heads with at least one far head", options.minutes)
    heads, budget = heads_and_budget(options)
    from softplus_attention.extend.build import Build, Request
    from softplus_attention.extend.methods import METHODS as KINDS
    from softplus_attention.extend.methods import with_far_positions
    from softplus_attention.extend.ranking import RankingSettings
    from softplus_attention.huggingface.loading import silence_transformers
    from softplus_attention.utils.device import check_device, resolve_device

    silence_transformers()
    check_device(options.device)
    trained = read_trained_length(options.model)
    given = {"window": options.window or min(WINDOW, trained // 4), "sink": options.sink, "length": options.to}
    given["near"] = options.near or min(NEAR, trained // 4)
    if options.method == "heads":
        given |= {"heads": heads, "fit": options.fit, "factor": max(1.0, options.to / trained)}
        if options.far == "clip" and not options.near:
            given["near"] = min(NEAR_CLIP, trained // 2)
    if options.method == "selfextend":
        given["near"] = options.near or trained // 8
    if options.method == "yarn":
        given["factor"] = options.to / trained

    method = replace(KINDS[options.method], **given)
    if options.method == "heads":
        method = with_far_positions(method, options.far)
    length = min(PROMPT, trained)
    request = Request(
        model=options.model,
        to=options.to,
        method=method,
        name=options.method,
        budget=budget if options.method == "heads" else None,
        text=tuple(options.text),
        measure=lengths_to_measure(options, trained),
        documents=options.documents,
        ranking=RankingSettings(options.prompts, length, max(8, length // 6), options.sink, length // 3, options.seed),
        seed=options.seed,
        dtype=options.dtype,
        minutes=options.minutes,
        tune=options.tune,
    )
    Build(request, options.output, resolve_device(options.device)).run()
    return 0


def heads_and_budget(options: argparse.Namespace) -> tuple[int, float | None]:
    """The number of far heads, -1 for all; with --heads auto, the budget that determines it."""
    if options.heads == "all":
        return -1, None
    if options.heads != "auto":
        if not options.heads.isdigit():
            fail("--heads", "a number, auto or all", repr(options.heads))
        return int(options.heads), None
    try:
        share = float(options.budget.removesuffix("%")) / 100
    except ValueError:
        share = 0.0
    if not options.budget.endswith("%") or not 0 < share <= 1:
        fail("--budget", "a percentage of the original's cache such as 20%", repr(options.budget))
    return 1, share


def lengths_to_measure(options: argparse.Namespace, trained: int) -> tuple[int, ...]:
    if options.measure == ["none"]:
        return ()
    if options.measure is None:
        return tuple(sorted({max(2, trained // 4), trained, min(2 * trained, options.to)}))
    if not all(one.isdigit() and int(one) >= 2 for one in options.measure):
        fail("--measure", "lengths of at least 2 tokens, or none", " ".join(options.measure))
    return tuple(sorted({int(one) for one in options.measure}))


def read_trained_length(source: str) -> Any:
    from softplus_attention.extend.build import load_config
    from softplus_attention.extend.methods import trained_length

    return trained_length(load_config(source)[0])
