"""Memory of every GPU of a run, and the cost of a batch, from a config alone.

    policy rank     weights, gradients, optimizer (model_states.py), activations (activations.py)
    engine GPU      weights, KV cache
    colocated       training while the engine sleeps; rollouts while the policy is offloaded, except
                    its weights; weight syncs without the KV cache
    weight sync     buffers of both sides (weight_sync.py)

Constants that only a GPU could measure: RESERVE_GIB for CUDA, NCCL and allocator fragmentation,
ENGINE_WORK_GIB for vLLM's largest forward pass, ASLEEP_GIB for a sleeping engine.
"""

import functools
from dataclasses import dataclass

import torch

from megastep.config import Config
from megastep.models.architecture import Architecture, read_architecture
from megastep.plan.activations import Layer, head_bytes
from megastep.plan.model_states import ModelStates, model_states
from megastep.plan.weight_sync import (
    GPUS_PER_NODE,
    SyncMemory,
    Traffic,
    sync_memory,
    sync_traffic,
)
from megastep.policy.megatron_settings import supports_deepep
from megastep.policy.model import PRECISIONS
from megastep.weights.mapping import param_mappings

GIB = 1 << 30
H100_GIB = 79.6
RESERVE_GIB = 6.0
ENGINE_WORK_GIB = 4.0
ASLEEP_GIB = 1.0
# Tokens that a channel of DeepEP receives at once from a rank.
DEEPEP_TOKENS = 256
DEEPEP_TOKENS_ACROSS_NODES = 720  # the largest of its configurations
DEEPEP_RDMA_TOKENS = 128


@dataclass(frozen=True)
class Stage:
    """A rank of one pipeline stage, in bytes."""

    number: int
    states: ModelStates
    optimizer: int  # on the device
    optimizer_in_rollout: int  # on the device while a colocated engine works
    kept: int  # activations of all micro-batches in flight
    in_flight: float  # micro-batches, as fractions of this stage's layers
    layer_peak: int  # backward of one layer: gradients, and what it recomputes
    head_peak: int  # hidden states and logits at the head
    reference_peak: int  # the policy's weights while the KL's reference takes their place
    teacher: int  # weights of the teacher of a distillation
    # Of Transformer Engine and DeepEP, also while a colocated engine works:
    fp8_copies: int
    placeholders: int
    dispatcher: int
    host: int  # in CPU memory

    @property
    def activations(self) -> int:
        """At the peak; those of a layer, the head and the reference never coincide."""
        return max(self.kept + self.layer_peak, self.kept + self.head_peak, self.reference_peak)

    @property
    def extras(self) -> int:
        return self.fp8_copies + self.placeholders + self.dispatcher

    @property
    def policy(self) -> int:
        states = self.states.weights + self.states.gradients + self.optimizer
        return states + self.teacher + self.extras + self.activations


@dataclass(frozen=True)
class EngineMemory:
    """One GPU of an engine, in bytes."""

    budget: int  # what vLLM may use
    weights: int
    kv_cache: int
    kv_per_token: int
    context_tokens: int  # of a call, at most

    @property
    def kv_tokens(self) -> int:
        return max(self.kv_cache, 0) // self.kv_per_token

    @property
    def holds_a_call(self) -> bool:
        return self.kv_tokens >= self.context_tokens


@dataclass(frozen=True)
class Plan:
    config: Config
    arch: Architecture
    stages: list[Stage]
    engine: EngineMemory
    sync: SyncMemory
    gpu_bytes: int
    trajectory_tokens: int
    parameters: int

    # ------------------------------------------------------------ does it fit

    def training_bytes(self, stage: Stage) -> int:
        """Of a GPU of this stage, while the policy trains."""
        asleep_gib = ASLEEP_GIB if self.config.cluster.colocate else 0
        return int(stage.policy + RESERVE_GIB * GIB + asleep_gib * GIB)

    def rollout_bytes(self, stage: Stage) -> int:
        """Of a GPU of this stage, while a colocated engine works."""
        policy = stage.states.weights + stage.teacher + stage.extras + stage.optimizer_in_rollout
        return int(policy + RESERVE_GIB * GIB + self.engine.budget)

    def weight_sync_bytes(self, stage: Stage) -> int:
        """Of a GPU of this stage, during a weight sync; a colocated engine has no KV cache then."""
        if self.config.cluster.colocate:
            policy = stage.states.weights + stage.teacher + stage.optimizer_in_rollout
            engine = ASLEEP_GIB * GIB + self.engine.weights + self.sync.engine
            return int(policy + stage.extras + self.sync.rank + engine + RESERVE_GIB * GIB)
        policy = stage.states.weights + stage.states.gradients + stage.optimizer + stage.teacher
        return int(policy + stage.extras + self.sync.rank + RESERVE_GIB * GIB)

    @property
    def engine_sync_bytes(self) -> int:
        """Of a disaggregated engine's GPU, during a weight sync; no forward pass runs then."""
        return int(self.engine.budget - ENGINE_WORK_GIB * GIB + self.sync.engine)

    @property
    def training_fits(self) -> bool:
        """Whether training fits; engines may still not."""
        return all(self.training_bytes(stage) <= self.gpu_bytes for stage in self.stages)

    def problems(self) -> list[str]:
        """Why the config does not fit, the largest excess first; empty if it does."""
        found = []
        for stage in self.stages:
            excess = self.training_bytes(stage) - self.gpu_bytes
            found.append((excess, self._training_problem(stage)))
            if self.config.cluster.colocate:
                excess = self.rollout_bytes(stage) - self.gpu_bytes
                found.append((excess, self._rollout_problem(stage)))
            excess = self.weight_sync_bytes(stage) - self.gpu_bytes
            found.append((excess, self._sync_problem(stage)))
        if not self.config.cluster.colocate:
            found.append((self.engine_sync_bytes - self.gpu_bytes, self._engine_sync_problem()))
        engine = self.engine
        if not engine.holds_a_call:
            excess = engine.context_tokens * engine.kv_per_token - engine.kv_cache
            found.append((excess, self._engine_problem()))
        found.sort(reverse=True)
        return [f"{problem}, {gib(excess)} GiB too much" for excess, problem in found if excess > 0]

    def _training_problem(self, stage: Stage) -> str:
        parts = {
            "weights": stage.states.weights,
            "gradients": stage.states.gradients,
            "optimizer": stage.optimizer,
            "activations": stage.activations,
            "the teacher's weights": stage.teacher,
            "FP8 copies of weights": stage.fp8_copies,
        }
        name, size = max(parts.items(), key=lambda item: item[1])
        return f"training on stage {stage.number + 1}: mostly {name}, {gib(size)} GiB"

    def _rollout_problem(self, stage: Stage) -> str:
        what = "the weights"
        if stage.optimizer_in_rollout:
            what = "the weights and the optimizer's part on the GPU"
        utilization = self.config.engine.gpu_memory_utilization
        return (
            f"rollout on stage {stage.number + 1}: engine.gpu_memory_utilization = {utilization} "
            f"leaves no room for {what}"
        )

    def _sync_problem(self, stage: Stage) -> str:
        problem = f"weight sync on stage {stage.number + 1}: buffers of {gib(self.sync.buffer)} GiB"
        if self.config.cluster.colocate:
            problem += f" and {gib(self.sync.engine)} GiB in the engine"
        return problem

    def _engine_sync_problem(self) -> str:
        utilization = self.config.engine.gpu_memory_utilization
        return (
            f"weight sync: engine.gpu_memory_utilization = {utilization} leaves no room for "
            f"{gib(self.sync.engine)} GiB of received weights"
        )

    def _engine_problem(self) -> str:
        return (
            f"engine: no room for the KV cache of one call of {self.engine.context_tokens} tokens; "
            "raise engine.gpu_memory_utilization or engine.tensor_parallel"
        )

    @property
    def free_bytes(self) -> int:
        """Of the policy's fullest GPU; disaggregated engines use a fixed fraction of theirs."""
        used = [self.training_bytes(stage) for stage in self.stages]
        used += [self.weight_sync_bytes(stage) for stage in self.stages]
        if self.config.cluster.colocate:
            used += [self.rollout_bytes(stage) for stage in self.stages]
        return self.gpu_bytes - max(used)

    # ------------------------------------------------------------ cost of a batch

    @property
    def micro_batches(self) -> int:
        """Per rank and optimizer step, for trajectories of this length without shared prefixes."""
        return micro_batches_per_rank(self.config, self.trajectory_tokens)

    @property
    def bubble(self) -> float:
        """The fraction of an update in which a pipeline stage is idle."""
        p = self.config.policy.parallel
        return (p.pipeline - 1) / (p.virtual * self.micro_batches + p.pipeline - 1)

    @property
    def sync_bytes(self) -> int:
        """Of one weight sync, per engine."""
        return self.parameters * PRECISIONS[self.config.policy.precision].itemsize

    @functools.cached_property
    def sync_traffic(self) -> Traffic:
        return sync_traffic(self.config, self.arch, [stage.states for stage in self.stages])

    @property
    def batch_tokens(self) -> int:
        rollout = self.config.rollout
        return rollout.prompts * rollout.samples_per_prompt * self.trajectory_tokens

    @property
    def routing_bytes(self) -> int:
        """Of the routed experts of a batch."""
        experts = self.arch.experts
        if experts is None or not self.config.routing_replay.enabled:
            return 0
        index_bytes = 1 if experts.count <= 256 else 2
        return self.batch_tokens * sum(experts.layers) * experts.top_k * index_bytes


def gib(count: float) -> str:
    is_small = 0 < abs(count) < 0.05 * GIB
    return f"{count / GIB:.1g}" if is_small else f"{count / GIB:.1f}"


def make_plan(
    config: Config,
    gpu_gib: float = H100_GIB,
    trajectory_tokens: int | None = None,
    states: list[ModelStates] | None = None,
) -> Plan:
    """trajectory_tokens: by default those of the longest model call. states: if already known."""
    arch = read_architecture(config.model.path)
    if trajectory_tokens is None:
        trajectory_tokens = config.prompt_tokens(arch) + config.rollout.max_response_tokens
    if states is None:
        states = model_states(config, arch)
    micro_batches = micro_batches_per_rank(config, trajectory_tokens)
    return Plan(
        config=config,
        arch=arch,
        stages=[
            stage_memory(config, arch, number, of_stage, micro_batches, teacher)
            for number, (of_stage, teacher) in enumerate(zip(states, teacher_bytes(config)))
        ],
        engine=engine_memory(config, gpu_gib),
        sync=sync_memory(config, arch),
        gpu_bytes=int(gpu_gib * GIB),
        trajectory_tokens=trajectory_tokens,
        parameters=parameters(arch),
    )


def teacher_bytes(config: Config) -> list[int]:
    """The teacher's weights on a rank of each pipeline stage."""
    if config.loss.teacher is None:
        return [0] * config.policy.parallel.pipeline
    itemsize = PRECISIONS[config.policy.precision].itemsize
    stages = model_states(config, read_architecture(config.loss.teacher))
    return [stage.parameters * itemsize for stage in stages]


@functools.cache
def parameters(arch: Architecture) -> int:
    shapes = [shape for mapping in param_mappings(arch).values() for _, shape in mapping.hf]
    return sum(torch.Size(shape).numel() for shape in shapes)


def micro_batches_per_rank(config: Config, trajectory_tokens: int) -> int:
    """Micro-batches of an optimizer step on each rank, as samples/packing.py packs them.

    A prompt's trajectories fill whole micro-batches; the remainders of several prompts share one.
    A trajectory longer than the budget is split between its calls.

    Example: 4 prompts × 8 trajectories of 5 tokens, a budget of 16 tokens. 3 trajectories fit, so a
    prompt fills 2 micro-batches and leaves 2 trajectories; a micro-batch holds the remainder of one
    prompt (3 // 2). In all 4 × 2 + 4 = 12 micro-batches, 6 on each of 2 ranks.
    """
    prompts = config.mini_batch_prompts
    samples = config.rollout.samples_per_prompt
    per_micro_batch = config.budget_tokens // trajectory_tokens
    if per_micro_batch == 0:
        count = -(-prompts * samples * trajectory_tokens // config.budget_tokens)
    else:
        full, remainder = divmod(samples, per_micro_batch)
        count = prompts * full
        if remainder:
            count += -(-prompts // (per_micro_batch // remainder))
    p = config.policy.parallel
    multiple_of = p.pipeline if p.virtual > 1 else 1
    return -(-count // (config.data_ranks * multiple_of)) * multiple_of


# ---------------------------------------------------------------- one rank


def stage_memory(
    config: Config,
    arch: Architecture,
    number: int,
    states: ModelStates,
    micro_batches: int,
    teacher: int = 0,
    cuda: bool = True,
) -> Stage:
    policy = config.policy
    itemsize = PRECISIONS[policy.precision].itemsize
    tokens = config.train.micro_batch_tokens
    layers = [
        Layer(arch, policy.parallel, first + i, itemsize, cuda)
        for first, count in zip(states.first_layer, states.layers)
        for i in range(count)
    ]
    flight = in_flight(policy.parallel.pipeline, policy.parallel.virtual, number, micro_batches)
    kept = [layer.kept(policy.recompute) * tokens * flight for layer in layers]
    on_device = len(layers) - policy.activation_offload_layers
    backward = max(layer.recomputed(policy.recompute) + layer.gradients for layer in layers)
    head_peak = 0
    if states.has_head:
        head_peak = head_bytes(arch, policy.parallel, tokens, policy.logits_chunk_rows, itemsize)
    reference_peak = 0.0
    host = _optimizer_on_host(config, states) + sum(kept[on_device:])
    if config.loss.kl_coef > 0:
        forward = max(sum(layer.parts.values()) for layer in layers) * tokens
        reference_peak = states.weights + forward
        host += states.weights
    offloaded = config.optimizer.cpu_offload_fraction
    optimizer = int(states.optimizer * (1 - offloaded))
    fuses_gradients = policy.megatron.get("gradient_accumulation_fusion", cuda)
    return Stage(
        number=number,
        states=states,
        optimizer=optimizer,
        # Megatron's hybrid optimizer cannot move its part off the GPU.
        optimizer_in_rollout=optimizer if offloaded > 0 else 0,
        kept=int(sum(kept[:on_device])),
        in_flight=flight,
        layer_peak=int(backward * tokens + (0 if fuses_gradients else states.largest_weight)),
        head_peak=head_peak,
        reference_peak=int(reference_peak),
        teacher=teacher,
        fp8_copies=states.fp8_copies,
        placeholders=states.placeholders if fuses_gradients else 0,
        dispatcher=dispatcher_bytes(config, arch) if cuda else 0,
        host=int(host),
    )


def dispatcher_bytes(config: Config, arch: Architecture) -> int:
    """Buffers of DeepEP, at most, as its csrc/config.hpp computes them.

    Whether the GPU nodes have DeepEP is unknown here: without it there are none.
    """
    policy = config.policy
    default = "flex" if supports_deepep(policy) else "alltoall"
    dispatcher = policy.megatron.get("moe_token_dispatcher_type", default)
    if arch.experts is None or dispatcher != "flex":
        return 0
    ranks = policy.parallel.expert * policy.parallel.expert_tensor_size
    nodes = -(-ranks // GPUS_PER_NODE)
    channels = policy.megatron.get("moe_deepep_num_sms", 20) // 2
    # Hidden state, source, and room for 128 experts' indices, weights and scales.
    token_bytes = arch.hidden * 2 + 16 + 128 * (8 + 4 + 4)
    if nodes == 1:
        return channels * ranks * DEEPEP_TOKENS * token_bytes
    nvlink = channels * GPUS_PER_NODE * DEEPEP_TOKENS_ACROSS_NODES * token_bytes
    rdma = channels * nodes * DEEPEP_RDMA_TOKENS * token_bytes * 2
    return nvlink + rdma


def _optimizer_on_host(config: Config, states: ModelStates) -> float:
    """Bytes in CPU memory: the offloaded fraction, or all of it while a colocated engine works.

    An offloaded parameter takes 12 bytes for weight and moments, and at least 4 for its gradient:
    torch rounds pinned memory up to powers of two.
    """
    if config.optimizer.cpu_offload_fraction > 0:
        return states.optimizer_parameters * 16 * config.optimizer.cpu_offload_fraction
    return states.optimizer if config.cluster.colocate else 0


def in_flight(pipeline: int, virtual: int, stage: int, micro_batches: int) -> float:
    """Micro-batches whose activations a stage holds at the peak of Megatron's schedules.

    1F1B; interleaved, it holds chunks of layers instead: a fraction of a micro-batch each.
    """
    if virtual == 1:
        return min(micro_batches, pipeline - stage)
    chunks = 2 * (pipeline - stage - 1) + (virtual - 1) * pipeline + 1
    return min(chunks, micro_batches * virtual) / virtual


def engine_weights(config: Config, arch: Architecture) -> int:
    """Bytes; engine.quantization leaves the embedding and the head in the policy's precision."""
    itemsize = PRECISIONS[config.policy.precision].itemsize
    if config.engine.quantization is None:
        return parameters(arch) * itemsize
    outside = arch.vocab * arch.hidden * (1 if arch.tied else 2)
    return parameters(arch) - outside + outside * itemsize


def engine_memory(config: Config, gpu_gib: float) -> EngineMemory:
    arch = read_architecture(config.model.path)
    itemsize = PRECISIONS[config.policy.precision].itemsize
    tensor = config.engine.tensor_parallel
    weights = engine_weights(config, arch) // tensor
    budget = int(config.engine.gpu_memory_utilization * gpu_gib * GIB)
    kv_heads = max(arch.kv_heads // tensor, 1)
    return EngineMemory(
        budget=budget,
        weights=weights,
        kv_cache=int(budget - weights - ENGINE_WORK_GIB * GIB),
        kv_per_token=2 * arch.layers * kv_heads * arch.head_dim * itemsize,
        context_tokens=config.context_tokens(arch),
    )
