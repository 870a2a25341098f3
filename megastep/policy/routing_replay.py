"""Routing replay (R3): the policy's MoE layers route each token to the experts of its rollout.

Megatron's router asks its `router_replay` for the experts, passes it the live scores, and weighs
the experts by the scores that it returns. Ours returns the recorded experts with *their live
scores*, so the router keeps its gradient. A token without a record (-1: padding, or a token that
the engine sampled and never forwarded) gets the live top-k.

    recorded   Step.routing [n, layers, K], validated before training (samples/validation.py)
    rank       the layers of its stage; with sequence parallelism its shard of the tokens
    router     one tensor per forward pass; the tensors of passes under activation recomputation are
               queued until backward recomputes them

Megatron's own RouterReplay keeps a process-wide list, fills the queue of the backward passes in
forward-only passes too, and checks nothing. Here every router keeps its routing until it has used
it, and `replayed` raises if any is left. `agreement` counts how often the live router would have
chosen the same experts: nearly always if the routing was recorded under almost the same weights,
much less often if it is shifted by a token.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay
from torch import Tensor

from megastep.distributed import parallel
from megastep.errors import ReplayError

# Balancing types whose routers do not call get_replay_topk; the second is of Megatron-Core 0.19.
OWN_SELECTION = ("sinkhorn", "quantile_balancing")


class LayerReplay(RouterReplay):
    """The recorded routing of one router. Not registered in Megatron's process-wide list."""

    def __init__(self, layer: int):
        self.layer = layer  # index in the whole model, from 0
        self.reset()

    def reset(self, forward_only: bool = True) -> None:
        self.forward_only = forward_only
        self.target: Tensor | None = None  # [tokens, K] of the next forward pass
        self.recompute_targets: deque[Tensor] = deque()  # of the passes that backward recomputes
        self.enabled = False  # whether any routing was set
        self.agreed: Tensor | float = 0.0  # replayed choices that the live router makes too
        self.recorded: Tensor | float = 0.0  # replayed choices

    def set_target(self, target: Tensor) -> None:
        if self.target is not None:
            raise ReplayError(f"layer {self.layer}: a forward pass did not use its routing")
        self.target = target
        self.enabled = True

    def get_replay_topk(
        self, scores, topk, num_groups=None, group_topk=None, default_compute_topk=None
    ):
        """Called by Megatron's router with the live scores [tokens, experts]."""
        live = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if not self.enabled:
            return live
        _, live_experts = live  # [tokens, K]
        in_backward = torch._C._current_graph_task_id() != -1
        target = self._next_target(in_backward)
        if target.shape != live_experts.shape:
            raise ReplayError(
                f"layer {self.layer}: routing {list(target.shape)} for "
                f"{list(live_experts.shape)} choices"
            )
        if not in_backward:
            # Megatron runs the passes that it will recompute without gradient.
            if not self.forward_only and not torch.is_grad_enabled():
                self.recompute_targets.append(target)
            self._compare(live_experts, target)
        experts = torch.where(target < 0, live_experts, target)
        return scores.gather(1, experts), experts

    def _next_target(self, in_backward: bool) -> Tensor:
        if in_backward:
            target = self.recompute_targets.popleft() if self.recompute_targets else None
        else:
            target = self.target
            self.target = None
        if target is None:
            raise ReplayError(f"layer {self.layer}: a pass without routing")
        return target

    def _compare(self, live: Tensor, target: Tensor) -> None:
        recorded = target >= 0
        chosen_live = (live.unsqueeze(1) == target.unsqueeze(2)).any(2)  # [tokens, K]
        self.agreed = self.agreed + (chosen_live & recorded).sum()
        self.recorded = self.recorded + recorded.sum()


def attach(chunk: GPTModel) -> list[LayerReplay]:
    """Add a LayerReplay to each router of the chunk, in order of depth."""
    routers = [module for module in chunk.modules() if isinstance(module, TopKRouter)]
    config = chunk.config
    if config.moe_router_fusion and routers:
        raise ReplayError(
            "routing replay does not support moe_router_fusion: a fused router selects its experts "
            "without asking for the recorded ones"
        )
    if config.moe_router_load_balancing_type in OWN_SELECTION and routers:
        raise ReplayError(
            "routing replay does not support moe_router_load_balancing_type "
            f"{config.moe_router_load_balancing_type}: it selects experts without asking for the "
            "recorded ones"
        )
    for router in routers:
        router.router_replay = LayerReplay(router.layer_number - 1)
    return [router.router_replay for router in routers]


def set_routing(layers: list[LayerReplay], routing: np.ndarray, first_layer: int) -> None:
    """Set the routing of a micro-batch for the next forward pass.

    routing [T, layers of the chunk, K], -1 where the live router decides.
    """
    own = parallel.sequence_shard(routing)
    for layer in layers:
        experts = torch.from_numpy(own[:, layer.layer - first_layer].astype(np.int64))
        layer.set_target(experts.to(parallel.device()))


@contextmanager
def replayed(layers: list[LayerReplay], forward_only: bool) -> Iterator[None]:
    """Around a schedule: resets all layers, and checks that it used all routing that was set."""
    for layer in layers:
        layer.reset(forward_only)
    try:
        yield
        for layer in layers:
            if layer.target is not None or layer.recompute_targets:
                raise ReplayError(f"layer {layer.layer}: not all routing was used")
    finally:
        for layer in layers:
            layer.target = None
            layer.enabled = False
            layer.recompute_targets.clear()


def agreement(layers: list[LayerReplay]) -> tuple[float, float]:
    """Over all ranks: replayed choices that the live routers make too, and all replayed choices."""
    counts = torch.zeros(2, dtype=torch.float64, device=parallel.device())

    def as_count(value: Tensor | float) -> Tensor:
        return torch.as_tensor(value, dtype=torch.float64, device=counts.device)

    for layer in layers:
        counts += torch.stack([as_count(layer.agreed), as_count(layer.recorded)])
    dist.all_reduce(counts)
    agreed, recorded = counts.tolist()
    return agreed, recorded
