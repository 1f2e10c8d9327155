"""The measures as functions, for notebooks and scripts: ``evaluate.lengths(model, texts)``.

A model is a folder or Hub name as on the command line (``"runs/a/model+power=31"``), a transformers model in memory,
or a LoadedModel. Texts are strings or Documents. Each function returns an Evaluation with ``table()`` and ``plot()``;
notebooks display it as a table.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from softplus_attention.charts.model import Figure, Table, aligned_rows
from softplus_attention.evaluation.measures import measures
from softplus_attention.utils import counted
from softplus_attention.validation import fail

if TYPE_CHECKING:
    from softplus_attention.evaluation.models import LoadedModel
    from softplus_attention.evaluation.texts import Documents

__all__ = ["Evaluation", "inside", "lengths", "maps", "passkey"]

MULTIPLES = (1, 2, 4, 8, 16)


@dataclass(frozen=True, repr=False)
class Evaluation:
    """Results of one measure for one or more models; ``+`` joins results of the same measure."""

    measure: str
    results: list[dict[str, Any]]  # as in the result files (docs/evaluation.md)

    def __add__(self, other: Evaluation) -> Evaluation:
        if other.measure != self.measure:
            fail("other", f"a result of {self.measure}", f"one of {other.measure}")
        return Evaluation(self.measure, [*self.results, *other.results])

    def __repr__(self) -> str:
        return self.table()

    def table(self) -> str:
        """The text table that the command prints."""
        return measures()[self.measure].table(self.results)

    def plot(self) -> Any:
        """The figure that the command writes, as a matplotlib figure."""
        from softplus_attention.charts.draw import picture

        return picture(self.figures())

    def figures(self) -> list[Figure]:
        measure = measures()[self.measure]
        return [b for b in measure.blocks(self.results) if not isinstance(b, Table | str) and measure.drawn(b)]

    def save(self, folder: str | Path) -> list[Path]:
        """Write result files, CSV tables and figures, which `softplus-attention report` reads."""
        from softplus_attention.utils.files import write_json
        from softplus_attention.utils.results import result_path

        folder, measure = Path(folder), measures()[self.measure]
        folder.mkdir(parents=True, exist_ok=True)
        for result in self.results:
            write_json(result_path(folder, result), result)
        paths = [result_path(folder, result) for result in self.results]
        return [*paths, *measure.write_tables(folder, self.results), *measure.draw(folder, self.results)]

    def _repr_html_(self) -> str:
        """The numbers of the first figure, or the text table if there is no figure."""
        figures = self.figures()
        if not figures or self.measure == "maps":
            return f"<pre>{html.escape(self.table())}</pre>"
        head, rows = figures[0].table()
        cells = ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in aligned_rows(rows)]
        names = "".join(f"<th>{html.escape(name)}</th>" for name in head)
        body = "".join(f"<tr>{row}</tr>" for row in cells)
        caption = f"<caption>{html.escape(figures[0].title)}</caption>"
        return f"<table>{caption}<thead><tr>{names}</tr></thead><tbody>{body}</tbody></table>"


def lengths(
    model: Any,
    texts: Documents | Sequence[str],
    lengths: Sequence[int] | None = None,
    *,
    tokenizer: Any = None,
    training_length: int | None = None,
    device: str | None = None,
    sequences: int | None = 32,
    control: bool = True,
    control_share: float = 0.25,
    folder: str | Path | None = None,
) -> Evaluation:
    """Loss by length and the gain from context beyond the training length, as in `evaluate lengths`.

    Args:
        model: folder or name with options (``"runs/a/model+power=31"``), model in memory, or LoadedModel.
        texts: strings or Documents; texts shorter than the longest length are skipped.
        lengths: in tokens, each a divisor of the longest (default: 1 to 16 times the training length, as far as the
            texts reach).
        tokenizer: default: the one saved with the model.
        training_length: default: ``max_position_embeddings`` of the config.
        device: such as "cpu" or "cuda" (default: CUDA if available; a model in memory stays on its device).
        sequences: maximum number of texts of the longest length.
        control: score the end of each sequence again with only 1x context.
        control_share: fraction of each sequence that the control scores.
        folder: where to save the result after each length and resume from (default: not saved).
    """
    from softplus_attention.evaluation.measures.lengths import measure_lengths

    loaded = open_model(model, training_length, device)
    documents = to_documents(texts, tokenizer, loaded)
    chosen = lengths or [n for m in MULTIPLES if (n := m * loaded.training_length) <= documents.longest]
    if not chosen:
        shortest = f"{loaded.training_length} tokens, the training length"
        raise ValueError(f"`texts` are too short: the longest has {documents.longest} tokens, less than {shortest}")
    result = measure_lengths(
        loaded, documents, chosen, to_path(folder), sequences=sequences, control=control, control_share=control_share
    )
    return Evaluation("lengths", [result])


def passkey(
    model: Any,
    lengths: Sequence[int],
    depths: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0),
    *,
    texts: Documents | Sequence[str] | None = None,
    form: str = "sentences",
    trials: int = 10,
    seed: int = 0,
    tokenizer: Any = None,
    training_length: int | None = None,
    device: str | None = None,
    folder: str | Path | None = None,
) -> Evaluation:
    """Retrieval of numbers hidden in long texts, by length (tokens) and depth, as in `evaluate passkey`.

    Args:
        model, tokenizer, training_length, device, folder: as in ``lengths``.
        depths: from 0 (beginning of the text) to 1 (end).
        texts: texts to hide the keys in; not used by the form "sentences".
        form: "sentences" (Mohtashami and Jaggi) or "compact", which a small model can learn.
        trials: per length and depth.
        seed: of keys and their surrounding text.
    """
    from softplus_attention.evaluation.measures.passkey import measure_passkey
    from softplus_attention.evaluation.passkey import prompt_of

    loaded = open_model(model, training_length, device)
    tokenizer = tokenizer or saved_tokenizer(loaded)
    documents = None if texts is None else to_documents(texts, tokenizer, loaded)
    prompt, output = prompt_of(form), to_path(folder)
    result = measure_passkey(
        loaded, tokenizer, prompt, lengths, depths, output, documents=documents, trials=trials, seed=seed
    )
    return Evaluation("passkey", [result])


def inside(
    model: Any,
    texts: Documents | Sequence[str],
    lengths: Sequence[int],
    *,
    sequences: int = 4,
    blocks: int = 8,
    tokenizer: Any = None,
    training_length: int | None = None,
    device: str | None = None,
    folder: str | Path | None = None,
) -> Evaluation:
    """Entropy, sink, effective keys, zeros and empty tiles of every head, as in `evaluate inside`.

    Args:
        model, texts, tokenizer, training_length, device, folder: as in ``lengths``.
        lengths: in tokens, each a divisor of the longest.
        sequences: number of texts.
        blocks: maximum number of blocks of 64 rows per sequence.
    """
    from softplus_attention.evaluation.measures.inside import measure_inside

    loaded = open_model(model, training_length, device)
    documents = to_documents(texts, tokenizer, loaded)
    result = measure_inside(loaded, documents, lengths, to_path(folder), sequences=sequences, blocks=blocks)
    return Evaluation("inside", [result])


def maps(
    model: Any,
    text: str,
    *,
    size: int = 64,
    tokenizer: Any = None,
    training_length: int | None = None,
    device: str | None = None,
    folder: str | Path | None = None,
) -> Evaluation:
    """Attention weights of every layer and head on one text, as in `evaluate maps`.

    Args:
        model, tokenizer, training_length, device, folder: as in ``lengths``.
        size: maximum number of cells per side; a cell is the sum over its keys, averaged over its rows.
    """
    from softplus_attention.evaluation.measures.maps import measure_maps

    loaded = open_model(model, training_length, device)
    tokenizer = tokenizer or saved_tokenizer(loaded)
    return Evaluation("maps", [measure_maps(loaded, tokenizer, text, to_path(folder), size=size)])


def to_path(folder: str | Path | None) -> Path | None:
    return None if folder is None else Path(folder)


def open_model(model: Any, training_length: int | None, device: str | None) -> LoadedModel:
    from softplus_attention.evaluation.models import (
        LoadedModel,
        ModelSpec,
        configured_length,
        load_for_evaluation,
        parse_model_spec,
        read_training_length,
    )

    if isinstance(model, LoadedModel):
        return model
    if isinstance(model, str | Path):
        spec = parse_model_spec(str(model))
        length = training_length or read_training_length(spec)
    else:
        name = getattr(model, "name_or_path", "") or type(model).__name__
        spec = ModelSpec(name, name, {})
        length = training_length or configured_length(model.config)
    if not length:
        fail("training_length", "given if the model's config has no length", "None")
    if isinstance(model, str | Path):
        return load_for_evaluation(spec, length, device=device)
    return LoadedModel((model if device is None else model.to(device)).eval(), spec, length)


def to_documents(texts: Documents | Sequence[str], tokenizer: Any, loaded: LoadedModel) -> Documents:
    from softplus_attention.evaluation.texts import Documents, text_documents

    if isinstance(texts, Documents):
        return texts
    if isinstance(texts, str):
        texts = [texts]
    return text_documents(texts, [counted(len(texts), "string")], tokenizer or saved_tokenizer(loaded))


def saved_tokenizer(loaded: LoadedModel) -> Any:
    from softplus_attention.huggingface.loading import load_tokenizer

    return load_tokenizer(loaded.spec.source, loaded.spec.trust_remote_code)
