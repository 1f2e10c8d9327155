"""SoftplusGPT, and what saved models keep."""

from __future__ import annotations

import math
import re
from typing import ClassVar

import pytest
import torch
from huggingface_models import IDS, SIZE, byte_tokenizer, logits, run_python, small_model, tiny_gpt, token_rows
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, pipeline
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from softplus_attention import PowerByLength
from softplus_attention.catalog import attention, names
from softplus_attention.huggingface import (
    SoftplusGPTConfig,
    SoftplusGPTForCausalLM,
    SoftplusGPTModel,
    save_with_code,
    set_power,
    use_attention,
)

ROWS = token_rows(2, 30)


class TestModel:
    def test_gpt2_small_has_124_million_parameters(self):
        with torch.device("meta"):
            model = SoftplusGPTForCausalLM(SoftplusGPTConfig())
        assert sum(p.numel() for p in model.parameters()) == 123_587_328
        assert model.lm_head.weight is model.model.embed_tokens.weight

    @pytest.mark.parametrize("name", names())
    def test_every_attention(self, name):
        model = tiny_gpt(attention=name).train()
        ids = token_rows(2, 16)
        loss = model(ids, labels=ids).loss
        loss.backward()
        assert loss.isfinite()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        assert model.config._attn_implementation == name

    def test_residual_projections_start_smaller(self):
        model = SoftplusGPTForCausalLM(SoftplusGPTConfig(**{**SIZE, **IDS, "hidden_size": 256, "num_hidden_layers": 8}))
        smaller = 0.02 / math.sqrt(16)
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                expected = smaller if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
                assert weight.std().item() == pytest.approx(expected, rel=0.05), name

    @pytest.mark.parametrize("positions", [None, "none"])
    def test_cache_holds_unit_keys(self, positions):
        model = tiny_gpt(positions=positions)
        with torch.no_grad():
            out = model(token_rows(2, 12), use_cache=True)
        for layer in out.past_key_values.layers:
            torch.testing.assert_close(layer.keys.norm(dim=-1), torch.ones(2, 4, 12))
        softmax = tiny_gpt(attention="softmax")
        with torch.no_grad():
            raw = softmax(token_rows(2, 12), use_cache=True).past_key_values.layers[0].keys
        assert (raw.norm(dim=-1) - 1).abs().max() > 0.1

    @pytest.mark.parametrize("name", ["ssmax", "softmax-window", "softmax-alibi", "softmax-nope", "sigmoid"])
    def test_decode_matches_prefill(self, name):
        kwargs = {"window": 7} if name == "softmax-window" else {}
        model, ids = tiny_gpt(attention=name, **kwargs), token_rows(2, 24)
        with torch.no_grad():
            first = model(ids[:, :15], use_cache=True)
            second = model(ids[:, 15:], past_key_values=first.past_key_values, use_cache=True)
        both = torch.cat([first.logits, second.logits], 1)
        torch.testing.assert_close(both, logits(model, ids), atol=1e-5, rtol=1e-4)

    def test_window_over_padding_with_a_hole(self):
        """A dense mask and the window both apply."""
        model, ids, mask = tiny_gpt(window=5), token_rows(1, 20), torch.ones(1, 20, dtype=torch.long)
        mask[0, 9] = 0
        with torch.no_grad():
            holed = model(ids, attention_mask=mask).logits[0]
        whole = logits(model, ids)[0]
        torch.testing.assert_close(holed[:9], whole[:9], atol=1e-5, rtol=1e-4)
        assert (holed[10:] - whole[10:]).abs().max() > 0

    def test_attentions_by_config(self, tmp_path):
        model = tiny_gpt(output_attentions=True)
        with torch.no_grad():
            assert len(model(token_rows(1, 8)).attentions) == 2
        model.save_pretrained(tmp_path)
        assert AutoModelForCausalLM.from_pretrained(tmp_path).config.output_attentions

    def test_window_hides_older_tokens(self):
        model, ids = tiny_gpt(num_hidden_layers=1, window=5), token_rows(1, 30)
        other = ids.clone()
        other[0, 3] = (other[0, 3] - 2) % 125 + 3
        changed = (logits(model, ids) - logits(model, other)).abs().amax(-1)[0]
        assert (changed > 0).nonzero().flatten().tolist() == [3, 4, 5, 6, 7]

    def test_learned_power(self):
        model, ids = tiny_gpt(power="learned"), token_rows(2, 16)
        torch.testing.assert_close(logits(model, ROWS), logits(tiny_gpt(), ROWS), atol=1e-5, rtol=1e-4)
        model.train()(ids, labels=ids).loss.backward()
        grad = model.model.layers[0].self_attn.raw_power.grad
        assert grad.shape == (4,)
        assert grad.abs().max() > 0
        with pytest.raises(ValueError, match="learned"):
            model.set_power(3)

    def test_kinds_of_learned_powers_are_not_confused(self, tmp_path):
        tiny_gpt(power="learned").save_pretrained(tmp_path)
        other = AutoModelForCausalLM.from_pretrained(tmp_path, power="learned-log")
        factors = other.model.layers[0].self_attn.attention_parameters()["power_per_log"]
        torch.testing.assert_close(factors, torch.full((4,), 0.6))

    def test_global_layers_see_everything(self):
        model = tiny_gpt(attention="softmax-window", window=3, global_every=2)
        assert [layer.self_attn.attention.window(None) for layer in model.model.layers] == [3, None]

    def test_gradients_with_a_zero_key(self):
        """The padding token's embedding is 0, and so is its key in the first layer, which a cache normalises."""
        model = tiny_gpt(pad_token_id=0).train()
        ids = token_rows(1, 12)
        ids[0, 5] = 0
        model(ids, labels=ids, use_cache=True).loss.backward()
        assert all(parameter.grad.isfinite().all() for parameter in model.parameters())

    def test_power_can_be_raised(self):
        model = tiny_gpt(power=3)
        three = logits(model, ROWS)
        model.set_power(15)
        assert model.config.power == 15
        torch.testing.assert_close(logits(model, ROWS), logits(tiny_gpt(), ROWS))
        assert (logits(model, ROWS) - three).abs().max() > 0
        set_power(torch.nn.Sequential(model), PowerByLength(15, 4, n0=8))
        assert model.config.power == {"base": 15, "slope": 4, "n0": 8}

    def test_other_inputs(self):
        model, ids = tiny_gpt(), token_rows(2, 12)
        embeds = model.get_input_embeddings()(ids)
        with torch.no_grad():
            torch.testing.assert_close(model(inputs_embeds=embeds).logits, logits(model, ids))
            last = model(ids, logits_to_keep=1).logits
            states = model(ids, output_hidden_states=True).hidden_states
        torch.testing.assert_close(last, logits(model, ids)[:, -1:])
        assert len(states) == 3
        with pytest.raises(ValueError, match="exactly one of `input_ids` and `inputs_embeds`"):
            model(ids, inputs_embeds=embeds)

    def test_gradient_checkpointing(self):
        grads = []
        for checkpointing in (False, True):
            model, ids = tiny_gpt().train(), token_rows(2, 16)
            if checkpointing:
                model.gradient_checkpointing_enable()
            model(ids, labels=ids, use_cache=False).loss.backward()
            grads.append([p.grad for p in model.parameters()])
        torch.testing.assert_close(grads[0], grads[1])

    def test_embeddings_can_grow(self):
        model = tiny_gpt()
        before = logits(model, ROWS)
        model.resize_token_embeddings(160, mean_resizing=False)
        after = logits(model, ROWS)
        assert after.shape[-1] == 160
        assert model.lm_head.weight is model.model.embed_tokens.weight
        torch.testing.assert_close(after[..., :128], before)

    def test_beyond_the_training_length(self):
        model = tiny_gpt(max_position_embeddings=16)
        out = model.generate(token_rows(1, 40), max_new_tokens=4, do_sample=False)
        assert out.shape == (1, 44)

    def test_sampling_is_repeatable(self):
        model, ids = tiny_gpt(), token_rows(1, 8)
        draws = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            draws.append(model.generate(ids, max_new_tokens=20, do_sample=True))
        assert draws[0].equal(draws[1])
        assert not draws[0].equal(draws[2])


class TestPrograms:
    def test_early_exit_drafts(self):
        """transformers lowers num_hidden_layers while it drafts."""
        model, ids = tiny_gpt(num_hidden_layers=3, eos_token_id=None).eval(), token_rows(1, 9)
        greedy = model.generate(ids, max_new_tokens=6, do_sample=False)
        drafted = model.generate(ids, max_new_tokens=6, do_sample=False, assistant_early_exit=1)
        assert torch.equal(greedy, drafted)
        assert torch.equal(greedy, model.generate(ids, max_new_tokens=6, do_sample=False))

    @pytest.mark.parametrize("example_length", [14, 30])
    def test_exported_for_every_length(self, example_length):
        """The decode kernel takes up to 16 rows; the export must not specialise on that."""
        model = tiny_gpt().eval()

        class Logits(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.model = model

            def forward(self, ids):
                return self.model(ids, use_cache=False).logits

        lengths = {"ids": {1: torch.export.Dim("length", min=2, max=4096)}}
        with torch.no_grad():
            program = torch.export.export(Logits(), (token_rows(2, example_length),), dynamic_shapes=lengths).module()
            for length in (5, 16, 17, 40):
                ids = token_rows(2, length)
                torch.testing.assert_close(program(ids), model(ids).logits, rtol=1e-5, atol=1e-5)


class TestRope:
    TYPES = (
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "dynamic", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    )

    @pytest.mark.parametrize("scaling", TYPES, ids=[t["rope_type"] for t in TYPES])
    def test_frequencies_are_transformers(self, scaling, tmp_path):
        parameters = {"rope_theta": 10_000.0, **scaling}
        model = tiny_gpt(attention="softmax", rope_parameters=parameters, max_position_embeddings=32)
        rope = model.model.rotary_emb
        length = 128
        expected, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](model.config, torch.device("cpu"), seq_len=length)
        cos, _ = rope(torch.zeros(1, length, 64), torch.arange(length)[None])
        wanted = (torch.arange(length)[:, None] * expected).cos() * factor
        torch.testing.assert_close(cos[0, 0], torch.cat([wanted, wanted], -1), atol=1e-4, rtol=0)
        plain = tiny_gpt(attention="softmax", max_position_embeddings=32)
        ids = token_rows(1, length)
        assert (logits(model, ids) - logits(plain, ids)).abs().max() > 1e-4
        model.save_pretrained(tmp_path)
        torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(tmp_path), ids), logits(model, ids))
        plain.save_pretrained(tmp_path / "plain")
        at_loading = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", rope_parameters=parameters)
        torch.testing.assert_close(logits(at_loading, ids), logits(model, ids))

    def test_frequencies_stay_exact_in_half_precision(self):
        rope = tiny_gpt().bfloat16().model.rotary_emb
        assert rope.inv_freq.dtype == torch.float32
        assert rope.inv_freq.equal(tiny_gpt().model.rotary_emb.inv_freq)

    def test_legacy_name(self):
        model = tiny_gpt(attention="softmax", rope_scaling={"rope_type": "linear", "factor": 2.0})
        assert model.config.rope_parameters["rope_type"] == "linear"

    def test_million_positions(self):
        """With angles in float64 scores do not change if all positions shift by a million."""
        rope = tiny_gpt().model.rotary_emb
        near = rope(torch.zeros(1, 1, 64), torch.tensor([[0, 5]]))
        far = rope(torch.zeros(1, 1, 64), torch.tensor([[1_000_000, 1_000_005]]))
        scores = [cos[..., 0, :] * cos[..., 1, :] + sin[..., 0, :] * sin[..., 1, :] for cos, sin in (near, far)]
        torch.testing.assert_close(scores[0], scores[1], atol=1e-6, rtol=0)


class TestSaved:
    KWARGS = (
        {"attention": "lssar", "power": {"base": 9, "slope": 2, "n0": 16}},
        {"attention": "ssmax"},
        {"power": "learned"},
        {"power": "learned-log", "window": 6, "global_every": 2},
    )

    @pytest.mark.parametrize("kwargs", KWARGS, ids=str)
    def test_round_trip(self, kwargs, tmp_path):
        model = tiny_gpt(**kwargs)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.01 * torch.randn_like(parameter))
        model.save_pretrained(tmp_path)
        assert (tmp_path / "model.safetensors").exists()
        again = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert isinstance(again, SoftplusGPTForCausalLM)
        assert again.config._attn_implementation == kwargs.get("attention", "lssar")
        torch.testing.assert_close(logits(again, ROWS), logits(model, ROWS))
        assert isinstance(AutoModel.from_pretrained(tmp_path), SoftplusGPTModel)
        saved, own = (config.to_dict() for config in (AutoConfig.from_pretrained(tmp_path), model.config))
        assert saved.pop("auto_map")
        assert {**saved, "_name_or_path": ""} == own

    def test_another_power_at_loading(self, tmp_path):
        tiny_gpt().save_pretrained(tmp_path)
        sharper = AutoModelForCausalLM.from_pretrained(tmp_path, power=31)
        assert sharper.config.power == 31
        torch.testing.assert_close(logits(sharper, ROWS), logits(tiny_gpt(power=31), ROWS))

    def test_another_attention_must_be_requested(self, tmp_path):
        tiny_gpt().save_pretrained(tmp_path)
        for name in ("lssa", "sdpa", "eager"):
            with pytest.raises(ValueError, match=rf"`attn_implementation` must be None or 'lssar'.*{name}"):
                AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=name)
            with pytest.raises(ValueError, match=rf"`attn_implementation` must be None or 'lssar'.*{name}"):
                tiny_gpt().set_attn_implementation(name)
        tiny_gpt().set_attn_implementation("lssar")
        other = AutoModelForCausalLM.from_pretrained(tmp_path, attention="lssa")
        torch.testing.assert_close(logits(other, ROWS), logits(tiny_gpt(attention="lssa"), ROWS))


# Runs in a process that imports nothing of ours.
LOAD_AND_SAVE = """
import sys
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
model.save_pretrained(sys.argv[2])
from transformers import LlamaConfig, LlamaForCausalLM
size = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
LlamaForCausalLM(LlamaConfig(**size)).save_pretrained(sys.argv[3])
again = AutoModelForCausalLM.from_pretrained(sys.argv[2], trust_remote_code=True)
assert again.config._attn_implementation == "lssar"
"""


class TestGlobalEvery:
    """Local layers with positions; every n-th layer is global, without positions."""

    KWARGS: ClassVar = {"num_hidden_layers": 4, "window": 4, "global_every": 2}

    def test_layers(self):
        model = tiny_gpt(**self.KWARGS, local_attention="softmax")
        found = [layer.self_attn.attention.spec for layer in model.model.layers]
        assert found[0] == found[2] == attention("softmax", window=4).spec
        assert found[1] == found[3] == attention("lssar", positions="none").spec
        model.set_power(7)
        assert model.model.layers[1].self_attn.attention.spec.sharpening == 7
        assert model.model.layers[0].self_attn.attention.spec == found[0]
        same = tiny_gpt(**self.KWARGS, power=3)
        assert same.model.layers[0].self_attn.attention.spec == attention("lssar", power=3, window=4).spec

    def test_only_global_layers_see_far(self):
        ids = token_rows(1, 30)
        other = ids.clone()
        other[0, 0] = (ids[0, 0] + 1) % SIZE["vocab_size"]
        # Three local layers reach 3 * 3 tokens back, a global layer all.
        local = tiny_gpt(num_hidden_layers=3, window=4)
        assert torch.equal(logits(local, ids)[0, 10:], logits(local, other)[0, 10:])
        mixed = tiny_gpt(**self.KWARGS)
        assert not torch.allclose(logits(mixed, ids)[0, -1], logits(mixed, other)[0, -1])

    def test_global_layers_have_no_positions(self):
        model = tiny_gpt(num_hidden_layers=2, window=1, global_every=2)
        ids = token_rows(1, 12)
        turned = torch.cat([ids[:, :-1].flip(1), ids[:, -1:]], 1)
        # With a window of one token only the global layer mixes tokens, and it ignores their order.
        torch.testing.assert_close(logits(model, ids)[0, -1], logits(model, turned)[0, -1])

    @pytest.mark.parametrize(
        "kwargs",
        [{}, {"local_attention": "softmax-qknorm-logn"}, {"power": "learned-log"}],
        ids=["same", "local", "log"],
    )
    def test_cache_and_saving(self, kwargs, tmp_path):
        model = tiny_gpt(**self.KWARGS, **kwargs)
        ids = token_rows(2, 20)
        whole = logits(model, ids)
        with torch.no_grad():
            first = model(ids[:, :13], use_cache=True)
            steps = [first.logits]
            for i in range(13, 20):
                steps.append(model(ids[:, i : i + 1], past_key_values=first.past_key_values, use_cache=True).logits)
        torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=1e-4, atol=1e-5)
        model.save_pretrained(tmp_path)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
        assert torch.equal(logits(loaded, ids), whole)

    def test_learned_power_only_where_there_is_one(self):
        model = tiny_gpt(**self.KWARGS, local_attention="softmax", power="learned")
        assert [hasattr(layer.self_attn, "raw_power") for layer in model.model.layers] == [False, True, False, True]

    @pytest.mark.parametrize("local", [None, "softmax", "softmax-nope"])
    @pytest.mark.parametrize("positions", ["rope", "none"])
    def test_positions_apply_to_local_layers(self, positions, local):
        model = tiny_gpt(num_hidden_layers=3, window=4, global_every=3, positions=positions, local_attention=local)
        assert model.model.uses_rope == [positions == "rope"] * 2 + [False]

    @pytest.mark.parametrize(
        ("kwargs", "message"),
        [
            ({"global_every": 2}, "`window` must be a number of tokens if `global_every` is given"),
            ({"global_every": 1, "window": 4}, "`global_every` must be from 2 to the number of layers"),
            ({"global_every": 9, "window": 4}, "`global_every` must be from 2 to the number of layers"),
            ({"local_attention": "softmax"}, "`local_attention` must be None without `global_every`"),
            ({"global_every": 2, "window": 4, "local_attention": "sofmax"}, "did you mean 'softmax'"),
            (
                {"global_every": 2, "window": 4, "local_attention": "lssa", "score_scale": 2.0},
                "`score_scale` must be None if `local_attention` is given",
            ),
        ],
    )
    def test_bad_input(self, kwargs, message):
        with pytest.raises(Exception, match=re.escape(message)):
            SoftplusGPTConfig(**{**SIZE, **IDS, **kwargs})


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "softplus-gpt"])
def test_loaded_with_its_code_and_saved_again(family, tmp_path):
    save_with_code(small_model(family), tmp_path / "a")
    for folders in ("abc", "bde"):
        done = run_python(LOAD_AND_SAVE, *(tmp_path / name for name in folders))
        assert done.returncode == 0, done.stderr


class TestPipeline:
    def test_no_warning_beyond_the_training_length(self, caplog):
        """transformers warns for models whose positions end there."""
        torch.manual_seed(0)
        model = SoftplusGPTForCausalLM(
            SoftplusGPTConfig(
                vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=8
            )
        )
        with caplog.at_level("WARNING"):
            out = model.generate(
                torch.ones(1, 12, dtype=torch.long), max_new_tokens=3, do_sample=False, eos_token_id=None
            )
        assert out.shape == (1, 15)
        assert "maximum length" not in caplog.text

    def test_text_generation(self, tmp_path):
        tokenizer = byte_tokenizer()
        model = tiny_gpt(vocab_size=257, eos_token_id=256, bos_token_id=256)
        model.save_pretrained(tmp_path)
        tokenizer.save_pretrained(tmp_path)
        writer = pipeline("text-generation", model=str(tmp_path), device="cpu")
        text = writer("Once upon", max_new_tokens=8, do_sample=False)[0]["generated_text"]
        assert text.startswith("Once upon")
        several = writer(["Once", "Two words"], max_new_tokens=4, do_sample=False, batch_size=2)
        alone = [writer(t, max_new_tokens=4, do_sample=False) for t in ("Once", "Two words")]
        assert several == alone


class TestBadConfigs:
    @pytest.mark.parametrize(
        ("kwargs", "message"),
        [
            ({"attention": "lssarr"}, "no attention is named 'lssarr'; did you mean 'lssar'"),
            ({"power": 0.5}, "`power` must be a number >= 1"),
            ({"power": "high"}, "`power` must be a number >= 1"),
            ({"power": {"bse": 3}}, "`power` must be a number or"),
            ({"attention": "lssa", "power": 3}, "`power` must be None"),
            ({"attention": "softmax", "power": "learned"}, "`power` must be None: 'softmax' has no second stage"),
            ({"num_key_value_heads": 3}, "`num_key_value_heads` must be a divisor of `num_attention_heads`, 4, got 3"),
            ({"hidden_size": 66}, "`hidden_size` must be a multiple of `num_attention_heads`, 4, got 66"),
            ({"positions": "sine"}, "`positions` must be None, 'rope' or 'none'"),
            ({"score_scale": -1.0}, "`score_scale` must be a finite number >= 0, got -1"),
            ({"score_scale": 0.0}, "`score_scale` must be None or a number above 0, got 0"),
            ({"hidden_act": "gelux"}, "`hidden_act` must be one of .*gelu.*, got 'gelux'"),
            ({"rope_parameters": {"rope_type": "yearn", "rope_theta": 1e4}}, "`rope_type` must be .*yarn.*'yearn'"),
            ({"window": 0}, "`window`"),
            ({"attention_dropout": 0.1}, "`attention_dropout` must be 0: this model has no dropout, got 0.1"),
            ({"sliding_window": 4}, "`sliding_window` must be left out; here it is `window`, got 4"),
            ({"n_layer": 2}, "`n_layer` must be left out; here it is `num_hidden_layers`, got 2"),
            ({"dropout": 0.1}, "`dropout` must be 0: this model has no dropout, got 0.1"),
            ({"softplus_attention": {"power": 2}}, "`softplus_attention` must be left out"),
        ],
    )
    def test_error(self, kwargs, message):
        with pytest.raises(Exception, match="(?s)" + message.replace("(", r"\(")):
            SoftplusGPTConfig(**{**SIZE, **IDS, **kwargs})

    def test_checkpoint_of_another_shape(self, tmp_path):
        tiny_gpt().save_pretrained(tmp_path)
        with pytest.raises(RuntimeError, match="mismatch"):
            AutoModelForCausalLM.from_pretrained(tmp_path, hidden_size=32, head_dim=8)


def test_own_model_cannot_be_swapped():
    with pytest.raises(ValueError, match=r"from_pretrained\(..., attention='softmax'\)"):
        use_attention(tiny_gpt(), "softmax")


def test_catalogue_names_in_the_config():
    assert SoftplusGPTConfig(**SIZE, **IDS, attention="lssar-p3").chosen_attention().spec == attention("lssar-p3").spec


class TestSavedConfigs:
    def test_a_power_by_length_is_saved(self, tmp_path):
        model = tiny_gpt(power=PowerByLength(3, 1, 8))
        model.save_pretrained(tmp_path)
        again = SoftplusGPTForCausalLM.from_pretrained(tmp_path)
        assert again.config.power == {"base": 3, "slope": 1, "n0": 8}
        torch.testing.assert_close(logits(again.eval(), ROWS), logits(model, ROWS))

    def test_another_attention_without_a_power(self, tmp_path):
        tiny_gpt(power=15).save_pretrained(tmp_path)
        with pytest.raises(
            ValueError, match=r"`power` must be None: 'lssa' has no second stage and so no power, got 15"
        ):
            SoftplusGPTForCausalLM.from_pretrained(tmp_path, attention="lssa")
        again = SoftplusGPTForCausalLM.from_pretrained(tmp_path, attention="lssa", power=None)
        assert again.config.attention == "lssa"
