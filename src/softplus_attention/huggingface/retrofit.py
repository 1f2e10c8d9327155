"""Another attention in a model that exists: swapped in by name, its power raised step by step."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from softplus_attention import validation as check
from softplus_attention.attentions.catalog import KNOWN
from softplus_attention.huggingface.attention import (
    SETTINGS,
    InheritedSettings,
    attention_from_settings,
    power_to_json,
    propagate_settings,
    read_settings,
)
from softplus_attention.huggingface.configuration_softplus_gpt import SoftplusGPTConfig
from softplus_attention.huggingface.modeling_softplus_gpt import SoftplusGPTPreTrainedModel
from softplus_attention.power import PowerByLength


def use_attention(
    model: PreTrainedModel,
    name: str = "lssar",
    *,
    power: float | PowerByLength | None = None,
    score_scale: float | None = None,
    window: int | None = None,
) -> PreTrainedModel:
    """The same weights with the attention ``name`` in every layer. Returns the model, which is changed in place.

    ``power``, ``score_scale`` and ``window`` are the attention's own where not given, whatever they were before. A
    model trained with softmax must be fine-tuned after it: see docs/huggingface.md for what the swap alone costs.
    """
    if isinstance(model.config, SoftplusGPTConfig):
        raise ValueError(
            "`model` is a SoftplusGPT, whose attention is part of its config: load its weights with "
            f"from_pretrained(..., attention={name!r})"
        )
    settings: dict[str, Any] = {} if power is None else {"power": power_to_json(power)}
    settings |= {} if score_scale is None else {"score_scale": score_scale}
    settings |= {} if window is None else {"window": window}
    attention_from_settings(name, settings)  # refused before anything is changed
    configs = collect_configs(model)
    before = [getattr(config, SETTINGS, None) for config in configs]
    for config in configs:
        setattr(config, SETTINGS, dict(settings))
    model.set_attn_implementation(name)
    if model.config._attn_implementation != name:
        for config, former in zip(configs, before, strict=True):
            delattr(config, SETTINGS) if former is None else setattr(config, SETTINGS, former)
        raise ValueError(f"{type(model).__name__} does not use transformers' attention interface: its attention stays")
    for config in configs:
        propagate_settings(config)
    return model


def set_power(model: nn.Module, power: float | PowerByLength) -> None:
    """Another sharpening power from here on, saved with the config: a schedule, or a sharper one at inference.

    ``model`` is a SoftplusGPT or any model with ``attn_implementation="lssar"``, also inside a wrapper such as DDP.
    """
    words = power_to_json(power)
    changed: list[Any] = []
    for module in model.modules():
        if isinstance(module, SoftplusGPTPreTrainedModel):
            module.set_power(power)
            changed.append(module.config)
        elif isinstance(module, PreTrainedModel) and module.config._attn_implementation in KNOWN:
            found = vars(module.config).get(SETTINGS)
            if isinstance(found, InheritedSettings) and any(found.whole is config for config in changed):
                continue
            settings = {**read_settings(module.config), "power": words}
            attention_from_settings(module.config._attn_implementation, settings)
            setattr(module.config, SETTINGS, settings)
            changed.append(module.config)
    if not changed:
        check.fail("model", "a model with an attention whose power can be set", type(model).__name__)


def collect_configs(model: PreTrainedModel) -> list[Any]:
    """The configs of the model and its parts, each once."""
    found: dict[int, Any] = {id(m.config): m.config for m in model.modules() if isinstance(m, PreTrainedModel)}
    return list(found.values())
