"""Models of an evaluation: parse their names and options, change them at inference, load and describe them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from softplus_attention.attentions.catalog import KNOWN, attention
from softplus_attention.huggingface import SoftplusGPTConfig, set_power, use_attention
from softplus_attention.huggingface.attention import (
    attention_from_config,
    power_from_json,
    power_to_json,
    read_settings,
)
from softplus_attention.huggingface.loading import LARGEST_JSON, check_model_path, load, load_weights
from softplus_attention.huggingface.modeling_softplus_gpt import SoftplusGPTAttention
from softplus_attention.power import PowerByLength, is_learned
from softplus_attention.training.schedules import as_number, constant_power
from softplus_attention.utils import untrusted
from softplus_attention.utils.device import resolve_device
from softplus_attention.validation import fail

OPTIONS = ("power", "reweight", "window", "rope")
FORM = re.compile(rf"(.+?)((?:\+(?:{'|'.join(OPTIONS)})(?:=[^+]*)?)*)")
ROPES = ("linear", "dynamic", "ntk", "yarn")
WEIGHTS = ("*.safetensors", "*.bin")
# float32 weights in bfloat16 arithmetic, as in training on a GPU.
MIXED = "mixed"
# Names of modules with one vector per position.
POSITION_TABLES = ("wpe", "embed_positions", "position_embeddings", "position_embedding", "pos_embed")


@dataclass(frozen=True)
class ModelSpec:
    """A model as given by a user: [NAME=]SOURCE[+power=31][+reweight][+window=512][+rope=yarn:4]."""

    source: str
    name: str
    options: Mapping[str, str]
    trust_remote_code: bool = False


def parse_model_spec(text: str, common: Mapping[str, str] | None = None) -> ModelSpec:
    """``common``: options of all models, which those in the text override."""
    if Path(text).exists():
        source, own, name = text, {}, None
    else:
        matched = FORM.fullmatch(text)
        if matched is None:
            fail("MODEL", "[NAME=]FOLDER[+OPTION=VALUE...]", repr(text))
        source, name = matched[1], None
        own = dict(part.partition("=")[::2] for part in matched[2].split("+")[1:])
        named = re.fullmatch(r"([^/=]+)=(.+)", source)
        if named and not Path(source).exists():
            name, source = named[1], named[2]
        if not Path(source).exists():
            reject_unknown_options(matched[1])
    options = {option: value for option, value in {**(common or {}), **own}.items() if value is not None}
    if name is None:
        suffixes = [option if not value else f"{option}={value}" for option, value in options.items()]
        name = " ".join([short_name(source), *suffixes])
    return ModelSpec(source, name, options)


def reject_unknown_options(text: str) -> None:
    """Otherwise a folder followed by a misspelt option would be looked up on the Hub."""
    head, *rest = text.split("+")
    for number, part in enumerate(rest):
        folder = "+".join([head, *rest[:number]])
        if any(Path(place).is_dir() for place in (folder, folder.partition("=")[2]) if place):
            unknown = next((option for option in rest[number:] if option.partition("=")[0] not in OPTIONS), part)
            known = "+power=P, +reweight, +window=N or +rope=TYPE:FACTOR"
            fail("MODEL", f"a folder followed by {known}", f"{'+' + unknown!r} in {text!r}")


def parse_model_specs(
    texts: Sequence[str], common: Mapping[str, str] | None = None, trust_remote_code: bool = False
) -> list[ModelSpec]:
    """Parse model specs and make their names unique."""
    found: list[ModelSpec] = []
    for text in texts:
        spec = parse_model_spec(text, common)
        taken = {other.name for other in found}
        number, name = 2, spec.name
        while name in taken:
            name, number = f"{spec.name} ({number})", number + 1
        found.append(replace(spec, name=name, trust_remote_code=trust_remote_code))
    return found


def short_name(source: str) -> str:
    """The run's folder for RUN/model and RUN/checkpoint-100, else the last part of the path."""
    parts = [part for part in Path(source).parts if part not in ("/", "..", ".")]
    while len(parts) > 1 and (parts[-1] == "model" or parts[-1].startswith("checkpoint-")):
        parts.pop()
    return parts[-1] if parts else source


@dataclass(frozen=True)
class LoadedModel:
    model: Any
    spec: ModelSpec
    training_length: int
    is_mixed: bool = False

    @property
    def longest(self) -> int | None:
        """Maximum number of positions; None if unlimited."""
        return most_positions(self.model)

    def description(self) -> dict[str, Any]:
        """The "model" entry of a result file."""
        config = self.model.config
        return {
            "name": self.spec.name,
            "source": self.spec.source,
            "options": dict(self.spec.options),
            "attention": attention_name(config),
            "power": describe_power(config),
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "dtype": MIXED if self.is_mixed else str(self.model.dtype).removeprefix("torch."),
            "training_length": self.training_length,
            "fingerprint": fingerprint(self.spec.source),
            "config": config.to_dict(),
        }


def attention_name(config: Any) -> str:
    name = config._attn_implementation
    return name if name in KNOWN else "softmax"


def describe_power(config: Any) -> Any:
    if isinstance(config, SoftplusGPTConfig):
        if is_learned(config.power):
            return config.power
        sharpening = config.chosen_attention().spec.sharpening
    else:
        name = config._attn_implementation
        sharpening = attention_from_config(config, name).spec.sharpening if name in KNOWN else None
    return None if sharpening is None else power_to_json(sharpening)


def fingerprint(source: str) -> str:
    """Hash of the checkpoint's config and weights, or of the name of a model on the Hub."""
    folder = Path(source)
    if not folder.is_dir():
        return hashlib.sha256(source.encode()).hexdigest()[:16]
    digest = hashlib.sha256(untrusted.read_bytes(folder / "config.json", LARGEST_JSON))
    for path in sorted(path for pattern in WEIGHTS for path in folder.glob(pattern)):
        digest.update(path.name.encode() + bytes.fromhex(untrusted.sha256(path)))
    return digest.hexdigest()[:16]


def most_positions(model: Any) -> int | None:
    named = [(name, module) for name, module in model.named_modules() if isinstance(module, torch.nn.Embedding)]
    named += [(name, buffer) for name, buffer in model.named_buffers() if buffer.dim() == 2]  # GPT-J: sinusoids
    tables = [name for name, _ in named if name.rpartition(".")[2] in POSITION_TABLES]
    # Not the table's size: some tables have extra rows for padding.
    return getattr(model.config, "max_position_embeddings", None) if tables else None


def read_training_length(spec: ModelSpec) -> int | None:
    """The length in the model's config, without loading the weights."""
    length = configured_length(load_config(spec))
    return length if isinstance(length, int) and length > 1 else None


def configured_length(config: Any) -> Any:
    """``max_position_embeddings``, or the training length of the original model for an extended one."""
    extension = getattr(config, "extension", None)
    return (
        extension.get("trained") if isinstance(extension, Mapping) else getattr(config, "max_position_embeddings", None)
    )


def load_config(spec: ModelSpec) -> Any:
    check_model_path("MODEL", spec.source, "config.json")
    return load(AutoConfig, "MODEL", spec.source, spec.trust_remote_code)


def check_spec(spec: ModelSpec, training_length: int) -> None:
    """Raise for options that the model does not support, before any model is loaded."""
    config = load_config(spec)
    parse_changes(config, spec.options, training_length)
    if not isinstance(config, SoftplusGPTConfig) and "power" in spec.options:
        power_at_inference(spec.options["power"], training_length)


def load_for_evaluation(
    spec: ModelSpec, training_length: int, *, dtype: str = "auto", device: str | None = None
) -> LoadedModel:
    """Load the model to its device in evaluation mode and apply its options."""
    config = load_config(spec)
    changes = parse_changes(config, spec.options, training_length)
    mixed = dtype == MIXED
    changes["trust_remote_code"] = spec.trust_remote_code
    model: Any = load_weights("MODEL", spec.source, "float32" if mixed else dtype, **changes)
    if isinstance(config, SoftplusGPTConfig):
        change_softplus_gpt(model, spec.options, training_length)
    else:
        change_transformers_model(model, spec.options, training_length)
    make_dynamic_rope_stateless(model)
    resolved = resolve_device(device)
    if mixed:
        run_in_bfloat16(model, resolved)
    return LoadedModel(model.to(resolved).eval(), spec, training_length, mixed)


def make_dynamic_rope_stateless(model: Any) -> None:
    """Make dynamic NTK depend on each input's own length. transformers keeps the frequencies of the longest input until
    an input is shorter than the original length, so results would depend on earlier inputs."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", "")
        if any("dynamic" in kind for kind in (kinds.values() if isinstance(kinds, Mapping) else [str(kinds)])):
            module.register_forward_pre_hook(lambda module, _: reset_dynamic_rope(module))


def reset_dynamic_rope(model: Any) -> None:
    """Restore the RoPE frequencies from before any long input."""
    for module in model.modules():
        if not hasattr(module, "original_max_seq_len"):
            continue
        for name in [name for name in (*vars(module), *module._buffers) if name.endswith("original_inv_freq")]:
            prefix = name.removesuffix("original_inv_freq")
            now = getattr(module, f"{prefix}inv_freq")
            setattr(module, f"{prefix}inv_freq", getattr(module, name).to(now.device))
            setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)


def run_in_bfloat16(model: Any, device: torch.device) -> None:
    """Wrap every module that a measure calls directly in autocast."""
    for part in (model, model.get_decoder(), model.get_output_embeddings()):
        part.forward = torch.autocast(device.type, torch.bfloat16)(part.forward)


def parse_changes(config: Any, options: Mapping[str, str], training_length: int) -> dict[str, Any]:
    """Config values to replace before the weights are loaded."""
    changes: dict[str, Any] = {}
    if "rope" in options:
        changes["rope_parameters"] = parse_rope(config, options["rope"], training_length)
        if changes["rope_parameters"]["rope_type"] == "dynamic":
            changes["max_position_embeddings"] = training_length  # dynamic NTK scales beyond this length
    if "window" in options:
        whole_number("window", options["window"])
    if not isinstance(config, SoftplusGPTConfig):
        return changes
    if "reweight" in options:
        changes["attention"] = reweighted(config.attention)
    if "power" in options:
        if attention(changes.get("attention", config.attention)).spec.second_stage == "none":
            hint = f"left out for {config.attention!r}, which has no second stage (--reweight adds one)"
            fail("--power", hint, options["power"])
        power = power_to_json(power_at_inference(options["power"], training_length))
        if not is_learned(config.power):  # a learned power's weights load only into a model that learns it
            changes["power"] = power
    return changes


def change_softplus_gpt(model: Any, options: Mapping[str, str], training_length: int) -> None:
    """Set a window in every layer of a SoftplusGPT (global layers too) and replace learned powers."""
    layers = [module for module in model.modules() if isinstance(module, SoftplusGPTAttention)]
    if "window" in options:
        window = whole_number("window", options["window"])
        for layer in layers:
            own = layer.attention.window(None)
            layer.attention = layer.attention.but(window=window if own is None else min(own, window))
    if "power" in options and is_learned(model.config.power):
        replace_learned_power(model, power_at_inference(options["power"], training_length))


def replace_learned_power(model: Any, power: float | PowerByLength) -> None:
    """Use one power instead of the learned ones; their weights remain in the model, unused."""
    for layer in model.modules():
        if isinstance(layer, SoftplusGPTAttention) and layer.learned_kind:
            layer.learned_kind = ""
            layer.attention = layer.attention.but(power=power)
    model.config.power = power_to_json(power)


def change_transformers_model(model: Any, options: Mapping[str, str], training_length: int) -> None:
    """Set window, power and re-weighting of a transformers model."""
    name = model.config._attn_implementation
    if "reweight" in options:
        own = read_settings(model.config)
        name = reweighted(attention_name(model.config))
        use_attention(model, name, score_scale=own.get("score_scale"), window=own.get("window"))
    if "power" in options:
        if name not in KNOWN or KNOWN[name].second_stage == "none":
            fail("--power", f"left out for a model with {attention_name(model.config)!r}", options["power"])
        set_power(model, power_at_inference(options["power"], training_length))
    if "window" in options:
        settings = read_settings(model.config)
        settings["power"] = power_from_json(settings.get("power"))
        windowed = name if name in KNOWN else "softmax-window"
        use_attention(model, windowed, **{**settings, "window": whole_number("window", options["window"])})


def reweighted(name: str) -> str:
    """Name of the same attention with the second stage added."""
    spec = attention(name).spec
    if spec.second_stage != "none":
        fail("--reweight", f"left out for {name!r}, which is re-weighted already", "given")
    wanted = spec.but(second_stage="relu_power")
    found = [other for other, known in KNOWN.items() if known == wanted]
    if not found:
        fail("--reweight", f"left out for {name!r}, which has no re-weighted form in the catalogue", "given")
    return found[0]


def power_at_inference(text: str, training_length: int) -> float | PowerByLength:
    expected = (
        "a number >= 1, grow:BASE,SLOPE (BASE up to the training length, SLOPE more for each factor e beyond), or "
        "log:FACTOR (times the log of the number of keys)"
    )
    if not text.startswith("grow:"):
        return constant_power(text, expected)
    try:
        base, slope = (float(part) for part in text.removeprefix("grow:").split(","))
        return PowerByLength(as_number(base), as_number(slope), training_length)
    except ValueError:
        fail("--power", expected, repr(text))


def whole_number(name: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        fail(f"--{name}", "a whole number >= 1", repr(text))
    return int(text)


def parse_rope(config: Any, text: str, training_length: int) -> dict[str, Any]:
    kind, _, factor = text.partition(":")
    expected = f"one of {', '.join(f'{rope}:FACTOR' for rope in ROPES)} with a factor above 1"
    try:
        value = float(factor)
    except ValueError:
        fail("--rope", expected, repr(text))
    if kind not in ROPES or not 1 < value < float("inf"):
        fail("--rope", expected, repr(text))
    parameters = getattr(config, "rope_parameters", None)
    if not isinstance(parameters, Mapping) or "rope_theta" not in parameters:
        fail("--rope", "left out for a model without RoPE or with several kinds of it", repr(text))
    kind = {"ntk": "dynamic"}.get(kind, kind)
    # Keep the base and the rotated fraction of each head; drop any other scaling.
    own = {key: parameters[key] for key in ("rope_theta", "partial_rotary_factor") if key in parameters}
    changed = own | {"rope_type": kind, "factor": value}
    return changed | ({"original_max_position_embeddings": training_length} if kind == "yarn" else {})


# Deprecated names.
opened = load_for_evaluation
request_of = parse_model_spec
