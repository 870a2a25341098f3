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

from megastep.config import Config
from megastep.models.architecture import Architecture, read_architecture
from megastep.plan.activations import Layer, head
from megastep.plan.shares import Share, shares
from megastep.policy.model import PRECISIONS
from megastep.weights.mapping import rows_of

GIB = 1 << 30
H100_GIB = 79.6
RESERVE_GIB, ENGINE_WORK_GIB, ASLEEP_GIB = 6.0, 4.0, 1.0


@dataclass(frozen=True)
class Stage:
    """A rank of one pipeline stage, in bytes."""

    number: int
    share: Share
    optimizer: int  # on the device
    resting: int  # of it, while a colocated engine works
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
    context: int  # tokens of a call, at most

    @property
    def kv_tokens(self) -> int:
        return max(self.kv_room, 0) // self.kv_per_token

    @property
    def holds_a_call(self) -> bool:
        return self.kv_tokens >= self.context


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
        return int(stage.share.weights + stage.resting + RESERVE_GIB * GIB + self.engine.budget)

    @property
    def trains(self) -> bool:
        """Whether training fits, whatever the engines need."""
        return all(self.training(stage) <= self.gpu for stage in self.stages)

    def troubles(self) -> list[str]:
        """Why it does not fit, the worst first; nothing if it does."""
        found = []
        for stage in self.stages:
            found.append((self.training(stage) - self.gpu, self._in_training(stage)))
            if self.config.cluster.colocate:
                found.append((self.rolling_out(stage) - self.gpu, self._in_rollout(stage)))
        engine = self.engine
        if not engine.holds_a_call:
            found.append(
                (
                    engine.context * engine.kv_per_token - engine.kv_room,
                    f"engine: keys and values of one call of {engine.context} tokens have no room; raise "
                    "engine.gpu_memory_utilization or engine.tensor_parallel",
                )
            )
        return [
            f"{why}, {gib(over)} GiB too much"
            for over, why in sorted(found, reverse=True)
            if over > 0
        ]

    def _in_rollout(self, stage: Stage) -> str:
        what = "the weights and the optimizer's part on the GPU" if stage.resting else "the weights"
        share = self.config.engine.gpu_memory_utilization
        return f"rollout on stage {stage.number + 1}: engine.gpu_memory_utilization = {share} leaves no room for {what}"

    def _in_training(self, stage: Stage) -> str:
        share = stage.share
        parts = {
            "weights": share.weights,
            "gradients": share.gradients,
            "optimizer": stage.optimizer,
            "activations": stage.activations,
        }
        largest = max(parts, key=parts.get)
        return f"training on stage {stage.number + 1}: most of it is {largest}, {gib(parts[largest])} GiB"

    @property
    def left(self) -> int:
        """Bytes that the policy's fullest GPU has left; engines on GPUs of their own take what they are told to."""
        used = [self.training(stage) for stage in self.stages]
        if self.config.cluster.colocate:
            used += [self.rolling_out(stage) for stage in self.stages]
        return self.gpu - max(used)

    # ------------------------------------------------------------ what a batch costs

    @property
    def micro_batches(self) -> int:
        """Per rank and optimizer step, if every trajectory has so many tokens and shares none."""
        return micro_batches_per_rank(self.config, self.trajectory_tokens)

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
        return (
            self.config.rollout.prompts
            * self.config.rollout.samples_per_prompt
            * self.trajectory_tokens
        )

    @property
    def route_bytes(self) -> int:
        """Of the experts that a batch has used."""
        experts = self.arch.experts
        if experts is None or not self.config.routing_replay.enabled:
            return 0
        return (
            self.batch_tokens
            * sum(experts.layers)
            * experts.top_k
            * (1 if experts.count <= 256 else 2)
        )


def gib(count: float) -> str:
    return f"{count / GIB:.1f}" if count == 0 or abs(count) >= 0.05 * GIB else f"{count / GIB:.1g}"


def make_plan(
    config: Config,
    gpu_gib: float = H100_GIB,
    trajectory_tokens: int | None = None,
    known_shares: list[Share] | None = None,
) -> Plan:
    """trajectory_tokens: by default those of the longest model call. known_shares: of the same layout, if at hand."""
    arch = read_architecture(config.model.path)
    longest = config.prompt_tokens(arch) + config.rollout.max_response_tokens
    tokens = longest if trajectory_tokens is None else trajectory_tokens
    found = shares(config, arch) if known_shares is None else known_shares
    count = micro_batches_per_rank(config, tokens)
    stages = [
        stage_memory(config, arch, number, share, count) for number, share in enumerate(found)
    ]
    return Plan(
        config,
        arch,
        stages,
        engine_share(config, gpu_gib),
        int(gpu_gib * GIB),
        tokens,
        parameters(arch),
    )


@functools.cache
def parameters(arch: Architecture) -> int:
    return sum(torch.Size(shape).numel() for row in rows_of(arch).values() for _, shape in row.hf)


def micro_batches_per_rank(config: Config, trajectory_tokens: int) -> int:
    """Per rank. A prompt's trajectories are cut into runs that fit a micro-batch, and what is left over of prompts is
    put together (samples/packing.py). One that is longer than the budget is cut too: it has several calls."""
    p, prompts, samples = (
        config.policy.parallel,
        config.mini_batch_prompts,
        config.rollout.samples_per_prompt,
    )
    together = config.budget_tokens // trajectory_tokens  # trajectories of a micro-batch
    if together == 0:
        count = -(-prompts * samples * trajectory_tokens // config.budget_tokens)
    else:
        full, over = divmod(samples, together)
        count = prompts * full + (-(-prompts // (together // over)) if over else 0)
    rounds_of = p.pipeline if p.virtual > 1 else 1
    return -(-count // (config.data_ranks * rounds_of)) * rounds_of


# ---------------------------------------------------------------- one rank


def stage_memory(
    config: Config,
    arch: Architecture,
    number: int,
    share: Share,
    micro_batches: int,
    cuda: bool = True,
) -> Stage:
    policy = config.policy
    size, tokens = PRECISIONS[policy.precision].itemsize, config.train.micro_batch_tokens
    layers = [
        Layer(arch, policy.parallel, first + i, size, cuda)
        for first, count in zip(share.first_layer, share.layers)
        for i in range(count)
    ]
    flight = in_flight(policy.parallel.pipeline, policy.parallel.virtual, number, micro_batches)
    of_layers = [layer.kept(policy.recompute) * tokens * flight for layer in layers]
    stay = len(layers) - policy.activation_offload_layers
    in_layer = (
        max(layer.again(policy.recompute) + layer.gradients for layer in layers) * tokens
        + share.largest_weight
    )
    one_layer = max(sum(layer.parts.values()) for layer in layers) * tokens
    fraction, has_reference = config.optimizer.cpu_offload_fraction, config.loss.kl_coef > 0
    return Stage(
        number=number,
        share=share,
        optimizer=int(share.optimizer * (1 - fraction)),
        resting=int(share.optimizer * (1 - fraction)) if fraction > 0 else 0,
        kept=int(sum(of_layers[:stay])),
        in_flight=flight,
        in_layer=int(in_layer),
        in_head=head(arch, policy.parallel, tokens, policy.logits_chunk_rows, size)
        if share.has_head
        else 0,
        reference=int(share.weights + one_layer) if has_reference else 0,
        host=int(
            _optimizer_on_host(config, share)
            + sum(of_layers[stay:])
            + share.weights * has_reference
        ),
    )


def _optimizer_on_host(config: Config, share: Share) -> float:
    """Bytes in CPU memory: what waits there while a colocated engine works, or the part that lives there. Beside its
    weights and moments, 12 bytes, that part has its gradients there, at the least another 4: torch rounds pinned
    memory up to powers of two."""
    if config.optimizer.cpu_offload_fraction > 0:
        return share.owned * 16 * config.optimizer.cpu_offload_fraction
    return share.optimizer if config.cluster.colocate else 0


def in_flight(pipeline: int, virtual: int, stage: int, micro_batches: int) -> float:
    """Micro-batches whose activations a stage holds at once, at most. Megatron's schedules: one forward, one backward;
    interleaved, chunks of layers come and go instead."""
    if virtual == 1:
        return min(micro_batches, pipeline - stage)
    chunks = 2 * (pipeline - stage - 1) + (virtual - 1) * pipeline + 1
    return min(chunks, micro_batches * virtual) / virtual


def engine_share(config: Config, gpu_gib: float) -> EngineShare:
    arch = read_architecture(config.model.path)
    size, tensor = PRECISIONS[config.policy.precision].itemsize, config.engine.tensor_parallel
    weights = parameters(arch) * size // tensor
    budget = int(config.engine.gpu_memory_utilization * gpu_gib * GIB)
    kv_heads = max(arch.kv_heads // tensor, 1)
    return EngineShare(
        budget=budget,
        weights=weights,
        kv_room=int(budget - weights - ENGINE_WORK_GIB * GIB),
        kv_per_token=2 * arch.layers * kv_heads * arch.head_dim * size,
        context=config.context_tokens(arch),
    )
