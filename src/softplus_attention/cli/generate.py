"""``softplus-attention generate``: streams generated text and prints the speed."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from softplus_attention.cli.options import add_loading_arguments
from softplus_attention.power import PowerByLength, is_learned
from softplus_attention.training.schedules import CONSTANT_FORMS, constant_power
from softplus_attention.utils.files import clean_text
from softplus_attention.utils.untrusted import read_option
from softplus_attention.validation import fail

LARGEST_LOGIT = 1e20  # larger ones overflow when they are divided by a temperature


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "generate",
        help="generate text with a model",
        description="Continues a prompt with a saved model (SoftplusGPT or any causal language model of transformers). "
        "Prints the text as it is generated, and the speed at the end. Prompt and continuation may be longer than the "
        "training length.",
    )
    parser.add_argument("--model", required=True, help="folder of a saved model, or a name on the Hub")
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="the text to continue")
    prompt.add_argument("--prompt-file", type=Path, metavar="FILE", help="a file with the text to continue")
    add = parser.add_argument
    add("--tokenizer", help="folder or name of a tokenizer (default: the one saved with the model)")
    add("--max-new-tokens", type=int, metavar="N", default=100, help="tokens to generate (default: %(default)s)")
    add("--temperature", type=float, metavar="X", default=0.8, help="0: greedy decoding (default: %(default)s)")
    add("--top-k", type=int, metavar="K", default=0, help="sample from the K most likely tokens (default: all)")
    add("--top-p", type=float, metavar="P", default=1.0,
        help="sample from the most likely tokens with total probability P (default: 1)")  # fmt: skip
    add("--seed", type=int, metavar="N", default=0, help="seed of the sampling (default: %(default)s)")
    add("--power", metavar="P", help=f"replaces the model's sharpening power: {CONSTANT_FORMS}")
    add_loading_arguments(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    check_options(options)
    power = None if options.power is None else constant_power(options.power)
    import torch

    from softplus_attention.huggingface.loading import check_is_causal, load_model, load_tokenizer, silence_transformers
    from softplus_attention.utils.device import check_device

    silence_transformers()
    check_device(options.device)
    prompt = options.prompt if options.prompt is not None else read_option("--prompt-file", options.prompt_file)
    trust = options.trust_remote_code
    model = load_model(options.model, dtype=options.dtype, device=options.device, trust_remote_code=trust)
    check_is_causal("--model", model, torch.arange(4, device=model.device)[None])
    tokenizer = load_tokenizer(options.tokenizer or options.model, trust)
    if power is not None:
        change_power(model, power)
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False).to(model.device)
    length = inputs["input_ids"].shape[1]
    if length == 0:
        name = "--prompt" if options.prompt is not None else "--prompt-file"
        raise ValueError(f"the prompt is empty. Give {name} at least one token")

    known = model.get_input_embeddings().num_embeddings
    largest = int(inputs["input_ids"].max())
    if largest >= known:
        raise ValueError(f"the prompt has token {largest}, the model {known} tokens. Pass its own --tokenizer")

    kwargs: dict[str, Any] = {"max_new_tokens": options.max_new_tokens, "do_sample": options.temperature > 0}
    # Override what a saved generation config may set.
    kwargs |= {
        "num_beams": 1,
        "num_return_sequences": 1,
        "return_dict_in_generate": False,
        "cache_implementation": None,
    }
    if options.temperature > 0:
        kwargs |= {"temperature": options.temperature, "top_k": options.top_k, "top_p": options.top_p}
    end = model.generation_config.eos_token_id
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (end[0] if isinstance(end, list) else end)
    torch.manual_seed(options.seed)
    streamer = timed_streamer(tokenizer)
    print(prompt, end="", flush=True)
    try:
        checks = [logits_check(options.model)]
        out = model.generate(
            **inputs, **kwargs, pad_token_id=pad, streamer=streamer, tokenizer=tokenizer, logits_processor=checks
        )
    except IndexError as error:
        reason = f"{length} + {options.max_new_tokens} tokens are more than this model has learned positions ({error})"
        raise ValueError(f"{reason}. Pass a shorter prompt or fewer --max-new-tokens") from None
    finally:
        if not streamer.ended:
            print(flush=True)  # an error message starts on a new line
    print(report(length, out.shape[1] - length, streamer, model), file=sys.stderr)
    return 0


def change_power(model: Any, power: float | PowerByLength) -> None:
    """As `evaluate MODEL+power=P`: unlike set_power, it also replaces a learned power."""
    from softplus_attention.evaluation.models import replace_learned_power
    from softplus_attention.huggingface import SoftplusGPTConfig, set_power

    if isinstance(model.config, SoftplusGPTConfig) and is_learned(model.config.power):
        replace_learned_power(model, power)
    else:
        set_power(model, power)


def logits_check(name: str) -> Any:
    """With NaN, sampling ends in an error about probabilities, and greedy decoding continues with a wrong token."""
    from transformers import LogitsProcessor

    class LogitsCheck(LogitsProcessor):  # type: ignore[misc]
        def __call__(self, input_ids: Any, scores: Any) -> Any:
            if not bool(scores.max() < LARGEST_LOGIT):
                reason = f"{name}: a logit is NaN or above {LARGEST_LOGIT:g}, so the weights are damaged or overflow"
                raise ValueError(f"{reason} {scores.dtype}. Check the download, or pass --dtype float32")
            return scores

    return LogitsCheck()


def timed_streamer(tokenizer: Any) -> Any:
    from transformers import TextStreamer

    class TimedStreamer(TextStreamer):  # type: ignore[misc]
        """Removes escape codes on a terminal, and records the time of each new token."""

        def __init__(self) -> None:
            super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
            self.started = time.perf_counter()
            self.times: list[float] = []
            self.ended = False

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            super().on_finalized_text(clean_text(text) if sys.stdout.isatty() else text, stream_end)
            self.ended = stream_end

        def put(self, value: Any) -> None:
            if not self.next_tokens_are_prompt:
                self.times.append(time.perf_counter())
            super().put(value)

    return TimedStreamer()


def report(prompt: int, new: int, streamer: Any, model: Any) -> str:
    from softplus_attention.evaluation.models import configured_length

    times = streamer.times
    first = times[0] - streamer.started if times else 0.0
    line = f"[{new} new tokens after {prompt} of the prompt; the first after {first:.2f} s"
    if len(times) > 1:
        line += f", then {(len(times) - 1) / (times[-1] - times[0]):.1f} tokens/s"
    trained = configured_length(model.config)
    if trained and prompt + new > trained:
        line += f"; {(prompt + new) / trained:.1f} times the training length of {trained}"
    return line + "]"


def check_options(options: argparse.Namespace) -> None:
    if options.max_new_tokens < 1:
        fail("--max-new-tokens", "at least 1", options.max_new_tokens)
    if not options.temperature >= 0:
        fail("--temperature", "0 or more", options.temperature)
    if options.top_k < 0:
        fail("--top-k", "0 or more", options.top_k)
    if not 0 < options.top_p <= 1:
        fail("--top-p", "above 0 and at most 1", options.top_p)
    if not -(2**63) <= options.seed < 2**64:  # the range of torch.manual_seed
        fail("--seed", "from -2**63 to 2**64 - 1", options.seed)
