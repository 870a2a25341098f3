"""megastep/errors.py: the tree in its docstring, and errors that cross process boundaries."""

import inspect
import pickle
import re

import pytest

from megastep import errors
from megastep.errors import DataError, MegastepError, RolloutFailed, RunFailed, UserError

CLASSES = {
    name: found
    for name, found in inspect.getmembers(errors, inspect.isclass)
    if found.__module__ == errors.__name__
}


def drawn() -> dict[str, str | None]:
    """Class → parent, from the tree of the docstring."""
    parents: dict[str, str | None] = {}
    path: list[str] = []
    for line in errors.__doc__.splitlines():
        found = re.match(r" {4}([ │├└─]*)([A-Z]\w+)", line)
        if found:
            depth = len(found[1]) // 4
            parents[found[2]] = path[depth - 1] if depth else None
            path[depth:] = [found[2]]
    return parents


def test_every_class_is_in_the_tree():
    assert sorted(drawn()) == sorted(CLASSES)


@pytest.mark.parametrize("name", CLASSES)
def test_classes_derive_as_drawn(name):
    ours = [base.__name__ for base in CLASSES[name].__bases__ if base.__name__ in CLASSES]
    parent = drawn()[name]
    assert ours == ([] if parent is None else [parent])


def test_the_tree_has_two_branches():
    assert drawn()["UserError"] == drawn()["RunFailed"] == "MegastepError"
    assert not issubclass(UserError, RunFailed) and not issubclass(RunFailed, UserError)


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("given", ["one line", ["first", "second"]])
def test_errors_survive_pickle(name, given):
    """Ranks and engines raise them in other processes."""
    error = CLASSES[name](given)
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is type(error)
    assert back.problems == error.problems == ([given] if isinstance(given, str) else given)
    assert str(back) == "\n".join(back.problems)


def test_the_builtin_bases():
    """Callers may catch ValueError for bad input and RuntimeError for failures."""
    assert issubclass(UserError, ValueError) and issubclass(RunFailed, RuntimeError)
    assert issubclass(errors.RolloutError, ValueError)


def test_summary_is_one_short_line():
    assert MegastepError("one").summary() == "one"
    assert RolloutFailed(["one", "two", "three"]).summary() == "one (and 2 more)"
    summary = MegastepError(["x" * 5000, "two"]).summary()
    assert summary == "x" * 297 + "... (and 1 more)"


def test_data_errors_are_one_line_each():
    (line,) = DataError("row 3:\n\n" + "y" * 5000 + "\0end").problems
    assert line.startswith("row 3: yyy") and line.endswith("yyy\\0end") and len(line) < 520
    assert DataError(["a\nb", "c"]).problems == ["a b", "c"]
