"""Extended models: equal to the host within the window, with and without a cache, padded, saved and loaded."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from softplus_attention.huggingface.extension.cache import PAST, ExtendedCache
from softplus_attention.huggingface.extension.modeling import CLASSES, HOSTS, extended
from softplus_attention.huggingface.extension.settings import Extension

VOCABULARY = 97
BASE = Extension(trained=64, length=256, far_heads=[[1], [], [0, 1, 2]], window=9, sink=2, near=12, group=5)
FORMS = {form: replace(BASE, far=form) for form in ("clip", "group", "yarn", "rope", "lssar")}
FORMS |= {f"log N, {keys}": replace(BASE, trained=20, log_n=keys) for keys in ("far", "all")}
FORMS["level"] = replace(BASE, trained=20, level=True)


def host_model(host: str = "llama", **changes: Any) -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 10,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    sizes |= {"sliding_window": None} if host == "mistral" else {}
    config, _, model = HOSTS[host]
    return model(config(**{**sizes, **changes})).double().eval()


def tokens(batch: int, length: int) -> torch.Tensor:
    torch.manual_seed(batch * length)
    return torch.randint(1, VOCABULARY, (batch, length))


@torch.no_grad()
def logits(model: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    return model(ids, use_cache=False, **options).logits


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("host", HOSTS)
def test_equals_the_host_within_the_window(host: str) -> None:
    """Beyond the window they differ."""
    model = host_model(host)
    ids = tokens(2, 30)
    before = logits(model, ids)
    after = logits(extended(model, BASE), ids)
    close(after[:, :9], before[:, :9])
    assert (after[:, 20:] - before[:, 20:]).abs().max() > 1e-3
    every = Extension(trained=64, length=256, far_heads=[[0, 1, 2]] * 3, far="rope")
    close(logits(extended(model, every), ids), before)


@pytest.mark.parametrize("rope", [{"rope_type": "llama3", "factor": 4.0}, {"rope_type": "linear", "factor": 2.0}])
def test_scaled_hosts(rope: dict[str, Any]) -> None:
    llama3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    rope = {"rope_theta": 10000.0, **rope, **(llama3 if rope["rope_type"] == "llama3" else {})}
    model = host_model(rope_parameters=rope)
    ids = tokens(1, 40)
    close(logits(extended(model, BASE), ids)[:, :9], logits(model, ids)[:, :9])


def dense_clip(model: Any, extension: Extension, ids: torch.Tensor) -> torch.Tensor:
    """ReRoPE written out: every pair of tokens is rotated by min(distance, near)."""
    from transformers.models.llama import modeling_llama

    def attend(module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: float, **_: Any) -> tuple[Any, None]:
        length = q.shape[2]
        every = torch.arange(length)
        # Undo the rotation of q and k.
        cos, sin = model.model.rotary_emb(q, every[None])
        q, k = (x * cos[:, None] - modeling_llama.rotate_half(x) * sin[:, None] for x in (q, k))
        q, k, v = q[0], k[0].repeat_interleave(2, 0), v[0].repeat_interleave(2, 0)
        distance = every[:, None] - every
        factor = ((every + 1).clamp(min=extension.trained).log() / math.log(extension.trained))[:, None]
        out = []
        for head in range(6):
            far = head // 2 in extension.far_heads[module.layer_idx]
            near = extension.near if far else extension.window
            cos, sin = (x[0] for x in model.model.rotary_emb(q, distance.clamp(0, near).flatten()[None]))
            turned = q[head].repeat_interleave(length, 0)
            turned = (turned * cos + modeling_llama.rotate_half(turned) * sin).view(length, length, -1)
            scores = torch.einsum("qkd,kd->qk", turned, k[head]) * scaling
            hidden = distance < 0
            if far and extension.log_n == "all":
                scores = scores * factor
            if far and extension.log_n == "far":
                scores = torch.where(distance < near, scores, scores * factor)
            if far and extension.level:
                count = every[:, None] - near + 1
                scores = scores - torch.where(distance < near, 0, (count.clamp(min=20 - near) / (20 - near)).log())
            if not far:
                hidden = hidden | ((distance >= extension.window) & (every >= extension.sink))
            out.append(scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v[head])
        return torch.stack(out)[None].transpose(1, 2), None

    modeling_llama.ALL_ATTENTION_FUNCTIONS.register("dense_clip", attend)
    model.config._attn_implementation = "dense_clip"
    return logits(model, ids)


@pytest.mark.parametrize("level", [False, True], ids=["free", "level"])
@pytest.mark.parametrize("log_n", ["none", "far", "all"])
def test_clip_matches_rerope(log_n: str, level: bool) -> None:
    extension = replace(BASE, trained=20, log_n=log_n, level=level)
    model = host_model().float()  # tables are in float32
    ids = tokens(1, 50)
    found = logits(extended(model, extension), ids)
    torch.testing.assert_close(found, dense_clip(model, extension, ids), rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("extension", FORMS.values(), ids=FORMS.keys())
def test_chunks_and_steps_match_one_pass(extension: Extension) -> None:
    model = extended(host_model(), extension)
    ids = tokens(2, 61)
    whole = logits(model, ids)
    for cut in ([61], [1] * 61, [5, 4, 3, 20, 1, 1, 27], [30, 1, 1, 1, 28]):
        cache, parts = ExtendedCache(model.config), []
        for piece in ids.split(cut, 1):
            with torch.no_grad():
                parts.append(model(piece, past_key_values=cache).logits)
        close(torch.cat(parts, 1), whole)
        assert cache.get_seq_length() == 61


@pytest.mark.parametrize("extension", FORMS.values(), ids=FORMS.keys())
@pytest.mark.parametrize("host", ["llama", "qwen3"])
def test_left_padding_changes_nothing(extension: Extension, host: str) -> None:
    model = extended(host_model(host), extension)
    ids = tokens(3, 50)
    padding = torch.tensor([0, 33, 7])
    mask = (torch.arange(50) >= padding[:, None]).long()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    alone = [logits(model, row[None, start:])[0] for row, start in zip(ids, padding.tolist(), strict=True)]
    together = logits(model, ids, attention_mask=mask, position_ids=positions)
    cache, parts = ExtendedCache(model.config), []
    for begin, end in ((0, 6), (6, 40), (40, 41), (41, 42), (42, 50)):
        with torch.no_grad():
            out = model(
                ids[:, begin:end],
                attention_mask=mask[:, :end],
                position_ids=positions[:, begin:end],
                past_key_values=cache,
            )
        parts.append(out.logits)
    for row, start in enumerate(padding.tolist()):
        close(together[row, start:], alone[row])
        close(torch.cat(parts, 1)[row, start:], alone[row])


def test_right_padding_and_holes() -> None:
    model = extended(host_model(), BASE)
    ids = tokens(2, 30)
    mask = (torch.arange(30) < torch.tensor([[30], [11]])).long()
    close(logits(model, ids, attention_mask=mask)[1, :11], logits(model, ids[1:, :11])[0])
    with pytest.raises(ValueError, match="`attention_mask` must be padded only on the left"):
        model(ids, attention_mask=mask, use_cache=True)
    mask[0, 5] = 0
    with pytest.raises(ValueError, match="`attention_mask` must be padded only on the left"):
        logits(model, ids, attention_mask=mask)


@pytest.mark.parametrize("beams", [1, 3])
def test_generate(beams: int) -> None:
    """A padded batch with a cache generates the same as single sequences without."""
    model = extended(host_model(), BASE)
    ids = tokens(2, 30)
    mask = (torch.arange(30) >= torch.tensor([[0], [17]])).long()
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "num_beams": beams}
    batch = model.generate(ids, attention_mask=mask, **options)
    for row, start in enumerate((0, 17)):
        alone = model.generate(ids[row : row + 1, start:], use_cache=False, **options)
        assert batch[row, 30:].tolist() == alone[0, 30 - start :].tolist()
    pieces = model.generate(ids, attention_mask=mask, prefill_chunk_size=7, **options)
    assert pieces.tolist() == batch.tolist()


@pytest.mark.parametrize("host", HOSTS)
def test_saved_and_loaded(host: str, tmp_path: Path) -> None:
    model = extended(host_model(host), FORMS["yarn"]).float()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is CLASSES[host][2] is type(model)
    assert loaded.config.model_type == f"softplus_extended_{host}"
    assert Extension.from_config(loaded.config) == FORMS["yarn"]
    assert AutoConfig.from_pretrained(tmp_path).max_position_embeddings == 256
    ids = tokens(1, 40)
    torch.testing.assert_close(logits(loaded, ids), logits(model, ids), rtol=1e-5, atol=1e-5)


def test_cache_size() -> None:
    model = extended(host_model().bfloat16(), BASE)
    cache = ExtendedCache(model.config)
    with torch.no_grad():
        model(tokens(1, 1000), past_key_values=cache)
    # Keys and values of 10 bfloat16 numbers: five heads with window and sink, four far heads with 64 spare tokens.
    slots = 5 * (9 + 2) + 4 * (12 + 1000 + 64)
    assert cache.nbytes == slots * 2 * 10 * 2
    held = [x for layer in cache.layers for buffer in layer.buffers for x in (buffer.keys, buffer.values)]
    assert cache.nbytes == sum(x.untyped_storage().nbytes() for x in held)


def test_crop() -> None:
    model = extended(host_model(), BASE)
    ids = tokens(1, 30)
    cache = ExtendedCache(model.config)
    with torch.no_grad():
        model(ids[:, :8], past_key_values=cache)
        cache.crop(-3)
        assert cache.get_seq_length() == 5
        parts = [model(ids[:, 5:9], past_key_values=cache).logits, model(ids[:, 9:20], past_key_values=cache).logits]
    close(torch.cat(parts, 1), logits(model, ids[:, :20])[:, 5:])
    cache.crop(0)
    with pytest.raises(ValueError, match="`crop` must be 0 once older keys than the window of 9 tokens are dropped"):
        cache.crop(-1)
    cache.reset()
    assert cache.get_seq_length() == cache.nbytes == 0


@pytest.mark.parametrize("before", [0, 5, 30], ids=lambda n: f"after {n}")
def test_crop_beyond_the_window(before: int) -> None:
    """Tokens are added and removed many times, also before and while the larger ring fills."""
    model, ids = extended(host_model(), BASE), tokens(1, 700)
    cache = ExtendedCache(model.config)
    whole = logits(model, ids)
    chance = random.Random(before)
    with torch.no_grad():
        if before:
            model(ids[:, :before], past_key_values=cache)
        if before == 5:
            cache.crop(-5)
        cache.activate_past_recording()
        end = before if before != 5 else 0
        while end < 700:
            count = min(700 - end, chance.choice([1, 1, 2, 7, 21, 60]))
            close(model(ids[:, end : end + count], past_key_values=cache).logits, whole[:, end : end + count])
            end += count
            removed = chance.choice([0, 0, 1, min(count, 20)])
            cache.crop(-removed)
            end -= removed
        assert cache.get_seq_length() == 700
        cache.crop(-PAST)
        with pytest.raises(ValueError, match="`crop` must be 0 once older keys"):
            cache.crop(-1)


def test_training_reaches_every_weight() -> None:
    model = extended(host_model(), BASE).train()
    ids = tokens(2, 40)
    model(ids, labels=ids).loss.backward()
    assert all(bool((x.grad != 0).any()) for x in model.parameters())


UNSUPPORTED_KWARGS: dict[str, tuple[dict[str, Any], str]] = {
    "another cache": ({"past_key_values": DynamicCache()}, "`past_key_values` must be None or an ExtendedCache"),
    "weights": ({"output_attentions": True}, "`output_attentions` must be False"),
    "documents": ({"cu_seq_lens_q": torch.tensor([0, 4, 9])}, "`cu_seq_lens_q` must be None"),
    "positions": ({"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5]])}, "`position_ids` must be consecutive"),
    "4-D mask": ({"attention_mask": torch.ones(1, 1, 9, 9)}, "`attention_mask` must be 2-D"),
}


@pytest.mark.parametrize("case", UNSUPPORTED_KWARGS)
def test_unsupported_in_forward(case: str) -> None:
    options, message = UNSUPPORTED_KWARGS[case]
    with pytest.raises(ValueError, match=message):
        extended(host_model(), BASE)(tokens(1, 9), **options)


@pytest.mark.parametrize("assistant", ["extended", "host", "prompt lookup"])
def test_assisted_generation(assistant: str) -> None:
    """Candidates are removed from rings that have dropped older keys: the tokens of plain greedy decoding."""
    model = extended(host_model(), BASE)
    other = extended(host_model(), replace(BASE, window=7)) if assistant == "extended" else host_model()
    options = {"prompt_lookup_num_tokens": 5} if assistant == "prompt lookup" else {"assistant_model": other}
    kwargs: dict[str, Any] = {"max_new_tokens": 40, "min_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
    ids = tokens(1, 30).repeat(1, 2)
    assert torch.equal(model.generate(ids, **kwargs, **options), model.generate(ids, **kwargs))


def test_unsupported_in_generate() -> None:
    model = extended(host_model(), BASE)
    with pytest.raises(ValueError, match="`cache_implementation` must be None"):
        model.generate(tokens(1, 9), cache_implementation="static", max_new_tokens=2)
    with pytest.raises(ValueError, match="`attn_implementation` must be None"):
        model.set_attn_implementation("flash_attention_2")


BAD_SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "heads": ({"far_heads": [[3], [], []]}, "far_heads` must be for each of 3 layers a sorted list of heads below 3"),
    "layers": ({"far_heads": [[1]]}, "far_heads` must be for each of 3 layers"),
    "log N": ({"log_n": True}, "`extension log_n` must be one of none, far, all"),
    "level": ({"far": "rope", "level": True}, "`extension level` must be False, or True with far='clip'"),
    "form": ({"far": "alibi"}, "`extension far` must be one of clip, group, yarn, rope, lssar"),
    "window": ({"window": 64}, "`extension window` must be below 64"),
    "near": ({"near": True}, "`extension near` must be an integer, at least 2"),
    "unknown": ({"heads": 3}, "`config.extension` must be a dictionary of trained, length"),
}


@pytest.mark.parametrize("case", BAD_SETTINGS)
def test_settings_are_checked(case: str) -> None:
    changes, message = BAD_SETTINGS[case]
    config = CLASSES["llama"][0](**{**host_model().config.to_dict(), "extension": {**BASE.to_json(), **changes}})
    with pytest.raises(ValueError, match=message):
        CLASSES["llama"][2](config)


def test_models_that_cannot_be_extended() -> None:
    with pytest.raises(ValueError, match="`rope_type of the model` must be one of default, linear, llama3"):
        extended(host_model(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}), BASE)
    with pytest.raises(ValueError, match="`model` must be one without sliding windows"):
        extended(host_model("mistral", sliding_window=16), BASE)
