"""Host models with an attention of the catalogue as model types of their own: ``softplus_llama`` and so on.

Engines that know ``llama`` run softmax whatever else config.json says. So a host model is saved under a type that they
do not know, and its classes run no other attention. The classes are made when they are first asked for, from
transformers' tables of names: no model is imported before it is needed.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import transformers
from transformers import PreTrainedConfig, conversion_mapping
from transformers.models.auto import auto_factory, configuration_auto, modeling_auto, tokenization_auto

from softplus_attention import validation as check
from softplus_attention.attentions.catalog import KNOWN
from softplus_attention.distributed import has_slopes

PREFIX, CLASS_PREFIX = "softplus_", "Softplus"
INTERNAL = "_attn_implementation_internal"
USUAL = ("AutoModel", "AutoModelForCausalLM")
FIRST = (*USUAL, "AutoModelForSeq2SeqLM", "AutoModelForImageTextToText")  # of several that find the same class
_hosts: dict[str, tuple[str, str]] = {}  # by the name of a class: the host's model type and the name of its class
_own_types: set[str] = set()
_own_modules: dict[str, str] = {}  # by the name of a class that has no host


class HostConfig:
    """Mixed into a host's config."""

    @property
    def _attn_implementation(self) -> str:
        return vars(self).get(INTERNAL) or "lssar"

    @_attn_implementation.setter
    def _attn_implementation(self, value: str | Mapping[str, Any] | None) -> None:
        if value is not None:
            check_own(type(self).__name__, value)
            PreTrainedConfig._attn_implementation.fset(self, value)


class HostModel:
    """Mixed into a host's model."""

    config: Any

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:
        own = self.config._attn_implementation
        if requested_attention not in (None, own):
            check_own(type(self).__name__, requested_attention)
        return super().get_correct_attn_implementation(requested_attention or own, is_init_check)  # type: ignore[misc]

    def set_attn_implementation(self, attn_implementation: Any, *options: Any, **named: Any) -> None:
        before = attention_names(self.config)
        if isinstance(attn_implementation, str):
            check_own(type(self).__name__, attn_implementation)
        super().set_attn_implementation(attn_implementation, *options, **named)  # type: ignore[misc]
        if not has_own(after := attention_names(self.config)):
            super().set_attn_implementation(before, *options, **named)  # type: ignore[misc]
            check_own(type(self).__name__, after)

    @classmethod
    def maybe_distribute_model(cls, model: Any, distributed_config: Any, *rest: Any) -> Any:
        check_tensor_parallel(model, distributed_config)
        return super().maybe_distribute_model(model, distributed_config, *rest)  # type: ignore[misc]

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return host_class(cls)._can_set_attn_implementation()

    @classmethod
    def is_custom_code(cls) -> bool:
        """The code is the host's: its weights are initialised and renamed as the host's are."""
        return False


def check_tensor_parallel(model: Any, distributed_config: Any) -> None:
    """transformers divides the heads: what it cannot divide would be replicated or wrong."""
    processes = getattr(distributed_config, "tp_size", 1) or 1
    config, plan = model.config.get_text_config(), getattr(distributed_config, "tp_plan", None)
    plan = plan if isinstance(plan, Mapping) else getattr(model, "tp_plan", {})
    if processes > 1 and not any("*" in name for name in plan):  # of each layer
        what = f"1: {type(model).__name__} has no tensor parallel plan, so each process would hold all of it"
        check.fail("tp_size", what, processes)
    if processes > 1 and any(has_slopes(one.attention) for one in model.modules() if hasattr(one, "learned_kind")):
        check.fail("tp_size", "1: ALiBi's slopes depend on all heads", processes)
    for word in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        number = getattr(config, word, None)
        if isinstance(number, int) and number % processes:
            check.fail("tp_size", f"a divisor of `{word}`, {number}", processes)


def host_class(kind: type) -> Any:
    return next(base for base in kind.__mro__ if base.__module__.startswith("transformers."))


def attention_names(config: PreTrainedConfig) -> dict[str, Any]:
    """The attention of a config under "", and those of its parts, as ``attn_implementation`` takes them: at loading the
    top decides for its parts, so that all are named there. Those that were never set are left out."""
    own = config._attn_implementation if isinstance(config, HostConfig) else vars(config).get(INTERNAL)
    if config.model_type in _own_types:  # their attention is in settings of their own
        own = None
    found: dict[str, Any] = {} if own is None else {"": own}
    for key in config.sub_configs:
        part = getattr(config, key, None)
        if isinstance(part, PreTrainedConfig) and (names := attention_names(part)):
            found[key] = names[""] if list(names) == [""] else names
    return found


def names_in(tree: Any) -> set[Any]:
    return set().union(*map(names_in, tree.values())) if isinstance(tree, Mapping) else {tree}


def has_own(tree: str | Mapping[str, Any] | None) -> bool:
    return not names_in(tree).isdisjoint(KNOWN)


def check_own(name: str, attention: str | Mapping[str, Any] | None) -> None:
    if not has_own(attention):
        expected = f"None or a name of softplus_attention.catalog, since {name} runs no other attention"
        check.fail("attn_implementation", expected, repr(attention))


def prefixed(names: Any) -> Any:
    """The names of our classes for those of a host's."""
    if isinstance(names, str):
        return CLASS_PREFIX + names
    return tuple(map(prefixed, names)) if isinstance(names, tuple | list) else names


def host_names(names: Iterable[str] | None) -> list[str] | None:
    """The names of a host's classes for those of ours."""
    return [_hosts[name][1] if name in _hosts else name for name in names or ()] or None


def auto_mappings(module: Any) -> Iterable[Any]:
    return [found for found in vars(module).values() if isinstance(found, auto_factory._LazyAutoMapping)]


def register_hosts(own: Mapping[str, tuple[Any, ...]]) -> None:
    """Enter a type for each host in transformers' tables of names; ``own`` are classes by type that have no host.

    The tables, and not ``AutoModel.register``: Trainer, pipelines and lm-eval look there, and nothing is imported.
    """
    here = sys.modules[__name__]
    configs = configuration_auto.CONFIG_MAPPING_NAMES
    hosts = {host: name for host, name in configs.items() if host not in own and not host.startswith(PREFIX)}
    mappings = [*auto_mappings(modeling_auto), *auto_mappings(tokenization_auto)]
    for host, name in hosts.items():
        _hosts[CLASS_PREFIX + name] = host, name
        enter(configs, PREFIX + host, CLASS_PREFIX + name, [configuration_auto.CONFIG_MAPPING], here)
    for mapping in mappings:
        names = mapping._model_mapping
        is_model = names is not tokenization_auto.TOKENIZER_MAPPING_NAMES
        for host, name in hosts.items():
            mapping._reverse_config_mapping.setdefault(CLASS_PREFIX + name, PREFIX + host)
            if host not in names:
                continue
            found = names[host]
            enter(names, PREFIX + host, prefixed(found) if is_model else found, [mapping], here)
            for one in [found] if isinstance(found, str) else found if is_model else ():
                _hosts.setdefault(CLASS_PREFIX + one, (host, one))
    tables = modeling_auto.MODEL_MAPPING_NAMES, modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    for model_type, (config, *models) in own.items():
        _own_types.add(model_type)
        _own_modules.update({kind.__name__: kind.__module__ for kind in (config, *models)})
        module = sys.modules[config.__module__]
        enter(configs, model_type, config.__name__, [configuration_auto.CONFIG_MAPPING], module)
        for mapping in mappings:
            mapping._reverse_config_mapping[config.__name__] = model_type
        for names, kind in zip(tables, models, strict=True):
            users = [mapping for mapping in mappings if mapping._model_mapping is names]
            enter(names, model_type, kind.__name__, users, sys.modules[kind.__module__])
    offer_in_transformers()


def offer_in_transformers() -> None:
    """``transformers serve`` and pipelines look for the class that config.json names in transformers itself."""
    kind = type(transformers)
    find = getattr(kind, "__getattr__", None)
    if find is None:
        return

    @functools.wraps(find)
    def find_ours(self: Any, name: str) -> Any:
        if self.__name__ == "transformers" and (name in _hosts or name in _own_modules):
            return getattr(sys.modules[module_for(name)], name)
        return find(self, name)

    setattr(kind, "__getattr__", find_ours)  # noqa: B010  a method of the class of a module


def enter(names: Any, model_type: str, name: Any, mappings: Iterable[Any], module: Any) -> None:
    names[model_type] = name
    for mapping in mappings:
        mapping._modules[configuration_auto.model_type_to_module_name(model_type)] = module


def __getattr__(name: str) -> Any:
    """The class of that name, made from the host's."""
    if name not in _hosts:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    host, host_name = _hosts[name]
    body: dict[str, Any] = {"__module__": __name__, "__qualname__": name}
    is_config = host_name == configuration_auto.CONFIG_MAPPING_NAMES[host]
    if is_config:
        bases: tuple[type, ...] = (HostConfig, configuration_auto.CONFIG_MAPPING[host])
        body["model_type"] = PREFIX + host
    else:
        base = modeling_auto.MODEL_MAPPING._load_attr_from_module(host, host_name)
        bases, own, whole = (HostModel, base), base.config_class, configuration_auto.CONFIG_MAPPING[host]
        # AutoModelForCausalLM loads the text model of a composite one by this: then the part's config is the host's.
        is_part = own is whole.sub_configs.get("text_config")
        body["config_class"] = own if is_part else configuration_auto.CONFIG_MAPPING[PREFIX + own.model_type]
    # Weights of the host's checkpoints are renamed by its type or by the name of a class.
    renamed = conversion_mapping.get_checkpoint_conversion_mapping(host if is_config else host_name)
    if renamed is not None:
        ours = PREFIX + host if is_config else name
        conversion_mapping.register_checkpoint_conversion_mapping(ours, renamed, overwrite=True)
    return globals().setdefault(name, type(name, bases, body))


def has_type(config: PreTrainedConfig) -> bool:
    """Whether a config is of a host with a type of its own here: one of transformers' classes, under its own type."""
    name = configuration_auto.CONFIG_MAPPING_NAMES.get(config.model_type)
    return name == type(config).__name__ and CLASS_PREFIX + name in _hosts


def own_type(config: PreTrainedConfig) -> PreTrainedConfig | None:
    """A config with an attention of ours as it is saved, of a type that runs no other; None for every other config."""
    if isinstance(config, HostConfig) or config.model_type in _own_types:
        return config
    if not has_type(config) or not has_own(attention_names(config)):
        return None
    found = copy.copy(config)
    found.__class__ = __getattr__(CLASS_PREFIX + type(config).__name__)
    names = [CLASS_PREFIX + name if CLASS_PREFIX + name in _hosts else name for name in config.architectures or ()]
    found.architectures = names or None
    return found


def auto_classes(config: PreTrainedConfig) -> dict[str, str]:
    """The class names of a config of our types, by the Auto classes that look for them."""
    found = {"AutoConfig": type(config).__name__}
    kinds = {key: kind for key, kind in vars(modeling_auto).items() if key.startswith("AutoModel")}
    for auto in sorted(kinds, key=lambda key: (FIRST.index(key) if key in FIRST else len(FIRST), key)):
        name = kinds[auto]._model_mapping._model_mapping.get(config.model_type)
        if isinstance(name, str) and (auto in USUAL or name in {*(config.architectures or ())} - {*found.values()}):
            found[auto] = name
    return found


def module_for(name: str) -> str:
    return _own_modules.get(name, __name__)


__all__ = [
    "HostConfig",
    "HostModel",
    "attention_names",
    "auto_classes",
    "check_own",
    "has_own",
    "names_in",
    "own_type",
    "register_hosts",
]
