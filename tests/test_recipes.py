"""Configurations by name build the models that the study trained."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from softplus_attention.huggingface import SoftplusGPTForCausalLM
from softplus_attention.recipes import ATTENTIONS, SIZES, long_context_config


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("size", SIZES)
def test_sizes_match_their_names(size: str, attention: str) -> None:
    with torch.device("meta"):
        model = SoftplusGPTForCausalLM(long_context_config(size, attention))
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(float(size[:-1]) * 1e6, rel=0.02)
    assert model.config.head_dim == 128


def test_two_local_layers_per_global_layer() -> None:
    config = long_context_config("30M", "lssar-learned-log", training_length=64, vocab_size=256)
    model = SoftplusGPTForCausalLM(config)
    specs = [layer.self_attn.attention.spec for layer in model.model.layers]
    assert [spec.window for spec in specs] == [32, 32, None] * 2
    assert [spec.positions for spec in specs] == ["rope", "rope", "none"] * 2
    assert (config.power, config.vocab_size, config.max_position_embeddings) == ("learned-log", 256, 64)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": "124m"}, "`size` must be one of 30M, 51M, 124M, 354M, got '124m'"),
        ({"attention": "lssar"}, "`attention` must be one of softmax-qknorm-logn-learned, lssar-learned-log"),
        ({"training_length": 1}, "`training_length` must be at least 2 tokens, got 1"),
    ],
)
def test_unknown_names_raise(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        long_context_config(**arguments)


def test_import_is_light() -> None:
    code = "import sys, softplus_attention.recipes; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
