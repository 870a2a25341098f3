"""Losses. Each is a plain sum over the loss table of weight × term, so micro-batches and ranks can only add up to it.

With x = logprob under the policy being trained, old = under the policy before the update, A = advantage:

    ratio = exp(x - old)                        of a token; gspo: exp(mean of x - old over the step), for all its tokens
    ppo_clip    -min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A), and for A < 0 at most -dual_clip A
    gspo        the same with the step's ratio (Zheng et al. 2025; the model call is the sequence)
    cispo       -stop(clip(ratio, 1 - clip_low, 1 + clip_high)) A x      (MiniMax-M1)
    reinforce   -A x
    nll         -x, and no advantage: supervised
    + kl × estimate of KL(policy ‖ reference)   k2 = d²/2, k3 = exp(d) - d - 1 with d = ref - x, at most KL_MAX
    - entropy × entropy of the policy

Where clip_low and clip_high are not given, `config.CLIP_BOUNDS` has those of the loss. The KL estimate of a token is
bounded: k3 grows as exp(d), and one token that the reference finds far likelier would own the gradient once its norm
is clipped. A token at the bound has no gradient of the KL; `train/kl_clamped_fraction` counts such tokens.

Correction. The engine that sampled and the trainer compute slightly (bf16, stale weights: not so slightly) different
logprobs. importance = exp(old - rollout) of a token, or its product over the step, is a constant factor of the term:

    truncate    min(importance, high)                      (Yao et al. 2025)
    mask        the term counts where low <= importance <= high, unchanged, and else not at all

`old` is computed before the first optimizer step of a batch. With one mini-batch per batch it equals x; `loss.old_logprobs:
rollout` takes the engine's logprobs instead and saves that pass.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megastep.config import LossConfig
from megastep.types import PADDING, LossTable

# Sums over rows that belong to somebody; the driver divides by `rows`, or takes them as they are.
SUMS = (
    "loss",
    "rows",
    "entropy",
    "ratio",
    "clipped",
    "kl_reference",
    "kl_clamped",
    "advantage_abs",
    "importance",
    "importance_cut",
    "mismatch_rows",
    "mismatch_kl",
    "mismatch_abs",
)
MAXIMA = ("mismatch_max_abs", "ratio_max")
FAR = 20.0  # differences of logprobs are bounded by it before exp
KL_MAX = 10.0  # bound of a token's KL estimate, as in verl


@dataclass
class Rows:
    """The columns of a loss table on the device, [N] each."""

    advantage: Tensor
    weight: Tensor
    rollout: Tensor  # NaN where the engine recorded none
    old: Tensor | None
    reference: Tensor | None
    step: Tensor  # which step of the micro-batch
    steps: int
    real: Tensor  # bool: not a padding


def rows_on(loss: LossTable, device: torch.device) -> Rows:
    starts = loss.step_starts()
    step = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, len(loss))))

    def on(column):
        return None if column is None else torch.from_numpy(np.ascontiguousarray(column)).to(device)

    return Rows(
        on(loss.advantage),
        on(loss.weight),
        on(loss.rollout_logprob),
        on(loss.old_logprob),
        on(loss.ref_logprob),
        on(step),
        len(starts),
        on(loss.group != PADDING),
    )


@dataclass
class Account:
    """What a micro-batch's loss leaves behind for the metrics."""

    sums: Tensor  # [SUMS] f64
    maxima: Tensor  # [MAXIMA] f64
    bad: Tensor  # [N] bool: rows whose term is not a finite number


def policy_loss(
    config: LossConfig, logprob: Tensor, entropy: Tensor, rows: Rows
) -> tuple[Tensor, Account]:
    """The weighted sum of a micro-batch."""
    now = logprob.detach()
    recorded = ~rows.rollout.isnan()
    old = now if rows.old is None else rows.old
    if config.old_logprobs == "rollout":
        old = rows.rollout
    # Bounded: exp of a far-off row would be inf, and its gradient, though clipped or of weight 0, NaN.
    log_ratio = torch.where(rows.weight == 0, 0.0, logprob - old).clamp(-FAR, FAR)
    if config.type == "gspo":
        log_ratio = (
            _step_mean(log_ratio.detach(), rows) + logprob - now
        )  # the gradient stays with each token
    ratio = log_ratio.exp()
    term, clipped = TERMS[config.type](config, ratio, rows.advantage, logprob)
    importance, kept = _importance_weight(
        config, torch.where(recorded, old - rows.rollout, 0.0), rows
    )
    term = torch.where(
        importance == 0, 0.0, term * importance
    )  # masked rows are out, whatever they are
    kl, kl_clamped = torch.zeros_like(now), torch.zeros_like(rows.real)
    if config.kl_coef > 0:
        kl, kl_clamped = _kl(config, logprob, rows)
        term = term + config.kl_coef * kl
    if config.entropy_coef > 0:
        term = term - config.entropy_coef * entropy
    # A row of weight 0 adds nothing, whatever its term is.
    loss = torch.where(rows.weight == 0, 0.0, term * rows.weight).sum()
    with torch.no_grad():
        trained_as = (
            now if config.old_logprobs == "rollout" else old
        )  # what the trainer makes of the rollout's tokens
        gap = torch.where(rows.real & recorded, trained_as - rows.rollout, 0.0)
        account = _account(
            loss,
            term,
            entropy,
            ratio,
            clipped,
            kl,
            kl_clamped,
            importance,
            kept,
            rows.real & recorded,
            gap,
            rows,
        )
    return loss, account


# ---------------------------------------------------------------- terms


def _clip(config: LossConfig, ratio: Tensor) -> Tensor:
    return ratio.clamp(1 - config.clip_low, 1 + config.clip_high)


def _clipped_surrogate(
    config: LossConfig, ratio: Tensor, advantage: Tensor, logprob: Tensor
) -> tuple[Tensor, Tensor]:
    free, bounded = -ratio * advantage, -_clip(config, ratio) * advantage
    term = torch.maximum(free, bounded)
    if config.dual_clip > 0:
        term = torch.where(advantage < 0, torch.minimum(term, -config.dual_clip * advantage), term)
    return term, term.detach() != free.detach()


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


TERMS: dict[str, Callable] = {
    "ppo_clip": _clipped_surrogate,
    "gspo": _clipped_surrogate,
    "cispo": _cispo,
    "reinforce": _reinforce,
    "nll": _nll,
}
KL_ESTIMATES: dict[str, Callable] = {
    "k2": lambda d: d.square() / 2,
    "k3": lambda d: d.exp() - d - 1,
}


def _kl(config: LossConfig, logprob: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """The estimate of each token's KL, and which tokens are at its bound, where it has no gradient."""
    # Bounded before exp too: the gradient of an infinite estimate would be 0 × inf.
    estimate = KL_ESTIMATES[config.kl_estimator]((rows.reference - logprob).clamp(-FAR, FAR))
    return estimate.clamp(max=KL_MAX), estimate.detach() > KL_MAX


def _step_mean(values: Tensor, rows: Rows) -> Tensor:
    count = torch.bincount(rows.step, minlength=rows.steps)
    return (_step_sum(values, rows) / count)[rows.step]


def _step_sum(values: Tensor, rows: Rows) -> Tensor:
    return values.new_zeros(rows.steps).index_add_(0, rows.step, values)


def _importance_weight(
    config: LossConfig, log_importance: Tensor, rows: Rows
) -> tuple[Tensor, Tensor]:
    """The constant factor of each term, and which terms it leaves as they are."""
    everywhere = torch.ones_like(rows.real)
    assert config.importance_sampling.mode != "auto", "Config.policy_loss decides what it means"
    if config.importance_sampling.mode == "none":
        return torch.ones_like(log_importance), everywhere
    if config.importance_sampling.level == "step":
        log_importance = _step_sum(log_importance, rows)[rows.step]
    importance = log_importance.clamp(-FAR, FAR).exp()
    if config.importance_sampling.mode == "truncate":
        return importance.clamp(
            max=config.importance_sampling.high
        ), importance <= config.importance_sampling.high
    kept = (importance >= config.importance_sampling.low) & (
        importance <= config.importance_sampling.high
    )
    return kept.float(), kept


# ---------------------------------------------------------------- metrics


def _account(
    loss, term, entropy, ratio, clipped, kl, kl_clamped, importance, kept, compared, gap, rows: Rows
) -> Account:
    real = rows.real

    def total(values: Tensor, where: Tensor = real) -> Tensor:
        return torch.where(where, values.double(), 0.0).sum()

    sums = {
        "loss": loss.double(),
        "rows": total(real),
        "entropy": total(entropy),
        "ratio": total(ratio),
        "clipped": total(clipped),
        "kl_reference": total(kl),
        "kl_clamped": total(kl_clamped),
        "advantage_abs": total(rows.advantage.abs()),
        "importance": total(importance),
        "importance_cut": total(~kept),
        "mismatch_rows": total(real, compared),
        "mismatch_kl": total(gap.double().expm1() - gap, compared),
        "mismatch_abs": total(gap.abs(), compared),
    }
    maxima = {
        "mismatch_max_abs": gap.abs().max().double(),
        "ratio_max": torch.where(real, ratio, 0.0).max().double(),
    }
    return Account(
        torch.stack([sums[name] for name in SUMS]),
        torch.stack([maxima[name] for name in MAXIMA]),
        real & ~(term * rows.weight).isfinite(),
    )


def means(sums: dict[str, float], maxima: dict[str, float]) -> dict[str, float]:
    """Metrics of a mini-batch from what all its micro-batches add up to."""
    rows, compared = max(sums["rows"], 1.0), sums["mismatch_rows"]
    found = {
        "train/loss": sums["loss"],
        "train/tokens_trained": sums["rows"],
        "train/entropy": sums["entropy"] / rows,
        "train/ratio_mean": sums["ratio"] / rows,
        "train/ratio_max": maxima["ratio_max"],
        "train/clip_fraction": sums["clipped"] / rows,
        "train/kl_reference": sums["kl_reference"] / rows,
        "train/kl_clamped_fraction": sums["kl_clamped"] / rows,
        "train/advantage_abs_mean": sums["advantage_abs"] / rows,
        "train/importance_mean": sums["importance"] / rows,
        "train/importance_clipped_fraction": sums["importance_cut"] / rows,
    }
    if compared:
        found |= {
            "mismatch/kl": sums["mismatch_kl"] / compared,
            "mismatch/mean_abs": sums["mismatch_abs"] / compared,
            "mismatch/max_abs": maxima["mismatch_max_abs"],
        }
    return found
