"""Whole models over a sharded sequence, or with sharded heads, against one process."""

import copy
import os
import tempfile
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)
from transformers.distributed import DistributedConfig

from softplus_attention.distributed import context_parallel, parallelize_heads, shard_batch, sharded
from softplus_attention.evaluation.lengths import cut_documents, loss_by_length
from softplus_attention.evaluation.memory import TooLongError, sequences_at_once
from softplus_attention.huggingface import SoftplusGPTConfig, SoftplusGPTForCausalLM
from softplus_attention.nn import SoftplusAttention

SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 48, "num_hidden_layers": 3, "initializer_range": 0.2}
HEADS = {"num_attention_heads": 6, "num_key_value_heads": 2}


def softplus_gpt(**changes: Any) -> PreTrainedModel:
    config = SoftplusGPTConfig(**SIZES, window=16, global_every=2, **HEADS | changes)
    model = SoftplusGPTForCausalLM(config)
    for name, parameter in model.named_parameters():
        if "raw_power" in name:  # so that all heads differ
            parameter.data += torch.arange(float(HEADS["num_attention_heads"])) / 2
    return model


def host(model_class: Any, config_class: Any, **changes: Any) -> PreTrainedModel:
    config = config_class(**SIZES, **HEADS | {"intermediate_size": 64} | changes)
    return model_class._from_config(config, attn_implementation="lssar")


MODELS = {
    "SoftplusGPT": lambda **heads: softplus_gpt(power="learned", **heads),
    "SoftplusGPT, power by log": lambda **heads: softplus_gpt(power="learned-log", **heads),
    "Llama": lambda: host(LlamaForCausalLM, LlamaConfig),
    "Mistral with a window": lambda: host(MistralForCausalLM, MistralConfig, sliding_window=13),
}


def largest_error(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    return max(float((found[name] - one).abs().max() / one.abs().max().clamp(min=1e-9)) for name, one in wanted.items())


def gradients(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def sharded_sequences(mode: str) -> dict[str, float]:
    """Errors of every gradient for a sequence sharded over all processes."""
    found = {}
    for name, build in MODELS.items():
        for packed in (False, True):
            torch.manual_seed(0)
            model = build().double().train()
            twin = copy.deepcopy(model)
            if packed:
                model.gradient_checkpointing_enable({"use_reentrant": False})
            tokens = torch.randint(0, 64, (1 if packed else 2, 61))
            cu = torch.tensor([0, 20, 61])
            documents = torch.cat([torch.arange(20), torch.arange(41)])[None]
            position_ids = documents if packed else torch.arange(61)[None].expand(2, -1)
            twin(input_ids=tokens, position_ids=position_ids, labels=tokens, use_cache=False).loss.backward()

            record = context_parallel(cu_seqlens=cu, mode=mode) if packed else context_parallel(61, mode=mode)
            labels = torch.nn.functional.pad(tokens, (0, 1), value=-100)[:, 1:]
            inputs = {"input_ids": tokens, "position_ids": position_ids}
            inputs = {key: record.shard(value, 1) for key, value in inputs.items()}
            inputs["shift_labels"] = record.shard(labels, 1, -100)
            with sharded(record):
                wanted = int((labels != -100).sum())
                loss = model(**inputs, labels=inputs["input_ids"], use_cache=False, num_items_in_batch=wanted).loss
                loss.backward()
            for value in gradients(model).values():
                dist.all_reduce(value)
            found[f"{name}, {mode}, {'packed' if packed else 'whole'}"] = largest_error(
                gradients(model), gradients(twin)
            )
    return found


def batch_with_few_targets() -> float:
    """``shard_batch`` with nearly all targets on one process, and none on some."""
    torch.manual_seed(0)
    model = softplus_gpt(power="learned").double()
    twin, tokens = copy.deepcopy(model), torch.randint(0, 64, (2, 70))
    labels = tokens.clone()
    labels[:, :60] = -100
    labels[1] = -100
    wanted = twin(input_ids=tokens, labels=labels, use_cache=False).loss
    record, inputs = shard_batch({"input_ids": tokens, "labels": labels})
    with sharded(record):
        found = model(**inputs, use_cache=False).loss
        found.backward()
    wanted.backward()
    total = found.detach().clone()
    for value in (total, *gradients(model).values()):
        dist.all_reduce(value)
    return max(float((total - wanted).abs()), largest_error(gradients(model), gradients(twin)))


def losses_by_length() -> dict[str, float]:
    """Loss by length with sequences sharded over all processes, against one process."""
    found = {}
    for name in ("SoftplusGPT", "Mistral with a window"):
        torch.manual_seed(0)
        model = MODELS[name]().double().eval()
        texts = cut_documents([torch.randint(0, 64, (250,)), torch.randint(0, 64, (130,))], 120)
        one, shared = (loss_by_length(model, texts, [30, 120], group=group) for group in (None, dist.group.WORLD))
        found[name] = max(abs(a - b) for a, b in zip(one.loss, shared.loss, strict=True))
        found[f"{name}, positions"] = float(one.positions.keys() != shared.positions.keys())
    return found


def trainer_of_transformers() -> dict[str, str]:
    """Errors of transformers' Trainer with its context parallel, whose own check of the attention DDP bypasses."""
    from accelerate.parallelism_config import ParallelismConfig

    ParallelismConfig._validate_accelerator = lambda *_: None  # it requires GPUs
    found = {}
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 64, (8, 48))]
    for name in ("SoftplusGPT", "Llama"):
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                folder,
                max_steps=1,
                use_cpu=True,
                report_to=[],
                disable_tqdm=True,
                save_strategy="no",
                parallelism_config=ParallelismConfig(cp_size=dist.get_world_size(), dp_shard_size=1),
            )
            try:
                Trainer(MODELS[name](), arguments, train_dataset=rows).train()
                found[name] = ""
            except RuntimeError as error:
                found[name] = str(error)
    return found


def no_room_on_one_process() -> list[Any]:
    """What each process gets if the last one has too little memory, and the result if memory suffices."""
    room = 10**5 if dist.get_rank() == dist.get_world_size() - 1 else 10**12
    results: list[Any] = [None] * dist.get_world_size()
    with mock.patch("softplus_attention.evaluation.memory.free_bytes", return_value=room):
        try:
            found: Any = sequences_at_once(softplus_gpt(), 4096, group=dist.group.WORLD)
        except TooLongError as error:
            found = str(error)
    dist.all_gather_object(results, found)
    with mock.patch("softplus_attention.evaluation.memory.free_bytes", return_value=10**5 * room):
        return [*results, sequences_at_once(softplus_gpt(), 4096, group=dist.group.WORLD)]


def sharded_heads(folder: str) -> dict[str, Any]:
    """Tensor parallel by ``from_pretrained``: errors of logits and gradients, generation, share of the parameters."""
    found: dict[str, Any] = {}
    processes = dist.get_world_size()
    heads = {"num_attention_heads": 6, "num_key_value_heads": 6 if processes == 3 else 2}
    models = {
        "SoftplusGPT": lambda: softplus_gpt(power="learned", **heads),
        "SoftplusGPT, power by log": lambda: softplus_gpt(power="learned-log", **heads),
        "SoftplusGPT, learned scale": lambda: softplus_gpt(attention="ssmax", **heads),
        "Llama": lambda: host(LlamaForCausalLM, LlamaConfig, **heads, intermediate_size=66),
    }
    for name, make in models.items():
        torch.manual_seed(0)
        place = os.path.join(folder, name)
        model = make()
        if dist.get_rank() == 0:
            model.save_pretrained(place)
        dist.barrier()
        model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float64).eval()
        config = DistributedConfig(tp_size=processes)
        parallel = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float64, distributed_config=config).eval()
        assert type(parallel) is type(model)
        tokens = torch.randint(0, 64, (2, 40))
        wanted, got = (one(input_ids=tokens, labels=tokens) for one in (model, parallel))
        wanted.loss.backward()
        got.loss.backward()
        whole = {key: getattr(one, "full_tensor", lambda one=one: one)() for key, one in gradients(parallel).items()}
        options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
        texts = [one.generate(tokens[:1, :20], **options).tolist() for one in (model, parallel)]
        here = sum((getattr(one, "to_local", lambda one=one: one)()).numel() for one in parallel.parameters())
        found[name] = {
            "logits": float((got.logits - wanted.logits).detach().abs().max()),
            "gradients": largest_error(whole, gradients(model)),
            "generated": texts[0] == texts[1],
            "share": here / sum(one.numel() for one in model.parameters()),
        }
    try:
        SoftplusGPTForCausalLM.from_pretrained(place, distributed_config=DistributedConfig(tp_size=processes))
        bad = SoftplusGPTConfig(**SIZES, num_attention_heads=6, num_key_value_heads=1)
        if dist.get_rank() == 0:
            SoftplusGPTForCausalLM(bad).save_pretrained(folder + "/bad")
        dist.barrier()
        SoftplusGPTForCausalLM.from_pretrained(folder + "/bad", distributed_config=DistributedConfig(tp_size=processes))
        found["refused"] = ""
    except ValueError as error:
        found["refused"] = str(error)
    return found


def module_with_sharded_heads() -> dict[str, Any]:
    """``parallelize_heads`` on our module: output and every gradient."""
    processes = dist.get_world_size()
    mesh = init_device_mesh("cpu", (processes,))
    found: dict[str, Any] = {}
    for power in ("learned", "learned-log", 15):
        torch.manual_seed(0)
        one = SoftplusAttention(48, 6, num_kv_heads=3 if processes == 3 else 2, power=power, bias=True).double()
        if isinstance(power, str):
            one.raw_parameter.data += torch.arange(6.0) / 2
        parallel, x = copy.deepcopy(one), torch.randn(2, 20, 48, dtype=torch.float64)
        parallelize_heads(parallel, mesh)
        wanted, got = one(x), parallel(x)
        wanted.square().sum().backward()
        got.square().sum().backward()
        whole = {name: getattr(x, "full_tensor", lambda x=x: x)() for name, x in gradients(parallel).items()}
        found[str(power)] = max(largest_error({"": got}, {"": wanted}), largest_error(whole, gradients(one)))
    found["refused"] = []
    for bad in (SoftplusAttention(48, 6, num_kv_heads=1), SoftplusAttention(48, 6, attention="softmax-alibi")):
        try:
            parallelize_heads(bad, mesh)
        except ValueError as error:
            found["refused"].append(str(error))
    return found


def refusals() -> list[str]:
    record, model, found = context_parallel(32), softplus_gpt(), []
    tokens = record.shard(torch.randint(0, 64, (1, 32)), 1)
    for one in (model, MODELS["Llama"]()):
        one.eval()
        cache = one(input_ids=tokens, use_cache=True).past_key_values
        for options in ({"use_cache": True, "past_key_values": cache}, {"output_attentions": True}):
            try:
                with sharded(record), torch.no_grad():
                    one(input_ids=tokens, **options)
                found.append("")
            except ValueError as error:
                found.append(str(error))
    return found


def local_attention() -> dict[str, str]:
    """Errors of attention inside ``sharded`` that would see only the rows of its own process."""
    record = context_parallel(32)
    tokens = record.shard(torch.randint(0, 64, (1, 32)), 1)
    softmax = LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS, intermediate_size=64))
    module, x = SoftplusAttention(48, 6), torch.randn(1, record.rows, 48)
    texts = cut_documents([torch.randint(0, 64, (64,))], 32)
    tries = {
        "softmax": lambda: softmax(input_ids=tokens, use_cache=False),
        "module": lambda: module(x),
        "nothing": lambda: None,
    }
    found = {}
    for name, attempt in tries.items():
        try:
            with sharded(record):
                attempt()
            found[name] = ""
        except (RuntimeError, ValueError) as error:
            found[name] = str(error)
    try:
        loss_by_length(softmax, texts, [32], group=dist.group.WORLD)
        found["loss by length"] = ""
    except ValueError as error:
        found["loss by length"] = str(error)
    return found


def main(folder: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    found: dict[str, Any] = {"sequences": {}}
    for mode in ("gather", "ulysses"):
        found["sequences"] |= sharded_sequences(mode)
    found["few targets"] = batch_with_few_targets()
    found["lengths"] = losses_by_length()
    found["no room"] = no_room_on_one_process()
    found["heads"] = sharded_heads(folder)
    found["module"] = module_with_sharded_heads()
    found["refused"] = refusals()
    found["one process"] = local_attention()
    found["trainer"] = trainer_of_transformers()
    return found
