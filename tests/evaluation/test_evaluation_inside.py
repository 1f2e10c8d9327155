"""Statistics of attention weights: by hand, captured rows against transformers' weights, and bounded memory."""

from __future__ import annotations

import csv
import math

import pytest
import torch
from evaluation_cases import open_saved, saved_model
from huggingface_models import small_model, token_rows

from softplus_attention.catalog import attention
from softplus_attention.charts.draw import picture
from softplus_attention.evaluation import inside
from softplus_attention.evaluation.capture import Call, RowWeights, capture_attention, run_decoder
from softplus_attention.evaluation.inside import (
    attention_maps,
    effective_keys,
    entropy,
    look_inside,
    quantities,
)
from softplus_attention.evaluation.measures import draw_folder, measures
from softplus_attention.evaluation.measures.inside import csv_rows, measure_inside, table
from softplus_attention.evaluation.measures.maps import measure_maps
from softplus_attention.evaluation.texts import text_documents
from softplus_attention.huggingface import SoftplusGPTConfig, SoftplusGPTForCausalLM, use_attention
from softplus_attention.huggingface.attention import build_visibility
from softplus_attention.huggingface.loading import load_tokenizer

WHOLE = slice(0, 4)


def capture(model, ids) -> list[Call]:
    found: list[Call] = []
    with capture_attention(model, found.append):
        run_decoder(model, ids)
    return found


def dense_weights(model, ids) -> tuple[torch.Tensor, ...]:
    with torch.no_grad():
        return model(ids, output_attentions=True, use_cache=False).attentions


def own_model(attention: str, layers: int = 2, **kwargs) -> SoftplusGPTForCausalLM:
    torch.manual_seed(0)
    size = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": layers, "num_attention_heads": 4}
    config = SoftplusGPTConfig(**size, attention=attention, bos_token_id=1, eos_token_id=2, **kwargs)
    model = SoftplusGPTForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2 and "embed" not in name:
                weight.mul_(4)
    return model


@pytest.mark.parametrize("as_ranges", [False, True])
def test_score_scale_allowed_by_the_window(as_ranges: bool) -> None:
    """Scores of 40 log N would underflow over 16 keys, but not over the 4 visible ones."""
    chosen, (q, k) = attention("lssar", scale=40, window=4), torch.randn(2, 1, 2, 16, 8)
    end = torch.arange(1, 17, dtype=torch.int32)
    ranges = torch.stack([torch.zeros_like(end), end], -1)[None, None] if as_ranges else None
    call = Call(0, chosen, q, k, build_visibility(q, k, ranges, True, chosen.window(None)), {})
    found = call.rows(0, 16, slice(0, 2)).final
    torch.testing.assert_close(found, chosen.weights(q, k, is_causal=True))


class TestQuantitiesByHand:
    @pytest.mark.parametrize("scale", [1, 3], ids=["normalized", "not normalized"])
    def test_entropy_and_effective_keys(self, scale):
        rows = scale * torch.tensor([[0.25] * 4, [1, 0, 0, 0], [0.5, 0.25, 0.25, 0], [0, 0, 0, 0]])
        assert entropy(rows).tolist() == pytest.approx([math.log(4), 0, 1.5 * math.log(2), 0])
        assert effective_keys(rows).tolist() == pytest.approx([4, 1, 1 / (0.25 + 2 / 16), 0])

    def test_sink_zeros_and_mass(self):
        final = torch.tensor([[[[0.2, 0.8, 0.0, 0.0], [0.6, 0.0, 0.0, 0.4]]]])
        visible = torch.tensor([[[[True, True, True, False], [True] * 4]]])
        found = quantities(RowWeights(final, None, final, visible))
        assert found["sink"].flatten().tolist() == pytest.approx([0.2, 0.6])
        assert found["zeros"].flatten().tolist() == pytest.approx([1 / 3, 2 / 4])
        assert found["mass"].flatten().tolist() == pytest.approx([1, 1])
        assert found["log_keys"].flatten().tolist() == pytest.approx([math.log(3), math.log(4)])
        assert "stage1_entropy_frozen" not in found

    def test_tiles(self):
        """64 rows over 200 keys are four tiles: used, unused, used by one weight, and a partial one that is masked."""
        final = torch.zeros(1, 1, 64, 200)
        final[..., :3] = 1 / 3
        final[0, 0, 63, 128] = 0.5
        visible = torch.ones(1, 1, 64, 200, dtype=torch.bool)
        visible[..., 192:] = False
        found = quantities(RowWeights(final, None, final, visible))
        assert found["empty_tiles"].flatten().tolist() == pytest.approx([1 / 3])

    def test_blocks_of_rows(self):
        assert inside.row_blocks(16, 8) == [(8, 16)]
        assert inside.row_blocks(128, 8) == [(64, 128)]
        assert inside.row_blocks(1024, 8) == [(n, n + 64) for n in range(512, 1024, 64)]
        assert inside.row_blocks(4096, 3) == [(2048, 2112), (3072, 3136), (4032, 4096)]
        assert inside.row_blocks(200, 8) == [(64, 128), (128, 192), (192, 200)]


class TestCapturedRows:
    @pytest.mark.parametrize(
        ("attention", "kwargs"),
        [
            ("lssar", {}),
            ("lssa", {}),
            ("lssar", {"num_key_value_heads": 2, "power": "learned"}),
            ("lssar", {"window": 5}),
            ("lssar", {"window": 5, "power": "learned-log"}),
            ("lssar-without-offset", {}),
            ("lssar-without-offset", {"window": 5, "power": "learned-log"}),
            ("softmax-reweighted", {"power": "learned-log"}),
            ("lssar", {"power": {"base": 3, "slope": 2, "n0": 4}}),
            ("softmax", {}),
            ("softmax-qknorm-logn", {}),
            ("ssmax", {}),
            ("softmax-alibi", {}),
            ("softmax-reweighted", {}),
            ("relu", {}),
        ],
    )
    def test_our_gpt(self, attention, kwargs):
        model, ids = own_model(attention, **kwargs), token_rows(2, 20)
        expected = dense_weights(model, ids)
        calls = capture(model, ids)
        assert [call.layer for call in calls] == [0, 1]
        for call, weights in zip(calls, expected, strict=True):
            for heads in call.head_groups():
                rows = call.rows(7, 13, heads)
                torch.testing.assert_close(rows.final, weights[:, heads, 7:13, : rows.final.shape[-1]])
                assert not weights[:, heads, 7:13, rows.final.shape[-1] :].any()

    @pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gpt-neox", "gpt2"])
    def test_models_of_transformers(self, family):
        """Captured from SDPA, against the weights of eager attention."""
        model, ids = small_model(family, "sdpa"), token_rows(2, 20)
        calls = capture(model, ids)
        model.set_attn_implementation("eager")
        expected = dense_weights(model, ids)
        assert [call.layer for call in calls] == [0, 1]
        for call, weights in zip(calls, expected, strict=True):
            torch.testing.assert_close(call.rows(0, 20, WHOLE).final, weights)
            part = call.rows(11, 17, slice(2, 3)).final
            torch.testing.assert_close(part, weights[:, 2:3, 11:17, : part.shape[-1]])

    def test_lssar_in_llama(self):
        model, ids = small_model("llama", "sdpa"), token_rows(1, 16)
        use_attention(model, "lssar", power=7)
        expected = dense_weights(model, ids)
        for call, weights in zip(capture(model, ids), expected, strict=True):
            torch.testing.assert_close(call.rows(0, 16, WHOLE).final, weights)

    def test_wrapper_is_removed(self):
        model, ids = small_model("llama", "sdpa"), token_rows(1, 16)
        before = model(ids).logits
        capture(model, ids)
        seen: list[Call] = []
        with pytest.raises(ValueError, match="stop"), capture_attention(model, seen.append):
            raise ValueError("stop")
        torch.testing.assert_close(model(ids).logits, before)
        assert not seen

    def test_eager_attention_is_an_error(self):
        with pytest.raises(ValueError, match="attn_implementation='sdpa'"):
            capture(small_model("llama", "eager"), token_rows(1, 16))


class TestStageOne:
    def test_is_lssa(self):
        """Stage 1 of LSSAR equals the final weights of LSSA for the same queries and keys."""
        model, ids = own_model("lssar", layers=1), token_rows(1, 24)
        ours = capture(model, ids)[0].rows(0, 24, WHOLE)
        other = own_model("lssa", layers=1)
        other.load_state_dict(model.state_dict())
        torch.testing.assert_close(ours.stage1, capture(other, ids)[0].rows(0, 24, WHOLE).final)
        assert entropy(ours.final).mean() < entropy(ours.stage1).mean()

    @pytest.mark.parametrize("attention", ["lssar", "softmax-qknorm-logn", "ssmax"])
    def test_frozen_equals_stage1_at_its_length(self, attention):
        call = capture(own_model(attention, layers=1), token_rows(1, 24))[0]
        rows = call.rows(15, 17, WHOLE, frozen_length=16)
        torch.testing.assert_close(rows.frozen[:, :, 0], rows.stage1[:, :, 0])
        assert (rows.frozen[:, :, 1] - rows.stage1[:, :, 1]).abs().max() > 1e-6

    def test_softmax_has_no_frozen_stage(self):
        assert capture(own_model("softmax", layers=1), token_rows(1, 8))[0].rows(0, 8, WHOLE, 4).frozen is None


class TestLookInside:
    @pytest.mark.parametrize("attention", ["lssar", "softmax"])
    def test_means_against_dense_weights(self, attention):
        model, ids = own_model(attention), token_rows(3, 40)
        found = look_inside(model, ids, frozen_length=20, at_once=2)
        expected = dense_weights(model, ids)
        for head in found.heads():
            weights = expected[head["layer"]][:, head["head"], 20:].double()
            assert head["entropy"] == pytest.approx(-weights.xlogy(weights).sum(-1).mean().item(), rel=1e-5)
            assert head["sink"] == pytest.approx(weights[..., 0].mean().item(), rel=1e-5, abs=1e-12)
            assert head["effective_keys"] == pytest.approx((1 / weights.square().sum(-1)).mean().item(), rel=1e-5)
            assert head["mass"] == pytest.approx(1)
            counts = torch.arange(21, 41)
            zeros = (weights == 0).sum(-1) - (40 - counts)
            assert head["zeros"] == pytest.approx((zeros / counts).mean().item(), abs=1e-6)
        assert found.log_keys == pytest.approx(sum(math.log(n) for n in range(21, 41)) / 20)

    def test_log_keys_of_windowed_layers(self):
        found = look_inside(own_model("lssar", window=4, global_every=2), token_rows(1, 40), frozen_length=20)
        local, global_ = ([h for h in found.heads() if h["layer"] == layer] for layer in (0, 1))
        assert [head["log_keys"] for head in local] == pytest.approx([math.log(4)] * 4)
        expected = sum(math.log(n) for n in range(21, 41)) / 20
        assert [head["log_keys"] for head in global_] == pytest.approx([expected] * 4)
        assert found.log_keys == pytest.approx((math.log(4) + expected) / 2)

    def test_bounded_memory(self, monkeypatch):
        """At 2048 tokens, one head's block of rows is in memory at a time."""
        sizes = []
        real = quantities
        monkeypatch.setattr(inside, "quantities", lambda rows: sizes.append(rows.final.shape) or real(rows))
        look_inside(own_model("lssar", layers=1), token_rows(1, 2048), blocks=2, frozen_length=64)
        assert len(sizes) == 4 * 2
        assert max(size.numel() for size in sizes) == 64 * 2048


class TestMaps:
    def test_whole(self):
        model, ids = own_model("lssar"), token_rows(1, 12)
        expected = dense_weights(model, ids)
        per_cell, maps = attention_maps(model, ids[0], 64)
        assert per_cell == 1
        assert len(maps) == 8
        for found in maps:
            for row, line in enumerate(found["weights"]):
                weights = expected[found["layer"]][0, found["head"], row, : row + 1]
                assert line == pytest.approx(weights.tolist(), rel=1e-3, abs=1e-12)

    def test_cells(self):
        """11 tokens in at most 4 cells are 3 per cell: sums over keys, means over rows."""
        model, ids = own_model("softmax", layers=1), token_rows(1, 11)
        weights = dense_weights(model, ids)[0][0]
        per_cell, maps = attention_maps(model, ids[0], 4)
        assert per_cell == 3
        for found in maps:
            assert [len(line) for line in found["weights"]] == [1, 2, 3, 4]
            last = weights[found["head"], 9:11]
            expected = [last[:, begin : begin + 3].sum(-1).mean().item() for begin in (0, 3, 6, 9)]
            assert found["weights"][3] == pytest.approx(expected, rel=1e-3)
            assert all(sum(line) == pytest.approx(1, abs=1e-3) for line in found["weights"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(str(folder))


class TestFiles:
    def test_inside(self, folder, tokenizer, tmp_path):
        opened = open_saved(folder)
        documents = text_documents(["abcdefgh" * 40, "short"], ["text"], tokenizer)
        result = measure_inside(opened, documents, [16, 64, 512], tmp_path, sequences=2)
        entries = result["results"]["lengths"]
        assert [entry["length"] for entry in entries] == [16, 64]
        assert [len(entry["heads"]) for entry in entries] == [4, 4]
        assert result["results"]["skipped"] == [{"length": 512, "reason": "the longest document has 320 tokens"}]
        assert all(head["stage1_entropy"] <= entry["log_keys"] + 1e-6 for entry in entries for head in entry["heads"])
        assert "skipped: " in table([result])
        head, rows = csv_rows([result])
        assert len(rows) == 8
        assert len(head) == len(rows[0])

    def test_maps(self, folder, tokenizer, tmp_path):
        opened = open_saved(folder)
        text = "Call me <b>Ishmael</b>."
        result = measure_maps(opened, tokenizer, text, tmp_path, size=64)["results"]
        assert "".join(result["tokens"]) == result["text"] == text
        assert result["size"] == len(text)
        result = measure_maps(opened, tokenizer, text, tmp_path, size=8)["results"]
        assert result["tokens_per_cell"] == 3
        assert "".join(result["tokens"]) == text
        with pytest.raises(ValueError, match="a text of at least 2 tokens"):
            measure_maps(opened, tokenizer, "a", tmp_path)

    def test_maps_as_csv_and_figure(self, folder, tokenizer, tmp_path):
        """The CSV has every nonzero weight, the figure one map per layer and head for each model."""
        opened = open_saved(folder)
        first = measure_maps(opened, tokenizer, "Call me Ishmael.", tmp_path)
        second = measure_maps(open_saved(f"other={folder}+power=3"), tokenizer, "Another text altogether", tmp_path)
        written = {path.name for path in draw_folder(tmp_path)}
        assert written == {"maps.csv", "maps.png", "maps.svg"}
        with (tmp_path / "maps.csv").open() as handle:
            rows = list(csv.DictReader(handle))
        names = [result["model"]["name"] for result in (first, second)]
        assert {row["model"] for row in rows} == set(names)
        stored = {
            (name, found["layer"], found["head"], query, key): weight
            for name, result in zip(names, (first, second), strict=True)
            for found in result["results"]["maps"]
            for query, line in enumerate(found["weights"])
            for key, weight in enumerate(line)
            if weight
        }
        places = ("layer", "head", "query", "key")
        assert {(row["model"], *(int(row[place]) for place in places)): float(row["weight"]) for row in rows} == stored
        figure = picture(measures()["maps"].blocks([first, second]))
        heads = len({found["head"] for found in first["results"]["maps"]})
        assert [axes.get_ylabel() for axes in figure.axes if axes.get_ylabel()] == ["layer 0", "layer 1"] * 2
        assert [len(axes.images) for axes in figure.axes] == [1] * 4 * heads
        assert "texts are NOT the same" in figure.get_suptitle()
        layer = [found["weights"] for found in first["results"]["maps"] if found["layer"] == 1]
        key = max(range(6), key=lambda key: layer[1][5][key])
        assert figure.axes[heads + 1].images[0].get_array()[5, key] == pytest.approx(layer[1][5][key])
