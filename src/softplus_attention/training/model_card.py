"""The model card (README.md) of a trained model: description, training, losses, and how to load it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel

from softplus_attention import __version__
from softplus_attention.attentions.catalog import attention
from softplus_attention.power import LEARNED, LEARNED_LOG, PowerByLength
from softplus_attention.training.config import TrainConfig
from softplus_attention.utils.provenance import UNKNOWN

CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- softplus-attention
- {attention}
---

# {name}

A GPT with {parameters:,} parameters (SoftplusGPT: {layers} layers, width {width}, {heads} heads), trained by
[softplus-attention](https://github.com/softplus-attention/softplus-attention) {version}{commit}.

| | |
|---|---|
{rows}

Losses are in nats per token.

## Loading

```sh
pip install 'softplus-attention[huggingface]'
```

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # this folder
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
{load_tokenizer}
```

`trust_remote_code=True` runs `softplus_attention_model.py` in this folder, which imports the package. It is not needed
after `import softplus_attention.huggingface`. On the command line:
`softplus-attention generate --model FOLDER --prompt TEXT`.
"""
LOAD_TOKENIZER = "tokenizer = AutoTokenizer.from_pretrained(folder)"
NO_TOKENIZER = "# The data had no tokenizer: inputs and outputs of the model are token ids."


def model_card(
    name: str, model: PreTrainedModel, config: TrainConfig, logs: Sequence[dict[str, Any]], commit: str, tokenizer: Any
) -> str:
    """``logs`` are the entries of metrics.jsonl."""
    tokens = config.steps * config.batch_size * config.sequence_length
    rows = {
        "attention": f"`{config.attention}`",
        "power": describe_power(model.config.power, config),
        "layers": describe_layers(config),
        "training length": f"{config.sequence_length:,} tokens",
        "trained for": f"{config.steps:,} steps of {config.batch_size:,} sequences, {tokens:,} tokens in all",
        "optimizer": f"{config.optimizer}, seed {config.seed}",
        "training loss": last(logs, "loss"),
        "validation loss": last(logs, "eval_loss"),
    }
    return CARD.format(
        name=name,
        attention=config.attention,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        layers=config.layers,
        width=config.width,
        heads=config.heads,
        version=__version__,
        commit="" if commit == UNKNOWN else f", commit {commit}",
        rows="\n".join(f"| {key} | {value} |" for key, value in rows.items()),
        load_tokenizer=NO_TOKENIZER if tokenizer is None else LOAD_TOKENIZER,
    )


def describe_power(saved: Any, config: TrainConfig) -> str:
    """``saved`` is the power in config.json; None is the attention's own."""
    spec = attention(config.attention).spec
    if spec.second_stage == "none":
        return "none: this attention has no second stage"
    power = spec.sharpening if saved is None else saved
    if power == LEARNED:
        return "learned, one for each head and layer"
    if power == LEARNED_LOG:
        return "a factor of log N, learned for each head and layer"
    if isinstance(power, PowerByLength):
        power = {"base": power.base, "slope": power.slope, "n0": power.n0}
    if isinstance(power, dict):
        return "{base:g} + {slope:g} log(max(N, {n0:g}) / {n0:g}) for a row that sees N keys".format(**power)
    schedule = f", raised in training: `{config.power}`" if str(config.power) != str(power) and config.power else ""
    return f"{power:g}{schedule}"


def describe_layers(config: TrainConfig) -> str:
    if config.window is None:
        return "all see all tokens"
    if config.global_every is None:
        return f"all see the last {config.window} tokens"
    local = "" if config.local_attention is None else f" (with `{config.local_attention}`)"
    return (
        f"every {ordinal(config.global_every)} sees all tokens and has no rotary positions; "
        f"the others{local} see the last {config.window} tokens"
    )


def ordinal(number: int) -> str:
    return {2: "second", 3: "third"}.get(number, f"{number}th")


def last(logs: Sequence[dict[str, Any]], name: str) -> str:
    found = next((entry for entry in reversed(logs) if isinstance(entry.get(name), int | float)), None)
    return "not measured" if found is None else f"{found[name]:.4f} at step {found['step']}"
