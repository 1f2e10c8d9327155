"""Models of an evaluation: names and options, changes at inference, transformers' models, identity, and errors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from evaluation_cases import SIZE, open_saved, saved_model
from huggingface_models import token_rows
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertLMHeadModel,
    BertModel,
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
from softplus_attention.evaluation.models import (
    fingerprint,
    parse_model_spec,
    parse_model_specs,
    read_training_length,
)
from softplus_attention.evaluation.passkey import prompt_of
from softplus_attention.huggingface import use_attention
from softplus_attention.huggingface.loading import check_model_path
from softplus_attention.power import PowerByLength
from softplus_attention.utils.results import file_name, read

SMALL: dict[str, Any] = {**SIZE, "initializer_range": 0.3, "pad_token_id": None}
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved_model(tmp_path_factory.mktemp("models") / "lssar" / "model")


@pytest.fixture(scope="module")
def softmax(tmp_path_factory):
    return saved_model(tmp_path_factory.mktemp("models") / "softmax", attention="softmax")


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return foreign(tmp_path_factory.mktemp("models") / "llama", "llama")


@pytest.fixture(params=["llama", "softplus-gpt"])
def source(request, llama, softmax):
    return llama if request.param == "llama" else softmax


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 20)

    def call(*args: str) -> tuple[int, str, str]:
        status = main(["evaluate", *args, "--device", "cpu"])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


class TestOptions:
    def test_parse(self):
        spec = parse_model_spec("runs/lssar/model+power=31+reweight+rope=yarn:4")
        assert spec.source == "runs/lssar/model"
        assert spec.options == {"power": "31", "reweight": "", "rope": "yarn:4"}
        assert spec.name == "lssar power=31 reweight rope=yarn:4"
        assert parse_model_spec("best=a/b/checkpoint-30").name == "best"
        assert parse_model_spec("a/b/checkpoint-30").name == "b"
        assert parse_model_spec("c++/gpt+x").source == "c++/gpt+x"
        assert [spec.name for spec in parse_model_specs(["a/m", "b/m"])] == ["m", "m (2)"]
        assert parse_model_spec("m+power=3", {"power": "7", "window": "5"}).options == {"power": "3", "window": "5"}
        assert file_name("lengths", "lssar power=31 <b>") == "lengths--lssar+power=31+%3Cb%3E.json"

    def test_powers(self, folder):
        assert open_saved(f"{folder}+power=31").description()["power"] == 31
        grown = open_saved(f"{folder}+power=grow:15,4").model.config.chosen_attention().spec.power
        assert grown == PowerByLength(15, 4, 16)

    def test_window(self, folder):
        layers = open_saved(f"{folder}+window=4").model.model.layers
        assert [layer.self_attn.attention.window(None) for layer in layers] == [4, 4]

    def test_reweighting(self, tmp_path, folder):
        """LSSA with +reweight equals LSSAR with the same weights."""
        saved_model(tmp_path / "lssa", attention="lssa")
        changed = open_saved(f"{tmp_path / 'lssa'}+reweight+power=7")
        ids = torch.arange(40)[None]
        expected = open_saved(f"{folder}+power=7").model(ids).logits
        torch.testing.assert_close(changed.model(ids).logits, expected)
        assert changed.description()["attention"] == "lssar"
        with pytest.raises(ValueError, match="`--reweight` must be left out for 'lssar'"):
            open_saved(f"{folder}+reweight")
        with pytest.raises(ValueError, match="`--power` must be left out for 'lssa', which has no second stage"):
            open_saved(f"{tmp_path / 'lssa'}+power=7")

    @pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn"])
    def test_rope(self, source, kind):
        """Loading with scaled RoPE equals building the model with scaled RoPE and the same weights."""
        ids = torch.arange(60)[None]
        plain, scaled = open_saved(source).model, open_saved(f"{source}+rope={kind}:4").model
        assert scaled.config.rope_parameters["rope_type"] == kind
        assert (plain(ids).logits - scaled(ids).logits).abs().max() > 1e-4
        built = AutoModelForCausalLM.from_config(scaled.config).eval()
        built.load_state_dict(plain.state_dict())
        torch.testing.assert_close(scaled(ids).logits, built(ids).logits)

    def test_linear_rope_divides_positions(self, source):
        ids = torch.arange(24)[None]
        positions = torch.arange(24)[None] / 4
        expected = open_saved(source).model(ids, position_ids=positions).logits
        torch.testing.assert_close(open_saved(f"{source}+rope=linear:4").model(ids).logits, expected)

    def test_power_needs_a_second_stage(self, llama):
        assert open_saved(llama).description()["attention"] == "softmax"
        assert open_saved(llama).description()["power"] is None
        assert open_saved(f"{llama}+reweight+power=7").description()["power"] == 7
        with pytest.raises(ValueError, match="`--power` must be left out for a model with 'softmax'"):
            open_saved(f"{llama}+power=7")

    @pytest.mark.parametrize(
        "option", ["power=0.5", "power=x", "power=grow:3", "window=-1", "rope=cubic:4", "rope=yarn"]
    )
    def test_invalid_options(self, folder, option):
        with pytest.raises(ValueError, match=f"`--{option.partition('=')[0]}` must be"):
            open_saved(f"{folder}+{option}")

    def test_missing_model(self, tmp_path):
        with pytest.raises(ValueError, match=r"`MODEL` must be a folder with config\.json"):
            read_training_length(parse_model_spec(str(tmp_path / "none")))
        with pytest.raises(ValueError, match="which has none"):
            open_saved(tmp_path)

    def test_similar_folder_is_suggested(self, tmp_path, monkeypatch, capsys):
        (tmp_path / "runs" / "small-1").mkdir(parents=True)
        (tmp_path / "runs" / "small-1" / "config.json").write_text("{}")
        (tmp_path / "runs" / "small-2").mkdir()  # holds no model
        monkeypatch.chdir(tmp_path)
        check_model_path("MODEL", "runs/smal", "config.json")
        assert capsys.readouterr().err == (
            "no folder runs/smal; did you mean runs/small-1? Looking for runs/smal on the Hub\n"
        )
        for source in ("runs/other", "elsewhere/small-1", "small-1"):
            check_model_path("MODEL", source, "config.json")
        assert capsys.readouterr().err == ""


class TestDynamicNtk:
    def test_depends_only_on_own_length(self, source):
        ids = token_rows(1, 64)
        fresh = [losses(open_saved(f"{source}+rope=ntk:4").model, ids[:, :n]) for n in (16, 32, 64)]
        model = open_saved(f"{source}+rope=dynamic:4").model
        for n, expected in ((64, fresh[2]), (16, fresh[0]), (32, fresh[1]), (16, fresh[0])):
            assert torch.equal(losses(model, ids[:, :n]), expected)
        plain = open_saved(source).model
        torch.testing.assert_close(losses(plain, ids[:, :16]), fresh[0])
        assert not torch.allclose(losses(plain, ids), fresh[2], atol=1e-3)

    def test_scales_beyond_the_training_length(self, llama):
        ids = token_rows(1, 16)
        plain, scaled = (open_saved(f"{llama}{option}", 8) for option in ("", "+rope=ntk:4"))
        torch.testing.assert_close(losses(plain.model, ids[:, :8]), losses(scaled.model, ids[:, :8]))
        assert not torch.allclose(losses(plain.model, ids), losses(scaled.model, ids), atol=1e-3)


def test_partial_rotary_factor_is_kept(tmp_path):
    source, ids = foreign(tmp_path, "neox"), token_rows(1, 32)
    plain, ntk, linear = (open_saved(f"{source}{option}").model for option in ("", "+rope=ntk:4", "+rope=linear:4"))
    torch.testing.assert_close(losses(ntk, ids[:, :16]), losses(plain, ids[:, :16]))
    frequencies = linear.gpt_neox.rotary_emb.inv_freq
    assert len(frequencies) == len(plain.gpt_neox.rotary_emb.inv_freq) == 2
    torch.testing.assert_close(frequencies, plain.gpt_neox.rotary_emb.inv_freq / 4)


class TestWindow:
    """A token sees itself and the W - 1 tokens before it in every layer, so two layers reach 2 W - 1 tokens."""

    def reach(self, model: Any, length: int = 24) -> int:
        ids = token_rows(1, length)
        whole = model(input_ids=ids, use_cache=False).logits[0, -1]
        for first in range(length - 1, -1, -1):
            other = ids.clone()
            other[0, :first] = (other[0, :first] + 7) % 256
            if torch.allclose(model(input_ids=other, use_cache=False).logits[0, -1], whole, atol=1e-6):
                return length - first
        return length

    @pytest.mark.parametrize("config", [{}, {"global_every": 2, "window": 8}, {"attention": "softmax"}])
    def test_softplus_gpt(self, config, tmp_path):
        saved_model(tmp_path, **config)
        assert self.reach(open_saved(f"{tmp_path}+window=3").model) == 5

    def test_llama(self, llama):
        assert self.reach(open_saved(f"{llama}+window=3").model) == 5

    def test_with_power(self, tmp_path):
        model = use_attention(LlamaForCausalLM(LlamaConfig(**SMALL)), "lssar")
        model.save_pretrained(tmp_path)
        changed = open_saved(f"{tmp_path}+window=3+power=7")
        assert changed.description()["power"] == 7
        assert self.reach(changed.model) == 5

    def test_is_kept_by_reweight(self, tmp_path):
        use_attention(LlamaForCausalLM(LlamaConfig(**SMALL)), "lssa", window=3).save_pretrained(tmp_path)
        assert self.reach(open_saved(f"{tmp_path}+reweight").model) == 5


@pytest.mark.parametrize("learned", ["learned", "learned-log"])
def test_power_replaces_learned_powers(learned, tmp_path):
    """Equals a model with the same weights and that power."""
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
            ("gptj", "lengths"),  # its attention cannot be captured
            ("gptj", "passkey"),
        ],
    )
    def test_lengths_beyond_the_positions_are_skipped(self, name, measure, run, tmp_path):
        foreign(tmp_path / name, name)
        more = ("--form", "compact", "--trials", "2", "--depths", "0") if measure == "passkey" else ()
        status, out, _ = run(measure, name, "--text", "text.txt", "--lengths", "32,64,128", *more)
        assert status == 0
        assert "128" in out
        assert "the model has positions for 64 tokens" in out
        assert read(tmp_path / "evaluation" / f"{measure}--{name}.json")["complete"]

    def test_positions_do_not_change_the_texts(self, run, tmp_path):
        """The same model with two numbers of positions is measured on the same texts."""
        foreign(tmp_path / "many", "gpt2")
        model = GPT2LMHeadModel.from_pretrained(tmp_path / "many")
        model.transformer.wpe.weight.data = model.transformer.wpe.weight.data[:32].clone()
        model.config.n_positions = 32
        model.save_pretrained(tmp_path / "few")
        tokenizers.save(tokenizers.bytes_tokenizer(), tmp_path / "few", tokenizers.END)
        for name, count in {"a": 2, "b": 9, "c": 9}.items():
            (tmp_path / f"{name}.txt").write_text(f"{name} is a text of some length, and it differs. " * count)
        args = ("--text", "a.txt", "b.txt", "c.txt", "--train-length", "16", "--lengths", "1,2,4", "--sequences", "5")
        assert run("lengths", "many", "few", *args)[0] == 0
        many, few = (read(tmp_path / "evaluation" / f"lengths--{name}.json")["results"] for name in ("many", "few"))
        assert many["used"] == few["used"]
        assert [entry["length"] for entry in few["lengths"]] == [16, 32]
        assert [entry["loss"] for entry in few["lengths"]] == pytest.approx([e["loss"] for e in many["lengths"][:2]])

    def test_model_without_attention(self, run, tmp_path):
        foreign(tmp_path / "mamba", "mamba")
        status, out, _ = run("lengths", "mamba", "--text", "text.txt", "--train-length", "16", "--lengths", "1,4")
        assert status == 0
        assert "mamba" in out

    def test_model_that_is_not_causal(self, run, tmp_path):
        foreign(tmp_path / "bert", "bert")
        status, _, err = run("lengths", "bert", "--text", "text.txt", "--lengths", "32,64")
        assert status == 2
        assert "MODEL: BertLMHeadModel is not causal: later tokens change earlier logits" in err

    def test_one_of_several_models_fails(self, run, tmp_path):
        foreign(tmp_path / "bert", "bert")
        saved_model(tmp_path / "lssar", max_position_embeddings=64)
        status, out, err = run("lengths", "lssar", "bert", "--text", "text.txt", "--lengths", "32,64")
        assert status == 1
        assert "bert could not be measured: MODEL: BertLMHeadModel is not causal" in err
        assert "lengths--lssar.json" in out
        assert (tmp_path / "evaluation" / "lengths.png").exists()

    def test_capped_logits_in_chunks(self, tmp_path):
        model = open_saved(foreign(tmp_path, "gemma2")).model
        ids = token_rows(2, 24)
        token_loss = TokenLoss(model)
        mean = token_loss(ids).mean()
        assert token_loss.in_pieces
        torch.testing.assert_close(mean, model(input_ids=ids, labels=ids).loss)

    def test_unexpected_weights(self, tmp_path):
        folder = foreign(tmp_path, "llama")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
        with pytest.raises(ValueError, match="9 unexpected weights"):
            open_saved(folder)

    def test_unusable_models(self, tmp_path, folder):
        size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
        BertModel(BertConfig(vocab_size=30, **size)).save_pretrained(tmp_path / "bert")
        with pytest.raises(ValueError, match="missing weights for"):
            open_saved(tmp_path / "bert")
        (tmp_path / "odd").mkdir()
        (tmp_path / "odd" / "config.json").write_text('{"model_type": "no-such-model"}')
        with pytest.raises(ValueError, match="model type `no-such-model`"):
            open_saved(tmp_path / "odd")
        shutil.copytree(folder, tmp_path / "cut")
        weights = tmp_path / "cut" / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-100])
        with pytest.raises(ValueError, match="cut off or damaged"):
            open_saved(tmp_path / "cut")
        (tmp_path / "cut" / "model.safetensors").unlink()
        with pytest.raises(ValueError, match="no file named model"):
            open_saved(tmp_path / "cut")


class TestIdentity:
    def test_fingerprint_depends_on_every_weight(self, tmp_path):
        folder = saved_model(tmp_path, hidden_size=128, intermediate_size=512)
        before, path = fingerprint(str(folder)), folder / "model.safetensors"
        weights = load_file(path)
        weights["model.layers.1.mlp.up_proj.weight"][200, 50] += 1
        save_file(weights, path, {"format": "pt"})
        assert fingerprint(str(folder)) != before

    def test_results_depend_on_the_training_length(self, run, tmp_path):
        saved_model(tmp_path / "lssar")
        args = ("lengths", "lssar", "--text", "text.txt", "--lengths", "16,64")
        controls = []
        for length in ("16", "8"):
            run(*args, "--train-length", length)
            found = read(tmp_path / "evaluation" / "lengths--lssar.json")["results"]["lengths"]
            controls.append(found[-1]["control"]["window"])
        assert controls == [16, 8]

    def test_file_names_are_unique(self):
        names = ["a b", "a-b", "a+b", "模型", "模型二", "a/b", "x" * 300, "x" * 301, "a=1", "a_1"]
        files = {file_name("lengths", name) for name in names}
        assert len(files) == len(names)
        assert all(len(file) < 200 and "/" not in file for file in files)


def test_plus_in_names_and_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("lssar", "lssar+x", "runs/y"):
        (tmp_path / folder).mkdir(parents=True)
    assert parse_model_spec("lssar+x").source == "lssar+x"
    assert parse_model_spec("lssar+x+power=3").source == "lssar+x"
    named = parse_model_spec("lssar+y=runs/y+power=3")
    assert (named.name, named.source, named.options) == ("lssar+y", "runs/y", {"power": "3"})


KNOWN_OPTIONS = "`MODEL` must be a folder followed by +power=P, +reweight, +window=N or +rope=TYPE:FACTOR"


class TestErrors:
    @pytest.mark.parametrize(
        ("args", "message"),
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
    def test_raised_before_measuring(self, args, message, run, tmp_path):
        saved_model(tmp_path / "lssar")
        saved_model(tmp_path / "softmax", attention="softmax")
        status, _, err = run("lengths", *args, "--text", "text.txt", "--lengths", "1,2")
        assert status == 2
        assert message in err
        assert not (tmp_path / "evaluation").exists()

    @pytest.mark.parametrize("device", ["cuda:99", "tpu-or-so", "vulkan", "meta"])
    def test_unavailable_devices(self, device, tmp_path, capsys):
        saved_model(tmp_path / "lssar")
        assert main(["evaluate", "lengths", str(tmp_path / "lssar"), "--text", "builtin", "--device", device]) == 2
        assert "`--device` must be" in capsys.readouterr().err


def test_passkey_data_uses_training_text(tmp_path):
    args = ["passkey-data", "--text", "builtin", "--documents", "30", "--most-characters", "400"]
    assert main(["evaluate", *args, "--output", str(tmp_path)]) == 0
    train, validation = ("\n".join(texts) for texts in builtin_text())
    prompt = prompt_of("compact", None, None)
    needle = prompt.needle.partition("{")[0]
    documents = [json.loads(line)["text"] for line in (tmp_path / "passkey.jsonl").read_text().splitlines()]
    begun = [text.removeprefix(prompt.start).partition(needle)[0] for text in documents]
    stretches = [text for text in begun if len(text) > 60]
    assert len(stretches) > 5
    assert all(text in train for text in stretches)
    assert not any(text in validation for text in stretches)
