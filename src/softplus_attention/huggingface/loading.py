"""Load models and tokenizers for the commands, from a folder or the Hub, with one-line errors."""

from __future__ import annotations

import sys
from difflib import get_close_matches
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassClassValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

import softplus_attention.huggingface  # noqa: F401  registers the attentions and SoftplusGPT
from softplus_attention import validation as check
from softplus_attention.utils import untrusted
from softplus_attention.utils.device import resolve_device
from softplus_attention.utils.files import is_disk_full

ROUNDING = 1e-4  # of the largest logit; a visible token changes logits by more
WITHOUT_CODE = "auto_map in its JSON; read that code, then pass --trust-remote-code to run it"
LONGEST_REASON = 300
LARGEST_JSON = 256 * untrusted.MIB
MIN_TENSOR = 64  # bytes of a tensor's name, type and shape
LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer", "num_decoder_layers", "decoder_layers")
DTYPES = {"auto": "auto", "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def silence_transformers() -> None:
    """Turn off transformers' warnings and progress bars; commands print their own messages."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def load_model(
    source: str, *, dtype: str = "auto", device: str | None = None, trust_remote_code: bool = False
) -> PreTrainedModel:
    """A causal language model in evaluation mode."""
    resolved = resolve_device(device)
    check_model_path("model", source, "config.json")
    return load_weights("model", source, dtype, trust_remote_code=trust_remote_code).to(resolved).eval()


def load_weights(
    argument: str, source: str, dtype: str, *, trust_remote_code: bool = False, **config: Any
) -> PreTrainedModel:
    """A causal language model whose checkpoint has exactly its weights. ``config`` overrides config fields;
    ``argument`` names the model in errors."""
    kwargs = {"dtype": DTYPES[dtype], "output_loading_info": True, **config}
    model, report = load(AutoModelForCausalLM, argument, source, trust_remote_code, **kwargs)
    for which, problem in (("missing_keys", "missing"), ("unexpected_keys", "unexpected")):
        keys = sorted(map(str, report[which]))
        if keys:
            kind = type(model).__name__
            raise ValueError(f"{argument} {source}: {len(keys)} {problem} weights for {kind}, such as {keys[0]}")
    return model


def load(kind: Any, argument: str, source: str, trust_remote_code: bool, **kwargs: Any) -> Any:
    """Load with one of transformers' Auto classes. ``trust_remote_code`` is always passed: without it transformers
    would prompt, and accept a `y` from a pipe."""
    check_model_folder(argument, source, trust_remote_code)
    try:
        found = kind.from_pretrained(source, trust_remote_code=trust_remote_code, **kwargs)
        if isinstance(found, tuple):
            check_eos_token(found[0].generation_config)
            found[0].config.return_dict = True
        if kind is AutoTokenizer:
            if not isinstance(found, PreTrainedTokenizerBase):
                raise ValueError(f"tokenizer_class in its tokenizer_config.json is {type(found).__name__}")
            found("a")  # reads settings such as model_max_length
        return found
    # An untrusted folder can fail in any way; torch, tokenizers and safetensors raise errors of their own.
    except BaseException as error:
        if is_disk_full(error) or not (isinstance(error, Exception) or untrusted.is_tokenizer_error(error)):
            raise
        cause = error.__cause__ if isinstance(error, StrictDataclassClassValidationError) else None
        reason = " ".join(str(cause or error).split())
        if not trust_remote_code and "custom code" in reason:
            reason = f"it needs its own code ({WITHOUT_CODE})"
        elif not Path(source).exists():
            reason = reason.partition(". ")[0]
            reason = f"no such folder, and loading it from the Hugging Face Hub failed ({reason})"
        elif isinstance(error, SafetensorError):
            reason = f"its weights are cut off or damaged ({reason})"
        elif isinstance(error, UnpicklingError):
            reason = "its weights are not a file of tensors, and other pickles are not loaded"
        elif "ignore_mismatched_sizes" in reason:
            reason = "the sizes of its weights do not match its config.json"
        elif not isinstance(error, OSError | ValueError | RuntimeError):
            reason = f"{type(error).__name__}: {reason}"
        raise ValueError(f"{argument} {source}: {reason[:LONGEST_REASON]}") from error


def check_eos_token(generation: Any) -> None:
    """transformers accepts anything in generation_config.json."""
    ids = generation.eos_token_id if generation is not None else None
    if not all(isinstance(token, int | None) for token in (ids if isinstance(ids, list) else [ids])):
        raise ValueError(f"eos_token_id in its generation_config.json is {ids!r}")


def check_model_folder(argument: str, source: str, trust_remote_code: bool = False) -> None:
    """Before transformers reads the folder: only regular files, JSON of reasonable size and depth, weights in this
    folder, no more layers than tensors (each layer would be built), and no kernels from the Hub."""
    folder = Path(source)
    if not folder.is_dir():
        return
    try:
        tensors = 0
        for path in sorted(folder.iterdir()):
            if path.name.endswith(".index.json"):
                weights = untrusted.mapping(untrusted.read_json(path, LARGEST_JSON), "weight_map")
                tensors += len(weights)
                for name in set(map(str, weights.values())):
                    untrusted.check_plain_name(path, name)
            elif path.name.endswith(".json"):
                untrusted.read_json(path, LARGEST_JSON)
            elif path.exists() and not path.is_dir():
                untrusted.check_regular(path)
                tensors += tensors_in(path) if path.suffix in (".safetensors", ".bin") else 0
        if (folder / "config.json").is_file():
            config = untrusted.read_json(folder / "config.json", LARGEST_JSON)
            if tensors:
                check_layers(folder / "config.json", config, tensors)
            if not trust_remote_code:
                check_kernels(folder / "config.json", config)
    except (untrusted.UntrustedFileError, untrusted.UnreadableError) as error:
        raise ValueError(f"{argument} {source}: {error}") from None


def tensors_in(path: Path) -> int:
    """The number of tensors in a file of weights, or an upper bound for formats without a list of them."""
    if path.suffix != ".safetensors":
        return path.stat().st_size // MIN_TENSOR
    try:
        with safe_open(path, "pt") as file:
            return len(file.keys())
    except SafetensorError as error:
        raise untrusted.UntrustedFileError(path, f"cut off or damaged ({error})") from None


def check_layers(path: Path, config: Any, tensors: int) -> None:
    for name, value in config.items() if isinstance(config, dict) else ():
        if name in LAYERS and isinstance(value, int) and value > tensors:
            raise untrusted.UntrustedFileError(path, f"{name} is {value}, but there are only {tensors} weight tensors")
        check_layers(path, value, tensors)


def check_kernels(path: Path, config: Any, is_name: bool = False) -> None:
    """``attn_implementation`` and similar fields may name a Hub repository, whose compiled code would be loaded."""
    if is_name and isinstance(config, str) and "/" in config:
        reason = f"its attention is {untrusted.short(config)}, code from the Hub; to run it pass --trust-remote-code"
        raise untrusted.UntrustedFileError(path, reason)
    for name, value in config.items() if isinstance(config, dict) else ():
        check_kernels(path, value, is_name or "_implementation" in name)


@torch.no_grad()
def check_is_causal(argument: str, model: Any, ids: Tensor) -> None:
    """Raise for a bidirectional model: it sees the tokens that it should predict, and cannot continue text."""
    if ids.shape[1] < 2:
        return
    other = ids.clone()
    other[:, -1] = (other[:, -1] + 1) % model.get_input_embeddings().num_embeddings
    before, after = (model(input_ids=x, use_cache=False).logits[:, :-1] for x in (ids, other))
    if not bool(before.isfinite().all()):
        check.fail(argument, "a model with finite logits", f"{type(model).__name__}, whose logits are NaN or infinite")
    # Equal in a causal model up to rounding: experts share their sums with other tokens, and round differently.
    rounding = max(4 * torch.finfo(before.dtype).eps, ROUNDING) * before.abs().max().item()
    if not torch.allclose(before, after, rtol=0, atol=rounding):
        raise ValueError(f"{argument}: {type(model).__name__} is not causal: later tokens change earlier logits")


def load_tokenizer(source: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    return load(AutoTokenizer, "tokenizer", source, trust_remote_code)


def check_model_path(name: str, source: str, file: str) -> None:
    """An existing path must contain the file: otherwise transformers would look for its name on the Hub."""
    looks_like_path = source.startswith((".", "/", "~")) or Path(source).exists()
    if looks_like_path and not (Path(source) / file).is_file():
        expected = f"a folder with {file}"
        found = "has none" if Path(source).is_dir() else "is not a folder"
        run_models = (Path(source) / "model", Path(source).parent / "model")  # source is a run or its checkpoint
        hint = next((f"; the model of this run is in {x}" for x in run_models if (x / file).is_file()), "")
        check.fail(name, expected, f"{source!r}, which {found}{hint}")
    parent = Path(source).parent
    if not looks_like_path and len(parent.parts) and parent.is_dir():
        # A typo, or a Hub name similar to a folder here.
        folders = sorted(x.parent.name for x in parent.glob(f"*/{file}"))
        for folder in get_close_matches(Path(source).name, folders, n=1):
            note = f"no folder {source}; did you mean {parent / folder}? Looking for {source} on the Hub"
            print(note, file=sys.stderr, flush=True)
