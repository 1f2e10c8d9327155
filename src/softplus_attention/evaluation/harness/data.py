"""Data of downstream tasks: the harness's public datasets, or local files in the schema of each task."""

from __future__ import annotations

import contextlib
import hashlib
import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from softplus_attention.evaluation.harness import ruler
from softplus_attention.utils.files import write_json
from softplus_attention.utils.untrusted import check_regular, open_regular, read_json, sha256
from softplus_attention.validation import fail

OUR_TASKS = Path(__file__).parent / "yaml"
# File suffix by the name of the format in `datasets`.
FORMATS = {"json": ".jsonl", "parquet": ".parquet"}


@dataclass(frozen=True)
class KnownTask:
    """Location of a task in the harness, and the fields of its records."""

    folder: str  # under lm_eval/tasks, "" for our own task
    fields: tuple[str, ...] = ()
    splits: tuple[str, ...] = ()  # in the order of preference for evaluation
    examples: str | None = "train"  # split of the few-shot examples; None if the task defines its own
    has_subjects: bool = False
    in_local_files: bool = True
    in_hub: bool = True


BABILONG = tuple(f"babilong_qa{number}" for number in range(1, 21))
BABILONG_FIELDS = ("input", "question", "target")
# The public sets have texts of these lengths for the first five parts, and only the facts ("0k") for the others.
BABILONG_LENGTHS = {1024 * thousands: f"{thousands}k" for thousands in (1, 2, 4, 8, 16, 32, 64, 128)}
BABILONG_WITH_LENGTHS = BABILONG[:5]

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
    "summscreen": KnownTask("", ("input", "output"), ("validation", "test"), in_hub=False),
    # The local files of ruler are handled by ruler.py.
    "ruler": KnownTask("ruler", in_local_files=False),
    "babilong": KnownTask("babilong", BABILONG_FIELDS, ("test",), None, has_subjects=True),
    "babilong_longctx": KnownTask("babilong", BABILONG_FIELDS, ("test",), None, has_subjects=True),
}


def known_task(name: str) -> KnownTask | None:
    if name in BABILONG:
        return KnownTask("babilong", BABILONG_FIELDS, ("test",), None)
    return TASKS.get(name)


@dataclass(frozen=True)
class LocalData:
    """The files of one task, by split."""

    task: str  # name in the harness
    group: str | None
    known: KnownTask
    files: Mapping[str, Path]
    evaluated: str  # split

    def identity(self) -> dict[str, dict[str, str]]:
        return {split: describe_file(path) for split, path in self.files.items()}


def describe_file(path: Path) -> dict[str, str]:
    """The end of its path, which names no private folder, and its sha256: results of changed data are not reused."""
    return {"path": "/".join(path.parts[-3:]), "sha256": sha256(path)}


def describe_folder(folder: Path) -> dict[str, str]:
    """Name and hash of a folder of YAML files and the modules they import."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.suffix in (".yaml", ".yml", ".py")):
        digest.update(str(path.relative_to(folder)).encode() + bytes.fromhex(sha256(path)))
    return {"path": folder.name, "sha256": digest.hexdigest()}


def local_data(
    folder: Path, names: Sequence[str], shots: int | None = None, lengths: Sequence[int] = ()
) -> list[LocalData]:
    """Files FOLDER/TASK/SPLIT.jsonl (or .parquet) and FOLDER/mmlu/SUBJECT/SPLIT.jsonl of all tasks with local files."""
    if not folder.is_dir():
        fail("--data", "a folder with one folder per task", repr(str(folder)))
    found: dict[str, LocalData] = {}
    for name in names:
        known = known_task(name)
        if known is None or not known.in_local_files:
            continue
        for task, task_folder in task_folders(folder, name, known).items():
            group = name if known.has_subjects else None
            found[task] = find_files(task, group, known, task_folder, shots or 0, lengths)
    return list(found.values())


def task_folders(folder: Path, name: str, known: KnownTask) -> dict[str, Path]:
    """The folder of each task that ``name`` selects."""
    if known.folder == "babilong" and known.has_subjects:
        chosen = BABILONG if name == "babilong" else BABILONG_WITH_LENGTHS
        folders = {task: folder / task for task in chosen if (folder / task).is_dir()}
        if not folders:
            fail("--data", "a folder with babilong_qa1/test.jsonl, babilong_qa2/test.jsonl, ...", repr(str(folder)))
        return folders
    if not known.has_subjects:
        return {name: folder / name}
    folders = {f"{name}_{path.name}": path for path in sorted((folder / name).glob("*")) if path.is_dir()}
    if not folders:
        fail("--data", f"a folder with {name}/SUBJECT/{known.splits[0]}.jsonl", repr(str(folder)))
    return folders


def find_files(
    task: str, group: str | None, known: KnownTask, folder: Path, shots: int, lengths: Sequence[int] = ()
) -> LocalData:
    # Each babilong file holds one length and is named like the public split, such as 4k.
    splits = (BABILONG_LENGTHS[lengths[0]],) if lengths and task in BABILONG else known.splits
    wanted = dict.fromkeys([*splits, *([known.examples] if known.examples else [])])
    files = {
        split: path
        for split in wanted
        if (path := next((p for s in FORMATS.values() if (p := folder / f"{split}{s}").is_file()), None))
    }
    evaluated = next((split for split in splits if split in files), None)
    if evaluated is None:
        fail("--data", f"a folder with {folder.name}/{splits[0]}.jsonl", f"{str(folder)!r}, which has none")
    if shots and known.examples and known.examples not in files:
        fail("--shots", f"0 without {known.examples}.jsonl next to the other files of {task}", shots)
    if len({path.suffix for path in files.values()}) > 1:
        fail("--data", "files of one format per task", ", ".join(str(path) for path in files.values()))
    for path in files.values():
        check_fields(path, known.fields)
    return LocalData(task, group, known, {split: path.resolve() for split, path in files.items()}, evaluated)


def ruler_texts(folder: Path, names: Sequence[str]) -> ruler.Texts:
    """Those of FOLDER/ruler/essays.jsonl, squad.json and hotpotqa.json that the requested parts of ruler need."""
    found = {}
    for source, (file, parts) in ruler.SOURCES.items():
        needing = [part for part in parts if part in names]
        path = folder / "ruler" / file
        if not needing:
            continue
        if not path.is_file():
            others = ", ".join(part for part in ruler.PARTS if part not in ruler.WITH_SOURCES)
            expected = f"a folder with ruler/{file}, needed by {', '.join(needing)} (parts without files: {others})"
            fail("--data", expected, repr(str(folder)))
        if path.suffix == ".jsonl":
            check_fields(path, ("text",))
        else:
            check_questions(path, source)
        found[source] = path.resolve()
    return ruler.Texts(**found)


def check_questions(path: Path, source: str) -> None:
    try:
        data = read_json(path, ruler.LARGEST)
        questions, _ = ruler.read_questions(source, data)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        fail(str(path), f"in the format of the public {source} file", f"{type(error).__name__}: {error}")
    if not questions:
        raise ValueError(f"{path}: no question with an answer")


def check_fields(path: Path, fields: Sequence[str]) -> None:
    expected = f"records with the fields {', '.join(fields)}"
    count = 0
    for count, record in enumerate(read_records(path, expected), 1):
        missing = [field for field in fields if not isinstance(record, dict) or field not in record]
        if missing:
            fail(str(path), expected, f"record {count} without {', '.join(missing)}")
    if not count:
        fail(str(path), expected, "an empty file")


def read_records(path: Path, expected: str) -> Iterable[Any]:
    if path.suffix == ".parquet":
        import pyarrow.parquet

        try:
            check_regular(path)
            whole = pyarrow.parquet.ParquetFile(path)
        except (OSError, ValueError) as error:
            fail(str(path), expected, f"an invalid Parquet file: {error}")
        # All rows have one schema, so one record stands for them.
        yield from [dict.fromkeys(whole.schema_arrow.names)] if whole.metadata.num_rows else []
        return
    with open_regular(path) as lines:
        for count, line in enumerate((line for line in lines if line.strip()), 1):
            try:
                yield json.loads(line)
            except ValueError as error:
                fail(str(path), expected, f"record {count}, which is not JSON: {error}")


def check_lengths(names: Sequence[str], lengths: Sequence[int], is_local: bool = False) -> None:
    """babilong has ready sets of certain lengths and takes one; ruler generates prompts of any length."""
    chosen = [name for name in names if name.startswith("babilong")]
    if not lengths or not chosen:
        return
    available = ", ".join(map(str, BABILONG_LENGTHS))
    if len(lengths) > 1:
        fail("--lengths", f"one length for babilong, of {available}", ", ".join(map(str, lengths)))
    if lengths[0] not in BABILONG_LENGTHS:
        fail("--lengths", f"one of {available} for babilong (omit it for the facts alone)", lengths[0])
    short = [name for name in chosen if name not in (*BABILONG_WITH_LENGTHS, "babilong_longctx")]
    if short and not is_local:
        have_lengths = f"{BABILONG_WITH_LENGTHS[0]} to {BABILONG_WITH_LENGTHS[-1]} and babilong_longctx"
        fail("--lengths", f"omitted except for {have_lengths}", f"{lengths[0]} with {short[0]!r}")


def length_settings(name: str, lengths: Sequence[int]) -> dict[str, Any]:
    """The harness's metadata that selects the lengths of a task."""
    if not lengths:
        return {}
    if not name.startswith("babilong"):
        return {"max_seq_lengths": list(lengths)}
    return {"max_seq_lengths": BABILONG_LENGTHS[lengths[0]]}


@contextlib.contextmanager
def overrides(
    data: Sequence[LocalData], names: Sequence[str] = (), texts: ruler.Texts | None = None, limit: int | None = None
) -> Iterator[list[Path]]:
    """A temporary folder with the YAML files of local data and of ruler."""
    with tempfile.TemporaryDirectory(prefix="softplus-attention-tasks-") as name:
        folder = Path(name)
        write_overrides(folder, data)
        parts = [part for part in names if part in ruler.PARTS]
        ruler.write_overrides(folder, harness_folder() / "ruler", parts, texts, limit)
        yield [folder] if data or parts else []


def write_overrides(folder: Path, data: Sequence[LocalData]) -> None:
    """Write a YAML file for each task that includes the harness's file of the same name and replaces the data.

    JSON is valid YAML. Of two tasks with one name the harness takes the later, and these come last.
    """
    for local in data:
        examples = local.known.examples if local.known.examples in local.files else None
        suffix = local.files[local.evaluated].suffix
        content: dict[str, Any] = {
            "include": str(built_in(local)),
            "task": local.task,
            "custom_dataset": None,
            "dataset_path": next(name for name, ending in FORMATS.items() if ending == suffix),
            "dataset_name": None,
            # `datasets` does not accept a length such as 4k as the name of a split.
            "dataset_kwargs": {"data_files": {split_name(local, split): str(p) for split, p in local.files.items()}},
            "training_split": None,
            "validation_split": None,
            "test_split": split_name(local, local.evaluated),
            "fewshot_split": examples,
        }
        write_json(folder / f"{local.task}.yaml", content)
    for group in dict.fromkeys(local.group for local in data if local.group):
        content = {
            "group": group,
            "task": [local.task for local in data if local.group == group],
            "aggregate_metric_list": [{"metric": "acc", "weight_by_size": True}],
            "metadata": {"version": 2},
        }
        write_json(folder / f"{group}.yaml", content)


def split_name(local: LocalData, split: str) -> str:
    return "test" if split == local.evaluated and split not in local.known.splits else split


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
