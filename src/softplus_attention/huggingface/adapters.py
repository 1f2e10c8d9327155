"""PEFT adapters that record the attention they were trained with.

adapter_config.json names the base model as it is on disk, often with softmax, before ``use_attention`` or ``set_power``
changed it. An adapter of a model with an attention of the catalogue therefore records the attention, and loading
restores it. It is saved with a ``peft_type`` that PEFT does not know and an ``init_lora_weights`` that vLLM does not
know, so loading it raises where this package is not imported.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from softplus_attention import validation as check
from softplus_attention.attentions.catalog import KNOWN
from softplus_attention.huggingface.attention import SETTINGS, power_from_json, propagate_settings
from softplus_attention.huggingface.configuration_softplus_gpt import SoftplusGPTConfig
from softplus_attention.huggingface.hosts import PREFIX
from softplus_attention.huggingface.retrofit import set_power, use_attention

MARK = " adapter over {}: import softplus_attention.huggingface before loading it"
INIT = "init_lora_weights"  # used when an adapter is created, not when it is loaded
_saving: ContextVar[dict[str, Any] | None] = ContextVar("the attention record of the adapter that is being saved")


def base_model(model: nn.Module) -> PreTrainedModel | None:
    return next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)


def attention_record(model: nn.Module) -> dict[str, Any] | None:
    """The attention of a model and its settings as JSON; None if it is not of the catalogue."""
    base = base_model(model)
    return None if base is None else record_of_config(base.config)


def record_of_config(config: PreTrainedConfig) -> dict[str, Any] | None:
    saved = config.to_dict()
    if isinstance(config, SoftplusGPTConfig):
        return {name: saved[name] for name in ("attention", "power", "score_scale")}
    if "attn_implementation" not in saved:
        return None
    settings = {name: value for name, value in (saved.get(SETTINGS) or {}).items() if value is not None}
    record = {"attention": saved["attn_implementation"], **settings}
    parts = {key: saved[key][SETTINGS] for key in config.sub_configs if SETTINGS in (saved.get(key) or {})}
    return {**record, "parts": parts} if parts else record


def mark(saved: dict[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
    """adapter_config.json with the attention's record, and with values that make other readers fail."""
    text = MARK.format(record["attention"])
    init = {INIT: json.dumps(saved[INIT]) + text} if INIT in saved else {}
    return {**saved, SETTINGS: dict(record), "peft_type": str(saved["peft_type"].value) + text, **init}


def unmark(saved: Mapping[str, Any]) -> dict[str, Any]:
    found = {**saved, "peft_type": saved["peft_type"].partition(" ")[0]}
    if isinstance(saved.get(INIT), str) and " " in saved[INIT]:  # earlier versions marked only the type
        found[INIT] = json.loads(saved[INIT].partition(" ")[0])
    return found


def restore(model: nn.Module, record: Mapping[str, Any], *, only_adapter: bool) -> None:
    """Give a model the attention that an adapter was trained with, or raise."""
    base, current = base_model(model), attention_record(model)
    if current == record:
        return
    parts = record.get("parts", {}) if isinstance(record, Mapping) else None
    if not isinstance(parts, Mapping) or (base is not None and not set(parts) <= set(base.config.sub_configs)):
        check.fail("adapter", "one whose attention record is a dictionary, with parts of this model", repr(record))
    if base is None or not only_adapter:
        expected = f"trained with this model's attention, {current}; all adapters of a model share its attention"
        check.fail("adapter", expected, dict(record))
    settings = {key: value for key, value in record.items() if key not in ("attention", "parts")}
    name = record.get("attention")
    if isinstance(base.config, SoftplusGPTConfig):
        if {**(current or {}), "power": record.get("power")} != record or isinstance(record.get("power"), str):
            check.fail("adapter", f"trained with this model's attention, {current}", dict(record))
        set_power(base, power_from_json(record["power"]))
    elif isinstance(name, str) and name in KNOWN:
        use_attention(base, name, **{**settings, "power": power_from_json(settings.get("power"))})
    elif isinstance(name, Mapping):
        setattr(base.config, SETTINGS, settings)
        base.set_attn_implementation(dict(name))
        propagate_settings(base.config)
    else:
        check.fail("adapter", "trained with an attention that this version of softplus_attention has", repr(name))
    for key, part_settings in parts.items():
        setattr(getattr(base.config, key), SETTINGS, dict(part_settings))
    if attention_record(base) != record:
        check.fail("adapter", f"one with an attention that {type(base).__name__} supports", dict(record))


@contextlib.contextmanager
def record_attention(model: nn.Module) -> Iterator[None]:
    token = _saving.set(attention_record(model))
    try:
        yield
    finally:
        _saving.reset(token)


def recording_attention(save_pretrained: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(save_pretrained)
    def save_with_attention(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with record_attention(self):
            return save_pretrained(self, *args, **kwargs)

    return save_with_attention


def wrap_peft(_: ModuleType) -> None:
    """Wrap PEFT's reading and writing of adapter_config.json, and its ways to add an adapter to a model."""
    from peft import PeftConfig, PeftModel
    from peft.config import PeftConfigMixin
    from peft.tuners.tuners_utils import BaseTuner

    to_dict, read, make = PeftConfigMixin.to_dict, PeftConfigMixin.from_json_file, PeftConfigMixin.from_peft_type
    inject, load = BaseTuner.inject_adapter, PeftModel.load_adapter

    @functools.wraps(to_dict)
    def to_dict_with_attention(self: Any) -> dict[str, Any]:
        saved, record = to_dict(self), _saving.get(None)
        return saved if record is None else mark(saved, record)

    @functools.wraps(read.__func__)
    def from_json_file(cls: Any, path_json_file: str, **kwargs: Any) -> dict[str, Any]:
        found = read.__func__(cls, path_json_file, **kwargs)
        return unmark(found) if SETTINGS in found else found

    @functools.wraps(make.__func__)
    def from_peft_type(cls: Any, **kwargs: Any) -> Any:
        record = kwargs.pop(SETTINGS, None)
        config = make.__func__(cls, **kwargs)
        if record is not None:
            setattr(config, SETTINGS, record)
        return config

    def restore_from(config: Any, model: nn.Module, adapters: Mapping[str, Any], adapter_name: str) -> None:
        record = getattr(config, SETTINGS, None)
        if record is not None:
            restore(model, record, only_adapter=not set(adapters) - {adapter_name})

    @functools.wraps(inject)
    def inject_adapter(self: Any, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        restore_from(self.peft_config[adapter_name], model, self.peft_config, adapter_name)
        inject(self, model, adapter_name, *args, **kwargs)

    @functools.wraps(load)
    def load_adapter(self: Any, model_id: Any, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
        # Read the saved config: the one in use may come from the caller or from a run that is resumed.
        saved = PeftConfig.from_pretrained(model_id, **self._split_kwargs(kwargs)[0])
        restore_from(saved, self, self.peft_config, adapter_name)
        return load(self, model_id, adapter_name, *args, **kwargs)

    copy_default_targets()
    PeftConfigMixin.to_dict = to_dict_with_attention
    PeftConfigMixin.from_json_file = classmethod(from_json_file)  # type: ignore[arg-type]
    PeftConfigMixin.from_peft_type = classmethod(from_peft_type)  # type: ignore[arg-type]
    BaseTuner.inject_adapter = inject_adapter
    PeftModel.load_adapter = load_adapter
    PeftModel.save_pretrained = recording_attention(PeftModel.save_pretrained)
    PreTrainedModel.save_pretrained = recording_attention(PreTrainedModel.save_pretrained)  # type: ignore[method-assign]


def copy_default_targets() -> None:
    """Give our model types PEFT's default ``target_modules`` of their hosts."""
    from peft.utils import constants

    for name, targets in vars(constants).items():
        if name.startswith("TRANSFORMERS_MODELS_TO_") and isinstance(targets, dict):
            for host, modules in list(targets.items()):
                targets.setdefault(PREFIX + host, modules)
            targets.setdefault("softplus_gpt", targets.get("llama"))


class AfterImport(MetaPathFinder):
    """Calls ``callback(module)`` after the first import of ``name``, if it is ever imported."""

    def __init__(self, name: str, callback: Callable[[ModuleType], None]) -> None:
        self.name, self.callback = name, callback

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> Any:
        if name != self.name:
            return None
        finders = (finder for finder in sys.meta_path if finder is not self)
        spec = next((spec for finder in finders if (spec := finder.find_spec(name, path, target))), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_with_callback(module: ModuleType) -> None:
                execute(module)
                self.callback(module)

            spec.loader.exec_module = execute_with_callback  # type: ignore[method-assign]
        return spec


def after_import(name: str, callback: Callable[[ModuleType], None]) -> None:
    if name in sys.modules:
        callback(sys.modules[name])
    else:
        sys.meta_path.insert(0, AfterImport(name, callback))


def watch_peft() -> None:
    after_import("peft", wrap_peft)
