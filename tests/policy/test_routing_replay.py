"""D2, S10: training follows the recorded routing, and routing that does not fit is rejected."""

import copy

import numpy as np
import pytest
import torch

from megastep.errors import ReplayError, RolloutError
from megastep.policy.routing_replay import LayerReplay, replayed
from megastep.samples.validation import validate
from megastep.types import ExpertShape
from tests import cases
from tests.policy.updates import (
    EXPERTS,
    LAYERS,
    TOP_K,
    forced,
    ids_of,
    make_groups,
    plain_logprobs,
    steps_of,
)

MODEL = "qwen3_moe"
SHAPE = ExpertShape(EXPERTS, TOP_K, (True,) * LAYERS)


def recorded_in_bf16(model, groups) -> None:
    """Record the routing of the model's own routers, as an engine in bf16 would."""
    model = copy.deepcopy(model).to(torch.bfloat16)
    routing: list[torch.Tensor] = []  # of each layer
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda module, inputs, out: routing.append(out[2]))
    for step in steps_of(groups):
        routing.clear()
        with torch.no_grad():
            model(torch.from_numpy(ids_of(step).astype(np.int64))[None, :-1])
        step.routing = torch.stack(routing, 1).numpy().astype(np.uint8)


@pytest.mark.parametrize(
    "world, layout", [(1, {}), (2, dict(tensor=2)), (2, dict(pipeline=2, virtual=2))]
)
def test_training_follows_the_recorded_routing(world, layout, ranks, models):
    """Recorded in bf16, trained in fp32: the logprobs of transformers with that routing forced."""
    folder, model = models(MODEL)
    groups = make_groups(replay=False, seed=5)
    recorded_in_bf16(model, groups)
    validate(groups, experts=SHAPE)
    results = ranks(world).run(cases.logprobs_of, folder=folder, layout=layout, groups=groups)
    free = ranks(world).run(
        cases.logprobs_of, folder=folder, layout=layout, groups=groups, replay=False
    )
    checked = moved = 0
    for group in groups:
        for trajectory in group.trajectories:
            for step in trajectory.steps:
                routing = torch.from_numpy(step.routing.astype(np.int64))
                expected = forced_logprobs(model, step, routing)[step.loss_mask]
                key = (group.id, trajectory.index, step.index)
                np.testing.assert_allclose(found_for(results, key), expected, atol=2e-5)
                moved += np.abs(found_for(free, key) - expected).max() > 1e-4
                checked += 1
    assert checked > 10
    assert moved > 0, "bf16 and fp32 route alike: the test cannot fail"


def forced_logprobs(model, step, routing: torch.Tensor) -> np.ndarray:
    """Logprobs of the response under transformers with this routing."""
    ids = torch.from_numpy(ids_of(step).astype(np.int64))
    with forced(model, routing), torch.no_grad():
        logp = model(ids[None, :-1]).logits[0].log_softmax(-1)[len(step.prompt_ids) - 1 :]
    return logp.gather(1, ids[len(step.prompt_ids) :, None]).squeeze(1).numpy()


def found_for(results, key) -> np.ndarray:
    return next(found[key] for found in results if key in found)


def test_tokens_without_a_record_are_routed_live(ranks, models):
    """A last step without a record: its tokens are routed live, the tokens before it are not."""
    folder, model = models(MODEL)
    group = make_groups(replay=True, prompts=1)[0]
    group.trajectories = [max(group.trajectories, key=lambda t: len(t.steps))]
    step = group.trajectories[0].steps[-1]
    step.routing = None
    found = ranks(1).run(cases.logprobs_of, folder=folder, layout={}, groups=[group])[0]
    before = group.trajectories[0].steps[-2]
    known = len(before.routing)
    differ = np.flatnonzero(ids_of(before)[:known] != ids_of(step)[:known])
    known = int(differ[0]) if len(differ) else known
    routing = np.full((len(ids_of(step)) - 1, LAYERS, TOP_K), -1)
    routing[:known] = before.routing[:known]
    expected = forced_logprobs(model, step, torch.from_numpy(routing))
    np.testing.assert_allclose(
        found[group.id, group.trajectories[0].index, step.index], expected, atol=2e-5
    )
    with torch.no_grad():
        live, _ = plain_logprobs(model, step, replay=False)
    assert np.abs(live.numpy() - expected).max() > 1e-4


def test_shifted_routing_is_not_trained_on(ranks, models):
    """Routing shifted by one token has the right lengths, but the live routers disagree with it.

    The error leaves the weights unchanged and the worker usable.
    """
    folder, model = models(MODEL)
    groups = make_groups(replay=False, seed=5)
    recorded_in_bf16(model, groups)
    shifted = make_groups(replay=False, seed=5)
    recorded_in_bf16(model, shifted)
    for step in steps_of(shifted):
        step.routing = np.roll(step.routing, 1, axis=0)
    validate(shifted, experts=SHAPE)  # lengths and values are valid
    error, unchanged, agreement = ranks(2).run(
        cases.shifted_then_right,
        folder=folder,
        layout=dict(expert=2),
        shifted=shifted,
        groups=groups,
    )[0]
    assert "the live routers agree with" in error and "routing_replay.min_agreement" in error
    assert unchanged
    assert agreement > 0.9


def problems_of(groups, shape=SHAPE) -> list[str]:
    with pytest.raises(RolloutError) as error:
        validate(groups, experts=shape)
    return error.value.problems


def test_validation_rejects_invalid_routing():
    """By step, before training: a missing, short, long or impossible record."""

    def broken(change):
        groups = make_groups(replay=True)
        step = groups[1].trajectories[2].steps[0]
        assert len(step.response_ids) > 1
        change(step)
        (problem,) = [p for p in problems_of(groups) if p.startswith("group")]
        assert problem.startswith("group 1, trajectory 2, step 0: ")
        return problem

    def put(value):
        def change(step):
            step.routing[3, 2, 1] = value

        return change

    def twice(step):
        step.routing[3, 2] = 5

    def longer(step):
        step.routing = np.append(step.routing, step.routing[:1], 0)

    assert "no routing recorded" in broken(lambda s: setattr(s, "routing", None))
    assert "routing ends before token" in broken(lambda s: setattr(s, "routing", s.routing[:-1]))
    assert "routing ends before token" in broken(longer)
    assert "expert 8 recorded; the model has 0 to 7" in broken(put(8))
    assert "token 3 has one expert twice in the model's MoE layer 2" in broken(twice)
    assert "4 layers, top 2" in broken(lambda s: setattr(s, "routing", s.routing[:, :3]))
    assert "4 layers, top 2" in broken(lambda s: setattr(s, "routing", s.routing[..., :1]))

    def late(step):
        step.routing = step.routing[2:]
        step.routing_start = 2

    assert "routing begins at token 2, but earlier steps recorded 0 tokens" in broken(late)


def test_routing_of_dense_layers_is_ignored():
    groups = make_groups(replay=True)
    for step in steps_of(groups):
        step.routing[:, 1] = 0
    validate(groups, experts=ExpertShape(EXPERTS, TOP_K, (True, False, True, True)))
    assert "one expert twice" in problems_of(groups)[0]


def test_steps_without_trained_tokens_need_no_routing():
    groups = make_groups(replay=True)
    step = groups[0].trajectories[2].steps[0]
    step.routing = None
    step.loss_mask = np.zeros_like(step.loss_mask)
    validate(groups, experts=SHAPE)


# ---------------------------------------------------------------- one router


def route(layer: LayerReplay, scores: torch.Tensor):
    def top_k(scores, k, num_groups=None, group_topk=None):
        return torch.topk(scores, k, dim=1)

    return layer.get_replay_topk(scores, TOP_K, None, None, top_k)


def test_the_router_keeps_its_gradient_and_free_tokens_are_routed_live():
    layer = LayerReplay(0)
    scores = torch.randn(3, EXPERTS, requires_grad=True)
    target = torch.tensor([[0, 1], [-1, -1], [6, 2]])
    with replayed([layer], forward_only=False):
        layer.set_target(target)
        values, experts = route(layer, scores)
    assert experts[0].tolist() == [0, 1] and experts[2].tolist() == [6, 2]
    assert experts[1].tolist() == scores[1].topk(TOP_K).indices.tolist()
    values.sum().backward()
    assert scores.grad[0].nonzero().flatten().tolist() == [0, 1]


def test_all_routing_must_be_used():
    layer = LayerReplay(2)
    with (
        pytest.raises(ReplayError, match="layer 2: not all routing was used"),
        replayed([layer], False),
    ):
        layer.set_target(torch.zeros(3, TOP_K, dtype=torch.int64))
    with pytest.raises(ReplayError, match="did not use its routing"), replayed([layer], False):
        layer.set_target(torch.zeros(3, TOP_K, dtype=torch.int64))
        layer.set_target(torch.zeros(3, TOP_K, dtype=torch.int64))
    with pytest.raises(ReplayError, match="a pass without routing"), replayed([layer], False):
        layer.set_target(torch.tensor([[0, 1]]))
        route(layer, torch.randn(1, EXPERTS))
        route(layer, torch.randn(1, EXPERTS))
    with (
        pytest.raises(ReplayError, match="routing \\[2, 2\\] for \\[3, 2\\] choices"),
        replayed([layer], False),
    ):
        layer.set_target(torch.tensor([[0, 1], [0, 1]]))
        route(layer, torch.randn(3, EXPERTS))
    # Each error above has reset the layer: without routing the live router decides.
    with replayed([layer], False):
        scores = torch.randn(3, EXPERTS)
        assert torch.equal(route(layer, scores)[1], scores.topk(TOP_K, dim=1).indices)


@pytest.mark.parametrize("layout", [dict(pipeline=2), dict(pipeline=2, virtual=2), dict(tensor=2)])
def test_x11_a_rank_replays_routing_that_it_fetched(ranks, models, layout):
    """Bit for bit, and no stage fetches the layers of another."""
    folder, _ = models(MODEL)
    results = ranks(2).run(cases.logprobs_by_reference, folder=folder, layout=layout)
    with_head = 0
    for plain, by_reference, fetched_bytes, all_bytes in results:
        with_head += bool(plain)
        assert plain.keys() == by_reference.keys()
        assert all(np.array_equal(plain[step], by_reference[step]) for step in plain)
        assert 0 < fetched_bytes <= all_bytes / layout.get("pipeline", 1)
    assert with_head


def test_a_batch_without_routing_is_not_trained_on(ranks, models):
    folder, _ = models(MODEL)
    error, unchanged, _ = ranks(2).run(
        cases.shifted_then_right,
        folder=folder,
        layout=dict(expert=2),
        shifted=make_groups(replay=False),
        groups=make_groups(replay=False),
    )[0]
    assert "needs recorded routing, and no step of the batch has any" in error and unchanged


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("moe_router_fusion", True),
        ("moe_router_load_balancing_type", "sinkhorn"),
        ("moe_router_load_balancing_type", "quantile_balancing"),
    ],
)
def test_routers_that_select_by_themselves_are_rejected(ranks, models, setting, value):
    folder, _ = models(MODEL)
    (error,) = ranks(1).run(cases.attach_replay_with, folder=folder, setting=setting, value=value)
    assert error.startswith(f"routing replay does not support {setting}")
