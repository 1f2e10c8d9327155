"""The configuration of OrbitGPT."""

from __future__ import annotations

from typing import Any

from huggingface_hub.dataclasses import strict

from softplus_attention import validation as check
from softplus_attention.huggingface import SoftplusGPTConfig
from softplus_attention.physics.sequences import FORMS, TARGETS


@strict
class OrbitGPTConfig(SoftplusGPTConfig):
    r"""SoftplusGPT with coordinates in and out. All of ``SoftplusGPTConfig`` (attention, power, window, sizes), and:

    Args:
        form: "continuous" or "tokens"; see ``softplus_attention.physics.sequences``.
        bins: per coordinate, in the tokenised form.
        extent: coordinates lie within +- this, in AU.
        displacement: the usual way of a body in one time step, in AU: the unit of the continuous form's predictions.
        differences: whether the continuous form also reads the way of each body since one time step earlier. It could
            find that by attending; small models take long to learn so.
        octaves: wavelengths of the sines and cosines that stand beside the coordinates: 4 extents, 2 extents, ...
        learned_positions: how many positions have a learned vector; None for the attention's own (RoPE).
        role_embeddings: whether each position is told to be time step, planet or star.
        target: what a force model says: "ln_force", "force" or "vector"; None in a model of orbits.
        target_mean, target_scale: the labels' mean and scale, by which the head's numbers become forces.
    """

    model_type = "orbit_gpt"

    vocab_size: int = 1
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    tie_word_embeddings: bool = False
    form: str = "continuous"
    bins: int = 512
    extent: float = 6.0
    displacement: float = 0.2
    differences: bool = False
    octaves: int = 0
    learned_positions: int | None = None
    role_embeddings: bool = True
    target: str | None = None
    target_mean: float = 0.0
    target_scale: float = 1.0

    def __post_init__(self, **kwargs: Any) -> None:
        if self.learned_positions is not None:
            self.positions = "none"
        super().__post_init__(**kwargs)

    def validate_form(self) -> None:
        """Called by ``@strict``."""
        if self.form not in FORMS:
            check.fail("form", f"one of {', '.join(FORMS)}", repr(self.form))
        if self.target is not None and self.target not in TARGETS:
            check.fail("target", f"None or one of {', '.join(TARGETS)}", repr(self.target))
        for name in ("extent", "displacement", "target_scale"):
            if getattr(self, name) <= 0:
                check.fail(name, "positive", getattr(self, name))


__all__ = ["OrbitGPTConfig"]
