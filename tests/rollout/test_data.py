"""Data sets: sources, invalid rows reported by line, a resumable order."""

import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from megastep.config import DataConfig
from megastep.envs.chase import Chase
from megastep.envs.guess import Guess
from megastep.envs.sql import SQL
from megastep.errors import DataError, EnvError
from megastep.rollout.data import PromptStream, load_data, read_rows

ROWS = [{"secret": i, "note": "x"} for i in range(10)]


def problems_of(source, env=Guess) -> list[str]:
    with pytest.raises(DataError) as error:
        read_rows(str(source), env, 0, 0)
    return error.value.problems


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_jsonl_parquet_and_hf_datasets_give_the_same_rows(tmp_path):
    import datasets

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "plain")
    splits = {
        "train": datasets.Dataset.from_list(ROWS),
        "test": datasets.Dataset.from_list(ROWS[:3]),
    }
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "split")
    jsonl(tmp_path / "a.jsonl", ROWS)
    for source in ("{}/a.jsonl", "{}/a.parquet", "hf:{}/plain", "hf:{}/split"):
        assert read_rows(source.format(tmp_path), Guess, 0, 0) == ROWS
    assert read_rows(f"hf:{tmp_path}/split:test", Guess, 0, 0) == ROWS[:3]
    assert problems_of(f"hf:{tmp_path}/split:dev") == [
        f"hf:{tmp_path}/split:dev: has no split dev; "
        f"write hf:{tmp_path}/split:SPLIT with one of train, test"
    ]
    plain = f"hf:{tmp_path}/plain"
    assert problems_of(f"{plain}:train") == [f"{plain}:train: has no splits; write {plain}"]


def test_generated_rows_follow_from_the_seed():
    rows = read_rows("generated", Chase, 20, 3)
    assert rows == read_rows("generated", Chase, 20, 3) != read_rows("generated", Chase, 20, 4)
    assert rows[:5] == read_rows("generated", Chase, 5, 3)
    with pytest.raises(EnvError, match="SQL cannot generate episodes; give data.train a file"):
        read_rows("generated", SQL, 5, 3)


def test_invalid_rows_are_reported_by_line(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text(
        '{"secret": 1}\n\n{"secret": "two"}\nnonsense\n[1]\n{"other": 3}\n{"secret": true}\n'
    )
    assert problems_of(path) == [
        f"{path}:3: column secret is 'two'; int is needed",
        f"{path}:4: not readable as JSON (Expecting value: line 1 column 1 (char 0))",
        f"{path}:5: holds a list; an object with columns is needed",
        f"{path}:6: column secret is missing; Guess needs secret (int)",
        f"{path}:7: column secret is 'True'; int is needed",
    ]
    jsonl(path, [{"other": 1}] * 9)
    assert (
        len(problems_of(path)) == 6 and problems_of(path)[-1] == f"{path}: 4 more rows like these"
    )
    table = tmp_path / "bad.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"secret": 1}, {"secret": None}]), table)
    assert problems_of(table) == [
        f"{table}: row 2: column secret is missing; Guess needs secret (int)"
    ]


def test_missing_and_empty_sources(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "not.parquet").write_text("text")
    assert problems_of(tmp_path / "empty.jsonl") == [f"{tmp_path}/empty.jsonl: has no rows"]
    assert problems_of(tmp_path / "none.jsonl") == [
        f"{tmp_path}/none.jsonl: cannot be read (No such file or directory)"
    ]
    assert problems_of(tmp_path / "not.parquet")[0].startswith(
        f"{tmp_path}/not.parquet: cannot be read as Parquet ("
    )
    needed = "FILE.jsonl, FILE.parquet, hf:PLACE or generated is needed"
    assert problems_of("rows.csv") == [f"rows.csv: not a data set; {needed}"]


def test_held_out_rows_are_never_trained_on(tmp_path):
    config = DataConfig(train=jsonl(tmp_path / "a.jsonl", ROWS), held_out=3)
    train, held_out = load_data(config, Guess, seed=1)
    assert len(train) == 7 and len(held_out) == 3
    assert sorted(r["secret"] for r in train + held_out) == list(range(10))
    assert load_data(config, Guess, seed=1) == (train, held_out)
    config.eval = jsonl(tmp_path / "b.jsonl", ROWS[:2])
    assert load_data(config, Guess, seed=1) == (ROWS, ROWS[:2])
    with pytest.raises(
        DataError, match="data.held_out = 10: .*a.jsonl has 10 rows; hold out fewer"
    ):
        load_data(DataConfig(train=config.train, held_out=10), Guess, seed=1)


def test_x6_a_stream_resumes_at_its_position():
    whole = PromptStream(ROWS, seed=5).take(34)
    assert len({p.id for p in whole}) == 34  # across epochs
    assert sorted(p.row["secret"] for p in whole[10:20]) == list(range(10))
    assert [p.row for p in whole[:10]] != [p.row for p in whole[10:20]] != ROWS
    for stop in (0, 4, 10, 13, 20):
        stream = PromptStream(ROWS, seed=5)
        stream.take(stop)
        resumed = PromptStream(ROWS, seed=5)
        resumed.seek(json.loads(json.dumps(stream.position())))
        assert resumed.take(34 - stop) == whole[stop:]


@pytest.mark.parametrize(
    "other, message",
    [
        (PromptStream(ROWS[:4], seed=5), "rows 10, not 4; checksum"),
        (PromptStream([*ROWS[:-1], {"secret": 99}], seed=5), "checksum"),
        (PromptStream(ROWS, seed=6), "seed 5, not 6"),
        (PromptStream(ROWS, seed=5, shuffle=False), "shuffle 1, not 0"),
    ],
)
def test_x6_a_stream_does_not_resume_in_other_rows(other, message):
    stream = PromptStream(ROWS, seed=5)
    stream.take(7)
    with pytest.raises(
        DataError, match=f"data.train: is not what the checkpoint was trained on .{message}"
    ):
        other.seek(stream.position())


def test_an_unshuffled_stream_keeps_the_order():
    assert [p.row for p in PromptStream(ROWS, seed=5, shuffle=False).take(12)] == ROWS + ROWS[:2]


def test_restored_prompts_share_the_permutation_of_their_epoch(monkeypatch):
    stream = PromptStream([{"n": i} for i in range(50)], seed=741)
    drawn = stream.take(120)
    made = []
    default_rng = np.random.default_rng
    monkeypatch.setattr(
        np.random, "default_rng", lambda seed: made.append(seed) or default_rng(seed)
    )
    assert [stream.prompt(prompt.id) for prompt in drawn] == drawn
    assert len(made) <= 3  # epochs
