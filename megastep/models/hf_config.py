"""Typed access to a Hugging Face config.json, with limits."""

import math
from typing import Any

from megastep.errors import ArchitectureError

# Several times the largest models: larger values are typos and would take hours to lay out.
MAX_CONFIG_BYTES = 4 << 20
MAX_LAYERS = 1024
MAX_WIDTH = 1 << 20
MAX_HEADS = 4096
MAX_VOCAB = 1 << 24
MAX_POSITIONS = 1 << 28
MAX_EXPERTS = 4096
MAX_TOTAL_EXPERTS = 1 << 16


class HFConfig:
    """Typed access to config.json; errors name the file, the key and the value."""

    def __init__(self, hf: dict[str, Any], where: str, model_type: str):
        self.hf = hf
        self.where = where
        self.model_type = model_type

    def invalid(self, key: str, reason: str) -> ArchitectureError:
        value: Any = self.hf
        for part in key.split("."):
            value = value.get(part)
        return ArchitectureError(f"{self.where}: {key} = {short(value)}: {reason}")

    def has(self, key: str) -> bool:
        return self.hf.get(key) is not None

    def count(self, key: str, most: int) -> int:
        if not self.has(key):
            raise ArchitectureError(f"{self.where}: {key} is missing, {self.model_type} needs it")
        value = self.hf[key]
        if type(value) is not int or not 1 <= value <= most:
            raise self.invalid(key, f"must be a whole number from 1 to {most}")
        return value

    def number(self, key: str, default: float, above: float, most: float) -> float:
        value = self.hf[key] if self.has(key) else default
        if not is_number(value) or not above < value <= most:
            raise self.invalid(key, f"must be a number above {above:g}, at most {most:g}")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.hf[key] if self.has(key) else default
        if type(value) is not bool:
            raise self.invalid(key, "must be true or false")
        return value

    def section(self, key: str) -> dict[str, Any]:
        value = self.hf[key] if self.has(key) else {}
        if not isinstance(value, dict):
            raise self.invalid(key, "must be an object")
        return value


def is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def short(value: Any) -> str:
    if isinstance(value, int) and abs(value) >= 1 << 64:
        return "a number beyond 64 bits"
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
