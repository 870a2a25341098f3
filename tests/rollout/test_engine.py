"""Arguments of vLLM: every key of `engine` and of other sections that an engine needs. vLLM itself
runs in tests/rollout/test_end_to_end.py."""

import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import psutil
import pytest

from megastep.config import load
from megastep.rollout.engine import (
    Setup,
    _arguments,
    _environment,
    _sampling_params,
    _unlink_shared_memory,
)
from megastep.rollout.generation import Sampling

CHASE = "configs/chase.yaml"
ON_CPU = Setup(
    index=3,
    backend="shm",
    has_gpu=False,
    gpu_ids=None,
    own_weights=False,
    threads=5,
    folder=".",
    log=None,
)
ON_GPU = Setup(
    index=0,
    backend="ipc",
    has_gpu=True,
    gpu_ids=("2", "5"),
    own_weights=True,
    threads=5,
    folder=".",
    log=None,
)


def arguments(*given: str, setup: Setup = ON_CPU) -> dict:
    return _arguments(load(CHASE, list(given), has_cuda=True), setup)


@pytest.mark.parametrize(
    "given, name, value",
    [
        ("engine.tensor_parallel=2", "tensor_parallel_size", 2),
        ("engine.max_model_len=200", "max_model_len", 200),
        ("engine.max_model_len=null", "max_model_len", 512),  # the model's positions
        ("engine.max_sequences=17", "max_num_seqs", 17),
        ("engine.gpu_memory_utilization=0.35", "gpu_memory_utilization", 0.35),
        ("policy.precision=bf16", "dtype", "bfloat16"),
        ("policy.precision=fp32", "dtype", "float32"),
        ("engine.quantization=fp8", "quantization", "fp8"),
        ("engine.quantization=null", "quantization", None),
        ("train.seed=40", "seed", 43),  # engine 3
        ("sync.verify=true", "additional_config", {"sync_verify": True}),
        ("sync.verify=false", "additional_config", {"sync_verify": False}),
        ("model.path=configs/models/tiny-qwen3-moe", "model", "configs/models/tiny-qwen3-moe"),
    ],
)
def test_keys_reach_vllm(given, name, value):
    assert arguments(given)[name] == value


def test_arguments_that_depend_on_the_placement():
    here = arguments()
    there = arguments("cluster.colocate=true", setup=ON_GPU)
    assert here["weight_transfer_config"] == {"backend": "megastep_shm"}
    assert there["weight_transfer_config"] == {"backend": "megastep_ipc"}
    assert (here["load_format"], there["load_format"]) == ("dummy", "auto")
    assert (here["enable_sleep_mode"], there["enable_sleep_mode"]) == (False, True)
    assert not arguments("cluster.colocate=false", setup=ON_GPU)["enable_sleep_mode"]
    assert here["enable_return_routed_experts"] and here["logprobs_mode"] == "processed_logprobs"


def test_threads_of_an_engine_on_a_cpu():
    config = load(CHASE, [])
    assert _environment(config, ON_CPU)["OMP_NUM_THREADS"] == "5"
    assert "OMP_NUM_THREADS" not in _environment(config, ON_GPU)


@pytest.mark.parametrize("setup", [ON_CPU, ON_GPU], ids=["cpu", "gpu"])
def test_the_executor_is_never_rays(setup):
    """vLLM would choose it in a placement group, and wait for GPUs that ranks and engines hold."""
    assert arguments(setup=setup)["distributed_executor_backend"] == "uni"
    two = arguments("engine.tensor_parallel=2", setup=setup)
    assert two["distributed_executor_backend"] == "mp"


def test_one_process_less_without_tensor_parallelism():
    name = "VLLM_ENABLE_V1_MULTIPROCESSING"  # 1: vLLM replaces `uni` on a CPU
    assert _environment(load(CHASE, []), ON_CPU)[name] == "0"
    two = load(CHASE, ["engine.tensor_parallel=2"], has_cuda=True)
    assert _environment(two, ON_CPU)[name] == "1"


def test_shared_memory_is_unlinked_though_a_process_ends_meanwhile(monkeypatch, tmp_path):
    """Compile workers of torch come and go while an engine starts."""
    segment = Path(f"/dev/shm/megastep-test-{os.getpid()}")
    segment.touch()

    def end():
        raise psutil.NoSuchProcess(1234)

    maps = [SimpleNamespace(path=str(segment)), SimpleNamespace(path=str(tmp_path))]
    children = [
        SimpleNamespace(memory_maps=end),
        SimpleNamespace(memory_maps=lambda: maps),
    ]
    monkeypatch.setattr(psutil.Process, "children", lambda self, recursive: children)
    try:
        _unlink_shared_memory()
        assert not segment.exists() and tmp_path.exists()
    finally:
        segment.unlink(missing_ok=True)


def test_kv_cache_memory_on_a_cpu():
    assert arguments("engine.cpu_kv_gb=0.5")["kv_cache_memory_bytes"] == 1 << 29
    assert "kv_cache_memory_bytes" not in arguments(setup=ON_GPU)


def test_gpus_of_a_colocated_engine():
    assert _environment(load(CHASE, []), ON_GPU)["CUDA_VISIBLE_DEVICES"] == "2,5"


def test_sampling_reaches_vllm(monkeypatch):
    """tests/rollout/test_task.py: from rollout.temperature, top_p and top_k to `Sampling`."""
    vllm = ModuleType("vllm")
    params = ModuleType("vllm.sampling_params")
    vllm.SamplingParams = SimpleNamespace
    params.RequestOutputKind = SimpleNamespace(FINAL_ONLY="final only")
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", params)
    sampling = Sampling(
        max_tokens=8, temperature=0.6, top_p=0.9, top_k=4, seed=5, stop_token_ids=(1, 2)
    )
    given = _sampling_params(sampling, routing_start=12)
    assert (given.max_tokens, given.temperature, given.top_p, given.top_k, given.seed) == (
        8,
        0.6,
        0.9,
        4,
        5,
    )
    assert given.stop_token_ids == [1, 2] and given.routed_experts_prompt_start == 12
    assert given.ignore_eos and given.logprobs == 0
