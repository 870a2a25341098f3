"""Tiny random models of every family, written as Hugging Face folders."""

from pathlib import Path

VOCAB = 203  # no tensor-parallel size divides it
# Heads of at least 32: vLLM's CPU attention does not support smaller ones.
SHAPE = dict(
    hidden_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=96,
    vocab_size=VOCAB,
    max_position_embeddings=256,
    initializer_range=0.1,
    tie_word_embeddings=False,
)
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
MOE = dict(head_dim=64, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=48)

# Together they cover every feature of config.json that the policy reads.
MODELS = {
    "llama": ("llama", dict(rope_parameters=LLAMA3)),
    "llama_biases": ("llama", dict(attention_bias=True, mlp_bias=True, rope_parameters=LINEAR)),
    "qwen2_tied": ("qwen2", dict(tie_word_embeddings=True)),
    "qwen3_yarn": ("qwen3", dict(head_dim=64, rope_parameters=YARN)),
    "qwen3_moe": ("qwen3_moe", dict(**MOE, norm_topk_prob=True)),
    "qwen3_moe_dense_layer": ("qwen3_moe", dict(**MOE, norm_topk_prob=False, mlp_only_layers=[1])),
    "mixtral": ("mixtral", dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=None)),
}
MOE_MODELS = ("qwen3_moe", "qwen3_moe_dense_layer", "mixtral")


def make_model(folder: Path, name: str, **overrides):
    """Write model `name` to `folder`, and return the transformers model."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    family, extra = MODELS[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SHAPE, **extra, **overrides})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    # Zeros and ones would hide a swapped or forgotten parameter.
    for key, param in model.named_parameters():
        if "norm" in key or "bias" in key:
            torch.nn.init.normal_(param, mean=1.0 if "norm" in key else 0.0, std=0.2)
    model.save_pretrained(folder)
    return model


def some_tokens(sequences: int = 4, length: int = 16, seed: int = 1):
    import torch

    return torch.randint(VOCAB, (sequences, length), generator=torch.Generator().manual_seed(seed))
