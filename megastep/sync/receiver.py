"""The engines' end of a push: backends for vLLM's weight-transfer registry. Imported by vLLM's processes only.

    megastep_shm     from a segment of shared memory, bucket by bucket
    megastep_nccl    vLLM's own `nccl`   } with what every backend of ours has:
    megastep_ipc     vLLM's own `ipc`    } see Checked

The last two have not been run on a GPU.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
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
from megastep.sync import shm
from megastep.sync.checksum import checksum


class Checked:
    """A reload that is whole or an error, and whose tensors can be compared with what was sent."""

    def start_weight_update(self) -> None:
        self.checksums: dict[str, int] = {}
        self._packed: list[PackedExperts] = []
        initialize_layerwise_reload(self.model)
        if self.device.type == "cpu":
            self._packed = reload_packed_experts(self.model)
        self._load_weights = self.model.load_weights
        self.model.load_weights = self._load  # every backend ends there

    def _load(self, weights) -> set[str]:
        weights = list(weights)
        if self.vllm_config.additional_config["sync_verify"]:
            self.checksums.update((name, checksum(tensor)) for name, tensor in weights)
        return self._load_weights(weights)

    def finish_weight_update(self) -> None:
        del self.model.load_weights  # the class's own again
        head = self._tied_head()
        missing = [
            name
            for name, layer in self.model.named_modules()
            if layer is not head and _got_nothing(layer)
        ]
        missing += [experts.layer.layer_name for experts in self._packed if not experts.finish()]
        if missing:  # vLLM would go on with the old weights and a line in its log
            raise ValueError(f"no weights came for {len(missing)} layers, such as {missing[0]}")
        finalize_layerwise_reload(self.model, self.model_config)
        if head is not None and self.device.type == "cpu":
            head.quant_method.process_weights_after_loading(
                head
            )  # it keeps a packed copy of the embedding

    def _tied_head(self) -> torch.nn.Module | None:
        """An output head that shares the embedding's weight, and so is sent none."""
        return self.model.lm_head if self.model_config.hf_text_config.tie_word_embeddings else None


def _got_nothing(layer: torch.nn.Module) -> bool:
    """Layers with buffers only, such as rope's tables, are never sent any."""
    info = get_layerwise_info(layer)
    return (
        info.can_load()
        and info.load_numel == 0
        and any(True for _ in layer.parameters(recurse=False))
    )


# ---------------------------------------------------------------- experts on a CPU


class PackedExperts:
    """One layer's experts, which vLLM keeps packed on a CPU. Its reload would copy each three times: into a fresh
    layer, into a packed one, into place. Here each is packed from where it lies into place."""

    def __init__(self, layer: torch.nn.Module):
        self.layer = layer
        self.isa = layer.quant_method.moe_kernel.fused_experts.isa
        self.arrived: set[tuple[str, int]] = set()
        _place_kernel_tensors(layer, get_layerwise_info(layer))
        get_layerwise_info(layer).reset()  # vLLM's own reload has nothing to do here
        self.loaders = [
            (param, param.weight_loader) for param in (layer.w13_weight, layer.w2_weight)
        ]
        for param, _ in self.loaders:
            param.weight_loader = self.load

    @staticmethod
    def can_take(layer: torch.nn.Module) -> bool:
        """Whole experts, packed as they are: neither cut over processes nor padded, and without biases."""
        config, experts = layer.moe_config, layer.quant_method.moe_kernel.fused_experts
        parallel = config.moe_parallel_config
        padded = experts._padded_intermediate_size(config) != config.intermediate_size_per_partition
        cut = parallel.tp_size > 1 or parallel.ep_size > 1
        return not (cut or padded or config.has_bias or experts._use_zentorch)

    def load(
        self, param, loaded_weight, weight_name, shard_id, expert_id, return_success=False
    ) -> bool:
        """As vLLM calls it for each HF tensor. w1 and w3, gate and up, are the halves of w13; packing goes by blocks of
        rows, so each half is packed for itself."""
        rows = len(loaded_weight)
        first = rows if shard_id == "w3" else 0
        place = param.data[expert_id, first : first + rows].unsqueeze(0)
        torch.ops._C.prepack_moe_weight(loaded_weight.unsqueeze(0), place, self.isa)
        self.arrived.add((shard_id, expert_id))
        return True

    def finish(self) -> bool:
        """Did everything come?"""
        for param, loader in self.loaders:
            param.weight_loader = loader
        return len(self.arrived) == 3 * len(self.layer.w2_weight)


def reload_packed_experts(model: torch.nn.Module) -> list[PackedExperts]:
    """The layers that are packed in place. Others are left to vLLM, which packs expert weights when it makes their
    kernel, and only then: with the kernel of the old weights an update would leave the experts as they were."""
    packed = []
    for layer in model.modules():
        if not isinstance(getattr(layer, "quant_method", None), UnquantizedFusedMoEMethod):
            continue
        if PackedExperts.can_take(layer):
            packed.append(PackedExperts(layer))
        else:
            layer.quant_method.moe_kernel = None
    return packed


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


class ShmReceiver(Checked, WeightTransferEngine[ShmInit, ShmBucket]):
    init_info_cls, update_info_cls = ShmInit, ShmBucket
    _memory: Tensor | None = None

    def init_transfer_engine(self, init_info: ShmInit) -> None:
        self._memory = shm.join(init_info.path, init_info.nbytes)

    def update_weights(self, update_info: dict) -> None:
        # vLLM's own version ends with a synchronization of the accelerator, which a CPU has not.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, bucket: ShmBucket) -> None:
        weights = []
        for name, dtype, shape, offset in zip(
            bucket.names, bucket.dtypes, bucket.shapes, bucket.offsets, strict=True
        ):
            dtype = getattr(torch, dtype)
            nbytes = torch.Size(shape).numel() * dtype.itemsize
            weights.append((name, self._memory[offset : offset + nbytes].view(dtype).view(shape)))
        self.model.load_weights(weights)
        self._keep_what_waits()

    def _keep_what_waits(self) -> None:
        """vLLM loads a layer when it has all of its tensors; until then it would look into memory that the policy is
        about to overwrite."""
        ours = self._memory.untyped_storage().data_ptr()
        for layer in self.model.modules():
            for _, arguments in get_layerwise_info(layer).loaded_weights:
                for key, value in arguments.arguments.items():
                    if isinstance(value, Tensor) and value.untyped_storage().data_ptr() == ours:
                        arguments.arguments[key] = value.clone()

    def shutdown(self) -> None:
        self._memory = None


class NcclReceiver(Checked, NCCLWeightTransferEngine):
    pass


class IpcReceiver(Checked, IPCWeightTransferEngine):
    def finish_weight_update(self) -> None:
        super().finish_weight_update()
        self._packed_importer.close()  # as vLLM's own version does, so that the policy can reuse its buffer


class WorkerExtension:
    """Methods that vLLM adds to its workers."""

    def received_checksums(self) -> dict[str, int]:
        return self.weight_transfer_engine.checksums


def register() -> None:
    """The entry point `vllm.general_plugins`: vLLM calls it in each of its processes."""
    hide_amx_from_vllm()
    for name, receiver in (("shm", ShmReceiver), ("nccl", NcclReceiver), ("ipc", IpcReceiver)):
        if f"megastep_{name}" not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(f"megastep_{name}", receiver)
