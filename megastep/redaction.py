"""Secrets of environments: named in the config, read at use, never written.

    env:
      options:
        api_key: ${env:SEARCH_KEY}     the variable SEARCH_KEY of the training process

The config keeps the variable's name; `resolved` returns the value when an environment is created.
config.yaml and uploads to W&B pass through `redacted`, which replaces values under secret-like keys
by `***`. Reports of environments and texts of exceptions pass through `hide` before they are cut.
"""

import os
import re
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote, unquote

HIDDEN = "***"
SHORTEST = 4  # characters of a value that is hidden; shorter ones occur in any text
_VARIABLE = re.compile(r"\$\{env:([A-Za-z_][A-Za-z0-9_]*)\}")
_SECRET_WORDS = {
    "apikey",
    "apikeys",
    "auth",
    "authorization",
    "bearer",
    "credential",
    "credentials",
    "oauth",
    "passphrase",
    "passphrases",
    "passwd",
    "password",
    "passwords",
    "pwd",
    "secret",
    "secrets",
    "sig",
    "signature",
    "token",
}
_SECRET_PARTS = re.compile(
    r"(^|_)keys?$|(api|access|private|secret|service|account)_?keys?(_id)?$"
    r"|(access|api|auth|refresh|session)_?tokens$"
)
_AMOUNTS = re.compile(r"token_(budget|count|length|limit|size)")  # counts of model tokens
_NEW_WORD = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
# user:password@ extends to the last @, since a password may hold @ and /. Without a colon: to the
# last @ before the path.
_IN_ADDRESS = re.compile(r"://([^/?#\s:]*:\S*|[^/?#\s]+)@")
_IN_QUERY = re.compile(r"([?&;#])([^=?&;#\s]+)=([^&\s]+)")


# ---------------------------------------------------------------- variables


def without_variables(text: str) -> str:
    """The text without its `${env:NAME}`."""
    return _VARIABLE.sub("", text)


def unset_variables(options: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Key, value and name of each variable that is not set."""
    for key, text in _texts(options):
        for name in _VARIABLE.findall(text):
            if name not in os.environ:
                yield key, text, name


def variables(options: dict[str, Any]) -> dict[str, str]:
    """The variables that the options name, for another process."""
    names = {name for _, text in _texts(options) for name in _VARIABLE.findall(text)}
    return {name: os.environ[name] for name in names}


def resolved(options: dict[str, Any]) -> dict[str, Any]:
    """The options with the variables' values, which `hide` removes from then on."""
    return _mapped(options, lambda text: _VARIABLE.sub(lambda found: _value(found[1]), text))


def _value(name: str) -> str:
    value = os.environ[name]
    if len(value.strip()) >= SHORTEST and value not in _forms:
        # As it is, on one line, in a repr, in a URL.
        in_address = quote(value, safe="", errors="surrogateescape")
        _forms[value] = {value, " ".join(value.split()), repr(value)[1:-1], in_address}
    return value


_forms: dict[str, set[str]] = {}  # value of a variable → its spellings


def hide(text: str) -> str:
    """The text without values of variables. Apply before cutting: half a value is not found."""
    spellings = [form for forms in _forms.values() for form in forms]
    for form in sorted(spellings, key=len, reverse=True):
        text = text.replace(form, HIDDEN)
    return text


def hidden(metrics: Any) -> Any:
    """`hide` for every name and text of the metrics."""
    if not _forms:
        return metrics
    if isinstance(metrics, dict):
        return {hide(key): hidden(value) for key, value in metrics.items()}
    if isinstance(metrics, list):
        return [hidden(value) for value in metrics]
    return hide(metrics) if isinstance(metrics, str) else metrics


# ---------------------------------------------------------------- files and uploads


def redacted(tree: dict[str, Any]) -> dict[str, Any]:
    """A config's tree without secrets."""
    return _redacted(tree, is_secret=False)


def _redacted(value: Any, is_secret: bool) -> Any:
    """is_secret: a key above the value names a secret."""
    if isinstance(value, dict):
        return {
            key: _redacted(entry, is_secret or _names_secret(str(key)))
            for key, entry in value.items()
        }
    if isinstance(value, list):
        return [_redacted(entry, is_secret) for entry in value]
    if value is None or value == "" or isinstance(value, bool):  # no secrets
        return value
    if is_secret:
        return value if isinstance(value, str) and _VARIABLE.fullmatch(value) else HIDDEN
    return _redacted_address(value) if isinstance(value, str) else value


def _redacted_address(text: str) -> str:
    def user(found: re.Match) -> str:
        plain = without_variables(found[1])
        name, colon, password = plain.partition(":")
        is_variable = plain != found[1] and not (password if colon else name)
        return found[0] if is_variable else f"://{HIDDEN}@"

    def parameter(found: re.Match) -> str:
        before, name, value = found.groups()
        is_plain = _names_secret(unquote(name)) and not _VARIABLE.fullmatch(value)
        return f"{before}{name}={HIDDEN}" if is_plain else found[0]

    return _IN_QUERY.sub(parameter, _IN_ADDRESS.sub(user, text))


def _names_secret(key: str) -> bool:
    words = re.findall(r"[a-z]+", _NEW_WORD.sub("_", key).lower())
    name = _AMOUNTS.sub("", "_".join(words))
    return bool(set(name.split("_")) & _SECRET_WORDS or _SECRET_PARTS.search(name))


def hidden_keys(tree: dict[str, Any]) -> Iterator[str]:
    """Keys whose value was redacted when the config was written."""
    for key, text in _texts(tree):
        parameters = [value for _, _, value in _IN_QUERY.findall(text)]
        if text == HIDDEN or f"://{HIDDEN}@" in text or HIDDEN in parameters:
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


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, dict):
        return {key: _mapped(entry, change) for key, entry in value.items()}
    if isinstance(value, list):
        return [_mapped(entry, change) for entry in value]
    return change(value) if isinstance(value, str) else value
