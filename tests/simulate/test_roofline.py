"""X8: the roofline against arithmetic by hand."""

import pytest

from megastep.config import load
from megastep.errors import ConfigError
from megastep.plan.planning import make_plan
from megastep.simulate.hardware import Hardware
from megastep.simulate.roofline import MicroBatchSize, Roofline


def roofline(path: str, *overrides: str, assume: tuple[str, ...] = ()) -> Roofline:
    config = load(path, overrides, has_cuda=True)
    return Roofline(config, make_plan(config), Hardware().changed(list(assume)))


@pytest.fixture(scope="module")
def dense() -> Roofline:
    """8.19e9 parameters, 0.62e9 each in embedding and head; one GPU per engine."""
    return roofline("configs/h100/qwen3-8b.yaml")


@pytest.fixture(scope="module")
def moe() -> Roofline:
    return roofline("configs/h100/qwen3-30b-a3b.yaml")


def test_active_parameters_are_those_in_the_models_name(moe):
    """30B-A3B: without the embedding, which is a lookup."""
    assert moe.shape.active == pytest.approx(3.03e9, rel=0.01)


def test_decoding_a_small_batch_reads_the_weights(dense):
    iteration = dense.iteration(1)
    assert iteration.weights == pytest.approx(16.38e9 / (3.35e12 * 0.8), rel=0.01)
    assert iteration.compute == 0 and iteration.links == 0


def test_decoding_a_large_batch_computes(dense):
    iteration = dense.iteration(1024)
    assert iteration.compute == pytest.approx(2 * 7.57e9 * 1024 / (989e12 * 0.5), rel=0.01)
    assert iteration.weights == 0


def test_attention_reads_the_kv_cache(dense):
    """2 × 36 layers × 8 heads × 128 × 2 bytes."""
    assert dense.iteration(1).per_kv_token == pytest.approx(147_456 / (3.35e12 * 0.8))


def test_a_token_touches_its_experts_only(moe):
    """8 of 128 at first, all of them in a large batch; two GPUs per engine."""
    bandwidth = 3.35e12 * 0.8
    experts = 48 * 128 * 3 * 2048 * 768
    others = moe.plan.parameters - experts
    one = moe.iteration(1).weights
    assert one == pytest.approx((others + experts * 8 / 128) * 2 / 2 / bandwidth)
    # 1 - (1 - 8/128)^64 of the experts
    assert moe.iteration(64).weights == pytest.approx(
        (others + experts * (1 - (1 - 8 / 128) ** 64)) * 2 / 2 / bandwidth
    )


def test_tensor_parallelism_adds_all_reduces(moe):
    """2 per layer, each with its latency and 2 × (n - 1) / n of the hidden states."""
    moved = 2 * (2 - 1) / 2 * 64 * 2048 * 2
    assert moe.iteration(64).links == pytest.approx(2 * 48 * (15e-6 + moved / (450e9 * 0.7)))


def test_prefill_costs_two_flops_per_active_parameter(dense):
    attention = 4 * 36 * 32 * 128 * (1000 * 500 + 1000 * 7000)
    flops = 2 * dense.shape.active * 1000 + attention
    assert dense.prefill(1000, 7000) == pytest.approx(flops / (989e12 * 0.5))


def test_an_update_costs_six_flops_per_parameter():
    """Without collectives and optimizer: what a second micro-batch adds."""
    one = ("policy.ranks=1", "policy.parallel.tensor=1", "engine.num_engines=1")
    single = roofline("configs/h100/qwen3-8b.yaml", *one, "policy.recompute=[]")
    size = MicroBatchSize(16384, 0.0)
    added = single.update([[size], [size]], 0) - single.update([[size]], 0)
    assert added == pytest.approx(6 * single.shape.active * 16384 / (989e12 * 0.5))
    again = roofline("configs/h100/qwen3-8b.yaml", *one, "policy.recompute=[full]")
    recomputed = again.update([[size], [size]], 0) - again.update([[size]], 0)
    layers = single.shape.active - single.shape.head
    assert recomputed - added == pytest.approx(2 * layers * 16384 / (989e12 * 0.5))


def test_ranks_wait_for_the_slowest_of_a_round(dense):
    small, large = MicroBatchSize(1000, 0.0), MicroBatchSize(16000, 0.0)
    assert dense.update([[small, large]], 0) == dense.update([[large, large]], 0)


def test_a_pipeline_has_its_bubble(moe):
    """Two stages: one more micro-batch of time."""
    size = MicroBatchSize(16384, 0.0)
    times = [moe.update([[size]] * count, 0) for count in (1, 2, 3)]
    one = times[1] - times[0]
    assert times[2] - times[1] == pytest.approx(one)
    assert times[0] == pytest.approx(2 * one + moe._optimizer_step)


def test_old_logprobs_are_another_forward_pass(dense):
    size = MicroBatchSize(16384, 0.0)
    assert dense.update([[size]], 1) > 1.2 * dense.update([[size]], 0)


def test_a_weight_sync_crosses_the_network_if_disaggregated():
    """Each rank sends its part; then the workers of the engines, all on one node, share theirs."""
    network = 50e9 * 0.7
    nvlink = 450e9 * 0.7
    disaggregated = roofline("configs/h100/qwen3-8b-disaggregated.yaml")
    colocated = roofline("configs/h100/qwen3-8b.yaml")
    traffic = disaggregated.plan.sync_traffic
    assert 0 < max(traffic.sent) < traffic.by_worker
    loading = colocated.sync() - max(colocated.plan.sync_traffic.gathered) / nvlink
    assert disaggregated.sync() - loading == pytest.approx(
        max(traffic.sent) / network + traffic.by_worker / nvlink
    )
    assert disaggregated.switch("sleep") == 0 < colocated.switch("sleep")


@pytest.mark.parametrize("name", ["memory_bytes_s", "link_efficiency", "dense_efficiency"])
def test_an_assumption_reaches_the_times(name):
    value = getattr(Hardware(), name) / 2
    slower = roofline("configs/h100/qwen3-30b-a3b.yaml", assume=(f"{name}={value}",))
    usual = roofline("configs/h100/qwen3-30b-a3b.yaml")

    def total(times: Roofline) -> float:
        return times.iteration(1).base + times.update([[MicroBatchSize(16384, 1e8)]], 0)

    assert total(slower) > 1.005 * total(usual)


@pytest.mark.parametrize(
    "text", ["speed=1", "memory_bytes_s=x", "memory_bytes_s=-1", "link_efficiency=2", "layer_s"]
)
def test_a_wrong_assumption_is_one_line(text):
    with pytest.raises(ConfigError, match=f"--assume {text}") as error:
        Hardware().changed([text])
    assert len(error.value.problems) == 1
