"""Which key heads of a pretrained model need to see far, by four measures within its trained length.

- mass: attention of an answer's rows on the sentence that holds the answer;
- needles: what the loss of the answer gains where the head sees everything, from the gradient of a gate between the
  full and the window's output (the mean of all gates half open and all shut);
- text: the same for ordinary text;
- beyond: attention of rows of ordinary text on keys that the window would drop.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from softplus_attention.extend.needles import FORMS, Encode, Haystack, make_haystack
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
    prompts: int = 6
    length: int = 1536  # tokens of a prompt
    window: int = 256  # of the gates: short, so that much lies beyond it
    sink: int = 4
    targets: int = 512  # tokens whose loss is the text's
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
class Look:
    """Rows of which the mass on some keys is wanted: ``hits`` (rows or 1, keys)."""

    rows: Tensor
    hits: Tensor


@dataclass
class Probe:
    """The attention of a forward pass that is looked into. ``gates`` (layers, key heads) blends full and window; None
    is full."""

    reach: Reach
    gates: Tensor | None = None
    looks: dict[str, Look] = field(default_factory=dict)
    mass: dict[str, list[Tensor]] = field(default_factory=dict)  # of each layer, (key heads)

    def attend(self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **_: Any) -> Any:
        group = q.shape[1] // k.shape[1]
        for name, look in self.looks.items():
            self.mass.setdefault(name, []).append(mass_on(q, k, look, scaling))
        needs_full = self.gates is None or bool(self.gates.any())  # behind shut gates no gradient passes
        with torch.set_grad_enabled(torch.is_grad_enabled() and needs_full):
            out = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scaling, enable_gqa=True
            )
        if self.gates is None:
            return out.transpose(1, 2), None
        window = two_part_attention((q, k, v), (q, k, v), 0, self.reach, scaling)
        gate = self.gates[module.layer_idx].to(q.dtype).repeat_interleave(group)[None, :, None, None]
        return (window + gate * (out - window)).transpose(1, 2), None


@torch.no_grad()
def mass_on(q: Tensor, k: Tensor, look: Look, scaling: float) -> Tensor:
    """(key heads): the mean mass on the keys that count, of the query head with the most."""
    group = q.shape[1] // k.shape[1]
    keys = torch.arange(k.shape[2], device=k.device)
    scores = q[:, :, look.rows].float() @ k.float().repeat_interleave(group, 1).mT * scaling
    scores = scores.masked_fill(keys > look.rows[:, None], float("-inf"))
    mass = (scores.softmax(-1) * look.hits).sum(-1).mean((0, 2))
    return mass.view(-1, group).amax(1).cpu()


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


def rank_heads(
    model: Any,
    encode: Encode,
    documents: Sequence[Sequence[int]],
    settings: RankingSettings,
    *,
    start: Sequence[int] = (),
    done: Sequence[dict[str, Scores]] = (),
    progress: Callable[[list[dict[str, Scores]]], None] | None = None,
) -> Ranking:
    """``documents`` are tokens of ordinary text, of which prompts are cut, ``start`` before each. ``progress`` is given
    the scores of each prompt so far, from which a later call goes on as ``done``."""
    length, trained = settings.length, model.config.max_position_embeddings
    if length > trained:
        fail("ranking length", f"at most the trained {trained}", length)
    texts = [list(one) for one in documents if len(one) >= length]
    if not texts:
        fail("text", f"a document of at least {length} tokens, to rank heads by", max(map(len, documents), default=0))
    found, forms = list(done), list(FORMS)
    for number in range(len(found), settings.prompts):
        text = texts[number % len(texts)]
        begin = random.Random(f"{settings.seed} {number}").randrange(len(text) - length + 1)
        # The last of the text is left without needles, so that each lies beyond the window.
        depth = (number + 0.5) / settings.prompts * (1 - 1.5 * settings.window / length)
        stretch, form = text[begin : begin + length], forms[number % len(forms)]
        hay = make_haystack(encode, stretch, length, form, [depth], settings.seed + number, start)
        looks: dict[str, list[Tensor]] = {}
        for name, scores in look_into(model, hay, settings):
            looks.setdefault(name, []).append(scores.float())
        found.append({name: torch.stack(scores).mean(0).tolist() for name, scores in looks.items()})
        if progress is not None:
            progress(found)
    return Ranking({name: torch.tensor([one[name] for one in found]).mean(0).tolist() for name in MEASURES})


def look_into(model: Any, hay: Haystack, settings: RankingSettings) -> Iterator[tuple[str, Tensor]]:
    """(layers, key heads) by each measure."""
    layers, heads, device = model.config.num_hidden_layers, model.config.num_key_value_heads, model.device
    reach, question = Reach(settings.window, settings.sink), hay.questions[0]
    ids = torch.tensor([hay.ids + question.ids], device=device)
    end = ids.shape[1] - 1
    answer = torch.arange(end - question.answer, end, device=device)
    text = torch.arange(len(hay.ids) - settings.targets, len(hay.ids) - 1, device=device)
    keys, some = torch.arange(end + 1, device=device), text[:: max(1, len(text) // 64)]
    looks = {
        "mass": Look(answer, (keys >= question.span[0]) & (keys < question.span[1])),
        "beyond": Look(some, (keys <= some[:, None] - reach.near) & (keys >= reach.most_far)),
    }
    probe = Probe(reach, looks=looks)
    with probing(model, probe), torch.no_grad():
        model(ids, use_cache=False, logits_to_keep=1)
    for name, rows in probe.mass.items():
        yield name, torch.stack(rows)
    kept = torch.cat([text, answer])
    for at in GATES:
        gates = torch.full((layers, heads), at, device=device, requires_grad=True)
        with probing(model, Probe(reach, gates)), torch.enable_grad():
            logits = model(ids, use_cache=False, logits_to_keep=kept).logits[0].float()
            losses = torch.nn.functional.cross_entropy(logits, ids[0, kept + 1], reduction="none")
            for name, part in zip(("text", "needles"), losses.split([len(text), len(answer)]), strict=True):
                (gain,) = torch.autograd.grad(part.mean(), gates, retain_graph=name == "text")
                yield name, -gain.cpu()
