"""The configuration as text: `megastep config`."""

from pathlib import Path
from typing import Any

from megastep import redaction
from megastep.config.loading import DEFAULT, load_with_sources, to_yaml
from megastep.config.schema import REQUIRED, default_of, settings, type_name, value_of, written
from megastep.config.yaml_file import parse


def resolved_text(path: str | Path, overrides: list[str]) -> str:
    """A line per key: its value and the source of it."""
    loaded = load_with_sources(path, overrides)
    redacted = parse(to_yaml(loaded.config))
    lines = []
    for key in settings():
        value = value_of(loaded.config, key)
        if _looked_up(redacted, written(key)) == redaction.HIDDEN:
            value = redaction.HIDDEN
        elif isinstance(value, dict):
            value = _looked_up(redacted, written(key))
        lines.append((f"{written(key)} = {_text(value)}", loaded.sources.get(key, DEFAULT)))
    width = min(max(len(setting) for setting, _ in lines), 60)
    return "\n".join(f"{setting:<{width}}  # {source}" for setting, source in lines)


def schema_text() -> str:
    """Every key with its type, default and meaning."""
    lines = []
    for key, found in settings().items():
        lines.append(f"{written(key)}: {type_name(found)} = {default_text(found)}")
        lines.append(f"    {found.metadata['meaning']}")
        allowed = constraint_text(found)
        if allowed:
            lines.append(f"    {allowed}")
    return "\n".join(lines)


def default_text(found) -> str:
    default = default_of(found)
    return "required" if default == REQUIRED else _text(default)


def constraint_text(found) -> str:
    """Choices or bounds; empty if there are none."""
    choices = found.metadata["choices"]
    if choices is not None:
        return f"one of {', '.join(choices)}"
    bounds = found.metadata["bounds"]
    if all(bound is None for bound in bounds.values()):
        return ""
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    return ", ".join(
        f"{signs[name]} {bound}" for name, bound in bounds.items() if bound is not None
    )


def _text(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def _looked_up(tree: dict, key: str) -> Any:
    value: Any = tree
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value
