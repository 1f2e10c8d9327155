"""Fitting LSSAR far heads lowers the error on held-out sequences and changes only those heads."""

from __future__ import annotations

import pytest
import torch
from extend_cases import TEXT, tiny_model

from softplus_attention.extend.fitting import FitSettings, fit_far_heads, original_output
from softplus_attention.huggingface.extension.modeling import extended
from softplus_attention.huggingface.extension.settings import Extension

SETTINGS = FitSettings(tokens=600, length=40, steps=40, batch=4)
LSSAR = Extension(trained=512, length=2048, far_heads=[[1], [0, 1]], window=30, sink=2, far="lssar", factor=4.0)


def test_original_output_matches_the_host() -> None:
    model = tiny_model().float()
    attention, x = model.model.layers[1].self_attn, torch.randn(2, 30, 32)
    table = model.model.rotary_emb(x, torch.arange(30)[None])
    seen: list[torch.Tensor] = []
    handle = attention.o_proj.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    attention(x, position_embeddings=table, attention_mask=None)
    handle.remove()
    for head in range(2):
        out, _ = original_output(model, attention, x, head)
        expected = seen[0].unflatten(-1, (4, 8))[:, :, 2 * head : 2 * head + 2].transpose(1, 2)
        torch.testing.assert_close(out, expected)


def test_the_fit_lowers_the_error() -> None:
    model = tiny_model(initializer_range=0.1).float()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    found = extended(model, LSSAR)
    steps: list[tuple[int, int]] = []
    fitted = fit_far_heads(found, model, [TEXT, TEXT[7:]], SETTINGS, lambda *step: steps.append(step))
    assert [(one.layer, one.head) for one in fitted] == [(0, 1), (1, 0), (1, 1)]
    assert steps == [(1, 3), (2, 3), (3, 3)]
    assert all(one.after < 0.8 * one.before for one in fitted), fitted
    for name, x in model.state_dict().items():
        assert torch.equal(x, before[name]), name
    changed = {name for name, x in found.state_dict().items() if name in before and not torch.equal(x, before[name])}
    assert changed == {f"model.layers.{n}.self_attn.{p}_proj.weight" for n in (0, 1) for p in ("q", "k")}
    near = found.model.layers[0].self_attn.q_proj.weight[:16]  # the windowed head
    assert torch.equal(near, before["model.layers.0.self_attn.q_proj.weight"][:16])


def test_too_little_text_to_fit() -> None:
    model = tiny_model()
    with pytest.raises(ValueError, match="`text` must be documents with two sequences of 40 tokens"):
        fit_far_heads(extended(model, LSSAR), model, [TEXT[:50]], SETTINGS)
