"""Run the downstream tasks of lm-evaluation-harness on public datasets or local files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from softplus_attention.evaluation.harness import ruler
from softplus_attention.evaluation.harness.data import (
    OUR_TASKS,
    TASKS,
    LocalData,
    check_lengths,
    describe_file,
    describe_folder,
    harness_folder,
    known_task,
    length_settings,
    overrides,
)
from softplus_attention.evaluation.models import LoadedModel
from softplus_attention.evaluation.texts import tokenizer_digest
from softplus_attention.utils import results as files
from softplus_attention.utils.progress import Progress
from softplus_attention.validation import did_you_mean, fail

MEASURE = "downstream"
MAX_REASON = 240  # characters
# Standard errors of metrics without a formula, such as perplexity.
BOOTSTRAP_SAMPLES = 1000


def split_parts(names: Sequence[str]) -> dict[str, str]:
    """Tasks that run separately, mapped to the requested name: one failing part of ruler does not stop the others."""
    found: dict[str, str] = {}
    for name in names:
        for part in ruler.PARTS if name == "ruler" else (name,):
            found.setdefault(part, name)
    return found


def check_names(names: Sequence[str], include: Sequence[Path], data: Sequence[LocalData]) -> None:
    """Raise for unknown tasks and tasks without data, before any model is loaded."""
    local_names = {name for local in data for name in (local.task, local.group)}
    for name in names:
        known = known_task(name)
        if known is not None and not known.in_hub and name not in local_names:
            fail("--tasks", f"given without {name!r}, which has no public data and needs --data", ", ".join(names))
    # Known tasks need no check, and reading all tasks of the harness takes half a minute.
    others = [name for name in names if known_task(name) is None and name not in ruler.PARTS]
    if others or include:
        task_manager(others, include, {})


def task_manager(names: Sequence[str], include: Sequence[Path], metadata: Mapping[str, Any]) -> Any:
    """The harness's task index: of known tasks only, or of all 14,000 (half a minute) if others are requested."""
    from lm_eval.tasks import TaskManager

    for path in include:
        if not path.is_dir():
            fail("--include-path", "a folder with YAML files of tasks", repr(str(path)))
    folders = {harness_folder() / known.folder for known in TASKS.values() if known.folder}
    few = [str(path) for path in (*sorted(folders), OUR_TASKS, *include)]
    manager = TaskManager(include_path=few, include_defaults=False, metadata=dict(metadata))
    unknown = [name for name in names if name not in manager.all_tasks]
    if unknown:
        extra = [str(path) for path in (OUR_TASKS, *include)]
        manager = TaskManager(include_path=extra, metadata=dict(metadata))
        unknown = [name for name in names if name not in manager.all_tasks]
    for name in unknown:
        hint = did_you_mean(name, [*TASKS, *manager.all_tasks])
        fail("--tasks", f"{', '.join(TASKS)}, or another task of the harness", f"{name!r}{hint}")
    return manager


def measure_downstream(
    loaded: LoadedModel,
    tokenizer: Any,
    names: Sequence[str],
    output: Path,
    *,
    data: Sequence[LocalData] = (),
    texts: ruler.Texts | None = None,
    include: Sequence[Path] = (),
    shots: int | None = None,
    limit: int | None = None,
    batch_size: int | None = None,
    max_length: int | None = None,
    lengths: Sequence[int] = (),
) -> dict[str, Any]:
    """Run the tasks in turn; tasks of an earlier run are reused, tasks that fail are skipped with the reason."""
    check_lengths(names, lengths, bool(data))
    check_names(names, include, data)
    source = {name: describe_file(path) for name, path in (texts.paths() if texts else {}).items()}
    settings = {
        "tasks": list(names),
        "shots": shots,
        "limit": limit,
        "max_length": max_length,
        "lengths": list(lengths),
        "data": {local.task: local.identity() for local in data} | ({"ruler": source} if source else {}),
        "include": [describe_folder(path) for path in include],
        "tokenizer": tokenizer_digest(tokenizer),
    }
    empty: dict[str, Any] = {"finished": [], "tasks": [], "skipped": []}
    file = files.ResultFile(output, MEASURE, loaded.description(), settings, loaded.model.device, empty)
    progress = Progress()
    parts = split_parts(names)
    remaining = [part for part in parts if part not in file.results["finished"]]
    if remaining:
        # Imported late: the harness takes seconds to import.
        from softplus_attention.evaluation.harness.model import HarnessModel

        allowed = allowed_length(loaded, max_length, progress)
        model = HarnessModel(loaded, tokenizer, most_rows=batch_size, max_length=allowed)
        tokenizer_name = getattr(tokenizer, "name_or_path", "") or loaded.spec.source
        with overrides(data, remaining, texts, limit) as own:
            for part in remaining:
                progress.say(f"{loaded.spec.name}: {part}")
                metadata = {"pretrained": loaded.spec.source, "tokenizer": tokenizer_name}
                metadata |= length_settings(part, lengths)
                model.truncated = 0
                # ruler's prompts of all lengths are one list, from which the harness takes the first `limit`.
                records = limit * max(1, len(lengths)) if limit and part in ruler.PARTS else limit
                try:
                    found = run_task(part, model, task_manager([part], [*include, *own], metadata), shots, records)
                except Exception as error:
                    reason = explain_failure(error, part, parts[part])
                    progress.say(f"{loaded.spec.name}: {part} was skipped: {reason}")
                    file.results["skipped"].append({"task": part, "reason": reason})
                else:
                    if model.truncated:
                        prompts = f"{model.truncated} prompts longer than {model.max_length} tokens"
                        progress.say(f"{loaded.spec.name}: {part}: {prompts} were truncated on the left")
                    file.results["tasks"] += [{**row, "asked": parts[part]} for row in found]
                    file.results["finished"].append(part)
                file.save()
    add_means(file.results, parts)
    return file.save(complete=not file.results["skipped"])


def allowed_length(loaded: LoadedModel, max_length: int | None, progress: Progress) -> int | None:
    longest = loaded.longest
    if max_length is None or longest is None or max_length <= longest:
        return max_length
    progress.say(f"{loaded.spec.name}: --max-length {max_length} is reduced to {longest}, the model's last position")
    return longest


def explain_failure(error: Exception, part: str, name: str) -> str:
    """One line for the table: the error, with a hint if data could not be downloaded."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = lines[0][:MAX_REASON] if lines else "no message"
    if not isinstance(error, ValueError):
        reason = f"{type(error).__name__}: {reason}"
    has_local_files = part in ruler.WITH_SOURCES or (part not in ruler.PARTS and known_task(name) is not None)
    if isinstance(error, OSError) and has_local_files:
        reason += f" (use --data to read {name} from local files)"
    return reason


def add_means(results: dict[str, Any], parts: Mapping[str, str]) -> None:
    """Add the mean of ruler over its parts with equal weights, as in the harness, once all parts are finished."""
    wanted = [part for part, name in parts.items() if name == "ruler"]
    results["tasks"] = [row for row in results["tasks"] if row["task"] != "ruler"]
    if not wanted or not set(wanted) <= set(results["finished"]):
        return
    rows = [row for row in results["tasks"] if row["task"] in wanted]
    for metric in dict.fromkeys(row["metric"] for row in rows):
        values = [row["value"] for row in rows if row["metric"] == metric]
        if len(values) == len(wanted):
            mean = {"task": "ruler", "metric": metric, "value": sum(values) / len(values), "standard_error": None}
            results["tasks"].append(mean | {"samples": None, "shots": 0, "higher_is_better": True, "asked": "ruler"})


def run_task(name: str, model: Any, manager: Any, shots: int | None, limit: int | None) -> list[dict[str, Any]]:
    from lm_eval import simple_evaluate

    found = simple_evaluate(
        model=model,
        tasks=[name],
        num_fewshot=shots,
        limit=limit,
        task_manager=manager,
        bootstrap_iters=BOOTSTRAP_SAMPLES,
        log_samples=True,  # for the number of choices of each question
    )
    return collect_rows(found)


def collect_rows(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row per task or group and metric, in the harness's order."""
    rows, chances = [], chance_levels(found)
    for task, values in {**found["results"], **found.get("groups", {})}.items():
        samples = found["n-samples"].get(task, {}).get("effective")
        for key, value in values.items():
            metric, _, chosen = key.partition(",")
            if not chosen or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            # ruler's metrics are lengths, with value -1 if not requested.
            if metric.isdecimal() and value == -1:
                continue
            error = values.get(f"{metric}_stderr,{chosen}")
            rows.append(
                {
                    "task": task,
                    "metric": metric if chosen == "none" else f"{metric} ({chosen})",
                    "value": value,
                    "standard_error": error if isinstance(error, int | float) else None,
                    "chance": chances.get(task) if metric in ("acc", "acc_norm") else None,
                    "samples": samples,
                    "shots": found.get("n-shot", {}).get(task),
                    "higher_is_better": found.get("higher_is_better", {}).get(task, {}).get(metric),
                }
            )
    return rows


def chance_levels(found: Mapping[str, Any]) -> dict[str, float]:
    """Accuracy of guessing by task or group: the mean of 1 / choices over questions, or 0 for predicting a word."""
    levels: dict[str, tuple[float, int]] = {}
    for task, samples in found.get("samples", {}).items():
        kind = found["configs"][task].get("output_type")
        counts = {sample["doc_id"]: len(sample["arguments"]) for sample in samples}
        if kind == "multiple_choice" and counts:
            levels[task] = sum(1 / count for count in counts.values() if count), len(counts)
        elif kind == "loglikelihood":
            levels[task] = 0.0, len(counts)
    for group, tasks in found.get("group_subtasks", {}).items():
        parts = [levels[task] for task in tasks if task in levels]
        if parts and len(parts) == len(tasks):
            levels[group] = sum(total for total, _ in parts), sum(count for _, count in parts)
    return {task: total / count for task, (total, count) in levels.items() if count}


def silence_harness() -> None:
    """Silence the logs of the harness and of `datasets`, and a warning of tokenizers about forks."""
    import logging

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    for name in ("lm_eval", "datasets"):
        logging.getLogger(name).setLevel(logging.ERROR)
