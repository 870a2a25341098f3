"""Llama: dense, optional biases everywhere."""

from megastep.models.family import DENSE_RULES, Family

LLAMA = Family("llama", DENSE_RULES)
