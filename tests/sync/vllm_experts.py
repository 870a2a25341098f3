"""Prints as JSON what reloads do to vLLM's layer of experts, without an engine.

python -m tests.sync.vllm_experts

    error     of a reload that lacks one expert's down projection
    equal     per complete reload after it: whether the layer's memory is that of a new layer
"""

import json
import os
from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

os.environ.update(
    VLLM_CPU_OMP_THREADS_BIND="nobind", OMP_NUM_THREADS="1", VLLM_LOGGING_LEVEL="ERROR"
)

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.model_executor.layers.fused_moe import FusedMoEFactory
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

from megastep.distributed.ports import free_port
from megastep.sync.receiver import CheckedReload, PackedExperts

EXPERTS, HIDDEN = 8, 64
LEFT_OUT = "experts.3.down_proj.weight"
SHARDS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
# Rows per expert, and whether they are packed in place. vLLM pads 48 to 64.
CASES = {"packed": (64, True), "reloaded": (64, False), "padded": (48, False)}


class Model(torch.nn.Module):
    def __init__(self, rows: int):
        super().__init__()
        self.experts = FusedMoEFactory(
            num_experts=EXPERTS,
            top_k=2,
            hidden_size=HIDDEN,
            intermediate_size=rows,
            renormalize=True,
            prefix="experts",
        )
        (self.layer,) = (m for m in self.modules() if isinstance(m, RoutedExperts))

    def load_weights(self, weights) -> set[str]:
        for name, tensor in weights:
            _, expert, projection, _ = name.split(".")
            param = self.layer.w2_weight if projection == "down_proj" else self.layer.w13_weight
            param.weight_loader(
                param, tensor, name, SHARDS[projection], int(expert), return_success=True
            )
        return set()


def weights_of(rows: int, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    for expert in range(EXPERTS):
        for projection in SHARDS:
            shape = (HIDDEN, rows) if projection == "down_proj" else (rows, HIDDEN)
            yield f"experts.{expert}.{projection}.weight", torch.randn(shape, generator=generator)


def new_model(rows: int, seed: int) -> Model:
    """Loaded as vLLM does when an engine starts."""
    with set_current_vllm_config(VllmConfig()):  # in which the layer's name is unique
        model = Model(rows)
    record_metadata_for_reloading(model)
    model.load_weights(weights_of(rows, seed))
    model.layer.quant_method.process_weights_after_loading(model.layer)
    return model


def reload(model: Model, rows: int, seed: int, left_out: str | None = None) -> str | None:
    """As a receiver does in a weight sync; returns its error, after which it is abandoned."""
    receiver = CheckedReload()
    receiver.model = model
    receiver.device = torch.device("cpu")
    tied = SimpleNamespace(tie_word_embeddings=False)
    receiver.model_config = SimpleNamespace(dtype=torch.float32, hf_text_config=tied)
    receiver.vllm_config = SimpleNamespace(additional_config={"sync_verify": False})
    receiver.start_weight_update()
    model.load_weights([item for item in weights_of(rows, seed) if item[0] != left_out])
    try:
        receiver.finish_weight_update()
    except ValueError as error:
        receiver.abandon_weight_update()
        return str(error)
    return None


def equal(one: Model, other: Model) -> bool:
    return torch.equal(one.layer.w13_weight, other.layer.w13_weight) and torch.equal(
        one.layer.w2_weight, other.layer.w2_weight
    )


def run_case(rows: int, packs: bool) -> dict:
    model = new_model(rows, seed=0)
    assert PackedExperts.supports(model.layer) or not packs
    with mock.patch.object(PackedExperts, "supports", staticmethod(lambda layer: packs)):
        error = reload(model, rows, 0, LEFT_OUT)
        found = []
        for seed in (0, 1, 0):
            assert reload(model, rows, seed) is None
            found.append(equal(model, new_model(rows, seed)))
    return {"error": error, "equal": found}


if __name__ == "__main__":
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"tcp://127.0.0.1:{free_port()}", 0, "gloo")
        initialize_model_parallel(1, 1)
        print(json.dumps({name: run_case(*case) for name, case in CASES.items()}))
