"""Models and tokenizers for the commands: from a folder or the hub, with errors that say what was looked for."""

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

ROUNDING = 1e-4  # of the largest logit; a token that is seen changes more
WITHOUT_CODE = "auto_map in its JSON; read that code, then pass --trust-remote-code to run it"
LONGEST_REASON = 300
LARGEST_JSON = 256 * untrusted.MIB
MIN_TENSOR = 64  # bytes that its name, type and shape take
LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer", "num_decoder_layers", "decoder_layers")
DTYPES = {"auto": "auto", "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def silence_transformers() -> None:
    """Without transformers' warnings and progress bars: commands have their own messages."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def load_model(
    source: str, *, dtype: str = "auto", device: str | None = None, trust_remote_code: bool = False
) -> PreTrainedModel:
    """A causal language model in evaluation mode."""
    where = resolve_device(device)
    check_model_path("model", source, "config.json")
    return load_weights("model", source, dtype, trust_remote_code=trust_remote_code).to(where).eval()


def load_weights(
    argument: str, source: str, dtype: str, *, trust_remote_code: bool = False, **config: Any
) -> PreTrainedModel:
    """A causal language model, all of its weights and no others; ``config`` replaces words of its config. Errors call
    it ``argument``."""
    kwargs = {"dtype": DTYPES[dtype], "output_loading_info": True, **config}
    model, report = load(AutoModelForCausalLM, argument, source, trust_remote_code, **kwargs)
    for which, what in (("missing_keys", "lacks"), ("unexpected_keys", "also holds")):
        keys = sorted(map(str, report[which]))
        if keys:
            raise ValueError(
                f"{argument} {source}: it {what} {len(keys)} weights of {type(model).__name__}, {keys[0]} the first"
            )
    return model


def load(kind: Any, argument: str, source: str, trust_remote_code: bool, **kwargs: Any) -> Any:
    """By one of transformers' Auto classes. Its own code runs only where the user says so: else transformers would ask,
    and a `y` in a pipe would be the answer."""
    check_model_folder(argument, source, trust_remote_code)
    try:
        found = kind.from_pretrained(source, trust_remote_code=trust_remote_code, **kwargs)
        if isinstance(found, tuple):
            check_end(found[0].generation_config)
            found[0].config.return_dict = True
        if kind is AutoTokenizer and not isinstance(found, PreTrainedTokenizerBase):
            raise ValueError(f"tokenizer_class in its tokenizer_config.json is {type(found).__name__}")
        return found
    # The folder of a stranger can fail in any way; torch, tokenizers and safetensors have errors of their own.
    except BaseException as error:
        if is_disk_full(error) or not (isinstance(error, Exception) or untrusted.is_tokenizer_error(error)):
            raise
        cause = error.__cause__ if isinstance(error, StrictDataclassClassValidationError) else None
        reason = " ".join(str(cause or error).split())
        if not trust_remote_code and "custom code" in reason:
            reason = f"it needs code of its own ({WITHOUT_CODE})"
        elif not Path(source).exists():
            reason = reason.partition(". ")[0]
            reason = f"no such folder, and the Hugging Face Hub did not give a model of that name ({reason})"
        elif isinstance(error, SafetensorError):
            reason = f"its weights are cut off or damaged ({reason})"
        elif isinstance(error, UnpicklingError):
            reason = "its weights are no file of tensors, and pickles of anything else are not read"
        elif "ignore_mismatched_sizes" in reason:
            reason = "its weights have other sizes than its config.json says"
        elif not isinstance(error, OSError | ValueError | RuntimeError):
            reason = f"{type(error).__name__}: {reason}"
        raise ValueError(f"{argument} {source}: {reason[:LONGEST_REASON]}") from error


def check_end(generation: Any) -> None:
    """transformers takes whatever generation_config.json holds."""
    ends = generation.eos_token_id if generation is not None else None
    if not all(isinstance(end, int | None) for end in (ends if isinstance(ends, list) else [ends])):
        raise ValueError(f"eos_token_id in its generation_config.json is {ends!r}")


def check_model_folder(argument: str, source: str, trust_remote_code: bool = False) -> None:
    """Before transformers reads it: regular files, JSON of reasonable size and depth, weights in this folder, no more
    layers than there are weights, which would be built one by one, and no kernels from the hub."""
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
    """The tensors of a file of weights; of a format that does not list them no fewer than there can be."""
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
            raise untrusted.UntrustedFileError(path, f"{name} is {value}, and the weights are {tensors} tensors")
        check_layers(path, value, tensors)


def check_kernels(path: Path, config: Any, is_name: bool = False) -> None:
    """``attn_implementation`` and the like may name a repository of the hub, whose compiled code would be loaded."""
    if is_name and isinstance(config, str) and "/" in config:
        reason = f"its attention is {untrusted.short(config)}, code of a hub; to run it pass --trust-remote-code"
        raise untrusted.UntrustedFileError(path, reason)
    for name, value in config.items() if isinstance(config, dict) else ():
        check_kernels(path, value, is_name or "_implementation" in name)


@torch.no_grad()
def check_is_causal(argument: str, model: Any, ids: Tensor) -> None:
    """A bidirectional model sees the tokens that it is measured on, and cannot continue text."""
    if ids.shape[1] < 2:
        return
    other = ids.clone()
    other[:, -1] = (other[:, -1] + 1) % model.get_input_embeddings().num_embeddings
    before, after = (model(input_ids=x, use_cache=False).logits[:, :-1] for x in (ids, other))
    if not bool(before.isfinite().all()):
        check.fail(argument, "a model with finite logits", f"{type(model).__name__}, whose logits are NaN or infinite")
    # The same numbers in a causal model, up to rounding: experts share their sums with other tokens, and round anew.
    rounding = max(4 * torch.finfo(before.dtype).eps, ROUNDING) * before.abs().max().item()
    if not torch.allclose(before, after, rtol=0, atol=rounding):
        raise ValueError(f"{argument}: {type(model).__name__} is not causal: later tokens change earlier logits")


def load_tokenizer(source: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    return load(AutoTokenizer, "tokenizer", source, trust_remote_code)


def check_model_path(name: str, source: str, file: str) -> None:
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
