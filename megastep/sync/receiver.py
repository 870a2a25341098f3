"""The engine side of a weight sync: backends for vLLM's weight-transfer registry.

    megastep_shm     from a segment of shared memory, bucket by bucket
    megastep_nccl    from all of the policy's ranks over NCCL; not run on a GPU yet
    megastep_ipc     vLLM's `ipc` with CheckedReload; not run on a GPU yet

Imported by vLLM's processes only.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import (
    _place_kernel_tensors,
    get_layerwise_info,
)

from megastep.distributed.amx import hide_amx_from_vllm
from megastep.sync import nccl, shm
from megastep.sync.checksum import checksum


class CheckedReload:
    """A mixin: an incomplete reload is an error, and checksums are kept for comparison."""

    # Attributes of vLLM's WeightTransferEngine.
    model: Any
    device: torch.device
    model_config: Any
    vllm_config: Any

    def start_weight_update(self) -> None:
        self.checksums: dict[str, int] = {}
        self._names: set[str] = set()  # received
        self._packed: list[PackedExperts] = []
        self._kernels: list[tuple[Any, Any]] = []
        initialize_layerwise_reload(self.model)
        if self.device.type == "cpu":
            self._packed, self._kernels = reload_packed_experts(self.model)
        self._load_weights: Callable = self.model.load_weights
        self.model.load_weights = self._load  # called by every backend

    def abandon_weight_update(self) -> None:
        """Undo `start_weight_update` after some of the weights, or none, were received.

        Layers that are complete keep the new weights, so all must be sent before the next call.
        """
        vars(self.model).pop("load_weights", None)
        for experts in self._packed:
            experts.finish()
        for method, kernel in self._kernels:
            method.moe_kernel = method.moe_kernel or kernel
        for layer in self.model.modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                _place_kernel_tensors(layer, info)
                info.reset()

    def _load(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        weights = list(weights)
        for name, _ in weights:
            if name in self._names:
                # vLLM counts elements: a layer would be complete without some of its experts.
                raise ValueError(f"{name} was received twice")
            self._names.add(name)
        if self.vllm_config.additional_config["sync_verify"]:
            self.checksums.update((name, checksum(tensor)) for name, tensor in weights)
        return self._load_weights(weights)

    def finish_weight_update(self) -> None:
        del self.model.load_weights  # uncovers the method of the class
        head = self._tied_head()
        missing = [
            name
            for name, layer in self.model.named_modules()
            if layer is not head and (_received_nothing(layer) or _received_some_experts(layer))
        ]
        missing += [experts.layer.layer_name for experts in self._packed if not experts.finish()]
        if missing:  # vLLM would only log it, and keep stale or uninitialized weights
            raise ValueError(f"weights are missing in {len(missing)} layers, such as {missing[0]}")
        finalize_layerwise_reload(self.model, self.model_config)
        if head is not None and self.device.type == "cpu":
            # It keeps a packed copy of the embedding.
            head.quant_method.process_weights_after_loading(head)

    def _tied_head(self) -> Any:
        """The output head if it shares the embedding's weight: it receives none itself."""
        return self.model.lm_head if self.model_config.hf_text_config.tie_word_embeddings else None


def _received_nothing(layer: torch.nn.Module) -> bool:
    """Whether a layer with parameters received none; buffers, such as rope tables, are not sent."""
    info = get_layerwise_info(layer)
    has_parameters = any(True for _ in layer.parameters(recurse=False))
    return info.can_load() and info.load_numel == 0 and has_parameters


def _received_some_experts(layer: torch.nn.Module) -> bool:
    """Whether a layer that vLLM reloads received some of its experts only.

    vLLM completes such a layer from uninitialized memory. It counts elements, and takes those that
    are missing for padding, which some kernels add to each expert.
    """
    info = get_layerwise_info(layer)
    if not info.can_load() or not isinstance(layer, RoutedExperts):
        return False
    received = set()  # shard id, expert
    for param_name, bound in info.loaded_weights:
        if param_name not in ("w13_weight", "w2_weight"):
            continue
        arguments = bound.arguments
        if arguments["loaded_weight"].dim() == 3:  # all experts in one tensor
            received |= {(arguments["shard_id"], i) for i in range(layer.local_num_experts)}
        else:
            expert = layer._map_global_expert_id_to_local_expert_id(arguments["expert_id"])
            received.add((arguments["shard_id"], expert))
    local = [key for key in received if key[1] >= 0]  # -1: an expert of another rank
    return 0 < len(local) < 3 * layer.local_num_experts


# ---------------------------------------------------------------- experts on a CPU


class PackedExperts:
    """One layer's experts, which vLLM packs on a CPU: here directly from the received tensor.

    vLLM's reload copies each expert three times: into a new layer, into a packed one, into place.
    """

    def __init__(self, layer: Any):
        self.layer = layer
        self.isa = layer.quant_method.moe_kernel.fused_experts.isa
        self.received: set[tuple[str, int]] = set()  # shard id, expert
        _place_kernel_tensors(layer, get_layerwise_info(layer))
        get_layerwise_info(layer).reset()  # excludes the layer from vLLM's reload
        self.loaders = [
            (param, param.weight_loader) for param in (layer.w13_weight, layer.w2_weight)
        ]
        for param, _ in self.loaders:
            param.weight_loader = self.load

    @staticmethod
    def supports(layer: Any) -> bool:
        """Whole experts only: neither sharded nor padded, without biases."""
        config = layer.moe_config
        experts = layer.quant_method.moe_kernel.fused_experts
        parallel = config.moe_parallel_config
        is_padded = (
            experts._padded_intermediate_size(config) != config.intermediate_size_per_partition
        )
        is_sharded = parallel.tp_size > 1 or parallel.ep_size > 1
        return not (is_sharded or is_padded or config.has_bias or experts._use_zentorch)

    def load(
        self, param, loaded_weight, weight_name, shard_id, expert_id, return_success=False
    ) -> bool:
        """The weight loader that vLLM calls for each HF tensor.

        w1 and w3, gate and up, are the halves of w13. Packing works on blocks of rows, so each half
        is packed separately.
        """
        rows = len(loaded_weight)
        first = rows if shard_id == "w3" else 0
        target = param.data[expert_id, first : first + rows].unsqueeze(0)  # [1, rows, columns]
        torch.ops._C.prepack_moe_weight(loaded_weight.unsqueeze(0), target, self.isa)
        self.received.add((shard_id, expert_id))
        return True

    def finish(self) -> bool:
        """Restore vLLM's loaders; returns whether every weight was received."""
        for param, loader in self.loaders:
            param.weight_loader = loader
        return len(self.received) == 3 * len(self.layer.w2_weight)


def reload_packed_experts(
    model: torch.nn.Module,
) -> tuple[list[PackedExperts], list[tuple[Any, Any]]]:
    """The layers that are packed in place, and (method, kernel) of the others.

    vLLM reloads the others. It packs experts only when it creates their kernel: the existing kernel
    is removed, or the update would leave the experts unchanged.
    """
    packed = []
    kernels = []
    for layer in model.modules():
        if not isinstance(getattr(layer, "quant_method", None), UnquantizedFusedMoEMethod):
            continue
        if PackedExperts.supports(layer):
            packed.append(PackedExperts(layer))
        else:
            kernels.append((layer.quant_method, layer.quant_method.moe_kernel))
            layer.quant_method.moe_kernel = None
    return packed, kernels


# ---------------------------------------------------------------- backends


@dataclass
class ShmInit(WeightTransferInitInfo):
    path: str
    nbytes: int


@dataclass
class ShmBucket(WeightTransferUpdateInfo):
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    offsets: list[int]  # bytes, in the segment


class ShmReceiver(CheckedReload, WeightTransferEngine[ShmInit, ShmBucket]):
    init_info_cls = ShmInit
    update_info_cls = ShmBucket
    _memory: Tensor | None = None  # [bytes]

    def init_transfer_engine(self, init_info: ShmInit) -> None:
        self._memory = shm.attach(init_info.path, init_info.nbytes)

    def update_weights(self, update_info: dict) -> None:
        # vLLM's version then synchronizes the accelerator, which a CPU does not have.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, bucket: ShmBucket) -> None:
        assert self._memory is not None
        weights = []
        for name, dtype_name, shape, offset in zip(
            bucket.names, bucket.dtypes, bucket.shapes, bucket.offsets, strict=True
        ):
            dtype = getattr(torch, dtype_name)
            nbytes = torch.Size(shape).numel() * dtype.itemsize
            weights.append((name, self._memory[offset : offset + nbytes].view(dtype).view(shape)))
        self.model.load_weights(weights)
        self._copy_pending(self._memory)

    def _copy_pending(self, memory: Tensor) -> None:
        """Copy the tensors of incomplete layers out of the segment.

        vLLM keeps views of them until a layer is complete; by then the policy has overwritten them.
        """
        segment = memory.untyped_storage().data_ptr()
        for layer in self.model.modules():
            for _, bound in get_layerwise_info(layer).loaded_weights:
                for key, value in bound.arguments.items():
                    if isinstance(value, Tensor) and value.untyped_storage().data_ptr() == segment:
                        bound.arguments[key] = value.clone()

    def shutdown(self) -> None:
        self._memory = None


@dataclass
class NcclInit(WeightTransferInitInfo):
    address: str  # of the group's store
    port: int
    members: int
    ranks: int  # of the policy; the first members
    first_worker: int  # the member that is this engine's first worker


@dataclass
class NcclUpdate(WeightTransferUpdateInfo):
    buckets: list[dict]  # nccl.Bucket, as dictionaries


class NcclReceiver(CheckedReload, WeightTransferEngine[NcclInit, NcclUpdate]):
    """Everything is on the current stream: a buffer is reused when its tensors have been loaded."""

    init_info_cls = NcclInit
    update_info_cls = NcclUpdate
    _group: nccl.Group | None = None

    def init_transfer_engine(self, init_info: NcclInit) -> None:
        self.shutdown()
        parallel = self.parallel_config
        own = parallel.data_parallel_index * parallel.world_size + parallel.rank
        member = init_info.first_worker + own
        self._ranks = init_info.ranks
        self._group = nccl.Group(init_info.address, init_info.port, member, init_info.members)
        self._all = self._group.join(self.device)
        self._workers = self._group.join_workers(self._ranks, self.device)

    def receive_weights(self, update_info: NcclUpdate) -> None:
        """Returns early, without an error, if rank 0 aborts the group."""
        assert self._group is not None
        with self._group.watched():
            for description in update_info.buckets:
                bucket = nccl.Bucket(**description)
                flat = nccl.receive(self._all, self._workers, bucket, self._ranks, self.device)
                if self._group.is_aborted:
                    return
                self.model.load_weights(nccl.unpack(flat, bucket))

    def shutdown(self) -> None:
        if self._group is not None:
            self._group.leave()
            self._group = None


class IpcReceiver(CheckedReload, IPCWeightTransferEngine):
    def finish_weight_update(self) -> None:
        super().finish_weight_update()
        # As in vLLM's version: the policy can reuse its buffer.
        self._packed_importer.close()


class WorkerExtension:
    """Methods that vLLM adds to its workers."""

    # Attributes of vLLM's worker.
    weight_transfer_engine: CheckedReload
    _weight_update_active: bool

    def abandon_weight_update(self) -> None:
        """End an update that cannot be completed, so that another can start."""
        if self._weight_update_active:
            self.weight_transfer_engine.abandon_weight_update()
            self._weight_update_active = False

    def received_checksums(self) -> dict[str, int]:
        return self.weight_transfer_engine.checksums


def register() -> None:
    """Entry point of `vllm.general_plugins`: called in every vLLM process."""
    hide_amx_from_vllm()
    for name, receiver in (("shm", ShmReceiver), ("nccl", NcclReceiver), ("ipc", IpcReceiver)):
        if f"megastep_{name}" not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(f"megastep_{name}", receiver)
