"""What `benchmarks/offload.py --gpu` does, as far as it can be seen without one."""

import importlib.util
import pathlib
import sys

import pytest

from m6jax.modeling.config import ModelConfig, MoEConfig

BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def benchmark():
    """The script as a module, and the one that it imports from beside it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        spec = importlib.util.spec_from_file_location("offload_script", BENCHMARKS / "offload.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module
        for name in ("timing", "offload_gpu"):
            sys.modules.pop(name, None)


class TestLargest:
    @pytest.mark.parametrize("limit", [8, 15, 16, 100, 1000])
    def test_is_found_to_an_eighth(self, benchmark, limit):
        tried = []

        def trial(experts):
            tried.append(experts)
            return {"experts": experts} if experts <= limit else None

        best = benchmark.offload_gpu.largest(trial, 8)["experts"]
        assert best <= limit < best + max(8, best // 8) + 8
        assert len(tried) < 14

    def test_refuses_a_device_on_which_nothing_trains(self, benchmark):
        with pytest.raises(RuntimeError, match="a model of 8 experts does not train here"):
            benchmark.offload_gpu.largest(lambda experts: None, 8)


@pytest.mark.parametrize(
    ("resident", "copied", "copies", "share"),
    [(1.0, 1.0, 0.5, 1.0), (1.0, 1.5, 0.5, 0.0), (1.0, 1.1, 0.5, 0.8), (1.0, 2.0, 0.5, 0.0)],
)
def test_share_of_copy_time_that_is_hidden(benchmark, resident, copied, copies, share):
    got = benchmark.offload_gpu.hidden_share(resident, copied, copies)
    assert got == pytest.approx(share)


def test_a_trial_measures_steps_and_copies(benchmark, monkeypatch):
    batch = benchmark.offload_gpu.batch_of(64, rows=8, length=16)
    monkeypatch.setattr(benchmark.offload_gpu, "batch_of", lambda vocab_size: batch)
    config = ModelConfig(
        vocab_size=64,
        num_layers=2,
        embed_dim=128,
        num_heads=2,
        mlp_dim=256,
        moe=MoEConfig(num_experts=16, num_prototypes=2),
        dtype="bfloat16",
        param_dtype="bfloat16",
        remat="FULL",
    )
    result = benchmark.trial_of("offload", 16, 2, config)
    assert result["experts"] == 16
    assert result["parameters"] > 2 * 16 * 2 * 128 * 256
    assert result["tokens_per_second"] == pytest.approx(8 * 16 / result["step_seconds"])
    assert result["copy_seconds"] > 0


def test_a_host_without_room_is_refused_before_anything_is_made(benchmark, monkeypatch):
    monkeypatch.setattr(benchmark.offload_gpu, "free_host_bytes", lambda: 10**6)
    with pytest.raises(MemoryError, match=r"bytes on a host with 1,000,000 free"):
        benchmark.trial_of("offload", 64, 1)
