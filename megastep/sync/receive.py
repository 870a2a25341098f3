"""The engines' end of a push: backends for vLLM's weight-transfer registry. Imported by vLLM's processes only.

    megastep_shm     from a segment of shared memory, bucket by bucket
    megastep_nccl    vLLM's own `nccl`   } with what every backend of ours has:
    megastep_ipc     vLLM's own `ipc`    } see Checked

The last two have not been run on a GPU.
"""

import os
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
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from megastep.sync import segment
from megastep.sync.checksum import checksum


class Checked:
    """A reload that is whole or an error, and whose tensors can be compared with what was sent."""

    def start_weight_update(self) -> None:
        self.checksums: dict[str, int] = {}
        if self.device.type == "cpu":
            _forget_packed_experts(self.model)
        initialize_layerwise_reload(self.model)
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
        missing = [name for name, layer in self.model.named_modules() if layer is not head and _got_nothing(layer)]
        if missing:  # vLLM would go on with the old weights and a line in its log
            raise ValueError(f"no weights came for {len(missing)} layers, such as {missing[0]}")
        finalize_layerwise_reload(self.model, self.model_config)
        if head is not None and self.device.type == "cpu":
            head.quant_method.process_weights_after_loading(head)  # it keeps a packed copy of the embedding

    def _tied_head(self) -> torch.nn.Module | None:
        """An output head that shares the embedding's weight, and so is sent none."""
        return self.model.lm_head if self.model_config.hf_text_config.tie_word_embeddings else None


def _got_nothing(layer: torch.nn.Module) -> bool:
    """Layers with buffers only, such as rope's tables, are never sent any."""
    info = get_layerwise_info(layer)
    return info.can_load() and info.load_numel == 0 and any(True for _ in layer.parameters(recurse=False))


def _forget_packed_experts(model: torch.nn.Module) -> None:
    """On a CPU vLLM packs expert weights when it makes their kernel, and only then: with the kernel of the old weights
    in place an update would leave the experts as they were."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod):
            method.moe_kernel = None


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
        self._memory = segment.join(init_info.path, init_info.nbytes)

    def update_weights(self, update_info: dict) -> None:
        # vLLM's own version ends with a synchronization of the accelerator, which a CPU has not.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, bucket: ShmBucket) -> None:
        weights = []
        for name, dtype, shape, offset in zip(bucket.names, bucket.dtypes, bucket.shapes, bucket.offsets, strict=True):
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
    if "AMX" not in os.environ.get("ONEDNN_MAX_CPU_ISA", "AMX"):
        torch.cpu._is_amx_tile_supported = lambda: False  # what oneDNN is told, vLLM's own kernels should heed too
    for name, receiver in (("shm", ShmReceiver), ("nccl", NcclReceiver), ("ipc", IpcReceiver)):
        if f"megastep_{name}" not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(f"megastep_{name}", receiver)
