"""Qwen3-MoE: norm on q and k; MoE, some layers may be dense."""

from megastep.models.family import DENSE_RULES, Experts, Family, count_experts, expert_rules
from megastep.models.hf_config import MAX_LAYERS, MAX_WIDTH, HFConfig


def _experts(config: HFConfig, layers: int) -> Experts:
    # transformers 5 writes num_local_experts.
    key = "num_experts" if config.has("num_experts") else "num_local_experts"
    count, top_k = count_experts(config, key, layers)
    return Experts(
        count=count,
        top_k=top_k,
        hidden=config.count("moe_intermediate_size", MAX_WIDTH),
        normalize_top_k=config.flag("norm_topk_prob"),
        layers=_expert_layers(config, layers),
    )


def _expert_layers(config: HFConfig, layers: int) -> tuple[bool, ...]:
    dense = config.hf.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(i) is int and 0 <= i < layers for i in dense):
        raise config.invalid(
            "mlp_only_layers", f"must be a list of layers, each from 0 to {layers - 1}"
        )
    sparse_step = 1  # every so many layers one is MoE
    if config.has("decoder_sparse_step"):
        sparse_step = config.count("decoder_sparse_step", MAX_LAYERS)
    return tuple(i not in dense and (i + 1) % sparse_step == 0 for i in range(layers))


QWEN3_MOE = Family(
    "qwen3_moe",
    rules=DENSE_RULES + expert_rules("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
    qk_norm=True,
    experts=_experts,
)
