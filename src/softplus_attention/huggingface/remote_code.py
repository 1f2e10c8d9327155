"""A saved model that ``trust_remote_code=True`` loads, without a line that imports this package first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from softplus_attention.huggingface.modeling_softplus_gpt import SoftplusGPTPreTrainedModel

MODULE = "softplus_attention_model"


def save_with_code(model: PreTrainedModel, directory: str | Path, **options: Any) -> None:
    """``model.save_pretrained(directory)``, and a module that registers our attention before transformers needs it.

    ``AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True)`` then works in a program that knows
    nothing of this package; the package has to be installed there.
    """
    directory = Path(directory)
    model.save_pretrained(directory, **options)
    model_class, config_class = type(model).__name__, type(model.config).__name__
    own = isinstance(model, SoftplusGPTPreTrainedModel)
    package = "softplus_attention.huggingface" if own else "transformers"
    lines = ["import softplus_attention.huggingface"] if not own else []
    lines += [
        f"from {package} import {config_class}, {model_class}",
        "",
        f'__all__ = ["{config_class}", "{model_class}"]',
    ]
    (directory / f"{MODULE}.py").write_text("\n".join(lines) + "\n")
    path = directory / "config.json"
    words = json.loads(path.read_text())
    kind = "AutoModelForCausalLM" if model.can_generate() else "AutoModel"
    words["auto_map"] = {"AutoConfig": f"{MODULE}.{config_class}", kind: f"{MODULE}.{model_class}"}
    path.write_text(json.dumps(words, indent=2, sort_keys=True) + "\n")
