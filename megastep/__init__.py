"""megastep: step-wise reinforcement learning of LLM agents on Megatron-Core, vLLM and Ray."""

__version__ = "0.1.0"
