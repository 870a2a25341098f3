"""Qwen3: dense, norm on q and k."""

from megastep.models.family import DENSE_RULES, Family

QWEN3 = Family("qwen3", DENSE_RULES, qk_norm=True)
