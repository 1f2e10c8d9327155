"""Model types for host models with an attention of the catalogue: ``softplus_llama`` and so on.

Engines that know ``llama`` run softmax whatever else config.json says. So a host model is saved under a type that they
do not know, and the classes of this type run only attentions of the catalogue. The classes are made on first access
from transformers' tables of names, so that no model is imported before it is needed.
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
ALWAYS_LISTED = ("AutoModel", "AutoModelForCausalLM")
PREFERRED = (*ALWAYS_LISTED, "AutoModelForSeq2SeqLM", "AutoModelForImageTextToText")  # if several find the same class
_hosts: dict[str, tuple[str, str]] = {}  # our class name -> the host's model type and class name
_own_types: set[str] = set()  # types of this package that have no host
_own_modules: dict[str, str] = {}  # class name of such a type -> module


class HostConfig:
    """Mixin for a host's config."""

    @property
    def _attn_implementation(self) -> str:
        return vars(self).get(INTERNAL) or "lssar"

    @_attn_implementation.setter
    def _attn_implementation(self, value: str | Mapping[str, Any] | None) -> None:
        if value is not None:
            check_catalogue_name(type(self).__name__, value)
            PreTrainedConfig._attn_implementation.fset(self, value)


class HostModel:
    """Mixin for a host's model."""

    config: Any

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:
        own = self.config._attn_implementation
        if requested_attention not in (None, own):
            check_catalogue_name(type(self).__name__, requested_attention)
        return super().get_correct_attn_implementation(requested_attention or own, is_init_check)  # type: ignore[misc]

    def set_attn_implementation(self, attn_implementation: Any, *args: Any, **kwargs: Any) -> None:
        before = attention_names(self.config)
        if isinstance(attn_implementation, str):
            check_catalogue_name(type(self).__name__, attn_implementation)
        super().set_attn_implementation(attn_implementation, *args, **kwargs)  # type: ignore[misc]
        if not has_catalogue_name(after := attention_names(self.config)):
            super().set_attn_implementation(before, *args, **kwargs)  # type: ignore[misc]
            check_catalogue_name(type(self).__name__, after)

    @classmethod
    def maybe_distribute_model(cls, model: Any, distributed_config: Any, *args: Any) -> Any:
        check_tensor_parallel(model, distributed_config)
        return super().maybe_distribute_model(model, distributed_config, *args)  # type: ignore[misc]

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return host_class(cls)._can_set_attn_implementation()

    @classmethod
    def is_custom_code(cls) -> bool:
        """False, so that weights are initialised and renamed like the host's."""
        return False


def check_tensor_parallel(model: Any, distributed_config: Any) -> None:
    """Raise if transformers cannot divide the model: it would replicate it or give wrong results."""
    processes = getattr(distributed_config, "tp_size", 1) or 1
    config, plan = model.config.get_text_config(), getattr(distributed_config, "tp_plan", None)
    plan = plan if isinstance(plan, Mapping) else getattr(model, "tp_plan", {})
    if processes > 1 and not any("*" in name for name in plan):  # entries for layers have a "*"
        expected = f"1: {type(model).__name__} has no tensor parallel plan, so each process would hold the whole model"
        check.fail("tp_size", expected, processes)
    if processes > 1 and any(has_slopes(x.attention) for x in model.modules() if hasattr(x, "learned_kind")):
        check.fail("tp_size", "1: ALiBi's slopes depend on all heads", processes)
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        number = getattr(config, name, None)
        if isinstance(number, int) and number % processes:
            check.fail("tp_size", f"a divisor of `{name}`, {number}", processes)


def host_class(kind: type) -> Any:
    return next(base for base in kind.__mro__ if base.__module__.startswith("transformers."))


def attention_names(config: PreTrainedConfig) -> dict[str, Any]:
    """The attention of a config under "" and those of its parts, in the form of ``attn_implementation``. All parts are
    named, because at loading the top's name applies to them otherwise. Names that were never set are left out."""
    own = config._attn_implementation if isinstance(config, HostConfig) else vars(config).get(INTERNAL)
    if config.model_type in _own_types:  # their configs have another field for the attention
        own = None
    found: dict[str, Any] = {} if own is None else {"": own}
    for key in config.sub_configs:
        part = getattr(config, key, None)
        if isinstance(part, PreTrainedConfig) and (names := attention_names(part)):
            found[key] = names[""] if list(names) == [""] else names
    return found


def names_in(tree: Any) -> set[Any]:
    return set().union(*map(names_in, tree.values())) if isinstance(tree, Mapping) else {tree}


def has_catalogue_name(tree: str | Mapping[str, Any] | None) -> bool:
    return not names_in(tree).isdisjoint(KNOWN)


def check_catalogue_name(name: str, attention: str | Mapping[str, Any] | None) -> None:
    if not has_catalogue_name(attention):
        expected = f"None or a name of softplus_attention.catalog, since {name} runs no other attention"
        check.fail("attn_implementation", expected, repr(attention))


def prefixed(names: Any) -> Any:
    """The names of our classes for a host's class names."""
    if isinstance(names, str):
        return CLASS_PREFIX + names
    return tuple(map(prefixed, names)) if isinstance(names, tuple | list) else names


def host_names(names: Iterable[str] | None) -> list[str] | None:
    """The host's class names for the names of our classes."""
    return [_hosts[name][1] if name in _hosts else name for name in names or ()] or None


def auto_mappings(module: Any) -> Iterable[Any]:
    return [found for found in vars(module).values() if isinstance(found, auto_factory._LazyAutoMapping)]


def register_hosts(own: Mapping[str, tuple[Any, ...]]) -> None:
    """Add a type for each host to transformers' tables of names; ``own`` has the classes of types without a host.

    ``AutoModel.register`` would import the models, and Trainer, pipelines and lm-eval read the tables.
    """
    here = sys.modules[__name__]
    configs = configuration_auto.CONFIG_MAPPING_NAMES
    hosts = {host: name for host, name in configs.items() if host not in own and not host.startswith(PREFIX)}
    mappings = [*auto_mappings(modeling_auto), *auto_mappings(tokenization_auto)]
    for host, name in hosts.items():
        _hosts[CLASS_PREFIX + name] = host, name
        add_entry(configs, PREFIX + host, CLASS_PREFIX + name, [configuration_auto.CONFIG_MAPPING], here)
    for mapping in mappings:
        names = mapping._model_mapping
        is_model = names is not tokenization_auto.TOKENIZER_MAPPING_NAMES
        for host, name in hosts.items():
            mapping._reverse_config_mapping.setdefault(CLASS_PREFIX + name, PREFIX + host)
            if host not in names:
                continue
            found = names[host]
            add_entry(names, PREFIX + host, prefixed(found) if is_model else found, [mapping], here)
            for class_name in [found] if isinstance(found, str) else found if is_model else ():
                _hosts.setdefault(CLASS_PREFIX + class_name, (host, class_name))
    tables = modeling_auto.MODEL_MAPPING_NAMES, modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    for model_type, (config, *models) in own.items():
        _own_types.add(model_type)
        _own_modules.update({kind.__name__: kind.__module__ for kind in (config, *models)})
        module = sys.modules[config.__module__]
        add_entry(configs, model_type, config.__name__, [configuration_auto.CONFIG_MAPPING], module)
        for mapping in mappings:
            mapping._reverse_config_mapping[config.__name__] = model_type
        for names, kind in zip(tables, models, strict=True):
            users = [mapping for mapping in mappings if mapping._model_mapping is names]
            add_entry(names, model_type, kind.__name__, users, sys.modules[kind.__module__])
    patch_transformers_getattr()


def patch_transformers_getattr() -> None:
    """``transformers serve`` and pipelines look up the class that config.json names in the transformers module."""
    module_type = type(transformers)
    getattr_of_module = getattr(module_type, "__getattr__", None)
    if getattr_of_module is None:
        return

    @functools.wraps(getattr_of_module)
    def getattr_with_ours(self: Any, name: str) -> Any:
        if self.__name__ == "transformers" and (name in _hosts or name in _own_modules):
            return getattr(sys.modules[module_for(name)], name)
        return getattr_of_module(self, name)

    setattr(module_type, "__getattr__", getattr_with_ours)  # noqa: B010  a method of the module's class


def add_entry(names: Any, model_type: str, name: Any, mappings: Iterable[Any], module: Any) -> None:
    names[model_type] = name
    for mapping in mappings:
        mapping._modules[configuration_auto.model_type_to_module_name(model_type)] = module


def __getattr__(name: str) -> Any:
    """Make the class ``name`` from the host's."""
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
        # AutoModelForCausalLM loads the text model of a composite model by this class: the part has the host's config.
        is_part = own is whole.sub_configs.get("text_config")
        body["config_class"] = own if is_part else configuration_auto.CONFIG_MAPPING[PREFIX + own.model_type]
    # transformers finds the renaming of a host's weights by its type or by a class name.
    renamed = conversion_mapping.get_checkpoint_conversion_mapping(host if is_config else host_name)
    if renamed is not None:
        ours = PREFIX + host if is_config else name
        conversion_mapping.register_checkpoint_conversion_mapping(ours, renamed, overwrite=True)
    return globals().setdefault(name, type(name, bases, body))


def has_type(config: PreTrainedConfig) -> bool:
    """Whether a config is of a host that has a type here: exactly transformers' class for its model type."""
    name = configuration_auto.CONFIG_MAPPING_NAMES.get(config.model_type)
    return name == type(config).__name__ and CLASS_PREFIX + name in _hosts


def config_to_save(config: PreTrainedConfig) -> PreTrainedConfig | None:
    """The config to save, with our type, if the attention is of the catalogue; None for other configs."""
    if isinstance(config, HostConfig) or config.model_type in _own_types:
        return config
    if not has_type(config) or not has_catalogue_name(attention_names(config)):
        return None
    found = copy.copy(config)
    found.__class__ = __getattr__(CLASS_PREFIX + type(config).__name__)
    names = [CLASS_PREFIX + name if CLASS_PREFIX + name in _hosts else name for name in config.architectures or ()]
    found.architectures = names or None
    return found


def auto_classes(config: PreTrainedConfig) -> dict[str, str]:
    """The class names for a config of our types, with Auto classes as keys."""
    found = {"AutoConfig": type(config).__name__}
    kinds = {key: kind for key, kind in vars(modeling_auto).items() if key.startswith("AutoModel")}
    for auto in sorted(kinds, key=lambda key: (PREFERRED.index(key) if key in PREFERRED else len(PREFERRED), key)):
        name = kinds[auto]._model_mapping._model_mapping.get(config.model_type)
        unlisted = {*(config.architectures or ())} - {*found.values()}
        if isinstance(name, str) and (auto in ALWAYS_LISTED or name in unlisted):
            found[auto] = name
    return found


def module_for(name: str) -> str:
    return _own_modules.get(name, __name__)
