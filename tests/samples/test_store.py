"""Rollout files: an exact round trip, and one line for a file that cannot be read."""

import json
import os
import struct
import textwrap
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from safetensors import safe_open

from megastep.errors import StoreError
from megastep.samples import store
from megastep.samples.store import read, write

from .rollouts import group_of, groups, trajectory

A, B, C = 1, 2, 3


def small(**more):
    return [
        group_of(
            trajectory(([A], [B, C]), rewards=[0.1]),
            trajectory(([A], [C]), stop_reason="solved", **more),
        )
    ]


def same(a, b):
    if isinstance(a, np.ndarray):
        return (
            isinstance(b, np.ndarray)
            and a.dtype == b.dtype
            and a.shape == b.shape
            and a.tobytes() == b.tobytes()
        )
    return type(a) is type(b) and a == b


def assert_same(groups, others):
    assert [g.id for g in groups] == [g.id for g in others]
    for g, o in zip(groups, others):
        assert len(g.trajectories) == len(o.trajectories)
        for t, u in zip(g.trajectories, o.trajectories):
            assert vars(t) | {"steps": len(t.steps)} == vars(u) | {"steps": len(u.steps)}
            for s, v in zip(t.steps, u.steps):
                assert all(same(value, getattr(v, name)) for name, value in vars(s).items())


@settings(max_examples=60, deadline=None)
@given(groups(noise=0.2))
def test_a_round_trip_is_exact(tmp_path_factory, batch):
    path = tmp_path_factory.mktemp("store") / "step_1.safetensors"
    write(path, batch)
    assert_same(batch, read(path))
    again = path.with_name("again")
    write(again, read(path))
    assert again.read_bytes() == path.read_bytes()


def test_metrics_states_and_rewards_survive(tmp_path):
    batch = small(env_metrics={"success": True, "tools": 3, "note": "ü", "list": [1, None]})
    batch[0].trajectories[0].steps[0].state = -5
    write(tmp_path / "f", batch)
    assert_same(batch, read(tmp_path / "f"))
    assert read(tmp_path / "f")[0].trajectories[0].reward == 0.1


def test_arrays_are_read_only_views_of_the_file(tmp_path):
    write(tmp_path / "f", small())
    ids = read(tmp_path / "f")[0].trajectories[0].steps[0].prompt_ids
    assert not ids.flags.owndata and not ids.flags.writeable


def test_any_safetensors_reader_opens_it(tmp_path):
    write(tmp_path / "f.safetensors", small())
    with safe_open(tmp_path / "f.safetensors", framework="np") as file:
        assert file.metadata()["format"] == "megastep.rollouts"
        assert file.get_tensor("response_ids").tolist() == [B, C, C]


def test_the_example_of_the_docstring_writes_a_readable_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    example = store.__doc__[store.__doc__.index("    import json, struct") :]
    exec(textwrap.dedent(example), {})
    (group,) = read("rollouts.safetensors")
    assert [t.reward for t in group.trajectories] == [1.0, 0.0]
    assert group.trajectories[0].steps[0].response_ids.tolist() == [8, 9]
    with safe_open("rollouts.safetensors", framework="np") as file:
        assert "prompt_ids" in file.keys()


@settings(max_examples=20, deadline=None)
@given(groups(noise=0.2))
def test_a_file_of_version_2_with_whole_prompts_is_read(tmp_path_factory, batch):
    def whole_prompts(trajectories):
        prompts = [step.prompt_ids for t in trajectories for step in t.steps]
        return [0] * len(prompts), prompts

    path = tmp_path_factory.mktemp("store") / "old"
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(store, "VERSION", 2)
        monkeypatch.setattr(store, "_prompts", whole_prompts)
        columns = store._columns
        monkeypatch.setattr(store, "_columns", lambda *given: without_shared(columns(*given)))
        write(path, batch)
    with safe_open(path, framework="np") as file:
        assert store.PROMPT_SHARED not in file.keys() and file.metadata()["version"] == "2"
    assert_same(batch, read(path))


def without_shared(columns: dict) -> dict:
    return {name: column for name, column in columns.items() if name != store.PROMPT_SHARED}


# ---------------------------------------------------------------- rejected files, one line each


def check_rejected(path, text):
    with pytest.raises(StoreError, match=text) as error:
        read(path)
    assert "\n" not in str(error.value) and str(path) in str(error.value)


def test_a_truncated_file_is_rejected_wherever_it_ends(tmp_path):
    write(tmp_path / "whole", small())
    content = (tmp_path / "whole").read_bytes()
    header = 8 + struct.unpack("<Q", content[:8])[0]
    for size in (header, header + 3, len(content) - 1):
        (tmp_path / "part").write_bytes(content[:size])
        check_rejected(tmp_path / "part", "truncated, ")
    (tmp_path / "part").write_bytes(content[: header - 2])
    check_rejected(tmp_path / "part", "truncated within its header")


@pytest.mark.parametrize(
    "content",
    [b"", b"hello", b"\x80\x04" + b"x" * 40, struct.pack("<Q", 4) + b"{no}", b"PK\x03\x04" * 9],
)
def test_a_file_of_another_format_is_rejected(tmp_path, content):
    (tmp_path / "f").write_bytes(content)
    check_rejected(tmp_path / "f", "not a rollout file")


def test_another_safetensors_file_is_rejected(tmp_path):
    from safetensors.numpy import save_file

    save_file({"w": np.zeros(2)}, tmp_path / "f")
    check_rejected(tmp_path / "f", "a safetensors file but not a rollout file")


def test_a_newer_version_is_rejected(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "VERSION", 4)
    write(tmp_path / "f", small())
    monkeypatch.undo()
    check_rejected(tmp_path / "f", "version 4 of the format, this megastep reads up to 3")


def test_a_missing_file_and_a_folder_are_rejected(tmp_path):
    check_rejected(tmp_path / "none", "cannot be read")
    check_rejected(tmp_path, "cannot be read")


def edited(path, **columns):
    """Replace fields of some entries of the header."""
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    for name, change in columns.items():
        header[name.replace("__", "/")].update(change)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


def test_columns_that_do_not_fit_together_are_rejected(tmp_path):
    write(tmp_path / "f", small())
    edited(tmp_path / "f", loss_mask={"shape": [99]})
    check_rejected(tmp_path / "f", "damaged")
    write(tmp_path / "f", small())
    edited(tmp_path / "f", prompt_ids={"dtype": "PICKLE"})
    check_rejected(tmp_path / "f", "damaged")


def test_s16_read_validates_the_rollouts(tmp_path, monkeypatch):
    batch = small()
    batch[0].trajectories[1].steps[0].last = False
    monkeypatch.setattr(store, "validate", lambda groups: None)
    write(tmp_path / "f", batch)
    monkeypatch.undo()
    check_rejected(tmp_path / "f", "group 0, trajectory 1: steps marked last")


def test_a_failed_write_keeps_the_previous_file_and_leaves_no_other(tmp_path, monkeypatch):
    write(tmp_path / "f", small())
    before = (tmp_path / "f").read_bytes()
    monkeypatch.setattr(
        os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    )
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "f", small(env_metrics={"a": 1}))
    assert (tmp_path / "f").read_bytes() == before
    assert os.listdir(tmp_path) == ["f"]


def test_metrics_that_json_cannot_represent_are_reported(tmp_path):
    with pytest.raises(
        StoreError, match="group 0, trajectory 1: env_metrics must hold JSON values"
    ):
        write(tmp_path / "f", small(env_metrics={"a": np.float32(1)}))
    assert os.listdir(tmp_path) == []


def test_without_routing_removes_only_the_routing():
    step = replace(
        group_of(trajectory(([1, 2], [3, 4]))).trajectories[0].steps[0],
        routing=np.zeros((3, 2, 2), np.uint8),
        routing_start=0,
    )
    groups = [group_of(replace(trajectory(([1, 2], [3, 4])), steps=[step]))]
    (left,) = store.without_routing(groups)
    assert left.trajectories[0].steps[0].routing is None and step.routing is not None
    assert left.trajectories[0].steps[0].response_ids is step.response_ids
