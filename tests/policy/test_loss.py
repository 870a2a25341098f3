"""Losses equal their formulas, written out row by row, and do not depend on the micro-batches."""

import math

import numpy as np
import pytest
import torch

from megastep.config import Config, LossConfig
from megastep.config import ImportanceSamplingConfig as IS
from megastep.policy.loss import KL_MAX, MAXIMA, SUMS, loss_rows, means, policy_loss
from megastep.types import LossTable

N = 24


def table(seed=0) -> LossTable:
    random = np.random.default_rng(seed)
    step = np.repeat([0, 1, 2, 3], N // 4).astype(np.int32)
    f32 = np.float32
    return LossTable(
        src=np.arange(N, dtype=np.int32),
        target=np.zeros(N, np.int32),
        advantage=random.normal(size=N).astype(f32),
        weight=random.random(N).astype(f32),
        rollout_logprob=random.normal(-2, 0.5, N).astype(f32),
        group=np.zeros(N, np.int32),
        trajectory=np.zeros(N, np.int32),
        step=step,
        old_logprob=random.normal(-2, 0.5, N).astype(f32),
        ref_logprob=random.normal(-2, 0.5, N).astype(f32),
        teacher_logprob=random.normal(-2, 0.5, N).astype(f32),
    )


def logprobs(seed=1) -> torch.Tensor:
    return torch.from_numpy(
        np.random.default_rng(seed).normal(-2, 0.5, N).astype(np.float32)
    ).requires_grad_()


def run(config: LossConfig, loss: LossTable, x: torch.Tensor, entropy=None):
    config = Config(loss=config).policy_loss  # as the worker gets it
    entropy = torch.full((len(loss),), 1.5) if entropy is None else entropy
    return policy_loss(config, x, entropy, loss_rows(loss, torch.device("cpu")))


def expected(config: LossConfig, loss: LossTable, x: np.ndarray) -> float:
    """The formulas of loss.py's docstring, one row at a time."""
    config = Config(loss=config).policy_loss
    old = loss.rollout_logprob if config.old_logprobs == "rollout" else loss.old_logprob
    total = 0.0
    for i in range(N):
        mine = loss.step == loss.step[i]
        ratio = math.exp(x[i] - old[i])
        if config.type == "gspo":
            ratio = math.exp(np.mean(x[mine] - old[mine]))
        a, bounded = float(loss.advantage[i]), ratio
        if config.type == "distill":
            a = float(loss.teacher_logprob[i] - old[i])
        if config.type in ("ppo_clip", "gspo", "cispo", "distill"):
            bounded = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
        term = {"reinforce": -a * x[i], "nll": -x[i], "cispo": -bounded * a * x[i]}.get(config.type)
        if term is None:
            term = -min(ratio * a, bounded * a)
            if config.dual_clip and a < 0:
                term = min(term, -config.dual_clip * a)
        sampling = config.importance_sampling
        log_importance_ratio = old - loss.rollout_logprob
        if sampling.level == "step":
            importance_ratio = math.exp(log_importance_ratio[mine].sum())
        else:
            importance_ratio = math.exp(log_importance_ratio[i])
        if sampling.mode == "truncate":
            term *= min(importance_ratio, sampling.high)
        elif sampling.mode == "mask":
            term *= sampling.low <= importance_ratio <= sampling.high
        d = loss.ref_logprob[i] - x[i]
        kl = math.exp(d) - d - 1 if config.kl_estimator == "k3" else d * d / 2
        term += config.kl_coef * min(kl, 10)
        total += loss.weight[i] * (term - config.entropy_coef * 1.5)
    return total


@pytest.mark.parametrize(
    "settings",
    [
        dict(type="ppo_clip"),
        dict(type="ppo_clip", clip_low=0.1, clip_high=0.4),
        dict(type="ppo_clip", dual_clip=1.5),
        dict(type="ppo_clip", old_logprobs="rollout"),
        dict(type="gspo", clip_low=0.05, clip_high=0.05),
        dict(type="cispo", clip_high=0.3),
        dict(type="cispo", clip_low=0.2, clip_high=0.3),
        dict(type="reinforce"),
        dict(type="nll"),
        dict(type="distill"),
        dict(type="distill", old_logprobs="rollout", clip_high=0.1),
        dict(type="ppo_clip", kl_coef=0.1),
        dict(type="reinforce", kl_coef=0.1, kl_estimator="k2"),
        dict(type="reinforce", entropy_coef=0.2),
        dict(type="ppo_clip", importance_sampling=IS(mode="truncate", high=1.2)),
        dict(type="ppo_clip", importance_sampling=IS(mode="truncate", level="step", high=1.2)),
        dict(type="reinforce", importance_sampling=IS(mode="mask", low=0.8, high=1.2)),
        dict(
            type="reinforce", importance_sampling=IS(mode="mask", level="step", low=0.2, high=5.0)
        ),
    ],
    ids=lambda s: "-".join(map(str, s.values())),
)
def test_formulas(settings):
    config, loss, x = LossConfig(**settings), table(), logprobs()
    found, _ = run(config, loss, x)
    assert found.item() == pytest.approx(expected(config, loss, x.detach().numpy()), rel=1e-5)


@pytest.mark.parametrize("kind", ["ppo_clip", "gspo", "cispo", "reinforce", "nll"])
def test_micro_batches_add_up_to_the_whole(kind):
    """X4: loss, gradient and metrics of the parts add up, wherever rows are divided by step."""
    config = LossConfig(
        type=kind, kl_coef=0.1, importance_sampling=IS(mode="truncate", level="step")
    )
    loss = table()
    whole_x, parts_x = logprobs(), logprobs()
    whole, metrics = run(config, loss, whole_x)
    whole.backward()
    sums, maxima = torch.zeros(len(SUMS)), torch.zeros(len(MAXIMA))
    for rows in (slice(0, 6), slice(6, 18), slice(18, 24)):
        part, part_metrics = run(config, loss.take(rows), parts_x[rows])
        part.backward()
        sums = sums + part_metrics.sums
        maxima = torch.maximum(maxima, part_metrics.maxima)
    torch.testing.assert_close(whole_x.grad, parts_x.grad)
    torch.testing.assert_close(metrics.sums, sums.double(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(metrics.maxima, maxima.double())


def test_gspo_has_the_gradient_of_the_sequence_ratio():
    """With one weight and advantage per step: that of -A exp(mean of x - old) per step."""
    loss = table()
    loss.advantage[:] = np.repeat(loss.advantage[:4], N // 4)
    loss.weight[:] = 1 / N
    ours, plain = logprobs(), logprobs()
    run(LossConfig(type="gspo", clip_low=0.99, clip_high=99.0), loss, ours)[0].backward()
    old = torch.from_numpy(loss.old_logprob)
    for s in range(4):
        rows = slice(s * N // 4, (s + 1) * N // 4)
        (-loss.advantage[rows][0].item() * (plain[rows] - old[rows]).mean().exp() / 4).backward()
    torch.testing.assert_close(ours.grad, plain.grad)


def test_a_padding_row_is_inert():
    """S14: it adds nothing to loss, gradient or metrics, whatever its logprob."""
    padding = table(2).take(slice(0, 1))
    padding.weight[:] = 0
    padding.group[:] = padding.trajectory[:] = padding.step[:] = -1
    padding.rollout_logprob[:] = padding.old_logprob[:] = 0
    for kind in ("ppo_clip", "gspo", "cispo", "reinforce", "nll"):
        config = LossConfig(type=kind)
        x = torch.full((1,), -300.0, requires_grad=True)
        found, metrics = run(config, padding, x)
        found.backward()
        assert found.item() == 0 and x.grad.item() == 0
        assert not metrics.sums.any() and not metrics.nonfinite.any()
        assert not metrics.maxima.any()
    assert means(dict.fromkeys(SUMS, 0.0), dict.fromkeys(MAXIMA, 0.0))["train/loss"] == 0.0


@pytest.mark.parametrize(
    "kind, low, high", [("ppo_clip", 0.8, 1.2), ("gspo", 1 - 3e-4, 1 + 4e-4), ("cispo", 0, 5)]
)
def test_default_clip_bounds_depend_on_the_loss(kind, low, high):
    """A13: the ratio at which the term is clipped. cispo has no lower bound (MiniMax-M1)."""
    for given, lower, upper in (
        ({}, low, high),
        (dict(clip_low=0.5), 0.5, high),
        (dict(clip_high=0.7), low, 1.7),
    ):
        for ratio in (1e-4, lower - 1e-5, lower + 1e-5, upper - 1e-4, upper + 1e-4, 50.0):
            if ratio <= 0:
                continue
            # The clipped surrogate is bounded above for one sign, below for the other.
            for advantage in (1.0, -1.0):
                factor = factor_of(LossConfig(type=kind, **given), ratio, advantage)
                bounded = min(max(ratio, lower), upper)
                if kind != "cispo" and advantage * ratio < advantage * bounded:
                    bounded = ratio  # the pessimistic side of the surrogate
                assert factor == pytest.approx(bounded, rel=1e-5), (given, ratio, advantage)


def factor_of(config: LossConfig, ratio: float, advantage: float) -> float:
    """What multiplies the advantage (cispo: times the logprob) of one token with this ratio."""
    loss = table().take(slice(0, 1))
    loss.weight[:] = 1.0
    loss.advantage[:] = advantage
    loss.old_logprob[:] = -3.0
    x = torch.tensor([-3.0 + math.log(ratio)], dtype=torch.float64, requires_grad=True)
    found, _ = run(config, loss, x)
    return -found.item() / advantage / (x.item() if config.type == "cispo" else 1.0)


@pytest.mark.parametrize(
    "estimate, d, clamped",
    [
        ("k3", 2.6, False),
        ("k3", 2.7, True),
        ("k3", 15.0, True),
        ("k3", -10.9, False),
        ("k3", -11.1, True),
        ("k2", 4.4, False),
        ("k2", -4.5, True),
        ("k2", 200.0, True),
    ],
)
def test_the_kl_estimate_is_bounded_and_the_bound_is_counted(estimate, d, clamped):
    """A8: a token at the bound has no KL gradient."""
    loss, x = table(), logprobs()
    loss.advantage[:] = 0
    loss.ref_logprob[:] = x.detach().numpy()
    loss.ref_logprob[3] += d
    config = LossConfig(type="reinforce", kl_coef=0.5, kl_estimator=estimate)
    found, totals = run(config, loss, x)
    found.backward()
    value = math.exp(d) - d - 1 if estimate == "k3" else d * d / 2
    assert found.item() == pytest.approx(0.5 * loss.weight[3] * min(value, KL_MAX), rel=1e-3)
    assert (x.grad[3] == 0) == clamped
    metrics = means(
        dict(zip(SUMS, totals.sums.tolist())), dict(zip(MAXIMA, totals.maxima.tolist()))
    )
    assert metrics["train/kl_clamped_fraction"] == pytest.approx(clamped / N)
    assert metrics["train/kl_reference"] == pytest.approx(min(value, KL_MAX) / N, rel=1e-3)


def test_one_outlier_does_not_dominate_the_clipped_gradient():
    """A8: a token e^15 times likelier under the reference does not decide the update."""
    loss, x = table(), logprobs()
    without, _ = run(LossConfig(type="reinforce", kl_coef=0.1), loss, x)
    (before,) = torch.autograd.grad(without, x)
    loss.ref_logprob[3] = x[3].item() + 15
    outlier, _ = run(LossConfig(type="reinforce", kl_coef=0.1), loss, x)
    (after,) = torch.autograd.grad(outlier, x)
    clipped = after / max(after.norm().item(), 1.0)
    others = np.arange(N) != 3
    torch.testing.assert_close(
        clipped[others], before[others] / max(before.norm().item(), 1.0), rtol=0.1, atol=1e-3
    )
    assert clipped[3].square() < 0.2 * clipped.square().sum()


def test_without_old_logprobs_the_ratio_is_one_and_its_gradient_is_not():
    loss, x = table(), logprobs()
    loss.old_logprob = None
    found, totals = run(LossConfig(type="ppo_clip"), loss, x)
    found.backward()
    assert found.item() == pytest.approx(-(loss.weight * loss.advantage).sum(), rel=1e-5)
    torch.testing.assert_close(x.grad, torch.from_numpy(-loss.weight * loss.advantage))
    assert totals.sums[SUMS.index("ratio")] == N


@pytest.mark.parametrize(
    "settings, change",
    [
        (dict(type="ppo_clip", old_logprobs="rollout"), dict(advantage=1.0)),
        (dict(type="ppo_clip", old_logprobs="rollout", dual_clip=3.0), dict(advantage=-1.0)),
        (dict(type="ppo_clip", old_logprobs="rollout"), dict(weight=0.0)),
        (dict(type="reinforce", importance_sampling=IS(mode="mask")), dict(old_logprob=200.0)),
        (dict(type="reinforce", kl_coef=0.1), dict(ref_logprob=200.0)),
    ],
    ids=["clipped", "dual_clip", "weight_0", "masked", "kl"],
)
def test_an_outlier_leaves_loss_and_gradient_finite(settings, change):
    loss, x = table(), logprobs()
    loss.rollout_logprob[3] = -200.0  # exp of the difference is more than a float holds
    for column, value in change.items():
        getattr(loss, column)[3] = value
    found, totals = run(LossConfig(**settings), loss, x)
    found.backward()
    assert math.isfinite(found.item()) and x.grad.isfinite().all() and not totals.nonfinite.any()


def test_mismatch_compares_the_current_policy_with_rollout_old_logprobs():
    loss, x = table(), logprobs()
    _, totals = run(LossConfig(type="ppo_clip", old_logprobs="rollout"), loss, x)
    largest = np.abs(x.detach().numpy() - loss.rollout_logprob).max()
    assert totals.maxima[MAXIMA.index("mismatch_max_abs")] == pytest.approx(largest, rel=1e-5)


def test_nonfinite_terms_are_found_by_row():
    loss, x = table(), logprobs()
    loss.advantage[7] = np.inf
    _, totals = run(LossConfig(type="reinforce"), loss, x)
    assert totals.nonfinite.nonzero().flatten().tolist() == [7]


def test_mismatch_metrics_cover_rows_with_recorded_logprobs():
    loss, x = table(), logprobs()
    loss.rollout_logprob[3] = np.nan
    config = LossConfig(type="ppo_clip", importance_sampling=IS(mode="truncate"))
    found, totals = run(config, loss, x)
    assert math.isfinite(found.item())
    metrics = means(
        dict(zip(SUMS, totals.sums.tolist())), dict(zip(MAXIMA, totals.maxima.tolist()))
    )
    difference = np.delete(loss.old_logprob - loss.rollout_logprob, 3)
    kl = np.mean(np.exp(difference) - difference - 1)
    assert metrics["mismatch/kl"] == pytest.approx(kl, rel=1e-5)
    assert metrics["mismatch/max_abs"] == pytest.approx(np.abs(difference).max(), rel=1e-6)
