"""Recipes whose model is written by tools/get_model.py: its shape is committed, its weights not."""

from pathlib import Path

FETCHED = ("arithmetic", "reasoning_gym", "search", "sql", "textarena")


def shape_overrides(config: str | Path) -> list[str]:
    is_recipe = Path(config).parent == Path("configs") and Path(config).stem in FETCHED
    return ["model.path=configs/models/smollm2-135m"] if is_recipe else []
