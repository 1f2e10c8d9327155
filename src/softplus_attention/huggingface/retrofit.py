"""Replace the attention of an existing model by name, and set its power."""

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
    """Replace the attention of every layer by ``name``, in place, and return the model. The weights stay.

    ``power``, ``score_scale`` and ``window`` default to the attention's own, not to the previous settings. A model
    trained with softmax must be fine-tuned afterwards: docs/huggingface.md has the loss before and after.
    """
    if isinstance(model.config, SoftplusGPTConfig):
        raise ValueError(
            "`model` is a SoftplusGPT, whose attention is part of its config: load it with "
            f"from_pretrained(..., attention={name!r})"
        )
    settings: dict[str, Any] = {} if power is None else {"power": power_to_json(power)}
    settings |= {} if score_scale is None else {"score_scale": score_scale}
    settings |= {} if window is None else {"window": window}
    attention_from_settings(name, settings)  # raises before anything is changed
    configs = collect_configs(model)
    before = [getattr(config, SETTINGS, None) for config in configs]
    for config in configs:
        setattr(config, SETTINGS, dict(settings))
    model.set_attn_implementation(name)
    if model.config._attn_implementation != name:
        for config, previous in zip(configs, before, strict=True):
            delattr(config, SETTINGS) if previous is None else setattr(config, SETTINGS, previous)
        raise ValueError(
            f"{type(model).__name__} does not use transformers' attention interface, so its attention cannot be "
            "replaced"
        )
    for config in configs:
        propagate_settings(config)
    return model


def set_power(model: nn.Module, power: float | PowerByLength) -> None:
    """Set the sharpening power, in the config too: for a schedule in training, or a sharper attention at inference.

    ``model`` is a SoftplusGPT or any model with ``attn_implementation="lssar"``, also inside a wrapper such as DDP.
    """
    power_json = power_to_json(power)
    changed: list[Any] = []
    for module in model.modules():
        if isinstance(module, SoftplusGPTPreTrainedModel):
            module.set_power(power)
            changed.append(module.config)
        elif isinstance(module, PreTrainedModel) and module.config._attn_implementation in KNOWN:
            found = vars(module.config).get(SETTINGS)
            if isinstance(found, InheritedSettings) and any(found.parent is config for config in changed):
                continue
            settings = {**read_settings(module.config), "power": power_json}
            attention_from_settings(module.config._attn_implementation, settings)
            setattr(module.config, SETTINGS, settings)
            changed.append(module.config)
    if not changed:
        check.fail("model", "a model with an attention whose power can be set", type(model).__name__)


def collect_configs(model: PreTrainedModel) -> list[Any]:
    """The configs of the model and its parts, each once."""
    found: dict[int, Any] = {id(m.config): m.config for m in model.modules() if isinstance(m, PreTrainedModel)}
    return list(found.values())
