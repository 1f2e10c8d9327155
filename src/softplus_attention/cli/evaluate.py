"""``softplus-attention evaluate``: how long a model holds, and why."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from softplus_attention.cli.downstream import add_downstream
from softplus_attention.cli.measuring import (
    RESUME,
    add_texts,
    asked,
    check_folder,
    check_positive,
    documents_for,
    finish,
    interruptible,
    measure_each,
    measure_parser,
    note_tokenizers,
)
from softplus_attention.validation import fail

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from softplus_attention.evaluation.models import Opened

PRESET_HELP = "mixed (local and global layers) or rotary (positions in every layer) (default: %(default)s)"
SIZES = ("layers", "width", "heads", "steps", "batch_size")


def add_command(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "evaluate",
        help="loss by length, pass keys, synthetic tasks and the inside of the attention",
        description="Measures models side by side. Every measure prints a table and writes JSON, CSV and figures "
        f"(docs/evaluation.md). {RESUME}",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="MEASURE")
    add_lengths(actions)
    add_passkey(actions)
    add_passkey_data(actions)
    add_synthetic(actions)
    add_inside(actions)
    add_maps(actions)
    add_downstream(actions)
    add_figures(actions)


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
        "the first is 1; each divides the longest (default: %(default)s)",
    )
    parser.add_argument(
        "--sequences",
        type=int,
        default=32,
        metavar="N",
        help="texts of the longest length, at most (default: %(default)s)",
    )
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
        tokenizer = load_tokenizer(options.tokenizer or opened.request.source, options.trust_remote_code)
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
        tokenizer = load_tokenizer(options.tokenizer or opened.request.source, options.trust_remote_code)
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
