"""Data files: invalid rows are reported by file and line."""

import json
import os

import pyarrow
import pyarrow.parquet
import pytest

import megastep.trainer.loop  # noqa: F401  imported here, so that no case pays for it
from megastep.envs.guess import Guess
from megastep.envs.search import Search
from megastep.envs.sql import SQL
from megastep.errors import DataError
from megastep.rollout.data import read_rows

from .harness import CONFIG, check_lines, rejected

GOOD = b'{"secret": 1}\n'


def problems(source, env=Guess) -> list[str]:
    with pytest.raises(DataError) as error:
        read_rows(str(source), env, 0, 0)
    check_lines([f"error: {line}" for line in error.value.problems])
    return error.value.problems


LINES = {  # the second line of a file, and its error
    "text": (b"nonsense", "not readable as JSON"),
    "half": (b'{"secret": ', "not readable as JSON"),
    "two_values": (b'{"secret": 1} {"secret": 2}', "not readable as JSON"),
    "single_quotes": (b"{'secret': 1}", "not readable as JSON"),
    "comma": (b'{"secret": 1,}', "not readable as JSON"),
    "comment": (b'{"secret": 1} // x', "not readable as JSON"),
    "deep": (b"[" * 100_000, "not readable as JSON"),
    "deep_object": (b'{"a":' * 100_000, "not readable as JSON"),
    "digits": (b'{"secret": ' + b"9" * 5000 + b"}", "not readable as JSON"),
    "latin": (b'{"secret": "\xe9"}', "not readable as JSON"),
    "null_bytes": (b"\0\0\0\0", "not readable as JSON"),
    "second_mark": (b'\xef\xbb\xbf\xef\xbb\xbf{"secret": 1}', "not readable as JSON"),
    "surrogate": (b'{"secret": 1, "note": "\\ud800"}', "lone surrogate '\\ud800'"),
    "surrogate_key": (b'{"secret": 1, "\\udfff": 1}', "lone surrogate"),
    "surrogate_deep": (b'{"secret": 1, "x": [{"y": ["\\uD83D"]}]}', "lone surrogate"),
    "surrogates_swapped": (b'{"secret": 1, "x": "\\udc00\\ud800"}', "lone surrogate"),
    "list": (b"[1]", "holds a list"),
    "string": (b'"secret"', "holds a str"),
    "number": (b"5", "holds a int"),
    "null": (b"null", "holds a NoneType"),
    "true": (b"true", "holds a bool"),
    "nan": (b"NaN", "holds a float"),
    "empty": (b"{}", "column secret is missing"),
    "other": (b'{"Secret": 1}', "column secret is missing"),
    "none": (b'{"secret": null}', "column secret is missing"),
    "kind_text": (b'{"secret": "1"}', "column secret is '1'; int is needed"),
    "kind_float": (b'{"secret": 1.0}', "column secret is '1.0'; int is needed"),
    "kind_bool": (b'{"secret": true}', "column secret is 'True'; int is needed"),
    "kind_list": (b'{"secret": [1]}', "column secret is '[1]'; int is needed"),
    "kind_long": (b'{"secret": "' + b"x" * 100_000 + b'"}', "column secret is 'xxx"),
    "kind_lines": (b'{"secret": "a\\nb"}', "column secret is 'a\\nb'"),
    "kind_nan": (b'{"secret": NaN}', "column secret is 'nan'"),
}


@pytest.mark.parametrize("name", LINES)
def test_c1_lines(name, tmp_path):
    line, message = LINES[name]
    path = tmp_path / "rows.jsonl"
    path.write_bytes(GOOD + line + b"\n" + GOOD)
    (problem,) = problems(path)
    assert problem.startswith(f"{path}:2: ") and message in problem


@pytest.mark.parametrize(
    "content, rows",
    [
        (b"\xef\xbb\xbf" + GOOD, 1),
        (b"\xef\xbb\xbf\n" + GOOD, 1),
        (GOOD.replace(b"\n", b"\r\n") * 2, 2),
        (b"\n\n" + GOOD + b"  \n\t\n", 1),
        (b'{"secret": 1, "note": "a\xe2\x80\xa8b\xe2\x80\xa9c\xc2\x85d"}\n', 1),
        (GOOD.strip(), 1),
        (b'{"secret": 1, "note": "\\ud83d\\ude00"}\n', 1),
        (b'{"secret": 1, "note": "\\\\ud800"}\n', 1),
    ],
)
def test_valid_files(content, rows, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    assert len(read_rows(str(path), Guess, 0, 0)) == rows


def test_a_file_of_invalid_lines_is_reported_in_a_few_lines(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"x\n" * 10_000)
    assert len(problems(path)) == 6


@pytest.mark.parametrize(
    "source",
    [
        "",
        ".",
        "x",
        "rows.csv",
        "rows.json",
        "rows",
        ".jsonl",
        "none/at/all.jsonl",
        "a\0b.jsonl",
        "x" * 5000 + ".jsonl",
        "none.parquet",
        "hf:",
        "a\nb.jsonl",
        "/dev/null",
        "generated.jsonl",
        "Generated",
        "http://x/y.jsonl",
        "~/x.jsonl",
        "rows.JSONL",
    ],
)
def test_sources(source):
    assert len(problems(source)) == 1


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("made", ["folder", "empty", "unreadable"])
def test_files(made, suffix, tmp_path):
    path = tmp_path / f"rows.{suffix}"
    if made == "folder":
        path.mkdir()
    elif made == "empty":
        path.write_bytes(b"")
    else:
        path.symlink_to(path)
    assert str(path) in problems(path)[0]


def test_a_pipe_does_not_block(tmp_path):
    os.mkfifo(tmp_path / "rows.jsonl")
    assert problems(tmp_path / "rows.jsonl") == [
        f"{tmp_path}/rows.jsonl: cannot be read (not a file)"
    ]


@pytest.mark.parametrize(
    "content", [b"text", b"PAR1", b"PAR1" + b"\0" * 100 + b"PAR1", b"\xff" * 1000]
)
def test_invalid_parquet(content, tmp_path):
    path = tmp_path / "rows.parquet"
    path.write_bytes(content)
    assert problems(path)[0].startswith(f"{path}: cannot be read as Parquet (")


def test_parquet_with_invalid_utf_8(tmp_path):
    bad = pyarrow.array([b"\xff\xfe"], pyarrow.binary()).view(pyarrow.string())
    pyarrow.parquet.write_table(
        pyarrow.table({"secret": [1], "note": bad}), tmp_path / "rows.parquet"
    )
    assert "cannot be read as Parquet" in problems(tmp_path / "rows.parquet")[0]


@pytest.mark.parametrize(
    "env, row, column",
    [
        (SQL, {"question": "?", "database": "x"}, "sql"),
        (SQL, {"question": 1, "database": "x", "sql": "y"}, "question"),
        (SQL, {"question": "?", "database": ["x"], "sql": "y"}, "database"),
        (Search, {"question": "?", "answers": "x"}, "answers"),
        (Search, {"answers": ["x"]}, "question"),
        (Search, {"question": None, "answers": ["x"]}, "question"),
    ],
)
def test_columns_of_environments(env, row, column, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    assert problems(path, env)[0].startswith(f"{path}:1: column {column} is ")


@pytest.mark.parametrize("name", ["deep", "surrogate", "kind_long", "latin"])
def test_c1_on_the_command_line(name, tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(LINES[name][0] + b"\n")
    rejected(
        "train",
        CONFIG,
        "env.name=guess",
        f"data.train={tmp_path}/rows.jsonl",
        names=f"{tmp_path}/rows.jsonl:1: ",
    )
