"""Which key heads of a pretrained model need to see far, by four measures within its trained length.

- mass: attention of an answer's rows on the sentence that holds the answer;
- needles: what the loss of the answer gains where the head sees everything, from the gradient of a gate between the
  full and the window's output;
- text: the same for ordinary text;
- beyond: attention of rows of ordinary text on keys that the window would drop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from softplus_attention.extend.needles import FORMS, Encode, make_haystack
from softplus_attention.huggingface.extension.attention import Reach, two_part_attention
from softplus_attention.validation import fail

PROBE = "softplus-extension-probe"
MEASURES = ("mass", "needles", "text", "beyond")
BEST_OF = ("mass", "needles", "text")
GATES = (0.5, 0.0)  # with open gates needles are found anyway and the gradient is noise

Head = tuple[int, int]
Scores = list[list[float]]  # [layer][key head]


@dataclass(frozen=True)
class RankingSettings:
    prompts: int = 6  # of needles, and as many of text
    length: int = 1536  # tokens of a prompt
    window: int = 256  # of the gates: short, so that much lies beyond it
    sink: int = 4
    seed: int = 0


@dataclass
class Ranking:
    """Scores of every key head by each measure."""

    scores: dict[str, Scores] = field(default_factory=dict)

    def order(self, by: str = "best") -> list[Head]:
        """All heads, those that most need to see far first. "best": each by its best place in three measures."""
        if by in self.scores:
            return ordered(self.scores[by])
        if by != "best":
            fail("ranking", f"best or one of {', '.join(self.scores)}", repr(by))
        places = [{head: place for place, head in enumerate(ordered(self.scores[name]))} for name in BEST_OF]
        return sorted(places[0], key=lambda head: sorted(place[head] for place in places))

    def far_heads(self, count: int, by: str = "best") -> list[list[int]]:
        """For each layer its heads among the first ``count``."""
        chosen = self.order(by)[:count]
        layers = len(next(iter(self.scores.values())))
        return [sorted(head for layer, head in chosen if layer == number) for number in range(layers)]


def ordered(scores: Scores) -> list[Head]:
    heads = [(layer, head) for layer, row in enumerate(scores) for head in range(len(row))]
    return sorted(heads, key=lambda head: (-scores[head[0]][head[1]], head))


@dataclass
class Probe:
    """The attention of a forward pass that is looked into. ``gates`` (layers, key heads) blends full and window."""

    reach: Reach
    gates: Tensor | None = None
    rows: Tensor | None = None  # whose weights are summed up
    hits: Callable[[Tensor], Tensor] | None = None  # (rows, keys) -> which keys count
    mass: dict[int, Tensor] = field(default_factory=dict)

    def attend(self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **_: Any) -> Any:
        layer, group = module.layer_idx, q.shape[1] // k.shape[1]
        if self.rows is not None and self.hits is not None:
            self.mass[layer] = self.weigh(q, k, scaling)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
        if self.gates is not None:
            window = two_part_attention((q, k, v), (q, k, v), 0, self.reach, scaling)
            gate = self.gates[layer].to(q.dtype).repeat_interleave(group)[None, :, None, None]
            out = window + gate * (out - window)
        return out.transpose(1, 2), None

    @torch.no_grad()
    def weigh(self, q: Tensor, k: Tensor, scaling: float) -> Tensor:
        """(key heads): the mean mass on the keys that count, of the query head with the most."""
        assert self.rows is not None
        assert self.hits is not None
        group = q.shape[1] // k.shape[1]
        keys = torch.arange(k.shape[2], device=k.device)
        scores = q[:, :, self.rows].float() @ k.float().repeat_interleave(group, 1).mT * scaling
        scores = scores.masked_fill(keys > self.rows[:, None], float("-inf"))
        mass = (scores.softmax(-1) * self.hits(keys)).sum(-1).mean((0, 2))
        return mass.view(-1, group).amax(1)


CURRENT: list[Probe] = []


def probed(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **others: Any) -> Any:
    return CURRENT[-1].attend(module, q, k, v, mask, scaling, **others)


def no_mask(*sizes: Any, **others: Any) -> None:
    """Rows see all keys up to their own."""


AttentionInterface.register(PROBE, probed)
AttentionMaskInterface.register(PROBE, no_mask)


@contextmanager
def probing(model: Any, probe: Probe) -> Iterator[None]:
    """The model's attention by ``probe``, its weights without gradients."""
    before, needed = model.config._attn_implementation, [x.requires_grad for x in model.parameters()]
    model.set_attn_implementation(PROBE)
    model.requires_grad_(False)
    CURRENT.append(probe)
    try:
        yield
    finally:
        CURRENT.pop()
        model.set_attn_implementation(before)
        for x, one in zip(model.parameters(), needed, strict=True):
            x.requires_grad_(one)


def loss_of_last(model: Any, ids: Tensor, count: int) -> Tensor:
    """The mean loss of the last ``count`` tokens."""
    logits = model(ids, use_cache=False, logits_to_keep=count + 1).logits[0, :-1]
    return torch.nn.functional.cross_entropy(logits.float(), ids[0, -count:])


def gate_gain(model: Any, ids: Tensor, count: int, reach: Reach, at: float) -> Tensor:
    """(layers, key heads): how much the loss of the last ``count`` tokens falls per gate that is opened."""
    layers, heads = model.config.num_hidden_layers, model.config.num_key_value_heads
    gates = torch.full((layers, heads), at, device=model.device, requires_grad=True)
    with probing(model, Probe(reach, gates)), torch.enable_grad():
        (gain,) = torch.autograd.grad(loss_of_last(model, ids, count), gates)
    return -gain.float().cpu()


def rank_heads(
    model: Any,
    encode: Encode,
    documents: Sequence[Sequence[int]],
    settings: RankingSettings,
    progress: Callable[[int, int], None] | None = None,
) -> Ranking:
    """``documents`` are tokens of ordinary text, of which prompts are cut."""
    length, reach = settings.length, Reach(settings.window, settings.sink)
    if length > model.config.max_position_embeddings:
        fail("ranking length", f"at most the trained {model.config.max_position_embeddings}", length)
    texts = [list(one) for one in documents if len(one) >= length]
    if not texts:
        fail("text", f"a document of at least {length} tokens, to rank heads by", max(map(len, documents), default=0))
    found: dict[str, list[Tensor]] = {name: [] for name in MEASURES}
    forms, total = list(FORMS), settings.prompts * 2 * len(GATES)
    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, total)

    generator = torch.Generator().manual_seed(settings.seed)
    for number in range(settings.prompts):
        text = texts[number % len(texts)]
        begin = int(torch.randint(len(text) - length + 1, (1,), generator=generator))
        stretch = text[begin : begin + length]
        depth = (number + 0.5) / settings.prompts * 0.7
        hay = make_haystack(encode, stretch, length, forms[number % len(forms)], [depth], settings.seed + number)
        question = hay.questions[0]
        ids = torch.tensor([hay.ids + question.ids], device=model.device)
        rows = torch.arange(ids.shape[1] - question.answer - 1, ids.shape[1] - 1, device=ids.device)
        probe = Probe(reach, rows=rows, hits=on_span(question.span))
        with probing(model, probe), torch.no_grad():
            model(ids, use_cache=False, logits_to_keep=1)
        found["mass"].append(stacked(probe))
        for at in GATES:
            found["needles"].append(gate_gain(model, ids, question.answer, reach, at))
            step()
        ids = torch.tensor([stretch], device=model.device)
        rows = torch.arange(length // 2, length, max(1, length // 64), device=ids.device)
        probe = Probe(reach, rows=rows, hits=dropped_by(reach, rows))
        with probing(model, probe), torch.no_grad():
            model(ids, use_cache=False, logits_to_keep=1)
        found["beyond"].append(stacked(probe))
        for at in GATES:
            found["text"].append(gate_gain(model, ids, length - 2 * settings.window, reach, at))
            step()
    return Ranking({name: torch.stack(scores).mean(0).tolist() for name, scores in found.items()})


def on_span(span: tuple[int, int]) -> Callable[[Tensor], Tensor]:
    return lambda keys: (keys >= span[0]) & (keys < span[1])


def dropped_by(reach: Reach, rows: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda keys: (keys <= rows[:, None] - reach.near) & (keys >= reach.most_far)


def stacked(probe: Probe) -> Tensor:
    return torch.stack([probe.mass[layer] for layer in sorted(probe.mass)]).cpu()
