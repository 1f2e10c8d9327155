"""What ``import softplus_attention.huggingface`` tells transformers.

Beyond the public registrations two methods of transformers are wrapped, because without that a name of ours could be
lost or ignored in silence; tests fail where transformers stops calling them.
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
from softplus_attention.huggingface.continuous import keep_attention
from softplus_attention.huggingface.extension.modeling import CLASSES as EXTENDED
from softplus_attention.huggingface.hosts import (
    PREFIX,
    attention_names,
    check_own,
    has_own,
    host_names,
    names_in,
    register_hosts,
)
from softplus_attention.huggingface.masks import range_mask
from softplus_attention.huggingface.modeling_softplus_gpt import SoftplusGPTForCausalLM, SoftplusGPTModel
from softplus_attention.huggingface.saving import wrap_saving

ENGINES = ("vllm", "vllm_mla", "sglang", "tgi")  # what they call their own softmax in transformers' models
_models_by_config: WeakValueDictionary[int, PreTrainedModel] = WeakValueDictionary()


def register() -> None:
    for name in KNOWN:
        AttentionInterface.register(name, attention_function(name))
        # Without its mask function transformers passes no mask at all, and padding would be attended to in silence.
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
        keep_attention()
        watch_peft()


def save_attention_names() -> None:
    """transformers leaves ``attn_implementation`` out of config.json, so a model trained with LSSAR would come back as
    one with softmax and say nothing. Ours are written; where this package is missing, loading such a model then fails.
    """
    to_dict = PreTrainedConfig.to_dict

    @functools.wraps(to_dict)
    def to_dict_with_attention(self: PreTrainedConfig) -> dict[str, Any]:
        saved = to_dict(self)
        if isinstance(settings := vars(self).get(SETTINGS), Mapping):
            saved[SETTINGS] = settings_to_json(settings)
            if not settings and isinstance(settings, InheritedSettings):
                del saved[SETTINGS]
        for key in self.sub_configs:  # at loading they are shared again, whatever the whole then has
            part = getattr(self, key, None)
            settings = vars(part).get(SETTINGS) if isinstance(part, PreTrainedConfig) else None
            if isinstance(settings, InheritedSettings) and vars(settings.whole).get(SETTINGS) is vars(self).get(
                SETTINGS
            ):
                saved[key].pop(SETTINGS, None)
        if has_own(tree := attention_names(self)):
            saved["attn_implementation"] = tree[""] if "" in tree and len(names_in(tree)) == 1 else tree
        return saved

    to_dict_with_attention.knows_softplus_attention = True  # type: ignore[attr-defined]
    PreTrainedConfig.to_dict = to_dict_with_attention  # type: ignore[method-assign]


def keep_attention_names() -> None:
    """``attn_implementation=None``, which many programs pass, would replace the name in a config by softmax's."""
    from_dict, get_dict = PreTrainedConfig.from_dict.__func__, PreTrainedConfig.get_config_dict.__func__
    name = PreTrainedConfig._attn_implementation

    @functools.wraps(from_dict)
    def from_dict_keeping_name(cls: Any, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        if kwargs.get("attn_implementation", "") is None and has_own(config_dict.get("attn_implementation")):
            del kwargs["attn_implementation"]
        found = from_dict(cls, config_dict, **kwargs)
        config = found[0] if isinstance(found, tuple) else found
        if SETTINGS in vars(config):  # a part may be all that is loaded of a composite model
            propagate_settings(config)
        return found

    def set_unless_none(self: PreTrainedConfig, value: Any) -> None:
        if value is None and has_own(attention_names(self)):
            return
        engines = {one for one in names_in(value) if isinstance(one, str)} & set(ENGINES)
        if engines and has_own(attention_names(self)):  # of a part of a composite model, say
            check_own(self.model_type, engines.pop())
        name.fset(self, value)

    @functools.wraps(get_dict)
    def get_dict_of_class(cls: Any, *args: Any, **kwargs: Any) -> Any:
        """Where a host's own class loads what is saved as ours, as users of that class write it."""
        found, others = get_dict(cls, *args, **kwargs)
        if cls.model_type and found.get("model_type") == PREFIX + cls.model_type:
            if kwargs.get("attn_implementation") is not None:
                check_own(found["model_type"], kwargs["attn_implementation"])
            found = {key: value for key, value in found.items() if key != "auto_map"}
            found |= {"model_type": cls.model_type, "architectures": host_names(found.get("architectures"))}
        return found, others

    PreTrainedConfig.get_config_dict = classmethod(get_dict_of_class)  # type: ignore[assignment]
    PreTrainedConfig.from_dict = classmethod(from_dict_keeping_name)  # type: ignore[arg-type, assignment]
    PreTrainedConfig._attn_implementation = property(name.fget, set_unless_none)


def refuse_shared_configs() -> None:
    """``from_config(config, attn_implementation="sdpa")`` writes the name into the config itself: a model of ours that
    was made from the same object would go on with softmax."""
    from_config = PreTrainedModel._from_config.__func__

    @functools.wraps(from_config)
    def from_config_of_its_own(cls: Any, config: PreTrainedConfig, **kwargs: Any) -> Any:
        own, name = attention_names(config), kwargs.get("attn_implementation")
        other = _models_by_config.get(id(config))
        if other is not None and has_own(own) and name is not None and names_in(name) != names_in(own):
            found = f"the config object of a {type(other).__name__} whose attention it would change too"
            check.fail("config", f"a copy, copy.deepcopy(config), with attn_implementation={name!r}", found)
        return from_config(cls, config, **kwargs)

    PreTrainedModel._from_config = classmethod(from_config_of_its_own)  # type: ignore[arg-type, method-assign]


def uses_the_interface(model: PreTrainedModel) -> bool:
    """transformers reads the source of a class to know, and says no where it cannot, as in a notebook: then the classes
    that it is made from are asked too."""
    kinds = (kind for kind in type(model).__mro__ if issubclass(kind, PreTrainedModel) and kind is not PreTrainedModel)
    return any(kind._can_set_attn_implementation() for kind in kinds)  # type: ignore[attr-defined]


def refuse_models_without_the_interface() -> None:
    """A model that computes its attention by itself would take our name and go on with softmax; some (Bloom, CodeGen)
    would also read "no mask" as "everything is visible"."""
    get_correct = PreTrainedModel.get_correct_attn_implementation

    @functools.wraps(get_correct)
    def get_correct_or_refuse(self: PreTrainedModel, requested_attention: str | None, *others: Any, **more: Any) -> str:
        if requested_attention in KNOWN:
            if not uses_the_interface(self):
                raise ValueError(
                    f"attn_implementation={requested_attention!r}: {type(self).__name__} does not use transformers' "
                    "attention interface, so another attention cannot be put into it"
                )
            if not (self._supports_sdpa or self._supports_attention_backend):
                # Some of its attentions may compute by themselves, or say of themselves that they are not causal where
                # they are: without a mask they would see what comes after a token.
                raise ValueError(
                    f"attn_implementation={requested_attention!r}: {type(self).__name__} does not support custom "
                    "attention functions in every layer"
                )
            propagate_settings(self.config)
            attention_from_config(self.config, requested_attention)
            _models_by_config[id(self.config)] = self
        return get_correct(self, requested_attention, *others, **more)

    PreTrainedModel.get_correct_attn_implementation = get_correct_or_refuse  # type: ignore[method-assign]
