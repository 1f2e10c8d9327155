"""``TrainConfig``, whose fields are the options of ``train`` and the keys of a config file, and the presets."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from softplus_attention.attentions.catalog import attention
from softplus_attention.power import PowerByLength, is_learned
from softplus_attention.training.distributed import PARALLEL
from softplus_attention.training.losses import LOSSES
from softplus_attention.training.optimizers import OPTIMIZERS
from softplus_attention.training.schedules import PowerSchedule, logarithmic_power, power_schedule
from softplus_attention.utils.untrusted import MIB, read_text
from softplus_attention.validation import LARGEST_HEAD_DIM, did_you_mean, fail, fail_choice

LARGEST_CONFIG = 16 * MIB
LARGEST = 1e18  # limit of counts
SCHEDULES = ("cosine", "wsd")
PRECISIONS = ("auto", "bf16", "fp16", "fp32")
DEVICES = ("auto", "cpu", "cuda")
REPORTERS = ("tensorboard", "wandb", "trackio", "none")

# The largest gain found at these sizes, for any attention: 0.1 nats per byte (docs/dev/log.md).
MUON: dict[str, Any] = {"optimizer": "muon", "learning_rate": 3e-3, "final_learning_rate": 0.05}
# The best recipe of the study (docs/results.md). With a window of half the training length and every third layer global
# without positions, the loss falls with length, for LSSAR and for softmax. A learned factor of log N per head as power
# brings LSSAR within a few thousandths of softmax. The power applies to LSSAR only.
RECIPE: dict[str, Any] = {"global_every": 3, "power": "learned-log"}
PRESETS: dict[str, dict[str, Any]] = {
    # 0.8M parameters on bytes, minutes on two cores. Two heads of 64, since smaller heads extrapolate worse.
    "tiny": {
        "layers": 4, "width": 128, "heads": 2, "sequence_length": 128,
        "window": 64, **RECIPE, "steps": 400, "batch_size": 32, **MUON, "muon_learning_rate": 1e-2, "warmup": 0.05,
        "save_every": 100, "evaluate_every": 100,
    },
    # 51M parameters with GPT-2's vocabulary, 118M tokens, minutes on one GPU. Heads of 128 were better than heads of 64
    # at every length with 30M, 51M and 124M parameters, for LSSAR and for softmax; wider heads did not help further at
    # 124M (docs/results.md).
    "small": {
        "layers": 8, "width": 512, "heads": 4, "sequence_length": 512,
        "window": 256, **RECIPE,
        "steps": 3600, "batch_size": 64, "micro_batch_size": 64, **MUON, "muon_learning_rate": 5e-3, "warmup": 200,
        "compile": True, "loss": "chunked", "workers": 2, "save_every": 600, "evaluate_every": 300,
    },
    # As in the paper: GPT-2 small, RoPE in every layer, one power; 18,865 steps of 524,288 tokens of FineWeb-10B.
    "gpt2-small": {
        "layers": 12, "width": 768, "heads": 12, "sequence_length": 1024,
        "steps": 18865, "batch_size": 512, "micro_batch_size": 64,
        "learning_rate": 6e-4, "final_learning_rate": 0.0, "warmup": 700,
        "compile": True, "loss": "chunked", "workers": 4, "save_every": 500, "evaluate_every": 250,
    },
}  # fmt: skip


def option(group: str, help_text: str, default: Any = dataclasses.MISSING, *, free: bool = False) -> Any:
    """A field with its group and text in ``--help``.

    ``free`` fields may change when a run is resumed, since they do not change what is learned.
    """
    return dataclasses.field(default=default, metadata={"group": group, "help": help_text, "free": free})


MODEL, POWER, OPTIMISATION, SPEED, KEEPING = (
    "the model",
    "the sharpening power",
    "optimisation",
    "speed and devices",
    "logs, validation and checkpoints",
)


@dataclass(frozen=True)
class TrainConfig:
    data: str = option("where", "folder written by `softplus-attention data prepare`", free=True)
    output: str = option("where", "folder of the run; a run found there is continued", free=True)

    attention: str = option(MODEL, "name in the catalogue: lssar, lssa, softmax, softmax-qknorm-logn, ...", "lssar")
    layers: int = option(MODEL, "transformer blocks", 4)
    width: int = option(MODEL, "width of the residual stream", 128)
    heads: int = option(MODEL, "attention heads, of dimension width / heads", 2)
    sequence_length: int = option(MODEL, "training length, in tokens", 128)
    vocab_size: int | None = option(MODEL, "default: the tokenizer's, padded to a multiple of 64", None)
    score_scale: float | None = option(MODEL, "replaces log(head dimension) as the score scale", None)
    window: int | None = option(MODEL, "each token sees itself and the previous window - 1 tokens; 0: all tokens", None)
    global_every: int | None = option(
        MODEL,
        "every n-th layer is global, without rotary positions; the others use the window; 0: none is global",
        None,
    )
    local_attention: str | None = option(MODEL, "attention of the local layers; default: as in the global ones", None)
    rope_theta: float = option(MODEL, "base of the rotary positions", 10000.0)
    bias: bool = option(MODEL, "biases in the linear layers and norms", False)

    power: str | None = option(
        POWER,
        "constant: 15; stepped: 3,7@0.1,15@0.3 (7 from 10%% of the steps on); linear: ramp:3,15 or ramp:3,15@0.5 (ends "
        "at half); log:1.5 (1.5 log N for a row that sees N keys); learned; learned-log (a learned factor of log N); "
        "default: the attention's own",
        None,
    )
    power_rounding: bool = option(
        POWER, "round the powers of a ramp to integers; torch.compile recompiles for each power", True
    )
    power_growth: float | None = option(
        POWER,
        "growth of the saved model's power per factor e of visible keys beyond the training length",
        None,
    )

    steps: int = option(OPTIMISATION, "optimizer steps in total", 400)
    batch_size: int = option(OPTIMISATION, "sequences per step, over all devices", 32)
    optimizer: str = option(OPTIMISATION, "adamw, or muon (Muon for hidden matrices, AdamW for the rest)", "adamw")
    learning_rate: float = option(OPTIMISATION, "peak learning rate of AdamW", 1e-3)
    muon_learning_rate: float | None = option(OPTIMISATION, "peak learning rate of Muon; default: AdamW's", None)
    schedule: str = option(OPTIMISATION, "cosine, or wsd (warm-up, stable, decay)", "cosine")
    warmup: float = option(OPTIMISATION, "steps of linear warm-up; below 1: fraction of all steps", 0.05)
    decay: float = option(OPTIMISATION, "wsd: steps of the final decay; below 1: fraction of all steps", 0.2)
    final_learning_rate: float = option(OPTIMISATION, "final learning rate, as a fraction of the peak", 0.1)
    weight_decay: float = option(OPTIMISATION, "weight decay of matrices; vectors have none", 0.1)
    beta1: float = option(OPTIMISATION, "first beta of AdamW", 0.9)
    beta2: float = option(OPTIMISATION, "second beta of AdamW", 0.95)
    clip: float = option(OPTIMISATION, "maximum gradient norm; 0: no clipping", 1.0)
    document_mask: bool = option(OPTIMISATION, "tokens see only their own document in a packed sequence", False)
    seed: int = option(OPTIMISATION, "seed of the initial weights and the data order", 0)

    device: str = option(SPEED, "auto, cpu or cuda", "auto", free=True)
    precision: str = option(
        SPEED, "bf16 or fp16 (mixed; fp16 scales the loss), fp32, or auto: bf16 on a GPU", "auto", free=True
    )
    parallel: str = option(SPEED, "under torchrun: ddp, or fsdp (FSDP2)", "ddp", free=True)
    context_parallel: int = option(
        SPEED, "under torchrun: number of processes that share each sequence (exact)", 1, free=True
    )
    tensor_parallel: int = option(
        SPEED,
        "under torchrun: number of processes that share the heads of each layer; FSDP2 for the rest",
        1,
        free=True,
    )
    micro_batch_size: int = option(
        SPEED,
        "maximum sequences per device at a time; gradients are accumulated up to the batch size",
        32,
        free=True,
    )
    compile: bool = option(SPEED, "torch.compile the model", False, free=True)
    loss: str = option(
        SPEED,
        "plain, chunked (logits of 4096 tokens at a time), or liger (needs liger-kernel)",
        "plain",
        free=True,
    )
    gradient_checkpointing: bool = option(SPEED, "recompute the blocks in the backward pass", False, free=True)
    workers: int = option(SPEED, "data loader processes per device; 0: none", 0, free=True)
    peak_tflops: float | None = option(
        SPEED, "peak TFLOP/s of a device, for MFU; default: built in for common GPUs", None, free=True
    )

    log_every: int = option(KEEPING, "steps between log entries", 10, free=True)
    evaluate_every: int = option(KEEPING, "steps between validation losses; 0: never", 0, free=True)
    evaluate_sequences: int = option(KEEPING, "maximum number of validation sequences", 256, free=True)
    save_every: int = option(KEEPING, "steps between checkpoints", 100, free=True)
    keep: int = option(KEEPING, "number of newest checkpoints to keep", 3, free=True)
    report_to: str | None = option(
        KEEPING,
        f"also log to: {', '.join(REPORTERS)}; default: tensorboard if installed",
        None,
        free=True,
    )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            check_type(field, getattr(self, field.name))
        for name in ("window", "global_every"):
            if getattr(self, name) == 0:
                object.__setattr__(self, name, None)  # one form, since a resumed run compares settings
        self.check_numbers()
        for name, known in (
            ("optimizer", OPTIMIZERS),
            ("schedule", SCHEDULES),
            ("device", DEVICES),
            ("precision", PRECISIONS),
            ("parallel", PARALLEL),
            ("loss", LOSSES),
            ("report_to", REPORTERS),
        ):
            if getattr(self, name) not in (*known, None):
                fail_choice(name, known, getattr(self, name))
        if self.precision == "fp16" and self.parallel == "fsdp":
            raise ValueError("fp16 cannot be combined with `parallel` fsdp. Pass `precision` bf16 or fp32")
        self.check_parallel()
        if self.width % self.heads:
            fail("width", f"a multiple of the {self.heads} heads", self.width)
        if self.width // self.heads > LARGEST_HEAD_DIM:
            too_wide = f"heads of {self.width // self.heads} are too wide, the maximum is {LARGEST_HEAD_DIM}"
            raise ValueError(f"{too_wide}. Raise `heads` (now {self.heads}) or lower `width` (now {self.width})")
        self.check_layers()
        self.check_power()

    @property
    def sharing(self) -> int:
        """Number of processes that work on the same sequences."""
        return self.context_parallel * self.tensor_parallel

    def check_parallel(self) -> None:
        if self.heads % self.tensor_parallel:
            fail("tensor_parallel", f"a divisor of the {self.heads} heads", self.tensor_parallel)
        names = (self.attention, self.local_attention or self.attention)
        if self.tensor_parallel > 1 and any(attention(name).spec.positions == "alibi" for name in names):
            fail(
                "tensor_parallel",
                "1 with ALiBi, whose slopes depend on the index of the head in the whole model",
                self.tensor_parallel,
            )
        if self.tensor_parallel > 1 and self.loss != "plain":
            fail("loss", "plain with tensor_parallel, which divides the vocabulary", repr(self.loss))
        if self.tensor_parallel > 1 and self.optimizer != "adamw":
            fail("optimizer", "adamw with tensor_parallel, since muon needs whole matrices", repr(self.optimizer))
        if self.sharing > 1 and self.compile:
            fail("compile", "False with context_parallel or tensor_parallel", True)

    def check_layers(self) -> None:
        every = self.global_every
        if self.window is not None and self.window < 1:
            fail("window", "at least 1, or 0 for no window", self.window)
        if every is None and self.local_attention is not None:
            raise ValueError("`local_attention` needs `global_every`: otherwise all layers use `attention`")
        if every is not None and not 2 <= every <= self.layers:
            fail(
                "global_every",
                f"from 2 to {self.layers} (`layers`), or 0 for none (presets may set it)",
                every,
            )
        if every is not None and self.window is None:
            raise ValueError("`global_every` needs `window`, the number of tokens visible in the other layers")

    def spans(self) -> list[int]:
        """The maximum number of visible keys in each layer, in training."""
        local = min(self.sequence_length, self.window or self.sequence_length)
        every = self.global_every or self.layers + 1
        return [local if layer % every else self.sequence_length for layer in range(1, self.layers + 1)]

    def check_numbers(self) -> None:
        minimum = {"layers": 1, "width": 1, "heads": 1, "sequence_length": 2, "steps": 1, "batch_size": 1, "keep": 1}
        minimum |= {
            "micro_batch_size": 1,
            "context_parallel": 1,
            "tensor_parallel": 1,
            "log_every": 1,
            "save_every": 1,
            "evaluate_sequences": 1,
            "seed": 0,
        }
        minimum |= {"workers": 0, "evaluate_every": 0, "warmup": 0, "decay": 0, "clip": 0, "weight_decay": 0}
        for name, value in minimum.items():
            if not value <= getattr(self, name) < LARGEST:
                fail(name, f"at least {value} and below {LARGEST:g}", getattr(self, name))
        for name in ("learning_rate", "muon_learning_rate", "rope_theta", "score_scale", "peak_tflops"):
            number = getattr(self, name)
            if number is not None and not 0 < number < math.inf:
                fail(name, "above 0 and finite", number)
        for name in ("final_learning_rate", "beta1", "beta2"):
            if not 0 <= getattr(self, name) <= 1:
                fail(name, "from 0 to 1", getattr(self, name))
        left = self.steps - self.in_steps(self.warmup)
        if self.schedule == "wsd" and self.in_steps(self.decay) > left:
            fail("decay", f"at most the {left} steps after the warm-up", self.decay)

    def in_steps(self, length: float) -> int:
        """The length of a warm-up or decay in steps; below 1 it is a fraction of all steps."""
        return int(length) if length >= 1 else round(length * self.steps)

    def check_power(self) -> None:
        chosen = attention(self.attention)
        schedule = self.power_schedule
        if chosen.spec.second_stage == "none" and (self.power is not None or self.power_growth is not None):
            raise ValueError(f"{self.attention!r} has no second stage, so it takes no power. Leave out `power`")
        if self.power_growth is not None:
            if is_learned(self.power):
                raise ValueError("a learned power cannot grow with `power_growth`. Leave out one of them")
            if self.power_by_length is not None:
                raise ValueError(f"the power {self.power!r} already grows with N. Leave out `power_growth`")
            self.growth()
        if self.compile and schedule is not None and schedule.is_ramp and not schedule.rounded:
            raise ValueError(
                "torch.compile recompiles for each power, and an unrounded ramp has too many. Leave `power_rounding` on"
            )

    @functools.cached_property
    def power_schedule(self) -> PowerSchedule | None:
        """None if the power does not depend on the step: the attention's own, by length, or learned."""
        return power_schedule(self.power, rounded=self.power_rounding)

    @functools.cached_property
    def power_by_length(self) -> PowerByLength | None:
        return None if self.power is None else logarithmic_power(self.power)

    def growth(self) -> PowerByLength | None:
        """The power of the saved model with ``power_growth``, else None."""
        if self.power_growth is None:
            return None
        schedule = self.power_schedule
        own = attention(self.attention).spec.sharpening
        base = own if schedule is None else schedule.final(self.steps)
        if not isinstance(base, int | float):
            raise ValueError(f"the power of {self.attention!r} already grows with N. Leave out `power_growth`")
        return PowerByLength(base, self.power_growth, self.sequence_length)

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def changes(self, before: Mapping[str, Any]) -> dict[str, str]:
        """Descriptions of the settings that differ from ``before`` and affect what is learned."""
        changed = {}
        for field in dataclasses.fields(self):
            old, new = before.get(field.name, field.default), getattr(self, field.name)
            if old != new and not field.metadata["free"]:
                changed[field.name] = f"{field.name} was {old!r} and is {new!r}"
        return changed


def check_type(field: dataclasses.Field[Any], value: Any) -> None:
    kinds = field_types(field)
    if (isinstance(value, bool) and bool not in kinds) or not isinstance(value, kinds):
        names = " or ".join("nothing" if kind is types.NoneType else kind.__name__ for kind in kinds)
        fail(field.name, f"of type {names}", repr(value))


def describe_settings() -> str:
    """The ``--help`` text of every setting, for docstrings."""
    lines = []
    for field in dataclasses.fields(TrainConfig):
        default = "" if field.default in (None, dataclasses.MISSING) else f" (default: {field.default!r})"
        lines.append(f"    {field.name}: {field.metadata['help'].replace('%%', '%')}{default}")
    return "\n".join(lines)


TrainConfig.__doc__ = f"The settings of `softplus-attention train`.\n\nArgs:\n{describe_settings()}"


def field_types(field: dataclasses.Field[Any]) -> tuple[type, ...]:
    hint = typing.get_type_hints(TrainConfig)[field.name]
    kinds = typing.get_args(hint) or (hint,)
    return (*kinds, int) if float in kinds else kinds


def read_file(path: str | Path) -> dict[str, Any]:
    """The settings of a .json or .yaml file; the keys are the options, with - or _."""
    path = Path(path)
    try:
        text = read_text(path, LARGEST_CONFIG)
    except OSError as error:
        raise ValueError(f"{path}: {(error.strerror or str(error)).lower()}") from None
    try:
        if path.suffix == ".json":
            found = json.loads(text, object_pairs_hook=without_repeats)
        elif path.suffix in (".yaml", ".yml"):
            found = read_yaml(text)
        else:
            raise ValueError("a config file ends in .json, .yaml or .yml")
    except ImportError:
        raise ValueError(f"{path} needs pyyaml. Run `pip install pyyaml`, or write the settings as .json") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    except Exception as error:
        raise ValueError(f"{path} is not {path.suffix[1:].upper()}: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} must contain `name: value` lines, got a {type(found).__name__}")
    for name, value in found.items():
        # A few lines of YAML can expand to lists that fill the memory when printed.
        if not isinstance(value, str | int | float | None):
            raise ValueError(f"{path}: {name!r} must be text or a number, got a {type(value).__name__}")
    return {str(name).replace("-", "_"): value for name, value in found.items()}


def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Rejects repeated keys, of which YAML and JSON keep the last. ``a-b`` and ``a_b`` are the same key."""
    seen: set[str] = set()
    for name, _ in pairs:
        if (key := str(name).replace("-", "_")) in seen:
            raise ValueError(f"{name!r} is given twice")
        seen.add(key)
    return dict(pairs)


def read_yaml(text: str) -> Any:
    """Parses YAML with 6e-4 as a number; YAML 1.1 reads it as a string."""
    import yaml  # type: ignore[import-untyped]

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            without_repeats([(self.construct_object(key), value) for key, value in node.value])
            return super().construct_mapping(node, deep)

    number = re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789"))
    return yaml.load(text, Loader=Loader)


def preset_settings(preset: str | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """The preset's settings. Its power is for LSSAR with local and global layers; it is dropped in other cases."""
    settings = {} if preset is None else dict(PRESETS[preset])
    all_global = "global_every" in given and not given["global_every"]
    if all_global:
        settings.pop("window", None)
    if all_global or given.get("attention", "lssar") != "lssar":
        settings.pop("power", None)
    return settings


def configured(
    options: Mapping[str, Any] | None = None, *, preset: str | None = None, file: str | Path | None = None
) -> TrainConfig:
    """A ``TrainConfig`` from a preset, overridden by a config file, overridden by options."""
    settings = {} if file is None else read_file(file)
    settings |= options or {}
    preset = settings.pop("preset", None) if preset is None else preset
    settings.pop("preset", None)
    if preset is not None and not (isinstance(preset, str) and preset in PRESETS):
        raise ValueError(
            f"there is no preset {preset!r}{did_you_mean(str(preset), PRESETS)}; there are {', '.join(PRESETS)}"
        )
    settings = preset_settings(preset, settings) | settings
    known = [field.name for field in dataclasses.fields(TrainConfig)]
    for name in settings:
        if name not in known:
            raise ValueError(f"there is no setting {name!r}{did_you_mean(name, known)}")
    if isinstance(settings.get("power"), int | float):
        settings["power"] = str(settings["power"])
    for name in ("data", "output"):
        if name not in settings:
            raise ValueError(f"`--{name}` is missing: pass it or set it in the config file")
    return TrainConfig(**settings)
