"""The attention function that transformers calls, under the name of each attention of the catalogue.

What the attention is made of comes from the model's config, in one dictionary that is saved with the model:
``config.softplus_attention = {"power": 15, "score_scale": None}``. A power that grows with the number of visible keys
is ``{"base": 15, "slope": 4, "n0": 1024}``. A window is one more, beside that of the host model's masks.
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
WORDS = ("power", "score_scale", "window")
_last_asked: dict[str, tuple[str, Attention]] = {}  # by name: the settings, and what came of them
# Keyword arguments by which a host model asks for something that this attention does not have.
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
    """In the config of a part of a composite model (text, vision): the settings of the whole, whatever they are when
    they are looked at."""

    def __init__(self, whole: Any) -> None:
        self.whole = whole

    def now(self) -> Any:
        found = vars(self.whole).get(SETTINGS)
        return found.now() if isinstance(found, InheritedSettings) else found

    def __getitem__(self, word: str) -> Any:
        return (self.now() or {})[word]

    def __iter__(self) -> Iterator[str]:
        return iter(self.now() or {})

    def __len__(self) -> int:
        return len(self.now() or {})

    def __repr__(self) -> str:
        return repr(self.now() or {})

    def __deepcopy__(self, copies: dict[int, Any]) -> InheritedSettings:
        """Of the whole's copy. transformers' ``to_dict`` copies the __dict__ of a config and not the config itself:
        there the whole is no part of what is made."""
        if id(vars(self.whole)) in copies and id(self.whole) not in copies:
            return InheritedSettings(self.whole)
        return InheritedSettings(copy.deepcopy(self.whole, copies))


def propagate_settings(config: PreTrainedConfig) -> None:
    """The settings of a composite model are those of its parts, also where they change later, unless a part has others
    of its own."""
    settings = vars(config).get(SETTINGS)
    for key in config.sub_configs:
        part = getattr(config, key, None)
        if isinstance(part, PreTrainedConfig):
            own = vars(part).get(SETTINGS)
            inherited = own is None or isinstance(own, InheritedSettings)
            if inherited or (settings is not None and dict(own) == dict(settings)):
                setattr(part, SETTINGS, InheritedSettings(config))


def power_from_json(power: Any) -> Any:
    """A power as a config holds it: a number, or the words of a ``PowerByLength``."""
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
    """As a config is saved with them."""
    power = settings.get("power")
    return {**settings, "power": power_to_json(power)} if isinstance(power, PowerByLength) else dict(settings)


def read_settings(config: Any) -> dict[str, Any]:
    # A config of transformers takes microseconds to answer getattr, in every layer of every step; a compiler notices a
    # change of what it gives, and not one of vars.
    compiling = torch.compiler.is_compiling()
    found = getattr(config, SETTINGS, None) if compiling else vars(config).get(SETTINGS)
    while isinstance(found, InheritedSettings):
        found = getattr(found.whole, SETTINGS, None) if compiling else vars(found.whole).get(SETTINGS)
    settings = found or {}
    if not isinstance(settings, Mapping):
        check.fail(f"config.{SETTINGS}", f"a dictionary of {WORDS}", repr(settings), TypeError)
    unknown = set(settings) - set(WORDS)
    if unknown:
        check.fail(f"config.{SETTINGS}", f"a dictionary of {WORDS}", f"also {sorted(unknown)}")
    return dict(settings)


def attention_from_config(config: Any, name: str) -> Attention:
    """The attention of that name, with the power and the scale that the config asks for.

    That of the last call, where the settings are equal: every layer of a model asks, for every token.
    """
    if torch.compiler.is_compiling():
        return attention_from_settings(name, read_settings(config))
    found = vars(config).get(SETTINGS)
    words = "" if found is None else repr(found)  # in which 1, 1.0 and True differ, as they do to the checks
    last = _last_asked.get(name)
    if last is None or last[0] != words:
        last = _last_asked[name] = (words, attention_from_settings(name, read_settings(config)))
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
    """As an attention of the catalogue takes it, under the name that configs have for it."""
    check.check_score_scale(score_scale, head_dim=2, bounds=(1,))
    if not score_scale:
        check.fail("score_scale", "None or a number above 0", score_scale)
    return float(score_scale)


def attention_function(name: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """What ``AttentionInterface`` holds under this name."""

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
        **others: Any,
    ) -> tuple[Tensor, Tensor | None]:
        chosen = attention_from_config(module.config, name)
        if is_paged(others):
            check_host_arguments(chosen, query, dropout, scaling, {**others, "cache": None})
            window = others.get("sliding_window")
            out = attend_paged(chosen, module.layer_idx, query, key, value, others, window=window)  # type: ignore[arg-type]
            return out.transpose(1, 2).contiguous(), None
        check_host_arguments(chosen, query, dropout, scaling, others)
        causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
        wanted = output_attentions or attentions_are_recorded()
        if distributed.active() is not None:
            window = others.get("sliding_window")
            out = attend_sharded(chosen, query, key, value, causal, window=window, recorded=wanted)
            return out.transpose(1, 2).contiguous(), None
        sizes = (query.shape[0], query.shape[2], key.shape[2])
        if attention_mask is None and causal:  # whoever made it None: DeepSpeed's sequence parallel drops any mask
            chosen = with_window(chosen, others.get("sliding_window"), sizes[2])
            if sizes[1] == sizes[2] > 1:
                attention_mask = documents_in_positions(others.get("position_ids"), sizes[2])
                attention_mask = None if attention_mask is None else attention_mask.expand(sizes[0], -1, -1, -1)
        attention_mask = with_documents(attention_mask, others, sizes, causal, query.device)
        out = attend(chosen, query, key, value, attention_mask, causal)
        seen = weights(chosen, query, key, attention_mask, causal) if wanted else None
        return out.transpose(1, 2).contiguous(), seen  # it mostly is; JetMoe takes a view of it

    attend_host.__name__ = attend_host.__qualname__ = f"attend_{name.replace('-', '_')}"
    return attend_host


def with_window(chosen: Attention, window: int | None, keys: int) -> Attention:
    """With the window of the host's layer too, where it is shorter than the keys."""
    if window is None or keys <= window or ((own := chosen.window(None)) is not None and own <= window):
        return chosen
    return chosen.but(window=window)


def attentions_are_recorded() -> bool:
    """Some models (GPT-2) do not pass ``output_attentions`` on: transformers then only records what comes back."""
    recorded = output_capturing._active_collector.get()
    return recorded is not None and "attentions" in recorded


def check_host_arguments(
    chosen: Attention, query: Tensor, dropout: float | None, scaling: float | None, others: Mapping[str, Any]
) -> None:
    """Whatever the host model asks for that would otherwise be passed over in silence."""
    if dropout:
        expected = (
            f"0 with attn_implementation={chosen.name!r}, which has no dropout (attention_dropout, attn_pdrop or "
            "attention_probs_dropout_prob of the config)"
        )
        check.fail("dropout of the attention weights", expected, dropout)
    usual = query.shape[-1] ** -0.5
    if scaling is not None and chosen.spec.qk_norm:
        if not scaling > 0:  # any other changes nothing: the length of q does not count
            check.fail("scaling", f"above 0 with attn_implementation={chosen.name!r}", scaling)
    elif scaling is not None and abs(scaling - usual) > 1e-6 * usual:
        expected = f"head_dim ** -0.5 = {usual:.6g} with attn_implementation={chosen.name!r}, which has its own scale"
        check.fail("scaling", expected, scaling)
    refuse_options(chosen.name, others)
    if chosen.spec.learned_scale or chosen.spec.positions != "rope":
        positions = {"alibi": "adds positions of its own", "none": "goes without positions"}
        what = "learns parameters of its own" if chosen.spec.learned_scale else positions[chosen.spec.positions]
        raise ValueError(
            f"attn_implementation={chosen.name!r} {what}, for which a host model has no place; use SoftplusGPTConfig("
            f"attention={chosen.name!r})"
        )


def refuse_options(name: str, options: Mapping[str, Any]) -> None:
    for word, what in UNSUPPORTED_KWARGS.items():
        if options.get(word) is not None:
            check.fail(word, f"None: the attention {name!r} does not have {what}", type(options[word]).__name__)


def build_visibility(
    query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, window: int | None
) -> Visibility:
    """The mask of ``masks.range_mask``, or a boolean one that a user passed, as the op's visibility."""
    batch, heads, t_q, _ = query.shape
    t_k = key.shape[2]
    if mask is None:
        refuse_window_to_both_sides(window, is_causal)
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
            refuse_window_to_both_sides(window, is_causal)
            start = torch.maximum(start, end - window)
        return Visibility(
            t_q,
            t_k,
            query.device,
            key_start=start,
            key_end=end,
            query_key_index=end - 1,
            applied_window=window,
            is_cache=t_q == 1 and t_q < t_k,  # several rows may have ranges that no cache has
        )
    if mask.dtype != torch.bool:
        expected = "None, 2-D (tokens that are padding) or boolean: an additive mask is not supported"
        check.fail("attention_mask", expected, check.describe_tensor(mask))
    dense = check.check_mask(mask[..., :t_k], (batch, heads, t_q, t_k), query.device)
    if window is not None and dense is not None:
        refuse_window_to_both_sides(window, is_causal)
        # A causal row stands on the last key that it sees.
        key = torch.arange(t_k, device=query.device)
        own = torch.where(dense, key, -1).amax(-1, keepdim=True)
        dense = dense & (key > own - window)
    return Visibility(t_q, t_k, query.device, mask=dense, applied_window=window)


def refuse_window_to_both_sides(window: int | None, is_causal: bool) -> None:
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
    """(B, H, T_q, D_v). Shapes come from a model: they are checked all the same, in one place."""
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
    recorded: bool = False,
) -> Tensor:
    """Inside ``distributed.sharded``: rows of one process. What they see is in the record, whatever mask was made."""
    record = distributed.active()
    assert record is not None
    if key.shape[2] != record.rows:
        rows = f"{record.rows} tokens of the record on this process"
        raise ValueError(f"context parallel goes over the {rows} alone, got {key.shape[2]} keys: pass use_cache=False")
    if recorded:
        raise ValueError("no attention weights under context parallel: output_attentions must be False")
    windows = [one for one in (window, chosen.window(None)) if one is not None]
    return distributed.context_parallel_attention(
        query,
        key,
        value,
        record,
        attention=chosen,
        parameters=parameters,
        is_causal=is_causal,
        window=min(windows) if windows else None,
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
