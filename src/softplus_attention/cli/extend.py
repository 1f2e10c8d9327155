"""``softplus-attention extend``: a pretrained model reads further, with a smaller cache, without training."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from softplus_attention.utils import DOCS
from softplus_attention.validation import fail

if TYPE_CHECKING:
    from argparse import _SubParsersAction

FAR = ("group", "clip", "yarn", "rope", "lssar", "auto")
METHODS = ("heads", "yarn", "ntk", "selfextend", "window")
WINDOW, NEAR, NEAR_CLIP = 2048, 2048, 4096
MIN_FIT = 2048
PROMPT = 1536  # tokens that heads are ranked by


def add_command(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "extend",
        help="let a pretrained model read further than it was trained",
        description="Writes a model of the same weights that reads --to tokens: a few key heads see everything, the "
        "others a window and the first tokens, so that the cache is a fraction. Ctrl-C stops, and the same command "
        f"goes on. {DOCS}/extend",
    )
    parser.add_argument("model", help="a folder with a saved model, a name on the hub, or a GGUF file")
    parser.add_argument("--to", required=True, type=int, metavar="LENGTH", help="tokens to read")
    parser.add_argument("--output", required=True, type=Path, help="the folder to write")
    parser.add_argument(
        "--method", choices=METHODS, default="heads", help="ours, or another for comparison (default: %(default)s)"
    )
    parser.add_argument("--heads", default="auto", metavar="N|auto|all", help="key heads that see everything")
    parser.add_argument(
        "--budget", default="20%", metavar="SHARE", help="of the original's cache, for --heads auto (default: 20%%)"
    )
    parser.add_argument(
        "--far",
        choices=FAR,
        default="group",
        help="the positions of those heads, or auto: of group, clip and, with --fit, lssar the one with the least loss "
        "(default: %(default)s)",
    )
    parser.add_argument("--fit", type=int, default=0, metavar="TOKENS", help="that --far lssar is fitted to")
    parser.add_argument(
        "--minutes",
        type=float,
        default=0.0,
        metavar="N",
        help="tune for so long: on the original's logits, and on text beyond the trained length (default: 0)",
    )
    parser.add_argument(
        "--tune", choices=("far", "all"), default="far", help="weights to tune: of the far heads, or all (default: far)"
    )
    parser.add_argument("--near", type=int, metavar="TOKENS", help="distance up to which their positions are exact")
    parser.add_argument("--window", type=int, metavar="TOKENS", help="of the other heads")
    parser.add_argument("--sink", type=int, default=4, metavar="TOKENS", help="first tokens that they keep")
    parser.add_argument("--text", nargs="+", default=[], metavar="FILE", help="UTF-8 (default: the package's own text)")
    parser.add_argument("--prompts", type=int, default=6, help="to rank heads by (default: %(default)s)")
    parser.add_argument(
        "--measure",
        nargs="+",
        metavar="LENGTH",
        help="lengths to measure at, or none (default: up to twice the trained)",
    )
    parser.add_argument("--documents", type=int, default=2, help="to measure on (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="(default: as saved, bfloat16 of a GGUF file)",
    )
    parser.add_argument("--device", help="such as cpu or cuda:0 (default: cuda where there is one)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    for name, least in (("to", 2), ("prompts", 1), ("documents", 1), ("sink", 0)):
        if getattr(options, name) < least:
            fail(f"--{name}", f"at least {least}", getattr(options, name))
    if options.far == "lssar" and not options.fit:
        fail("--fit", "given with --far lssar, such as 15000: tokens that the heads are fitted to", "nothing")
    if options.fit and (options.fit < MIN_FIT or options.far not in ("lssar", "auto")):
        fail("--fit", f"at least {MIN_FIT} tokens, with --far lssar or auto", options.fit)
    if not 0 <= options.minutes < float("inf"):
        fail("--minutes", "a number of minutes, 0 to leave the weights as they are", options.minutes)
    if options.minutes and (options.method != "heads" or options.heads == "0"):
        fail("--minutes", "0 with another --method, or without far heads", options.minutes)
    heads, budget = heads_and_budget(options)
    from softplus_attention.extend.build import Build, Request
    from softplus_attention.extend.methods import METHODS as KINDS
    from softplus_attention.extend.ranking import RankingSettings
    from softplus_attention.huggingface.loading import silence_transformers
    from softplus_attention.utils.device import check_device, resolve_device

    silence_transformers()
    check_device(options.device)
    trained = read_trained_length(options.model)
    given = {"window": options.window or min(WINDOW, trained // 4), "sink": options.sink, "length": options.to}
    given["near"] = options.near or min(NEAR, trained // 4)
    if options.method == "heads":
        given |= {"heads": heads, "far": options.far, "fit": options.fit, "factor": max(1.0, options.to / trained)}
        if options.far == "clip" and not options.near:
            given["near"] = min(NEAR_CLIP, trained // 2)
    if options.method == "selfextend":
        given["near"] = options.near or trained // 8
    if options.method == "yarn":
        given["factor"] = options.to / trained
    from dataclasses import replace

    length = min(PROMPT, trained)
    request = Request(
        model=options.model,
        to=options.to,
        method=replace(KINDS[options.method], **given),
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
    """-1 is all heads; a budget where their number is to follow from it."""
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
        fail("--budget", "a share of the original's cache such as 20%", repr(options.budget))
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
