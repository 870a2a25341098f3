"""Weights between Hugging Face files, Megatron's shards and the rollout engines."""
