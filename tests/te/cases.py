"""Functions that ranks with and without Transformer Engine run; see tests/cases.py."""

from collections import Counter
from types import SimpleNamespace
from unittest import mock

import torch
from megatron.core.optimizer import Adam
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.transformer.moe import experts

from megastep.checkpoint import saver
from megastep.config import ParallelConfig, PolicyConfig
from megastep.distributed import cpu
from megastep.models.architecture import read_architecture
from megastep.policy.optimizer import _allocate_adam_state
from tests import ranks
from tests.cases import UPDATE, batches_of, by_step, make_worker
from tests.policy.updates import EXPERTS, make_groups
from tests.weights.coverage import count_mapped_parameters


def count_parameters(wanted: list[tuple]) -> dict[tuple, int]:
    """Of each (model, layout, folder, world, degrees) that is wanted; the ranks share the work."""
    rank, world_of_tests, _ = ranks.current
    found = {}
    for model, layout, folder, world, degrees in wanted[rank::world_of_tests]:
        policy = PolicyConfig(parallel=ParallelConfig(**degrees))
        arch = read_architecture(folder)
        found[model, layout] = count_mapped_parameters(arch, policy, world, device="cpu")
    return found


def update(folder, layout: dict, settings: dict) -> dict:
    """Logprobs of tries, then one update: metrics, and on rank 0 the new weights by HF name.

    Routing is replayed where the model has the experts of the rollouts.
    """
    moe = read_architecture(folder).experts
    replay = moe is not None and moe.count == EXPERTS
    worker = make_worker(folder, layout, {**UPDATE, "routing_replay.enabled": replay, **settings})
    batches = batches_of(worker, make_groups(replay), budget_tokens=100)
    assert any(batch.trie.branches for batch in batches)
    logprobs = by_step(batches, worker.logprobs(batches))
    calls = _count_forward_calls(worker)
    swiglu = mock.patch.object(
        experts, "weighted_bias_swiglu_impl", wraps=experts.weighted_bias_swiglu_impl
    )
    with swiglu as activation:
        metrics = worker.learn([batches])[0].metrics
    assert metrics["train/skipped"] == 0.0
    return {
        "logprobs": logprobs,
        "loss": metrics["train/loss"],
        "grad_norm": metrics["train/grad_norm"],
        "replayed": "routing_replay/agreement" in metrics,
        "weights": {name: tensor.float().numpy() for name, tensor in worker.hf_tensors()},
        "classes": _classes(worker),
        "calls": calls | Counter(expert_activation=activation.call_count),
    }


def _classes(worker) -> Counter[str]:
    """How many objects of each class the policy has, by package and class."""
    modules = [module for chunk in worker.chunks for module in chunk.modules()]
    optimizers = [part.optimizer for part in worker.optimizer.chained_optimizers]
    return Counter(
        f"{type(thing).__module__.partition('.')[0]}.{type(thing).__name__}"
        for thing in modules + optimizers
    )


def _count_forward_calls(worker) -> Counter[str]:
    """Filled by hooks while the model runs: forward calls by class, recomputation included."""
    calls: Counter[str] = Counter()

    def count(module, *_) -> None:
        calls[type(module).__name__] += 1

    for chunk in worker.chunks:
        for module in chunk.modules():
            module.register_forward_pre_hook(count)
    return calls


class OnGPU(torch.Tensor):
    """A weight that Megatron's hybrid optimizer leaves to FusedAdam, and so its fp32 copy."""

    is_cuda = True

    def to(self, *args, **kwargs):
        return self if args == ("cuda",) else super().to(*args, **kwargs)


def steps_of_hybrid_adam(loaded: int, steps: int) -> int:
    """FusedAdam's count after some steps, in a hybrid optimizer whose checkpoint has `loaded`."""
    cpu.install()
    weight = torch.zeros(4, dtype=torch.bfloat16).as_subclass(OnGPU).requires_grad_()
    hybrid = HybridDeviceOptimizer(
        [{"params": [weight], "lr": 1e-3}],
        offload_fraction=0.0,
        cpu_optimizer_cls=torch.optim.AdamW,
        gpu_optimizer_cls=Adam,
        param_update_in_fp32=True,
        overlap_cpu_optimizer_d2h_h2d=False,
    )

    def load(state: dict) -> None:
        hybrid.load_state_dict({**hybrid.state_dict(), **state["optimizer"]})

    part = SimpleNamespace(
        optimizer=hybrid,
        state_dict=lambda: {"optimizer": {"param_groups": hybrid.state_dict()["param_groups"]}},
        load_state_dict=load,
    )
    worker = SimpleNamespace(optimizer=SimpleNamespace(chained_optimizers=[part]))
    _allocate_adam_state(worker.optimizer)
    saver._load_optimizer(worker, {"adam_step": loaded, "optimizer0": {"param_state": None}})
    for _ in range(steps):
        weight.grad = torch.ones_like(weight)
        hybrid.step()
    (fused,) = hybrid.sub_optimizers
    assert type(fused).__name__ == "FusedAdam"
    return fused.param_groups[0]["step"]
