"""OrbitGPT: a SoftplusGPT that reads positions of bodies and predicts the next position or the force."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils import ModelOutput

from softplus_attention import validation as check
from softplus_attention.huggingface import SoftplusGPTModel
from softplus_attention.huggingface.loading import check_model_folder
from softplus_attention.huggingface.modeling_softplus_gpt import SoftplusGPTPreTrainedModel
from softplus_attention.physics.configuration_orbit_gpt import OrbitGPTConfig
from softplus_attention.physics.sequences import IGNORED, TARGETS, vocabulary
from softplus_attention.reference import without_autocast


@dataclass
class OrbitOutput(ModelOutput):
    """``predictions``: positions (B, T, 2), logits (B, T, 2, vocabulary) or forces (B, T, 1 or 2)."""

    loss: Tensor | None = None
    predictions: Tensor | None = None
    past_key_values: Cache | None = None
    hidden_states: tuple[Tensor, ...] | None = None


class OrbitGPTPreTrainedModel(SoftplusGPTPreTrainedModel):
    config_class = OrbitGPTConfig
    config: OrbitGPTConfig
    base_model_prefix = "orbit"
    main_input_name = "coordinates"
    # The losses are means over a batch: the Trainer must not normalize them again.
    accepts_loss_kwargs = False


class CoordinateEmbedding(nn.Module):
    """Embeds coordinates, given as tokens or as numbers."""

    def __init__(self, config: OrbitGPTConfig) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        if config.form == "tokens":
            self.x = nn.Embedding(vocabulary(config.bins), width)
            self.y = nn.Embedding(vocabulary(config.bins), width)
            self.join = nn.Linear(2 * width, width)
        else:
            self.join = nn.Linear(2 + 2 * config.differences + 4 * config.octaves, width)
        self.role = nn.Embedding(3, width) if config.role_embeddings else None
        self.place = nn.Embedding(config.learned_positions, width) if config.learned_positions else None

    def forward(self, coordinates: Tensor, roles: Tensor | None, seen: int, earlier: Tensor | None) -> Tensor:
        config = self.config
        if config.form == "tokens":
            if coordinates.dtype.is_floating_point:
                check.fail("coordinates", "token ids (this model has form 'tokens')", coordinates.dtype, TypeError)
            hidden = self.join(torch.cat([self.x(coordinates[..., 0]), self.y(coordinates[..., 1])], -1))
        else:
            if not coordinates.dtype.is_floating_point:
                check.fail("coordinates", "floats (this model has form 'continuous')", coordinates.dtype, TypeError)
            # Half precision resolves a coordinate of 5 AU to 0.02 AU, too coarse for the curvature of an orbit.
            with without_autocast(coordinates.device):
                hidden = self.join(self.features(coordinates.float(), earlier))
        if self.role is not None:
            if roles is None:
                check.fail("roles", "given (this model embeds roles)", None)
            hidden = hidden + self.role(roles)
        if self.place is not None:
            last = seen + coordinates.shape[1]
            if last > self.place.num_embeddings:
                limit = self.place.num_embeddings
                check.fail("coordinates", f"at most {limit} positions, the learned positions of this model", last)
            hidden = hidden + self.place.weight[seen:last]
        return hidden

    def features(self, coordinates: Tensor, earlier: Tensor | None) -> Tensor:
        """The coordinates; with ``differences`` the displacement since the last step; with ``octaves`` sinusoids."""
        parts = [coordinates / (self.config.extent / 2)]
        if self.config.differences:
            if earlier is None:
                check.fail("earlier", "given (this model reads differences)", None)
            # NaN for the time step and for the first position of each body.
            parts.append(((coordinates - earlier) / self.config.displacement).nan_to_num())
        if self.config.octaves:
            octave = 2.0 ** torch.arange(self.config.octaves, device=coordinates.device)
            angle = coordinates[..., None] * octave * (math.pi / (2 * self.config.extent))
            parts += [angle.sin().flatten(-2), angle.cos().flatten(-2)]
        return torch.cat(parts, -1)


class OrbitGPTModel(OrbitGPTPreTrainedModel):
    def __init__(self, config: OrbitGPTConfig) -> None:
        super().__init__(config)
        self.embedding = CoordinateEmbedding(config)
        self.gpt = SoftplusGPTModel(config)
        # The token embedding is unused, and DDP fails on parameters without a gradient.
        self.gpt.embed_tokens = nn.Identity()  # type: ignore[assignment]
        self.post_init()

    def forward(
        self,
        coordinates: Tensor,
        roles: Tensor | None = None,
        bodies: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool = False,
        earlier: Tensor | None = None,
    ) -> BaseModelOutputWithPast:
        """``bodies`` (B,): number of planets and star of each system. ``earlier`` (B, T, 2): position of each body one
        step before, for models that read differences; by default taken from ``coordinates``."""
        seen = 0 if past_key_values is None else past_key_values.get_seq_length()
        if earlier is None and self.config.differences:
            earlier = shifted(coordinates, bodies)
        embedded = self.embedding(coordinates, roles, seen, earlier)
        return self.gpt(
            inputs_embeds=embedded,
            past_key_values=past_key_values,
            use_cache=bool(use_cache),
            output_hidden_states=output_hidden_states,
        )


class OrbitGPTForTrajectories(OrbitGPTPreTrainedModel):
    """Predicts the next body's position at every position of the sequence."""

    def __init__(self, config: OrbitGPTConfig) -> None:
        super().__init__(config)
        self.orbit = OrbitGPTModel(config)
        outputs = 2 * vocabulary(config.bins) if config.form == "tokens" else 2
        self.head = nn.Linear(config.hidden_size, outputs, bias=False)
        self.post_init()

    def forward(
        self,
        coordinates: Tensor,
        roles: Tensor | None = None,
        bodies: Tensor | None = None,
        targets: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool = False,
        earlier: Tensor | None = None,
        previous: Tensor | None = None,
    ) -> OrbitOutput:
        """``previous`` (B, T, 2): position of the next body one step before. Like ``earlier`` it is taken from
        ``coordinates`` by default; with a cache both must be given."""
        outputs = self.orbit(coordinates, roles, bodies, past_key_values, use_cache, output_hidden_states, earlier)
        output = self.head(outputs.last_hidden_state).float()
        if self.config.form == "tokens":
            predictions = output.unflatten(-1, (2, vocabulary(self.config.bins)))
            loss = None
            if targets is not None:
                loss = 2 * F.cross_entropy(predictions.flatten(0, 2), targets.flatten(), ignore_index=IGNORED)
        else:
            if previous is None:
                previous = shifted(coordinates, bodies, ahead=1).nan_to_num()
            predictions = previous + self.config.displacement * output
            loss = None if targets is None else squared_error(predictions, targets, self.config.displacement)
        return OrbitOutput(loss, predictions, outputs.past_key_values, outputs.hidden_states)


class OrbitGPTForForce(OrbitGPTPreTrainedModel):
    """Predicts the force on a planet at its position: an orbit model with a new head; all weights are tuned."""

    def __init__(self, config: OrbitGPTConfig) -> None:
        super().__init__(config)
        if config.target is None:
            check.fail("target", f"one of {', '.join(TARGETS)} in a force model", None)
        self.orbit = OrbitGPTModel(config)
        self.force_head = nn.Linear(config.hidden_size, TARGETS[config.target])
        self.post_init()

    def forward(
        self,
        coordinates: Tensor,
        roles: Tensor | None = None,
        bodies: Tensor | None = None,
        forces: Tensor | None = None,
        output_hidden_states: bool = False,
    ) -> OrbitOutput:
        outputs = self.orbit(coordinates, roles, bodies, output_hidden_states=output_hidden_states)
        output = self.force_head(outputs.last_hidden_state).float()
        mean, scale = self.config.target_mean, self.config.target_scale
        loss = None if forces is None else squared_error(output, (forces - mean) / scale, 1.0)
        return OrbitOutput(loss, mean + scale * output, None, outputs.hidden_states)


def shifted(coordinates: Tensor, bodies: Tensor | None, ahead: int = 0) -> Tensor:
    """The position one time step earlier of the body at each place (``ahead`` places on); NaN if there is none."""
    if bodies is None:
        check.fail("bodies", "the number of bodies of each system, (B,)", None)
    place = torch.arange(coordinates.shape[1], device=coordinates.device)[None] + ahead - bodies[:, None]
    found = coordinates.float().gather(1, place.clamp(min=0)[..., None].expand_as(coordinates))
    return torch.where((place >= 1)[..., None], found, torch.nan)


def squared_error(predictions: Tensor, targets: Tensor, unit: float) -> Tensor:
    """The mean over the targets that are not NaN."""
    wanted = ~targets.isnan()
    error = torch.where(wanted, predictions - targets.nan_to_num(), 0.0) / unit
    return error.square().sum() / wanted.sum().clamp(min=1)


def check_checkpoint(path: Path, form: str | None = None) -> OrbitGPTConfig:
    """The configuration of a checkpoint; raises an error if it is not an OrbitGPT of this form."""
    if not (path / "config.json").is_file():
        check.fail("checkpoint", "a folder with a config.json", path)
    check_model_folder("checkpoint", str(path))
    settings: dict[str, Any] = OrbitGPTConfig.get_config_dict(path)[0]
    if settings.get("model_type") != OrbitGPTConfig.model_type:
        check.fail("checkpoint", f"an OrbitGPT ({OrbitGPTConfig.model_type!r})", repr(settings.get("model_type")))
    config = OrbitGPTConfig.from_pretrained(path)
    if form is not None and config.form != form:
        check.fail("checkpoint", f"of form {form!r}, like the sequences", repr(config.form))
    return config


__all__ = ["OrbitGPTForForce", "OrbitGPTForTrajectories", "OrbitGPTModel"]
