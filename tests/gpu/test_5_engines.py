"""D3: after weight syncs, a sleep or a restart, every engine generates with the policy's weights.
Not run yet.

`sync.verify` is off: its checksums synchronize the GPU, which would hide a missing wait. The
engine's tokens and logprobs are compared with transformers instead.
"""

import os
import signal
from dataclasses import dataclass, field

import pytest

# 2 MB: above the bucket of 1 MB.
WIDE = {"vocab_size": 4096}
LARGE = dict(
    hidden_size=1024,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=128,
    intermediate_size=4096,
    vocab_size=32000,
)
SYNCS = 3
BUCKET_MB = 1
GPU_SHARE = 0.3


@dataclass(frozen=True)
class Scene:
    gpus: int
    backend: str
    ranks: int = 1
    layout: dict = field(default_factory=dict)
    engines: int = 1
    tensor_parallel: int = 1


SCENES = {
    "ipc": Scene(1, "ipc"),
    "ipc_tp2": Scene(2, "ipc", ranks=2, layout=dict(tensor=2), tensor_parallel=2),
    "ipc_two_engines": Scene(2, "ipc", ranks=2, layout=dict(expert=2), engines=2),
    "nccl": Scene(2, "nccl"),
    "nccl_two_ranks": Scene(3, "nccl", ranks=2, layout=dict(pipeline=2)),
    "nccl_two_engines": Scene(4, "nccl", ranks=2, layout=dict(expert=2), engines=2),
    "nccl_tp2": Scene(4, "nccl", ranks=2, layout=dict(tensor=2), tensor_parallel=2),
}


def config_of(scene: Scene, folder):
    from megastep.config import Config, ParallelConfig

    config = Config()
    config.model.path = str(folder)
    config.policy.ranks = scene.ranks
    config.policy.parallel = ParallelConfig(**scene.layout)
    config.engine.num_engines = scene.engines
    config.engine.tensor_parallel = scene.tensor_parallel
    config.engine.max_model_len = 64
    config.rollout.max_response_tokens = 32
    config.engine.max_sequences = 8
    config.engine.gpu_memory_utilization = GPU_SHARE
    config.engine.health_every_s = 1.0
    config.cluster.colocate = scene.backend == "ipc"
    config.sync.backend = scene.backend
    config.sync.bucket_mb = BUCKET_MB
    return config


def scenes(*names: str) -> list:
    return [
        pytest.param(SCENES[name], id=name, marks=pytest.mark.gpus(SCENES[name].gpus))
        for name in names
    ]


@pytest.fixture
def start(models, tmp_path, free_gpus):
    """`start(scene, model, shape)`: a cluster, which ends with the test."""
    from contextlib import ExitStack

    from megastep.cluster import Cluster
    from tests.engines import Rollouts

    with ExitStack() as exits:

        def enter(scene: Scene, model: str = "qwen3_moe", verify: bool = False, **shape):
            config = config_of(scene, models(model, **shape)[0])
            config.sync.verify = verify
            return Rollouts(exits.enter_context(Cluster(config, log=tmp_path / "log.txt")))

        yield enter


def check_engines(rollouts, folder, figure) -> None:
    from tests.gpu.checks import engine_errors

    for name, error in engine_errors(rollouts, folder).items():
        figure(f"sync/{name}", error)


@pytest.mark.parametrize("model", ["qwen2_tied", "qwen3_moe"])
@pytest.mark.parametrize("scene", scenes(*SCENES))
def test_d3_after_a_weight_sync_engines_equal_the_policy(scene, model, start, figure, tmp_path):
    from tests.gpu.checks import change_and_sync

    rollouts = start(scene, model, **WIDE)
    check_engines(rollouts, tmp_path / "first", figure)  # of the start
    for seed in range(SYNCS):  # later ones reuse the connections of the first
        change_and_sync(rollouts, seed)
        check_engines(rollouts, tmp_path / f"synced-{seed}", figure)


@pytest.mark.parametrize("scene", scenes("ipc", "nccl", "nccl_tp2"))
def test_d3_a_large_model_is_synced(scene, start, figure, tmp_path):
    """Copies take long enough to be overtaken, if anything does not wait for them."""
    from tests.gpu.checks import change_and_sync

    rollouts = start(scene, "qwen3_yarn", **LARGE)
    for seed in range(SYNCS):
        change_and_sync(rollouts, seed)
        check_engines(rollouts, tmp_path / f"synced-{seed}", figure)


@pytest.mark.parametrize("scene", scenes("ipc", "ipc_tp2", "nccl", "nccl_tp2"))
def test_d3_checksums_agree(scene, start):
    """sync.verify raises otherwise."""
    from tests.gpu.checks import change_and_sync

    rollouts = start(scene, verify=True, **WIDE)
    for seed in range(SYNCS):
        change_and_sync(rollouts, seed)


@pytest.mark.parametrize("scene", scenes("ipc", "ipc_two_engines", "nccl", "nccl_two_engines"))
def test_d3_a_restarted_engine_equals_the_policy(scene, start, figure, tmp_path):
    from tests.gpu.checks import change_and_sync
    from tests.processes import wait_for

    rollouts = start(scene, **WIDE)
    change_and_sync(rollouts, seed=0)
    slot = rollouts.fleet.slots[0]
    killed = slot.pid
    os.kill(killed, signal.SIGKILL)
    wait_for(lambda: slot.serving and slot.pid != killed, 300)
    check_engines(rollouts, tmp_path / "restarted", figure)
    change_and_sync(rollouts, seed=1)
    check_engines(rollouts, tmp_path / "synced", figure)


@pytest.mark.parametrize("scene", scenes("ipc", "ipc_tp2"))
def test_d3_a_sleeping_engine_frees_its_memory(scene, start, figure, tmp_path):
    """On every GPU of the engine; it wakes with the policy's weights."""
    import torch

    from tests.gpu.checks import change_and_sync

    def free_bytes(rank) -> int:
        import torch

        return torch.cuda.mem_get_info()[0]

    rollouts = start(scene, **WIDE)
    share = GPU_SHARE * torch.cuda.mem_get_info()[1]
    awake = rollouts.on_ranks(free_bytes)
    rollouts.fleet.sleep()
    asleep = rollouts.on_ranks(free_bytes)
    for before, after in zip(awake, asleep, strict=True):
        figure("sleep/memory", 1 - (after - before) / share)
    change_and_sync(rollouts, seed=0)
    check_engines(rollouts, tmp_path / "woken", figure)
