"""Mixtral: MoE in every layer."""

from megastep.models.family import (
    ATTENTION_RULES,
    EMBEDDING_RULES,
    Experts,
    Family,
    count_experts,
    expert_rules,
)
from megastep.models.hf_config import MAX_WIDTH, HFConfig


def _experts(config: HFConfig, layers: int) -> Experts:
    count, top_k = count_experts(config, "num_local_experts", layers)
    return Experts(
        count=count,
        top_k=top_k,
        hidden=config.count("intermediate_size", MAX_WIDTH),
        normalize_top_k=True,
        layers=(True,) * layers,
    )


MIXTRAL = Family(
    "mixtral",
    rules=EMBEDDING_RULES
    + ATTENTION_RULES
    + expert_rules("block_sparse_moe", gate="w1", up="w3", down="w2"),
    sliding_window=True,
    experts=_experts,
)
