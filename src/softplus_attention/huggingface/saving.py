"""Saved models: a model type that runs no other attention, a model card, and code that loads the model.

For a model with an attention of the catalogue ``save_pretrained`` writes config.json with our model type, a module for
``trust_remote_code=True``, and README.md unless the folder has one.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from softplus_attention.huggingface.attention import SETTINGS
from softplus_attention.huggingface.hosts import HostConfig, attention_names, auto_classes, config_to_save
from softplus_attention.huggingface.remote_code import MODULE, remote_code_for
from softplus_attention.utils.files import write_whole

CARD = "README.md"
ABOUT = "A model with an attention of [softplus-attention](https://github.com/softplus-attention/softplus-attention)."
CARD_TEXT = """---
library_name: transformers
{task}tags:
- softplus-attention
---

# {name}

{about}

| | |
|---|---|
{table}

It needs the package with its attention, `pip install 'softplus-attention[huggingface]'`, and works with no other.

```python
import softplus_attention.huggingface  # or trust_remote_code=True in the next call
from transformers import {auto}

model = {auto}.from_pretrained("{name}")
```
"""


def save_trained(
    model: PreTrainedModel, directory: str | Path, tokenizer: PreTrainedTokenizerBase | None = None
) -> None:
    """``model.save_pretrained(directory)`` with ``use_cache=True``, and the tokenizer.

    Trainer and gradient checkpointing switch ``use_cache`` off. Saved like that, the model would compute the whole
    sequence again for every generated token.
    """
    model.config.use_cache = True
    if model.can_generate():
        model.generation_config.use_cache = True
    model.save_pretrained(directory)
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)


def save_with_code(model: PreTrainedModel, directory: str | Path, **options: Any) -> None:
    """``model.save_pretrained(directory)``, which also writes the code for ``trust_remote_code=True``."""
    model.save_pretrained(directory, **options)


def wrap_saving() -> None:
    """Wrap ``save_pretrained`` of configs and models."""
    save_config, save_model = PreTrainedConfig.save_pretrained, PreTrainedModel.save_pretrained

    @functools.wraps(save_config)
    def save_config_with_type(self: PreTrainedConfig, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        config = config_to_save(self)
        if config is not None and not Path(save_directory).is_file():
            config = copy.copy(config)
            kinds = auto_classes(config)
            config.auto_map = {auto: f"{MODULE}.{name}" for auto, name in kinds.items()}
            Path(save_directory).mkdir(parents=True, exist_ok=True)
            write_whole(Path(save_directory) / f"{MODULE}.py", remote_code_for(kinds))
        return save_config(config or self, save_directory, *args, **kwargs)

    @functools.wraps(save_model)
    def save_model_with_card(
        self: PreTrainedModel, save_directory: Any, is_main_process: bool = True, *args: Any, **kwargs: Any
    ) -> Any:
        card, is_adapter = Path(save_directory) / CARD, getattr(self, "_hf_peft_config_loaded", False)
        config = None if is_adapter or card.exists() or not is_main_process else config_to_save(self.config)
        if config is not None and not Path(save_directory).is_file():
            Path(save_directory).mkdir(parents=True, exist_ok=True)
            write_whole(card, model_card(config, Path(save_directory).name))
        return save_model(self, save_directory, is_main_process, *args, **kwargs)

    PreTrainedConfig.save_pretrained = save_config_with_type  # type: ignore[method-assign]
    PreTrainedModel.save_pretrained = save_model_with_card  # type: ignore[method-assign]


def model_card(
    config: PreTrainedConfig, name: str, *, about: str = "", base: str | None = None, facts: Mapping[str, Any] = {}
) -> str:
    """README.md of a saved model: what it is, its attention and power, how to load it.

    ``about`` is a sentence or two below the title, ``base`` the model it was made from, ``facts`` more rows of the
    table (losses, tokens seen, ...).
    """
    config = config_to_save(config) or config
    kinds = auto_classes(config)
    own = [key for key, name in kinds.items() if name in (config.architectures or ())]
    auto = next((key for key in own if key != "AutoModel"), "AutoModelForCausalLM" if not own else "AutoModel")
    length = getattr(config.get_text_config(), "max_position_embeddings", None)
    rows = {name.replace("_", " ").capitalize(): value for name, value in attention_settings(config).items()}
    rows |= {"Context length": length, "Made from": base, **facts}
    table = "\n".join(f"| {what} | {value} |" for what, value in rows.items() if value is not None)
    task = "pipeline_tag: text-generation\n" if auto == "AutoModelForCausalLM" else ""
    return CARD_TEXT.format(name=name, about=about or ABOUT, table=table, task=task, auto=auto)


def attention_settings(config: PreTrainedConfig) -> dict[str, Any]:
    """The attention of a saved config and its settings as JSON."""
    saved = config.to_dict()
    if isinstance(config, HostConfig):
        names = attention_names(config)
        return {"attention": names[""] if list(names) == [""] else names, **(saved.get(SETTINGS) or {})}
    fields = ("attention", "power", "score_scale", "window", "global_every", "local_attention")
    return {name: saved[name] for name in fields if name in saved}
