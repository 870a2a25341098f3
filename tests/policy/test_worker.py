"""The worker: old and reference logprobs, temperature, skipped updates, errors, offloading."""

import math

import numpy as np
import pytest
import torch

from tests import cases
from tests.policy.updates import make_groups, plain_logprobs

MODEL = "qwen3_moe"


def plain(models, groups, temperature=1.0, model=MODEL) -> dict:
    _, model = models(model)
    found = {}
    for group in groups:
        for trajectory in group.trajectories:
            for step in trajectory.steps:
                with torch.no_grad():
                    _, logp = plain_logprobs(model, step, replay=False)
                logp = (logp / temperature).log_softmax(-1)
                ids = torch.from_numpy(step.response_ids.astype(np.int64))
                values = logp.gather(1, ids[:, None]).squeeze(1).numpy()[step.loss_mask]
                found[group.id, trajectory.index, step.index] = values
    return found


def merged(results) -> dict:
    return {key: value for found in results for key, value in found.items()}


def assert_same(found: dict, expected: dict, atol=2e-5) -> None:
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        np.testing.assert_allclose(found[key], values, atol=atol, err_msg=str(key))


@pytest.mark.parametrize(
    "world, layout, budget_tokens",
    [(2, {}, 60), (4, dict(tensor=2, pipeline=2), 60), (2, {}, 4096)],
)
def test_old_logprobs_are_those_of_their_rows(world, layout, budget_tokens, ranks, models):
    """S14: also with padding micro-batches, where the ranks do not divide the real ones."""
    folder, _ = models(MODEL)
    groups = make_groups(replay=False, prompts=1)
    results = ranks(world).run(
        cases.old_logprobs,
        folder=folder,
        layout=layout,
        groups=groups,
        budget_tokens=budget_tokens,
    )
    assert_same(merged(results), plain(models, groups))


def test_the_reference_is_the_initial_model(ranks, models):
    """Updates do not change its logprobs, and the policy keeps its own weights."""
    folder, _ = models(MODEL)
    groups = make_groups(replay=False)
    results = ranks(2).run(
        cases.reference_after_updates, folder=folder, layout=dict(expert=2), groups=groups
    )
    before, after, reference, policy_again = zip(*results)
    assert_same(merged(reference), plain(models, groups))
    assert_same(merged(policy_again), merged(after), atol=0)
    assert max(np.abs(merged(after)[k] - v).max() for k, v in merged(before).items()) > 1e-2


def test_logprobs_are_those_of_the_sampling_temperature(ranks, models):
    folder, _ = models(MODEL)
    groups = make_groups(replay=False, prompts=1)
    found = ranks(2).run(
        cases.logprobs_of,
        folder=folder,
        layout=dict(tensor=2),
        groups=groups,
        replay=False,
        temperature=0.6,
    )
    assert_same(merged(found), plain(models, groups, temperature=0.6))


@pytest.mark.parametrize(
    "nonfinite, named",
    [
        ("advantage", "loss of group 1, trajectory 2, step 0"),
        ("gradient", "gradient of module.decoder.layers"),
    ],
)
@pytest.mark.parametrize("layout", [dict(expert=2), dict(pipeline=2)])
def test_a_nonfinite_update_is_skipped_and_named(layout, nonfinite, named, ranks, models):
    folder, _ = models(MODEL)
    results = ranks(2).run(
        cases.nonfinite_then_finite_update, folder=folder, layout=layout, nonfinite=nonfinite
    )
    for skipped, metric, unchanged, then_changed, then_skipped in results:
        assert named in skipped and "not finite" in skipped
        assert metric == 1.0 and unchanged
        assert then_changed and then_skipped is None


def test_a10_a_mini_batch_without_a_trained_token_makes_no_optimizer_step(ranks, models):
    """Adam's momentum would move the weights. The schedule advances: it counts mini-batches."""
    folder, _ = models(MODEL)
    for world, layout in [(1, {}), (2, dict(expert=2)), (2, dict(pipeline=2))]:
        for result in ranks(world).run(cases.empty_update, folder=folder, layout=layout):
            trains, empty, trains_again = result["metrics"]
            assert result["unchanged"] and result["changed_again"] and result["skipped"] is None
            assert result["steps"] == 3
            assert empty.pop("train/lr") == pytest.approx(0.75e-3)
            assert empty == {"train/tokens_trained": 0, "train/empty_mini_batches": 1}
            for metrics, lr in ((trains, 1e-3), (trains_again, 0.5e-3)):
                assert metrics["train/empty_mini_batches"] == 0
                assert metrics["train/tokens_trained"] > 0
                assert metrics["train/lr"] == pytest.approx(lr)


def test_a10_completely_masked_mini_batches_are_counted(ranks, models):
    """With filters.truncated=mask: of two mini-batches both, none and one train."""
    folder, _ = models("llama")
    results = ranks(1).run(cases.learn_with_masked, folder=folder, masked=[[], [0, 1], [0]])[0]
    counted = [
        (m["train/empty_mini_batches"], m["train/optimizer_steps"], moved) for m, moved in results
    ]
    assert counted == [(0, 2, True), (2, 0, False), (1, 1, True)]
    for name in ("train/loss", "train/skipped"):
        assert [name in metrics for metrics, _ in results] == [True, False, True]


@pytest.mark.parametrize(
    "world, layout", [(2, dict(expert=2)), (2, dict(tensor=2)), (4, dict(pipeline=2, expert=2))]
)
def test_a6_a_resumed_run_keeps_its_reference(world, layout, ranks, models, tmp_path):
    """Fresh weights are not in the checkpoint: drawn again under another parallel layout, they are
    the same."""
    folder, _ = models(MODEL)
    groups = make_groups(replay=False, prompts=1)
    fresh, trained = ranks(1).run(
        cases.fresh_then_trained, folder=folder, layout={}, root=tmp_path, groups=groups
    )[0]
    found = ranks(world).run(
        cases.resumed_reference, folder=folder, layout=layout, root=tmp_path, groups=groups
    )
    assert_same(merged(reference for reference, _ in found), fresh)
    assert_same(merged(policy for _, policy in found), trained)
    assert max(np.abs(trained[k] - v).max() for k, v in fresh.items()) > 1e-2


@pytest.mark.parametrize("layout", [dict(pipeline=2), dict(expert=2)])
@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer.lr": math.inf},
        {"optimizer.lr": 3.3e38, "optimizer.weight_decay": 1.0, "optimizer.betas": [0.0, 0.0]},
    ],
)
def test_c2_an_update_with_nonfinite_weights_ends_the_run(settings, layout, ranks, models):
    folder, _ = models(MODEL)
    for error in ranks(2).run(
        cases.error_of_overflowing_update, folder=folder, layout=layout, settings=settings
    ):
        assert error.startswith("after optimizer step 1 weights are not finite: ")
        assert "\n" not in error
        assert "decoder.layers." in error and "optimizer.lr" in error


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_c2_a_nonfinite_weight_is_never_written(value, ranks, models, tmp_path):
    """One element on the last stage: all ranks raise, with its name in the whole model."""
    errors = ranks(2).run(
        cases.errors_with_nonfinite_weight,
        folder=models("llama")[0],
        layout=dict(pipeline=2),
        root=tmp_path,
        bad_rank=1,
        value=value,
    )
    name = "decoder.layers.3.self_attention.linear_proj.weight"
    for error in [error for of_rank in errors for error in of_rank]:
        assert f"weights are not finite: {name};" in error
    assert list(tmp_path.iterdir()) == []


def test_d3_offloading_frees_the_gradients_and_changes_no_metric(ranks, models):
    folder, _ = models(MODEL)
    layout = dict(expert=2)
    plain = ranks(2).run(cases.take_steps, folder=folder, layout=layout, steps=3)
    offloaded = ranks(2).run(cases.take_steps_with_offload, folder=folder, layout=layout, steps=3)
    assert [metrics for metrics, _ in offloaded] == plain
    assert [gradient_bytes for _, gradient_bytes in offloaded] == [0, 0]


def test_a_new_stage_frees_the_last_optimizer_first(ranks, models):
    """Two optimizers at once would need twice the memory."""
    folder, _ = models(MODEL)
    alive = ranks(2).run(
        cases.optimizers_alive_at_a_new_stage, folder=folder, layout=dict(expert=2)
    )
    assert alive == [[False], [False]]


@pytest.mark.parametrize(
    "layout, teacher",
    [(dict(tensor=2), "qwen2_tied"), (dict(pipeline=2), MODEL), (dict(expert=2), "qwen2_tied")],
)
def test_the_teacher_scores_the_students_tokens(ranks, models, layout, teacher):
    """At the temperature of the rollout, under the student's layout, with its own routing: a dense
    teacher, and one with experts that does not replay the student's."""
    groups = make_groups(replay=True)
    results = ranks(2).run(
        cases.teacher_after_update,
        folder=models(MODEL)[0],
        teacher=models(teacher)[0],
        layout=layout,
        groups=groups,
        temperature=0.7,
    )
    assert_same(merged(results), plain(models, groups, temperature=0.7, model=teacher))
