"""Ranks the key heads of a pretrained model by their need for distant tokens, on prompts within its trained length.

Four measures score each head:

- mass: attention from the answer's rows to the sentence that contains the answer;
- needles: how much full attention in this head lowers the loss of the answer. It is the gradient with respect to a gate
  between the outputs of full and windowed attention, averaged over all gates at 0.5 and all at 0;
- text: the same for ordinary text;
- beyond: attention from rows of ordinary text to keys that the window would drop.
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
GATES = (0.5, 0.0)  # with open gates the needles are found anyway, and the gradient is noise

Head = tuple[int, int]
Scores = list[list[float]]  # [layer][key head]


@dataclass(frozen=True)
class RankingSettings:
    prompts: int = 6
    length: int = 1536  # tokens per prompt
    window: int = 256  # tokens; short, so that most keys lie beyond it
    sink: int = 4
    targets: int = 512  # last tokens of the text, whose loss is the "text" measure
    seed: int = 0


@dataclass
class Ranking:
    """Scores of every key head by each measure."""

    scores: dict[str, Scores] = field(default_factory=dict)

    def order(self, by: str = "best") -> list[Head]:
        """All heads, in the order of their need. "best" sorts by a head's best rank in the measures of ``BEST_OF``."""
        if by in self.scores:
            return ordered(self.scores[by])
        if by != "best":
            fail("ranking", f"best or one of {', '.join(self.scores)}", repr(by))
        places = [{head: place for place, head in enumerate(ordered(self.scores[name]))} for name in BEST_OF]
        return sorted(places[0], key=lambda head: sorted(place[head] for place in places))

    def far_heads(self, count: int, by: str = "best") -> list[list[int]]:
        """The first ``count`` heads, grouped by layer."""
        chosen = self.order(by)[:count]
        layers = len(next(iter(self.scores.values())))
        return [sorted(head for layer, head in chosen if layer == number) for number in range(layers)]


def ordered(scores: Scores) -> list[Head]:
    heads = [(layer, head) for layer, row in enumerate(scores) for head in range(len(row))]
    return sorted(heads, key=lambda head: (-scores[head[0]][head[1]], head))


@dataclass
class MassQuery:
    """Asks for the attention mass from ``rows`` to the keys in ``hits``, a mask of (rows or 1, keys)."""

    rows: Tensor
    hits: Tensor


@dataclass
class Probe:
    """Attention that records masses. ``gates`` (layers, key heads) blend windowed (0) and full (1) attention; None
    means full."""

    reach: Reach
    gates: Tensor | None = None
    queries: dict[str, MassQuery] = field(default_factory=dict)
    mass: dict[str, list[Tensor]] = field(default_factory=dict)  # per layer, (key heads)

    def attend(self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **_: Any) -> Any:
        group = q.shape[1] // k.shape[1]
        for name, query in self.queries.items():
            self.mass.setdefault(name, []).append(attention_mass(q, k, query, scaling))
        needs_full = self.gates is None or bool(self.gates.any())  # closed gates pass no gradient
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
def attention_mass(q: Tensor, k: Tensor, query: MassQuery, scaling: float) -> Tensor:
    """(key heads): the mean mass on ``query.hits``, of the query head with the largest in each group."""
    group = q.shape[1] // k.shape[1]
    keys = torch.arange(k.shape[2], device=k.device)
    scores = q[:, :, query.rows].float() @ k.float().repeat_interleave(group, 1).mT * scaling
    scores = scores.masked_fill(keys > query.rows[:, None], float("-inf"))
    mass = (scores.softmax(-1) * query.hits).sum(-1).mean((0, 2))
    return mass.view(-1, group).amax(1).cpu()


CURRENT: list[Probe] = []


def probe_attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **kwargs: Any) -> Any:
    return CURRENT[-1].attend(module, q, k, v, mask, scaling, **kwargs)


def no_mask(*sizes: Any, **kwargs: Any) -> None:
    """``Probe.attend`` is causal and needs no mask."""


AttentionInterface.register(PROBE, probe_attention)
AttentionMaskInterface.register(PROBE, no_mask)


@contextmanager
def probing(model: Any, probe: Probe) -> Iterator[None]:
    """Replaces the model's attention by ``probe`` and turns off gradients of the weights."""
    before, flags = model.config._attn_implementation, [x.requires_grad for x in model.parameters()]
    model.set_attn_implementation(PROBE)
    model.requires_grad_(False)
    CURRENT.append(probe)
    try:
        yield
    finally:
        CURRENT.pop()
        model.set_attn_implementation(before)
        for x, flag in zip(model.parameters(), flags, strict=True):
            x.requires_grad_(flag)


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
    """Cuts prompts from ``documents``, tokens of ordinary text, and puts ``start`` before each. ``progress`` gets the
    scores of all prompts so far; a later call resumes from them as ``done``."""
    length, trained = settings.length, model.config.max_position_embeddings
    if length > trained:
        fail("ranking length", f"at most the trained length, {trained}", length)
    texts = [list(one) for one in documents if len(one) >= length]
    if not texts:
        fail("text", f"a document of at least {length} tokens, to rank heads", max(map(len, documents), default=0))
    found, forms = list(done), list(FORMS)
    for number in range(len(found), settings.prompts):
        text = texts[number % len(texts)]
        begin = random.Random(f"{settings.seed} {number}").randrange(len(text) - length + 1)
        # The end of the text gets no needle, so that each needle lies beyond the window.
        depth = (number + 0.5) / settings.prompts * (1 - 1.5 * settings.window / length)
        stretch, form = text[begin : begin + length], forms[number % len(forms)]
        hay = make_haystack(encode, stretch, length, form, [depth], settings.seed + number, start)
        by_measure: dict[str, list[Tensor]] = {}
        for name, scores in score_prompt(model, hay, settings):
            by_measure.setdefault(name, []).append(scores.float())
        found.append({name: torch.stack(scores).mean(0).tolist() for name, scores in by_measure.items()})
        if progress is not None:
            progress(found)
    return Ranking({name: torch.tensor([one[name] for one in found]).mean(0).tolist() for name in MEASURES})


def score_prompt(model: Any, hay: Haystack, settings: RankingSettings) -> Iterator[tuple[str, Tensor]]:
    """Yields (measure, scores of (layers, key heads)); a gate measure comes once for each value of ``GATES``."""
    layers, heads, device = model.config.num_hidden_layers, model.config.num_key_value_heads, model.device
    reach, question = Reach(settings.window, settings.sink), hay.questions[0]
    ids = torch.tensor([hay.ids + question.ids], device=device)
    end = ids.shape[1] - 1
    answer = torch.arange(end - question.answer, end, device=device)
    text = torch.arange(len(hay.ids) - settings.targets, len(hay.ids) - 1, device=device)
    keys, sample = torch.arange(end + 1, device=device), text[:: max(1, len(text) // 64)]
    queries = {
        "mass": MassQuery(answer, (keys >= question.span[0]) & (keys < question.span[1])),
        "beyond": MassQuery(sample, (keys <= sample[:, None] - reach.near) & (keys >= reach.most_far)),
    }
    probe = Probe(reach, queries=queries)
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
