"""Values and errors as one short line of a message."""

from typing import Any


def shown(value: Any, limit: int = 80) -> str:
    """A value for a message: printable, at most `limit` characters."""
    text = value if isinstance(value, str) and value.isprintable() else repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
