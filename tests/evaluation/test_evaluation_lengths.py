"""Loss by length: against transformers' loss, against losses by hand, and in bounded memory."""

from __future__ import annotations

import math

import pytest
import torch
from huggingface_models import IDS, SIZE, small_model, token_rows
from transformers import AutoModelForCausalLM, Gemma2Config

from softplus_attention.evaluation.lengths import by_position, loss_by_length, texts_of, token_losses
from softplus_attention.evaluation.loss import TokenLoss
from softplus_attention.huggingface import SoftplusGPTConfig, SoftplusGPTForCausalLM


@pytest.fixture(scope="module")
def model():
    return small_model("softplus-gpt")


def documents(*lengths: int) -> list[torch.Tensor]:
    return [token_rows(1, length, seed=length)[0] for length in lengths]


class TestTokenLoss:
    @pytest.mark.parametrize("family", ["softplus-gpt", "llama", "gpt-neox", "gpt2"])
    def test_equals_transformers(self, family):
        model, ids = small_model(family), token_rows(3, 20)
        losses = TokenLoss(model)(ids)
        assert losses.shape == (3, 19)
        with torch.no_grad():
            expected = model(ids, labels=ids).loss
        torch.testing.assert_close(losses.mean(), expected)

    def test_chunks(self, model, monkeypatch):
        whole = TokenLoss(model)(token_rows(3, 20))
        monkeypatch.setattr("softplus_attention.evaluation.loss.LOGITS", 128 * 7)
        torch.testing.assert_close(TokenLoss(model)(token_rows(3, 20)), whole)

    @pytest.mark.parametrize("cap", [0.5, 30.0])
    def test_soft_capped_logits(self, cap):
        size = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16}
        config = Gemma2Config(**size, num_key_value_heads=2, intermediate_size=32, final_logit_softcapping=cap)
        torch.manual_seed(0)
        model, ids = AutoModelForCausalLM.from_config(config).eval(), token_rows(2, 12) % 64
        with torch.no_grad():
            model.get_output_embeddings().weight.mul_(5)
            expected = model(ids, labels=ids).loss
        losses = TokenLoss(model)
        torch.testing.assert_close(losses(ids).mean(), expected)
        assert losses.in_pieces is True

    def test_unknown_change_of_logits(self, model, monkeypatch):
        """Logits are halved after the output layer, which the config does not say: whole logits are used."""
        ids, forward = token_rows(2, 12), model.forward

        def halved(*arguments, **kwargs):
            outputs = forward(*arguments, **kwargs)
            outputs.logits = outputs.logits / 2
            return outputs

        monkeypatch.setattr(model, "forward", halved)
        losses = TokenLoss(model)
        logits = model(ids).logits[:, :-1].flatten(0, 1)
        expected = torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten())
        torch.testing.assert_close(losses(ids).mean(), expected.detach())
        assert losses.in_pieces is False

    def test_other_models_use_chunks(self, model):
        losses = TokenLoss(model)
        losses(token_rows(1, 12))
        assert losses.in_pieces is True


class TestTexts:
    def test_sequences_do_not_cross_documents(self):
        found = texts_of(documents(70, 31, 128), 32)
        assert found.rows.shape == (2 + 4, 32)
        assert found.documents == 2
        assert found.rows[:2].flatten().equal(documents(70)[0][:64])
        assert found.cut(8).shape == (24, 8)

    def test_max_rows_are_spread_and_reproducible(self):
        rows = texts_of(documents(320, 640), 32, 5).rows
        assert len(rows) == 5
        assert rows.equal(texts_of(documents(320, 640), 32, 5).rows)
        everything = texts_of(documents(320, 640), 32).rows
        assert rows[0].equal(everything[0])
        assert rows[-1].equal(everything[-1])

    def test_longer_than_any_document(self):
        with pytest.raises(ValueError, match="`lengths` must be no longer than the longest document, got 64 tokens"):
            texts_of(documents(63), 64)


class KnownLosses:
    """The loss of token t is log(1 + t)."""

    device = torch.device("cpu")

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        return (1 + torch.arange(1, ids.shape[1]).float()).log().expand(len(ids), -1)


class TestCurve:
    def test_positions_by_hand(self):
        losses = KnownLosses()(torch.zeros(2, 8, dtype=torch.long))
        means = by_position(losses, 2)
        assert [(first, end) for first, end, _ in means] == [(1, 2), (2, 4), (4, 8)]
        assert means[0][2] == pytest.approx(math.log(2))
        assert means[1][2] == pytest.approx((math.log(3) + math.log(4)) / 2)
        assert means[2][2] == pytest.approx(sum(math.log(1 + t) for t in range(4, 8)) / 4)

    def test_equals_transformers_at_each_length(self, model):
        texts = texts_of(documents(130, 64), 32)
        curve = loss_by_length(model, texts, [8, 16, 32], batch_tokens=64)
        for length, loss in zip(curve.lengths, curve.loss, strict=True):
            rows = texts.rows.reshape(-1, length)
            with torch.no_grad():
                assert loss == pytest.approx(model(rows, labels=rows).loss.item(), rel=1e-5)
        assert curve.targets == [24 * 7, 12 * 15, 6 * 31]
        assert all(error > 0 for error in curve.error)
        assert [(a, b) for a, b, _ in curve.positions[32]] == [(1, 8), (8, 16), (16, 32)]

    def test_batch_size_does_not_matter(self, model):
        rows = token_rows(5, 16)
        torch.testing.assert_close(
            token_losses(model, rows, batch_tokens=16), token_losses(model, rows, batch_tokens=1000)
        )

    def test_length_that_does_not_divide(self, model):
        with pytest.raises(ValueError, match="`lengths` must be divisors of the longest, 32, got 12"):
            loss_by_length(model, texts_of(documents(64), 32), [12])

    def test_logits_in_bounded_memory(self, monkeypatch):
        """At 64 times the training length, logits exist for 512 tokens at a time."""
        torch.manual_seed(0)
        config = SoftplusGPTConfig(**{**SIZE, **IDS, "num_hidden_layers": 1}, max_position_embeddings=64)
        model = SoftplusGPTForCausalLM(config).eval()
        monkeypatch.setattr("softplus_attention.evaluation.loss.LOGITS", 128 * 512)
        seen = []
        model.lm_head.register_forward_hook(lambda _, __, out: seen.append(out.shape[:-1].numel()))
        curve = loss_by_length(model, texts_of(documents(4096), 4096), [64, 4096])
        assert max(seen) <= 512
        assert all(math.isfinite(loss) for loss in curve.loss)
