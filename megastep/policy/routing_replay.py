"""Expert replay: in the policy's MoE layers, each token goes to the experts that the rollout sent it to.

Megatron's router asks its `router_replay` which experts to take, hands it the live scores, and weighs the experts by
what comes back. Ours answers with the recorded experts and *their live scores*, so the router keeps its gradient. A
token without a record (−1: padding, or a token that the engine sampled and never forwarded) gets the live top-k.

    driver     Step.routing [n, layers, K], checked at the door (types.validate)
    rank       this stage's layers only; with sequence parallelism this rank's stretch of the tokens
    router     one tensor per forward pass; a pass under activation recomputation is remembered, in order, until
               backward runs it again

Megatron's own RouterReplay keeps a process-wide list, lets backward passes take from a queue that forward-only passes
fill too, and checks nothing. Here every router keeps what it was given until it has used it; `replayed` raises if
anything is left, and `agreement` tells how often the live router would have chosen the same experts: recorded under
almost the same weights, that is nearly always, and if the routes are shifted by a token it is much less often.
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


class LayerReplay(RouterReplay):
    """What one router takes its experts from. Not registered in Megatron's process-wide list."""

    def __init__(self, layer: int):
        self.layer = layer  # of the whole model, from 0
        self.forget()

    def forget(self, forward_only: bool = True) -> None:
        self.forward_only = forward_only
        self.target: Tensor | None = None  # [tokens, K] of the next forward pass
        self.again: deque[Tensor] = deque()  # of the passes that backward will run again
        self.given = False  # are experts replayed at all
        self.same: Tensor | float = 0.0  # experts that the live router would have taken too
        self.recorded: Tensor | float = 0.0  # experts replayed

    def give(self, target: Tensor) -> None:
        if self.target is not None:
            raise ReplayError(f"layer {self.layer}: a forward pass did not use its routes")
        self.target, self.given = target, True

    def get_replay_topk(
        self, scores, topk, num_groups=None, group_topk=None, default_compute_topk=None
    ):
        """Called by Megatron's router with the live scores [tokens, experts]."""
        live = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if not self.given:
            return live
        in_backward = torch._C._current_graph_task_id() != -1
        target = (self.again.popleft() if self.again else None) if in_backward else self.target
        if target is None:
            raise ReplayError(f"layer {self.layer}: a pass without routes")
        if target.shape != live[1].shape:
            raise ReplayError(
                f"layer {self.layer}: routes {list(target.shape)} for {list(live[1].shape)} choices"
            )
        if not in_backward:
            self.target = None
            # Megatron runs what it will recompute without gradient.
            if not self.forward_only and not torch.is_grad_enabled():
                self.again.append(target)
            self._compare(live[1], target)
        experts = torch.where(target < 0, live[1], target)
        return scores.gather(1, experts), experts

    def _compare(self, live: Tensor, target: Tensor) -> None:
        recorded = target >= 0
        self.same = self.same + ((live.unsqueeze(1) == target.unsqueeze(2)).any(2) & recorded).sum()
        self.recorded = self.recorded + recorded.sum()


def attach(chunk: GPTModel) -> list[LayerReplay]:
    """Give each router of the chunk its replay, in order of depth."""
    routers = [module for module in chunk.modules() if isinstance(module, TopKRouter)]
    if chunk.config.moe_router_fusion and routers:
        raise ReplayError(
            "a fused router chooses its experts before it could be told any: moe_router_fusion is on"
        )
    for router in routers:
        router.router_replay = LayerReplay(router.layer_number - 1)
    return [router.router_replay for router in routers]


def give(layers: list[LayerReplay], routing: np.ndarray, first_layer: int) -> None:
    """The experts of a micro-batch's tokens for the next forward pass.

    routing [T, layers of the chunk, K], -1 where the live router decides.
    """
    mine = parallel.own_stretch(routing)
    for layer in layers:
        experts = torch.from_numpy(mine[:, layer.layer - first_layer].astype(np.int64))
        layer.give(experts.to(parallel.device()))


@contextmanager
def replayed(layers: list[LayerReplay], forward_only: bool) -> Iterator[None]:
    """Around a schedule: starts clean, leaves clean whatever happens, and checks that all that was given was used."""
    for layer in layers:
        layer.forget(forward_only)
    try:
        yield
        for layer in layers:
            if layer.target is not None or layer.again:
                raise ReplayError(f"layer {layer.layer}: not all routes were used")
    finally:
        for layer in layers:
            layer.target, layer.given = None, False
            layer.again.clear()


def agreement(layers: list[LayerReplay]) -> tuple[float, float]:
    """Over all ranks: how many replayed experts the live routers would have taken too, and how many there were."""
    counts = torch.zeros(2, dtype=torch.float64, device=parallel.device())
    for layer in layers:
        counts += torch.stack(
            [
                torch.as_tensor(n, dtype=torch.float64, device=counts.device)
                for n in (layer.same, layer.recorded)
            ]
        )
    dist.all_reduce(counts)
    return tuple(counts.tolist())
