"""The attention functions that transformers calls, one for each name of the catalogue.

The settings are a dictionary in the model's config, saved with the model:
``config.softplus_attention = {"power": 15, "score_scale": None}``. A power that grows with the number of visible keys
is ``{"base": 15, "slope": 4, "n0": 1024}``. ``window`` applies in addition to the window in the host model's masks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.utils import output_capturing

from softplus_attention import dispatch, distributed
from softplus_attention import validation as check
from softplus_attention.attentions.catalog import Attention, attention
from softplus_attention.huggingface.continuous import attend_paged, is_paged
from softplus_attention.huggingface.masks import documents_in_positions, with_documents
from softplus_attention.power import PowerByLength
from softplus_attention.visibility import Visibility

SETTINGS = "softplus_attention"
SETTING_NAMES = ("power", "score_scale", "window")
_last_attention: dict[str, tuple[str, Attention]] = {}  # by name: repr of the settings, and the attention made of them
# Keyword arguments with which a host model asks for an unsupported feature.
UNSUPPORTED_KWARGS = {
    "softcap": "soft-capping of the scores",
    "logits_soft_cap": "soft-capping of the scores",
    "s_aux": "learned attention sinks",
    "sinks": "learned attention sinks",
    "position_bias": "an additive position bias",
    "head_mask": "a head mask",
    "cache": "a cache that is not transformers' own",
    "indices": "a selection of keys",
    "block_indices": "a selection of keys",
}


class InheritedSettings(Mapping[str, Any]):
    """Settings of a part (text, vision) of a composite model: a view of the current settings of the parent config."""

    def __init__(self, parent: Any) -> None:
        self.parent = parent

    def current(self) -> Any:
        found = vars(self.parent).get(SETTINGS)
        return found.current() if isinstance(found, InheritedSettings) else found

    def __getitem__(self, name: str) -> Any:
        return (self.current() or {})[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.current() or {})

    def __len__(self) -> int:
        return len(self.current() or {})

    def __repr__(self) -> str:
        return repr(self.current() or {})

    def __deepcopy__(self, copies: dict[int, Any]) -> InheritedSettings:
        """Refers to the parent's copy. transformers' ``to_dict`` copies the __dict__ of a config, not the config:
        then there is no copy, and the parent stays the original."""
        if id(vars(self.parent)) in copies and id(self.parent) not in copies:
            return InheritedSettings(self.parent)
        return InheritedSettings(copy.deepcopy(self.parent, copies))


def propagate_settings(config: PreTrainedConfig) -> None:
    """The parts of a composite model inherit its settings, also later changes, unless a part has its own."""
    settings = vars(config).get(SETTINGS)
    for key in config.sub_configs:
        part = getattr(config, key, None)
        if isinstance(part, PreTrainedConfig):
            own = vars(part).get(SETTINGS)
            inherited = own is None or isinstance(own, InheritedSettings)
            if inherited or (settings is not None and dict(own) == dict(settings)):
                setattr(part, SETTINGS, InheritedSettings(config))


def power_from_json(power: Any) -> Any:
    """The power in a config: a number, or the fields of a ``PowerByLength``."""
    if isinstance(power, Mapping):
        unknown = set(power) - {"base", "slope", "n0"}
        if unknown:
            check.fail("power", "a number or {'base': ..., 'slope': ..., 'n0': ...}", dict(power))
        return PowerByLength(**power)
    return power


def power_to_json(power: Any) -> Any:
    if isinstance(power, PowerByLength):
        return {"base": power.base, "slope": power.slope, "n0": power.n0}
    if isinstance(power, bool) or not isinstance(power, int | float):
        check.fail("power", "a number or a PowerByLength", repr(power), TypeError)
    return power


def settings_to_json(settings: Mapping[str, Any]) -> dict[str, Any]:
    power = settings.get("power")
    return {**settings, "power": power_to_json(power)} if isinstance(power, PowerByLength) else dict(settings)


def read_settings(config: Any) -> dict[str, Any]:
    # getattr on a transformers config takes microseconds, in every layer of every step. Under dynamo it is still
    # needed: dynamo guards on getattr, but does not notice a change that is read through vars().
    compiling = torch.compiler.is_compiling()
    found = getattr(config, SETTINGS, None) if compiling else vars(config).get(SETTINGS)
    while isinstance(found, InheritedSettings):
        found = getattr(found.parent, SETTINGS, None) if compiling else vars(found.parent).get(SETTINGS)
    settings = found or {}
    if not isinstance(settings, Mapping):
        check.fail(f"config.{SETTINGS}", f"a dictionary of {SETTING_NAMES}", repr(settings), TypeError)
    unknown = set(settings) - set(SETTING_NAMES)
    if unknown:
        check.fail(f"config.{SETTINGS}", f"a dictionary of {SETTING_NAMES}", f"also {sorted(unknown)}")
    return dict(settings)


def attention_from_config(config: Any, name: str) -> Attention:
    """The attention ``name`` with the config's settings.

    The last one is reused if the settings are equal: every layer of a model asks for it, for every token.
    """
    if torch.compiler.is_compiling():
        return attention_from_settings(name, read_settings(config))
    found = vars(config).get(SETTINGS)
    key = "" if found is None else repr(found)  # distinguishes 1, 1.0 and True, as the checks do
    last = _last_attention.get(name)
    if last is None or last[0] != key:
        last = _last_attention[name] = (key, attention_from_settings(name, read_settings(config)))
    return last[1]


def attention_from_settings(name: str, settings: Mapping[str, Any]) -> Attention:
    changes: dict[str, Any] = {}
    if settings.get("power") is not None:
        changes["power"] = power_from_json(settings["power"])
    if settings.get("score_scale") is not None:
        changes["scale"] = checked_score_scale(settings["score_scale"])
    if settings.get("window") is not None:
        check.check_window(settings["window"], is_causal=True)
        changes["window"] = settings["window"]
    return attention(name, **changes)


def checked_score_scale(score_scale: Any) -> float:
    """``score_scale`` as the catalogue's ``scale``; errors use the name in the config."""
    check.check_score_scale(score_scale, head_dim=2, bounds=(1,))
    if not score_scale:
        check.fail("score_scale", "None or a number above 0", score_scale)
    return float(score_scale)


def attention_function(name: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The function that ``AttentionInterface`` has under ``name``."""

    def attend_host(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        chosen, window = attention_from_config(module.config, name), kwargs.get("sliding_window")
        if is_paged(kwargs):
            check_host_arguments(chosen, query, dropout, scaling, {**kwargs, "cache": None})
            out = attend_paged(chosen, module.layer_idx, query, key, value, kwargs, window=window)  # type: ignore[arg-type]
            return out.transpose(1, 2).contiguous(), None
        check_host_arguments(chosen, query, dropout, scaling, kwargs)
        causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
        needs_weights = output_attentions or attentions_are_recorded()
        if distributed.active() is not None:
            out = attend_sharded(chosen, query, key, value, causal, window=window, needs_weights=needs_weights)
            return out.transpose(1, 2).contiguous(), None
        sizes = (query.shape[0], query.shape[2], key.shape[2])
        if attention_mask is None and causal:  # also if a wrapper dropped it, as DeepSpeed's sequence parallel does
            chosen = with_window(chosen, window, sizes[2])
            if sizes[1] == sizes[2] > 1:
                attention_mask = documents_in_positions(kwargs.get("position_ids"), sizes[2])
                attention_mask = None if attention_mask is None else attention_mask.expand(sizes[0], -1, -1, -1)
        attention_mask = with_documents(attention_mask, kwargs, sizes, causal, query.device)
        out = attend(chosen, query, key, value, attention_mask, causal)
        dense = weights(chosen, query, key, attention_mask, causal) if needs_weights else None
        return out.transpose(1, 2).contiguous(), dense  # contiguous, since JetMoe calls view; mostly it is already

    attend_host.__name__ = attend_host.__qualname__ = f"attend_{name.replace('-', '_')}"
    return attend_host


def with_window(chosen: Attention, window: int | None, keys: int) -> Attention:
    """Add the window of the host's layer, if it is shorter than the keys and than the attention's own."""
    if window is None or keys <= window or ((own := chosen.window(None)) is not None and own <= window):
        return chosen
    return chosen.but(window=window)


def attentions_are_recorded() -> bool:
    """Whether transformers records returned weights; some models (GPT-2) do not pass ``output_attentions`` on."""
    recorded = output_capturing._active_collector.get()
    return recorded is not None and "attentions" in recorded


def check_host_arguments(
    chosen: Attention, query: Tensor, dropout: float | None, scaling: float | None, kwargs: Mapping[str, Any]
) -> None:
    """Raise for whatever the host model asks for that would otherwise be ignored silently."""
    if dropout:
        expected = (
            f"0 with attn_implementation={chosen.name!r}, which has no dropout (attention_dropout, attn_pdrop or "
            "attention_probs_dropout_prob in the config)"
        )
        check.fail("dropout of the attention weights", expected, dropout)
    usual = query.shape[-1] ** -0.5
    if scaling is not None and chosen.spec.qk_norm:
        if not scaling > 0:  # a positive one has no effect, since q is normalised
            check.fail("scaling", f"above 0 with attn_implementation={chosen.name!r}", scaling)
    elif scaling is not None and abs(scaling - usual) > 1e-6 * usual:
        expected = f"head_dim ** -0.5 = {usual:.6g} with attn_implementation={chosen.name!r}, which has its own scale"
        check.fail("scaling", expected, scaling)
    refuse_options(chosen.name, kwargs)
    if chosen.spec.learned_scale or chosen.spec.positions != "rope":
        positions = {"alibi": "it adds ALiBi", "none": "it has no positions"}
        reason = "it has learned parameters" if chosen.spec.learned_scale else positions[chosen.spec.positions]
        raise ValueError(
            f"attn_implementation={chosen.name!r} is not supported in a host model: {reason}; use SoftplusGPTConfig("
            f"attention={chosen.name!r})"
        )


def refuse_options(name: str, options: Mapping[str, Any]) -> None:
    for option, feature in UNSUPPORTED_KWARGS.items():
        if options.get(option) is not None:
            check.fail(option, f"None: the attention {name!r} does not have {feature}", type(options[option]).__name__)


def build_visibility(
    query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, window: int | None
) -> Visibility:
    """The op's visibility from None, a mask of ``masks.range_mask``, or a user's boolean mask."""
    batch, heads, t_q, _ = query.shape
    t_k = key.shape[2]
    if mask is None:
        check_window_is_causal(window, is_causal)
        return Visibility(
            t_q,
            t_k,
            query.device,
            is_causal,
            window,
            is_cache=is_causal and t_q < t_k and t_q <= dispatch.MAX_DECODE_ROWS,
        )
    if mask.dim() == 4 and mask.dtype == torch.int32 and mask.shape[2:] == (t_q, 2):
        start, end = mask[:, 0, :, 0], mask[:, 0, :, 1]
        if window is not None:
            check_window_is_causal(window, is_causal)
            start = torch.maximum(start, end - window)
        return Visibility(
            t_q,
            t_k,
            query.device,
            key_start=start,
            key_end=end,
            query_key_index=end - 1,
            applied_window=window,
            is_cache=t_q == 1 and t_q < t_k,  # several rows may have ranges unlike a cache's
        )
    if mask.dtype != torch.bool:
        expected = "None, 2-D (tokens that are padding) or boolean: an additive mask is not supported"
        check.fail("attention_mask", expected, check.describe_tensor(mask))
    dense = check.check_mask(mask[..., :t_k], (batch, heads, t_q, t_k), query.device)
    if window is not None and dense is not None:
        check_window_is_causal(window, is_causal)
        # The position of a causal row is that of the last key it sees.
        key = torch.arange(t_k, device=query.device)
        own = torch.where(dense, key, -1).amax(-1, keepdim=True)
        dense = dense & (key > own - window)
    return Visibility(t_q, t_k, query.device, mask=dense, applied_window=window)


def check_window_is_causal(window: int | None, is_causal: bool) -> None:
    if window is not None and not is_causal:
        check.fail("window", "None in a model that is not causal", window)


def attend(
    chosen: Attention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    *,
    parameters: Mapping[str, Tensor] | None = None,
    normalized_keys: bool = False,
) -> Tensor:
    """Returns (B, H, T_q, D_v)."""
    if distributed.active() is not None:
        return attend_sharded(chosen, query, key, value, is_causal, parameters=parameters)
    visibility = build_visibility(query, key, mask, is_causal, chosen.window(None))
    query, key, value = dispatch.autocast(query, key, value)
    check.check_qkv(query, key, value, layout="(B, H, T, D)", enable_gqa=True, names=("query", "key", "value"))
    return chosen.attend(query, key, value, visibility, "auto", parameters, False, normalized_keys=normalized_keys)


def attend_sharded(
    chosen: Attention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool,
    *,
    parameters: Mapping[str, Tensor] | None = None,
    window: int | None = None,
    needs_weights: bool = False,
) -> Tensor:
    """This process's rows inside ``distributed.sharded``. The record says what they see; masks are not used."""
    record = distributed.active()
    assert record is not None
    if key.shape[2] != record.rows:
        expected = f"keys for the {record.rows} tokens of this process"
        raise ValueError(f"context parallel expects {expected}, got {key.shape[2]} keys: pass use_cache=False")
    if needs_weights:
        raise ValueError("no attention weights under context parallel: output_attentions must be False")
    return distributed.context_parallel_attention(
        query,
        key,
        value,
        record,
        attention=chosen,
        parameters=parameters,
        is_causal=is_causal,
        window=min((one for one in (window, chosen.window(None)) if one is not None), default=None),
    )


def weights(
    chosen: Attention,
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    parameters: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """The dense weights (B, H, T_q, T_k), for ``output_attentions=True``."""
    visibility = build_visibility(query, key, mask, is_causal, chosen.window(None))
    query, key = dispatch.autocast(query, key)
    return chosen.visible_weights(query, key, visibility, parameters).to(query.dtype)
