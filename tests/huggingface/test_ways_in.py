"""Every way to load, change and run one of our models gives the model's own numbers, or an error that says why not.

Before these models had their own types, most ways silently gave softmax. Servers are tested in tests/serving and
test_transformers_serve.py, tensor parallel models in tests/distributed.
"""

from __future__ import annotations

import copy
import io
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import disk_offload, init_empty_weights, load_checkpoint_and_dispatch
from huggingface_models import byte_tokenizer, logits, run_python, tiny_llava, token_rows
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    DistributedConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    pipeline,
)
from transformers.generation.continuous_batching import continuous_api

from softplus_attention import PowerByLength
from softplus_attention.huggingface import set_power, use_attention

SIZE = {"vocab_size": 257, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIG = {**SIZE, "num_key_value_heads": 2, "initializer_range": 0.3, "bos_token_id": None, "eos_token_id": None}
SETTINGS = {"power": PowerByLength(3, slope=2, n0=8), "score_scale": 2.0, "window": 20}
ROWS = token_rows(2, 40)
GREEDY = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": -1}


def llama(attention: str = "lssar") -> Any:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG, pad_token_id=0)).eval()
    return use_attention(model, attention, **SETTINGS) if attention == "lssar" else model


def log_probabilities(model: Any) -> torch.Tensor:
    return logits(model, ROWS).log_softmax(-1)


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``new`` as saved now, ``old`` as saved before our model types, ``softmax`` without our attention."""
    folder = tmp_path_factory.mktemp("ways")
    for name in ("new", "old"):
        llama().save_pretrained(folder / name)
        byte_tokenizer().save_pretrained(folder / name)
    llama("sdpa").save_pretrained(folder / "softmax")
    config = json.loads((folder / "old" / "config.json").read_text())
    config |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    del config["auto_map"]
    (folder / "old" / "config.json").write_text(json.dumps(config))
    return folder


def load(folder: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, **options)


def load_host(folder: Path, **options: Any) -> Any:
    return LlamaForCausalLM.from_pretrained(folder, **options)


def from_config(folder: Path, **options: Any) -> Any:
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), **options)
    model.load_state_dict(llama().state_dict())
    return model


def again(model: Any, folder: Path) -> Any:
    model.save_pretrained(folder)
    return load(folder)


def through_bytes(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


def on_disk(folder: Path, place: Path) -> Any:
    names = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head", "model.layers.0")
    parts = dict.fromkeys(names, "cpu") | {"model.layers.1": "disk"}
    return load(folder, device_map=parts, offload_folder=str(place))


def dispatched(folder: Path) -> Any:
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    return load_checkpoint_and_dispatch(model, str(folder / "model.safetensors"), device_map={"": "cpu"})


def trained(folder: Path, place: Path) -> Any:
    """Two steps, and a third by another Trainer from the second's checkpoint, with a learning rate of 0."""
    data = [{"input_ids": row, "labels": row} for row in token_rows(4, 16)]
    options = {"output_dir": str(place), "save_steps": 1, "report_to": "none", "use_cpu": True, "learning_rate": 0.0}
    for steps, source in ((2, folder), (3, place / "checkpoint-2")):
        arguments = TrainingArguments(**options, max_steps=steps, per_device_train_batch_size=2)
        trainer = Trainer(model=load(source), args=arguments, train_dataset=data)
        trainer.train(resume_from_checkpoint=steps == 3)
    return load(place / "checkpoint-3")


def by_trl(folder: Path, place: Path) -> Any:
    """TRL's script, which passes ``attn_implementation=None``."""
    sft = pytest.importorskip("trl.scripts.sft")
    (place / "data").mkdir()
    (place / "data" / "train.jsonl").write_text('{"text": "abcabcabc"}\n' * 4)
    options = {"model_name_or_path": folder, "dataset_name": place / "data", "output_dir": place / "out"}
    options |= {"max_steps": 1, "learning_rate": 0, "report_to": "none", "use_cpu": True, "bf16": False}
    arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    parsed = sft.make_parser().parse_args_and_config(arguments)[:4]
    assert parsed[2].attn_implementation is None
    sft.main(*parsed)
    return load(place / "out")


def lora(**options: Any) -> LoraConfig:
    return LoraConfig(task_type="CAUSAL_LM", **options)  # starts as the identity


def adapted(saved: Path, base: str, place: Path) -> Any:
    """Save an adapter of ``base``, with its attention changed after loading; load it over ``base``."""
    model = load(saved / base)
    if base == "softmax":
        use_attention(model, "lssar", **SETTINGS)
    else:
        set_power(model, SETTINGS["power"])
    get_peft_model(model, lora()).save_pretrained(place)
    return PeftModel.from_pretrained(load(saved / base), place)


def save_with_other_power(saved: Path, place: Path) -> Path:
    model = load(saved / "new")
    set_power(model, 2)
    model.save_pretrained(place / "other")
    return place


def exported(saved: Path, place: Path) -> torch.Tensor:
    program = torch.export.export(load(saved / "new").eval(), (), {"input_ids": ROWS, "use_cache": False})
    torch.export.save(program, place / "model.pt2")
    found = torch.export.load(place / "model.pt2").module()(input_ids=ROWS, use_cache=False)
    return found.logits.log_softmax(-1)


def onnx(saved: Path, place: Path) -> torch.Tensor:
    pytest.importorskip("onnxscript")
    reference = pytest.importorskip("onnx.reference")
    options = {"kwargs": {"input_ids": ROWS, "use_cache": False}, "dynamo": True, "external_data": False}
    torch.onnx.export(load(saved / "new").eval(), (), str(place / "model.onnx"), **options)
    evaluator = reference.ReferenceEvaluator(str(place / "model.onnx"))
    return torch.tensor(evaluator.run(None, {"input_ids": ROWS.numpy()})[0]).log_softmax(-1)


Way = Callable[[Path, Path], Any]
# Each returns a model or its log-probabilities, from the saved models and an empty folder.
ANSWERS: dict[str, Way] = {
    "from_pretrained": lambda saved, here: load(saved / "new"),
    "attn_implementation=None": lambda saved, here: load(saved / "new", attn_implementation=None),
    "by our own name": lambda saved, here: load(saved / "new", attn_implementation="lssar"),
    "trust_remote_code": lambda saved, here: load(saved / "new", trust_remote_code=True, attn_implementation=None),
    "class of the host": lambda saved, here: load_host(saved / "new"),
    "class of the host, None": lambda saved, here: load_host(saved / "new", attn_implementation=None),
    "config of the host": lambda saved, here: load_host(
        saved / "new", config=LlamaConfig.from_pretrained(saved / "new")
    ),
    "from_config": lambda saved, here: from_config(saved / "new"),
    "from_config, None": lambda saved, here: from_config(saved / "new", attn_implementation=None),
    "old form": lambda saved, here: load(saved / "old"),
    "old form, None": lambda saved, here: load(saved / "old", attn_implementation=None),
    "old form, class of the host, None": lambda saved, here: load_host(saved / "old", attn_implementation=None),
    "old form saved again": lambda saved, here: again(load(saved / "old"), here),
    "saved again": lambda saved, here: again(load(saved / "new"), here),
    "saved again by remote code": lambda saved, here: again(load(saved / "new", trust_remote_code=True), here),
    "pipeline": lambda saved, here: pipeline("text-generation", model=str(saved / "new")).model,
    "pipeline, None": lambda saved, here: (
        pipeline("text-generation", model=str(saved / "new"), model_kwargs={"attn_implementation": None}).model
    ),
    "copy": lambda saved, here: copy.deepcopy(load(saved / "new")),
    "pickle": lambda saved, here: pickle.loads(pickle.dumps(load(saved / "new"))),
    "torch.save": lambda saved, here: through_bytes(load(saved / "new")),
    "device_map, on disk": lambda saved, here: on_disk(saved / "new", here),
    "accelerate, dispatched": lambda saved, here: dispatched(saved / "new"),
    "accelerate, on disk": lambda saved, here: disk_offload(
        load(saved / "new"), str(here), execution_device=torch.device("cpu")
    ),
    "Trainer, resumed": lambda saved, here: trained(saved / "new", here),
    "trl sft": lambda saved, here: by_trl(saved / "new", here),
    "LoRA over use_attention": lambda saved, here: adapted(saved, "softmax", here),
    "LoRA after set_power": lambda saved, here: adapted(save_with_other_power(saved, here / "base"), "other", here),
    "LoRA by its class": lambda saved, here: (
        adapted(saved, "new", here) and AutoPeftModelForCausalLM.from_pretrained(here)
    ),
    "LoRA merged and saved": lambda saved, here: again(adapted(saved, "softmax", here).merge_and_unload(), here / "m"),
    "torch.compile": lambda saved, here: torch.compile(load(saved / "new"), backend="aot_eager"),
    "torch.export": exported,
    "ONNX": onnx,
}


def test_softmax_and_lost_settings_differ(saved: Path) -> None:
    """Control: softmax, and the model with any one setting lost, give other numbers."""
    own = log_probabilities(llama())
    assert (log_probabilities(load(saved / "softmax")) - own).abs().max() > 0.1
    for lost in SETTINGS:
        rest = {key: value for key, value in SETTINGS.items() if key != lost}
        assert (log_probabilities(use_attention(llama("sdpa"), **rest)) - own).abs().max() > 0.01


@pytest.mark.parametrize("way", ANSWERS)
def test_gives_its_own_numbers(way: str, saved: Path, tmp_path: Path) -> None:
    found = ANSWERS[way](saved, tmp_path)
    found = found if isinstance(found, torch.Tensor) else log_probabilities(found)
    torch.testing.assert_close(found, log_probabilities(llama()), rtol=0, atol=1e-4)


def test_onnx_export_has_only_torch_operators(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program that the exporter gets; "ONNX" above runs the exporter, if its packages are installed."""
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    program = torch.export.export(load(saved / "new").eval(), (), {"input_ids": ROWS, "use_cache": False})
    assert not [node for node in program.graph.nodes if "softplus_attention" in str(node.target)]
    found = program.module()(input_ids=ROWS, use_cache=False).logits.log_softmax(-1)
    torch.testing.assert_close(found, log_probabilities(llama()), rtol=0, atol=1e-4)


def batched(model: Any) -> list[int]:
    pages = ContinuousBatchingConfig(num_blocks=64, page_size=16)
    options = {"continuous_batching_config": pages, "progress_bar": False}
    (answer,) = model.generate_batch(
        [ROWS[0].tolist()], generation_config=GenerationConfig(**GREEDY), **options
    ).values()
    return answer.generated_tokens


# Each must give the tokens of ``generate``.
GENERATED: dict[str, Callable[[Any, Path], list[int]]] = {
    "generate_batch": lambda model, saved: batched(model),
    "generate_batch with flash-attn": lambda model, saved: batched(model),
    "softmax drafts": lambda model, saved: model.generate(ROWS[:1], assistant_model=load(saved / "softmax"), **GREEDY)[
        0, 40:
    ].tolist(),
    "static cache": lambda model, saved: model.generate(ROWS[:1], cache_implementation="static", **GREEDY)[
        0, 40:
    ].tolist(),
}


@pytest.mark.parametrize("way", GENERATED)
def test_generates_its_own_tokens(way: str, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "flash-attn" in way:  # unpatched transformers would switch to it
        monkeypatch.setattr(continuous_api, "is_flash_attn_2_available", lambda **_: True)
    found = GENERATED[way](load(saved / "new").eval(), saved)
    whole = torch.cat([ROWS[0], torch.tensor(found)])[None]
    with torch.no_grad():
        wanted, softmax = (
            model(whole, use_cache=False).logits[0, 39:-1].argmax(-1) for model in (llama(), llama("sdpa"))
        )
    assert found == wanted.tolist() != softmax.tolist()


def set_name(config: Any, name: str) -> None:
    config._attn_implementation = name


def llava(place: Path) -> Any:
    """The config of a part, into which vLLM's wrapper of transformers models writes the name."""
    use_attention(tiny_llava()).save_pretrained(place)
    return AutoConfig.from_pretrained(place).text_config


def divided(model: Any, processes: int) -> Any:
    return type(model).maybe_distribute_model(model, DistributedConfig(tp_size=processes), None)


def in_context_parallel(model: Any, place: Path) -> Any:
    dist.init_process_group("gloo", init_method=f"file://{place}/store", rank=0, world_size=1)
    try:
        with context_parallel(init_device_mesh("cpu", (1,)), buffers=[ROWS.clone()], buffer_seq_dims=[1]):
            return model(ROWS)
    finally:
        dist.destroy_process_group()


FOREIGN = ("sdpa", "eager", "flash_attention_2", "flex_attention", "vllm", "sglang", "paged|lssar", {"": "sdpa"})
# These ask for an attention that is not of the catalogue.
FOREIGN_WAYS: dict[str, Way] = {
    **{
        f"attn_implementation={name!r}": lambda saved, here, name=name: load(saved / "new", attn_implementation=name)
        for name in FOREIGN
    },
    "class of the host, 'sdpa'": lambda saved, here: load_host(saved / "new", attn_implementation="sdpa"),
    "from_config, 'sdpa'": lambda saved, here: from_config(saved / "new", attn_implementation="sdpa"),
    "set_attn_implementation": lambda saved, here: load(saved / "new").set_attn_implementation("sdpa"),
    "set_attn_implementation, by parts": lambda saved, here: load(saved / "new").set_attn_implementation({"": "sdpa"}),
    "a config's name set": lambda saved, here: set_name(load(saved / "new").config, "sdpa"),
    "an engine's name in a part": lambda saved, here: set_name(llava(here), "vllm"),
    "an engine's name in the old form": lambda saved, here: set_name(load(saved / "old").config, "vllm"),
}
ONLY_OURS = "`attn_implementation` must be None or a name of softplus_attention.catalog, since .* runs no other"
REFUSED: dict[str, tuple[Way, str]] = {
    **{name: (way, ONLY_OURS) for name, way in FOREIGN_WAYS.items()},
    "from_config of a shared config, 'sdpa'": (
        lambda saved, here: (
            AutoModelForCausalLM.from_config((model := load(saved / "old")).config, attn_implementation="sdpa")
            and model
        ),
        r"`config` must be a copy, copy\.deepcopy\(config\)",
    ),
    "heads that cannot be divided": (
        lambda saved, here: divided(load(saved / "new"), 3),
        "`tp_size` must be a divisor of `num_attention_heads`, 4",
    ),
    "torch's context_parallel": (
        lambda saved, here: in_context_parallel(load(saved / "new"), here),
        "inside torch's context_parallel each rank",
    ),
}


@pytest.mark.parametrize("way", REFUSED)
def test_raises(way: str, saved: Path, tmp_path: Path) -> None:
    act, message = REFUSED[way]
    with pytest.raises((ValueError, RuntimeError), match=message):
        act(saved, tmp_path)


WITHOUT_US = """
import json, sys
sys.modules["softplus_attention"] = None
from peft import PeftModel
from transformers import AutoModelForCausalLM, LlamaForCausalLM

new, old, softmax, adapter = sys.argv[1:]
load = AutoModelForCausalLM.from_pretrained
ways = {
    "auto": lambda: load(new, trust_remote_code=False),
    "auto, None": lambda: load(new, trust_remote_code=False, attn_implementation=None),
    "auto, sdpa": lambda: load(new, trust_remote_code=False, attn_implementation="sdpa"),
    "remote code": lambda: load(new, trust_remote_code=True),
    "class of the host": lambda: LlamaForCausalLM.from_pretrained(new),
    "old form": lambda: load(old),
    "adapter": lambda: PeftModel.from_pretrained(load(softmax), adapter),
}
found = {}
for name, way in ways.items():
    try:
        found[name] = type(way()).__name__
    except Exception as error:
        found[name] = f"ERROR {error}"
print(json.dumps(found))
"""
ERRORS = {
    "auto": "trust_remote_code=True",
    "auto, None": "trust_remote_code=True",
    "auto, sdpa": "trust_remote_code=True",
    "remote code": "pip install 'softplus-attention[huggingface]'",
    "class of the host": 'attn_implementation="lssar"` is not supported',
    "old form": 'attn_implementation="lssar"` is not supported',
    "adapter": "adapter over lssar: import softplus_attention.huggingface before loading it",
}


def test_without_this_package(saved: Path, tmp_path: Path) -> None:
    adapted(saved, "softmax", tmp_path)
    done = run_python(WITHOUT_US, saved / "new", saved / "old", saved / "softmax", tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.keys() == ERRORS.keys()
    for way, message in ERRORS.items():
        assert found[way].startswith("ERROR"), way
        assert message in found[way], way
