"""Llama, Mistral, Qwen2 and Qwen3 with an extension: transformers' models with our attention and cache."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    MistralConfig,
    MistralForCausalLM,
    MistralModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Model,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
)
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import rotate_half

from softplus_attention import distributed
from softplus_attention import validation as check
from softplus_attention.dispatch import refuse_context_parallel
from softplus_attention.functional import softplus_attention
from softplus_attention.huggingface.attention import UNSUPPORTED_KWARGS
from softplus_attention.huggingface.extension.attention import Reach, two_part_attention
from softplus_attention.huggingface.extension.cache import ExtendedCache, ExtendedLayer, SinkBuffer, reaches_of
from softplus_attention.huggingface.extension.settings import Extension
from softplus_attention.huggingface.masks import PACKING
from softplus_attention.power import power_by_log

IMPLEMENTATION = "softplus-extension"
INITIAL_POWER = 0.6  # times log N; fits of retrieval heads end near it
Table = tuple[Tensor, Tensor]
Part = tuple[Tensor, Tensor, Tensor]  # q, k, v


class Tables(NamedTuple):
    """Cosines and sines for a group of heads. ``far_keys`` is None if far keys are not rotated."""

    queries: Table
    keys: Table
    far_queries: Table
    far_keys: Table | None


class Rotations(NamedTuple):
    """The tables of a forward pass, for heads with a window and for far heads."""

    window: Tables
    far: Tables


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As in all hosts, in the dtype of x."""
    return x * cos[:, None] + rotate_half(x) * sin[:, None]


class FarPositions:
    """Makes the rotations of a forward pass from the host's rotary embedding and from YaRN."""

    def __init__(self, extension: Extension, config: Any, rotary: Any) -> None:
        self.extension, self.rotary, self.config = extension, rotary, config
        self.yarn_frequencies: tuple[Tensor, float] | None = None

    def yarn(self, like: Tensor, positions: Tensor) -> Table:
        if self.yarn_frequencies is None:  # not in __init__, which may run on the meta device
            config = copy.deepcopy(self.config)
            config.rope_parameters = {
                **self.config.rope_parameters,
                "rope_type": "yarn",
                "factor": self.extension.factor,
                "original_max_position_embeddings": self.extension.trained,
            }
            self.yarn_frequencies = ROPE_INIT_FUNCTIONS["yarn"](config, like.device)
        frequencies, scaling = self.yarn_frequencies
        angles = positions[..., None].float() * frequencies.to(like.device, torch.float32)
        angles = torch.cat([angles, angles], -1)
        cos, sin = (function(angles) * scaling for function in (torch.cos, torch.sin))
        return cos.to(like.dtype), sin.to(like.dtype)

    def __call__(self, like: Tensor, positions: Tensor) -> Rotations:
        extension = self.extension

        def at(position: int | Tensor) -> Table:
            if isinstance(position, int):
                position = torch.full((1, 1), position, device=like.device)
            return self.rotary(like, position)

        exact = far_exact = at(positions)
        origin = None if self.rotary.attention_scaling == 1 else at(0)
        far_keys = origin
        if extension.far in ("yarn", "lssar"):
            far_exact = self.yarn(like, positions)
        if extension.far == "group":
            grouped = positions // extension.group
            far_keys = at(grouped)
            far_queries = at(grouped + extension.near - extension.near // extension.group)
        else:
            far_queries = at(extension.near)
        near_queries = far_exact
        if extension.log_n != "none":
            far_queries = self.scale_by_log_n(far_queries, positions)
            near_queries = self.scale_by_log_n(far_exact, positions) if extension.log_n == "all" else far_exact
        window = Tables(exact, exact, at(extension.window), origin)
        return Rotations(window, Tables(near_queries, far_exact, far_queries, far_keys))

    def scale_by_log_n(self, table: Table, positions: Tensor) -> Table:
        """Multiplies scores by log(keys) / log(trained) beyond the trained length."""
        factor = (positions + 1).clamp(min=self.extension.trained).log() / math.log(self.extension.trained)
        cos, sin = (x * factor[..., None].to(x.dtype) for x in table)
        return cos, sin


class HeadGroup:
    """Key heads of a layer with the same reach, and their query heads."""

    def __init__(self, heads: list[int], reach: Reach, is_far: bool, query_heads: int) -> None:
        self.heads, self.reach, self.is_far = heads, reach, is_far
        self.queries = [query_heads * head + number for head in heads for number in range(query_heads)]


def head_groups(extension: Extension, layer: int, heads: int, query_heads: int) -> list[HeadGroup]:
    far = extension.far_heads[layer]
    near = [head for head in range(heads) if head not in far]
    reaches = reaches_of(extension, far, heads)
    members = [(group, is_far) for group, is_far in ((near, False), (far, True)) if group]
    return [
        HeadGroup(group, reach, is_far, query_heads) for (group, is_far), reach in zip(members, reaches, strict=True)
    ]


class ExtendedAttention:
    """Mixin for a host's attention, which keeps its projections."""

    config: Any
    layer_idx: int
    head_dim: int
    num_key_value_groups: int
    scaling: float
    q_proj: Any
    k_proj: Any
    v_proj: Any
    o_proj: Any

    def extend(self, extension: Extension) -> None:
        heads = self.config.num_key_value_heads
        self.groups = head_groups(extension, self.layer_idx, heads, self.num_key_value_groups)
        order = [head for group in self.groups for head in group.queries]
        self.back = sorted(range(len(order)), key=order.__getitem__)
        if extension.far == "lssar" and (far := [group for group in self.groups if group.is_far]):
            self.far_power = nn.Parameter(torch.full((len(far[0].queries),), INITIAL_POWER))

    def forward(
        self,
        hidden_states: Tensor,
        past_key_values: ExtendedCache | None = None,
        rotations: Rotations | None = None,
        starts: list[int] | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        assert rotations is not None, "ExtendedAttention works only in an ExtendedModel"
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k = self.q_proj(hidden_states).view(shape), self.k_proj(hidden_states).view(shape)
        if (q_norm := getattr(self, "q_norm", None)) is not None:  # Qwen3
            q, k = q_norm(q), getattr(self, "k_norm")(k)  # noqa: B009
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), self.v_proj(hidden_states).view(shape).transpose(1, 2)
        layer = None if past_key_values is None else past_key_values.layers[self.layer_idx]
        one_group = len(self.groups) == 1
        parts = []
        for number, group in enumerate(self.groups):
            qkv = (q, k, v) if one_group else (q[:, group.queries], k[:, group.heads], v[:, group.heads])
            tables = rotations.far if group.is_far else rotations.window
            power = self.far_power if group.is_far and hasattr(self, "far_power") else None
            parts.append(attend_group(group, *qkv, tables, layer, number, starts, self.scaling, power))
        out = parts[0] if one_group else torch.cat(parts, 1)[:, self.back]
        return self.o_proj(out.transpose(1, 2).flatten(2)), None


def attend_group(
    group: HeadGroup,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tables: Tables,
    layer: ExtendedLayer | None,
    number: int,
    starts: list[int] | None,
    scale: float,
    power: Tensor | None,
) -> Tensor:
    """With ``power`` (heads,) it is LSSAR over all keys; a row with N keys has the power ``power`` * log N."""
    reach, rows = group.reach, q.shape[2]
    near_q, near_k, near_v = rotate(q, *tables.queries), rotate(k, *tables.keys), v
    far_k, far_v = (k if tables.far_keys is None else rotate(k, *tables.far_keys)), v
    near_buffer = None if layer is None else layer.near[number]
    first = 0 if near_buffer is None else near_buffer.end
    end = first + rows
    if near_buffer is not None:
        is_step = rows == 1 and (starts is None or end - max(starts) >= reach.near)  # sees the whole buffer
        new = near_k, near_v
        if first and not is_step:  # read before the append overwrites the oldest keys
            near_k, near_v = (torch.cat(pair, 2) for pair in zip(near_buffer.ordered(), new, strict=True))
        near_buffer.append(*new)
        if is_step:
            near_k, near_v = near_buffer.seen()
    far_buffer = None if layer is None else layer.far[number]
    if isinstance(far_buffer, SinkBuffer):
        far_buffer.append(far_k, far_v, starts)
        far_k, far_v = far_buffer.raw()
    elif far_buffer is not None:
        far_buffer.append(far_k, far_v)
        far_k, far_v = far_buffer.raw()
    sees_far = reach.most_far and end > reach.near
    far = (rotate(q, *tables.far_queries), far_k, far_v) if sees_far else None
    near = near_q, near_k, near_v
    attend = two_part_attention if power is None else functools.partial(lssar_attention, power=power)
    if starts is None:
        return attend(near, far, first, reach, scale)
    return attend_padded(attend, near, far, first, reach, scale, starts, isinstance(far_buffer, SinkBuffer))


def lssar_attention(near: Part, far: Part | None, first: int, reach: Reach, scale: float, power: Tensor) -> Tensor:
    """Called like ``two_part_attention``; all keys are near keys."""
    q, k, v = near
    counts = torch.arange(first + 1, first + q.shape[2] + 1, device=q.device)[None, None]
    rows = power_by_log(power, counts)
    return softplus_attention(q, k, v, is_causal=True, enable_gqa=True, power=rows)


def attend_padded(
    attend: Callable[..., Tensor],
    near: Part,
    far: Part | None,
    first: int,
    reach: Reach,
    scale: float,
    starts: list[int],
    has_sink: bool,
) -> Tensor:
    """Left-padded sequences that begin at ``starts``, batched by equal start; rows of padding are zero."""
    rows = near[0].shape[2]
    end = first + rows
    out = torch.zeros_like(near[0])
    for start in sorted({*starts}):
        chosen = [number for number, one in enumerate(starts) if one == start]
        padding, length = max(0, start - first), end - start
        if padding >= rows:
            continue
        q, k, v = (x[chosen] for x in near)
        own = q[:, :, padding:], k[:, :, -length:], v[:, :, -length:]
        own_far = None
        if far is not None and length > reach.near:
            begin = 0 if has_sink else start  # sinks are stored from each sequence's start
            far_q, far_k, far_v = (x[chosen] for x in far)
            own_far = far_q[:, :, padding:], far_k[:, :, begin:], far_v[:, :, begin:]
        out[chosen, :, padding:] = attend(own, own_far, max(0, first - start), reach, scale)
    return out


class NoTensorParallel:
    @classmethod
    def maybe_distribute_model(cls, model: Any, distributed_config: Any, *args: Any) -> Any:
        """The host's plan would divide heads without regard to their two kinds."""
        if (getattr(distributed_config, "tp_size", 1) or 1) > 1:
            check.fail("tp_size", "1: the heads of an extended model are not divided", distributed_config.tp_size)
        return super().maybe_distribute_model(model, distributed_config, *args)  # type: ignore[misc]


class ExtendedModel(NoTensorParallel):
    """Mixin for a host's decoder, with our attention and cache."""

    attention_class: type[Any]
    config: Any
    layers: Any
    rotary_emb: Any
    embed_tokens: Any
    training: bool

    def extend(self) -> None:
        self.extension = Extension.from_config(self.config)
        for number, layer in enumerate(self.layers):
            layer.self_attn = self.attention_class(self.config, number)
            layer.self_attn.extend(self.extension)
        self.far_positions = FarPositions(self.extension, self.config, self.rotary_emb)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: ExtendedCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **options: Any,
    ) -> Any:
        refuse_options(options)
        refuse_context_parallel()
        if distributed.active() is not None:
            raise RuntimeError("extended models do not support `sharded`: they attend only to the process's own tokens")
        if self.training and (dropout := self.config.attention_dropout):
            check.fail("attention_dropout", "0 in the config: extended models have no dropout", dropout)
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("exactly one of `input_ids` and `inputs_embeds` must be given")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        use_cache = self.config.use_cache if use_cache is None else use_cache
        if past_key_values is not None and not isinstance(past_key_values, ExtendedCache):
            check.fail("past_key_values", "None or an ExtendedCache", type(past_key_values).__name__)
        if use_cache and past_key_values is None:
            past_key_values = ExtendedCache(self.config)
        seen = 0 if past_key_values is None else past_key_values.get_seq_length()
        length = inputs_embeds.shape[1]
        starts = sequence_starts(attention_mask, seen + length, past_key_values is not None)
        if position_ids is None:
            position_ids = torch.arange(seen, seen + length, device=inputs_embeds.device)[None]
        elif length > 1:
            refuse_packed(position_ids, starts, seen)
        return super().forward(  # type: ignore[misc]
            attention_mask=None,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            rotations=self.far_positions(inputs_embeds, position_ids),
            starts=starts,
            **options,
        )


def refuse_options(options: dict[str, Any]) -> None:
    for option, feature in {**UNSUPPORTED_KWARGS, **dict.fromkeys(PACKING, "packed documents")}.items():
        if options.get(option) is not None:
            check.fail(option, f"None: extended models do not have {feature}", type(options[option]).__name__)
    if options.get("output_attentions"):
        check.fail("output_attentions", "False: extended models do not compute attention weights", True)


def sequence_starts(mask: Tensor | None, length: int, has_cache: bool) -> list[int] | None:
    """The position where each sequence begins; None if all begin at 0."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        check.fail("attention_mask", "2-D, 1 for tokens and 0 for padding on the left", check.describe_tensor(mask))
    mask = mask[:, :length].bool()
    starts = length - mask.flip(1).to(torch.int32).cumprod(1).sum(1)
    if not bool((mask.sum(1) == length - starts).all()) or mask.shape[1] < length:
        if not has_cache and mask.shape[1] == length and bool((mask.int().diff(dim=1) <= 0).all()):
            return None  # padding on the right, which causal rows do not see
        check.fail("attention_mask", "padded only on the left, or without a cache only on the right", "another mask")
    found = starts.tolist()  # one wait for the device
    return found if any(found) else None


def refuse_packed(position_ids: Tensor, starts: list[int] | None, seen: int) -> None:
    steps = position_ids.diff(dim=-1) == 1
    for row, start in enumerate(starts or [0] * len(steps)):
        if not bool(steps[min(row, len(steps) - 1), max(0, start - seen) :].all()):
            check.fail("position_ids", "consecutive: extended models do not have packed documents", "other positions")


class ExtendedForCausalLM(NoTensorParallel):
    """Mixin for a host's causal language model."""

    config: Any

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:
        if requested_attention not in (None, IMPLEMENTATION, "sdpa", "eager"):
            expected = f"None: the attention is part of {type(self).__name__}"
            check.fail("attn_implementation", expected, repr(requested_attention))
        return IMPLEMENTATION

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any) -> None:
        kind = generation_config.cache_implementation
        if kind not in (None, "dynamic", "dynamic_full"):
            check.fail("cache_implementation", "None: an extended model uses an ExtendedCache", repr(kind))
        if model_kwargs.get("past_key_values") is None and generation_config.use_cache is not False:
            model_kwargs["past_key_values"] = ExtendedCache(self.config)
            if generation_config.is_assistant:
                model_kwargs["past_key_values"].activate_past_recording()


HOSTS = {
    "llama": (LlamaConfig, LlamaModel, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralModel, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2Model, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3Model, Qwen3ForCausalLM),
}
PREFIX = "softplus_extended_"
CLASSES: dict[str, tuple[type[Any], type[Any], type[Any]]] = {}


def make_classes(host: str) -> tuple[type[Any], type[Any], type[Any]]:
    """Make a host's config, decoder and causal language model classes, as attributes of this module."""
    host_config, host_model, host_lm = HOSTS[host]
    name = host_config.__name__.removesuffix("Config")
    names = [f"Extended{name}{end}" for end in ("Config", "Model", "ForCausalLM", "Attention")]

    def model_init(self: Any, config: Any) -> None:
        host_model.__init__(self, config)
        self.extend()
        self.post_init()

    def lm_init(self: Any, config: Any) -> None:
        super(host_lm, self).__init__(config)  # as the host's, with our decoder
        self.model = model_class(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def make(name: str, bases: tuple[type, ...], body: dict[str, Any]) -> Any:
        globals()[name] = type(name, bases, {"__module__": __name__, "__qualname__": name, **body})
        return globals()[name]

    annotated = {"__annotations__": {"extension": dict | None}, "extension": None, "model_type": PREFIX + host}
    config_class = globals()[names[0]] = strict(make(names[0], (host_config,), annotated))
    host_attention = next(
        kind
        for kind in vars(__import__(host_model.__module__, fromlist=["x"])).values()
        if isinstance(kind, type) and kind.__name__ == f"{name}Attention"
    )
    shared = {"config_class": config_class, "_supports_flash_attn": False, "_can_compile_fullgraph": False}
    shared["get_correct_attn_implementation"] = ExtendedForCausalLM.get_correct_attn_implementation
    attention_class = make(names[3], (ExtendedAttention, host_attention), {})
    model_body = {"__init__": model_init, "attention_class": attention_class, **shared}
    model_class = make(names[1], (ExtendedModel, host_model), model_body)
    lm_class = make(names[2], (ExtendedForCausalLM, host_lm), {"__init__": lm_init, **shared})
    return config_class, model_class, lm_class


def no_mask(*args: Any, **kwargs: Any) -> None:
    """No mask: the attention itself decides what each row sees."""


AttentionMaskInterface.register(IMPLEMENTATION, no_mask)
for _host in HOSTS:
    CLASSES[_host] = make_classes(_host)


def extended(model: Any, extension: Extension) -> Any:
    """A model with the extension that shares the weights of ``model``."""
    host = model.config.model_type
    if host not in HOSTS:
        check.fail("model", f"one of the types {', '.join(HOSTS)}", repr(host))
    config_class, _, lm_class = CLASSES[host]
    kwargs = {key: value for key, value in model.config.to_dict().items() if key not in ("model_type", "architectures")}
    config = config_class(**{**kwargs, "extension": extension.to_json(), "max_position_embeddings": extension.length})
    with torch.device("meta"):
        result = lm_class(config)
    powers = {
        name: torch.full(x.shape, INITIAL_POWER, device=model.device)
        for name, x in result.state_dict().items()
        if name.endswith("far_power")
    }
    result.load_state_dict({**model.state_dict(), **powers}, assign=True)
    result.tie_weights()
    # Buffers of the rotary embedding are not in the state dict.
    result.model.rotary_emb = model.model.rotary_emb
    result.model.far_positions = FarPositions(result.model.extension, result.config, result.model.rotary_emb)
    result.generation_config = model.generation_config
    return result.eval()
