"""Models with a sharded sequence or with sharded heads, in real processes over gloo."""

import pytest
from several import together


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict:
    folder = tmp_path_factory.mktemp("models")
    return together("sharded_models", request.param, folder) | {"processes": request.param}


def test_gradients_of_a_sharded_sequence(found: dict) -> None:
    """Every parameter, in float64. A learned power is float32 in its module, so its gradients are rounded."""
    assert len(found["sequences"]) == 16
    for name, error in found["sequences"].items():
        assert error < (1e-6 if "GPT" in name else 1e-12), name


def test_targets_on_few_processes(found: dict) -> None:
    """The loss is the mean over all targets, not a mean of the processes' means."""
    assert found["few targets"] < 1e-6


def test_losses_of_sharded_sequences(found: dict) -> None:
    assert len(found["lengths"]) == 4
    for name, error in found["lengths"].items():
        assert error < 1e-6, name  # losses are float32


def test_processes_agree_on_what_fits(found: dict) -> None:
    """Otherwise some processes would wait for the others forever."""
    *messages, fitting = found["no room"]
    assert len({*messages}) == 1
    assert f"on each of {found['processes']} processes, and" in messages[0]
    assert fitting == 16384 // 4096


def test_sharded_heads_match_one_process(found: dict) -> None:
    models = {name: one for name, one in found["heads"].items() if name != "refused"}
    assert len(models) == 4
    for name, one in models.items():
        assert one["logits"] < 1e-12, name
        assert one["gradients"] < 1e-11, name
        assert one["generated"], name
        assert one["share"] < 1.05 / found["processes"], name


def test_heads_that_cannot_be_sharded(found: dict) -> None:
    assert "`tp_size` must be a divisor of `num_key_value_heads`, 1" in found["heads"]["refused"]


def test_module_with_sharded_heads(found: dict) -> None:
    module = found["module"]
    assert ["`num_kv_heads` must be a multiple" in module["refused"][0], "ALiBi" in module["refused"][1]] == [True] * 2
    assert len(module) == 4
    assert max(module[power] for power in ("learned", "learned-log", "15")) < 1e-12


def test_cache_and_weights_raise(found: dict) -> None:
    cache, weights = "use_cache=False", "output_attentions must be False"
    for error, text in zip(found["refused"], [cache, weights] * 2, strict=True):
        assert text in error


def test_local_attention_raises(found: dict) -> None:
    """Attention that ignores the record would see the tokens of one process only."""
    expected = {"module": "context_parallel_attention", "loss by length": "in each of 3 layers"}
    assert found["one process"].keys() == {"softmax", "module", "nothing", "loss by length"}
    for name, error in found["one process"].items():
        assert expected.get(name, "needs an attention of softplus_attention") in error, name


def test_context_parallel_of_transformers_raises(found: dict) -> None:
    assert set(found["trainer"]) == {"SoftplusGPT", "Llama"}
    for name, error in found["trainer"].items():
        assert "inside torch's context_parallel each rank would attend to its own part" in error, name
