"""Downstream tasks by lm-evaluation-harness: on its public sets, or on local files in the schema of each task."""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from softplus_attention.evaluation import results as files
from softplus_attention.evaluation.models import Opened
from softplus_attention.evaluation.progress import Progress
from softplus_attention.validation import fail

MEASURE = "downstream"
OUR_TASKS = Path(__file__).parent / "harness_tasks"
# Standard errors of metrics without a formula, such as perplexity.
BOOTSTRAP_SAMPLES = 1000


@dataclass(frozen=True)
class KnownTask:
    """Where the harness keeps a task, and what a record of its data holds."""

    folder: str  # under lm_eval/tasks, "" for a task of ours
    fields: tuple[str, ...] = ()
    splits: tuple[str, ...] = ()  # in the order of preference for evaluation
    examples: str = "train"  # the split that examples in the prompt come from
    has_subjects: bool = False
    needs_data: bool = True  # else the harness makes or fetches it by itself


TASKS = {
    "arc_easy": KnownTask("arc", ("question", "choices", "answerKey"), ("test", "validation")),
    "arc_challenge": KnownTask("arc", ("question", "choices", "answerKey"), ("test", "validation")),
    "hellaswag": KnownTask("hellaswag", ("activity_label", "ctx_a", "ctx_b", "endings", "label"), ("validation",)),
    "piqa": KnownTask("piqa", ("goal", "sol1", "sol2", "label"), ("validation",)),
    "sciq": KnownTask(
        "sciq",
        ("question", "support", "distractor1", "distractor2", "distractor3", "correct_answer"),
        ("test", "validation"),
    ),
    "mmlu": KnownTask("mmlu/default", ("question", "choices", "answer"), ("test",), "dev", has_subjects=True),
    "lambada_openai": KnownTask("lambada", ("text",), ("test",)),
    "lambada_standard": KnownTask("lambada", ("text",), ("test",)),
    "summscreen": KnownTask("", ("input", "output"), ("validation", "test")),
    "ruler": KnownTask("ruler", needs_data=False),
    "babilong": KnownTask("babilong", needs_data=False),
}
USUAL = ("arc_easy", "arc_challenge", "hellaswag", "piqa", "sciq", "mmlu", "lambada_openai", "summscreen")


@dataclass(frozen=True)
class LocalData:
    """The files of one task: ``files[split]``, one JSON object per line."""

    task: str  # as the harness names it
    known: KnownTask
    files: Mapping[str, Path]

    @property
    def evaluated(self) -> str:
        return next(split for split in self.known.splits if split in self.files)


def local_data(folder: Path, names: Sequence[str], shots: int) -> list[LocalData]:
    """FOLDER/TASK/SPLIT.jsonl, and FOLDER/mmlu/SUBJECT/SPLIT.jsonl, for every task that is read from files."""
    if not folder.is_dir():
        fail("--data", "a folder with a folder for each task", repr(str(folder)))
    found = []
    for name in names:
        known = TASKS.get(name)
        if known is None or not known.needs_data:
            continue
        places = {name: folder / name}
        if known.has_subjects:
            places = {f"{name}_{place.name}": place for place in sorted((folder / name).glob("*")) if place.is_dir()}
            if not places:
                fail("--data", f"a folder with {name}/SUBJECT/{known.splits[0]}.jsonl", repr(str(folder)))
        found += [files_of(task, known, place, shots) for task, place in places.items()]
    return found


def files_of(task: str, known: KnownTask, place: Path, shots: int) -> LocalData:
    wanted = (*known.splits, *(() if known.examples in known.splits else (known.examples,)))
    there = {split: place / f"{split}.jsonl" for split in wanted if (place / f"{split}.jsonl").is_file()}
    if not set(known.splits) & set(there):
        fail("--data", f"a folder with {place.name}/{known.splits[0]}.jsonl", f"{str(place)!r}, which has none")
    if shots and known.examples not in there:
        fail("--shots", f"0, or {known.examples}.jsonl beside the other files of {task}", shots)
    for path in there.values():
        check_fields(path, known.fields)
    return LocalData(task, known, {split: path.resolve() for split, path in there.items()})


def check_fields(path: Path, fields: Sequence[str]) -> None:
    expected = f"records with the fields {', '.join(fields)}"
    count = 0
    with path.open(encoding="utf-8") as lines:
        for count, line in enumerate((line for line in lines if line.strip()), 1):
            try:
                record = json.loads(line)
            except ValueError as error:
                fail(str(path), expected, f"record {count}, which is no JSON: {error}")
            missing = [field for field in fields if not isinstance(record, dict) or field not in record]
            if missing:
                fail(str(path), expected, f"record {count} without {', '.join(missing)}")
    if not count:
        fail(str(path), expected, "an empty file")


def write_overrides(folder: Path, data: Sequence[LocalData]) -> None:
    """A YAML file of the same name for each task: all that the harness has for it, but with the data from files.

    JSON is YAML. The harness takes the later of two tasks of one name, and these come last.
    """
    for local in data:
        split = local.evaluated
        examples = local.known.examples if local.known.examples in local.files else None
        word: dict[str, Any] = {
            "include": str(built_in(local)),
            "task": local.task,
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {"data_files": {name: str(path) for name, path in local.files.items()}},
            "training_split": None,
            "validation_split": None,
            "test_split": split,
            "fewshot_split": examples,
        }
        (folder / f"{local.task}.yaml").write_text(json.dumps(word, indent=1))
    subjects = [local.task for local in data if local.known.has_subjects]
    if subjects:
        group = {
            "group": "mmlu",
            "task": subjects,
            "aggregate_metric_list": [{"metric": "acc", "weight_by_size": True}],
            "metadata": {"version": 2},
        }
        (folder / "mmlu.yaml").write_text(json.dumps(group, indent=1))


def built_in(local: LocalData) -> Path:
    if not local.known.folder:
        return OUR_TASKS / f"{local.task}.yaml"
    path = harness_folder() / local.known.folder / f"{local.task}.yaml"
    if not path.is_file():
        fail("--data", "subjects that the harness knows", f"{local.task!r}")
    return path


def harness_folder() -> Path:
    import lm_eval

    return Path(lm_eval.__file__).parent / "tasks"


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
        near = difflib.get_close_matches(name, [*TASKS, *manager.all_tasks], 3)
        hint = f"; near it: {', '.join(dict.fromkeys(near))}" if near else ""
        fail("--tasks", f"{', '.join(TASKS)}, or another task of the harness", f"{name!r}{hint}")
    return manager


@contextlib.contextmanager
def overrides(data: Sequence[LocalData]) -> Iterator[list[Path]]:
    """A folder with the YAML files of local data, for as long as it is needed."""
    with tempfile.TemporaryDirectory(prefix="softplus-attention-tasks-") as folder:
        write_overrides(Path(folder), data)
        yield [Path(folder)] if data else []


def language_model(opened: Opened, tokenizer: Any, *, batch_size: int | str, max_length: int | None) -> Any:
    """The model as the harness wants it."""
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=opened.model, tokenizer=tokenizer, batch_size=batch_size, max_length=max_length)


def measure_downstream(
    opened: Opened,
    tokenizer: Any,
    names: Sequence[str],
    output: Path,
    *,
    data: Sequence[LocalData] = (),
    include: Sequence[Path] = (),
    shots: int | None = None,
    limit: int | None = None,
    batch_size: int | str = 8,
    max_length: int | None = None,
    lengths: Sequence[int] = (),
) -> dict[str, Any]:
    """Task after task; what an earlier run finished is not run again."""
    settings = {
        "tasks": list(names),
        "shots": shots,
        "limit": limit,
        "max_length": max_length,
        "lengths": list(lengths),
        "data": {local.task: {split: str(path) for split, path in local.files.items()} for local in data},
        "include": [str(path) for path in include],
    }
    words = {name: length_words(name, lengths) for name in names}
    file = files.ResultFile(
        output,
        MEASURE,
        opened.description(),
        settings,
        opened.model.device,
        {"finished": [], "tasks": [], "skipped": []},
    )
    progress = Progress()
    left = [name for name in names if name not in file.results["finished"]]
    if left:
        with overrides(data) as own:
            managers = {
                name: task_manager([name], [*include, *own], {**asked, "pretrained": opened.request.source})
                for name, asked in words.items()
                if name in left
            }
            model = language_model(opened, tokenizer, batch_size=batch_size, max_length=max_length)
            for name, manager in managers.items():
                progress.say(f"{opened.request.name}: {name}")
                file.results["tasks"] += run_task(name, model, manager, shots, limit)
                file.results["finished"].append(name)
                file.save()
    return file.save(complete=True)


def length_words(name: str, lengths: Sequence[int]) -> dict[str, Any]:
    """How a task is told which lengths to make: babilong has ready sets of 0k, 1k, 2k, ... tokens, one at a time."""
    if not lengths:
        return {}
    if not name.startswith("babilong"):
        return {"max_seq_lengths": list(lengths)}
    if len(lengths) > 1:
        fail("--lengths", "one length for babilong", ", ".join(map(str, lengths)))
    return {"max_seq_lengths": f"{lengths[0] // 1024}k"}


def run_task(name: str, model: Any, manager: Any, shots: int | None, limit: int | None) -> list[dict[str, Any]]:
    from lm_eval import simple_evaluate

    try:
        found = simple_evaluate(
            model=model,
            tasks=[name],
            num_fewshot=shots,
            limit=limit,
            task_manager=manager,
            bootstrap_iters=BOOTSTRAP_SAMPLES,
            log_samples=False,
        )
    except (ConnectionError, FileNotFoundError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        fail("--tasks", f"tasks whose data can be reached, or --data with a folder for {name}", f"{name!r}: {reason}")
    return rows_of(found)


def rows_of(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row per task (or group) and metric, in the harness's order."""
    rows = []
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
                    "samples": samples,
                    "shots": found.get("n-shot", {}).get(task),
                    "higher_is_better": found.get("higher_is_better", {}).get(task, {}).get(metric),
                }
            )
    return rows


def quiet() -> None:
    """Without a word from the harness about every request, and without looking for a hub where there are files."""
    import logging

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    for name in ("lm_eval", "datasets"):
        logging.getLogger(name).setLevel(logging.ERROR)


def table_of(results: Sequence[Mapping[str, Any]]) -> str:
    names = [result["model"]["name"] for result in results]
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for result in results:
        for row in result["results"]["tasks"]:
            error = row["standard_error"]
            words = f"{row['value']:.4f}" + (f" ± {error:.4f}" if error is not None else "")
            cells.setdefault((row["task"], row["metric"]), {})[result["model"]["name"]] = words
    width = max([20, *(len(name) + 2 for name in names)])
    lines = [f"{'task':26}{'metric':14}" + "".join(f"{name:>{width}}" for name in names)]
    for (task, metric), by_name in cells.items():
        lines.append(f"{task:26}{metric:14}" + "".join(f"{by_name.get(name, ''):>{width}}" for name in names))
    return "\n".join(lines)


def csv_rows(results: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    head = ["task", "metric", "value", "standard_error", "samples", "shots"]
    rows = [
        [result["model"]["name"], *(row[word] for word in head)]
        for result in results
        for row in result["results"]["tasks"]
    ]
    return ["model", *head], rows
