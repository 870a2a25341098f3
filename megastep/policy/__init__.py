"""The trained model: Megatron-Core on CUDA or, through `cpu.py`, on gloo."""
