"""D2, S10: the experts that the rollout used are those that train, and routes that do not fit are refused."""

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
    """Routes as an engine in bf16 would record them, of the model's own routers."""
    model = copy.deepcopy(model).to(torch.bfloat16)
    for step in steps_of(groups):
        found = []
        handles = [
            layer.mlp.gate.register_forward_hook(lambda module, inputs, out: found.append(out[2]))
            for layer in model.model.layers
        ]
        with torch.no_grad():
            model(torch.from_numpy(ids_of(step).astype(np.int64))[None, :-1])
        for handle in handles:
            handle.remove()
        step.routing = torch.stack(found, 1).numpy().astype(np.uint8)


@pytest.mark.parametrize(
    "world, layout", [(1, {}), (2, dict(tensor=2)), (2, dict(pipeline=2, virtual=2))]
)
def test_training_follows_the_recorded_experts(world, layout, ranks, models):
    """Recorded in bf16, trained in fp32: exactly the logprobs that transformers has with those experts forced."""
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
                routes = torch.from_numpy(step.routing.astype(np.int64))
                with forced(model, routes), torch.no_grad():
                    ids = torch.from_numpy(ids_of(step).astype(np.int64))
                    logp = (
                        model(ids[None, :-1]).logits[0].log_softmax(-1)[len(step.prompt_ids) - 1 :]
                    )
                expected = (
                    logp.gather(1, ids[len(step.prompt_ids) :, None])
                    .squeeze(1)
                    .numpy()[step.loss_mask]
                )
                key = (group.id, trajectory.index, step.index)
                np.testing.assert_allclose(found_for(results, key), expected, atol=2e-5)
                moved += np.abs(found_for(free, key) - expected).max() > 1e-4
                checked += 1
    assert checked > 10 and moved > 0, (
        "no route differed between bf16 and fp32: the test shows nothing"
    )


def found_for(results, key) -> np.ndarray:
    return next(found[key] for found in results if key in found)


def test_tokens_without_a_record_are_routed_live(ranks, models):
    """The last step of a trajectory lost its record: its own tokens are free, the tokens before it are not."""
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
    routes = np.full((len(ids_of(step)) - 1, LAYERS, TOP_K), -1)
    routes[:known] = before.routing[:known]
    with forced(model, torch.from_numpy(routes)), torch.no_grad():
        ids = torch.from_numpy(ids_of(step).astype(np.int64))
        logp = model(ids[None, :-1]).logits[0].log_softmax(-1)[len(step.prompt_ids) - 1 :]
    expected = logp.gather(1, ids[len(step.prompt_ids) :, None]).squeeze(1).numpy()
    np.testing.assert_allclose(
        found[group.id, group.trajectories[0].index, step.index], expected, atol=2e-5
    )
    with torch.no_grad():
        live, _ = plain_logprobs(model, step, replay=False)
    assert np.abs(live.numpy() - expected).max() > 1e-4


def test_shifted_routes_are_not_trained_on(ranks, models):
    """Each step's routes moved by one token keep every length right; the live routers do not agree with them. The
    error leaves the weights as they were, and the worker usable."""
    folder, model = models(MODEL)
    groups = make_groups(replay=False, seed=5)
    recorded_in_bf16(model, groups)
    shifted = make_groups(replay=False, seed=5)
    recorded_in_bf16(model, shifted)
    for step in steps_of(shifted):
        step.routing = np.roll(step.routing, 1, axis=0)
    validate(shifted, experts=SHAPE)  # nothing to see from the outside
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


def test_bad_routes_are_refused_at_the_door():
    """By step, before anything is trained: a missing, short, long or impossible record."""

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

    assert "no routing recorded" in broken(lambda s: setattr(s, "routing", None))
    assert "routing ends before token" in broken(lambda s: setattr(s, "routing", s.routing[:-1]))
    longer = lambda s: setattr(s, "routing", np.append(s.routing, s.routing[:1], 0))
    assert "routing ends before token" in broken(longer)
    assert "expert 8 recorded; the model has 0 to 7" in broken(put(8))
    assert "token 3 has one expert twice in the model's MoE layer 2" in broken(twice)
    assert "4 layers, top 2" in broken(lambda s: setattr(s, "routing", s.routing[:, :3]))
    assert "4 layers, top 2" in broken(lambda s: setattr(s, "routing", s.routing[..., :1]))

    def late(step):
        step.routing, step.routing_start = step.routing[2:], 2

    assert "routing begins at token 2, but earlier steps recorded 0 tokens" in broken(late)


def test_what_is_recorded_for_dense_layers_means_nothing():
    groups = make_groups(replay=True)
    for step in steps_of(groups):
        step.routing[:, 1] = 0
    validate(groups, experts=ExpertShape(EXPERTS, TOP_K, (True, False, True, True)))
    assert "one expert twice" in problems_of(groups)[0]


def test_steps_that_train_nothing_need_no_routes():
    groups = make_groups(replay=True)
    step = groups[0].trajectories[2].steps[0]
    step.routing, step.loss_mask = None, np.zeros_like(step.loss_mask)
    validate(groups, experts=SHAPE)


# ---------------------------------------------------------------- one router


def choose(layer: LayerReplay, scores: torch.Tensor):
    def top_k(scores, k, num_groups=None, group_topk=None):
        return torch.topk(scores, k, dim=1)

    return layer.get_replay_topk(scores, TOP_K, None, None, top_k)


def test_the_router_keeps_its_gradient_and_free_tokens_their_choice():
    layer = LayerReplay(0)
    scores = torch.randn(3, EXPERTS, requires_grad=True)
    target = torch.tensor([[0, 1], [-1, -1], [6, 2]])
    with replayed([layer], forward_only=False):
        layer.give(target)
        values, experts = choose(layer, scores)
    assert experts[0].tolist() == [0, 1] and experts[2].tolist() == [6, 2]
    assert experts[1].tolist() == scores[1].topk(TOP_K).indices.tolist()
    values.sum().backward()
    assert scores.grad[0].nonzero().flatten().tolist() == [0, 1]


def test_what_is_given_must_be_used():
    layer = LayerReplay(2)
    with (
        pytest.raises(ReplayError, match="layer 2: not all routes were used"),
        replayed([layer], False),
    ):
        layer.give(torch.zeros(3, TOP_K, dtype=torch.int64))
    with pytest.raises(ReplayError, match="did not use its routes"), replayed([layer], False):
        layer.give(torch.zeros(3, TOP_K, dtype=torch.int64))
        layer.give(torch.zeros(3, TOP_K, dtype=torch.int64))
    with pytest.raises(ReplayError, match="a pass without routes"), replayed([layer], False):
        layer.give(torch.tensor([[0, 1]]))
        choose(layer, torch.randn(1, EXPERTS))
        choose(layer, torch.randn(1, EXPERTS))
    with (
        pytest.raises(ReplayError, match="routes \\[2, 2\\] for \\[3, 2\\] choices"),
        replayed([layer], False),
    ):
        layer.give(torch.tensor([[0, 1], [0, 1]]))
        choose(layer, torch.randn(3, EXPERTS))
    # Every error above has left it clean: without routes the live router decides.
    with replayed([layer], False):
        scores = torch.randn(3, EXPERTS)
        assert torch.equal(choose(layer, scores)[1], scores.topk(TOP_K, dim=1).indices)


def test_a_batch_without_any_routes_is_not_trained_on(ranks, models):
    folder, _ = models(MODEL)
    error, unchanged, _ = ranks(2).run(
        cases.shifted_then_right,
        folder=folder,
        layout=dict(expert=2),
        shifted=make_groups(replay=False),
        groups=make_groups(replay=False),
    )[0]
    assert "no step of the batch has recorded any" in error and unchanged


def test_fused_routers_are_refused(ranks, models):
    folder, _ = models(MODEL)
    assert "moe_router_fusion" in ranks(1).run(cases.attach_to_fused_router, folder=folder)[0]
