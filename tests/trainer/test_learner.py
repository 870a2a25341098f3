"""Learner and PolicyWorker against a plain transformers loop (tests/trainer/plain_loop.py).

Two batches of three prompts, two mini-batches each, with settings that differ from the defaults.
"""

import numpy as np
import pytest
import torch

from megastep.report.meanings import meaning_of
from megastep.samples.metrics import over_mini_batches
from megastep.trainer.learner import Learner
from megastep.types import Update
from tests import cases
from tests.policy.updates import steps_of
from tests.trainer.plain_loop import PlainLearner, Sequence, conflicting_groups

MODEL = "qwen3_moe"
COMMON = {
    "rollout.prompts": 3,
    "train.mini_batch_prompts": 2,
    "train.steps": 2,
    "train.micro_batch_tokens": 120,
    "routing_replay.min_agreement": 0.0,  # the recorded routing is made up
    "optimizer.lr": 1e-2,
    "optimizer.betas": [0.8, 0.9],
    "optimizer.eps": 1e-3,
    "optimizer.weight_decay": 0.1,
}
CASES = {
    "ppo_clip": {
        "loss.type": "ppo_clip",
        "loss.reduction": "prompt",
        "loss.clip_low": 0.1,
        "loss.clip_high": 0.3,
        "loss.dual_clip": 1.2,
        "loss.kl_coef": 0.05,
        "loss.entropy_coef": 0.2,
        "loss.importance_sampling.mode": "truncate",
        "loss.importance_sampling.level": "step",
        "loss.importance_sampling.high": 1.3,
        "advantage.estimator": "gigpo",
        "advantage.gamma": 0.6,
        "advantage.step_coef": 0.4,
        "routing_replay.on_conflict": "split",
        "rollout.temperature": 0.7,
        "optimizer.clip_grad": 0.3,
        "optimizer.warmup_steps": 3,
    },
    "gspo": {
        "loss.type": "gspo",
        "loss.reduction": "step",
        "loss.clip_low": 0.02,
        "loss.clip_high": 0.05,
        "loss.kl_coef": 0.1,
        "loss.kl_estimator": "k2",
        "loss.importance_sampling.mode": "mask",
        "loss.importance_sampling.low": 0.7,
        "loss.importance_sampling.high": 1.6,
        "advantage.estimator": "step_returns",
        "advantage.gamma": 0.5,
        "rollout.temperature": 1.3,
        "train.pack_layout": "merge",
        "optimizer.clip_grad": 0.5,
    },
    "cispo": {
        "loss.type": "cispo",
        "loss.reduction": "trajectory",
        "loss.clip_low": 0.3,
        "loss.clip_high": 0.5,
        "loss.old_logprobs": "rollout",
        "loss.entropy_coef": 0.1,
        "routing_replay.on_conflict": "split",
        "train.pack_layout": "flat",
        "optimizer.clip_grad": 0.0,
    },
    "reinforce": {
        "loss.type": "reinforce",
        "loss.entropy_coef": 0.3,
        "routing_replay.enabled": False,
        "rollout.temperature": 0.8,
        "asynchronous.max_staleness": 1,
        "loss.importance_sampling.high": 1.1,
    },
}


@pytest.mark.parametrize("name", CASES)
def test_two_batches_equal_a_plain_loop(name, ranks, models):
    folder, _ = models(MODEL)
    check(folder, ranks, {**COMMON, **CASES[name]})


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_schedules_equal_a_plain_loop(schedule, ranks, models):
    """A9: the full rate after the warm-up, and a rate above min_lr in the last update."""
    folder, _ = models(MODEL)
    scheduled = {
        "optimizer.schedule": schedule,
        "optimizer.min_lr": 1e-3,
        "optimizer.warmup_steps": 1,
    }
    check(folder, ranks, {**COMMON, **CASES["reinforce"], **scheduled})


def check(folder, ranks, settings: dict) -> None:
    batches = [conflicting_groups(prompts=3), conflicting_groups(prompts=3, first=3)]
    plain = PlainLearner(folder, cases.make_config(folder, {}, settings))
    (found,) = ranks(1).run(cases.learn, folder=folder, settings=settings, batches=batches)
    for groups, (learned, updates) in zip(batches, found, strict=True):
        expected = plain.learn(groups)
        for mine, theirs in zip(updates, expected, strict=True):
            compare(mine, theirs)
        for key, value in over_mini_batches([update["metrics"] for update in expected]).items():
            assert learned[key] == pytest.approx(value, rel=1e-3, abs=1e-5), key
        assert learned["train/optimizer_steps"] == 2
        assert all(meaning_of(key) for key in learned)


def compare(mine: dict, theirs: dict) -> None:
    for key, value in theirs["metrics"].items():
        assert mine["metrics"][key] == pytest.approx(value, rel=1e-3, abs=1e-5), key
    assert mine["parameters"].keys() == theirs["parameters"].keys()
    for key, value in theirs["parameters"].items():
        assert np.abs(mine["parameters"][key] - value).max() <= 3e-4 * np.abs(value).max(), key


# ---------------------------------------------------------------- micro-batches


def packed(folder, parallel: dict | None = None, **settings) -> list[list]:
    """Micro-batches of each data rank, from 3 prompts."""
    given: dict = {"train.micro_batch_tokens": 4096}
    given |= {key.replace("__", "."): value for key, value in settings.items()}
    learner = Learner(cases.make_config(folder, parallel or {}, given), policy=None)
    return learner.pack(conflicting_groups(prompts=3), "token")[0]


def test_packing_settings_reach_the_micro_batches(models):
    """train.pack_layout, train.micro_batch_tokens, policy.ranks, policy.parallel, policy.fp8.

    They change no update, so that the comparison with the plain loop does not cover them.
    """
    folder, _ = models(MODEL)

    def lengths(*given, **settings):
        return [[len(m.trie) for m in batches] for batches in packed(folder, *given, **settings)]

    ((flat,),) = lengths(train__pack_layout="flat")
    ((merge,),) = lengths(train__pack_layout="merge")
    ((trie,),) = lengths(train__pack_layout="trie")
    assert flat > merge > trie
    (small,) = lengths(train__micro_batch_tokens=64)
    assert len(small) > 1 and max(small) <= 64
    assert len(lengths(policy__ranks=2)) == 2
    assert len(lengths(dict(tensor=2), policy__ranks=2)) == 1
    aligned = lengths(dict(tensor=4), policy__ranks=4, train__micro_batch_tokens=64)
    assert all(length % 4 == 0 for length in aligned[0])
    blocks = lengths(dict(tensor=2), policy__ranks=2, policy__fp8="mxfp8")
    assert all(length % (2 * 32) == 0 for length in blocks[0])
    for pipeline in (2, 3):
        parallel = dict(pipeline=pipeline, virtual=2)
        (rounds,) = lengths(parallel, policy__ranks=pipeline, train__micro_batch_tokens=64)
        assert len(rounds) % pipeline == 0


def test_logits_chunk_rows_reaches_the_loss(ranks, models):
    """policy.logits_chunk_rows changes memory, not results."""
    folder, _ = models(MODEL)
    for rows in (48, 1000):
        (kept,) = ranks(1).run(
            cases.rows_kept, folder=folder, settings={"policy.logits_chunk_rows": rows}
        )
        assert kept == {rows}


# ---------------------------------------------------------------- warm start


class Recorder:
    """A fake Policy that records its calls."""

    def __init__(self):
        self.begun: list[tuple] = []
        self.batches: list[list[list[int]]] = []

    def begin(self, *arguments) -> None:
        self.begun.append(arguments)

    def learn(self, by_data_rank: list) -> list:
        (mini_batches,) = by_data_rank
        self.batches.append(
            [sorted({int(g) for m in batch for g in m.trie.loss.group}) for batch in mini_batches]
        )
        metrics = {"train/loss": float(len(self.batches)), "train/empty_mini_batches": 0.0}
        return [Update(metrics) for _ in mini_batches]


def test_warm_start_settings(models):
    """warm_start.epochs, batch and lr; then the settings of reinforcement learning."""
    folder, _ = models(MODEL)
    settings = {
        "warm_start.trajectories": 5,
        "warm_start.epochs": 3,
        "warm_start.batch": 2,
        "warm_start.lr": 0.02,
        "optimizer.lr": 0.5,
        "optimizer.betas": [0.7, 0.8],
        "train.steps": 4,
        "loss.kl_coef": 0.3,
    }

    def started(seed: int):
        policy = Recorder()
        losses: list[float] = []
        config = cases.make_config(folder, {}, {**settings, "train.seed": seed})
        demonstrations = conflicting_groups(prompts=5)
        metrics = Learner(config, policy).warm_start(
            demonstrations, lambda metrics: losses.append(metrics["train/loss"])
        )
        return config, policy, losses, metrics

    config, policy, losses, metrics = started(seed=1)
    assert losses == [float(n) for n in range(1, 10)] and metrics == {"warm_start/loss": 9.0}
    (supervised, supervised_loss, steps), (optimizer, loss, rest) = policy.begun
    assert steps == 9
    assert (supervised.lr, supervised.schedule, supervised.min_lr) == (0.02, "linear", 0.0)
    assert supervised.betas == [0.7, 0.8]
    assert supervised_loss.type == "nll"
    assert (supervised_loss.kl_coef, supervised_loss.entropy_coef) == (0.0, 0.0)
    assert (optimizer, loss, rest) == (config.optimizer, config.policy_loss, 4)
    epochs = [[id for (batch,) in policy.batches[n : n + 3] for id in batch] for n in (0, 3, 6)]
    assert all(sorted(epoch) == [0, 1, 2, 3, 4] for epoch in epochs)
    assert started(seed=1)[1].batches == policy.batches != started(seed=2)[1].batches


def test_warm_start_without_temperature_routing_replay_kl_and_entropy(ranks, models):
    """Demonstrations were neither sampled nor routed; rollouts afterwards are."""
    folder, model = models(MODEL)
    settings = {
        "rollout.temperature": 0.5,
        "loss.kl_coef": 0.5,
        "loss.entropy_coef": 0.5,
        "loss.reduction": "prompt",
        "warm_start.batch": 4,
        "warm_start.trajectories": 3,
        "warm_start.epochs": 2,
        "warm_start.lr": 1e-2,
    }
    groups = conflicting_groups(prompts=3)
    (found,) = ranks(1).run(cases.warm_start, folder=folder, settings=settings, groups=groups)
    plain = PlainLearner(folder, cases.make_config(folder, {}, {}))
    with torch.no_grad():
        steps = [Sequence(step, 0.0, 0.0, None) for step in steps_of(groups)]
        logprobs = [plain.forward(model, sequence)[0] for sequence in steps]
    assert found["losses"][0] == pytest.approx(-torch.cat(logprobs).mean().item(), rel=1e-4)
    assert found["losses"][1] < found["losses"][0]
    assert found["temperatures"] == [1.0, 1.0, 0.5] and found["kinds"] == ["nll", "nll", "ppo_clip"]
