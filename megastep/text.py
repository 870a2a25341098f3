"""Values and errors of unknown content as one short line, with secrets hidden."""

import reprlib
from typing import Any

from megastep.redaction import hide

ERROR_CHARS = 300
VALUE_CHARS = 80


def one_line(text: object, limit: int = ERROR_CHARS) -> str:
    """`str(text)` without line breaks, at most `limit` characters, valid UTF-8."""
    try:
        full = str(text)
    except Exception as error:
        full = f"its text cannot be read, {type(error).__name__}"
    line = " ".join(hide(full)[: limit + 700].split())[:limit]
    return line.encode("utf-8", "backslashreplace").decode()


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {one_line(error)}"


def shorten(value: Any) -> str:
    """`repr(value)` on one line, at most VALUE_CHARS characters."""
    line = " ".join(_REPR.repr(value).split())
    return line if len(line) <= VALUE_CHARS else line[: VALUE_CHARS - 3] + "..."


def shown(value: Any, limit: int = VALUE_CHARS) -> str:
    """A value of a config: as written if printable, else its repr; at most `limit` characters."""
    text = value if isinstance(value, str) and value.isprintable() else repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


class _Repr(reprlib.Repr):
    """Hides secrets before it cuts: half a secret would not be found."""

    def repr_str(self, text: str, level: int) -> str:
        return super().repr_str(hide(text), level)

    def repr_instance(self, value: Any, level: int) -> str:
        try:
            text = hide(repr(value))
        except Exception:  # reprlib then prints the class and the address
            return super().repr_instance(value, level)
        return text if len(text) <= self.maxother else text[: self.maxother - 3] + "..."


_REPR = _Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = VALUE_CHARS
