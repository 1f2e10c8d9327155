"""Methods that extend the context without training: ours and those it is compared with.

A method is written ``NAME`` or ``NAME:setting=value,...``, such as ``heads:far=group,heads=24``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from softplus_attention.extend.fitting import FitSettings, fit_far_heads
from softplus_attention.extend.ranking import Ranking
from softplus_attention.huggingface.extension.modeling import extended
from softplus_attention.huggingface.extension.settings import FORMS, Extension
from softplus_attention.validation import did_you_mean, fail, fail_choice


@dataclass(frozen=True)
class Method:
    """``heads=-1`` means all heads, ``group=0`` the smallest power of two that satisfies SelfExtend's rule."""

    kind: str  # original, yarn, ntk or heads
    heads: int = -1
    far: str = "clip"
    window: int = 2048
    sink: int = 4
    near: int = 4096
    group: int = 0
    factor: float = 8.0
    log_n: str = "none"
    level: bool = False
    ranking: str = "best"
    fit: int = 15000  # tokens of text to fit LSSAR to
    length: int = 65536  # context length of the extended model


METHODS = {
    "original": Method("original"),
    "yarn": Method("yarn"),
    "ntk": Method("ntk", factor=2.0),
    "selfextend": Method("heads", far="group", near=1024),
    "rerope": Method("heads", far="clip"),
    "window": Method("heads", heads=0, window=4096),
    "duo": Method("heads", heads=24, far="rope"),
    "heads": Method("heads", heads=12),
}


def parse_method(text: str) -> Method:
    name, _, given = text.partition(":")
    if name not in METHODS:
        fail_choice("method", METHODS, name)
    kinds = {one.name: type(getattr(METHODS[name], one.name)) for one in fields(Method) if one.name != "kind"}
    changes: dict[str, Any] = {}
    for pair in filter(None, given.split(",")):
        key, _, value = pair.partition("=")
        if key not in kinds:
            fail("method", f"with settings of {', '.join(kinds)}", f"{text!r}{did_you_mean(key, kinds)}")
        try:
            if kinds[key] is bool:
                changes[key] = {"yes": True, "no": False}[value]
            else:
                changes[key] = -1 if (key, value) == ("heads", "all") else kinds[key](value)
        except (KeyError, ValueError):
            fail("method", f"with {'yes or no' if kinds[key] is bool else kinds[key].__name__} as {key}", repr(text))
    return replace(METHODS[name], **changes)


def smallest_group(trained: int, length: int, near: int) -> int:
    """SelfExtend's rule: the largest relative position, near + (length - near) / group, is at most two thirds of the
    trained length."""
    group = 1
    while near + (length - near) / group > trained * 2 / 3:
        group *= 2
        if group > length:
            fail("near", f"below two thirds of the trained length, {trained}", near)
    return group


def with_far_positions(method: Method, far: str) -> Method:
    """As `extend` sets them up. With "clip", log N on the far keys finds what is diluted among them, and their common
    weight is levelled, without which the loss rises: 3.390 in place of 3.441 at 64K, and as many needles."""
    is_clip = far == "clip"
    return replace(method, far=far, level=is_clip, log_n="far" if is_clip else "none")


def trained_length(config: Any) -> int:
    """For Llama 3.1 and later, the length after rope scaling, at which training continued."""
    return int(config.max_position_embeddings)


def extension_of(method: Method, config: Any, ranking: Ranking | None) -> Extension:
    layers, heads, trained = config.num_hidden_layers, config.num_key_value_heads, trained_length(config)
    if method.heads in (-1, 0, layers * heads):
        far_heads = [list(range(heads)) if method.heads else [] for _ in range(layers)]
    elif not 0 < method.heads < layers * heads:
        fail("heads", f"from 0 to {layers * heads}, the number of key heads in the model", method.heads)
    elif ranking is None:
        fail("ranking", f"given to choose {method.heads} of {layers * heads} heads", "none")
    else:
        far_heads = ranking.far_heads(method.heads, method.ranking)
    if method.far not in FORMS:
        fail("far", f"one of {', '.join(FORMS)}", repr(method.far))
    return Extension(
        trained=trained,
        length=method.length,
        far_heads=far_heads,
        window=method.window,
        sink=method.sink,
        far=method.far,
        near=method.near,
        group=method.group or (smallest_group(trained, method.length, method.near) if method.far == "group" else 1),
        factor=method.factor,
        log_n=method.log_n,
        level=method.level,
    )


def scaled_rope(model: Any, kind: str, factor: float, length: int) -> Any:
    """A model that shares the weights and uses transformers' rope type ``kind`` in every head."""
    config = copy.deepcopy(model.config)
    config.rope_parameters = {**config.rope_parameters, "rope_type": kind, "factor": factor}
    trained = trained_length(model.config)
    if kind == "yarn":
        config.rope_parameters["original_max_position_embeddings"] = trained
        config.max_position_embeddings = length
    else:  # dynamic scaling starts beyond this length
        config.max_position_embeddings = trained
    with torch.device("meta"):
        found = type(model)(config)
    found.load_state_dict(model.state_dict(), assign=True)
    found.tie_weights()
    found.model.rotary_emb = type(model.model.rotary_emb)(config=config).to(model.device)
    found.generation_config = model.generation_config
    return found.eval()


def apply_method(
    model: Any,
    method: Method,
    ranking: Ranking | None = None,
    documents: Sequence[Sequence[int]] = (),
    progress: Callable[[int, int], None] | None = None,
) -> Any:
    """Returns an extended model that shares the weights of ``model``, which is not changed. LSSAR is fitted to
    ``documents``; ``progress`` gets the number of fitted heads and their total."""
    if method.kind == "original":
        return model
    if method.kind in ("yarn", "ntk"):
        return scaled_rope(model, "yarn" if method.kind == "yarn" else "dynamic", method.factor, method.length)
    found = extended(model, extension_of(method, model.config, ranking))
    if method.far == "lssar":
        fit_far_heads(found, model, documents, FitSettings(tokens=method.fit), progress)
    return found
