"""The memory of every kind of GPU in a run, and what a batch costs, from a config alone.

    policy rank     weights, gradients, optimizer (shares.py), activations (activations.py)
    engine GPU      weights, room for keys and values
    colocated       both on one GPU: training while the engine sleeps, rollouts while the policy rests, with its weights

Assumed, because only a GPU could tell: RESERVE_GIB for CUDA, NCCL and what allocators waste; ENGINE_WORK_GIB for
vLLM's largest forward pass; ASLEEP_GIB for a sleeping engine.
"""

import functools
from dataclasses import dataclass

import torch

from megastep.architecture import Architecture, read_architecture
from megastep.config import Config
from megastep.plan.activations import Layer, head
from megastep.plan.shares import Share, shares
from megastep.policy.model import PRECISIONS
from megastep.sync.convert import rows_of

GIB = 1 << 30
H100_GIB = 79.6
RESERVE_GIB, ENGINE_WORK_GIB, ASLEEP_GIB = 6.0, 4.0, 1.0


@dataclass(frozen=True)
class Stage:
    """A rank of one pipeline stage, in bytes."""

    number: int
    share: Share
    optimizer: int  # on the device
    kept: int  # activations of all micro-batches in flight
    in_flight: float  # micro-batches, as parts of this stage's layers
    in_layer: int  # gradients of the layer that backward is in, and what is computed again for it
    in_head: int  # hidden states and logits at the head
    reference: int  # the policy's own weights, while those of the KL's reference are in their place
    host: int  # in CPU memory

    @property
    def activations(self) -> int:
        """At the worst moment: the head's work, that of a layer and the reference's do not meet."""
        return max(self.kept + self.in_layer, self.kept + self.in_head, self.reference)

    @property
    def policy(self) -> int:
        share = self.share
        return share.weights + share.gradients + self.optimizer + self.activations


@dataclass(frozen=True)
class EngineShare:
    """One GPU of an engine, in bytes."""

    budget: int  # what vLLM takes in all
    weights: int
    kv_room: int
    kv_per_token: int

    @property
    def kv_tokens(self) -> int:
        return max(self.kv_room, 0) // self.kv_per_token


@dataclass(frozen=True)
class Plan:
    config: Config
    arch: Architecture
    stages: list[Stage]
    engine: EngineShare
    gpu: int  # bytes of a GPU
    trajectory_tokens: int
    parameters: int

    # ------------------------------------------------------------ does it fit

    def training(self, stage: Stage) -> int:
        """Bytes of the GPU of such a rank while the policy trains."""
        asleep = ASLEEP_GIB * GIB if self.config.cluster.colocate else 0
        return int(stage.policy + RESERVE_GIB * GIB + asleep)

    def rolling_out(self, stage: Stage) -> int:
        """The same while a colocated engine works."""
        return int(stage.share.weights + RESERVE_GIB * GIB + self.engine.budget)

    def troubles(self) -> list[str]:
        """Why it does not fit, the worst first; nothing if it does."""
        found = []
        for stage in self.stages:
            found.append((self.training(stage) - self.gpu, self._in_training(stage)))
            if self.config.cluster.colocate:
                found.append((self.rolling_out(stage) - self.gpu, f"rollout on stage {stage.number + 1}: "
                              f"engine.gpu_memory = {self.config.engine.gpu_memory} leaves no room for the weights"))
        context = self.config.context_tokens(self.arch)
        if self.engine.kv_tokens < context:
            found.append((context * self.engine.kv_per_token - self.engine.kv_room,
                          f"engine: keys and values of one call of {context} tokens have no room; raise "
                          "engine.gpu_memory or engine.tensor"))
        return [f"{why}, {gib(over)} GiB too much" for over, why in sorted(found, reverse=True) if over > 0]

    def _in_training(self, stage: Stage) -> str:
        share = stage.share
        parts = {"weights": share.weights, "gradients": share.gradients, "optimizer": stage.optimizer,
                 "activations": stage.activations}
        largest = max(parts, key=parts.get)
        return f"training on stage {stage.number + 1}: most of it is {largest}, {gib(parts[largest])} GiB"

    @property
    def left(self) -> int:
        """Bytes that the fullest GPU has left."""
        used = [self.training(stage) for stage in self.stages]
        if self.config.cluster.colocate:
            used += [self.rolling_out(stage) for stage in self.stages]
        return self.gpu - max(used)

    # ------------------------------------------------------------ what a batch costs

    @property
    def micro_batches(self) -> int:
        """Per rank and optimizer step, if every trajectory has all its tokens and shares none."""
        return _micro_batches(self.config, self.trajectory_tokens)

    @property
    def bubble(self) -> float:
        """The share of an update in which a pipeline stage waits."""
        p = self.config.policy.parallel
        return (p.pipeline - 1) / (p.virtual * self.micro_batches + p.pipeline - 1)

    @property
    def sync_bytes(self) -> int:
        """Of one push, into each engine."""
        return self.parameters * PRECISIONS[self.config.policy.precision].itemsize

    @property
    def batch_tokens(self) -> int:
        return self.config.rollout.prompts * self.config.rollout.samples * self.trajectory_tokens

    @property
    def route_bytes(self) -> int:
        """Of the experts that a batch has used."""
        experts = self.arch.experts
        if experts is None or not self.config.replay.enabled:
            return 0
        return self.batch_tokens * sum(experts.layers) * experts.top_k * (1 if experts.count <= 256 else 2)


def gib(count: float) -> str:
    return f"{count / GIB:.1f}" if count == 0 or abs(count) >= 0.05 * GIB else f"{count / GIB:.1g}"


def make_plan(config: Config, gpu_gib: float = H100_GIB, trajectory_tokens: int | None = None,
              known_shares: list[Share] | None = None) -> Plan:
    """trajectory_tokens: by default those of the longest model call. known_shares: of the same layout, if at hand."""
    arch = read_architecture(config.model.path)
    tokens = trajectory_tokens or config.prompt_tokens(arch) + config.rollout.max_response_tokens
    parameters = _parameters(arch)
    found = known_shares or shares(config, arch)
    count = _micro_batches(config, tokens)
    stages = [stage_memory(config, arch, number, share, count) for number, share in enumerate(found)]
    gpu = int(gpu_gib * GIB)
    return Plan(config, arch, stages, _engine(config, arch, parameters, gpu), gpu, tokens, parameters)


@functools.cache
def _parameters(arch: Architecture) -> int:
    return sum(torch.Size(shape).numel() for row in rows_of(arch).values() for _, shape in row.hf)


def _micro_batches(config: Config, trajectory_tokens: int) -> int:
    p = config.policy.parallel
    tokens = config.mini_batch_prompts * config.rollout.samples * trajectory_tokens
    count = max(-(-tokens // (config.data_ranks * config.budget_tokens)), 1)
    rounds_of = p.pipeline if p.virtual > 1 else 1
    return -(-count // rounds_of) * rounds_of


# ---------------------------------------------------------------- one rank


def stage_memory(config: Config, arch: Architecture, number: int, share: Share, micro_batches: int,
                 cuda: bool = True) -> Stage:
    policy = config.policy
    size, tokens = PRECISIONS[policy.precision].itemsize, config.train.micro_batch_tokens
    layers = [Layer(arch, policy.parallel, first + i, size, cuda)
              for first, count in zip(share.first_layer, share.layers) for i in range(count)]
    offloaded = policy.offload_layers
    flight = in_flight(policy.parallel.pipeline, policy.parallel.virtual, number, micro_batches)
    kept = sum(layer.kept(policy.recompute) for layer in layers[: len(layers) - offloaded]) * tokens * flight
    in_layer = max(layer.again(policy.recompute) + layer.gradients for layer in layers) * tokens + share.largest_weight
    one_layer = max(sum(layer.parts.values()) for layer in layers) * tokens
    fraction, has_reference = config.optimizer.offload_fraction, config.loss.kl > 0
    rests = share.optimizer if config.cluster.colocate else int(share.optimizer * fraction)
    return Stage(
        number=number,
        share=share,
        optimizer=int(share.optimizer * (1 - fraction)),
        kept=int(kept),
        in_flight=flight,
        in_layer=int(in_layer),
        in_head=head(arch, policy.parallel, tokens, policy.head_rows, size) if share.has_head else 0,
        reference=int(share.weights + one_layer) if has_reference else 0,
        host=rests + (share.weights if has_reference else 0),
    )


def in_flight(pipeline: int, virtual: int, stage: int, micro_batches: int) -> float:
    """Micro-batches whose activations a stage holds at once, at most. Megatron's schedules: one forward, one backward;
    interleaved, chunks of layers come and go instead."""
    if virtual == 1:
        return min(micro_batches, pipeline - stage)
    chunks = 2 * (pipeline - stage - 1) + (virtual - 1) * pipeline + 1
    return min(chunks, micro_batches * virtual) / virtual


def _engine(config: Config, arch: Architecture, parameters: int, gpu: int) -> EngineShare:
    size, tensor = PRECISIONS[config.policy.precision].itemsize, config.engine.tensor
    weights = parameters * size // tensor
    budget = int(config.engine.gpu_memory * gpu)
    kv_heads = max(arch.kv_heads // tensor, 1)
    return EngineShare(
        budget=budget,
        weights=weights,
        kv_room=int(budget - weights - ENGINE_WORK_GIB * GIB),
        kv_per_token=2 * arch.layers * kv_heads * arch.head_dim * size,
    )
