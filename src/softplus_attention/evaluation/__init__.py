"""Evaluate models beyond their training length: ``evaluate.lengths(model, texts)`` and the command `evaluate`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from softplus_attention.utils.lazy import lazy_names

if TYPE_CHECKING:
    from softplus_attention.evaluation import evaluate
    from softplus_attention.evaluation.models import LoadedModel, ModelSpec, load_for_evaluation, parse_model_spec
    from softplus_attention.evaluation.texts import Documents, folder_documents, text_documents

__all__ = [
    "Documents",
    "LoadedModel",
    "ModelSpec",
    "evaluate",
    "folder_documents",
    "load_for_evaluation",
    "parse_model_spec",
    "text_documents",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {"evaluate": "evaluate"}
    | dict.fromkeys(("LoadedModel", "ModelSpec", "load_for_evaluation", "parse_model_spec"), "models")
    | dict.fromkeys(("Documents", "folder_documents", "text_documents"), "texts"),
)
