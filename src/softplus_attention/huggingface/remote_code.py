"""The module in a saved model's folder with which ``trust_remote_code=True`` finds this package."""

from __future__ import annotations

from collections.abc import Mapping

from softplus_attention.huggingface.hosts import module_for

MODULE = "softplus_attention_model"
# Subclasses, so that transformers marks these as remote code, not the package's own classes.
CODE = '''"""Loads this model by the package softplus-attention, which has its attention."""

try:
    import softplus_attention.huggingface
{imports}
except ImportError as error:
    raise ImportError("this model needs its attention: pip install 'softplus-attention[huggingface]'") from error


class {config}({config}):
    pass
'''
MODEL = """

class {model}({model}):
    config_class = {config}
"""


def remote_code_for(classes: Mapping[str, str]) -> str:
    """The module's code, for ``auto_map`` with Auto classes as keys and class names as values."""
    config, *models = dict.fromkeys(classes.values())
    imports = "\n".join(f"    from {module_for(name)} import {name}" for name in (config, *models))
    return CODE.format(imports=imports, config=config) + "".join(MODEL.format(model=x, config=config) for x in models)
