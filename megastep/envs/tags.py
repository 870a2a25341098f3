"""Parsing of a turn: `<tag>...</tag>` after the thinking."""

import re


def after_thinking(text: str) -> str:
    return text.rpartition("</think>")[2]


def tagged(text: str, tag: str) -> str | None:
    """The text of the last `<tag>`, or None."""
    found = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    return found[-1].strip() if found else None


def shortened(text: str, characters: int) -> str:
    if len(text) <= characters:
        return text
    return f"{text[:characters]}\n... ({len(text) - characters} more characters)"
