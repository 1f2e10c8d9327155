"""The configuration of OrbitGPT."""

from __future__ import annotations

from typing import Any

from huggingface_hub.dataclasses import strict

from softplus_attention import validation as check
from softplus_attention.huggingface import SoftplusGPTConfig
from softplus_attention.physics.sequences import FORMS, TARGETS


@strict
class OrbitGPTConfig(SoftplusGPTConfig):
    r"""SoftplusGPT with coordinates as input and output. Fields of ``SoftplusGPTConfig``, and:

    Args:
        form: "continuous" or "tokens"; see ``softplus_attention.physics.sequences``.
        bins: number of bins per coordinate, for form "tokens".
        extent: coordinates are within +- this, in AU.
        displacement: typical displacement of a body in one time step, in AU: the unit of continuous predictions.
        differences: with form "continuous", also read the displacement of each body since the previous time step.
            Attention could compute it, but small models take long to learn that.
        octaves: number of wavelengths of sinusoidal coordinate features: 4 extents, 2 extents, ...
        learned_positions: number of learned position embeddings; None: the attention's own positions (RoPE).
        role_embeddings: whether to embed the role of each position: time step, planet or star.
        target: output of a force model: "ln_force", "force" or "vector"; None for an orbit model.
        target_mean, target_scale: mean and scale of the labels, used to normalize the target.
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
            check.fail_choice("form", FORMS, self.form)
        if self.target is not None and self.target not in TARGETS:
            check.fail("target", f"None or one of {', '.join(TARGETS)}", repr(self.target))
        for name in ("extent", "displacement", "target_scale"):
            if getattr(self, name) <= 0:
                check.fail(name, "positive", getattr(self, name))


__all__ = ["OrbitGPTConfig"]
