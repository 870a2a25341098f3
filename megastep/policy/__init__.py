"""The policy: a Megatron-Core model on CUDA or, through `distributed/cpu.py`, on gloo."""
