"""Seconds of prefill, decode, update and weight sync, from a config and `Hardware` alone.

An iteration of an engine, which samples one token of each of B sequences:

    weights    bytes of the dense layers, and of the experts that B tokens touch    } the longer
    compute    FLOPs of B tokens                                                    } of the two
    KV cache   bytes of all contexts
    links      two all-reduces per layer, with tensor parallelism
    fixed      iteration_s, and layer_s per layer if the kernels would be shorter

An update: forward, backward and recomputation of every micro-batch, tensor- and expert-parallel
collectives without overlap, the pipeline's bubble, the reduction of gradients, Adam. Ranks wait for
the slowest micro-batch of each round.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

from megastep.config import Config
from megastep.models.architecture import Architecture
from megastep.plan.planning import Plan, engine_weights, parameters
from megastep.policy.model import PRECISIONS
from megastep.simulate.hardware import Hardware

BACKWARD = 2.0  # FLOPs of a backward pass / of a forward pass
GRADIENT_BYTES = 4
ADAM_BYTES = 30  # read and written per parameter: fp32 weight and moments, gradient, bf16 weight
HOST_ADAM_BYTES = 28
TRANSFER_BYTES = 6  # per parameter on the CPU: its gradient there, its bf16 weight back


class Iteration(NamedTuple):
    """Parts of an iteration of an engine, in seconds, and what each cached token adds."""

    weights: float
    compute: float
    links: float
    fixed: float
    per_kv_token: float

    @property
    def base(self) -> float:
        return self.weights + self.compute + self.links + self.fixed


class MicroBatchSize(NamedTuple):
    tokens: int
    pairs: float  # of a token and one that it attends to


class Times(Protocol):
    """What the simulation asks; all in seconds."""

    @property
    def call_s(self) -> float:
        """Between an agent and its engine."""

    def iteration(self, sequences: int) -> Iteration: ...

    def prefill(self, new_tokens: int, cached_tokens: int) -> float: ...

    def update(self, rounds: list[list[MicroBatchSize]], forward_passes: int) -> float:
        """Of a mini-batch: rounds[i] holds micro-batch i of every data-parallel rank.
        forward_passes: those without backward."""

    def step(self) -> float:
        """Of the driver, per training step."""

    def sync(self) -> float: ...

    def switch(self, what: str) -> float:
        """sleep, wake, offload or onload, if colocated; pause."""


@dataclass(frozen=True)
class Roofline:
    config: Config
    plan: Plan
    hardware: Hardware

    @property
    def call_s(self) -> float:
        return self.hardware.call_s

    # ------------------------------------------------------------ engine

    def iteration(self, sequences: int) -> Iteration:
        config = self.config
        hardware = self.hardware
        tensor = config.engine.tensor_parallel
        bandwidth = hardware.memory_bytes_s * hardware.memory_efficiency
        weights = self._touched_bytes(sequences) / tensor / bandwidth
        compute = 2 * self.shape.active * sequences / tensor / self._prefill_flops
        links = 0.0
        if tensor > 1:
            # Two all-reduces of a layer, each a reduce-scatter and an all-gather.
            hidden_bytes = sequences * self.plan.arch.hidden * self.shape.itemsize
            moved = 2 * (tensor - 1) / tensor * hidden_bytes
            speed, latency = self._link(tensor)
            links = 2 * self.plan.arch.layers * (latency + moved / speed)
        shortest = self.plan.arch.layers * hardware.layer_s
        longer = max(weights, compute)
        fixed = hardware.iteration_s + max(shortest - longer, 0.0)
        is_compute = compute > weights
        return Iteration(
            weights=0.0 if is_compute else weights,
            compute=compute if is_compute else 0.0,
            links=links,
            fixed=fixed,
            per_kv_token=self.plan.engine.kv_per_token / bandwidth,
        )

    def prefill(self, new_tokens: int, cached_tokens: int) -> float:
        pairs = new_tokens * (cached_tokens + new_tokens / 2)
        flops = 2 * self.shape.active * new_tokens + self.shape.attention_flops * pairs
        tensor = self.config.engine.tensor_parallel
        seconds = flops / tensor / self._prefill_flops
        if tensor > 1:
            hidden_bytes = new_tokens * self.plan.arch.hidden * self.shape.itemsize
            speed, _ = self._link(tensor)
            seconds += 4 * self.plan.arch.layers * (tensor - 1) / tensor * hidden_bytes / speed
        return seconds

    def _touched_bytes(self, sequences: int) -> float:
        """Weights that an iteration reads: an expert is skipped if no token has it."""
        experts = self.plan.arch.experts
        total = engine_weights(self.config, self.plan.arch)
        if experts is None:
            return total
        of_experts = total * self.shape.experts / parameters(self.plan.arch)
        touched = 1 - (1 - experts.top_k / experts.count) ** sequences
        return total - of_experts * (1 - touched)

    @property
    def _prefill_flops(self) -> float:
        return self.hardware.peak_flops * self.hardware.prefill_efficiency

    # ------------------------------------------------------------ update

    def update(self, rounds: list[list[MicroBatchSize]], forward_passes: int) -> float:
        p = self.config.policy.parallel
        slowest = [
            max(self._micro_batch(size, forward_passes) for size in of_round) for of_round in rounds
        ]
        mean = sum(slowest) / len(slowest)
        bubble = (p.pipeline - 1) / p.virtual * mean
        return sum(slowest) + bubble + self._optimizer_step

    def _micro_batch(self, size: MicroBatchSize, forward_passes: int) -> float:
        """On one rank of the slowest pipeline stage."""
        p = self.config.policy.parallel
        hardware = self.hardware
        shape = self.shape
        recomputed = self._recomputed
        passes = 1 + BACKWARD + forward_passes
        ranks = p.tensor * p.context
        dense = 2 * shape.dense_layers * size.tokens + shape.attention_flops * size.pairs
        dense_s = dense / ranks / hardware.dense_efficiency
        experts_s = 2 * shape.active_experts * size.tokens / ranks / hardware.expert_efficiency
        layers_s = dense_s * (passes + recomputed["dense"])
        layers_s += experts_s * (passes + recomputed["experts"])
        head = 2 * shape.head * size.tokens / ranks / hardware.dense_efficiency
        compute_s = (layers_s * self._stage_fraction + head * passes) / hardware.peak_flops
        # Backward has as many collectives as forward.
        collectives = 2 + forward_passes + ("full" in self.config.policy.recompute)
        return compute_s + self._collectives(size.tokens) * self._stage_fraction * collectives

    def _collectives(self, tokens: int) -> float:
        """Tensor and expert parallelism in a forward pass through all layers."""
        p = self.config.policy.parallel
        arch = self.plan.arch
        per_rank = tokens / p.context * arch.hidden * self.shape.itemsize
        seconds = 0.0
        if p.tensor > 1:
            speed, latency = self._link(p.tensor)
            # An all-gather and a reduce-scatter around attention, and around a dense MLP.
            dense_layers = arch.layers - self.shape.moe_layers
            count = 2 * arch.layers + 2 * dense_layers
            seconds += count * (latency + (p.tensor - 1) / p.tensor * per_rank / speed)
        if arch.experts is not None and p.expert > 1:
            speed, latency = self._link(p.expert * p.expert_tensor_size)
            sent = per_rank / p.tensor * arch.experts.top_k * (p.expert - 1) / p.expert
            seconds += 2 * self.shape.moe_layers * (latency + sent / speed)
        return seconds

    @cached_property
    def _optimizer_step(self) -> float:
        """Reduction of gradients, Adam, and the gathering of weights, without overlap."""
        hardware = self.hardware
        states = [stage.states for stage in self.plan.stages]
        weights = max(of_stage.parameters for of_stage in states)
        owned = max(of_stage.optimizer_parameters for of_stage in states)
        speed, _ = self._link(self.config.policy.ranks)
        moved = 0.0
        if self.config.data_ranks * self.config.policy.parallel.context > 1:
            moved = weights * (GRADIENT_BYTES + self.shape.itemsize) / speed
        on_host = self.config.optimizer.cpu_offload_fraction
        adam = owned * (1 - on_host) * ADAM_BYTES / hardware.memory_bytes_s
        host = owned * on_host * HOST_ADAM_BYTES / hardware.host_bytes_s
        transfer = owned * on_host * TRANSFER_BYTES / hardware.pcie_bytes_s
        return moved + adam + host + transfer

    @cached_property
    def _recomputed(self) -> dict[str, float]:
        """Forward passes that backward repeats."""
        modules = self.config.policy.recompute
        full = "full" in modules
        arch = self.plan.arch
        # Recomputing the MLP of dense layers repeats its part of their FLOPs.
        mlp = 3 * arch.hidden * arch.ffn_hidden * (arch.layers - self.shape.moe_layers)
        dense = 1.0 if full else (mlp / self.shape.dense_layers if "mlp" in modules else 0.0)
        return {"dense": dense, "experts": 1.0 if full or "moe" in modules else 0.0}

    @cached_property
    def _stage_fraction(self) -> float:
        """Layers of the largest pipeline stage / all."""
        return max(sum(stage.states.layers) for stage in self.plan.stages) / self.plan.arch.layers

    # ------------------------------------------------------------ between them

    def step(self) -> float:
        return 0.0

    def sync(self) -> float:
        """Disaggregated: from every rank to the workers of the engines, then among these.
        Colocated: gathered on every rank. Engines load tensor by tensor."""
        traffic = self.plan.sync_traffic
        loading = self.shape.tensors * self.hardware.tensor_s
        if self.config.cluster.colocate:
            speed, _ = self._link(self.config.policy.ranks)
            return max(traffic.gathered) / speed + loading
        workers = self.config.engine.num_engines * self.config.engine.tensor_parallel
        most = max(*traffic.sent, traffic.by_worker / workers)
        network = self.hardware.network_bytes_s * self.hardware.link_efficiency
        speed, _ = self._link(workers)
        return most / network + traffic.by_worker / speed + loading

    def switch(self, what: str) -> float:
        hardware = self.hardware
        if what == "pause":
            return hardware.pause_s
        if not self.config.cluster.colocate:
            return 0.0
        if what in ("sleep", "wake"):
            return hardware.sleep_s
        states = max(self.plan.stages, key=lambda stage: stage.states.optimizer).states
        return (states.optimizer + states.gradients) / hardware.pcie_bytes_s

    def _link(self, ranks: int) -> tuple[float, float]:
        """Bandwidth and latency of a collective of so many neighbouring GPUs."""
        hardware = self.hardware
        if ranks <= hardware.gpus_per_node:
            return hardware.nvlink_bytes_s * hardware.link_efficiency, hardware.collective_s
        return hardware.network_bytes_s * hardware.link_efficiency, hardware.network_collective_s

    @cached_property
    def shape(self) -> "Shape":
        return Shape.of(self.config, self.plan.arch)


@dataclass(frozen=True)
class Shape:
    """Parameters of a model by what computes with them."""

    head: int
    experts: int  # all experts of all layers
    active_experts: int  # those of one token
    dense_layers: int  # layers without experts
    moe_layers: int
    attention_flops: float  # per pair of tokens, over all layers
    tensors: int  # in HF's format
    itemsize: int

    @classmethod
    def of(cls, config: Config, arch: Architecture) -> "Shape":
        from megastep.weights.mapping import param_mappings

        head = arch.vocab * arch.hidden
        outside = head * (1 if arch.tied else 2)
        experts = active = moe_layers = 0
        if arch.experts is not None:
            moe_layers = sum(arch.experts.layers)
            one = 3 * arch.hidden * arch.experts.hidden
            experts = moe_layers * arch.experts.count * one
            active = moe_layers * arch.experts.top_k * one
        return cls(
            head=head,
            experts=experts,
            active_experts=active,
            dense_layers=parameters(arch) - outside - experts,
            moe_layers=moe_layers,
            attention_flops=4.0 * arch.layers * arch.heads * arch.head_dim,
            tensors=sum(len(mapping.hf) for mapping in param_mappings(arch).values()),
            itemsize=PRECISIONS[config.policy.precision].itemsize,
        )

    @property
    def active(self) -> int:
        """Of one token, with the head."""
        return self.dense_layers + self.active_experts + self.head
