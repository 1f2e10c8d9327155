"""``softplus-attention evaluate``: how long a model holds, and why."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from softplus_attention.commands.options import check_device
from softplus_attention.validation import fail

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from softplus_attention.evaluation.models import Opened, Request
    from softplus_attention.evaluation.texts import Documents

MODEL_HELP = (
    "[NAME=]FOLDER[+OPTION=VALUE...]: a folder with a saved model or a name on the hub, what to call it, and what to "
    "change at inference for it alone, such as runs/lssar/model+power=31 or yarn=runs/softmax/model+rope=yarn:4"
)
PRESET_HELP = "mixed (local and global layers) or rotary (positions in every layer) (default: %(default)s)"
SIZES = ("layers", "width", "heads", "steps", "batch_size")
RESUME = "The same command again reuses what is finished."


def add_command(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "evaluate",
        help="loss by length, pass keys, synthetic tasks and the inside of the attention",
        description="Measures models side by side. Every measure prints a table and writes JSON, CSV and figures "
        f"(docs/evaluation.md). {RESUME}",
    )
    from softplus_attention.commands.downstream import add_downstream

    actions = parser.add_subparsers(dest="action", required=True, metavar="MEASURE")
    add_lengths(actions)
    add_passkey(actions)
    add_passkey_data(actions)
    add_synthetic(actions)
    add_inside(actions)
    add_maps(actions)
    add_downstream(actions)
    add_figures(actions)


def measure_parser(
    actions: _SubParsersAction[argparse.ArgumentParser], name: str, words: str, description: str, run: Any
) -> argparse.ArgumentParser:
    parser = actions.add_parser(name, help=words, description=f"{description} {RESUME}")
    parser.add_argument("models", nargs="+", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument(
        "--output", type=Path, default=Path("evaluation"), metavar="FOLDER", help="for results (default: %(default)s)"
    )
    parser.add_argument(
        "--train-length", type=int, metavar="N", help="tokens the models were trained at (default: from their config)"
    )
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16", "mixed"),
        default="auto",
        help="mixed: float32 weights in bfloat16 arithmetic, as in training on a GPU (default: as saved)",
    )
    parser.add_argument("--device", help="such as cpu or cuda:0 (default: cuda where there is one)")
    change = parser.add_argument_group("changes at inference, for every model")
    change.add_argument("--power", metavar="P", help="another power: a number, grow:BASE,SLOPE, or log:FACTOR")
    change.add_argument("--reweight", action="store_true", help="the second stage on weights trained without it")
    change.add_argument("--window", metavar="N", help="each token sees itself and the N - 1 before it")
    change.add_argument("--rope", metavar="TYPE:FACTOR", help="linear:4, ntk:4 (dynamic NTK) or yarn:4")
    parser.set_defaults(run=interruptible(run))
    return parser


def add_texts(parser: argparse.ArgumentParser, required: bool = True) -> None:
    texts = parser.add_mutually_exclusive_group(required=required)
    texts.add_argument("--data", metavar="FOLDER", help="written by `softplus-attention data prepare`")
    texts.add_argument(
        "--text", nargs="+", metavar="FILE", help=".txt or .jsonl files, or builtin: the old works in the package"
    )
    parser.add_argument("--split", default="validation", help="of --data (default: %(default)s)")
    parser.add_argument("--tokenizer", help="for --text (default: the one saved with each model)")


def add_lengths(actions: _SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = measure_parser(
        actions,
        "lengths",
        "loss by length, and whether the long context is used",
        "The mean loss over all positions of the same documents, cut to 1 to 64 times the training length, and by "
        "position. The control compares the loss on the same target tokens with the full context and with the last "
        "1x tokens alone: a flat curve can come from a model that ignores what is far away.",
        run_lengths,
    )
    add_texts(parser)
    parser.add_argument(
        "--lengths",
        default="1,2,4,8,16,32,64",
        help="times the training length (1,2,4 or 2x,8x), or tokens (512,4096); numbers without an x are tokens unless "
        "the first is 1 (default: %(default)s)",
    )
    parser.add_argument("--sequences", type=int, default=32, metavar="N", help="texts of the longest length, at most")
    parser.add_argument("--control", action=argparse.BooleanOptionalAction, default=True, help="(default: on)")
    parser.add_argument(
        "--control-share",
        type=float,
        default=0.25,
        metavar="X",
        help="of each sequence, at its end: what the control predicts twice, half a training length at least "
        "(default: %(default)s)",
    )


def add_prompt(parser: argparse.ArgumentParser, form: str) -> None:
    parser.add_argument(
        "--form",
        default=form,
        metavar="NAME",
        help="sentences (Mohtashami and Jaggi) or compact, which a small model can learn (default: %(default)s)",
    )
    parser.add_argument("--prompt", type=Path, metavar="FILE", help="JSON whose texts replace those of the form")
    parser.add_argument("--digits", type=int, metavar="N", help="of a pass key (default: 5)")
    parser.add_argument("--seed", type=int, default=0, help="of keys and places (default: %(default)s)")


def add_passkey(actions: _SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = measure_parser(
        actions,
        "passkey",
        "find a number hidden in a long text: length by depth",
        "Hides a random number in a text of each length, at each depth, and asks for it: the share of exact answers.",
        run_passkey,
    )
    add_texts(parser, required=False)
    parser.add_argument("--lengths", default="1,2,4,8", help="as in `evaluate lengths` (default: %(default)s)")
    parser.add_argument("--depths", default="0,0.25,0.5,0.75,1", help="0 is the beginning (default: %(default)s)")
    parser.add_argument("--trials", type=int, default=10, metavar="N", help="in each cell (default: %(default)s)")
    add_prompt(parser, "sentences")


def add_passkey_data(actions: _SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = actions.add_parser(
        "passkey-data",
        help="documents that teach the compact pass key, to be mixed into training text",
        description="Writes FOLDER/passkey.jsonl: short documents, each with a pass key in ordinary text and the "
        "question. `softplus-attention data prepare` takes it beside the training text.",
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--text", nargs="+", required=True, metavar="FILE", help="to hide the keys in; not validation")
    parser.add_argument("--documents", type=int, default=5000, metavar="N", help="(default: %(default)s)")
    parser.add_argument(
        "--most-characters",
        type=int,
        default=96,
        metavar="N",
        help="of a document: about three quarters of a training sequence (default: %(default)s, for 128 bytes)",
    )
    parser.add_argument(
        "--least-characters",
        type=int,
        default=0,
        metavar="N",
        help="of a document; short ones teach short distances (default: what the prompt itself takes)",
    )
    parser.add_argument(
        "--questions",
        type=int,
        default=2,
        metavar="N",
        help="after each key (default: %(default)s)",
    )
    add_prompt(parser, "compact")
    parser.set_defaults(run=run_passkey_data)


def add_synthetic(actions: _SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = actions.add_parser(
        "synthetic",
        help="train short and test long on associative recall, copy and flip-flop",
        description="Trains a small GPT with each attention on a task at a short length and tests it at multiples of "
        f"it: the share of right answer tokens. {RESUME} A training that was stopped goes on too.",
    )
    parser.add_argument(
        "attentions", nargs="+", metavar="ATTENTION", help="names of the catalogue: lssar, softmax, ..."
    )
    parser.add_argument(
        "--task", nargs="+", default=["recall"], metavar="TASK", help="recall, copy, flip-flop (default: recall)"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("evaluation"), metavar="FOLDER", help="for results (default: %(default)s)"
    )
    parser.add_argument("--train-length", type=int, default=64, metavar="N", help="tokens (default: %(default)s)")
    parser.add_argument("--lengths", help="as in `evaluate lengths` (default: to 64x)")
    parser.add_argument(
        "--sequences", type=int, default=64, metavar="N", help="tested at each length, at most (default: %(default)s)"
    )
    parser.add_argument(
        "--test-tokens", type=int, default=1 << 18, metavar="N", help="tested at each length, about (default: 262144)"
    )
    parser.add_argument("--preset", default="mixed", help=PRESET_HELP)
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (default: %(default)s)")
    replaced = parser.add_argument_group("in place of the preset's")
    for name in SIZES:
        replaced.add_argument(
            f"--{name.replace('_', '-')}", type=int, metavar="N", help=f"{name.replace('_', ' ')}, as in train"
        )
    replaced.add_argument("--learning-rate", type=float, metavar="X", help="the highest, as in train")
    replaced.add_argument("--optimizer", help="adamw or muon")
    replaced.add_argument("--window", type=int, metavar="N", help="with --global-every: what the local layers see")
    replaced.add_argument(
        "--global-every", type=int, metavar="N", help="every n-th layer sees everything, without positions (see train)"
    )
    replaced.add_argument("--power", help="for attentions with a second stage, as in train (learned-log, log:0.6, 15)")
    task = parser.add_argument_group("the task")
    task.add_argument("--symbols", type=int, metavar="N", help="recall: of keys, of values; copy: of the string")
    task.add_argument("--key-tokens", type=int, metavar="N", help="recall: tokens of a key (default: 1)")
    task.add_argument("--value-tokens", type=int, metavar="N", help="recall: tokens of a value (default: 1)")
    task.add_argument(
        "--pairs", type=int, metavar="N", help="recall: the rest is noise (default: 8; 0: as many as fit)"
    )
    task.add_argument("--queries", type=int, metavar="N", help="recall (default: 16)")
    task.add_argument("--writes", type=int, metavar="N", help="flip-flop: in a sequence, about (default: 4)")
    parser.set_defaults(run=interruptible(run_synthetic))


def add_inside(actions: _SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = measure_parser(
        actions,
        "inside",
        "entropy, sink, effective keys, zeros and empty tiles by layer, head and length",
        "What the weights look like, for each layer and head, by length: the entropy of stage 1 (also with log N held "
        "at the training length) and of the final weights, the mass on the first token, the effective number of keys, "
        "exact zeros, and tiles of 64 by 64 without any weight. Rows are looked at a block at a time.",
        run_inside,
    )
    add_texts(parser)
    parser.add_argument("--lengths", default="1,2,4,8,16", help="as in `evaluate lengths` (default: %(default)s)")
    parser.add_argument("--sequences", type=int, default=4, metavar="N", help="texts (default: %(default)s)")
    parser.add_argument(
        "--blocks", type=int, default=8, metavar="N", help="of 64 rows per sequence, at most (default: %(default)s)"
    )


def add_maps(actions: _SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = measure_parser(
        actions,
        "maps",
        "the attention maps of a text, models side by side",
        "Writes the final weights of every layer and head for one text, for the explorer of the report.",
        run_maps,
    )
    text = parser.add_mutually_exclusive_group(required=True)
    text.add_argument("--text", help="the text itself")
    text.add_argument("--file", type=Path, help="a UTF-8 file that holds it")
    parser.add_argument("--tokenizer", help="default: the one saved with each model")
    parser.add_argument(
        "--map-size", type=int, default=64, metavar="N", help="cells each way, at most (default: %(default)s)"
    )


def add_figures(actions: _SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = actions.add_parser(
        "figures",
        help="draw the results of a folder",
        description="Draws the figures and writes the tables of all results in a folder, such as one that came from a "
        "machine without matplotlib.",
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="with the JSON files of other measures")
    parser.set_defaults(run=run_figures)


# ---- what the measures share


def interruptible(run: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    @wraps(run)
    def wrapped(options: argparse.Namespace) -> int:
        try:
            with warnings.catch_warnings():
                # Of torch and transformers, about how they are used here: nothing that the user could change.
                warnings.simplefilter("ignore")
                return run(options)
        except KeyboardInterrupt:
            print("\nstopped; the same command continues where it was", file=sys.stderr)
            return 130

    return wrapped


def common_options(options: argparse.Namespace) -> dict[str, str]:
    given = {word: getattr(options, word) for word in ("power", "window", "rope")}
    found = {word: value for word, value in given.items() if value is not None}
    return found | ({"reweight": ""} if options.reweight else {})


def asked(options: argparse.Namespace) -> tuple[list[Request], int]:
    """The models and the length that all of them were trained at."""
    from softplus_attention.evaluation.models import check_request, requests_of, training_length_of
    from softplus_attention.huggingface.loading import quiet

    quiet()
    check_folder(options.output)
    check_device(options.device)
    requests = requests_of(options.models, common_options(options))
    found = {request.name: training_length_of(request) for request in requests}
    length = options.train_length
    if length is not None and length < 2:
        fail("--train-length", "at least 2", length)
    if length is None:
        lengths = set(found.values())
        if len(lengths) > 1 or None in lengths:
            words = ", ".join(f"{name}: {length or 'not in its config'}" for name, length in found.items())
            fail("--train-length", "given where the models' configs do not agree on it", words)
        length = next(length for length in lengths if length is not None)
    for request in requests:
        check_request(request, length)
    return requests, length


def check_folder(path: Path) -> None:
    """Before anything is measured for it."""
    if path.exists() and not path.is_dir():
        fail("--output", "a folder, or a name for one", f"{str(path)!r}, which is a file")
    there = next(folder for folder in (path, *path.absolute().parents) if folder.is_dir())
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        fail("--output", "a folder that can be written", f"{str(path)!r}: {error.strerror}")


def open_model(options: argparse.Namespace, request: Request, training_length: int) -> Opened:
    from softplus_attention.evaluation.models import opened

    return opened(request, training_length, dtype=options.dtype, device=options.device)


class Measured:
    """The results of the models that could be measured; ``status`` is 1 where some could not."""

    def __init__(self) -> None:
        self.results: list[dict[str, Any]] = []
        self.status = 0


def measure_each(
    options: argparse.Namespace,
    requests: Sequence[Request],
    training_length: int,
    measure: Callable[[Opened], dict[str, Any]],
) -> Measured:
    """One model in memory at a time. What went wrong with one of several is said, and the others are measured."""
    measured = Measured()
    for request in requests:
        try:
            measured.results.append(measure(open_model(options, request, training_length)))
        except Exception as error:
            if len(requests) == 1:
                raise
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            print(f"{request.name} was not measured: {kind}{error}", file=sys.stderr)
            measured.status = 1
    if not measured.results:
        fail("MODEL", "at least one that can be measured", f"none of {len(requests)}")
    return measured


def check_positive(options: argparse.Namespace, *names: str) -> None:
    for name in names:
        if getattr(options, name) < 1:
            fail(f"--{name.replace('_', '-')}", "at least 1", getattr(options, name))


def documents_for(options: argparse.Namespace, request: Request) -> Documents:
    from softplus_attention.evaluation.texts import check_same_tokenizer, folder_documents, raw_texts, text_documents
    from softplus_attention.huggingface.loading import load_tokenizer

    if options.data is not None:
        check_same_tokenizer(options.data, options.tokenizer or request.source)
        return folder_documents(options.data, options.split)
    tokenizer = load_tokenizer(options.tokenizer or request.source)
    return text_documents(raw_texts(options.text), options.text, tokenizer)


def note_tokenizers(results: Sequence[dict[str, Any]]) -> None:
    if len({result["settings"]["data"]["fingerprint"] for result in results}) > 1:
        print("the models have different tokenizers: losses per token are not comparable between them")


def finish(folder: Path, measure: str, results: list[dict[str, Any]]) -> None:
    """Tables and figure of this run's models; says what was written."""
    from softplus_attention.evaluation.results import path_of
    from softplus_attention.report.result_files import draw, write_tables

    written = [path_of(folder, result) for result in results]
    written += [*write_tables(folder, measure, results), *draw(folder, measure, results)]
    print()
    for path in written:
        print(f"written: {path}")
    if find_spec("matplotlib") is None:
        print(
            "figures were left out, since matplotlib is not installed: draw them later, here or elsewhere, with "
            f"softplus-attention evaluate figures {folder}",
            file=sys.stderr,
        )


# ---- the measures


def run_lengths(options: argparse.Namespace) -> int:
    from softplus_attention.evaluation.length_measure import lengths_in, measure_lengths, table_of

    check_positive(options, "sequences")
    if not 0 <= options.control_share <= 1:
        fail("--control-share", "a share of the sequence, from 0 to 1", options.control_share)
    requests, training_length = asked(options)
    lengths = lengths_in(options.lengths, training_length)

    def measure(opened: Opened) -> dict[str, Any]:
        words = {word: getattr(options, word) for word in ("sequences", "control", "control_share")}
        return measure_lengths(opened, documents_for(options, opened.request), lengths, options.output, **words)

    measured = measure_each(options, requests, training_length, measure)
    print(table_of(measured.results))
    note_tokenizers(measured.results)
    finish(options.output, "lengths", measured.results)
    return measured.status


def run_passkey(options: argparse.Namespace) -> int:
    from softplus_attention.evaluation.length_measure import lengths_in
    from softplus_attention.evaluation.passkey import prompt_of
    from softplus_attention.evaluation.passkey_measure import depths_in, measure_passkey, table_of
    from softplus_attention.huggingface.loading import load_tokenizer

    check_positive(options, "trials")
    prompt, depths = prompt_of(options.form, options.prompt, options.digits), depths_in(options.depths)
    requests, training_length = asked(options)
    lengths = lengths_in(options.lengths, training_length)

    def measure(opened: Opened) -> dict[str, Any]:
        given = options.data is not None or options.text is not None
        documents = documents_for(options, opened.request) if given else None
        tokenizer = load_tokenizer(options.tokenizer or opened.request.source)
        words = {"documents": documents, "trials": options.trials, "seed": options.seed}
        return measure_passkey(opened, tokenizer, prompt, lengths, depths, options.output, **words)

    measured = measure_each(options, requests, training_length, measure)
    print(table_of(measured.results))
    finish(options.output, "passkey", measured.results)
    return measured.status


def run_passkey_data(options: argparse.Namespace) -> int:
    from softplus_attention.evaluation.passkey import passkey_documents, prompt_of
    from softplus_attention.evaluation.passkey_measure import write_documents
    from softplus_attention.evaluation.texts import raw_texts

    check_positive(options, "documents")
    prompt = prompt_of(options.form, options.prompt, options.digits)
    texts = raw_texts(options.text, to_train=True)
    path = options.output / "passkey.jsonl"
    words = {word: getattr(options, word) for word in ("seed", "questions", "least_characters")}
    documents = passkey_documents(texts, prompt, options.documents, options.most_characters, **words)
    written = write_documents(path, documents)
    share = written / (written + sum(map(len, texts)))
    print(f"{path}: {options.documents} documents, {written} characters, {100 * share:.1f}% of them and the text")
    return 0


def run_synthetic(options: argparse.Namespace) -> int:
    from softplus_attention.evaluation import synthetic_measure as measure
    from softplus_attention.evaluation.length_measure import lengths_in
    from softplus_attention.evaluation.synthetic import TASKS, task_of
    from softplus_attention.huggingface.loading import quiet

    quiet()
    check_folder(options.output)
    if options.preset not in measure.PRESETS:
        fail("--preset", f"one of {', '.join(measure.PRESETS)}", repr(options.preset))
    check_positive(options, "sequences", "test_tokens")
    settings = dict(measure.PRESETS[options.preset])
    for word in (*SIZES, "learning_rate", "power", "optimizer", "window", "global_every"):
        if getattr(options, word) is not None:
            settings[word] = getattr(options, word)
    if unknown := set(options.task) - set(TASKS):
        fail("--task", f"of {', '.join(TASKS)}", ", ".join(sorted(unknown)))
    tasks = [task_of(name, **task_options(options, name, TASKS)) for name in options.task]
    lengths = lengths_in(options.lengths or measure.MULTIPLES, options.train_length)
    words = {"seed": options.seed, "device": options.device}
    configs = [
        (task, measure.training_config(task, name, options.train_length, options.output, settings, **words))
        for task in tasks
        for name in options.attentions
    ]
    tests = {"sequences": options.sequences, "test_tokens": options.test_tokens}
    results = [measure.measure_synthetic(task, config, lengths, options.output, **tests) for task, config in configs]
    print(measure.table_of(results))
    finish(options.output, "synthetic", results)
    return 0


def task_options(options: argparse.Namespace, name: str, tasks: Any) -> dict[str, Any]:
    """Those of the options that the task has; one that none of the chosen tasks has is an error."""
    words = ("symbols", "key_tokens", "value_tokens", "pairs", "queries", "writes")
    given = {word: getattr(options, word) for word in words if getattr(options, word) is not None}
    has = {task: {field.name for field in dataclasses.fields(tasks[task])} for task in options.task}
    for word in given:
        if not any(word in known for known in has.values()):
            fail(f"--{word.replace('_', '-')}", f"left out for {', '.join(options.task)}", given[word])
    return {word: value for word, value in given.items() if word in has[name]}


def run_inside(options: argparse.Namespace) -> int:
    from softplus_attention.evaluation.inside_measure import measure_inside, table_of
    from softplus_attention.evaluation.length_measure import lengths_in

    check_positive(options, "sequences", "blocks")
    requests, training_length = asked(options)
    lengths = lengths_in(options.lengths, training_length)

    def measure(opened: Opened) -> dict[str, Any]:
        words = {"sequences": options.sequences, "blocks": options.blocks}
        return measure_inside(opened, documents_for(options, opened.request), lengths, options.output, **words)

    measured = measure_each(options, requests, training_length, measure)
    print(table_of(measured.results))
    finish(options.output, "inside", measured.results)
    return measured.status


def run_maps(options: argparse.Namespace) -> int:
    from softplus_attention.evaluation.inside_measure import measure_maps
    from softplus_attention.huggingface.loading import load_tokenizer

    if options.map_size < 2:
        fail("--map-size", "at least 2", options.map_size)
    text = options.text if options.file is None else read(options.file)
    requests, training_length = asked(options)

    def measure(opened: Opened) -> dict[str, Any]:
        tokenizer = load_tokenizer(options.tokenizer or opened.request.source)
        return measure_maps(opened, tokenizer, text, options.output, size=options.map_size)

    measured = measure_each(options, requests, training_length, measure)
    for result in measured.results:
        maps = result["results"]
        layers = len({found["layer"] for found in maps["maps"]})
        cells = f"{maps['size']} cells of {maps['tokens_per_cell']} tokens"
        print(f"{result['model']['name']}: {len(maps['maps'])} maps of {layers} layers, {cells}")
    finish(options.output, "maps", measured.results)
    return measured.status


def read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        fail("--file", "a readable UTF-8 file", f"{str(path)!r}: {error}")


def run_figures(options: argparse.Namespace) -> int:
    from softplus_attention.report.result_files import draw_folder

    for path in draw_folder(options.folder):
        print(f"written: {path}")
    return 0
