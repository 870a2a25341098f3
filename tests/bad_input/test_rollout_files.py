"""Rollout files that are damaged, foreign, or of another model.

`train --rollouts` rejects them in one line before any process starts.
"""

import json
import os
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastep.config import load
from megastep.errors import StoreError
from megastep.samples import store
from megastep.samples.store import COLUMNS, OPTIONAL, read, write
from megastep.trainer.saved_rollouts import read_batches
from megastep.types import Group, Step, StopReason, Trajectory
from tests.bad_input.harness import CONFIG, Accepted, check_lines, rejected, run

LAYERS, TOP_K, EXPERTS, VOCAB = 2, 2, 8, 64  # of the model of CONFIG


def step(index, prompt, response, reward, last, **change) -> Step:
    tokens = len(prompt) + len(response) - 1
    routing = np.stack(
        [np.arange(tokens * LAYERS) % EXPERTS, (np.arange(tokens * LAYERS) + 1) % EXPERTS], -1
    )
    made = dict(
        prompt_ids=np.array(prompt, np.int32),
        response_ids=np.array(response, np.int32),
        loss_mask=np.ones(len(response), bool),
        logprobs=np.full(len(response), -1, np.float32),
        versions=np.array([[3, len(response)]], np.int32),
        reward=reward,
        state=index,
        routing=routing.reshape(tokens, LAYERS, TOP_K).astype(np.uint8),
    )
    return Step(index, last, **(made | change))


def rollouts(rewards=(1.0, 0.0), **change) -> list[Group]:
    """Two prompts, a trajectory of two steps for each reward; `change`: of the very first step."""

    def trajectory(id, index, reward):
        changed = change if (id, index) == (0, 0) else {}
        steps = [
            step(0, [5, 6, 7], [8, 9], 0.0, False, **changed),
            step(1, [5, 6, 7, 8, 9, 10], [11, index + 4], reward, True),
        ]
        metrics = {"success": bool(reward), "note": "ü"}
        return Trajectory(id, index, steps, StopReason.DONE, metrics)

    return [Group(id, [trajectory(id, i, r) for i, r in enumerate(rewards)]) for id in range(2)]


def columns_of(groups) -> dict[str, np.ndarray]:
    return {
        name: np.concatenate(
            [np.asarray(p, column.dtype).reshape(-1, *column.shape[1:]) for p in column.pieces]
        )
        for name, column in store._columns(groups).items()
    }


def assemble(
    path, columns: dict, entries: dict | None = None, metadata: dict | None = None, version="1"
):
    """A file without checksums, as another program would write it; `entries`: of its header."""
    described = [{"stop_reason": "done", "env_metrics": {}}] * len(columns["trajectory/index"])
    about = {
        "format": "megastep.rollouts",
        "version": version,
        "trajectories": json.dumps(described),
    } | (metadata or {})
    header = {"__metadata__": {key: value for key, value in about.items() if value is not ...}}
    at = 0
    for name, column in columns.items():
        header[name] = {
            "dtype": store.NAMES[column.dtype.str],
            "shape": list(column.shape),
            "data_offsets": [at, at + column.nbytes],
        }
        at += column.nbytes
    header |= entries or {}
    text = json.dumps({name: entry for name, entry in header.items() if entry is not ...}).encode()
    path.write_bytes(
        struct.pack("<Q", len(text)) + text + b"".join(c.tobytes() for c in columns.values())
    )
    return path


def train_on(path, *settings, names=None) -> str:
    """The error line, which names the file."""
    given = (f"run.dir={path.parent}/runs", "run.wandb=disabled", *settings)
    (line,) = rejected("train", CONFIG, "--rollouts", path, *given, names=str(path))
    assert names is None or names in line, line
    assert not (path.parent / "runs").exists()
    return line


def unreadable(path, names="") -> None:
    """`train_on` for errors that `read` finds: ten times as fast."""
    with pytest.raises(StoreError) as error:
        read(path)
    check_lines([f"error: {error.value}"], str(path))
    assert names in str(error.value)


def accepted(path, *settings) -> None:
    with pytest.raises(Accepted):
        given = (f"run.dir={path.parent}/runs", "run.wandb=disabled", *settings)
        run("train", CONFIG, "--rollouts", path, *given)


def test_a_good_file_is_accepted(tmp_path):
    """In both versions of the format: the baseline of the cases below."""
    write(tmp_path / "two", rollouts())
    accepted(tmp_path / "two")
    accepted(assemble(tmp_path / "one", columns_of(rollouts())))


# ---------------------------------------------------------------- not a rollout file

CONTENTS = {
    "empty": b"",
    "short": b"\x01",
    "text": b"hello, world\n",
    "json": b'{"a": 1}',
    "zeros": bytes(64),
    "pickle": b"\x80\x04\x95" + b"x" * 40,
    "zip": b"PK\x03\x04" * 9,
    "gzip": b"\x1f\x8b" + b"\0" * 40,
    "endless_header": struct.pack("<Q", 2**63) + b"{}",
    "long_header": struct.pack("<Q", 999) + b"{}",
    "no_json": struct.pack("<Q", 4) + b"{no}",
    "list": struct.pack("<Q", 2) + b"[]",
    "not_utf8": struct.pack("<Q", 4) + b'{"\xff"',
    "empty_header": struct.pack("<Q", 2) + b"{}",
    "nested": struct.pack("<Q", 400_000) + b'{"a":' * 80_000,
    "deep_list": struct.pack("<Q", 10**5) + b'{"a":' + b"[" * 99_995,
    "huge_number": struct.pack("<Q", 6_006) + b'{"a":' + b"9" * 6_000 + b"}",
    "metadata_is_a_list": struct.pack("<Q", 19) + b'{"__metadata__":[]}',
    "metadata_is_null": struct.pack("<Q", 21) + b'{"__metadata__":null}',
}


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
def test_a_file_of_another_kind(tmp_path, content):
    (tmp_path / "f").write_bytes(content)
    train_on(tmp_path / "f")


def test_paths_that_are_not_files(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    os.symlink("loop", tmp_path / "loop")
    for path in (tmp_path / "none", tmp_path, tmp_path / "loop", tmp_path / ("x" * 300)):
        unreadable(path, names="cannot be read")
    train_on(tmp_path / "pipe", names="not a file")  # under a time limit
    train_on(tmp_path / "none", names="No such file")


@pytest.mark.parametrize("part", [0.001, 0.1, 0.3, 0.5, 0.7, 0.9, 0.999])
def test_a_truncated_file(tmp_path, part):
    write(tmp_path / "f", rollouts())
    whole = (tmp_path / "f").read_bytes()
    (tmp_path / "f").write_bytes(whole[: int(part * len(whole))])
    train_on(tmp_path / "f")


def test_a_file_with_trailing_bytes(tmp_path):
    write(tmp_path / "f", rollouts())
    with open(tmp_path / "f", "ab") as file:
        file.write(b"12345")
    train_on(tmp_path / "f", names="5 bytes follow its last column")


# ---------------------------------------------------------------- headers

DESCRIPTIONS = {
    "null": None,
    "text": "x",
    "list": [],
    "nothing": {},
    "dtype": {"dtype": "PICKLE"},
    "dtype_number": {"dtype": 5},
    "dtype_list": {"dtype": ["I64"]},
    "wrong_dtype": {"dtype": "F32"},
    "shape_text": {"shape": "12"},
    "shape_negative": {"shape": [-1]},
    "shape_float": {"shape": [2.0]},
    "shape_huge": {"shape": [2**70]},
    "shape_axes": {"shape": [1] * 9},
    "offsets_text": {"data_offsets": "08"},
    "offsets_one": {"data_offsets": [0]},
    "offsets_reversed": {"data_offsets": [8, 0]},
    "offsets_true": {"data_offsets": [False, True]},
    "offsets_far": {"data_offsets": [0, 2**40]},
    "missing": ...,
}
REQUIRED = [name for name in COLUMNS if name not in OPTIONAL]


@pytest.mark.parametrize(
    "name", ["step/index", "prompt_ids", "response_ids", "versions", "step/last"]
)
@pytest.mark.parametrize("description", DESCRIPTIONS)
def test_a_column_with_a_wrong_description(tmp_path, name, description):
    columns = columns_of(rollouts())
    column = columns[name]
    start = sum(c.nbytes for c in list(columns.values())[: list(columns).index(name)])
    entry = {
        "dtype": store.NAMES[column.dtype.str],
        "shape": list(column.shape),
        "data_offsets": [start, start + column.nbytes],
    }
    change = DESCRIPTIONS[description]
    changed = entry | change if isinstance(change, dict) and change else change
    unreadable(assemble(tmp_path / "f", columns, {name: changed}))


@pytest.mark.parametrize("name", REQUIRED)
def test_a_column_that_is_missing_or_of_another_type(tmp_path, name):
    columns = columns_of(rollouts())
    column = columns[name]
    others = {n: c for n, c in columns.items() if n != name}
    if name == "trajectory/index":
        others[name] = column[:0]  # `assemble` reads its length
    train_on(assemble(tmp_path / "f", others))
    other = np.float32 if column.dtype != np.float32 else np.int16
    unreadable(assemble(tmp_path / "f", columns | {name: column.astype(other)}), names=name)
    unreadable(assemble(tmp_path / "f", columns | {name: column[:-1]}))
    longer = np.append(column, column[-1:], 0)
    unreadable(assemble(tmp_path / "f", columns | {name: longer}))


METADATA = {
    "no_format": {"format": ...},
    "format_null": {"format": None},
    "format_list": {"format": ["megastep.rollouts"]},
    "other_format": {"format": "x" * 10_000},
    "no_version": {"version": ...},
    "version_number": {"version": 1},
    "version_0": {"version": "0"},
    "version_9": {"version": "9"},
    "version_word": {"version": "one"},
    "version_superscript": {"version": "²"},
    "version_long": {"version": "9" * 10_000},
    "version_list": {"version": ["1"]},
    "checksums_missing": {"version": "2"},
    "no_trajectories": {"trajectories": ...},
    "trajectories_null": {"trajectories": None},
    "trajectories_list": {"trajectories": [1]},
    "trajectories_no_json": {"trajectories": "[{"},
    "trajectories_number": {"trajectories": "7"},
    "trajectories_object": {"trajectories": "{}"},
    "trajectories_few": {"trajectories": '[{"stop_reason": "done", "env_metrics": {}}]'},
    "trajectories_many": {
        "trajectories": json.dumps([{"stop_reason": "done", "env_metrics": {}}] * 5)
    },
    "trajectories_numbers": {"trajectories": "[1, 2, 3, 4]"},
    "stop_reason_number": {"trajectories": json.dumps([{"stop_reason": 1, "env_metrics": {}}] * 4)},
    "stop_reason_missing": {"trajectories": json.dumps([{"env_metrics": {}}] * 4)},
    "env_metrics_list": {
        "trajectories": json.dumps([{"stop_reason": "done", "env_metrics": []}] * 4)
    },
    "env_metrics_null": {
        "trajectories": json.dumps([{"stop_reason": "done", "env_metrics": None}] * 4)
    },
    "sampling_list": {
        "trajectories": json.dumps(
            [{"stop_reason": "done", "env_metrics": {}, "sampling": [0.9]}] * 4
        )
    },
    "sampling_text": {
        "trajectories": json.dumps(
            [{"stop_reason": "done", "env_metrics": {}, "sampling": {"top_p": "high"}}] * 4
        )
    },
    "sampling_huge": {
        "trajectories": json.dumps(
            [{"stop_reason": "done", "env_metrics": {}, "sampling": {"top_k": 10**1000}}] * 4
        )
    },
    "trajectories_deep": {"trajectories": "[" * 100_000},
    "env_metrics_deep": {
        "trajectories": '[{"stop_reason": "done", "env_metrics": ' + '{"a":' * 100_000
    },
}


@pytest.mark.parametrize("change", METADATA.values(), ids=METADATA)
def test_invalid_metadata(tmp_path, change):
    train_on(assemble(tmp_path / "f", columns_of(rollouts()), metadata=change))


# ---------------------------------------------------------------- values


def changed(name, value, at=0):
    def change(columns):
        columns[name] = columns[name].copy()
        columns[name].reshape(-1)[at] = value

    return change


def bytes_of_bool(columns):
    columns["loss_mask"] = (columns["loss_mask"].view(np.uint8) * 7).view(bool)


def empty_prompt(columns):
    del columns["step/prompt_shared"]
    changed("step/prompt_tokens", 0, 1)(columns)


VALUES = {
    "group_negative": (changed("group/id", -1), "id must be from 0"),
    "group_huge": (changed("group/id", 2**40), "id must be from 0"),
    "group_twice": (changed("group/id", 0, 1), "appears twice"),
    "offsets_not_from_0": (changed("group/trajectories", 1), "offsets must ascend"),
    "offsets_descend": (changed("step/prompt_tokens", 99, 1), "offsets must ascend"),
    "offsets_negative": (changed("step/response_tokens", -(2**60), 1), "offsets must ascend"),
    "offsets_short": (changed("trajectory/steps", 3, -1), "offsets must ascend"),
    "index_twice": (changed("trajectory/index", 0, 1), "must be distinct"),
    "index_negative": (changed("trajectory/index", -4, 1), "must be distinct and not negative"),
    "step_index": (changed("step/index", 7), "must be contiguous from 0"),
    "last": (changed("step/last", True), "marked last"),
    "finish": (changed("step/finish", 200), "damaged"),
    "prompt_negative": (changed("prompt_ids", -5), "negative id -5"),
    "response_negative": (changed("response_ids", -5), "negative id -5"),
    "prompt_empty": (empty_prompt, "prompt_ids is empty"),
    "shared_first": (changed("step/prompt_shared", 1), "the previous step has 0 tokens"),
    "shared_many": (changed("step/prompt_shared", 99, 1), "the previous step has 5 tokens"),
    "shared_negative": (changed("step/prompt_shared", -1, 1), "prompt_shared is -1"),
    "logprob_5": (changed("logprobs", 5.0), "logprobs holds 5.0"),
    "logprob_nan": (changed("logprobs", np.nan), "logprobs holds nan"),
    "logprob_inf": (changed("logprobs", -np.inf), "logprobs holds -inf"),
    "versions_short": (changed("versions", 1, 1), "versions cover 1 of 2"),
    "versions_negative": (changed("versions", -3, 0), "negative number -3"),
    "mask_bytes": (bytes_of_bool, "holds other bytes than 0 and 1"),
    "routing_start": (changed("step/routing_start", 1), "routing ends before"),
    "routing_start_negative": (changed("step/routing_start", -1), "routing_start is -1"),
    "routing_rows": (changed("step/routing_rows", 1, 1), "routing ends before"),
}


@pytest.mark.parametrize("change, names", VALUES.values(), ids=VALUES)
def test_invalid_values(tmp_path, change, names):
    columns = columns_of(rollouts())
    change(columns)
    train_on(assemble(tmp_path / "f", columns), names=names)


# ---------------------------------------------------------------- other models, degenerate groups

ROUTING = rollouts()[0].trajectories[0].steps[0].routing
FOREIGN = {
    "prompt_beyond": (
        dict(prompt_ids=np.array([5, VOCAB, 7], np.int32)),
        "prompt_ids holds the id 64; the model's",
    ),
    "response_beyond": (
        dict(response_ids=np.array([5, 151_643], np.int32)),
        "response_ids holds the id 151643",
    ),
    "expert_beyond": (
        dict(routing=np.where(ROUTING == 7, 100, ROUTING).astype(np.uint8)),
        "expert 100 recorded",
    ),
    "expert_twice": (dict(routing=np.zeros_like(ROUTING)), "has one expert twice"),
    "no_experts": (
        dict(routing=None),
        "no routing recorded, and routing_replay.enabled needs it",
    ),
}


@pytest.mark.parametrize("change, names", FOREIGN.values(), ids=FOREIGN)
def test_c14_rollouts_of_another_model_end_in_one_line(tmp_path, change, names):
    write(tmp_path / "f", rollouts(**change))
    line = train_on(tmp_path / "f", names=names)
    assert "not of configs/models/chase: group 0, trajectory 0, step 0: " in line


@pytest.mark.parametrize("shape", [(3, 2), (48, 2), (2, 1), (2, 8)], ids=str)
def test_c14_routing_of_another_shape_ends_in_one_line(tmp_path, shape):
    """All steps of all trajectories are wrong: the line counts them."""
    groups = rollouts()
    for s in (s for g in groups for t in g.trajectories for s in t.steps):
        s.routing = np.zeros((len(s) - 1, *shape), np.uint8)
    write(tmp_path / "f", groups)
    line = train_on(tmp_path / "f", names="the model has [tokens, 2 layers, top 2]")
    assert line.endswith("(and 7 more)")


def test_c14_routing_is_not_needed_without_routing_replay(tmp_path):
    write(tmp_path / "f", rollouts(routing=None))
    accepted(tmp_path / "f", "routing_replay.enabled=false")


def test_c14_steps_longer_than_a_micro_batch(tmp_path):
    write(tmp_path / "f", rollouts(prompt_ids=np.full(300, 5, np.int32), routing=None))
    train_on(
        tmp_path / "f",
        "train.micro_batch_tokens=200",
        "routing_replay.enabled=false",
        names="group 0, trajectory 0, step 0: 301 tokens in one path do not fit a micro-batch of "
        "200; raise",
    )


@pytest.mark.parametrize("rewards", [(1.0,), (0.5, 0.5), (0.7, 0.7000000000000001)], ids=str)
@pytest.mark.parametrize("estimator", ["grpo", "grpo_nostd", "rloo", "maxrl"])
def test_a4_a_file_of_degenerate_groups(tmp_path, rewards, estimator):
    write(tmp_path / "f", rollouts(rewards))
    line = train_on(
        tmp_path / "f",
        f"advantage.estimator={estimator}",
        names="nothing to learn from its 2 prompts",
    )
    assert f"under advantage.estimator = {estimator} all advantages are 0" in line


def test_a_file_without_a_trajectory_to_train_on(tmp_path):
    write(tmp_path / "f", [])
    train_on(tmp_path / "f", names="nothing to train on: no trajectories")
    groups = rollouts()
    for trajectory in (t for g in groups for t in g.trajectories):
        trajectory.stop_reason = StopReason.ENV_TIMEOUT
    write(tmp_path / "f", groups)
    train_on(
        tmp_path / "f",
        names="nothing to train on: all 4 trajectories are dropped, the first: env_timeout",
    )


def test_a4_degenerate_groups_are_counted(tmp_path, capsys):
    groups = rollouts()
    groups[1].trajectories.pop()
    write(tmp_path / "f", groups)
    assert len(read_batches(load(CONFIG, []), tmp_path / "f")) == 1
    line = f"{tmp_path}/f: 1 of 2 prompts train nothing: under advantage.estimator = grpo"
    assert line in capsys.readouterr().out


def test_rewards_that_the_estimator_rejects(tmp_path):
    write(tmp_path / "f", rollouts((1.0, -1.0)))
    train_on(
        tmp_path / "f",
        "advantage.estimator=maxrl",
        names="maxrl: needs rewards of 0 or more, got -1.0",
    )


@pytest.mark.parametrize(
    "estimator", ["grpo", "grpo_nostd", "rloo", "maxrl", "step_returns", "gigpo"]
)
def test_a4_train_rejects_one_sample_per_prompt(estimator, tmp_path):
    given = (
        "rollout.samples_per_prompt=1",
        f"advantage.estimator={estimator}",
        "run.wandb=disabled",
        f"run.dir={tmp_path}",
    )
    (line,) = rejected("train", CONFIG, *given, names="rollout.samples_per_prompt = 1")
    assert estimator in line and "must be 2 or more" in line


# ---------------------------------------------------------------- bit flips


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp("flips") / "f"
    write(path, rollouts())
    return path.read_bytes(), path.with_name("flipped")


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_flipped_bit_is_detected(written, data):
    content, path = written
    bits = data.draw(
        st.lists(st.integers(0, 8 * len(content) - 1), min_size=1, max_size=3, unique=True)
    )
    flipped = bytearray(content)
    for bit in bits:
        flipped[bit // 8] ^= 1 << bit % 8
    path.write_bytes(flipped)
    with pytest.raises(StoreError) as error:
        read(path)
    check_lines([f"error: {error.value}"], str(path))


def test_a_flipped_bit_is_detected_in_every_part_of_the_file(written):
    """One bit of every eleventh byte, and of each byte of the checksums."""
    content, path = written
    undetected = []
    for at in [*range(0, len(content), 11), *range(len(content) - 4 * len(COLUMNS), len(content))]:
        flipped = bytearray(content)
        flipped[at] ^= 1 << at % 8
        path.write_bytes(flipped)
        try:
            read(path)
            undetected.append(at)
        except StoreError:
            pass
    assert undetected == []


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_damaged_header_is_read_or_rejected(tmp_path_factory, data):
    """A file without checksums: no other exception, no hang."""
    path = assemble(tmp_path_factory.mktemp("fuzz") / "f", columns_of(rollouts()))
    content = bytearray(path.read_bytes())
    header = 8 + struct.unpack("<Q", content[:8])[0]
    for at in data.draw(st.lists(st.integers(0, header - 1), min_size=1, max_size=4)):
        content[at] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    try:
        read(path)
    except StoreError as error:
        check_lines([f"error: {error}"], str(path))
