"""Models of an evaluation: those of others, changes at inference, and what must not be taken for one another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from evaluation_cases import open_saved, saved_model
from huggingface_models import token_rows
from safetensors.torch import load_file, save_file
from transformers import (
    BertConfig,
    BertLMHeadModel,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTJConfig,
    GPTJForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

from softplus_attention.cli import main
from softplus_attention.data import builtin_text
from softplus_attention.data import tokenizer as tokenizers
from softplus_attention.evaluation.loss import TokenLoss
from softplus_attention.evaluation.models import fingerprint, parse_model_spec
from softplus_attention.evaluation.passkey import prompt_of
from softplus_attention.huggingface import use_attention
from softplus_attention.utils.results import file_name, read

SMALL: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 16,
    "initializer_range": 0.3,
    "pad_token_id": None,
}
FOREIGN = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=320, n_embd=32, n_layer=2, n_head=2, n_positions=64, bos_token_id=256, eos_token_id=256)
    ),
    "opt": lambda: OPTForCausalLM(
        OPTConfig(**{**SMALL, "ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 64})
    ),
    "gptj": lambda: GPTJForCausalLM(
        GPTJConfig(vocab_size=320, n_embd=32, n_layer=2, n_head=2, n_positions=64, rotary_dim=8)
    ),
    "neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SMALL, rotary_pct=0.25)),
    "mamba": lambda: MambaForCausalLM(MambaConfig(vocab_size=320, hidden_size=32, num_hidden_layers=2, state_size=4)),
    "bert": lambda: BertLMHeadModel(BertConfig(**{**SMALL, "pad_token_id": 0, "max_position_embeddings": 64})),
    "gemma2": lambda: Gemma2ForCausalLM(
        Gemma2Config(**SMALL, head_dim=16, num_key_value_heads=2, query_pre_attn_scalar=16, final_logit_softcapping=2.0)
    ),
}


def foreign(folder: Path, name: str) -> Path:
    torch.manual_seed(0)
    FOREIGN[name]().save_pretrained(folder)
    tokenizers.save(tokenizers.bytes_tokenizer(), folder, tokenizers.END)
    return folder


def losses(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return TokenLoss(model)(ids)


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 20)

    def call(*words: str) -> tuple[int, str, str]:
        status = main(["evaluate", *words, "--device", "cpu"])
        said = capsys.readouterr()
        return status, said.out, said.err

    return call


class TestDynamicNtk:
    @pytest.mark.parametrize("kind", ["ours", "llama"])
    def test_each_input_by_its_own_length(self, kind, tmp_path):
        folder = tmp_path / kind
        saved_model(folder, attention="softmax") if kind == "ours" else foreign(folder, "llama")
        ids = token_rows(1, 64)
        fresh = [losses(open_saved(f"{folder}+rope=ntk:4").model, ids[:, :n]) for n in (16, 32, 64)]
        model = open_saved(f"{folder}+rope=dynamic:4").model
        for n, expected in ((64, fresh[2]), (16, fresh[0]), (32, fresh[1]), (16, fresh[0])):
            assert torch.equal(losses(model, ids[:, :n]), expected)
        plain = open_saved(folder).model
        torch.testing.assert_close(losses(plain, ids[:, :16]), fresh[0])
        assert not torch.allclose(losses(plain, ids), fresh[2], atol=1e-3)

    def test_stretches_from_the_training_length_on(self, tmp_path):
        ids = token_rows(1, 16)
        plain, stretched = (open_saved(f"{foreign(tmp_path, 'llama')}{more}", 8) for more in ("", "+rope=ntk:4"))
        torch.testing.assert_close(losses(plain.model, ids[:, :8]), losses(stretched.model, ids[:, :8]))
        assert not torch.allclose(losses(plain.model, ids), losses(stretched.model, ids), atol=1e-3)


def test_a_share_of_each_head_that_rotates_is_kept(tmp_path):
    folder, ids = foreign(tmp_path, "neox"), token_rows(1, 32)
    plain, longer, stretched = (open_saved(f"{folder}{more}").model for more in ("", "+rope=ntk:4", "+rope=linear:4"))
    torch.testing.assert_close(losses(longer, ids[:, :16]), losses(plain, ids[:, :16]))
    rotating = stretched.gpt_neox.rotary_emb.inv_freq
    assert len(rotating) == len(plain.gpt_neox.rotary_emb.inv_freq) == 2
    torch.testing.assert_close(rotating, plain.gpt_neox.rotary_emb.inv_freq / 4)


class TestWindow:
    """A token sees itself and the W - 1 before it, in every layer: two layers reach 2 W - 1 tokens."""

    def reach(self, model: Any, length: int = 24) -> int:
        ids = token_rows(1, length)
        whole = model(input_ids=ids, use_cache=False).logits[0, -1]
        for first in range(length - 1, -1, -1):
            other = ids.clone()
            other[0, :first] = (other[0, :first] + 7) % 256
            if torch.allclose(model(input_ids=other, use_cache=False).logits[0, -1], whole, atol=1e-6):
                return length - first
        return length

    @pytest.mark.parametrize("words", [{}, {"global_every": 2, "window": 8}, {"attention": "softmax"}])
    def test_in_every_layer_of_ours(self, words, tmp_path):
        saved_model(tmp_path, **words)
        assert self.reach(open_saved(f"{tmp_path}+window=3").model) == 5

    def test_in_a_model_without_one(self, tmp_path):
        assert self.reach(open_saved(f"{foreign(tmp_path, 'llama')}+window=3").model) == 5

    def test_beside_power(self, tmp_path):
        model = use_attention(LlamaForCausalLM(LlamaConfig(**SMALL)), "lssar")
        model.save_pretrained(tmp_path)
        changed = open_saved(f"{tmp_path}+window=3+power=7")
        assert changed.description()["power"] == 7
        assert self.reach(changed.model) == 5

    def test_stays_where_the_model_is_re_weighted(self, tmp_path):
        use_attention(LlamaForCausalLM(LlamaConfig(**SMALL)), "lssa", window=3).save_pretrained(tmp_path)
        assert self.reach(open_saved(f"{tmp_path}+reweight").model) == 5


@pytest.mark.parametrize("learned", ["learned", "learned-log"])
def test_a_power_in_place_of_learned_ones(learned, tmp_path):
    """The same weights with that power from the start."""
    saved_model(tmp_path / "a", power=learned)
    saved_model(tmp_path / "b", power=7)
    changed, plain = open_saved(f"{tmp_path / 'a'}+power=7"), open_saved(tmp_path / "b")
    weights = {name: x for name, x in changed.model.state_dict().items() if "raw_power" not in name}
    plain.model.load_state_dict(weights)
    ids = token_rows(1, 40)
    torch.testing.assert_close(changed.model(ids).logits, plain.model(ids).logits)
    assert changed.description()["power"] == 7
    assert (open_saved(tmp_path / "a").model(ids).logits - plain.model(ids).logits).abs().max() > 1e-3


class TestForeignModels:
    @pytest.mark.parametrize(
        ("name", "measure"),
        [
            *((name, measure) for name in ("gpt2", "opt") for measure in ("lengths", "passkey", "inside")),
            ("gptj", "lengths"),  # whose attention cannot be looked into
            ("gptj", "passkey"),
        ],
    )
    def test_no_positions_so_far_out(self, name, measure, run, tmp_path):
        foreign(tmp_path / name, name)
        more = ("--form", "compact", "--trials", "2", "--depths", "0") if measure == "passkey" else ()
        status, out, _ = run(measure, name, "--text", "text.txt", "--lengths", "32,64,128", *more)
        assert status == 0
        assert "128" in out
        assert "the model has positions for 64 tokens" in out
        assert read(tmp_path / "evaluation" / f"{measure}--{name}.json")["complete"]

    def test_all_models_are_measured_on_the_same_texts(self, run, tmp_path):
        """Whatever number of positions they have: here it is the same model twice."""
        foreign(tmp_path / "many", "gpt2")
        model = GPT2LMHeadModel.from_pretrained(tmp_path / "many")
        model.transformer.wpe.weight.data = model.transformer.wpe.weight.data[:32].clone()
        model.config.n_positions = 32
        model.save_pretrained(tmp_path / "few")
        tokenizers.save(tokenizers.bytes_tokenizer(), tmp_path / "few", tokenizers.END)
        for name, count in {"a": 2, "b": 9, "c": 9}.items():
            (tmp_path / f"{name}.txt").write_text(f"{name} is a text of some length, and it differs. " * count)
        words = ("--text", "a.txt", "b.txt", "c.txt", "--train-length", "16", "--lengths", "1,2,4", "--sequences", "5")
        assert run("lengths", "many", "few", *words)[0] == 0
        many, few = (read(tmp_path / "evaluation" / f"lengths--{name}.json")["results"] for name in ("many", "few"))
        assert many["used"] == few["used"]
        assert [entry["length"] for entry in few["lengths"]] == [16, 32]
        assert [entry["loss"] for entry in few["lengths"]] == pytest.approx([e["loss"] for e in many["lengths"][:2]])

    def test_without_attention(self, run, tmp_path):
        foreign(tmp_path / "mamba", "mamba")
        status, out, _ = run("lengths", "mamba", "--text", "text.txt", "--train-length", "16", "--lengths", "1,4")
        assert status == 0
        assert "mamba" in out

    def test_one_that_sees_ahead_is_refused(self, run, tmp_path):
        foreign(tmp_path / "bert", "bert")
        status, _, err = run("lengths", "bert", "--text", "text.txt", "--lengths", "32,64")
        assert status == 2
        assert "MODEL: BertLMHeadModel is not causal: later tokens change earlier logits" in err

    def test_one_of_several_that_fails(self, run, tmp_path):
        foreign(tmp_path / "bert", "bert")
        saved_model(tmp_path / "lssar", max_position_embeddings=64)
        status, out, err = run("lengths", "lssar", "bert", "--text", "text.txt", "--lengths", "32,64")
        assert status == 1
        assert "bert was not measured: MODEL: BertLMHeadModel is not causal" in err
        assert "lengths--lssar.json" in out
        assert (tmp_path / "evaluation" / "lengths.png").exists()

    def test_capped_logits_in_pieces(self, tmp_path):
        model = open_saved(foreign(tmp_path, "gemma2")).model
        ids = token_rows(2, 24)
        token_loss = TokenLoss(model)
        mean = token_loss(ids).mean()
        assert token_loss.in_pieces
        torch.testing.assert_close(mean, model(input_ids=ids, labels=ids).loss)

    def test_weights_of_another_model(self, tmp_path):
        folder = foreign(tmp_path, "llama")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
        with pytest.raises(ValueError, match="it also holds 9 weights"):
            open_saved(folder)


class TestIdentity:
    def test_every_weight_counts(self, tmp_path):
        folder = saved_model(tmp_path, hidden_size=128, intermediate_size=512)
        before, path = fingerprint(str(folder)), folder / "model.safetensors"
        weights = load_file(path)
        weights["model.layers.1.mlp.up_proj.weight"][200, 50] += 1
        save_file(weights, path, {"format": "pt"})
        assert fingerprint(str(folder)) != before

    def test_the_training_length_counts(self, run, tmp_path):
        saved_model(tmp_path / "lssar")
        words = ("lengths", "lssar", "--text", "text.txt", "--lengths", "16,64")
        controls = []
        for length in ("16", "8"):
            run(*words, "--train-length", length)
            found = read(tmp_path / "evaluation" / "lengths--lssar.json")["results"]["lengths"]
            controls.append(found[-1]["control"]["window"])
        assert controls == [16, 8]

    def test_names_have_files_of_their_own(self):
        names = ["a b", "a-b", "a+b", "模型", "模型二", "a/b", "x" * 300, "x" * 301, "a=1", "a_1"]
        files = {file_name("lengths", name) for name in names}
        assert len(files) == len(names)
        assert all(len(file) < 200 and "/" not in file for file in files)


def test_pluses_in_names_and_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("lssar", "lssar+x", "runs/y"):
        (tmp_path / folder).mkdir(parents=True)
    assert parse_model_spec("lssar+x").source == "lssar+x"
    assert parse_model_spec("lssar+x+power=3").source == "lssar+x"
    named = parse_model_spec("lssar+y=runs/y+power=3")
    assert (named.name, named.source, named.options) == ("lssar+y", "runs/y", {"power": "3"})


KNOWN_OPTIONS = "`MODEL` must be a folder with options of +power=P, +reweight, +window=N or +rope=TYPE:FACTOR after it"


class TestMistakes:
    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["lssar+rope=ntk:0"], "`--rope` must be one of"),
            (["lssar", "softmax+power=3"], "`--power` must be left out for 'softmax'"),
            (["lssar+window=0"], "`--window` must be a whole number"),
            (["lssar+power=log:many"], "log:FACTOR (times the log of the number of keys), got 'log:many'"),
            (["lssar+powr=3"], KNOWN_OPTIONS + ", got '+powr=3' in 'lssar+powr=3'"),
            (["./lssar+powr=3"], KNOWN_OPTIONS + ", got '+powr=3' in './lssar+powr=3'"),
            (["named=lssar+powr=3"], KNOWN_OPTIONS + ", got '+powr=3' in 'named=lssar+powr=3'"),
            (["lssar+powr=3+window=4"], KNOWN_OPTIONS + ", got '+powr=3'"),
            (["lssar+window=4+powr=3"], KNOWN_OPTIONS + ", got '+powr=3'"),
            (["lssar+reweigh"], KNOWN_OPTIONS + ", got '+reweigh'"),
            (["lssar+"], KNOWN_OPTIONS + ", got '+' in 'lssar+'"),
            (["lssar", "--output", "text.txt"], "`--output` must be a folder"),
        ],
    )
    def test_before_anything_is_measured(self, words, message, run, tmp_path):
        saved_model(tmp_path / "lssar")
        saved_model(tmp_path / "softmax", attention="softmax")
        status, _, err = run("lengths", *words, "--text", "text.txt", "--lengths", "1,2")
        assert status == 2
        assert message in err
        assert not (tmp_path / "evaluation").exists()

    @pytest.mark.parametrize("device", ["cuda:99", "tpu-or-so", "vulkan", "meta"])
    def test_devices_that_are_not_there(self, device, tmp_path, capsys):
        saved_model(tmp_path / "lssar")
        assert main(["evaluate", "lengths", str(tmp_path / "lssar"), "--text", "builtin", "--device", device]) == 2
        assert "`--device` must be" in capsys.readouterr().err


def test_pass_keys_are_taught_on_training_text(tmp_path):
    words = ["passkey-data", "--text", "builtin", "--documents", "30", "--most-characters", "400"]
    assert main(["evaluate", *words, "--output", str(tmp_path)]) == 0
    train, validation = ("\n".join(texts) for texts in builtin_text())
    prompt = prompt_of("compact", None, None)
    needle = prompt.needle.partition("{")[0]
    documents = [json.loads(line)["text"] for line in (tmp_path / "passkey.jsonl").read_text().splitlines()]
    begun = [text.removeprefix(prompt.start).partition(needle)[0] for text in documents]
    stretches = [text for text in begun if len(text) > 60]
    assert len(stretches) > 5
    assert all(text in train for text in stretches)
    assert not any(text in validation for text in stretches)
