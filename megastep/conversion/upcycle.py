"""Sparse upcycling: a dense model as a mixture of experts that computes the same function.

Every expert is a copy of the dense MLP (Komatsuzaki et al. 2023, arXiv 2212.05055). Mixtral's
routers normalize the weights of the chosen experts to 1, so equal experts give the dense output
whatever a router chooses; the routers start random. With noise, each expert differs from the dense
MLP by random numbers: the model needs training to recover, and its routing matters from the start.

    llama   model.layers.3.mlp.gate_proj.weight
    mixtral model.layers.3.block_sparse_moe.experts.0.w1.weight, experts.1.w1.weight, ...
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from megastep.errors import WeightsError
from megastep.models.architecture import read_architecture
from megastep.weights.hf_files import (
    SHARD_BYTES,
    HFReader,
    copy_companions,
    write_shards,
    written_atomically,
)
from megastep.weights.random_init import RandomWeights

EXPERT_NAMES = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
_MLP = re.compile(r"(model\.layers\.\d+)\.mlp\.(\w+)\.weight")


def upcycle(
    source: Path, destination: Path, experts: int, top_k: int, seed: int = 0, noise: float = 0.0
) -> None:
    """Write the llama model of `source` as a Mixtral with `experts` experts per layer.

    `noise`: standard deviation of what is added to an expert's weights, relative to theirs.
    """
    if not 1 <= top_k <= experts:
        raise WeightsError(f"top-k {top_k} of {experts} experts: must be between 1 and {experts}")
    config = json.loads((source / "config.json").read_text())
    arch = read_architecture(source)
    if arch.family != "llama" or config.get("mlp_bias") or config.get("attention_bias"):
        raise WeightsError(f"{source}: only llama models without biases can be upcycled")
    config |= {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": experts,
        "num_experts_per_tok": top_k,
        "sliding_window": None,
    }
    with written_atomically(destination) as folder:
        copy_companions(source, folder)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        random = RandomWeights(read_architecture(folder), seed)
        write_shards(folder, _tensors(HFReader(source), random, experts, noise), SHARD_BYTES)


def _tensors(
    dense: HFReader, random: RandomWeights, experts: int, noise: float
) -> Iterator[tuple[str, Tensor]]:
    for name in sorted(dense.file_of):
        tensor = dense(name)
        mlp = _MLP.fullmatch(name)
        if mlp is None:
            yield name, tensor
            continue
        layer, projection = mlp.groups()
        for expert in range(experts):
            expert_layer = f"{layer}.block_sparse_moe.experts.{expert}"
            expert_name = f"{expert_layer}.{EXPERT_NAMES[projection]}.weight"
            weight = tensor.clone()  # safetensors does not write tensors that share memory
            if noise:
                weight = _noisy(tensor, random(expert_name), noise)
            yield expert_name, weight
        if projection == "gate_proj":
            router = f"{layer}.block_sparse_moe.gate.weight"
            yield router, random(router).to(tensor.dtype)


def _noisy(dense: Tensor, random: Tensor, noise: float) -> Tensor:
    scale = noise * dense.float().std() / random.std()
    return (dense.float() + scale * random).to(dense.dtype)
