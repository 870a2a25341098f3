"""D3: each rank sends its part of the weights once, as many bytes as planned."""

import pytest

from tests.sync import counted

LAYOUTS = {
    "tensor": (2, dict(tensor=2)),
    "pipeline": (2, dict(pipeline=2)),
    "expert": (2, dict(expert=2)),
    "virtual": (2, dict(pipeline=2, virtual=2)),
    "data": (2, dict()),
    "tensor × expert": (2, dict(tensor=2, expert=2)),
    "tensor × pipeline": (4, dict(tensor=2, pipeline=2)),
    "tensor × data": (4, dict(tensor=2)),
    "expert × expert data": (4, dict(expert=2)),
    "tensor × expert × pipeline": (4, dict(tensor=2, expert=2, pipeline=2)),
    "expert tensor": (4, dict(tensor=2, expert=2, expert_tensor=2)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_d3_each_rank_copies_its_part_into_shared_memory(ranks, models, layout):
    """No weight twice, none gathered; replicas divide the work."""
    world, degrees = LAYOUTS[layout]
    folder, _ = models("qwen3_moe")
    found = ranks(world).run(counted.shm_bytes, folder=folder, layout=degrees)
    plan = counted.planned(folder, degrees, world)
    sent = [rank["sent"] for rank in found]
    assert sent == plan.sent
    assert sum(sent) == plan.by_worker
    assert [rank["gathered"] for rank in found] == plan.gathered == [0] * world
    assert all(rank["is_equal"] for rank in found)
    stage = world // degrees.get("pipeline", 1)
    for first in range(0, world, stage):
        of_stage = sent[first : first + stage]
        assert max(of_stage) < 1.1 * sum(of_stage) / stage, of_stage


@pytest.mark.parametrize("model", ["qwen2_tied", "llama_biases", "llama"])
def test_d3_parts_of_other_families(ranks, models, model):
    """A tied embedding has a copy on the last stage, which is not sent."""
    folder, _ = models(model)
    degrees = dict(tensor=2, pipeline=2)
    found = ranks(4).run(counted.shm_bytes, folder=folder, layout=degrees)
    assert [rank["sent"] for rank in found] == counted.planned(folder, degrees, 4).sent
    assert all(rank["is_equal"] for rank in found)
