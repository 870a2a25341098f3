"""The ready groups of a checkpoint, written by the loop or by a rank."""

import json

import pytest

from megastep.checkpoint.loop_state import LoopState
from megastep.samples import store
from tests.samples.rollouts import group_of, trajectory


def ready_state() -> LoopState:
    group = group_of(trajectory(([1, 2], [3])), id=4)
    return LoopState(step=3, unfinished=[5], ready=[group], ready_begun=[2])


@pytest.mark.parametrize("by_loop", [False, True])
def test_x6_ready_groups_are_in_the_checkpoint(tmp_path, by_loop):
    state = ready_state()
    folder = tmp_path / "step_3.partial"
    folder.mkdir()
    if by_loop:
        (tmp_path / "ready_2.partial").write_text("of a save that was killed")
        state.write_ready(tmp_path, store.write)
        assert state.ready == []  # they do not travel to the ranks
    state.write(folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_3.partial"]
    plain = json.loads((folder / "loop.json").read_text())
    assert "ready" not in plain and "ready_file" not in plain
    found = LoopState.read(folder)
    assert [group.id for group in found.ready] == [4] and found.ready_begun == [2]
    assert found.unfinished == [5] and found.ready_file is None
