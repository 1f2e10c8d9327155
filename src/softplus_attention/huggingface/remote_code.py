"""A saved model that ``trust_remote_code=True`` loads, without a line that imports this package first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from softplus_attention.utils.files import write_whole

MODULE = "softplus_attention_model"
# Subclasses, so that transformers marks these as coming with the model and not the classes of everybody.
CODE = """import {config_module}
import {model_module}
import softplus_attention.huggingface  # registers the attention before the model needs it


class {config}({config_module}.{config}):
    pass


class {model}({model_module}.{model}):
    config_class = {config}
"""


def save_with_code(model: PreTrainedModel, directory: str | Path, **options: Any) -> None:
    """``model.save_pretrained(directory)``, and a module that registers our attention before transformers needs it.

    ``AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True)`` then works in a program that knows
    nothing of this package; the package has to be installed there.
    """
    directory = Path(directory)
    model_class, config_class = importable(type(model)), importable(type(model.config))
    model.save_pretrained(directory, **options)
    names = {"model": model_class.__name__, "config": config_class.__name__}
    modules = {"model_module": model_class.__module__, "config_module": config_class.__module__}
    write_whole(directory / f"{MODULE}.py", CODE.format(**names, **modules))
    path = directory / "config.json"
    saved = json.loads(path.read_text())
    kind = "AutoModelForCausalLM" if model.can_generate() else "AutoModel"
    saved["auto_map"] = {"AutoConfig": f"{MODULE}.{names['config']}", kind: f"{MODULE}.{names['model']}"}
    write_whole(path, json.dumps(saved, indent=2, sort_keys=True) + "\n")


def importable(kind: type) -> type:
    """The class itself, or the one it was derived from by code that came with a model."""
    return next(base for base in kind.__mro__ if not base.__module__.startswith("transformers_modules"))
