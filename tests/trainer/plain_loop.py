"""Training as a plain transformers loop: every step its own sequence, autograd, torch's AdamW.

It shares only the rollout records and the config with megastep: advantages, weights, routing,
losses, learning rates and metrics are implemented again, one token or one step at a time.
"""

import copy
import math
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import torch

from megastep.config import Config
from megastep.types import Group, Step
from tests.policy.updates import experts_of, forced, hf_state, ids_of, make_groups, steps_of


def conflicting_groups(prompts: int, first: int = 0) -> list[Group]:
    """Groups of several turns; steps disagree on the routing of a third of their shared tokens.

    In every second group the environment names its states. Rewards are large, so that epsilons in
    denominators do not matter.
    """
    groups = make_groups(replay=False, prompts=prompts, seed=7 + first)
    random = np.random.default_rng(first)
    for number, group in enumerate(groups):
        group.id = first + number
        for trajectory in group.trajectories:
            trajectory.group_id = group.id
        for order, step in enumerate(steps_of([group])):
            step.reward = float(10 * random.normal())
            step.state = step.index if number % 2 else None
            step.routing = recorded_routing(step, order)
    return groups


def recorded_routing(step: Step, order: int) -> np.ndarray:
    """[tokens - 1, layers, k]: the last sampled token has none"""
    ids = ids_of(step)
    routing = []
    for n in range(len(step.prompt_ids) + int(step.loss_mask.sum()) - 1):
        path = ids[: n + 1]
        disagrees = int(path.sum()) % 3 == 0
        routing.append(experts_of(np.append(path, order) if disagrees else path))
    return np.array(routing, np.uint8)


@dataclass
class Sequence:
    """A step with its advantage, weight and routing."""

    step: Step
    advantage: float
    weight: float
    routing: np.ndarray | None  # [T, layers, k]; None: the live router decides


class PlainLearner:
    def __init__(self, folder, config: Config):
        from transformers import AutoModelForCausalLM

        self.config = config
        self.updates = 0
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.reference = copy.deepcopy(self.model)
        settings = config.optimizer
        decayed = []
        others = []  # no weight decay for norms
        for parameter in self.model.parameters():
            (decayed if parameter.ndim > 1 else others).append(parameter)
        self.adam = torch.optim.AdamW(
            [
                dict(params=decayed, weight_decay=settings.weight_decay),
                dict(params=others, weight_decay=0.0),
            ],
            lr=settings.lr,
            betas=tuple(settings.betas),
            eps=settings.eps,
        )

    def learn(self, groups: list[Group]) -> list[dict]:
        """Metrics and parameters after each optimizer step."""
        size = self.config.train.mini_batch_prompts
        count = math.ceil(len(groups) / size)
        bounds = [i * len(groups) // count for i in range(count + 1)]
        parts = [groups[begin:end] for begin, end in zip(bounds, bounds[1:])]
        batches = [sequences(part, self.config) for part in parts]
        with torch.no_grad():  # the policy before the first update of the batch
            old = [[self.forward(self.model, s)[0] for s in batch] for batch in batches]
        return [self.update(batch, before) for batch, before in zip(batches, old)]

    def update(self, batch: list[Sequence], old: list[torch.Tensor]) -> dict:
        self.model.zero_grad()
        metrics = Metrics()
        for sequence, before in zip(batch, old):
            logprob, entropy = self.forward(self.model, sequence)
            with torch.no_grad():
                reference, _ = self.forward(self.reference, sequence)
            loss = step_loss(self.config, sequence, logprob, entropy, before, reference, metrics)
            loss.backward()
        found = metrics.read()
        parameters = list(self.model.parameters())
        largest = self.config.optimizer.clip_grad or math.inf
        found["train/grad_norm"] = torch.nn.utils.clip_grad_norm_(parameters, largest).item()
        found["train/lr"] = learning_rate(self.config, self.updates)
        for group in self.adam.param_groups:
            group["lr"] = found["train/lr"]
        self.adam.step()
        self.updates += 1
        return {"metrics": found, "parameters": hf_state(self.model)}

    def forward(self, model, sequence: Sequence) -> tuple[torch.Tensor, torch.Tensor]:
        """Logprob and entropy of the trained tokens."""
        step = sequence.step
        ids = torch.from_numpy(ids_of(step).astype(np.int64))
        routing = None if sequence.routing is None else torch.from_numpy(sequence.routing)
        with forced(model, routing):
            logits = model(ids[None, :-1]).logits[0, len(step.prompt_ids) - 1 :]
        everything = (logits / self.config.rollout.temperature).log_softmax(-1)
        logprob = everything.gather(1, ids[len(step.prompt_ids) :, None]).squeeze(1)
        mask = torch.from_numpy(step.loss_mask)
        return logprob[mask], -(everything.exp() * everything).sum(-1)[mask]


def learning_rate(config: Config, update: int) -> float:
    """Linear warm-up, then decay that reaches min_lr one update after the last; update: from 0."""
    settings = config.optimizer
    number = update + 1
    warmup = max(settings.warmup_steps, 1)
    if number <= warmup:
        return settings.lr * number / warmup
    done = (number - warmup) / (config.optimizer_steps + 1 - warmup)
    remaining = {
        "constant": 1.0,
        "linear": 1 - done,
        "cosine": (1 + math.cos(math.pi * done)) / 2,
    }
    return settings.min_lr + remaining[settings.schedule] * (settings.lr - settings.min_lr)


# ---------------------------------------------------------------- advantages, weights, routing


def sequences(groups: list[Group], config: Config) -> list[Sequence]:
    """The steps of a mini-batch."""
    weight = weights(groups, config.loss.reduction)
    result = []
    for group in groups:
        advantage = advantages(group, config)
        routing = routing_of(group, config)
        for trajectory in group.trajectories:
            for step in trajectory.steps:
                key = trajectory.index, step.index
                result.append(
                    Sequence(step, advantage[key], weight[(group.id, *key)], routing[key])
                )
    return result


def advantages(group: Group, config: Config) -> dict[tuple[int, int], float]:
    """By trajectory and step."""
    settings = config.advantage
    returns = {}
    states = {}
    totals = {}
    for trajectory in group.trajectories:
        rewards = [step.reward for step in trajectory.steps]
        totals[trajectory.index] = sum(rewards)
        for step in trajectory.steps:
            key = trajectory.index, step.index
            later = rewards[step.index :]
            returns[key] = sum(settings.gamma**k * reward for k, reward in enumerate(later))
            states[key] = tuple(step.prompt_ids.tolist()) if step.state is None else step.state
    if settings.estimator == "step_returns":
        return {
            (t, s): value - np.mean([v for (_, other), v in returns.items() if other == s])
            for (t, s), value in returns.items()
        }
    episode = {t: standardized(total, list(totals.values())) for t, total in totals.items()}
    if settings.estimator == "grpo":
        return {(t, s): episode[t] for t, s in returns}
    assert settings.estimator == "gigpo"
    result = {}
    for key, value in returns.items():
        alike = [v for other, v in returns.items() if states[other] == states[key]]
        result[key] = episode[key[0]] + settings.step_coef * standardized(value, alike)
    return result


def standardized(value: float, among: list[float]) -> float:
    if len(among) < 2 or min(among) == max(among):
        return 0.0
    return (value - np.mean(among)) / np.std(among, ddof=1)


def weights(groups: list[Group], reduction: str) -> dict[tuple[int, int, int], float]:
    """Weight of each trained token, by group, trajectory and step."""
    tokens = {
        (g.id, t.index, s.index): int(s.loss_mask.sum())
        for g in groups
        for t in g.trajectories
        for s in t.steps
    }
    # The part of the key that names the unit of equal weight.
    parts = {"token": 0, "prompt": 1, "trajectory": 2, "step": 3}[reduction]
    units: dict[tuple, int] = defaultdict(int)
    for key, count in tokens.items():
        units[key[:parts]] += count
    return {key: 1 / len(units) / units[key[:parts]] for key in tokens}


def routing_of(group: Group, config: Config) -> dict[tuple[int, int], np.ndarray | None]:
    """Routing of each step, by routing_replay.on_conflict.

    split: its own; owner: that of the first step that sampled the token, else that holds it.
    """
    steps = [(t.index, step) for t in group.trajectories for step in t.steps]
    if not config.routing_replay.enabled:
        return {(index, step.index): None for index, step in steps}
    owned: dict[bytes, tuple] = {}
    for order, (_, step) in enumerate(steps):
        for n, experts in enumerate(step.routing):
            path = ids_of(step)[: n + 1].tobytes()
            claim = (n < len(step.prompt_ids), order)
            if path not in owned or claim < owned[path][0]:
                owned[path] = claim, experts
    result = {}
    for index, step in steps:
        routing = np.full((len(step) - 1, *step.routing.shape[1:]), -1)  # [T, layers, k]
        for n, experts in enumerate(step.routing):
            path = ids_of(step)[: n + 1].tobytes()
            is_owned = config.routing_replay.on_conflict == "owner"
            routing[n] = owned[path][1] if is_owned else experts
        result[index, step.index] = routing
    return result


# ---------------------------------------------------------------- the loss of a step


class Metrics:
    def __init__(self):
        self.loss = 0.0
        self.rows: dict[str, list[float]] = defaultdict(list)

    def add(self, loss: torch.Tensor, **columns: torch.Tensor) -> None:
        self.loss += loss.item()
        for name, values in columns.items():
            self.rows[name] += values.detach().double().tolist()

    def read(self) -> dict[str, float]:
        rows = self.rows
        difference = np.array(rows["difference"])
        names = {
            "entropy": "entropy",
            "ratio": "ratio_mean",
            "clipped": "clip_fraction",
            "kl": "kl_reference",
            "importance": "importance_mean",
            "bounded": "importance_clipped_fraction",
            "size": "advantage_abs_mean",
        }
        return {f"train/{name}": float(np.mean(rows[column])) for column, name in names.items()} | {
            "train/loss": self.loss,
            "train/tokens_trained": len(difference),
            "train/ratio_max": max(rows["ratio"]),
            "train/kl_clamped_fraction": float(np.mean(np.array(rows["kl"]) >= 10)),
            "train/skipped": 0.0,
            "mismatch/kl": float(np.mean(np.exp(difference) - difference - 1)),
            "mismatch/mean_abs": float(np.abs(difference).mean()),
            "mismatch/max_abs": float(np.abs(difference).max()),
        }


def step_loss(
    config: Config, sequence: Sequence, x, entropy, policy_before, reference, metrics: Metrics
):
    settings = config.loss
    advantage = sequence.advantage
    rollout = torch.from_numpy(sequence.step.logprobs[sequence.step.loss_mask])
    old = rollout if settings.old_logprobs == "rollout" else policy_before
    term, ratio, clipped = surrogate(settings, x, old, advantage)
    importance, bounded = importance_of(config, old - rollout)
    term = term * importance
    d = reference - x
    kl = torch.zeros_like(x)
    if settings.kl_coef:
        kl = (d.exp() - d - 1 if settings.kl_estimator == "k3" else d**2 / 2).clamp(max=10)
    loss = (
        sequence.weight * (term + settings.kl_coef * kl - settings.entropy_coef * entropy)
    ).sum()
    difference = (x if settings.old_logprobs == "rollout" else old) - rollout
    metrics.add(
        loss,
        entropy=entropy,
        ratio=ratio,
        clipped=clipped,
        kl=kl,
        importance=importance,
        bounded=bounded,
        difference=difference,
        size=torch.full_like(x, abs(advantage)),
    )
    return loss


def surrogate(
    settings, x, old, advantage: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Term, ratio, and whether it is clipped."""
    ratio = (x - old).exp()
    if settings.type == "reinforce":
        return -advantage * x, ratio, torch.zeros_like(x)
    if settings.type == "gspo":
        # The paper's GSPO-token: each token has the gradient of its own logprob.
        ratio = (x - old).mean().exp().detach() * (x - x.detach()).exp()
    bounded = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    if settings.type == "cispo":
        return -bounded.detach() * advantage * x, ratio, bounded != ratio
    term = -torch.minimum(ratio * advantage, bounded * advantage)
    if settings.dual_clip and advantage < 0:
        term = term.clamp(max=-settings.dual_clip * advantage)
    return term, ratio, term != -ratio * advantage


def importance_of(
    config: Config, log_importance: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The factor of each term, and whether it differs from the importance ratio."""
    settings = config.loss.importance_sampling
    mode = settings.mode
    if mode == "auto":
        is_stale = config.asynchronous.max_staleness > 0 and config.loss.old_logprobs == "policy"
        mode = "truncate" if is_stale else "none"
    if mode == "none":
        return torch.ones_like(log_importance), torch.zeros_like(log_importance)
    if settings.level == "step":
        log_importance = log_importance.sum().expand_as(log_importance)
    importance = log_importance.detach().exp()
    if mode == "truncate":
        return importance.clamp(max=settings.high), importance > settings.high
    inside = (importance >= settings.low) & (importance <= settings.high)
    return inside.float(), ~inside
