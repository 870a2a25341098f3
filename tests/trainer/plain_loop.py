"""Training as a plain transformers loop: every step its own sequence, autograd, torch's AdamW.

It shares nothing with megastep but the records of a rollout and the config: advantages, weights, routing, losses,
learning rates and metrics are written out again, one token or one step at a time.
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
    """Groups of several turns. Steps disagree on the experts of a third of the tokens that they share; in every second
    group the environment names its states. Rewards are large: an epsilon beside their deviation changes nothing."""
    groups = make_groups(replay=False, prompts=prompts, seed=7 + first)
    random = np.random.default_rng(first)
    for number, group in enumerate(groups):
        group.id = first + number
        for trajectory in group.trajectories:
            trajectory.group_id = group.id
        for order, step in enumerate(steps_of([group])):
            step.reward = float(10 * random.normal())
            step.state = step.index if number % 2 else None
            step.routing = recorded_experts(step, order)
    return groups


def recorded_experts(step: Step, order: int) -> np.ndarray:
    """[tokens but the last sampled, layers, k]"""
    ids, experts = ids_of(step), []
    for n in range(len(step.prompt_ids) + int(step.loss_mask.sum()) - 1):
        path = ids[: n + 1]
        disagrees = int(path.sum()) % 3 == 0
        experts.append(experts_of(np.append(path, order) if disagrees else path))
    return np.array(experts, np.uint8)


@dataclass
class Sequence:
    """A step and what the loss does with it."""

    step: Step
    advantage: float
    weight: float
    routes: np.ndarray | None  # [T, layers, k]; None: the live router decides


class PlainLearner:
    def __init__(self, folder, config: Config):
        from transformers import AutoModelForCausalLM

        self.config, self.updates = config, 0
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.reference = copy.deepcopy(self.model)
        settings = config.optimizer
        decayed, others = [], []  # no weight decay for norms, as is usual
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
        parts = [
            groups[i * len(groups) // count : (i + 1) * len(groups) // count] for i in range(count)
        ]
        batches = [sequences(part, self.config) for part in parts]
        with torch.no_grad():  # of the policy before the first update of the batch
            old = [
                [self.forward(self.model, sequence)[0] for sequence in batch] for batch in batches
            ]
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
        routes = None if sequence.routes is None else torch.from_numpy(sequence.routes)
        with forced(model, routes):
            logits = model(ids[None, :-1]).logits[0, len(step.prompt_ids) - 1 :]
        everything = (logits / self.config.rollout.temperature).log_softmax(-1)
        logprob = everything.gather(1, ids[len(step.prompt_ids) :, None]).squeeze(1)
        mask = torch.from_numpy(step.loss_mask)
        return logprob[mask], -(everything.exp() * everything).sum(-1)[mask]


def learning_rate(config: Config, update: int) -> float:
    """Of update 0, 1, ...: a linear warm-up to the whole rate, then down, so that min_lr would come after the last."""
    settings, number = config.optimizer, update + 1
    warmup = max(settings.warmup_steps, 1)
    if number <= warmup:
        return settings.lr * number / warmup
    done = (number - warmup) / (config.optimizer_steps + 1 - warmup)
    left = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[
        settings.schedule
    ]
    return settings.min_lr + left * (settings.lr - settings.min_lr)


# ---------------------------------------------------------------- advantages, weights, experts


def sequences(groups: list[Group], config: Config) -> list[Sequence]:
    """Of a mini-batch: its steps, those that train nothing left out."""
    weight = weights(groups, config.loss.reduction)
    result = []
    for group in groups:
        advantage, routes = advantages(group, config), routes_of(group, config)
        for trajectory in group.trajectories:
            for step in trajectory.steps:
                key = trajectory.index, step.index
                result.append(Sequence(step, advantage[key], weight[(group.id, *key)], routes[key]))
    return result


def advantages(group: Group, config: Config) -> dict[tuple[int, int], float]:
    """By trajectory and step."""
    settings = config.advantage
    returns, states, totals = {}, {}, {}
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
    """Of each trained token, by group, trajectory and step."""
    tokens = {
        (g.id, t.index, s.index): int(s.loss_mask.sum())
        for g in groups
        for t in g.trajectories
        for s in t.steps
    }
    kept = {"token": 0, "prompt": 1, "trajectory": 2, "step": 3}[
        reduction
    ]  # of the key: what counts the same
    units = defaultdict(int)
    for key, count in tokens.items():
        units[key[:kept]] += count
    return {key: 1 / len(units) / units[key[:kept]] for key in tokens}


def routes_of(group: Group, config: Config) -> dict[tuple[int, int], np.ndarray | None]:
    """Experts of each step's tokens: its own (split), or those of the first step that sampled the token, else of the
    first that has it (owner)."""
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
        routes = np.full((len(step) - 1, *step.routing.shape[1:]), -1)
        for n, experts in enumerate(step.routing):
            path = ids_of(step)[: n + 1].tobytes()
            routes[n] = owned[path][1] if config.routing_replay.on_conflict == "owner" else experts
        result[index, step.index] = routes
    return result


# ---------------------------------------------------------------- the loss of a step


class Metrics:
    def __init__(self):
        self.loss, self.rows = 0.0, defaultdict(list)

    def add(self, loss: torch.Tensor, **columns: torch.Tensor) -> None:
        self.loss += loss.item()
        for name, values in columns.items():
            self.rows[name] += values.detach().double().tolist()

    def read(self) -> dict[str, float]:
        rows = self.rows
        gap = np.array(rows["gap"])
        names = {
            "entropy": "entropy",
            "ratio": "ratio_mean",
            "clipped": "clip_fraction",
            "kl": "kl_reference",
            "importance": "importance_mean",
            "cut": "importance_clipped_fraction",
            "size": "advantage_abs_mean",
        }
        return {f"train/{name}": float(np.mean(rows[column])) for column, name in names.items()} | {
            "train/loss": self.loss,
            "train/tokens_trained": len(gap),
            "train/ratio_max": max(rows["ratio"]),
            "train/kl_clamped_fraction": float(np.mean(np.array(rows["kl"]) >= 10)),
            "train/skipped": 0.0,
            "mismatch/kl": float(np.mean(np.exp(gap) - gap - 1)),
            "mismatch/mean_abs": float(np.abs(gap).mean()),
            "mismatch/max_abs": float(np.abs(gap).max()),
        }


def step_loss(
    config: Config, sequence: Sequence, x, entropy, policy_before, reference, metrics: Metrics
):
    settings, advantage = config.loss, sequence.advantage
    rollout = torch.from_numpy(sequence.step.logprobs[sequence.step.loss_mask])
    old = rollout if settings.old_logprobs == "rollout" else policy_before
    term, ratio, clipped = surrogate(settings, x, old, advantage)
    importance, cut = importance_of(config, old - rollout)
    term = term * importance
    d = reference - x
    kl = torch.zeros_like(x)
    if settings.kl_coef:
        kl = (d.exp() - d - 1 if settings.kl_estimator == "k3" else d**2 / 2).clamp(max=10)
    loss = (
        sequence.weight * (term + settings.kl_coef * kl - settings.entropy_coef * entropy)
    ).sum()
    gap = (x if settings.old_logprobs == "rollout" else old) - rollout
    metrics.add(
        loss,
        entropy=entropy,
        ratio=ratio,
        clipped=clipped,
        kl=kl,
        importance=importance,
        cut=cut,
        gap=gap,
        size=torch.full_like(x, abs(advantage)),
    )
    return loss


def surrogate(
    settings, x, old, advantage: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Term, ratio, and where it is clipped."""
    ratio = (x - old).exp()
    if settings.type == "reinforce":
        return -advantage * x, ratio, torch.zeros_like(x)
    if (
        settings.type == "gspo"
    ):  # the paper's GSPO-token: each token has the gradient of its own logprob
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
    """The factor of each term, and where it is not the importance itself."""
    settings, correction = config.loss, config.loss.importance_sampling.mode
    if correction == "auto":
        correction = (
            "truncate"
            if config.asynchronous.max_staleness > 0 and settings.old_logprobs == "policy"
            else "none"
        )
    if correction == "none":
        return torch.ones_like(log_importance), torch.zeros_like(log_importance)
    if settings.importance_sampling.level == "step":
        log_importance = log_importance.sum().expand_as(log_importance)
    importance = log_importance.detach().exp()
    if correction == "truncate":
        return importance.clamp(
            max=settings.importance_sampling.high
        ), importance > settings.importance_sampling.high
    inside = (importance >= settings.importance_sampling.low) & (
        importance <= settings.importance_sampling.high
    )
    return inside.float(), ~inside
