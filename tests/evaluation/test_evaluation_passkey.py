"""Passkeys: prompts, accuracy of 100% for a model that copies and 0% for one that does not, training documents."""

from __future__ import annotations

import json
import random
import re

import pytest
import torch
from evaluation_cases import Copier, Forgetful, open_saved, saved_model

from softplus_attention.data import TokenDataset, prepare
from softplus_attention.evaluation.measures.passkey import measure_passkey, parse_depths, table
from softplus_attention.evaluation.passkey import (
    FORMS,
    Filler,
    answers_of,
    is_right,
    make_trial,
    passkey_documents,
    prompt_of,
    smallest_length,
    trials_of,
    write_documents,
)
from softplus_attention.evaluation.texts import text_documents
from softplus_attention.huggingface.loading import load_tokenizer

TEXT = " ".join(f"word{n % 17} and {n % 5} more" for n in range(400))


def encode(text: str) -> list[int]:
    return list(text.encode())


def make_filler(form: str) -> Filler:
    return Filler(FORMS[form], encode, [encode(TEXT)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved_model(tmp_path_factory.mktemp("model"))


class TestPrompt:
    def test_prompt_of_mohtashami_and_jaggi(self):
        trial = make_trial(FORMS["sentences"], encode, make_filler("sentences"), 600, 0.5, random.Random(0))
        text = bytes(trial.ids).decode()
        assert len(trial.ids) == 600
        assert text.startswith(
            "There is an important info hidden inside a lot of irrelevant text. Find it and memorize"
        )
        assert f"The pass key is {trial.key}. Remember it. {trial.key} is the pass key." in text
        assert text.endswith(f"What is the pass key? The pass key is {trial.key}")
        assert text.count("The grass is green. The sky is blue. The sun is yellow. Here we go. There and back") >= 3
        assert trial.answer == 6

    @pytest.mark.parametrize("depth", [0, 0.25, 1])
    def test_depth(self, depth):
        trial = make_trial(FORMS["compact"], encode, make_filler("compact"), 500, depth, random.Random(1))
        place = bytes(trial.ids).decode().index(f"\n[key={trial.key}]\n")
        room = 500 - smallest_length(FORMS["compact"], encode)
        assert place == round(depth * room)
        assert bytes(trial.ids).decode().endswith(f"\n[key={trial.key}")

    def test_trials_are_reproducible_and_distinct(self):
        args = (FORMS["compact"], encode, make_filler("compact"), 100, 0.5)
        assert trials_of(*args, 5, 0) == trials_of(*args, 5, 0)
        keys = {trial.key for seed in (0, 1) for trial in trials_of(*args, 5, seed)}
        assert len(keys) == 10
        assert all(re.fullmatch("[1-9][0-9]{4}", key) for key in keys)

    def test_prompt_from_a_file(self, tmp_path):
        (tmp_path / "prompt.json").write_text(json.dumps({"needle": "<{key}>", "question": "<", "filler": "la "}))
        prompt = prompt_of("compact", tmp_path / "prompt.json", digits=3)
        trial = make_trial(prompt, encode, Filler(prompt, encode), 30, 0, random.Random(0))
        assert bytes(trial.ids).decode() == f"<{trial.key}>" + ("la " * 8)[:21] + f"<{trial.key}"

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ('{"needle": "no key"}', r"`prompt needle` must be a text that contains \{key\}"),
            ('{"question": "is it {key}?"}', "which would give the answer away"),
            ('{"colour": "red"}', "a JSON object of some of form, start"),
            ("nonsense", "`--prompt` must be a readable JSON file"),
            ('{"digits": "five"}', "`prompt digits` must be a int"),
        ],
    )
    def test_invalid_prompt_files(self, tmp_path, content, message):
        (tmp_path / "prompt.json").write_text(content)
        with pytest.raises(ValueError, match=message):
            prompt_of("sentences", tmp_path / "prompt.json")

    def test_invalid_arguments(self):
        with pytest.raises(ValueError, match="`--form` must be one of sentences, compact, got 'haiku'"):
            prompt_of("haiku")
        with pytest.raises(ValueError, match="`--depths` must be numbers from 0"):
            parse_depths("0,2")
        with pytest.raises(ValueError, match="hides the key in ordinary text"):
            Filler(FORMS["compact"], encode)


class TestRetrieval:
    @pytest.mark.parametrize("form", list(FORMS))
    @pytest.mark.parametrize(("model", "share"), [(Copier(), 1.0), (Forgetful(), 0.0)], ids=["copies", "forgets"])
    def test_known_models(self, form, model, share):
        prompt, filler = FORMS[form], make_filler(form)
        for length in (smallest_length(prompt, encode), 400):
            for depth in (0, 0.5, 1):
                trials = trials_of(prompt, encode, filler, length, depth, 4, seed=0)
                answers = answers_of(model, trials, at_once=3)
                assert sum(map(is_right, trials, answers)) == 4 * share

    def test_one_pass_equals_greedy_decoding(self, folder):
        opened = open_saved(folder)
        prompt, filler = FORMS["compact"], make_filler("compact")
        trial = trials_of(prompt, encode, filler, 60, 0.5, 1, seed=0)[0]
        question = torch.tensor([trial.ids[: -trial.answer]])
        written = opened.model.generate(question, max_new_tokens=trial.answer, do_sample=False, eos_token_id=None)
        written = written[0, -trial.answer :].tolist()
        changed = trial.__class__(trial.key, trial.ids[: -trial.answer] + written, trial.answer)
        assert answers_of(opened.model, [changed]) == [written]
        assert is_right(changed, written)
        assert not is_right(trial, answers_of(opened.model, [trial])[0])


class TestMeasure:
    def test_file(self, folder, tmp_path):
        opened, tokenizer = open_saved(folder), load_tokenizer(str(folder))
        kwargs = {"documents": text_documents([TEXT], ["text"], tokenizer), "trials": 3}
        result = measure_passkey(opened, tokenizer, FORMS["compact"], [16, 64], [0.0, 1.0], tmp_path, **kwargs)
        assert [(cell["length"], cell["depth"]) for cell in result["results"]["cells"]] == [(64, 0.0), (64, 1.0)]
        for cell in result["results"]["cells"]:
            assert (cell["trials"], cell["accuracy"]) == (3, cell["correct"] / 3)
        assert result["results"]["skipped"] == [{"length": 16, "reason": "the prompt alone has 24 tokens"}]
        assert len(result["results"]["cells"][0]["wrong"]) == 3
        assert "64" in table([result])

        # Another length is added; existing cells are not measured again.
        path = next(tmp_path.glob("passkey--*.json"))
        content = json.loads(path.read_text())
        content["results"]["cells"][0]["correct"] = 77
        path.write_text(json.dumps(content))
        result = measure_passkey(opened, tokenizer, FORMS["compact"], [64, 32], [0.0, 1.0], tmp_path, **kwargs)
        assert [cell["length"] for cell in result["results"]["cells"]] == [32, 32, 64, 64]
        assert result["results"]["cells"][2]["correct"] == 77
        kwargs["trials"] = 2
        result = measure_passkey(opened, tokenizer, FORMS["compact"], [64], [0.0], tmp_path, **kwargs)
        assert result["results"]["cells"][0]["correct"] <= 2
        assert len(list(tmp_path.glob("passkey--*.json"))) == 2

    def test_length_too_short_for_some_keys(self, folder, tmp_path):
        """With keys of different token counts, a length that some key does not fit into is skipped."""

        class Tokenizer:
            def __call__(self, text, **_):
                return {"input_ids": list(re.sub("9+", "9", text).encode())}

            def decode(self, ids):
                return str(ids)

        opened, tokenizer = open_saved(folder), Tokenizer()
        kwargs = {"documents": text_documents([TEXT], ["text"], tokenizer), "trials": 2}
        result = measure_passkey(opened, tokenizer, FORMS["compact"], [18, 64], [0.0], tmp_path, **kwargs)["results"]
        assert [cell["length"] for cell in result["cells"]] == [64]
        assert [skip["length"] for skip in result["skipped"]] == [18]
        assert "tokens, the prompt's own" in result["skipped"][0]["reason"]

    def test_tokens_outside_the_vocabulary(self, folder, tmp_path):
        def many(text, **_):
            return {"input_ids": [1000 + ord(letter) for letter in text]}

        with pytest.raises(ValueError, match="`--tokenizer` must be one with tokens below 320"):
            measure_passkey(open_saved(folder), many, FORMS["sentences"], [640], [0.0], tmp_path)

    def test_nan_logits(self, folder, tmp_path):
        opened, tokenizer = open_saved(folder), load_tokenizer(str(folder))
        with torch.no_grad():
            opened.model.get_input_embeddings().weight.fill_(torch.nan)
        with pytest.raises(ValueError, match=r"`MODEL` must be a model with finite logits, .* NaN at 640 tokens"):
            measure_passkey(opened, tokenizer, FORMS["sentences"], [640], [0.0], tmp_path)


def compact_documents(count: int, most_characters: int, **kwargs) -> list[str]:
    return list(passkey_documents([TEXT], FORMS["compact"], count, most_characters, seed=3, **kwargs))


class TestTrainingMix:
    @pytest.mark.parametrize("questions", [1, 3])
    def test_documents(self, questions):
        found = compact_documents(200, 90, questions=questions)
        assert found == compact_documents(200, 90, questions=questions)
        for text in found:
            keys = re.findall(r"\n\[key=(\d{5})\]\n", text)
            assert len(keys) == 1 + questions
            assert len(set(keys)) == 1
            assert text.endswith(f"\n[key={keys[0]}]\n")
            assert len(text) <= 90
            assert re.sub(r"\n\[key=\d{5}\]\n", "", text) in TEXT
        assert min(map(len, found)) < 13 * (1 + questions) + 9
        assert max(map(len, found)) > 85

    def test_least_characters(self):
        assert {len(text) for text in compact_documents(200, 90, least_characters=70)} == set(range(70, 91))
        assert compact_documents(200, 90, least_characters=5) == compact_documents(200, 90)

    @pytest.mark.parametrize("least", [-1, 91])
    def test_least_characters_out_of_range(self, least):
        with pytest.raises(ValueError, match="`--min-characters` must be from 0 to --max-characters, 90"):
            compact_documents(1, 90, least_characters=least)

    def test_data_prepare_with_text(self, tmp_path):
        (tmp_path / "text.jsonl").write_text(json.dumps({"text": TEXT}) + "\n")
        written = write_documents(tmp_path / "mix" / "passkey.jsonl", compact_documents(50, 90))
        sources = [tmp_path / "text.jsonl", tmp_path / "mix"]
        prepare(sources, tmp_path / "data", tokenizer="bytes", validation_fraction=0, workers=1)
        dataset = TokenDataset.open(tmp_path / "data", "train")
        assert dataset.total_documents == 51
        assert dataset.total_tokens == len(TEXT) + written + 51
        assert bytes(dataset.document(7)[:-1].tolist()).decode().endswith("]\n")

    def test_max_characters_too_small(self):
        with pytest.raises(ValueError, match="`--max-characters` must be at least 26"):
            compact_documents(1, 20)
