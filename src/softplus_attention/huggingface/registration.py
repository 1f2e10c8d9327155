"""What ``import softplus_attention.huggingface`` registers and patches in transformers.

Methods of transformers are wrapped where an attention's name would otherwise be lost or ignored silently. Tests fail if
transformers stops calling them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any
from weakref import WeakValueDictionary

from transformers import AttentionInterface, AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedConfig
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import PreTrainedModel

from softplus_attention import validation as check
from softplus_attention.attentions.catalog import KNOWN
from softplus_attention.huggingface.adapters import watch_peft
from softplus_attention.huggingface.attention import (
    SETTINGS,
    InheritedSettings,
    attention_from_config,
    attention_function,
    propagate_settings,
    settings_to_json,
)
from softplus_attention.huggingface.configuration_softplus_gpt import SoftplusGPTConfig
from softplus_attention.huggingface.continuous import patch_continuous_batching
from softplus_attention.huggingface.extension.modeling import CLASSES as EXTENDED
from softplus_attention.huggingface.hosts import (
    PREFIX,
    attention_names,
    check_catalogue_name,
    has_catalogue_name,
    host_names,
    names_in,
    register_hosts,
)
from softplus_attention.huggingface.masks import range_mask
from softplus_attention.huggingface.modeling_softplus_gpt import SoftplusGPTForCausalLM, SoftplusGPTModel
from softplus_attention.huggingface.saving import wrap_saving

ENGINES = ("vllm", "vllm_mla", "sglang", "tgi")  # names of inference engines' softmax in transformers models
_models_by_config: WeakValueDictionary[int, PreTrainedModel] = WeakValueDictionary()


def register() -> None:
    for name in KNOWN:
        AttentionInterface.register(name, attention_function(name))
        # Without a mask function transformers passes no mask, and rows would silently attend to padding.
        AttentionMaskInterface.register(name, range_mask)
    own = {SoftplusGPTConfig.model_type: (SoftplusGPTConfig, SoftplusGPTModel, SoftplusGPTForCausalLM)}
    own |= {config.model_type: (config, *models) for config, *models in EXTENDED.values()}
    for model_type, (config, model, causal_lm) in own.items():
        AutoConfig.register(model_type, config, exist_ok=True)
        AutoModel.register(config, model, exist_ok=True)
        AutoModelForCausalLM.register(config, causal_lm, exist_ok=True)
    if not hasattr(PreTrainedConfig.to_dict, "knows_softplus_attention"):
        register_hosts(own)
        save_attention_names()
        keep_attention_names()
        wrap_saving()
        refuse_models_without_the_interface()
        refuse_shared_configs()
        patch_continuous_batching()
        watch_peft()


def save_attention_names() -> None:
    """Write catalogue names into config.json. transformers leaves ``attn_implementation`` out, so a model trained with
    LSSAR would silently load with softmax. With the name, loading fails where this package is missing."""
    to_dict = PreTrainedConfig.to_dict

    @functools.wraps(to_dict)
    def to_dict_with_attention(self: PreTrainedConfig) -> dict[str, Any]:
        saved = to_dict(self)
        if isinstance(settings := vars(self).get(SETTINGS), Mapping):
            saved[SETTINGS] = settings_to_json(settings)
            if not settings and isinstance(settings, InheritedSettings):
                del saved[SETTINGS]
        for key in self.sub_configs:  # parts inherit the settings again when they are loaded
            part = getattr(self, key, None)
            settings = vars(part).get(SETTINGS) if isinstance(part, PreTrainedConfig) else None
            parent = vars(settings.parent) if isinstance(settings, InheritedSettings) else None
            if parent is not None and parent.get(SETTINGS) is vars(self).get(SETTINGS):
                saved[key].pop(SETTINGS, None)
        if has_catalogue_name(tree := attention_names(self)):
            saved["attn_implementation"] = tree[""] if "" in tree and len(names_in(tree)) == 1 else tree
        return saved

    to_dict_with_attention.knows_softplus_attention = True  # type: ignore[attr-defined]
    PreTrainedConfig.to_dict = to_dict_with_attention  # type: ignore[method-assign]


def keep_attention_names() -> None:
    """Keep a config's name if ``attn_implementation=None`` is passed, as many programs do: it would select softmax."""
    from_dict, get_dict = PreTrainedConfig.from_dict.__func__, PreTrainedConfig.get_config_dict.__func__
    implementation = PreTrainedConfig._attn_implementation

    @functools.wraps(from_dict)
    def from_dict_keeping_name(cls: Any, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        if kwargs.get("attn_implementation", "") is None and has_catalogue_name(config_dict.get("attn_implementation")):
            del kwargs["attn_implementation"]
        found = from_dict(cls, config_dict, **kwargs)
        config = found[0] if isinstance(found, tuple) else found
        if SETTINGS in vars(config):  # here too, since only a part of a composite model may be loaded
            propagate_settings(config)
        return found

    def set_unless_none(self: PreTrainedConfig, value: Any) -> None:
        if value is None and has_catalogue_name(attention_names(self)):
            return
        engines = {name for name in names_in(value) if isinstance(name, str)} & set(ENGINES)
        if engines and has_catalogue_name(attention_names(self)):  # for example in a part of a composite model
            check_catalogue_name(self.model_type, engines.pop())
        implementation.fset(self, value)

    @functools.wraps(get_dict)
    def get_dict_of_class(cls: Any, *args: Any, **kwargs: Any) -> Any:
        """Let a host's class (``LlamaForCausalLM``) load what was saved under our type (``softplus_llama``)."""
        found, others = get_dict(cls, *args, **kwargs)
        if cls.model_type and found.get("model_type") == PREFIX + cls.model_type:
            if kwargs.get("attn_implementation") is not None:
                check_catalogue_name(found["model_type"], kwargs["attn_implementation"])
            found = {key: value for key, value in found.items() if key != "auto_map"}
            found |= {"model_type": cls.model_type, "architectures": host_names(found.get("architectures"))}
        return found, others

    PreTrainedConfig.get_config_dict = classmethod(get_dict_of_class)  # type: ignore[assignment]
    PreTrainedConfig.from_dict = classmethod(from_dict_keeping_name)  # type: ignore[arg-type, assignment]
    PreTrainedConfig._attn_implementation = property(implementation.fget, set_unless_none)


def refuse_shared_configs() -> None:
    """``from_config(config, attn_implementation="sdpa")`` writes the name into the config object itself. A model that
    shares this object would silently continue with softmax."""
    from_config = PreTrainedModel._from_config.__func__

    @functools.wraps(from_config)
    def from_unshared_config(cls: Any, config: PreTrainedConfig, **kwargs: Any) -> Any:
        own, name = attention_names(config), kwargs.get("attn_implementation")
        other = _models_by_config.get(id(config))
        if other is not None and has_catalogue_name(own) and name is not None and names_in(name) != names_in(own):
            found = f"the config object of a {type(other).__name__}, whose attention would change too"
            check.fail("config", f"a copy, copy.deepcopy(config), with attn_implementation={name!r}", found)
        return from_config(cls, config, **kwargs)

    PreTrainedModel._from_config = classmethod(from_unshared_config)  # type: ignore[arg-type, method-assign]


def uses_the_interface(model: PreTrainedModel) -> bool:
    """Whether transformers' attention interface is used. transformers reads the class's source, which fails in a
    notebook, so the base classes are asked too."""
    kinds = (kind for kind in type(model).__mro__ if issubclass(kind, PreTrainedModel) and kind is not PreTrainedModel)
    return any(kind._can_set_attn_implementation() for kind in kinds)  # type: ignore[attr-defined]


def refuse_models_without_the_interface() -> None:
    """A model with its own attention code would accept a catalogue name and still compute softmax. Some (Bloom,
    CodeGen) would also treat "no mask" as "everything is visible"."""
    get_correct = PreTrainedModel.get_correct_attn_implementation

    @functools.wraps(get_correct)
    def get_correct_or_refuse(self: PreTrainedModel, requested_attention: str | None, *args: Any, **kwargs: Any) -> str:
        if requested_attention in KNOWN:
            if not uses_the_interface(self):
                raise ValueError(
                    f"attn_implementation={requested_attention!r}: {type(self).__name__} does not use transformers' "
                    "attention interface, so its attention cannot be replaced"
                )
            if not (self._supports_sdpa or self._supports_attention_backend):
                # Some layers may have their own attention code, or declare themselves non-causal although they are
                # causal: without a mask they would see later tokens.
                raise ValueError(
                    f"attn_implementation={requested_attention!r}: {type(self).__name__} does not support custom "
                    "attention functions in every layer"
                )
            propagate_settings(self.config)
            attention_from_config(self.config, requested_attention)
            _models_by_config[id(self.config)] = self
        return get_correct(self, requested_attention, *args, **kwargs)

    PreTrainedModel.get_correct_attn_implementation = get_correct_or_refuse  # type: ignore[method-assign]
