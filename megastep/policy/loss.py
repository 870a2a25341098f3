"""Losses: plain sums of weight × term over the loss table, so micro-batches and ranks add up.

With x = logprob under the trained policy, old = logprob before the update, A = advantage:

    ratio = exp(x - old)    of a token; gspo: exp(mean of x - old over the step), for all its tokens

    ppo_clip    -min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A); if A < 0 at most
                -dual_clip A
    gspo        the same with the step's ratio (Zheng et al. 2025; the model call is the sequence)
    cispo       -stop(clip(ratio, 1 - clip_low, 1 + clip_high)) A x      (MiniMax-M1)
    reinforce   -A x
    nll         -x, without an advantage: supervised
    distill     ppo_clip with A = teacher - old of each token: given the context, the expected
                gradient is that of KL(policy ‖ teacher) (Agarwal et al. 2024; Lu 2025)

    + kl_coef × estimate of KL(policy ‖ reference)
                k2 = d²/2, k3 = exp(d) - d - 1 with d = ref - x, at most KL_MAX
    - entropy_coef × entropy of the policy

`config.CLIP_BOUNDS` has the default clip_low and clip_high of each loss. The KL estimate of a token
is bounded: k3 grows as exp(d), so a single token that is much likelier under the reference would
dominate the clipped gradient. A token at the bound has no KL gradient;
`train/kl_clamped_fraction` counts such tokens.

Importance sampling correction. The engine and the trainer compute slightly different logprobs
(bf16), and with stale weights very different ones. The importance ratio exp(old - rollout) of a
token, or its product over the step, is a constant factor of the term:

    truncate    min(importance ratio, high)                                     (Yao et al. 2025)
    mask        1 where low <= importance ratio <= high, else 0

`old` is computed before the first optimizer step of a batch. With one mini-batch per batch it
equals x; `loss.old_logprobs: rollout` uses the engine's logprobs instead and saves that pass.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megastep.config import LossConfig
from megastep.types import PADDING, LossTable

# Sums over real rows; `means` divides most of them by `rows` or `mismatch_rows`.
SUMS = (
    "loss",
    "rows",
    "entropy",
    "ratio",
    "clipped",
    "kl_reference",
    "kl_clamped",
    "kl_teacher",
    "advantage_abs",
    "importance",
    "importance_clipped",
    "mismatch_rows",
    "mismatch_kl",
    "mismatch_abs",
)
MAXIMA = ("mismatch_max_abs", "ratio_max")
MAX_LOG_RATIO = 20.0  # bound of a logprob difference before exp
KL_MAX = 10.0  # bound of a token's KL estimate, as in verl


@dataclass
class LossRows:
    """The columns of a loss table on the device, [N] each."""

    advantage: Tensor
    weight: Tensor
    rollout_logprob: Tensor  # NaN where the engine recorded none
    old_logprob: Tensor | None
    ref_logprob: Tensor | None
    teacher_logprob: Tensor | None
    step: Tensor  # index of the row's step in the micro-batch
    num_steps: int
    real: Tensor  # bool: not padding


def loss_rows(loss: LossTable, device: torch.device) -> LossRows:
    starts = loss.step_starts()
    step = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, len(loss))))

    def on_device(column: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(column)).to(device)

    def if_computed(column: np.ndarray | None) -> Tensor | None:
        return None if column is None else on_device(column)

    return LossRows(
        advantage=on_device(loss.advantage),
        weight=on_device(loss.weight),
        rollout_logprob=on_device(loss.rollout_logprob),
        old_logprob=if_computed(loss.old_logprob),
        ref_logprob=if_computed(loss.ref_logprob),
        teacher_logprob=if_computed(loss.teacher_logprob),
        step=on_device(step),
        num_steps=len(starts),
        real=on_device(loss.group != PADDING),
    )


@dataclass
class RowTerms:
    """Intermediate values of the loss that the metrics are computed from, [N] each."""

    term: Tensor
    entropy: Tensor
    ratio: Tensor
    clipped: Tensor  # bool: clipping changed the term
    advantage: Tensor
    kl: Tensor
    kl_clamped: Tensor  # bool: the KL estimate is at KL_MAX
    importance_weight: Tensor
    importance_kept: Tensor  # bool: importance sampling neither truncated nor masked the term
    compared: Tensor  # bool: real rows with a rollout logprob
    logprob_difference: Tensor  # trainer - rollout; 0 where not compared


@dataclass
class LossMetrics:
    """The metrics of a micro-batch, before they are added up over micro-batches and ranks."""

    sums: Tensor  # [SUMS] f64
    maxima: Tensor  # [MAXIMA] f64
    nonfinite: Tensor  # [N] bool: rows whose weighted term is not finite


def policy_loss(
    config: LossConfig, logprob: Tensor, entropy: Tensor, rows: LossRows
) -> tuple[Tensor, LossMetrics]:
    """The weighted sum of a micro-batch."""
    current = logprob.detach()
    recorded = ~rows.rollout_logprob.isnan()
    if config.old_logprobs == "rollout":
        old = rows.rollout_logprob
        trainer_logprob = current
    else:
        old = current if rows.old_logprob is None else rows.old_logprob
        trainer_logprob = old
    # Bounded: exp of an outlier would be inf, and its gradient, though clipped or of weight 0, NaN.
    log_ratio = torch.where(rows.weight == 0, 0.0, logprob - old)
    log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if config.type == "gspo":
        # `logprob - current` is 0 and carries the gradient of each token.
        log_ratio = _step_mean(log_ratio.detach(), rows) + logprob - current
    ratio = log_ratio.exp()
    advantage = _distillation_advantage(old, rows) if config.type == "distill" else rows.advantage
    term, clipped = TERMS[config.type](config, ratio, advantage, logprob)
    log_importance_ratio = torch.where(recorded, old - rows.rollout_logprob, 0.0)
    importance_weight, importance_kept = _importance_weight(config, log_importance_ratio, rows)
    # A masked row adds 0 even if its term is not finite.
    term = torch.where(importance_weight == 0, 0.0, term * importance_weight)
    kl = torch.zeros_like(current)
    kl_clamped = torch.zeros_like(rows.real)
    if config.kl_coef > 0:
        kl, kl_clamped = _kl(config, logprob, rows)
        term = term + config.kl_coef * kl
    if config.entropy_coef > 0:
        term = term - config.entropy_coef * entropy
    # So does a row of weight 0, which keeps NaN out of the sum.
    loss = torch.where(rows.weight == 0, 0.0, term * rows.weight).sum()
    with torch.no_grad():
        compared = rows.real & recorded
        difference = torch.where(compared, trainer_logprob - rows.rollout_logprob, 0.0)
        terms = RowTerms(
            term=term,
            entropy=entropy,
            ratio=ratio,
            clipped=clipped,
            advantage=advantage,
            kl=kl,
            kl_clamped=kl_clamped,
            importance_weight=importance_weight,
            importance_kept=importance_kept,
            compared=compared,
            logprob_difference=difference,
        )
        metrics = _loss_metrics(loss, terms, rows)
    return loss, metrics


# ---------------------------------------------------------------- terms


def _clip(config: LossConfig, ratio: Tensor) -> Tensor:
    assert config.clip_low is not None and config.clip_high is not None, "set by Config.policy_loss"
    return ratio.clamp(1 - config.clip_low, 1 + config.clip_high)


def _clipped_surrogate(
    config: LossConfig, ratio: Tensor, advantage: Tensor, logprob: Tensor
) -> tuple[Tensor, Tensor]:
    unclipped = -ratio * advantage
    bounded = -_clip(config, ratio) * advantage
    term = torch.maximum(unclipped, bounded)
    if config.dual_clip > 0:
        term = torch.where(advantage < 0, torch.minimum(term, -config.dual_clip * advantage), term)
    return term, term.detach() != unclipped.detach()


def _cispo(
    config: LossConfig, ratio: Tensor, advantage: Tensor, logprob: Tensor
) -> tuple[Tensor, Tensor]:
    bounded = _clip(config, ratio).detach()
    return -bounded * advantage * logprob, bounded != ratio.detach()


def _reinforce(
    config: LossConfig, ratio: Tensor, advantage: Tensor, logprob: Tensor
) -> tuple[Tensor, Tensor]:
    return -advantage * logprob, torch.zeros_like(advantage, dtype=torch.bool)


def _nll(
    config: LossConfig, ratio: Tensor, advantage: Tensor, logprob: Tensor
) -> tuple[Tensor, Tensor]:
    return -logprob, torch.zeros_like(advantage, dtype=torch.bool)


# (config, ratio, advantage, logprob) → (term [N], whether the ratio was clipped [N])
TERMS: dict[str, Callable] = {
    "ppo_clip": _clipped_surrogate,
    "gspo": _clipped_surrogate,
    "cispo": _cispo,
    "reinforce": _reinforce,
    "nll": _nll,
    "distill": _clipped_surrogate,
}
KL_ESTIMATORS: dict[str, Callable] = {
    "k2": lambda d: d.square() / 2,
    "k3": lambda d: d.exp() - d - 1,
}


def _distillation_advantage(old: Tensor, rows: LossRows) -> Tensor:
    """[N]; bounded: a token that the teacher excludes would dominate the gradient."""
    assert rows.teacher_logprob is not None, "computed by the worker"
    difference = (rows.teacher_logprob - old.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.where(rows.weight == 0, 0.0, difference)


def _kl(config: LossConfig, logprob: Tensor, rows: LossRows) -> tuple[Tensor, Tensor]:
    """Each token's KL estimate, and which tokens are at its bound, without a gradient."""
    # Bounded before exp too: the gradient of an infinite estimate would be 0 × inf.
    log_ratio = (rows.ref_logprob - logprob).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    estimate = KL_ESTIMATORS[config.kl_estimator](log_ratio)
    return estimate.clamp(max=KL_MAX), estimate.detach() > KL_MAX


def _step_mean(values: Tensor, rows: LossRows) -> Tensor:
    """[N] of each row's step."""
    row_count = torch.bincount(rows.step, minlength=rows.num_steps)
    return (_step_sum(values, rows) / row_count)[rows.step]


def _step_sum(values: Tensor, rows: LossRows) -> Tensor:
    """[num_steps]"""
    return values.new_zeros(rows.num_steps).index_add_(0, rows.step, values)


def _importance_weight(
    config: LossConfig, log_importance_ratio: Tensor, rows: LossRows
) -> tuple[Tensor, Tensor]:
    """The constant factor of each term, and which terms it leaves unchanged."""
    sampling = config.importance_sampling
    assert sampling.mode != "auto", "resolved by Config.policy_loss"
    if sampling.mode == "none":
        return torch.ones_like(log_importance_ratio), torch.ones_like(rows.real)
    if sampling.level == "step":
        log_importance_ratio = _step_sum(log_importance_ratio, rows)[rows.step]
    importance_ratio = log_importance_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    if sampling.mode == "truncate":
        return importance_ratio.clamp(max=sampling.high), importance_ratio <= sampling.high
    kept = (importance_ratio >= sampling.low) & (importance_ratio <= sampling.high)
    return kept.float(), kept


# ---------------------------------------------------------------- metrics


def _loss_metrics(loss: Tensor, terms: RowTerms, rows: LossRows) -> LossMetrics:
    real = rows.real
    difference = terms.logprob_difference

    def total(values: Tensor, where: Tensor = real) -> Tensor:
        return torch.where(where, values.double(), 0.0).sum()

    zero = loss.new_zeros((), dtype=torch.float64)
    sums = {
        "loss": loss.double(),
        "rows": total(real),
        "entropy": total(terms.entropy),
        "ratio": total(terms.ratio),
        "clipped": total(terms.clipped),
        "kl_reference": total(terms.kl),
        "kl_clamped": total(terms.kl_clamped),
        # The mean of old - teacher over sampled tokens estimates KL(policy ‖ teacher).
        "kl_teacher": total(-terms.advantage) if rows.teacher_logprob is not None else zero,
        "advantage_abs": total(terms.advantage.abs()),
        "importance": total(terms.importance_weight),
        "importance_clipped": total(~terms.importance_kept),
        "mismatch_rows": total(real, terms.compared),
        "mismatch_kl": total(difference.double().expm1() - difference, terms.compared),
        "mismatch_abs": total(difference.abs(), terms.compared),
    }
    maxima = {
        "mismatch_max_abs": difference.abs().max().double(),
        "ratio_max": torch.where(real, terms.ratio, 0.0).max().double(),
    }
    return LossMetrics(
        sums=torch.stack([sums[name] for name in SUMS]),
        maxima=torch.stack([maxima[name] for name in MAXIMA]),
        nonfinite=real & ~(terms.term * rows.weight).isfinite(),
    )


def means(sums: dict[str, float], maxima: dict[str, float]) -> dict[str, float]:
    """Metrics of a mini-batch from the totals of all its micro-batches."""
    rows = max(sums["rows"], 1.0)
    compared = sums["mismatch_rows"]
    metrics = {
        "train/loss": sums["loss"],
        "train/tokens_trained": sums["rows"],
        "train/entropy": sums["entropy"] / rows,
        "train/ratio_mean": sums["ratio"] / rows,
        "train/ratio_max": maxima["ratio_max"],
        "train/clip_fraction": sums["clipped"] / rows,
        "train/kl_reference": sums["kl_reference"] / rows,
        "train/kl_clamped_fraction": sums["kl_clamped"] / rows,
        "train/kl_teacher": sums["kl_teacher"] / rows,
        "train/advantage_abs_mean": sums["advantage_abs"] / rows,
        "train/importance_mean": sums["importance"] / rows,
        "train/importance_clipped_fraction": sums["importance_clipped"] / rows,
    }
    if compared:
        metrics |= {
            "mismatch/kl": sums["mismatch_kl"] / compared,
            "mismatch/mean_abs": sums["mismatch_abs"] / compared,
            "mismatch/max_abs": maxima["mismatch_max_abs"],
        }
    return metrics
