"""``softplus-attention extend``: ranks the heads of a pretrained model, writes the extended one, measures both.

Progress is saved in ``extend.json`` of the output folder; the same request resumes from it.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from softplus_attention.data.builtin import builtin_text
from softplus_attention.extend.card import PICTURE, describe, heads_pictures, results_table, write_card
from softplus_attention.extend.fitting import FitSettings
from softplus_attention.extend.measuring import TARGETS, ask, context_losses, time_decode
from softplus_attention.extend.methods import (
    Method,
    apply_method,
    extension_of,
    trained_length,
    with_far_positions,
)
from softplus_attention.extend.needles import FORMS, Haystack, make_haystack
from softplus_attention.extend.ranking import MEASURES, Ranking, RankingSettings, rank_heads
from softplus_attention.extend.tuning import KINDS, Tuner, TuneSettings, describe_tuning
from softplus_attention.huggingface.extension.modeling import HOSTS
from softplus_attention.huggingface.loading import (
    check_layers,
    check_model_path,
    load,
    load_tokenizer,
    load_weights,
    tensors_in,
)
from softplus_attention.huggingface.saving import save_trained
from softplus_attention.training.errors import RunStopped
from softplus_attention.utils import provenance, untrusted
from softplus_attention.utils.files import LockedError, filling, lock, remove_temporary, write_json
from softplus_attention.utils.progress import Progress, format_duration
from softplus_attention.validation import fail

STATE, LOCK = "extend.json", ".lock"
TUNING = "tuning.pt"
FORMAT = "softplus-attention extension"
MAX_STATE = 16 * untrusted.MIB
CHARACTERS_PER_TOKEN = 8  # upper bound for ordinary text, in any common vocabulary
DECODE_STEPS = 16


@dataclass(frozen=True)
class Request:
    """Everything that determines the result."""

    model: str
    to: int
    method: Method
    name: str
    budget: float | None  # fraction of the original's cache, if it determines the number of far heads
    text: tuple[str, ...]
    measure: tuple[int, ...]
    documents: int
    ranking: RankingSettings
    seed: int
    dtype: str
    minutes: float = 0.0
    tune: str = "far"


class TextEncoder:
    """Encodes text without special tokens; ``start`` are the tokens that the tokenizer puts before a text."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        ids = tokenizer("a")["input_ids"]
        plain = self.encode("a")
        self.start = list(ids[: len(ids) - len(plain)]) if ids[len(ids) - len(plain) :] == plain else []

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


class Build:
    def __init__(self, request: Request, output: Path, device: torch.device) -> None:
        self.request, self.output, self.device = request, output, device
        self.state = self.load_state()
        self.model, tokenizer = load_source(request.model, request.dtype, device)
        self.tokenizer, self.encoder = tokenizer, TextEncoder(tokenizer)
        self.trained = trained_length(self.model.config)
        self.targets = min([TARGETS, *(length // 2 for length in request.measure)])
        check_length(self.trained, request)
        check_settings(self.model.config, request.method)

    def load_state(self) -> dict[str, Any]:
        wanted = asdict(self.request)
        fresh = {"format": FORMAT, "complete": False, "request": wanted, "scores": [], "measured": {}}
        path = self.output / STATE
        if not path.is_file():
            names = [one.name for one in self.output.iterdir()] if self.output.is_dir() else []
            if self.output.is_file() or any(name != LOCK and not name.startswith(STATE) for name in names):
                expected = "a folder that does not exist yet, or one that this command has started"
                fail("--output", expected, repr(str(self.output)))
            return fresh
        state = untrusted.read_json(path, MAX_STATE)
        if not isinstance(state, dict) or state.get("format") != FORMAT:
            fail("--output", f"a folder whose {STATE} this command wrote", repr(str(path)))
        begun, wanted = state.get("request"), json.loads(json.dumps(wanted))
        if begun != wanted:
            if not state.get("scores") and not (self.output / "config.json").exists():
                return fresh  # the earlier command stopped before it saved any result
            given = begun if isinstance(begun, dict) else {}
            other = ", ".join(key for key in wanted if given.get(key) != wanted[key])
            expected = f"another folder: this one was started with other options ({other})"
            fail("--output", expected, repr(str(self.output)))
        models = {"original", self.request.name}
        fits = is_scores(state.get("scores")) and is_measured(state.get("measured"), models)
        fits = fits and ("tuned" not in state or is_tuned(state["tuned"]))
        if not fits or not isinstance(state.get("complete"), bool):
            fail("--output", f"a folder whose {STATE} this command wrote", f"{str(path)!r} with invalid fields")
        return state

    def save(self) -> None:
        write_json(self.output / STATE, self.state)

    def run(self) -> None:
        self.output.mkdir(parents=True, exist_ok=True)
        try:
            with lock(self.output / LOCK):
                self.state = self.load_state()
                if self.state["complete"]:
                    print(f"already complete: {self.output}")
                    return
                remove_temporary(self.output)
                self.build()
                (self.output / LOCK).unlink()  # the folder is a complete model now
        except LockedError:
            reason = f"another process is writing to {self.output}: wait for it, or choose another --output"
            raise RunStopped(reason) from None

    def build(self) -> None:
        begun = time.monotonic()
        check_disk_space(self.output, sum(x.nbytes for x in self.model.parameters()))
        self.state |= {
            "commit": provenance.commit(),
            "versions": provenance.versions(),
            "machine": provenance.machine(self.device),
            "targets": self.targets,
            "to": self.request.to,
        }
        self.save()
        method, ranking = self.request.method, None
        tuning = self.tuning() if self.request.minutes else None
        held_out = self.held_out() if self.request.measure else []
        if method.kind == "heads" and method.heads != 0:
            method = self.with_heads(method)
            ranking = self.rank()
        if method.far == "auto":
            method = self.with_far(method, ranking)
        extended = self.apply(method, ranking)
        extension = None
        if method.kind == "heads":
            extension = extension_of(method, self.model.config, ranking)
            print(describe(extension))
        if "tuned" in self.state:  # resumed after tuning
            extended.load_state_dict(load_weights("model", str(self.output), "auto").state_dict(), assign=True)
            extended.to(self.device).tie_weights()
        else:
            self.write(extended, extension, ranking)
            print(f"written: {self.output} in {format_duration(time.monotonic() - begun)}", flush=True)
            if tuning is not None:
                tuned = self.tune(extended, *tuning)
                self.write(extended, extension, ranking, tuned)
                (self.output / TUNING).unlink(missing_ok=True)
        if self.request.measure:
            self.measure({"original": self.model, self.request.name: extended}, held_out)
            print("\n".join(results_table(self.state["measured"])))
        self.state["complete"] = True
        write_card(self.output, self.request.model, extension, self.request.name, self.state)
        self.save()

    def texts(self) -> tuple[list[str], list[str]]:
        """Documents for ranking, fitting and tuning, and held-out ones to measure on."""
        if not self.request.text:
            return builtin_text()
        texts = [untrusted.read_option("--text", Path(name)) for name in self.request.text]
        if len(texts) == 1:
            middle = len(texts[0]) // 2
            return [texts[0][:middle]], [texts[0][middle:]]
        return texts[::2], texts[1::2]

    def rank(self) -> Ranking:
        settings, config = self.request.ranking, self.model.config
        shape = (config.num_hidden_layers, config.num_key_value_heads)
        if any(torch.tensor(scores).shape != shape for one in self.state["scores"] for scores in one.values()):
            expected = f"a folder whose {STATE} has scores for {shape[0]} layers of {shape[1]} key heads"
            fail("--output", expected, str(self.output))
        bar = Progress("heads", settings.prompts, initial=len(self.state["scores"]), unit="prompt")
        characters = settings.length * CHARACTERS_PER_TOKEN
        texts = self.texts()[0]
        texts = [text for text in texts if len(text) >= characters] or [max(texts, key=len)]
        wanted = texts[:: max(1, len(texts) // settings.prompts)][: settings.prompts]
        documents = [self.encoder.encode(text[len(text) // 4 :][:characters]) for text in wanted]

        def keep(scores: list[Any]) -> None:
            self.state["scores"] = scores
            self.save()
            bar.update(done=len(scores))

        with bar:
            found = rank_heads(
                self.model,
                self.encoder.encode,
                documents,
                settings,
                start=self.encoder.start,
                done=self.state["scores"],
                progress=keep,
            )
        return found

    def apply(self, method: Method, ranking: Ranking | None) -> Any:
        if method.far != "lssar":
            return apply_method(self.model, method, ranking)
        texts = self.texts()[0]  # an equal part of each document
        characters = CHARACTERS_PER_TOKEN * (method.fit // len(texts) + FitSettings().length)
        documents = [self.encoder.encode(text[:characters]) for text in texts]
        with Progress("fitting", unit="head") as bar:

            def show(done: int, total: int) -> None:
                bar.total = total
                bar.update(done=done)

            return apply_method(self.model, method, ranking, documents, show)

    def tuning(self) -> tuple[TuneSettings, list[list[int]], list[list[int]]]:
        """The settings, documents to tune on, and held-out ones."""
        request, method = self.request, self.request.method
        short = min(self.trained, 2 * max(method.window, method.near))
        long = min(request.to, 2 * self.trained)
        settings = TuneSettings(request.minutes, short, long, self.trained, request.tune, seed=request.seed)
        documents = []
        for texts in self.texts():
            encoded = [self.encoder.encode(text[: long * CHARACTERS_PER_TOKEN]) for text in texts]
            documents.append([ids for ids in encoded if len(ids) >= long])
            if not documents[-1]:
                fail("--text", f"documents of {long} tokens in both halves, for --minutes", max(map(len, encoded)))
        return settings, documents[0], documents[1]

    def tune(self, extended: Any, settings: TuneSettings, documents: Any, held: Any) -> dict[str, Any]:
        print(
            f"tuning for {settings.minutes:g} minutes on sequences of {settings.short:,} and {settings.long:,} tokens. "
            f"Ctrl-C stops and keeps the untuned folder; run the same command to resume",
            flush=True,
        )
        found = Tuner(extended, self.model, settings).run(documents, held, self.output / TUNING)
        print(describe_tuning(found), flush=True)
        return found

    def with_far(self, method: Method, ranking: Ranking | None) -> Method:
        """Chooses the far positions with the lowest loss at twice the trained length, on the ranking text."""
        if (chosen := self.state.get("far")) is None:
            length = min(2 * self.trained, self.request.to)
            texts = sorted(self.texts()[0], key=len, reverse=True)[: self.request.documents]
            rows = [self.encoder.encode(text[: length * CHARACTERS_PER_TOKEN]) for text in texts]
            start = self.encoder.start
            rows = [[*start, *row[len(start) - length :]] for row in rows if len(row) >= length]
            if not rows:
                fail("--text", f"documents of {length} tokens, for --far auto", "shorter ones")
            found, targets = {}, min(TARGETS, length // 2)
            for far in ("group", "clip", *(["lssar"] if method.fit else [])):
                model = self.apply(with_far_positions(method, far), ranking)
                found[far] = sum(context_losses(model, [row], length, targets)[0] for row in rows) / len(rows)
                print(f"far {far}: loss {found[far]:.4f} at {length} tokens", flush=True)
            chosen = self.state["far"] = min(found, key=found.__getitem__)
            self.state["far_losses"] = found
            self.save()
        return with_far_positions(method, chosen)

    def with_heads(self, method: Method) -> Method:
        """Sets the number of far heads that the budget allows."""
        if self.request.budget is None:
            return method
        config = self.model.config
        total = config.num_hidden_layers * config.num_key_value_heads
        near = method.near if method.far in ("clip", "group", "auto") else 0
        window, whole = min(self.request.to, method.window + method.sink), self.request.to
        count = int((self.request.budget * total * whole - total * window) // (near + whole - window))
        if count < 1:
            least = (total * window + near + whole - window) / (total * whole)
            fail(
                "--budget",
                f"at least {math.ceil(100 * least)}% of the cache at {whole} tokens, for one far head",
                f"{self.request.budget:.0%}",
            )
        return replace(method, heads=min(count, total))

    def write(
        self, extended: Any, extension: Any, ranking: Ranking | None, tuned: dict[str, Any] | None = None
    ) -> None:
        with filling(self.output) as folder:
            save_trained(extended, folder, self.tokenizer)
        if tuned is not None:
            self.state["tuned"] = tuned
        if extension is not None and ranking is not None:
            self.state["ranking"] = ranking.scores
            self.state["order"] = [list(head) for head in ranking.order(self.request.method.ranking)]
            if find_spec("matplotlib") is not None:
                from softplus_attention.charts.draw import draw

                draw(heads_pictures(ranking, extension), self.output / PICTURE, columns=1)
        write_card(self.output, self.request.model, extension, self.request.name, self.state)
        self.save()

    def held_out(self) -> list[list[int]]:
        """Held-out documents, cut to the longest length to measure."""
        longest = max(self.request.measure)
        documents = [self.encoder.encode(text[: longest * CHARACTERS_PER_TOKEN]) for text in self.texts()[1]]
        rows = [ids[:longest] for ids in documents if len(ids) >= longest][: self.request.documents]
        if not rows:
            found = max(map(len, documents))
            fail("--measure", f"at most the {found} tokens of the longest held-out document", longest)
        return rows

    def measure(self, models: dict[str, Any], rows: Sequence[list[int]]) -> None:
        lengths, measured = self.request.measure, self.state["measured"]
        with Progress("measuring", sum(lengths) * len(models), unit="token") as bar:
            done = 0
            for name, model in models.items():
                own = measured.setdefault(name, {})
                for length in lengths:
                    if str(length) not in own.get("tokens_per_second", {}):
                        self.measure_length(model, own, rows, length)
                        self.save()
                    done += length
                    bar.update(f"{name} at {length}", done)

    def measure_length(self, model: Any, own: dict[str, Any], rows: Sequence[list[int]], length: int) -> None:
        def note(key: str, value: Any) -> None:
            own.setdefault(key, {})[str(length)] = value

        start = self.encoder.start
        cut = length - len(start)
        note(
            "loss", [round(context_losses(model, [[*start, *ids[-cut:]]], length, self.targets)[0], 5) for ids in rows]
        )
        form = next(iter(FORMS))
        try:
            hay = make_haystack(self.encoder.encode, rows[0], length, form, [0.1, 0.5, 0.9], self.request.seed, start)
        except ValueError as error:
            print(f"no needles at {length} tokens: {error}")
            hay = Haystack([*start, *rows[0][:cut]], [])
        found, size = ask(model, hay)
        if found:
            note("needles", [{"form": form, "found": found}])
        note("cache_bytes", size)
        prefill, decode = time_decode(model, hay.ids, DECODE_STEPS)
        note("prefill_seconds", round(prefill, 3))
        note("tokens_per_second", round(decode, 3))


def is_scores(found: Any) -> bool:
    """Whether it is a list of ``{measure: [layer][key head]}``, as ``rank_heads`` makes."""
    return has_form(found, [{str: [[float]]}]) and all(set(MEASURES) <= set(one) for one in found)


def is_measured(found: Any, models: set[str]) -> bool:
    """Whether it is ``{model: {quantity: {length: value}}}``."""
    forms: dict[str, Any] = {"loss": [float], "needles": [{str: Any}]}
    if not has_form(found, {str: {str: {str: Any}}}) or not set(found) <= models:
        return False
    cells = [(key, *cell) for own in found.values() for key, cells in own.items() for cell in cells.items()]
    hits = [
        one.get("found") for key, _, value in cells if key == "needles" and has_form(value, [dict]) for one in value
    ]
    return has_form(hits, [[bool]]) and all(
        length.isdecimal() and value != [] and has_form(value, forms.get(key, float)) for key, length, value in cells
    )


def is_tuned(found: Any) -> bool:
    """Whether it is a result of ``Tuner.run``."""
    if not isinstance(found, dict) or not isinstance(found.get("kept"), bool):
        return False
    forms = {"steps": int, "seconds": float, "before": float, "after": float}
    return all(
        has_form(found.get(name), {str: form}) and set(KINDS) <= set(found[name]) for name, form in forms.items()
    )


def has_form(value: Any, form: Any) -> bool:
    """In ``form``, ``[float]`` stands for a list of numbers, ``{str: bool}`` for a dictionary of booleans."""
    if isinstance(form, list):
        return isinstance(value, list) and all(has_form(one, form[0]) for one in value)
    if isinstance(form, dict):
        return isinstance(value, dict) and all(has_form(one, form[str]) for one in value.values())
    return form is Any or type(value) in ((int, float) if form is float else (form,))


def load_config(source: str) -> tuple[Any, str, dict[str, Any]]:
    """Returns the config, the folder or Hub name, and keyword arguments for loading a GGUF file from it."""
    from transformers import AutoConfig

    kwargs: dict[str, Any] = {}
    place = source
    if source.endswith(".gguf"):
        if find_spec("gguf") is None:
            expected = "a folder or Hub name unless the package gguf is installed (pip install gguf)"
            fail("model", expected, repr(source))
        if not Path(source).is_file():
            fail("model", "an existing GGUF file", repr(source))
        kwargs, place = {"gguf_file": Path(source).name}, str(Path(source).parent)
    else:
        check_model_path("model", source, "config.json")
    config = load(AutoConfig, "model", place, False, **kwargs)
    check_host(source, config)
    if kwargs:  # a GGUF file contains the layers itself
        check_layers(Path(source), config.to_dict(), tensors_in(Path(source)))
    return config, place, kwargs


def load_source(source: str, dtype: str, device: torch.device) -> tuple[Any, Any]:
    from transformers import AutoTokenizer

    _, place, kwargs = load_config(source)
    dtype = "bfloat16" if kwargs and dtype == "auto" else dtype  # a GGUF file has fewer bits
    model: Any = load_weights("model", place, dtype, **kwargs).to(device).eval()
    if getattr(model.config, "quantization_config", None) is not None:
        if not kwargs:
            fail("model", "one without quantization", f"{source!r}, which is quantized")
        del model.config.quantization_config  # the loaded weights are dequantized
    return model, load(AutoTokenizer, "model", place, False, **kwargs) if kwargs else load_tokenizer(place)


def check_host(source: str, config: Any) -> None:
    kind = config.model_type
    if kind in HOSTS:
        return
    reason = f"which is of type {kind}"
    if getattr(config, "is_encoder_decoder", False):
        reason = f"an encoder-decoder model ({kind})"
    elif getattr(config, "alibi", False) or kind in ("bloom", "mpt"):
        reason = f"which has ALiBi instead of rotary positions ({kind})"
    elif kind.startswith("softplus_extended_"):
        reason = "which is already extended"
    elif any("ForMaskedLM" in name for name in getattr(config, "architectures", None) or []):
        reason = f"an encoder ({kind})"
    fail("model", f"a causal language model of one of the types {', '.join(HOSTS)}", f"{source!r}, {reason}")


def check_length(trained: int, request: Request) -> None:
    if request.to <= trained:
        fail("--to", f"above the trained length of {trained} tokens", request.to)
    method = request.method
    if method.kind == "heads":
        for name, value in (("--window", method.window), ("--near", method.near)):
            if value >= trained and not (
                name == "--near" and (method.far not in ("clip", "group", "auto") or not method.heads)
            ):
                fail(name, f"below the trained length of {trained} tokens", value)


def check_settings(config: Any, method: Method) -> None:
    """Runs before the heads are ranked, which takes minutes."""
    if method.kind != "heads":
        return
    total = config.num_hidden_layers * config.num_key_value_heads
    if method.heads > total:
        fail("--heads", f"at most {total}, the number of key heads in the model", method.heads)
    form = "group" if method.far == "auto" else method.far
    extension_of(replace(method, heads=0, far=form), config, None).check(config)


def check_disk_space(output: Path, needed: int) -> None:
    place = next(folder for folder in (output.absolute(), *output.absolute().parents) if folder.exists())
    free = shutil.disk_usage(place).free
    if free < needed:
        fail("--output", f"on a disk with {needed / 1e6:.0f} MB free", f"{free / 1e6:.0f} MB at {str(place)!r}")
