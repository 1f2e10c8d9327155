"""A model as the harness wants it, with batches sized by memory and each input measured by itself."""

from __future__ import annotations

import contextlib
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs
from torch import Tensor

from softplus_attention.evaluation import memory
from softplus_attention.evaluation.memory import TooLongError
from softplus_attention.evaluation.models import LoadedModel
from softplus_attention.utils.progress import Progress

# Where no number of sequences is asked for.
MAX_TOKENS = 16384
MAX_ROWS = {"cpu": 8, "cuda": 64}
# Of float32: the logits, and the log-softmax of them that the harness takes.
LOGIT_BYTES = 8
BY_LENGTH = ("dynamic", "longrope")


@dataclass(frozen=True)
class Row:
    """One row of a batch: what is run once, for one request or for several that differ in the last token only."""

    length: int
    order: Any  # rows that are alike come one after the other
    together: Any  # only rows with the same value run together
    requests: tuple[int, ...]


class HarnessModel(HFLM):  # type: ignore[misc]
    _max_length: int | None

    def __init__(self, loaded: LoadedModel, tokenizer: Any, *, most_rows: int | None, max_length: int | None) -> None:
        """``most_rows`` is None for as many as memory allows, ``max_length`` for the length in the config."""
        super().__init__(pretrained=loaded.model, tokenizer=tokenizer, batch_size=1, max_length=max_length)
        device = loaded.model.device.type
        self.most_rows = most_rows or MAX_ROWS.get(device, MAX_ROWS["cpu"])
        self.most_tokens = MAX_TOKENS if most_rows is None else None
        # Answers that are longer than the model's length: rotary positions go on, a table of positions does not.
        self.may_be_longer = max_length is None and loaded.longest is None
        self.what_limits = "the positions of the model" if loaded.longest == self.max_length else "the --max-length"
        self.length_matters = changes_with_length(loaded.model)
        self.cut_texts = 0
        # Windows of a long text, which come many at a time, are batched by memory as all else.
        self.batch_size_per_gpu = self.most_rows

    def _model_call(self, inps: Tensor, attn_mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        with torch.no_grad():
            logits: Tensor = self.model(inps, use_cache=False).logits
        return logits

    def _model_generate(self, *given: Any, **words: Any) -> Tensor:
        with torch.no_grad():
            found: Tensor = super()._model_generate(*given, **words)
        return found

    def _loglikelihood_tokens(
        self, requests: Sequence[Any], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        if not requests:
            return []
        with self.room_for(max(len(answer) for _, _, answer in requests)):
            keys: dict[tuple[int, ...], list[int]] = {}
            for number, (_, context, answer) in enumerate(requests):
                keys.setdefault((*context, *answer[:-1]), []).append(number)
            rows = []
            for key, numbers in keys.items():
                length = self.cut(len(key), self.max_length)
                together = length if self.length_matters else None
                rows.append(Row(length, key, together, tuple(numbers)))

            def run(numbers: Sequence[int]) -> list[tuple[float, bool]]:
                chosen = [requests[number] for number in numbers]
                found: list[tuple[float, bool]] = super(HarnessModel, self)._loglikelihood_tokens(chosen, True)
                return found

            return self.by_memory(rows, lambda length: logits_bytes(self.model, length), run, len(requests))

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        if not requests:
            return []
        asked = [normalize_gen_kwargs(request.args[1], self.max_gen_toks) for request in requests]
        longest = max(int(words["max_gen_toks"]) for words in asked)
        with self.room_for(longest, least_context=1):
            rows = []
            for number, (request, words) in enumerate(zip(requests, asked, strict=True)):
                room = self.max_length - int(words["max_gen_toks"])
                length = self.cut(len(self.tok_encode(request.args[0])), room)
                together = json.dumps(words, sort_keys=True, default=str)
                rows.append(
                    Row(length, request.args[0], (together, length if self.length_matters else None), (number,))
                )

            def run(numbers: Sequence[int]) -> list[str]:
                chosen = [requests[number] for number in numbers]
                found: list[str] = super(HarnessModel, self).generate_until(chosen, True)
                return found

            return self.by_memory(rows, lambda n: generation_bytes(self.model, n, longest), run, len(requests))

    def cut(self, length: int, room: int) -> int:
        self.cut_texts += length > room
        return min(length, room)

    @contextlib.contextmanager
    def room_for(self, answer: int, least_context: int = 0) -> Iterator[None]:
        """An answer longer than the maximum length comes after a context of that length, where the model allows it."""
        before, length = self._max_length, int(self.max_length)
        if answer + least_context > length:
            if not self.may_be_longer:
                raise TooLongError(f"answers of up to {answer} tokens do not fit into {length}, {self.what_limits}")
            self._max_length = length + answer
        try:
            yield
        finally:
            self._max_length = before

    def by_memory(
        self,
        rows: Sequence[Row],
        more_bytes: Callable[[int], int],
        run: Callable[[Sequence[int]], list[Any]],
        size: int,
    ) -> list[Any]:
        """``run`` of some rows at a time, the longest first; a batch that does not fit into memory is halved."""
        rows = sorted(rows, key=lambda row: (str(row.together), -row.length, row.order))
        found: list[Any] = [None] * size
        done, before, progress = 0, self.batch_size_per_gpu, Progress()
        while done < len(rows):
            first = rows[done]
            at_once = self.rows_at_once(first.length, more_bytes(first.length))
            batch = [row for row in rows[done : done + at_once] if row.together == first.together]
            numbers = [number for row in batch for number in row.requests]
            self.batch_size_per_gpu = len(batch)
            try:
                answers = run(numbers)
            except (RuntimeError, MemoryError) as error:
                self.try_fewer(error, len(batch), first.length)
                continue
            finally:
                self.batch_size_per_gpu = before
            for number, answer in zip(numbers, answers, strict=True):
                found[number] = answer
            done += len(batch)
            progress.update(f"{done} of {len(rows)} texts")
        progress.clear()
        return found

    def rows_at_once(self, length: int, more_bytes: int) -> int:
        """At least 1, at most as many as fit; raises TooLongError where not even one does."""
        need = memory.sequence_bytes(self.model, length) + more_bytes
        free = memory.free_bytes(self.device)
        room = int(memory.SHARE * free)
        if need > room:
            words = f"one sequence of {length} tokens needs about {memory.gigabytes(need)} with its logits"
            raise TooLongError(f"{words}, and {memory.gigabytes(free)} are free")
        by_tokens = self.most_rows if self.most_tokens is None else self.most_tokens // max(1, length)
        return max(1, min(room // max(1, need), by_tokens, self.most_rows))

    def try_fewer(self, error: BaseException, rows: int, length: int) -> None:
        if not memory.is_out_of_memory(error):
            raise error
        if rows == 1:
            raise TooLongError(f"one sequence of {length} tokens does not fit into memory") from error
        fewer = rows // 2 * length
        self.most_tokens = fewer if self.most_tokens is None else min(fewer, self.most_tokens)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def logits_bytes(model: Any, length: int) -> int:
    """Of one sequence: every token's, since the harness takes the log-softmax of all of them."""
    narrow = model.dtype.itemsize if model.dtype.itemsize < 4 else 0
    return length * vocabulary(model) * (LOGIT_BYTES + narrow)


def generation_bytes(model: Any, length: int, generated: int) -> int:
    """Of the cache of one sequence, and of logits: the last token's, or all where the model knows no other way."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", 0)
    width = getattr(config, "head_dim", None) or config.hidden_size // max(1, getattr(config, "num_attention_heads", 1))
    # One layer more: while a token is joined to a layer's keys and values, both are there.
    cache = 2 * (config.num_hidden_layers + 1) * heads * width * (length + generated) * model.dtype.itemsize
    has_choice = "logits_to_keep" in inspect.signature(model.forward).parameters
    return cache + logits_bytes(model, 1 if has_choice else length)


def vocabulary(model: Any) -> int:
    head = model.get_output_embeddings()
    return int(model.config.get_text_config().vocab_size if head is None else head.weight.shape[0])


def changes_with_length(model: Any) -> bool:
    """Whether positions are stretched by the longest of a batch, so that inputs of other lengths would change it."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", "")
        for kind in kinds.values() if isinstance(kinds, Mapping) else [str(kinds)]:
            if any(word in kind for word in BY_LENGTH):
                return True
    return False
