"""``softplus-attention convert``: replaces the attention of a pretrained model, and measures the change in loss."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from softplus_attention.cli.options import add_loading_arguments
from softplus_attention.training.schedules import CONSTANT_FORMS, constant_power
from softplus_attention.utils import DOCS
from softplus_attention.utils.files import UNFINISHED, filling
from softplus_attention.utils.untrusted import read_option
from softplus_attention.validation import fail


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "convert",
        help="replace the attention of a pretrained model",
        description="Replaces the attention of a pretrained causal language model and saves the model. The weights do "
        "not change, so the loss rises (--text prints it before and after). Fine-tune the result with a power that "
        f"rises from a small value to its target: {DOCS}/huggingface",
    )
    parser.add_argument("model", metavar="MODEL", help="folder of a saved model, or a name on the Hub")
    parser.add_argument("--output", required=True, type=Path, metavar="FOLDER", help="a new folder for the model")
    parser.add_argument("--attention", default="lssar", metavar="NAME", help="attention (default: %(default)s)")
    parser.add_argument(
        "--power", metavar="P", help=f"initial sharpening power: {CONSTANT_FORMS} (default: the attention's own)"
    )
    parser.add_argument("--score-scale", type=float, metavar="X", help="replaces log(head dimension) in the scores")
    parser.add_argument("--text", type=Path, metavar="FILE", help="UTF-8 text: print its loss before and after")
    parser.add_argument(
        "--length", type=int, default=512, metavar="N", help="tokens per sequence of --text (default: %(default)s)"
    )
    add_loading_arguments(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    if options.output.exists() and not (options.output / UNFINISHED).is_dir():
        fail("--output", "a folder that does not exist yet", repr(str(options.output)))
    if options.length < 2:
        fail("--length", "at least 2", options.length)
    power = None if options.power is None else constant_power(options.power)
    import torch

    from softplus_attention.huggingface import use_attention
    from softplus_attention.huggingface.loading import check_is_causal, load_model, load_tokenizer, silence_transformers
    from softplus_attention.utils.device import check_device

    silence_transformers()
    check_device(options.device)
    trust = options.trust_remote_code
    model = load_model(options.model, dtype=options.dtype, device=options.device, trust_remote_code=trust)
    if model.config.is_encoder_decoder:
        fail("model", "a causal language model (decoder only)", f"{options.model!r}, an encoder-decoder")
    check_is_causal("model", model, torch.arange(4, device=model.device)[None])
    tokenizer = (try_tokenizer if options.text is None else load_tokenizer)(options.model, trust)
    tokens = None if options.text is None else text_tokens(tokenizer, options.text, options.length)
    before = None if tokens is None else mean_loss(model, tokens)
    use_attention(model, options.attention, power=power, score_scale=options.score_scale)
    check_forward(model)
    after = None if tokens is None else mean_loss(model, tokens)

    with filling(options.output) as folder:
        model.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
    if tokenizer is None:
        print("softplus-attention: the model has no tokenizer, so none was saved", file=sys.stderr)
    if tokens is not None:
        count = tokens.shape[0] * (tokens.shape[1] - 1)
        print(f"loss over {count} tokens in sequences of {tokens.shape[1]}")
        print(f"  before             {before:.4f}")
        print(f"  with {options.attention:<14}{after:.4f}  (not fine-tuned yet)")
    print(f"written: {options.output}")
    return 0


def try_tokenizer(source: str, trust_remote_code: bool) -> Any:
    from softplus_attention.huggingface.loading import load_tokenizer

    try:
        return load_tokenizer(source, trust_remote_code)
    except ValueError:
        return None


def text_tokens(tokenizer: Any, path: Path, length: int) -> Any:
    """The tokens of the file, (sequences, length); an incomplete last sequence is dropped unless it is the only one."""
    import torch

    tokens = torch.tensor(tokenizer(read_option("--text", path))["input_ids"])
    if len(tokens) < 2:
        fail("--text", "a file of at least 2 tokens", f"{len(tokens)}")
    if len(tokens) < length:
        return tokens[None]
    return tokens[: len(tokens) // length * length].view(-1, length)


def check_forward(model: Any) -> None:
    """Runs a few tokens, so that unsupported features of the model raise before anything is written."""
    import torch

    with torch.inference_mode():
        model(torch.arange(8, device=model.device)[None] % model.config.get_text_config().vocab_size, use_cache=False)


def mean_loss(model: Any, tokens: Any) -> float:
    """Mean negative log-likelihood of the tokens after the first of each sequence, in nats."""
    from softplus_attention.evaluation.lengths import token_losses

    return token_losses(model, tokens).mean().item()
