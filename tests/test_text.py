"""One-line texts: any value or error, short, printable, without secrets."""

import pytest

from megastep import redaction
from megastep.text import describe, one_line, shorten

SECRET = "sk-one-line-secret"


class Unprintable(Exception):
    def __str__(self):
        raise ValueError

    def __repr__(self):
        raise ValueError


@pytest.fixture
def secret(monkeypatch):
    monkeypatch.setenv("TEXT_KEY", SECRET)
    redaction.resolved({"key": "${env:TEXT_KEY}"})


def test_one_line_joins_lines_and_limits_their_length():
    assert one_line("a\n  b\tc") == "a b c"
    assert one_line("x" * 1000) == "x" * 300 and one_line("x" * 1000, 160) == "x" * 160
    assert one_line(ValueError("a\n\ud800")) == "a \\ud800"
    assert one_line(Unprintable()) == "its text cannot be read, ValueError"


def test_describe_names_the_type():
    assert describe(KeyError("x")) == "KeyError: 'x'"


def test_shorten_limits_the_repr():
    assert shorten([1, "a"]) == "[1, 'a']"
    assert len(shorten("x" * 1000)) == 80 and len(shorten(10**400)) <= 80
    assert shorten(Unprintable()).startswith("<Unprintable instance at")


def test_secrets_are_hidden_before_the_text_is_cut(secret):
    """Half a secret would not be found."""
    padding = "x" * (300 - len(SECRET) // 2)
    assert SECRET[:6] not in one_line(padding + SECRET)
    assert SECRET[:6] not in shorten("x" * 60 + SECRET)
    assert shorten({"key": SECRET}) == "{'key': '***'}"
