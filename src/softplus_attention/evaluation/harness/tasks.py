"""Downstream tasks by lm-evaluation-harness: on its public sets, or on local files in the schema of each task."""

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
    described_file,
    described_folder,
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
LONGEST_REASON = 240
# Standard errors of metrics without a formula, such as perplexity.
BOOTSTRAP_SAMPLES = 1000


def split_parts(names: Sequence[str]) -> dict[str, str]:
    """What is run one after the other, and by which of the names: a part of ruler that fails leaves the others."""
    found: dict[str, str] = {}
    for name in names:
        for part in ruler.PARTS if name == "ruler" else (name,):
            found.setdefault(part, name)
    return found


def check_names(names: Sequence[str], include: Sequence[Path], data: Sequence[LocalData]) -> None:
    """Names that the harness does not have, and tasks that have no data, before any model is loaded."""
    there = {name for local in data for name in (local.task, local.group)}
    for name in names:
        known = known_task(name)
        if known is not None and not known.in_hub and name not in there:
            fail("--tasks", f"without {name!r} where there is no --data: it has no public set", ", ".join(names))
    # Its own are not in question, and reading all of the harness's takes half a minute.
    others = [name for name in names if known_task(name) is None and name not in ruler.PARTS]
    if others or include:
        task_manager(others, include, {})


def task_manager(names: Sequence[str], include: Sequence[Path], metadata: Mapping[str, Any]) -> Any:
    """The harness's index of our tasks; of all its 14,000, which take half a minute to read, where others are asked."""
    from lm_eval.tasks import TaskManager

    for path in include:
        if not path.is_dir():
            fail("--include-path", "a folder with YAML files of tasks", repr(str(path)))
    folders = {harness_folder() / known.folder for known in TASKS.values() if known.folder}
    few = [str(path) for path in (*sorted(folders), OUR_TASKS, *include)]
    manager = TaskManager(include_path=few, include_defaults=False, metadata=dict(metadata))
    unknown = [name for name in names if name not in manager.all_tasks]
    if unknown:
        more = [str(path) for path in (OUR_TASKS, *include)]
        manager = TaskManager(include_path=more, metadata=dict(metadata))
        unknown = [name for name in names if name not in manager.all_tasks]
    for name in unknown:
        hint = did_you_mean(name, [*TASKS, *manager.all_tasks])
        fail("--tasks", f"{', '.join(TASKS)}, or another task of the harness", f"{name!r}{hint}")
    return manager


def language_model(loaded: LoadedModel, tokenizer: Any, *, batch_size: int | None, max_length: int | None) -> Any:
    """The model as the harness wants it; ``batch_size`` None is as memory allows."""
    # Imported late: it needs the harness, which takes seconds.
    from softplus_attention.evaluation.harness.model import HarnessModel

    return HarnessModel(loaded, tokenizer, most_rows=batch_size, max_length=max_length)


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
    """Task after task; what an earlier run finished is not run again, and what fails is left out with its reason."""
    check_lengths(names, lengths, bool(data))
    check_names(names, include, data)
    source = {name: described_file(path) for name, path in (texts.paths() if texts else {}).items()}
    settings = {
        "tasks": list(names),
        "shots": shots,
        "limit": limit,
        "max_length": max_length,
        "lengths": list(lengths),
        "data": {local.task: local.identity() for local in data} | ({"ruler": source} if source else {}),
        "include": [described_folder(path) for path in include],
        "tokenizer": tokenizer_digest(tokenizer),
    }
    empty: dict[str, Any] = {"finished": [], "tasks": [], "skipped": []}
    file = files.ResultFile(output, MEASURE, loaded.description(), settings, loaded.model.device, empty)
    progress = Progress()
    parts = split_parts(names)
    left = [part for part in parts if part not in file.results["finished"]]
    if left:
        allowed = allowed_length(loaded, max_length, progress)
        model = language_model(loaded, tokenizer, batch_size=batch_size, max_length=allowed)
        made_for = getattr(tokenizer, "name_or_path", "") or loaded.spec.source
        with overrides(data, left, texts, limit) as own:
            for part in left:
                progress.say(f"{loaded.spec.name}: {part}")
                words = {**length_settings(part, lengths), "pretrained": loaded.spec.source, "tokenizer": made_for}
                model.cut_texts = 0
                # The texts of all lengths are one list, of which the harness takes the first.
                records = limit * max(1, len(lengths)) if limit and part in ruler.PARTS else limit
                try:
                    found = run_task(part, model, task_manager([part], [*include, *own], words), shots, records)
                except Exception as error:
                    reason = explain_failure(error, part, parts[part])
                    progress.say(f"{loaded.spec.name}: {part} was skipped: {reason}")
                    file.results["skipped"].append({"task": part, "reason": reason})
                else:
                    if model.cut_texts:
                        cut = f"{model.cut_texts} prompts longer than {model.max_length} tokens"
                        progress.say(f"{loaded.spec.name}: {part}: {cut} were truncated on the left")
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
    """One line for the table: what failed, and what can be done where data could not be reached."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    words = lines[0][:LONGEST_REASON] if lines else "no message"
    if not isinstance(error, ValueError):
        words = f"{type(error).__name__}: {words}"
    is_local = part in ruler.WITH_SOURCES or (part not in ruler.PARTS and known_task(name) is not None)
    if isinstance(error, OSError) and is_local:
        words += f" (--data takes {name} from local files)"
    return words


def add_means(results: dict[str, Any], parts: Mapping[str, str]) -> None:
    """The harness's mean of ruler, over its parts with equal weights, for every length and once all are there."""
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
        log_samples=True,  # says how many choices each question has
    )
    return collect_rows(found)


def collect_rows(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row per task (or group) and metric, in the harness's order."""
    rows, chances = [], chance_levels(found)
    for task, values in {**found["results"], **found.get("groups", {})}.items():
        samples = found["n-samples"].get(task, {}).get("effective")
        for key, value in values.items():
            metric, _, chosen = key.partition(",")
            if not chosen or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            # ruler's metrics are lengths, -1 for those that were not asked for.
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
    """What guessing gets right, by task: one of the choices of each question, or no word at all; of a group the mean
    over its questions."""
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
    """Without a word from the harness about every request, and without looking for a hub where there are files."""
    import logging

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    for name in ("lm_eval", "datasets"):
        logging.getLogger(name).setLevel(logging.ERROR)
