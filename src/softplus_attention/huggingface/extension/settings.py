"""The settings of an extension: the dictionary ``config.extension``, checked when a model is built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from softplus_attention import validation as check
from softplus_attention.huggingface.extension.attention import Reach

FORMS = ("clip", "group", "yarn", "rope", "lssar")
LOG_N = ("none", "far", "all")
# Rotations whose frequencies are the same at every length.
ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True)
class Extension:
    """``far_heads[layer]`` are the key heads that see all tokens. The others see the last ``window`` tokens and the
    first ``sink``, at a distance of ``window``.

    far: the distances that far heads see. "clip": exact up to ``near``, clipped to it beyond. "group": exact up to
    ``near``, divided by ``group`` beyond. "yarn": YaRN with ``factor``. "rope": unchanged. "lssar": LSSAR instead of
    softmax, with YaRN's positions and a learned power per head.

    log_n: beyond the trained length the far heads' scores are multiplied by log(position) / log(trained), of "all"
    keys, of the keys beyond ``near`` ("far"), or of "none". level: the keys beyond ``near`` together count as at most
    ``trained - near`` keys.
    """

    trained: int
    length: int
    far_heads: list[list[int]]
    window: int = 2048
    sink: int = 4
    far: str = "clip"
    near: int = 4096
    group: int = 8
    factor: float = 4.0
    log_n: str = "none"
    level: bool = False
    notes: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_config(cls, config: Any) -> Extension:
        given = config.extension
        known = [setting.name for setting in fields(cls)]
        if not isinstance(given, Mapping) or set(given) - set(known):
            check.fail("config.extension", f"a dictionary of {', '.join(known)}", repr(given))
        missing = {"trained", "length", "far_heads"} - set(given)
        if missing:
            check.fail("config.extension", f"a dictionary with {', '.join(sorted(missing))}", repr(dict(given)))
        extension = cls(**given)
        extension.check(config)
        return extension

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def check(self, config: Any) -> None:
        layers, heads = config.num_hidden_layers, config.num_key_value_heads
        rows = self.far_heads
        if len(rows) != layers or any(row != sorted({*row} & {*range(heads)}) for row in rows):
            check.fail("extension far_heads", f"for each of {layers} layers a sorted list of heads below {heads}", rows)
        if self.far not in FORMS:
            check.fail("extension far", f"one of {', '.join(FORMS)}", repr(self.far))
        if self.log_n not in LOG_N or (self.far == "lssar" and self.log_n != "none"):
            check.fail("extension log_n", f"one of {', '.join(LOG_N)}; 'none' with far='lssar'", repr(self.log_n))
        if not isinstance(self.level, bool) or (self.level and self.far not in ("clip", "group")):
            check.fail("extension level", "False, or True with far='clip' or 'group'", repr(self.level))
        for name, least in (("trained", 2), ("length", 2), ("window", 2), ("sink", 0), ("near", 2), ("group", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                check.fail(f"extension {name}", f"an integer, at least {least}", repr(value))
        if not self.factor >= 1:
            check.fail("extension factor", "at least 1", self.factor)
        windows = sum(map(len, rows)) < layers * heads
        for name, counts in (("window", windows), ("near", any(rows) and self.far in ("clip", "group"))):
            if counts and getattr(self, name) >= self.trained:
                expected = f"below {self.trained}, the model's training length"
                check.fail(f"extension {name}", expected, getattr(self, name))
        rope = config.rope_parameters or {}
        if rope.get("rope_type", "default") not in ROPE_TYPES:
            expected = f"one of {', '.join(ROPE_TYPES)}, whose frequencies do not depend on the length"
            check.fail("rope_type of the model", expected, repr(rope.get("rope_type")))
        layer_types = getattr(config, "layer_types", None) or ["full_attention"]
        if set(layer_types) != {"full_attention"} or getattr(config, "sliding_window", None) is not None:
            check.fail("model", "one without sliding windows", f"layers of {sorted(set(layer_types))}")

    @property
    def far_reach(self) -> Reach:
        if self.far not in ("clip", "group"):
            return Reach()
        return Reach(self.near, level=self.trained - self.near) if self.level else Reach(self.near)

    @property
    def window_reach(self) -> Reach:
        return Reach(self.window, self.sink)
