"""The training half of a step: groups in, metrics out. It calls the policy, never the engines.

groups → mini-batches of prompts → advantages and weights → tries → micro-batches → policy.learn
"""

import sys
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from megastep.config import Config, ImportanceSamplingConfig, training_warnings
from megastep.models.architecture import read_architecture
from megastep.policy.actor import Policy
from megastep.samples import lay_out, make_samples
from megastep.samples.metrics import over_mini_batches, packing_metrics
from megastep.samples.packing import mini_batches
from megastep.samples.validation import model_limits, validate
from megastep.trainer.rundir import Run
from megastep.types import Group, MicroBatch, Update


def print_warnings(config: Config) -> None:
    for line in training_warnings(config):
        print(f"warning: {line}", file=sys.stderr)


def load_policy(run: Run, learner: "Learner") -> None:
    """Load the run's checkpoint, if it has one.

    The KL reference is the policy that the run started from: an imported or warm-started one. When
    resuming a later checkpoint, it is loaded first.
    """
    if run.checkpoint is None:
        return
    begins = run.state.step == 0
    reference = run.checkpoint if begins else None
    if not begins and learner.config.loss.kl_coef > 0:
        reference = run.reference()
    if reference is not None:
        learner.policy.load(reference)
        learner.begin()
    if not begins:
        learner.policy.load(run.checkpoint)


class Learner:
    def __init__(self, config: Config, policy: Policy, on_message: Callable[[str], None] = print):
        self.config = config
        self.policy = policy
        self.on_message = on_message
        self.arch = read_architecture(config.model.path)
        self.vocab, self.experts = model_limits(config)

    def learn(self, groups: list[Group]) -> dict[str, float]:
        """One optimizer step per mini-batch of prompts; none if filters left no groups."""
        validate(groups, self.vocab, self.experts)
        parts = mini_batches(groups, self.config.mini_batch_prompts)
        return self._learn(parts, self.config.loss.reduction) if parts else {}

    def warm_start(
        self, demonstrations: list[Group], on_step: Callable[[dict[str, float]], None]
    ) -> dict[str, float]:
        """Supervised epochs, then a fresh optimizer; `on_step` gets each step's metrics."""
        config = self.config
        settings = config.warm_start
        optimizer = replace(
            config.optimizer, lr=settings.lr, min_lr=0.0, schedule="linear", warmup_steps=0
        )
        supervised = replace(
            config.loss,
            type="nll",
            old_logprobs="policy",
            kl_coef=0.0,
            entropy_coef=0.0,
            importance_sampling=ImportanceSamplingConfig(mode="none"),
        )
        self.policy.begin(optimizer, supervised, settings.optimizer_steps(len(demonstrations)))
        random = np.random.default_rng([config.train.seed, 0xDE])
        loss = float("nan")
        for _ in range(settings.epochs):
            shuffled = [demonstrations[i] for i in random.permutation(len(demonstrations))]
            for batch in mini_batches(shuffled, settings.batch):
                metrics = self._learn([batch], "token")
                loss = metrics.get("train/loss", loss)  # absent if no token is trained
                on_step(metrics)
        self.begin()
        return {"warm_start/loss": loss}

    def begin(self) -> None:
        """Start RL: a fresh optimizer; the current policy is the KL reference."""
        config = self.config
        self.policy.begin(config.optimizer, config.policy_loss, config.optimizer_steps)

    def _learn(self, parts: list[list[Group]], reduction: str) -> dict[str, float]:
        begun = time.perf_counter()
        packed = [self.pack(part, reduction) for part in parts]
        packed_at = time.perf_counter()
        by_data_rank = [
            [batches[rank] for batches, _ in packed] for rank in range(self.config.data_ranks)
        ]
        updates: list[Update] = self.policy.learn(by_data_rank)
        for update in updates:
            if update.skipped is not None:
                self.on_message(f"optimizer step skipped: {update.skipped}")
        metrics = over_mini_batches(
            [
                update.metrics | of_batch
                for update, (_, of_batch) in zip(updates, packed, strict=True)
            ]
        )
        return metrics | {
            "train/optimizer_steps": len(updates) - metrics["train/empty_mini_batches"],
            "time/pack_s": packed_at - begun,
            "time/update_s": time.perf_counter() - packed_at,
        }

    def pack(
        self, groups: list[Group], reduction: str
    ) -> tuple[list[list[MicroBatch]], dict[str, float]]:
        """Micro-batches of each data-parallel rank, and metrics of the packing."""
        config = self.config
        parallel = config.policy.parallel
        advantage = config.advantage
        samples = make_samples(
            groups, advantage.estimator, reduction, advantage.gamma, advantage.step_coef
        )
        batches, report = lay_out(
            samples,
            ranks=config.data_ranks,
            budget_tokens=config.budget_tokens,
            align_tokens=config.policy.align_tokens,
            pack_layout=config.train.pack_layout,
            on_conflict=config.routing_replay.on_conflict,
            attention_tokens=6 * self.arch.hidden,
            rounds_of=parallel.pipeline if parallel.virtual > 1 else 1,
        )
        return batches, packing_metrics(report, batches, config.budget_tokens)
