"""Setups in which our models could silently compute something else: they raise, or they are exact."""

from __future__ import annotations

import copy
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from huggingface_models import CONFIGS, small_model, token_rows
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from transformers import AttentionInterface, AutoModelForCausalLM, LlamaConfig
from transformers.distributed import DistributedConfig

from softplus_attention import softplus_attention
from softplus_attention.attentions.catalog import attention
from softplus_attention.huggingface import continuous
from softplus_attention.huggingface.extension.modeling import extended
from softplus_attention.huggingface.extension.settings import Extension

ULYSSES = """
import os, sys, torch
os.environ["DS_ACCELERATOR"] = "cpu"
sys.path[:0] = {path!r}
import deepspeed, torch.distributed as dist
deepspeed.init_distributed(dist_backend="gloo", verbose=False)
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from huggingface_models import small_model, token_rows
rank, ranks = dist.get_rank(), dist.get_world_size()
model, ids = small_model(sys.argv[1]).train(), token_rows(1, 48)
whole = torch.arange(48)[None] if sys.argv[2] == "whole" else torch.cat([torch.arange(20), torch.arange(28)])[None]
want = model(input_ids=ids, position_ids=whole, use_cache=False).logits
options = dict(core_attn_implementation="lssar", sequence_parallel_size=ranks, micro_batch_size=1)
UlyssesSPAttentionHF.register_with_transformers(model, **options)
own = slice(rank * 48 // ranks, (rank + 1) * 48 // ranks)
got = model(input_ids=ids[:, own], position_ids=whole[:, own], use_cache=False).logits
error = (got - want[:, own]).abs().max()
dist.all_reduce(error, dist.ReduceOp.MAX)
if rank == 0:
    print("ERROR", error.item(), flush=True)
dist.destroy_process_group()
"""


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("family", ["llama", "softplus-gpt"])
@pytest.mark.usefixtures("one_process")
def test_torch_context_parallel(family: str) -> None:
    model, rows = small_model(family), token_rows(1, 8)
    want = model(rows).logits
    inside = context_parallel(init_device_mesh("cpu", (1,)), buffers=[rows.clone()], buffer_seq_dims=[1])
    with inside, pytest.raises(RuntimeError, match="context_parallel each rank"):
        model(rows)
    assert model(rows).logits.equal(want)


OPS = {"lssar": softplus_attention, "sigmoid": attention("sigmoid"), "softmax": attention("softmax")}


@pytest.mark.parametrize("attend", OPS.values(), ids=OPS)
@pytest.mark.usefixtures("one_process")
def test_torch_context_parallel_around_the_op(attend: Any) -> None:
    rows = torch.randn(1, 2, 8, 16)
    inside = context_parallel(init_device_mesh("cpu", (1,)), buffers=[rows], buffer_seq_dims=[2])
    with inside, pytest.raises(RuntimeError, match="context_parallel each rank"):
        attend(rows, rows, rows, is_causal=True)
    attend(rows, rows, rows, is_causal=True)


def test_deepspeed_sequence_parallel_gpt(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = types.SimpleNamespace(_SEQUENCE_PARALLEL_GROUP=object())
    monkeypatch.setitem(sys.modules, "deepspeed.runtime.sequence_parallel.parallel_state_sp", groups)
    with pytest.raises(RuntimeError, match="DeepSpeed's sequence parallel"):
        small_model("softplus-gpt")(token_rows(1, 8))
    groups._SEQUENCE_PARALLEL_GROUP = None
    small_model("softplus-gpt")(token_rows(1, 8))


@pytest.mark.slow
@pytest.mark.parametrize(("family", "text"), [("llama", "packed"), ("mistral", "whole"), ("softplus-gpt", "whole")])
def test_deepspeed_ulysses(family: str, text: str) -> None:
    pytest.importorskip("deepspeed")
    program = ULYSSES.format(path=[str(Path(__file__).parents[1] / "support")])
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "--no-python"]
    done = subprocess.run([*command, sys.executable, "-c", program, family, text], capture_output=True, text=True)
    if family == "softplus-gpt":
        assert "DeepSpeed's sequence parallel" in done.stderr or "does not match" in done.stderr
    else:
        assert done.returncode == 0, done.stderr
        assert float(done.stdout.split("ERROR ")[1].split()[0]) < 1e-4


@pytest.mark.parametrize("processes", [3, 4])
@pytest.mark.parametrize("family", ["llama", "softplus-gpt"])
def test_indivisible_heads(family: str, processes: int, tmp_path: Path) -> None:
    small_model(family).save_pretrained(tmp_path)
    kind = type(AutoModelForCausalLM.from_pretrained(tmp_path))
    name = "num_attention_heads" if processes == 3 else "num_key_value_heads"
    with pytest.raises(ValueError, match=f"`tp_size` must be a divisor of `{name}`"):
        kind.maybe_distribute_model(small_model(family), DistributedConfig(tp_size=processes), None)


@pytest.mark.skipif(continuous.ATTN_TYPE_TO_ALLOCATOR is not None, reason="transformers 5.22 has the paged cache")
@pytest.mark.parametrize("family", ["llama", "softplus-gpt"])
def test_generate_batch_before_5_22(family: str) -> None:
    """It would replace our attention by softmax over pages."""
    with pytest.raises(ValueError, match=r"generate_batch: transformers [\d.]+ passes attentions no paged cache"):
        small_model(family).generate_batch([[1, 2, 3]], max_new_tokens=3)


def test_tensor_parallel_with_alibi() -> None:
    model = small_model("softplus-gpt", attention="softmax-alibi")
    with pytest.raises(ValueError, match="ALiBi's slopes"):
        type(model).maybe_distribute_model(model, DistributedConfig(tp_size=2), None)


@pytest.mark.parametrize("family", ["gpt2", "extended"])
def test_no_tensor_parallel_plan(family: str, tmp_path: Path) -> None:
    """transformers would load the whole model into each process, or divide heads wrongly."""
    if family == "extended":
        model = extended(
            small_model("llama", attention="sdpa"),
            Extension(trained=32, length=64, far_heads=[[0], [1]], window=9, near=12, group=5),
        )
        message = "the heads of an extended model are not divided"
    else:
        small_model(family).save_pretrained(tmp_path)
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
        message = "has no tensor parallel plan"
    with pytest.raises(ValueError, match=message):
        type(model).maybe_distribute_model(model, DistributedConfig(tp_size=2), None)


class TestSharedConfig:
    def test_raises(self) -> None:
        config = CONFIGS["llama"]()
        model = AutoModelForCausalLM.from_config(config, attn_implementation="lssar")
        with pytest.raises(ValueError, match=r"copy\.deepcopy\(config\)"):
            AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        assert model.config._attn_implementation == "lssar"
        other = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="sdpa")
        assert (model.config._attn_implementation, other.config._attn_implementation) == ("lssar", "sdpa")

    def test_allowed_once_the_model_is_gone(self) -> None:
        config = LlamaConfig(vocab_size=16, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
        AutoModelForCausalLM.from_config(config, attn_implementation="lssar")
        assert (
            AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").config._attn_implementation == "sdpa"
        )


class TestWithoutMask:
    """What still works if a wrapper, such as DeepSpeed's, drops the mask."""

    def attend(self, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor, Any]:
        torch.manual_seed(0)
        q, k, v = torch.randn(3, 2, 4, 24, 16, dtype=torch.float64).unbind()
        module = small_model("llama", layers=1).model.layers[0].self_attn
        out, _ = AttentionInterface()["lssar"](module, q, k, v, None, **kwargs)
        return out.transpose(1, 2), q, (q, k, v)

    def test_window_of_the_host(self) -> None:
        out, _, qkv = self.attend(sliding_window=8)
        torch.testing.assert_close(out, softplus_attention(*qkv, is_causal=True, window=8))

    @pytest.mark.parametrize("window", [None, 5])
    def test_packed_positions(self, window: int | None) -> None:
        lengths = [[10, 14], [24]]
        positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
        out, _, qkv = self.attend(position_ids=positions, sliding_window=window)
        for row, parts in enumerate(lengths):
            begin = 0
            for length in parts:
                own = [x[row : row + 1, :, begin : begin + length] for x in qkv]
                want = softplus_attention(*own, is_causal=True, window=window)
                torch.testing.assert_close(out[row : row + 1, :, begin : begin + length], want)
                begin += length

    @pytest.mark.parametrize("first", [0, 7])
    def test_other_positions_change_nothing(self, first: int) -> None:
        out, _, qkv = self.attend(position_ids=torch.arange(first, first + 24)[None])
        torch.testing.assert_close(out, softplus_attention(*qkv, is_causal=True))
        out, _, _ = self.attend(position_ids=torch.zeros(1, 24, dtype=torch.long) + first)
        if first:
            torch.testing.assert_close(out, softplus_attention(*qkv, is_causal=True))

    def test_packed_text_in_a_model_with_a_cache(self) -> None:
        """transformers itself reads the positions only with use_cache=False."""
        model, rows = small_model("llama"), token_rows(1, 20)
        positions = torch.cat([torch.arange(8), torch.arange(12)])[None]
        packed = model(rows, position_ids=positions, use_cache=True).logits
        alone = [model(x, use_cache=False).logits for x in (rows[:, :8], rows[:, 8:])]
        torch.testing.assert_close(packed, torch.cat(alone, 1))
