"""D3: each rank sends its part of the weights once, as many bytes as planned."""

import pytest

from megastep.models.architecture import read_architecture
from megastep.plan.model_states import model_states
from megastep.plan.weight_sync import planned_holders
from megastep.sync.nccl_transport import lay_out
from megastep.sync.shares import divide
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


def test_d3_vocabulary_padding_is_not_sent(models):
    """A shard that is padding alone has no place in a bucket."""
    folder, _ = models("qwen3_moe", vocab_size=60)
    config = counted.config(folder, dict(tensor=2), ranks=2)
    arch = read_architecture(folder)
    assert arch.padded_vocab == 128
    holders = planned_holders(config, arch, model_states(config, arch))
    buckets = [lay_out(shares, arch) for shares in divide(arch, holders, bucket_bytes=1)]
    embedding = buckets[0]  # each parameter is one
    assert [part[0] for part in embedding.parts] == ["model.embed_tokens.weight"]
    assert embedding.spans == [[0, 0, 60 * arch.hidden * 4]]
    assert embedding.span(1) == (0, 0)


@pytest.mark.parametrize("model", ["qwen2_tied", "llama_biases", "llama"])
def test_d3_parts_of_other_families(ranks, models, model):
    """A tied embedding has a copy on the last stage, which is not sent."""
    folder, _ = models(model)
    degrees = dict(tensor=2, pipeline=2)
    found = ranks(4).run(counted.shm_bytes, folder=folder, layout=degrees)
    assert [rank["sent"] for rank in found] == counted.planned(folder, degrees, 4).sent
    assert all(rank["is_equal"] for rank in found)
