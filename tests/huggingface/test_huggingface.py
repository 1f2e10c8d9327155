"""Any model by name: a text has the same logits however it is passed to the model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from huggingface_models import FAMILIES, small_model, token_rows
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    BertConfig,
    BertModel,
    BloomConfig,
    CodeGenConfig,
    DynamicCache,
    Gemma2Config,
    GptOssConfig,
    OPTConfig,
    StaticCache,
)
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    create_causal_mask,
    packed_sequence_mask_function,
    sdpa_mask,
    sliding_window_causal_mask_function,
)
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from softplus_attention import PowerByLength, softplus_attention
from softplus_attention.catalog import attention
from softplus_attention.huggingface import set_power, use_attention
from softplus_attention.huggingface.masks import end_of_document, first_of_document, range_mask

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
CLOSE = {"atol": 1e-4, "rtol": 1e-4}
GREEDY = {"max_new_tokens": 12, "do_sample": False}
SHORT, LONG = 25, 40
DOCUMENTS = (torch.arange(LONG)[None] >= torch.tensor([[SHORT], [11]])).long()


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest):
    with torch.no_grad():
        yield small_model(request.param)


def left_padded() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two sequences, the second shorter: ids, attention mask, positions."""
    ids, mask = token_rows(2, LONG), torch.ones(2, LONG, dtype=torch.long)
    ids[1, : LONG - SHORT], mask[1, : LONG - SHORT] = 0, 0
    return ids, mask, (mask.cumsum(-1) - 1).clamp(min=0)


def padded_difference(model) -> float:
    ids, mask, positions = left_padded()
    padded = model(ids, attention_mask=mask, position_ids=positions).logits[1, -SHORT:]
    return (padded - model(ids[1:, -SHORT:]).logits[0]).abs().max().item()


def cached_difference(model, cache) -> float:
    ids = token_rows(2, LONG)
    steps = [
        model(part, past_key_values=cache, use_cache=True).logits for part in ids.split([17, 1, 1, LONG - 19], dim=1)
    ]
    return (torch.cat(steps, 1) - model(ids).logits).abs().max().item()


def packed_difference(model) -> float:
    ids = token_rows(1, LONG)
    positions = torch.cat([torch.arange(SHORT), torch.arange(LONG - SHORT)])[None]
    packed = model(ids, position_ids=positions, use_cache=False).logits
    apart = torch.cat([model(ids[:, :SHORT]).logits, model(ids[:, SHORT:]).logits], 1)
    return (packed - apart).abs().max().item()


@contextlib.contextmanager
def no_mask_function(name: str) -> Iterator[None]:
    known = ALL_MASK_ATTENTION_FUNCTIONS._global_mapping
    kept = known.pop(name)
    try:
        yield
    finally:
        known[name] = kept


class TestSameText:
    def test_left_padding_changes_nothing(self, model):
        assert padded_difference(model) < 1e-4

    def test_right_padding_and_holes_change_nothing(self, model):
        ids, mask = token_rows(2, LONG), torch.ones(2, LONG, dtype=torch.long)
        mask[1, SHORT:] = 0
        padded = model(ids, attention_mask=mask).logits[1, :SHORT]
        torch.testing.assert_close(padded, model(ids[1:, :SHORT]).logits[0], **CLOSE)
        # Masking a token in the middle equals leaving it out, at the same positions.
        mask = torch.ones(1, LONG, dtype=torch.long)
        mask[0, 20] = 0
        rest = torch.tensor([i for i in range(LONG) if i != 20])
        with_hole = model(ids[:1], attention_mask=mask).logits[0, rest]
        if getattr(model.config, "sliding_window", None) is None:
            without = model(ids[:1, rest], position_ids=rest[None], attention_mask=torch.ones(1, LONG - 1)).logits[0]
            torch.testing.assert_close(with_hole, without, **CLOSE)

    @pytest.mark.parametrize("cache", ["dynamic", "static"])
    def test_prefill_in_chunks_and_steps(self, model, cache):
        held = DynamicCache(config=model.config)
        if cache == "static":
            held = StaticCache(config=model.config, max_cache_len=LONG + 24)
        assert cached_difference(model, held) < 1e-4

    def test_packed_documents_are_apart(self, model):
        assert packed_difference(model) < 1e-4

    def test_inference_mode(self, model):
        """Inference tensors have no version counter: documents found in one call must not be reused in another."""
        with torch.inference_mode():
            assert packed_difference(model) < 1e-4
            ids = token_rows(2, LONG)
            inferred = model(ids, use_cache=False).logits
        torch.testing.assert_close(inferred.clone(), model(ids.clone(), use_cache=False).logits)

    def test_generation_modes_agree(self, model):
        ids, mask, _ = left_padded()
        expected = model.generate(ids, attention_mask=mask, **GREEDY)
        for way in ({"use_cache": False}, {"cache_implementation": "static"}):
            assert model.generate(ids, attention_mask=mask, **GREEDY, **way).equal(expected), way
        beams = [
            model.generate(ids, attention_mask=mask, num_beams=3, use_cache=cache, **GREEDY) for cache in (True, False)
        ]
        assert beams[0].equal(beams[1])
        alone = model.generate(ids[:1], **GREEDY)
        assert model.generate(ids[:1], prompt_lookup_num_tokens=3, **GREEDY).equal(alone)
        assert alone.equal(expected[:1])

    def test_above_tests_fail_without_masks(self, model, monkeypatch):
        """Control: without the mask function and without packed positions, the differences above are large."""
        with no_mask_function("lssar"):
            monkeypatch.setattr("softplus_attention.huggingface.attention.documents_in_positions", lambda *_: None)
            assert padded_difference(model) > 1e-2
            assert packed_difference(model) > 1e-2
            static = StaticCache(config=model.config, max_cache_len=LONG + 24)
            # A host's window is applied even without a mask, and excludes the unfilled part of a static cache.
            assert getattr(model.config, "sliding_window", None) or cached_difference(model, static) > 1e-2


class TestMasks:
    PATTERNS = (
        {},
        {"mask_function": sliding_window_causal_mask_function(7)},
        {"mask_function": bidirectional_mask_function},
        {"mask_function": and_masks(causal_mask_function, packed_sequence_mask_function(DOCUMENTS))},
        {"q_offset": 11, "q_length": 5},
        {"q_offset": 30, "q_length": 3, "kv_offset": 24, "kv_length": 9},
    )

    @pytest.mark.parametrize("padded", [False, True])
    @pytest.mark.parametrize("pattern", PATTERNS, ids=["causal", "window", "full", "packed", "static", "sliding cache"])
    def test_ranges_equal_the_dense_mask(self, pattern, padded):
        padding = left_padded()[1].bool() if padded else None
        kwargs = {"batch_size": 2, "q_length": LONG, "kv_length": LONG, "attention_mask": padding, **pattern}
        dense = sdpa_mask(**kwargs, allow_is_causal_skip=False)
        ranges = range_mask(**kwargs)
        if ranges is None:
            ranges = range_mask(**{**kwargs, "q_offset": torch.tensor(kwargs.get("q_offset", 0))})
        key = torch.arange(kwargs["kv_length"])
        visible = (key >= ranges[..., :1]) & (key < ranges[..., 1:])
        assert ranges.shape == (2, 1, kwargs["q_length"], 2)
        assert visible.equal(dense.expand_as(visible))

    def test_plain_causal_needs_no_mask(self):
        config = small_model("llama").config
        embeds = torch.zeros(2, LONG, 64)
        assert create_causal_mask(config, embeds, None, None) is None
        assert create_causal_mask(config, embeds, torch.ones(2, LONG), None) is None
        positions = torch.arange(LONG)[None]
        assert create_causal_mask(config, embeds, None, None, positions) is None

    def test_bounds_of_documents(self):
        documents = torch.tensor([[0, 0, 0, 1, 2, 2], [0, 0, 0, 0, 0, 0]])
        assert first_of_document(documents).tolist() == [[0, 0, 0, 3, 4, 4], [0] * 6]
        assert end_of_document(documents).tolist() == [[3, 3, 3, 4, 6, 6], [6] * 6]

    def test_custom_pattern_stays_dense(self):
        config = small_model("llama").config

        def every_other(batch, head, row, key):
            return (key % 2) == 0

        mask = create_causal_mask(config, torch.zeros(1, 8, 64), None, None, and_mask_function=every_other)
        assert mask.dtype == torch.bool
        assert mask[0, 0, 5].tolist() == [True, False, True, False, True, False, False, False]

    def test_bidirectional(self):
        """config.is_causal = False: every token sees all tokens but padding."""
        model = small_model("llama")
        model.config.is_causal = False
        for layer in model.model.layers:
            layer.self_attn.is_causal = False
        ids, mask, _ = left_padded()
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        with torch.no_grad():
            both = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
            alone = model(ids[1:, -SHORT:], use_cache=False).logits
            later = ids.clone()
            later[0, -1] = (later[0, -1] + 1) % 100 + 3
            changed = model(later, attention_mask=mask, position_ids=positions, use_cache=False).logits
        torch.testing.assert_close(both[1, -SHORT:], alone[0], **CLOSE)
        assert (changed[0, 0] - both[0, 0]).abs().max() > 1e-3


class TestAttention:
    @pytest.mark.parametrize("name", ["lssar", "lssa", "softmax", "softmax-qknorm-logn"])
    def test_the_layer_runs_the_op(self, name):
        """The first layer's attention, step by step: projections, RoPE, then the op."""
        model = small_model("llama", name)
        layer, seen = model.model.layers[0].self_attn, {}
        layer.o_proj.register_forward_pre_hook(lambda _, inputs: seen.update(heads=inputs[0]))
        layer.register_forward_pre_hook(lambda _, args, kw: seen.update(kw), with_kwargs=True)
        with torch.no_grad():
            model(token_rows(2, LONG))
            x = seen["hidden_states"]
            q, k, v = (p(x).view(2, LONG, -1, 16).transpose(1, 2) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
            q, k = apply_rotary_pos_emb(q, k, *seen["position_embeddings"])
            expected = attention(name)(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)
        torch.testing.assert_close(seen["heads"], expected, **CLOSE)

    def test_gradients_reach_every_weight(self, model):
        with torch.enable_grad():
            ids = token_rows(2, 16)
            model.train()
            model(ids, labels=ids).loss.backward()
        missing = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
        assert missing == []

    def test_weights_on_request(self, model):
        ids = token_rows(2, 20)
        plain = model(ids)
        out = model(ids, output_attentions=True)
        assert len(out.attentions) == 2
        assert out.attentions[0].shape == (2, 4, 20, 20)
        torch.testing.assert_close(out.attentions[1].sum(-1), torch.ones(2, 4, 20), **CLOSE)
        assert out.attentions[0].triu(1).abs().max() == 0
        torch.testing.assert_close(out.logits, plain.logits)

    def test_power_comes_from_the_config(self):
        model, ids = small_model("llama"), token_rows(1, LONG)
        with torch.no_grad():
            usual = model(ids).logits
            set_power(model, 15)
            assert model(ids).logits.equal(usual)
            set_power(model, 3)
            three = model(ids).logits
            set_power(model, PowerByLength(3, 2, n0=8))
            growing = model(ids).logits
        assert (three - usual).abs().max() > 1e-3
        torch.testing.assert_close(growing[:, :8], three[:, :8], atol=1e-5, rtol=1e-4)
        assert (growing - three)[:, 9:].abs().max() > 1e-3
        assert model.config.softplus_attention == {"power": {"base": 3, "slope": 2, "n0": 8}}

    def test_swapping_by_name_equals_building_by_name(self):
        built = small_model("qwen3", "lssar")
        swapped = small_model("qwen3", "sdpa")
        ids = token_rows(1, LONG)
        with torch.no_grad():
            before = swapped(ids).logits
            use_attention(swapped, "lssar", power=7, score_scale=2.0)
            assert swapped.config.softplus_attention == {"power": 7, "score_scale": 2.0}
            assert (swapped(ids).logits - before).abs().max() > 1e-3
            use_attention(swapped, "lssar")
            assert swapped(ids).logits.equal(built(ids).logits)

    def test_score_scale_matches_the_op(self):
        q, k, v = torch.randn(3, 1, 4, 10, 16).unbind(0)
        model = small_model("llama")
        model.config.softplus_attention = {"score_scale": 1.5, "power": 4}
        fn = AttentionInterface()["lssar"]
        out, _ = fn(model.model.layers[0].self_attn, q, k, v, None, scaling=0.25)
        expected = softplus_attention(q, k, v, power=4, score_scale=1.5, is_causal=True)
        torch.testing.assert_close(out.transpose(1, 2), expected)


class TestCompiled:
    @pytest.mark.parametrize(
        "family", [pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "mistral")] + ["softplus-gpt"]
    )
    def test_fullgraph(self, family):
        torch._dynamo.reset()
        model = small_model(family, layers=1)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        for length in (LONG, 33):
            ids = token_rows(2, length)
            ours, eager = (m(ids, labels=ids, use_cache=False).loss for m in (compiled, model))
            grads = [torch.autograd.grad(loss, list(model.parameters())) for loss in (ours, eager)]
            torch.testing.assert_close(ours, eager)
            torch.testing.assert_close(grads[0], grads[1])
        ids, mask, positions = left_padded()
        with torch.no_grad():
            padded = [m(ids, attention_mask=mask, position_ids=positions, use_cache=False) for m in (compiled, model)]
            torch.testing.assert_close(padded[0].logits[mask.bool()], padded[1].logits[mask.bool()], **CLOSE)
            packed = torch.cat([torch.arange(SHORT), torch.arange(LONG - SHORT)])[None].expand(2, -1).contiguous()
            ours, eager = (m(ids, position_ids=packed, use_cache=False).logits for m in (compiled, model))
            torch.testing.assert_close(ours, eager, **CLOSE)
            before = compiled(ids, use_cache=False).logits
            set_power(model, 3)
            after = compiled(ids, use_cache=False).logits
        assert (after - before).abs().max() > 1e-3
        torch._dynamo.reset()


class TestRefusals:
    def test_unknown_name(self):
        with pytest.raises(ValueError, match="lssarr"):
            small_model("llama", "lssarr")

    def test_dropout_in_training(self):
        model = small_model("llama").train()
        model.config.attention_dropout = 0.1
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.1
        with pytest.raises(ValueError, match=r"dropout.*attention_dropout"):
            model(token_rows(1, 8))
        model.eval()
        model(token_rows(1, 8))

    def test_scaling_of_the_host(self):
        """It must be the usual one for dot products; for cosines it has no effect."""
        model = small_model("llama", "sigmoid")
        model.model.layers[1].self_attn.scaling = 0.1
        with pytest.raises(ValueError, match=r"`scaling` must be head_dim \*\* -0.5 = 0.25.*got 0.1"):
            model(token_rows(1, 8))
        model = small_model("llama")
        before = model(token_rows(1, 8)).logits
        model.model.layers[1].self_attn.scaling = 0.1
        assert model(token_rows(1, 8)).logits.equal(before)
        model.model.layers[1].self_attn.scaling = -0.1
        with pytest.raises(ValueError, match=r"`scaling` must be above 0 .*got -0.1"):
            model(token_rows(1, 8))

    def test_a_host_that_scales_queries_itself(self):
        size = {"hidden_size": 32, "num_hidden_layers": 2, "ffn_dim": 64, "num_attention_heads": 2, "vocab_size": 128}
        config = OPTConfig(**size, word_embed_proj_dim=32, max_position_embeddings=64, attention_dropout=0.0)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="lssar").eval()
        whole = model(token_rows(1, 12)).logits
        torch.testing.assert_close(model(token_rows(1, 12)[:, :7]).logits, whole[:, :7])

    @pytest.mark.parametrize("option", ["softcap", "s_aux", "position_bias", "cache", "block_indices"])
    @pytest.mark.parametrize("family", ["llama", "softplus-gpt"])
    def test_unsupported_features(self, option, family):
        model = small_model(family)
        with pytest.raises(ValueError, match=f"`{option}` must be None"):
            model(token_rows(1, 8), **{option: torch.ones(1)}, use_cache=False)

    @pytest.mark.parametrize(
        ("kind", "kwargs", "option"),
        [
            (Gemma2Config, {"query_pre_attn_scalar": 16}, "softcap"),
            (GptOssConfig, {"num_local_experts": 2, "num_experts_per_tok": 1}, "s_aux"),
        ],
    )
    def test_soft_capping_and_sinks(self, kind, kwargs, option):
        size = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16}
        config = kind(**size, num_key_value_heads=2, intermediate_size=32, **kwargs)
        with pytest.raises(ValueError, match=f"`{option}` must be None"):
            AutoModelForCausalLM.from_config(config, attn_implementation="lssar").eval()(token_rows(1, 8) % 64)

    def test_additive_mask(self):
        with pytest.raises(ValueError, match="`attention_mask` must be None, 2-D"):
            small_model("llama")(token_rows(1, 8), attention_mask=torch.zeros(1, 1, 8, 8))

    def test_invalid_settings(self):
        model = small_model("llama")
        model.config.softplus_attention = {"powr": 3}
        with pytest.raises(ValueError, match=r"config.softplus_attention.*powr"):
            model(token_rows(1, 8))
        model.config.softplus_attention = {"power": 0.5}
        with pytest.raises(ValueError, match="`power` must be a number >= 1"):
            model(token_rows(1, 8))

    def test_attentions_not_for_host_models(self):
        with pytest.raises(ValueError, match=r"ssmax.*has learned parameters.*SoftplusGPTConfig"):
            small_model("llama", "ssmax")(token_rows(1, 8))
        with pytest.raises(ValueError, match=r"softmax-nope.*has no positions.*SoftplusGPTConfig"):
            small_model("llama", "softmax-nope")(token_rows(1, 8))

    def test_power_of_a_model_without_one(self):
        with pytest.raises(ValueError, match="`model` must be a model with an attention whose power can be set"):
            set_power(small_model("llama", "sdpa"), 3)

    def test_a_refused_swap_changes_nothing(self):
        model, ids = small_model("llama", "sdpa"), token_rows(1, 8)
        before = model(ids).logits
        with pytest.raises(ValueError, match="no attention is named 'lsar'"):
            use_attention(model, "lsar", power=3)
        assert getattr(model.config, "softplus_attention", None) is None
        assert model(ids).logits.equal(before)

    def test_a_refused_power_changes_nothing(self):
        for family in ("llama", "softplus-gpt"):
            model, ids = small_model(family), token_rows(1, 8)
            before = model(ids).logits
            with pytest.raises(ValueError, match="`power` must be a number >= 1"):
                set_power(model, 0.5)
            assert model(ids).logits.equal(before)

    @pytest.mark.parametrize("kind", [BloomConfig, CodeGenConfig])
    def test_a_model_without_the_attention_interface(self, kind):
        """They would silently compute softmax, and without a mask they would also see later tokens."""
        size = {"vocab_size": 64, "hidden_size": 32, "n_embd": 32, "n_layer": 1, "n_head": 2, "rotary_dim": 8}
        with pytest.raises(ValueError, match="does not use transformers' attention interface"):
            AutoModelForCausalLM.from_config(kind(**size), attn_implementation="lssar")
        model = AutoModelForCausalLM.from_config(kind(**size))
        before = model.config.to_dict()
        with pytest.raises(ValueError, match="does not use transformers' attention interface"):
            use_attention(model, "lssar", power=3)
        assert model.config.to_dict() == before

    def test_window_in_a_bidirectional_model(self):
        size = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = BertConfig(**size, intermediate_size=32, attention_probs_dropout_prob=0.0)
        config._attn_implementation = "softmax-window"
        with pytest.raises(ValueError, match="`window` must be None in a model that is not causal"):
            BertModel(config).eval()(token_rows(1, 8) % 64)
