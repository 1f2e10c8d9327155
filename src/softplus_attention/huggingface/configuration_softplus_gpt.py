"""The configuration of SoftplusGPT."""

from __future__ import annotations

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers.activations import ACT2FN
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RopeParameters

from softplus_attention import validation as check
from softplus_attention.attentions.catalog import Attention, attention
from softplus_attention.huggingface.attention import checked_score_scale, power_from_json, power_to_json
from softplus_attention.power import RAW_NAMES, PowerByLength, is_learned

# Options of other models' configs that this one does not have, or has under another name.
FOREIGN = {
    "attention_dropout": "0: this model has no dropout",
    "attn_pdrop": "0: this model has no dropout",
    "resid_pdrop": "0: this model has no dropout",
    "embd_pdrop": "0: this model has no dropout",
    "hidden_dropout": "0: this model has no dropout",
    "dropout": "0: this model has no dropout",
    "n_layer": "left out; here it is `num_hidden_layers`",
    "num_layers": "left out; here it is `num_hidden_layers`",
    "n_head": "left out; here it is `num_attention_heads`",
    "num_heads": "left out; here it is `num_attention_heads`",
    "n_embd": "left out; here it is `hidden_size`",
    "n_positions": "left out; here it is `max_position_embeddings`",
    "attn_logit_softcapping": "None: scores are not capped",
    "final_logit_softcapping": "None: logits are not capped",
    "sliding_window": "left out; here it is `window`",
    "softplus_attention": "left out; here they are `power` and `score_scale`",
}


@strict
class SoftplusGPTConfig(PreTrainedConfig):
    r"""GPT-2 with rotary positions and any attention of the catalogue. The defaults are GPT-2 small, 124M parameters.

    Args:
        vocab_size: GPT-2's 50257 tokens, padded to a multiple of 64.
        hidden_size, num_hidden_layers, num_attention_heads: the size. By default ``intermediate_size`` is
            4 * hidden_size, ``head_dim`` hidden_size / heads, and ``num_key_value_heads`` the number of heads.
        attention: a name of ``softplus_attention.catalog`` ("lssar", "lssa", "softmax", "softmax-qknorm-logn", ...).
        power: replaces the attention's sharpening power: a number >= 1, ``{"base": 15, "slope": 4, "n0": 1024}`` for
            one that grows with the number of visible keys, "learned" (one per head and layer) or "learned-log" (one
            factor of log N per head and layer).
        score_scale: replaces log(head_dim) in the scores.
        window: each token sees itself and the ``window - 1`` tokens before it.
        global_every: every n-th layer sees all tokens and has no rotary positions; the others use the window. Then only
            layers without positions see distances beyond those of training.
        local_attention: the attention of the layers with the window, if it differs.
        positions: "rope" or "none", to override the attention's own choice.
        rope_parameters: transformers' dictionary: ``rope_theta``, and ``rope_type`` "default", "linear", "dynamic"
            (NTK), "yarn", ...
        max_position_embeddings: the training length. It limits nothing; RoPE scaling types start from it.
        bias: whether linear layers and norms have a bias.
    """

    model_type = "softplus_gpt"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012  transformers' own form

    vocab_size: int = 50304
    hidden_size: int = 768
    intermediate_size: int | None = None
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "gelu"
    max_position_embeddings: int = 1024
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-5
    bias: bool = False
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = 50256
    eos_token_id: int | list[int] | None = 50256
    tie_word_embeddings: bool = True
    rope_parameters: RopeParameters | dict | None = None
    attention: str = "lssar"
    power: int | float | dict | str | None = None
    score_scale: float | None = None
    window: int | None = None
    global_every: int | None = None
    local_attention: str | None = None
    positions: str | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        for name, expected in FOREIGN.items():
            if kwargs.get(name):
                check.fail(name, expected, kwargs[name])
        if isinstance(self.power, PowerByLength):
            self.power = power_to_json(self.power)
        if self.num_attention_heads < 1:
            check.fail("num_attention_heads", "an int >= 1", self.num_attention_heads)
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.intermediate_size is None:
            self.intermediate_size = 4 * self.hidden_size
        super().__post_init__(**kwargs)

    def tensor_parallel_plan(self) -> dict[str, str]:
        """The plan that transformers reads: heads are divided, with their learned parameters."""
        layers = [self.attention_of_layer(layer) for layer in range(self.num_hidden_layers)]
        learned = {name for chosen in layers for name in chosen.learned_parameters(1)}
        if is_learned(self.power):
            learned.add(RAW_NAMES[self.power])
        columns = [f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", *sorted(learned))]
        plan = dict.fromkeys([*columns, "mlp.up_proj"], "colwise")
        plan |= dict.fromkeys(["self_attn.o_proj", "mlp.down_proj"], "rowwise")
        return {f"layers.*.{name}": style for name, style in plan.items()}

    def validate_architecture(self) -> None:
        """Called by ``@strict``."""
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if self.head_dim * heads != self.hidden_size and self.hidden_size % heads:
            check.fail("hidden_size", f"a multiple of `num_attention_heads`, {heads}", self.hidden_size)
        if kv_heads < 1 or heads % kv_heads:
            check.fail("num_key_value_heads", f"a divisor of `num_attention_heads`, {heads}", kv_heads)
        if self.positions not in (None, "rope", "none"):
            check.fail("positions", "None, 'rope' or 'none'", repr(self.positions))
        if self.hidden_act not in ACT2FN:
            check.fail("hidden_act", f"one of {', '.join(sorted(ACT2FN))}", repr(self.hidden_act))
        rope_type = (self.rope_parameters or {}).get("rope_type", "default")
        if rope_type not in ("default", *ROPE_INIT_FUNCTIONS):
            check.fail("rope_type", f"one of default, {', '.join(ROPE_INIT_FUNCTIONS)}", repr(rope_type))
        self.check_layers()
        layers = [self.attention_of_layer(layer) for layer in range(self.num_hidden_layers)]
        if self.head_dim % 2 and any(chosen.spec.positions == "rope" for chosen in layers):
            check.fail("head_dim", "even where rotary positions are used", self.head_dim)
        self.base_model_tp_plan = self.tensor_parallel_plan()

    def check_layers(self) -> None:
        every = self.global_every
        if every is None:
            if self.local_attention is not None:
                check.fail("local_attention", "None without `global_every`", repr(self.local_attention))
            return
        if not 2 <= every <= self.num_hidden_layers:
            check.fail("global_every", f"from 2 to the number of layers, {self.num_hidden_layers}", every)
        if self.window is None:
            check.fail("window", "a number of tokens if `global_every` is given", None)
        if self.local_attention is not None and self.score_scale is not None:
            expected = "None if `local_attention` is given: each of the two attentions has its own scale"
            check.fail("score_scale", expected, self.score_scale)

    def validate_output_attentions(self) -> None:
        """transformers would require "eager" here; every attention of this model can return its weights."""

    def is_global(self, layer: int) -> bool:
        return self.global_every is None or (layer + 1) % self.global_every == 0

    def attention_of_layer(self, layer: int) -> Attention:
        """The attention of the layer, counted from 0."""
        chosen = self.chosen_attention()
        if self.global_every is None:
            return chosen
        if self.is_global(layer):
            return chosen.but(positions="none", window=None)
        local = chosen if self.local_attention is None else attention(self.local_attention)
        positions = {} if self.positions is None else {"positions": self.positions}
        return local.but(window=self.window, **positions)

    def chosen_attention(self) -> Attention:
        """The attention of all layers, or with ``global_every`` of the global ones."""
        window = self.window if self.global_every is None else None
        scale = None if self.score_scale is None else checked_score_scale(self.score_scale)
        overrides: dict[str, Any] = {"scale": scale, "window": window, "positions": self.positions}
        changes = {name: value for name, value in overrides.items() if value is not None}
        if isinstance(self.power, str) and not is_learned(self.power):
            forms = "a number >= 1, {'base': ..., 'slope': ..., 'n0': ...}, 'learned' or 'learned-log'"
            check.fail("power", forms, repr(self.power))
        chosen = attention(self.attention, **changes)
        if self.power is not None and chosen.spec.second_stage == "none":
            expected = f"None: {self.attention!r} has no second stage and so no power"
            check.fail("power", expected, repr(self.power))
        if self.power is None or is_learned(self.power):
            return chosen
        return attention(self.attention, **changes, power=power_from_json(self.power))


__all__ = ["SoftplusGPTConfig"]
