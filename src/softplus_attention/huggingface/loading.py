"""Models and tokenizers for the commands: from a folder or the hub, with errors that say what was looked for."""

from __future__ import annotations

import sys
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

import softplus_attention.huggingface  # noqa: F401  registers the attentions and SoftplusGPT
from softplus_attention import validation as check

ROUNDING = 1e-4  # of the largest logit; a token that is seen changes more
DTYPES = {"auto": "auto", "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def quiet() -> None:
    """Without transformers' own warnings and bars: a command says what its users need to know."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def load_model(source: str, *, dtype: str = "auto", device: str | None = None) -> PreTrainedModel:
    """A causal language model in evaluation mode."""
    where = device_of(device)
    require("model", source, "config.json")
    return load_weights("model", source, dtype).to(where).eval()


def load_weights(argument: str, source: str, dtype: str, **config: Any) -> PreTrainedModel:
    """A causal language model, all of its weights and no others; ``config`` replaces words of its config. Errors call
    it ``argument``."""
    expected = "a causal language model that transformers can load"
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            source, dtype=DTYPES[dtype], output_loading_info=True, **config
        )
    except SafetensorError as error:
        check.fail(argument, "a folder with whole weights", f"{source!r}: {error}")
    except OSError as error:
        here = f"{expected}: a folder with a saved one (there is none of that name here), or a name on the hub, which"
        check.fail(argument, f"{here} must be reached", f"{source!r}: {first_line(error)}")
    except (ValueError, KeyError, RuntimeError) as error:
        check.fail(argument, expected, f"{source!r}: {first_line(error)}")
    for which, what in (("missing_keys", "lacks"), ("unexpected_keys", "also holds")):
        keys = sorted(report[which])
        if keys:
            found = f"{source!r}, which {what} {len(keys)} weights of {type(model).__name__}, {keys[0]} the first"
            check.fail(argument, f"{expected}, all of it and nothing else", found)
    return model


@torch.no_grad()
def refuse_foresight(argument: str, model: Any, ids: Tensor) -> None:
    """A bidirectional model would be measured on tokens that it has seen, and continues no text."""
    if ids.shape[1] < 2:
        return
    other = ids.clone()
    other[:, -1] = (other[:, -1] + 1) % model.get_input_embeddings().num_embeddings
    before, after = (model(input_ids=x, use_cache=False).logits[:, :-1] for x in (ids, other))
    if not bool(before.isfinite().all()):
        check.fail(argument, "one whose logits are numbers", f"{type(model).__name__}, which gives NaN or infinity")
    # The same numbers in a causal model, up to rounding: experts share their sums with other tokens, and round anew.
    rounding = max(4 * torch.finfo(before.dtype).eps, ROUNDING) * before.abs().max().item()
    if not torch.allclose(before, after, rtol=0, atol=rounding):
        check.fail(argument, "a causal language model", f"{type(model).__name__}, whose tokens see those after them")


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def device_of(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        check.fail("--device", "such as cpu or cuda:0", repr(name))
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        check.fail("--device", f"one of those that torch sees here, {torch.cuda.device_count()} of CUDA", repr(name))
    return device


def load_tokenizer(source: str) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, KeyError) as error:
        check.fail("tokenizer", "a folder with a saved tokenizer, or a name on the hub", f"{source!r}: {error}")


def require(name: str, source: str, file: str) -> None:
    """A path that exists must hold the file: else transformers would look for the path's name on the hub."""
    looks_like_path = source.startswith((".", "/", "~")) or Path(source).exists()
    if looks_like_path and not (Path(source) / file).is_file():
        expected = f"a folder with {file}"
        found = "has none" if Path(source).is_dir() else "is no folder"
        near = (Path(source) / "model", Path(source).parent / "model")  # of a run, or of one of its checkpoints
        of_run = next((f"; the model of this run is in {place}" for place in near if (place / file).is_file()), "")
        check.fail(name, expected, f"{source!r}, which {found}{of_run}")
    parent = Path(source).parent
    if not looks_like_path and len(parent.parts) and parent.is_dir():
        # Perhaps a slip, and perhaps a name on the hub like that of a folder here.
        folders = sorted(x.parent.name for x in parent.glob(f"*/{file}"))
        for folder in get_close_matches(Path(source).name, folders, n=1):
            note = f"there is no folder {source} here, but {parent / folder}; looking for {source} on the hub"
            print(note, file=sys.stderr, flush=True)
