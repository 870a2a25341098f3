"""YAML files of users, read with limits.

PyYAML keeps the last of two equal keys and expands aliases without a limit. Here both are errors,
as are files larger than MAX_BYTES, with more than MAX_NODES values, or that are no regular file.
"""

import os
import stat
from pathlib import Path
from typing import Any

import yaml

from megastep.errors import YAMLFileError

MAX_BYTES = 1 << 20
MAX_NODES = 10_000
_MAX_REASON = 300  # characters of PyYAML's explanation

# Besides YAMLError: errors of int(), datetime() and recursion in PyYAML's constructors.
_FAILURES = (
    yaml.YAMLError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


def read_yaml(path: Path) -> dict[str, Any]:
    """The file's mapping; an empty file is an empty mapping."""
    content = parse(_read(path))
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise YAMLFileError(f"holds a {type(content).__name__}; `key: value` lines are needed")
    return content


def parse(text: str | bytes) -> Any:
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _check_duplicate_keys(node)
        _check_expanded_size(node)
        return loader.construct_document(node)
    except YAMLFileError:
        raise
    except RecursionError:
        raise YAMLFileError("not readable as YAML: nested too deeply") from None
    except _FAILURES as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise YAMLFileError(f"not readable as YAML: {reason[:_MAX_REASON]}") from None


def _read(path: Path) -> bytes:
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise YAMLFileError("not a file; a YAML file is needed")
        with open(path, "rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise YAMLFileError(f"cannot be read ({error.strerror})") from None
    except YAMLFileError:
        raise
    except ValueError:  # a NUL, or characters that no file name has
        raise YAMLFileError("cannot be read (not a file name)") from None
    if len(content) > MAX_BYTES:
        raise YAMLFileError(f"larger than {MAX_BYTES >> 20} MiB; a config is not")
    return content


class _Loader(yaml.SafeLoader):
    """A SafeLoader with at most MAX_NODES values and integers of at most 64 bits."""

    def __init__(self, stream: str | bytes):
        super().__init__(stream)
        self._nodes = 0

    def compose_node(self, parent, index):
        self._nodes += 1
        if self._nodes > MAX_NODES:
            raise YAMLFileError(f"holds more than {MAX_NODES} values; a config does not")
        return super().compose_node(parent, index)

    def construct_yaml_int(self, node):
        value = super().construct_yaml_int(node)
        if not -(1 << 63) <= value < 1 << 64:
            raise YAMLFileError(f"line {_line(node)}: a whole number beyond 64 bits")
        return value


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


def _check_duplicate_keys(root: yaml.Node) -> None:
    """`a: {b: 1}` and `a.b: 2` are the same key: configs may write dotted keys."""
    seen: dict[str, int] = {}  # line by dotted key
    visited: set[int] = set()  # a node with aliases is checked once
    todo = [("", root)]
    while todo:
        prefix, node = todo.pop()
        if id(node) in visited:
            continue
        visited.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            todo += [(f"{prefix}{index}.", item) for index, item in enumerate(node.value)]
        if not isinstance(node, yaml.MappingNode):
            continue
        for key, value in node.value:
            name = f"{prefix}{key.value if isinstance(key, yaml.ScalarNode) else _line(key)}"
            line = _line(key)
            if name in seen:
                first, second = sorted((seen[name], line))
                raise YAMLFileError(
                    f"{name[:80]} is given twice, in lines {first} and {second}; keep one of them"
                )
            seen[name] = line
            todo.append((f"{name}.", value))


def _check_expanded_size(root: yaml.Node) -> None:
    sizes: dict[int, int] = {}
    inside: set[int] = set()

    def size(node: yaml.Node) -> int:
        if isinstance(node, yaml.ScalarNode):
            return 1
        if id(node) in inside:
            raise YAMLFileError(f"line {_line(node)}: an anchor that holds an alias of itself")
        if id(node) not in sizes:
            inside.add(id(node))
            is_list = isinstance(node, yaml.SequenceNode)
            parts = node.value if is_list else [part for pair in node.value for part in pair]
            sizes[id(node)] = 1 + sum(map(size, parts))
            inside.remove(id(node))
        return sizes[id(node)]

    if size(root) > MAX_NODES:
        raise YAMLFileError(f"aliases expand to more than {MAX_NODES} values; write the values out")


def _line(node: yaml.Node) -> int:
    return node.start_mark.line + 1
