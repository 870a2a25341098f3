"""Reading a configuration: the schema's defaults, YAML files that hold what differs, `key=value`.

    defaults (schema.py)  ←  base: other.yaml  ←  CONFIG.yaml  ←  key=value ...

Relative paths in a file are relative to that file, those on the command line to the working
directory (paths.py). Every problem is collected, one line each: the key, the value, what is right.
"""

import difflib
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import Field, asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megastep import redaction
from megastep.config import checks, paths
from megastep.config.schema import (
    Config,
    open_keys,
    sections,
    settings,
    stored,
    type_name,
    value_of,
    written,
)
from megastep.config.yaml_file import parse, read_yaml
from megastep.errors import ConfigError, YAMLFileError
from megastep.text import shown

_MAX_BASES = 16
COMMAND_LINE = "command line"
DEFAULT = "default"


@dataclass
class Loaded:
    """A configuration and the source of each value that is not a default."""

    config: Config
    sources: dict[str, str] = field(default_factory=dict)  # key → file, or COMMAND_LINE


def load(path: str | Path, overrides: Sequence[str] = (), has_cuda: bool | None = None) -> Config:
    """Read, merge, type-check and check. Raises ConfigError with every problem found.

    has_cuda: for a machine other than this one.
    """
    return load_with_sources(path, overrides, has_cuda).config


def load_with_sources(
    path: str | Path, overrides: Sequence[str] = (), has_cuda: bool | None = None
) -> Loaded:
    problems: list[str] = []
    values = _Values()
    for source, tree in _chain(Path(path)):
        for key, value in _leaves(tree):
            values.set(*_shorthand(stored(key), value), source, problems)
    for key, value in _parse_overrides(overrides, problems):
        values.set(*_shorthand(stored(key), value), None, problems)
    missing = sorted(OmegaConf.missing_keys(values.typed))
    problems += [f"{key}: must be given" for key in missing]
    if missing:
        raise ConfigError(problems)
    # Validate even after errors; rejected fields keep their defaults.
    config = values.result()
    problems += checks.validate(config, has_cuda, values.model_as_written)
    if problems:
        raise ConfigError(problems)
    return Loaded(config, values.sources)


def folders(path: str | Path) -> list[Path]:
    """Folders of a config and of its bases, its own first."""
    sources = [source.resolve().parent for source, _ in reversed(_chain(Path(path)))]
    return list(dict.fromkeys(sources))


def to_yaml(config: Config) -> str:
    """The configuration as a file: without secrets, with absolute paths."""
    tree = redaction.redacted(asdict(paths.absolute(config)))
    tree = {written(name): section for name, section in tree.items()}
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)


# ---------------------------------------------------------------- files


def _chain(path: Path, seen: tuple[Path, ...] = ()) -> list[tuple[Path, dict[str, Any]]]:
    """The file and its bases with their content, base first."""
    try:
        tree = read_yaml(path)
    except YAMLFileError as error:
        raise ConfigError(f"{shown(str(path), 200)}: {error}") from None
    if path.resolve() in seen:
        raise ConfigError(f"{path}: base: leads back to the file itself")
    if len(seen) > _MAX_BASES:
        raise ConfigError(f"{path}: base: a chain of more than {_MAX_BASES} files")
    base = tree.get("base")
    if base is None:
        return [(path, tree)]
    if not isinstance(base, str) or not base.isprintable():
        raise ConfigError(f"{path}: base = {shown(base)}: must be the path of another config")
    return _chain(path.parent / base, (*seen, path.resolve())) + [(path, tree)]


def _leaves(tree: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """{"a": {"b": 1}} → [("a.b", 1)]; a file's `base` is not part of the configuration."""
    result: list[tuple[str, Any]] = []
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if name == "base":
            continue
        if isinstance(value, dict) and name not in open_keys():
            result += _leaves(value, f"{name}.")
        else:
            result.append((name, value))
    return result


def _parse_overrides(overrides: Sequence[str], problems: list[str]) -> list[tuple[str, Any]]:
    result = []
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not key:
            problems.append(f"{shown(text)}: not of the form key=value, such as train.steps=10")
            continue
        try:
            result.append((key, parse(value)))
        except YAMLFileError as error:
            problems.append(f"{shown(key)} = {shown(value)}: {error}")
    return result


# ---------------------------------------------------------------- values


@cache
def _schema() -> DictConfig:
    return OmegaConf.structured(Config)


class _Values:
    """Values of files and overrides in the schema's types; later sources replace earlier ones."""

    def __init__(self) -> None:
        self.typed = deepcopy(_schema())
        self.open: dict[str, dict[str, Any]] = {key: {} for key in open_keys()}
        self.sources: dict[str, str] = {}
        self.model_as_written: Any = None

    def set(self, key: str, value: Any, source: Path | None, problems: list[str]) -> None:
        """source: the file; None: the command line."""
        problem = _unknown(key) or _interpolation(key, value)
        if problem is None:
            if key == "model.path":
                self.model_as_written = value
            if source is None:
                value = paths.on_command_line(key, value)
            else:
                value = paths.in_file(key, value, source.parent)
            is_open = _open_key_of(key) is not None
            problem = self._set_open(key, value) if is_open else self._set_typed(key, value)
        if problem is not None:
            problems.append(f"{source}: {problem}" if source else problem)
            return
        self.sources[_open_key_of(key) or key] = str(source or COMMAND_LINE)

    def _set_typed(self, key: str, value: Any) -> str | None:
        try:
            if isinstance(value, list) and any(isinstance(part, dict | list) for part in value):
                raise TypeError  # OmegaConf would accept nested lists
            # YAML 1.1 reads "1e-3" as a string; OmegaConf converts it to the field's type.
            OmegaConf.update(self.typed, key, value)
        except (OmegaConfBaseException, ArithmeticError, ValueError, TypeError):
            return _wrong_type(key, value, settings()[key])
        return None

    def _set_open(self, key: str, value: Any) -> str | None:
        """Keeps keys and strings as they are; OmegaConf would interpret them."""
        name = _open_key_of(key)
        assert name is not None
        parts = key[len(name) + 1 :].split(".") if key != name else []
        for part in reversed(parts):
            if not part:
                return f"{shown(key)}: not a key; {name}.NAME is needed"
            value = {part: value}
        if not isinstance(value, dict):
            return _wrong_type(key, value, settings()[name])
        for option, given in value.items():
            if not isinstance(option, str):
                return f"{name}: {shown(option)} is not a name; write it in quotes if it is one"
            if not _is_plain(given):
                return (
                    f"{name}.{option} = {shown(given)}: must be text, a number, true, false, null, "
                    "a list or a mapping; write anything else in quotes"
                )
        self.open[name] = _merged(self.open[name], value)
        return None

    def result(self) -> Config:
        config = OmegaConf.to_object(self.typed)
        assert isinstance(config, Config)
        for name, options in self.open.items():
            section, _, entry = name.rpartition(".")
            setattr(value_of(config, section), entry, options)
        return config


def _wrong_type(key: str, value: Any, wanted: Field) -> str:
    return f"{written(key)} = {shown(repr(value))}: wrong type, {type_name(wanted)} is needed"


def _merged(ours: dict, theirs: dict) -> dict:
    both = {
        key: _merged(ours[key], value)
        for key, value in theirs.items()
        if isinstance(ours.get(key), dict) and isinstance(value, dict)
    }
    return ours | theirs | both


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, [*value.keys(), *value.values()]))
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | int | float)


def _interpolation(key: str, value: Any) -> str | None:
    """Only `${env:NAME}` in env.options is replaced; OmegaConf would interpret `${...}`."""
    in_options = _open_key_of(key) == paths.OPTIONS
    for text in checks.texts(value):
        if "${" in (redaction.without_variables(text) if in_options else text):
            instead = (
                "${env:NAME} reads an environment variable"
                if in_options
                else "write the value itself"
            )
            return f"{written(key)} = {shown(text)}: ${{...}} is not replaced here; {instead}"
    return None


# ---------------------------------------------------------------- keys


def _shorthand(key: str, value: Any) -> tuple[str, Any]:
    """`agent: module:function` means `agent: {function: module:function}`."""
    return ("agent.function", value) if key == "agent" and isinstance(value, str) else (key, value)


def _open_key_of(key: str) -> str | None:
    """The open key that this key is, or belongs to."""
    return next((name for name in open_keys() if key == name or key.startswith(f"{name}.")), None)


def _unknown(key: str) -> str | None:
    if key in settings() or _open_key_of(key):
        return None
    leaves = [written(name) for name in settings()]
    key = shown(written(key))
    inside = [name for name in leaves if name.startswith(f"{key}.")]
    if stored(key) in sections():
        return f"{key}: is a section; give one of its keys: " + ", ".join(inside)
    near = _nearest(key, leaves)
    known = ", ".join(dict.fromkeys(name.partition(".")[0] for name in leaves))
    hint = f"did you mean {near}?" if near else f"known sections: {known}"
    return f"{key}: unknown key; {hint}"


def _nearest(key: str, leaves: list[str]) -> str | None:
    """A completion of the key, else the closest spelling, else the same name in another section."""
    name = key.rsplit(".", 1)[-1]
    candidates = (
        [leaf for leaf in leaves if leaf.startswith(key)]
        or difflib.get_close_matches(key, leaves, n=1, cutoff=0.6)
        or [leaf for leaf in leaves if leaf.rsplit(".", 1)[-1] == name]
    )
    return candidates[0] if candidates else None
