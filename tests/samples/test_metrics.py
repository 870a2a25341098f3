"""Metrics of rollouts, filters and packing."""

import numpy as np
import pytest

from megastep.samples import lay_out
from megastep.samples.filters import Dropped
from megastep.samples.metrics import (
    evaluation_metrics,
    filter_metrics,
    packing_metrics,
    rollout_metrics,
)
from megastep.types import FinishReason, StopReason

from .rollouts import group_of, samples_of, trajectory

A, B, C, OBS = 1, 2, 3, 6


def batch():
    turns = ([A], [B, B]), ([A, B, B, OBS], [C]), ([A, B, B, OBS, C, OBS], [C])
    long = trajectory(*turns, rewards=[0, 0, 1], env_metrics={"calls": 2})
    short = trajectory(([A], [C]), env_metrics={"calls": 0, "note": "text"})
    short.stop_reason = StopReason.CONTEXT
    short.steps[0].finish = FinishReason.LENGTH
    no_steps = trajectory(stop_reason=StopReason.CONTEXT)
    solved = trajectory(([A], [B]), env_metrics={"success": True})
    return [group_of(long, short, id=0), group_of(no_steps, solved, id=1)]


def test_s5_rollout_metrics_count_trajectories():
    found = rollout_metrics(batch())
    assert found["rollout/trajectories"] == 4 and found["rollout/prompts"] == 2
    assert found["reward/mean"] == 1 / 4  # over steps it would be 1/5
    assert found["reward/success"] == 2 / 4  # one by its reward, one as the environment reports
    assert found["rollout/turns_mean"] == 5 / 4 and found["rollout/turns_max"] == 3
    assert found["rollout/response_tokens_mean"] == 6 / 4
    assert found["rollout/stop_context"] == 2 / 4
    assert found["rollout/no_steps"] == 1
    assert found["env/calls"] == 1.0 and "env/note" not in found


def test_s5_evaluation_reports_the_same_values_under_eval():
    rolled = rollout_metrics(batch())
    found = evaluation_metrics(batch())
    assert len(found) == len(rolled) and all(name.startswith("eval/") for name in found)
    assert found["eval/success"] == rolled["reward/success"]
    assert found["eval/pass_at_2"] == rolled["reward/pass_at_2"]
    assert found["eval/reward_mean"] == rolled["reward/mean"]
    assert found["eval/turns_mean"] == rolled["rollout/turns_mean"]
    assert found["eval/turn/count"] == 5 and found["eval/env/calls"] == 1.0


def test_s5_turn_metrics_count_turns():
    found = rollout_metrics(batch())
    assert found["turn/count"] == 5
    assert found["turn/response_tokens_mean"] == 6 / 5
    assert found["turn/prompt_tokens_max"] == 6
    assert found["turn/finish_length"] == 1 / 5 and found["turn/finish_stop"] == 4 / 5


def test_s5_pass_at_k_per_prompt():
    groups = [
        group_of(*[trajectory(([A], [B]), rewards=[float(i < c)]) for i in range(4)], id=c)
        for c in (0, 1, 4)
    ]
    found = rollout_metrics(groups)
    assert found["reward/pass_at_1"] == pytest.approx((0 + 1 / 4 + 1) / 3)
    assert found["reward/pass_at_2"] == pytest.approx((0 + 1 / 2 + 1) / 3)
    assert found["reward/pass_at_4"] == pytest.approx(2 / 3)
    assert "reward/pass_at_8" not in found


def test_an_empty_batch_has_no_means():
    found = rollout_metrics([])
    assert found["rollout/trajectories"] == 0 and "reward/mean" not in found


def test_x5_filter_metrics():
    assert filter_metrics([Dropped(0, 0, "why")], 4) == {
        "filter/dropped": 1,
        "filter/dropped_fraction": 0.25,
    }
    assert filter_metrics([], 0) == {"filter/dropped": 0}


def test_s11_packing_metrics_before_and_after_merging():
    turns = trajectory(([A], [B, B]), ([A, B, B, OBS], [C]), ([A, B, B, OBS, C, OBS], [C]))
    turns.steps[0].routing = np.zeros((2, 1, 1), np.uint8)
    turns.steps[1].routing = np.ones((4, 1, 1), np.uint8)
    micro_batches, report = lay_out(
        samples_of(group_of(turns)), ranks=2, budget_tokens=8, align_tokens=4
    )
    found = packing_metrics(report, micro_batches, budget_tokens=8)
    assert found["train/sequences_before_merge"] == 3 and found["train/sequences_after_merge"] == 1
    assert found["train/tokens_before_merge"] == 2 + 4 + 6
    assert found["train/tokens_distinct"] == 6
    assert found["train/sharing_ratio"] == 2
    assert found["train/tokens_computed"] == 8 + 4  # padded, and a padding micro-batch
    assert found["train/packing_efficiency"] == 6 / 16
    assert found["train/micro_batches"] == 1 and found["train/padding_micro_batches"] == 1
    assert found["routing_replay/conflict_rate"] == 1.0  # A and B were recorded twice, differently
    assert found["routing_replay/free_fraction"] == 2 / 6


def test_s14_padding_micro_batches_count_in_no_other_metric():
    samples = samples_of(group_of(trajectory(([A], [B, C]))))
    one, many = (packing_metrics(*reversed(lay_out(samples, ranks, 8)), 8) for ranks in (1, 5))
    assert many["train/padding_micro_batches"] == 4
    for name in (
        "sequences_before_merge",
        "tokens_before_merge",
        "tokens_distinct",
        "sharing_ratio",
    ):
        assert one[f"train/{name}"] == many[f"train/{name}"]


def test_packing_metrics_without_samples():
    micro_batches, report = lay_out([], ranks=1, budget_tokens=8)
    assert packing_metrics(report, micro_batches, 8)["train/padding_micro_batches"] == 1
