"""Secrets of environments: named in the config, read where they are used, written nowhere.

    env:
      options:
        api_key: ${env:SEARCH_KEY}     the variable SEARCH_KEY of the process that trains

The config keeps the name. `resolved` gives an environment the value when it is constructed. What is written,
config.yaml and what goes to W&B, passes through `redacted`: values under keys that sound like secrets become `***`.
"""

import os
import re
from collections.abc import Iterator
from typing import Any

HIDDEN = "***"
_VARIABLE = re.compile(r"\$\{env:([A-Za-z_][A-Za-z0-9_]*)\}")
_SECRET_WORDS = {"apikey", "auth", "authorization", "bearer", "credential", "credentials", "passphrase", "passwd",
                 "password", "pwd", "secret", "secrets", "token"}
_SECRET_PAIRS = re.compile(r"(api|access|private|secret|service|account)_?key(_id)?$")
_IN_ADDRESS = re.compile(r"(://)[^/@\s]+@")  # user:password@host


def without_variables(text: str) -> str:
    """What is left of it without every `${env:NAME}`."""
    return _VARIABLE.sub("", text)


def unset_variables(options: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Key, value and the variable that is not there."""
    for key, text in _texts(options):
        for name in _VARIABLE.findall(text):
            if name not in os.environ:
                yield key, text, name


def resolved(options: dict[str, Any]) -> dict[str, Any]:
    return _mapped(options, lambda text: _VARIABLE.sub(lambda found: os.environ[found[1]], text))


def values_of(options: dict[str, Any]) -> list[str]:
    """What the variables hold, to be kept out of what an environment reports."""
    names = {name for _, text in _texts(options) for name in _VARIABLE.findall(text)}
    return [os.environ[name] for name in names if os.environ.get(name)]


def hidden(metrics: dict[str, Any], secrets: list[str]) -> dict[str, Any]:
    """`metrics` without these values, such as in the text of an exception."""

    def hide(text: str) -> str:
        for secret in secrets:
            text = text.replace(secret, HIDDEN)
        return text

    return _mapped(metrics, hide) if secrets else metrics


def redacted(tree: dict[str, Any]) -> dict[str, Any]:
    """A config's tree as it may be written."""
    return {key: _redacted(str(key), value) for key, value in tree.items()}


def _redacted(key: str, value: Any) -> Any:
    if isinstance(value, dict):
        return redacted(value)
    if isinstance(value, list):
        return [_redacted(key, entry) for entry in value]
    if not isinstance(value, str) or not value:
        return value
    if _sounds_secret(key) and not _VARIABLE.fullmatch(value):
        return HIDDEN
    return _IN_ADDRESS.sub(rf"\1{HIDDEN}@", value)


def _sounds_secret(key: str) -> bool:
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", key).lower().replace("-", "_")
    return bool(set(name.split("_")) & _SECRET_WORDS or _SECRET_PAIRS.search(name))


def hidden_keys(tree: dict[str, Any]) -> Iterator[str]:
    """Keys whose value was redacted when the config was written."""
    for key, text in _texts(tree):
        if text == HIDDEN or f"://{HIDDEN}@" in text:
            yield key


def _texts(tree: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _texts(value, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(tree, list):
        for i, value in enumerate(tree):
            yield from _texts(value, f"{prefix}[{i}]")
    elif isinstance(tree, str):
        yield prefix, tree


def _mapped(value: Any, change) -> Any:
    if isinstance(value, dict):
        return {key: _mapped(entry, change) for key, entry in value.items()}
    if isinstance(value, list):
        return [_mapped(entry, change) for entry in value]
    return change(value) if isinstance(value, str) else value
