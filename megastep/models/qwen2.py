"""Qwen2: dense, bias on q, k, v."""

from megastep.models.family import DENSE_RULES, Family

QWEN2 = Family("qwen2", DENSE_RULES, qkv_bias=True)
