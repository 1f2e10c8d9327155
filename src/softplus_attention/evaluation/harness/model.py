"""The harness's interface to a model, with batch sizes from free memory and results independent of batching."""

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

# Limits of a batch without --batch-size.
MAX_TOKENS = 16384
MAX_ROWS = {"cpu": 8, "cuda": 64}
LOGIT_BYTES = 8  # float32 logits and the harness's log-softmax of them
BY_LENGTH = ("dynamic", "longrope")


@dataclass(frozen=True)
class Row:
    """One row of a batch, which serves one request, or several that differ only in the last token."""

    length: int
    order: Any  # sort key that puts similar rows next to each other
    batch_key: Any  # only rows with equal keys share a batch
    requests: tuple[int, ...]


class HarnessModel(HFLM):  # type: ignore[misc]
    _max_length: int | None

    def __init__(self, loaded: LoadedModel, tokenizer: Any, *, most_rows: int | None, max_length: int | None) -> None:
        """``most_rows`` None: as many as fit into memory; ``max_length`` None: from the config."""
        super().__init__(pretrained=loaded.model, tokenizer=tokenizer, batch_size=1, max_length=max_length)
        device = loaded.model.device.type
        self.most_rows = most_rows or MAX_ROWS.get(device, MAX_ROWS["cpu"])
        self.most_tokens = MAX_TOKENS if most_rows is None else None
        # Answers may exceed the model's length with rotary positions, but not with a table of positions.
        self.can_exceed_length = max_length is None and loaded.longest is None
        self.limit_name = "the positions of the model" if loaded.longest == self.max_length else "the --max-length"
        self.length_matters = has_length_dependent_rope(loaded.model)
        self.truncated = 0  # prompts
        # Batch size of the harness for windows of long texts, which `run_in_batches` then splits by memory.
        self.batch_size_per_gpu = self.most_rows

    def _model_call(self, inps: Tensor, attn_mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        with torch.no_grad():
            logits: Tensor = self.model(inps, use_cache=False).logits
        return logits

    def _model_generate(self, *args: Any, **kwargs: Any) -> Tensor:
        with torch.no_grad():
            ids: Tensor = super()._model_generate(*args, **kwargs)
        return ids

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
                length = self.truncate(len(key), self.max_length)
                rows.append(Row(length, key, length if self.length_matters else None, tuple(numbers)))

            def run(numbers: Sequence[int]) -> list[tuple[float, bool]]:
                chosen = [requests[number] for number in numbers]
                found: list[tuple[float, bool]] = super(HarnessModel, self)._loglikelihood_tokens(chosen, True)
                return found

            return self.run_in_batches(rows, lambda length: logits_bytes(self.model, length), run, len(requests))

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        if not requests:
            return []
        all_kwargs = [normalize_gen_kwargs(request.args[1], self.max_gen_toks) for request in requests]
        longest = max(int(kwargs["max_gen_toks"]) for kwargs in all_kwargs)
        with self.room_for(longest, min_context=1):
            rows = []
            for number, (request, kwargs) in enumerate(zip(requests, all_kwargs, strict=True)):
                length = self.truncate(
                    len(self.tok_encode(request.args[0])), self.max_length - int(kwargs["max_gen_toks"])
                )
                same = json.dumps(kwargs, sort_keys=True, default=str), length if self.length_matters else None
                rows.append(Row(length, request.args[0], same, (number,)))

            def run(numbers: Sequence[int]) -> list[str]:
                chosen = [requests[number] for number in numbers]
                found: list[str] = super(HarnessModel, self).generate_until(chosen, True)
                return found

            return self.run_in_batches(rows, lambda n: generation_bytes(self.model, n, longest), run, len(requests))

    def truncate(self, length: int, max_length: int) -> int:
        """The length after truncation; counts truncated prompts."""
        self.truncated += length > max_length
        return min(length, max_length)

    @contextlib.contextmanager
    def room_for(self, answer: int, min_context: int = 0) -> Iterator[None]:
        """If an answer does not fit into the maximum length, add its length to the maximum, if the model allows it."""
        before, length = self._max_length, int(self.max_length)
        if answer + min_context > length:
            if not self.can_exceed_length:
                raise TooLongError(f"answers of up to {answer} tokens do not fit into {length}, {self.limit_name}")
            self._max_length = length + answer
        try:
            yield
        finally:
            self._max_length = before

    def run_in_batches(
        self,
        rows: Sequence[Row],
        extra_bytes: Callable[[int], int],
        run: Callable[[Sequence[int]], list[Any]],
        size: int,
    ) -> list[Any]:
        """``run`` on batches that fit into memory, the longest rows first; one that runs out of memory is halved."""
        rows = sorted(rows, key=lambda row: (str(row.batch_key), -row.length, row.order))
        found: list[Any] = [None] * size
        done, before, progress = 0, self.batch_size_per_gpu, Progress()
        while done < len(rows):
            first = rows[done]
            at_once = self.rows_at_once(first.length, extra_bytes(first.length))
            batch = [row for row in rows[done : done + at_once] if row.batch_key == first.batch_key]
            numbers = [number for row in batch for number in row.requests]
            self.batch_size_per_gpu = len(batch)
            try:
                answers = run(numbers)
            except (RuntimeError, MemoryError) as error:
                self.shrink_batch(error, len(batch), first.length)
                continue
            finally:
                self.batch_size_per_gpu = before
            for number, answer in zip(numbers, answers, strict=True):
                found[number] = answer
            done += len(batch)
            progress.update(f"{done} of {len(rows)} texts")
        progress.clear()
        return found

    def rows_at_once(self, length: int, extra_bytes: int) -> int:
        """Batch size of at least 1; raises TooLongError if not even one row fits."""
        need = memory.sequence_bytes(self.model, length) + extra_bytes
        free = memory.free_bytes(self.device)
        room = int(memory.SHARE * free)
        if need > room:
            reason = f"one sequence of {length} tokens needs about {memory.gigabytes(need)} with its logits"
            raise TooLongError(f"{reason}, and {memory.gigabytes(free)} are free")
        by_tokens = self.most_rows if self.most_tokens is None else self.most_tokens // max(1, length)
        return max(1, min(room // max(1, need), by_tokens, self.most_rows))

    def shrink_batch(self, error: BaseException, rows: int, length: int) -> None:
        if not memory.is_out_of_memory(error):
            raise error
        if rows == 1:
            raise TooLongError(f"one sequence of {length} tokens does not fit into memory") from error
        fewer = rows // 2 * length
        self.most_tokens = fewer if self.most_tokens is None else min(fewer, self.most_tokens)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def logits_bytes(model: Any, length: int) -> int:
    """For all tokens of one sequence, because the harness takes the log-softmax of all of them."""
    narrow = model.dtype.itemsize if model.dtype.itemsize < 4 else 0
    return length * vocabulary(model) * (LOGIT_BYTES + narrow)


def generation_bytes(model: Any, length: int, generated: int) -> int:
    """For one sequence's cache and its logits: of the last token, or of all if the model has no `logits_to_keep`."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", 0)
    width = getattr(config, "head_dim", None) or config.hidden_size // max(1, getattr(config, "num_attention_heads", 1))
    # One extra layer: appending a token to a layer's keys and values copies them.
    cache = 2 * (config.num_hidden_layers + 1) * heads * width * (length + generated) * model.dtype.itemsize
    keeps_last = "logits_to_keep" in inspect.signature(model.forward).parameters
    return cache + logits_bytes(model, 1 if keeps_last else length)


def vocabulary(model: Any) -> int:
    head = model.get_output_embeddings()
    return int(model.config.get_text_config().vocab_size if head is None else head.weight.shape[0])


def has_length_dependent_rope(model: Any) -> bool:
    """Whether RoPE is scaled by the longest input of a batch, so that inputs of other lengths would change results."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", "")
        for kind in kinds.values() if isinstance(kinds, Mapping) else [str(kinds)]:
            if any(name in kind for name in BY_LENGTH):
                return True
    return False
