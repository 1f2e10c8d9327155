"""The base of every measure of ``softplus-attention evaluate``, with shared options, models, texts and tables."""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from softplus_attention.charts.model import Block, SeriesStyles, Table
from softplus_attention.evaluation.measures.loaded import LoadedResult, load
from softplus_attention.utils import results as files
from softplus_attention.utils.files import check_no_strangers
from softplus_attention.utils.progress import Progress
from softplus_attention.validation import fail

if TYPE_CHECKING:
    from softplus_attention.evaluation.models import LoadedModel, ModelSpec
    from softplus_attention.evaluation.texts import Documents

MODEL_HELP = (
    "[NAME=]FOLDER[+OPTION=VALUE...]: folder of a saved model or name on the Hub, an optional name for results, and "
    "changes at inference for this model, such as runs/lssar/model+power=31 or yarn=runs/softmax/model+rope=yarn:4"
)
RESUME = "If stopped, run the same command again: finished results are reused."
# Files that mark a folder as ours: results, or a training run.
OWN_FILES = ("*--*.json", "*--*.json.old*", "run.json", "results.json", "bench.json", "passkey.jsonl", "report.html")
MULTIPLES = (1, 2, 4, 8, 16, 32, 64)

Result = dict[str, Any]
Results = Sequence[Result]
CsvTable = tuple[list[str], list[list[Any]]]


@dataclass
class Outcome:
    """Results of the models that could be measured; ``status`` is 1 if some could not."""

    results: list[Result]
    status: int = 0


@dataclass(frozen=True)
class Measure:
    """One measure: its options, how it runs, and how its results become text, CSV files and charts.

    Defining one as ``MEASURE`` in a module of this package is enough to register it.
    """

    name: str
    place: int  # position in --help and in the report
    help: str
    description: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], Outcome]
    table: Callable[[Results], str]
    csv: Mapping[str, Callable[[Results], CsvTable]]  # by file name
    title: str  # of its section in the report
    read: Callable[[Result], Any]  # validates the ``results`` of an untrusted file
    charts: Callable[[Sequence[LoadedResult], SeriesStyles, str], list[Block]]
    drawn: Callable[[Block], bool] = lambda block: True  # charts that `evaluate` draws; the report draws all
    needs_model: bool = True
    shares_sequences: bool = False  # among the processes of torchrun

    def add_parser(self, actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
        parser = actions.add_parser(self.name, help=self.help, description=f"{self.description} {RESUME}")
        if self.needs_model:
            add_model_arguments(parser)
        self.add_arguments(parser)
        parser.set_defaults(run=self.command)
        return parser

    def command(self, options: argparse.Namespace) -> int:
        """Measure, print the table, and write CSV files and figures next to the results."""
        from softplus_attention.training import distributed
        from softplus_attention.utils.device import resolve_device

        if distributed.world_size() > 1 and not self.shares_sequences:
            raise ValueError(f"`evaluate {self.name}` runs in one process: start it without torchrun")
        if distributed.world_size() > 1:
            distributed.start(resolve_device(options.device).type)
        try:
            with warnings.catch_warnings():
                # Warnings of torch and transformers about our use of them, which the user cannot change.
                warnings.simplefilter("ignore")
                outcome = self.run(options)
                if distributed.is_rank0():
                    print(self.table(outcome.results))
                    self.finish(options.output, outcome.results)
        except KeyboardInterrupt:
            if distributed.is_rank0():
                print("\nstopped; run the same command again to continue", file=sys.stderr)
            return 130
        distributed.destroy_process_group()
        return outcome.status

    def finish(self, folder: Path, results: Results) -> None:
        written = [files.result_path(folder, result) for result in results]
        written += [*self.write_tables(folder, results), *self.draw(folder, results)]
        print()
        for path in written:
            print(f"written: {path}")
        if find_spec("matplotlib") is None:
            print(
                "no figures, because matplotlib is not installed; to draw them later or on another machine: "
                f"softplus-attention evaluate figures {folder}",
                file=sys.stderr,
            )

    def blocks(self, results: Sequence[Mapping[str, Any]]) -> list[Block]:
        """Charts, tables and notes of results as read by `utils.results`."""
        return self.charts([load(dict(result), self.read) for result in results], SeriesStyles(), "")

    def write_tables(self, folder: Path, results: Results) -> list[Path]:
        return [files.write_table(folder / f"{name}.csv", *rows(results)) for name, rows in self.csv.items()]

    def draw(self, folder: Path, results: Results) -> list[Path]:
        """Write the figure as PNG and SVG, unless matplotlib is missing or there is nothing to draw."""
        if find_spec("matplotlib") is None:
            return []
        from softplus_attention.charts.draw import draw

        shown = [r for r in results if r["results"].get("lengths", True) and r["results"].get("cells", True)]
        figures = [b for b in self.blocks(shown) if not isinstance(b, Table | str) and self.drawn(b)]
        return draw(figures, folder / self.name) if figures else []

    def check(self, folder: Path, results: Results) -> None:
        """Raise for files that were changed or truncated, before anything is written."""
        for result in results:
            try:
                for rows in self.csv.values():
                    rows([result])
            except (AttributeError, IndexError, KeyError, TypeError) as error:
                path = files.result_path(folder, result) if "name" in result.get("model", {}) else folder
                fail("result file", f"a complete result of `evaluate {self.name}`", f"{str(path)!r}: {error!r}")


# ---- options


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", nargs="+", metavar="MODEL", help=MODEL_HELP)
    add_output(parser)
    parser.add_argument(
        "--train-length", type=int, metavar="N", help="training length in tokens (default: from the config)"
    )
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16", "mixed"),
        default="auto",
        help="mixed: float32 weights in bfloat16 arithmetic, as in training on a GPU (default: as saved)",
    )
    parser.add_argument("--device", help="for example cpu or cuda:0 (default: cuda if available)")
    change = parser.add_argument_group("changes at inference, for every model")
    change.add_argument("--power", metavar="P", help="another power: a number, grow:BASE,SLOPE, or log:FACTOR")
    change.add_argument("--reweight", action="store_true", help="add the second stage to a model trained without it")
    change.add_argument("--window", metavar="N", help="each token sees itself and the N - 1 tokens before it")
    change.add_argument("--rope", metavar="TYPE:FACTOR", help="linear:4, ntk:4 (dynamic NTK) or yarn:4")


def add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("evaluation"),
        metavar="FOLDER",
        help="folder for results (default: %(default)s)",
    )


def add_text_arguments(parser: argparse.ArgumentParser, required: bool = True) -> None:
    texts = parser.add_mutually_exclusive_group(required=required)
    texts.add_argument("--data", metavar="FOLDER", help="folder written by `softplus-attention data prepare`")
    texts.add_argument(
        "--text", nargs="+", metavar="FILE", help=".txt or .jsonl files, or builtin: the validation text of the package"
    )
    parser.add_argument("--split", default="validation", help="split of --data (default: %(default)s)")
    parser.add_argument("--tokenizer", help="tokenizer for --text (default: the one saved with each model)")


def add_integer(parser: Any, name: str, help_text: str, default: int | None = None) -> None:
    """An option for a whole number, whose help ends with the default if there is one."""
    shown = "" if default is None else " (default: %(default)s)"
    parser.add_argument(name, type=int, default=default, metavar="N", help=help_text + shown)


def add_old_name(parser: Any, name: str, dest: str | None = None, **kwargs: Any) -> None:
    """A deprecated name of an option, hidden from --help."""
    dest = dest or name.removeprefix("--").replace("-", "_")
    parser.add_argument(name, dest=dest, default=argparse.SUPPRESS, help=argparse.SUPPRESS, **kwargs)


def check_at_least(options: argparse.Namespace, **least: int) -> None:
    """Check options against their minimum; options that were not given are skipped."""
    for name, value in least.items():
        given = getattr(options, name)
        if given is not None and given < value:
            fail(f"--{name.replace('_', '-')}", f"at least {value}", given)


def parse_lengths(text: str, training_length: int) -> list[int]:
    """Lengths in tokens, sorted, from "1,2,4" or "2x,4x" (times the training length) or "512,1024" (tokens).

    A list that begins with 1 means multiples, since one token has no loss. Other lists of small numbers below the
    training length are ambiguous and raise an error.
    """
    expected = "whole numbers such as 1,2,4 or 1x,8x,64x (times the training length) or 512,1024 (tokens)"
    lengths = []
    parts = [part.strip() for part in text.split(",")]
    multiples = parts[0] == "1"
    for part in parts:
        number = part.removesuffix("x")
        if not number.isdecimal() or int(number) < 1:
            fail("--lengths", expected, repr(text))
        lengths.append(int(number) * (training_length if multiples or part.endswith("x") else 1))
    if max(lengths) < training_length and max(lengths) <= max(MULTIPLES):
        times = ",".join(f"{part}x" for part in parts)
        longest = f"{training_length} tokens, the training length, or more"
        fail("--lengths", f"{times} for multiples of the training length, or up to {longest}", repr(text))
    if min(lengths) < 2:
        fail("--lengths", "of at least 2 tokens each", repr(text))
    return sorted(set(lengths))


def check_output(path: Path) -> None:
    """Raise for an output folder that cannot be used, before anything is measured."""
    if path.exists() and not path.is_dir():
        fail("--output", "a folder", f"{str(path)!r}, which is a file")
    existing = next(folder for folder in (path, *path.absolute().parents) if folder.is_dir())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        fail("--output", "a writable folder", f"{str(path)!r}: {error.strerror}")
    check_no_strangers("--output", path, OWN_FILES)


# ---- models and texts


def resolve_models(options: argparse.Namespace) -> tuple[list[ModelSpec], int]:
    """The models and their common training length."""
    from softplus_attention.evaluation.models import check_spec, parse_model_specs, read_training_length
    from softplus_attention.huggingface.loading import silence_transformers
    from softplus_attention.utils.device import check_device

    silence_transformers()
    check_output(options.output)
    check_device(options.device)
    common = {name: getattr(options, name) for name in ("power", "window", "rope")}
    specs = parse_model_specs(
        options.models, common | ({"reweight": ""} if options.reweight else {}), options.trust_remote_code
    )
    found = {spec.name: read_training_length(spec) for spec in specs}
    length = options.train_length
    if length is not None and length < 2:
        fail("--train-length", "at least 2", length)
    if length is None:
        lengths = set(found.values())
        if len(lengths) > 1 or None in lengths:
            given = ", ".join(f"{name}: {length or 'not in its config'}" for name, length in found.items())
            fail("--train-length", "given if the models' configs disagree or have no length", given)
        length = next(length for length in lengths if length is not None)
    for spec in specs:
        check_spec(spec, length)
    return specs, length


def measure_each(
    options: argparse.Namespace,
    specs: Sequence[ModelSpec],
    training_length: int,
    measure: Callable[[LoadedModel], Result],
) -> Outcome:
    """Measure with one model in memory at a time. If one of several models fails, report it and continue; with several
    processes raise, because the others would wait for the one that failed."""
    from softplus_attention.evaluation.models import load_for_evaluation
    from softplus_attention.training import distributed

    outcome = Outcome([])
    for spec in specs:
        try:
            loaded = load_for_evaluation(spec, training_length, dtype=options.dtype, device=options.device)
            outcome.results.append(measure(loaded))
        except Exception as error:
            if len(specs) == 1 or distributed.world_size() > 1:
                raise
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            print(f"{spec.name} could not be measured: {kind}{error}", file=sys.stderr)
            outcome.status = 1
    if not outcome.results:
        raise ValueError(f"none of the {len(specs)} models could be measured")
    return outcome


def tokenizer_for(options: argparse.Namespace, loaded: LoadedModel) -> Any:
    from softplus_attention.huggingface.loading import load_tokenizer

    return load_tokenizer(options.tokenizer or loaded.spec.source, loaded.spec.trust_remote_code)


def documents_for(options: argparse.Namespace, loaded: LoadedModel) -> Documents:
    from softplus_attention.evaluation.texts import check_same_tokenizer, folder_documents, raw_texts, text_documents

    if options.data is not None:
        check_same_tokenizer(options.data, options.tokenizer or loaded.spec.source)
        return folder_documents(options.data, options.split)
    return text_documents(raw_texts(options.text), options.text, tokenizer_for(options, loaded))


# ---- one length after another


def measure_lengths_in_turn(
    file: files.ResultFile,
    lengths: Iterable[int],
    name: str,
    progress: Progress,
    measure: Callable[[int, str], Result],
    gaps: tuple[type[Exception], ...],
) -> Result:
    """Call ``measure(length, title)`` for each length missing in the file, and save after each. Errors of the types in
    ``gaps`` skip the length and record the reason."""
    for length in lengths:
        title = f"{name}, {length} tokens"
        if file.has("lengths", length=length):
            progress.say(f"{title}: found in {file.path}")
            continue
        progress.update(f"{title}: started")
        try:
            entry = measure(length, title)
        except gaps as error:
            reason = str(error).splitlines()[0]
            progress.say(f"{title}: {reason}")
            file.results["skipped"].append({"length": length, "reason": reason})
        else:
            file.add("lengths", entry, ["length"])
    progress.clear()
    return file.save(complete=True)


def split_by_feasibility(
    lengths: Sequence[int], longest: int, max_positions: int | None = None
) -> tuple[list[int], list[dict[str, Any]], int]:
    """(lengths to measure, skipped lengths with reasons, longest length that fits into a document).

    The last one decides the texts, so that all models are measured on the same texts whatever their positions.
    """
    in_documents = [length for length in lengths if length <= longest]
    bounds = {longest: f"the longest document has {longest} tokens"}
    if max_positions is not None:
        bounds[max_positions] = f"the model has positions for {max_positions} tokens"
    bound = min(bounds)
    skipped = [{"length": length, "reason": bounds[bound]} for length in lengths if length > bound]
    found = [length for length in lengths if length <= bound]
    if not found:
        fail("--lengths", f"at most {bound} ({bounds[bound]})", min(lengths))
    for length in found:
        if in_documents[-1] % length:
            fail("--lengths", f"divisors of {in_documents[-1]}, the longest that fits into a document", length)
    return found, skipped, in_documents[-1]


# ---- tables in a terminal


def by_length_table(
    title: str, rows: Mapping[str, Mapping[int, str]], training_length: float, width: int = 10
) -> list[str]:
    """One line per model, one column per length."""
    lengths = sorted({length for cells in rows.values() for length in cells})
    first = max(24, *(len(name) + 2 for name in rows))
    head = [
        f"{title:<{first}}" + "".join(f"{length:>{width}}" for length in lengths) + "  tokens",
        " " * first + "".join(f"{length / training_length:>{width - 1}.4g}x" for length in lengths),
    ]
    return head + [
        f"{name:<{first}}" + "".join(f"{cells.get(length, '-'):>{width}}" for length in lengths)
        for name, cells in rows.items()
    ]


def skipped_lines(results: Results) -> list[str]:
    """Skipped models, lengths or tasks, grouped by reason."""
    reasons: dict[str, list[str]] = {}
    for result in results:
        for skip in result["results"]["skipped"]:
            what = f" at {skip['length']}" if "length" in skip else f": {skip['task']}"
            reasons.setdefault(skip["reason"], []).append(f"{result['model']['name']}{what}")
    return [f"skipped: {', '.join(which)}: {reason}" for reason, which in reasons.items()]
