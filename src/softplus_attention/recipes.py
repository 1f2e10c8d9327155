"""Model configurations that the study found to work, by name (docs/choosing.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from softplus_attention.validation import fail, fail_choice

if TYPE_CHECKING:
    from softplus_attention.huggingface import SoftplusGPTConfig

__all__ = ["ATTENTIONS", "SIZES", "long_context_config"]


def __dir__() -> list[str]:
    return [*__all__]


# By parameters with GPT-2's vocabulary: layers, width, heads. Heads of 128 did better than heads of 64 at any length.
SIZES = {"30M": (6, 384, 3), "51M": (8, 512, 4), "124M": (12, 768, 6), "354M": (24, 1024, 8)}
ATTENTIONS: dict[str, dict[str, Any]] = {
    "softmax-qknorm-logn-learned": {"attention": "softmax-qknorm-logn-learned"},
    "lssar-learned-log": {"attention": "lssar", "power": "learned-log"},
}
GLOBAL_EVERY = 3


def long_context_config(
    size: str = "124M",
    attention: str = "softmax-qknorm-logn-learned",
    *,
    training_length: int = 512,
    **settings: Any,
) -> SoftplusGPTConfig:
    """A SoftplusGPT whose loss falls with length up to 64 times ``training_length`` (docs/results.md).

    Two local layers to one global layer. Local layers have rotary positions and a window of half the training length;
    global layers see everything and have no positions. Queries and keys are normalized, and scores are multiplied by
    log N and a factor that each head learns.

    Args:
        size: "30M", "51M", "124M" or "354M", the number of parameters with GPT-2's vocabulary.
        attention: "softmax-qknorm-logn-learned" (lowest loss, fastest) or "lssar-learned-log".
        training_length: tokens of a training sequence.
        settings: further arguments of ``SoftplusGPTConfig`` (``vocab_size=256``), also in place of the recipe's.
    """
    from softplus_attention.huggingface import SoftplusGPTConfig

    for name, value, known in (("size", size, SIZES), ("attention", attention, ATTENTIONS)):
        if value not in known:
            fail_choice(name, known, value)
    if training_length < 2:
        fail("training_length", "at least 2 tokens", training_length)
    layers, width, heads = SIZES[size]
    recipe: dict[str, Any] = {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "max_position_embeddings": training_length,
        "window": training_length // 2,
        "global_every": GLOBAL_EVERY,
        **ATTENTIONS[attention],
    }
    return SoftplusGPTConfig(**(recipe | settings))
