"""The training half of a step: groups in, metrics out. It knows the policy and no engine.

groups ── mini-batches, counted in prompts ── credit and weight ── fold and pack ──► policy.learn, rank by rank
"""

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from megastep.cluster import Policy
from megastep.config import Config, ImportanceSamplingConfig
from megastep.models.architecture import read_architecture
from megastep.samples import lay_out, make_samples
from megastep.samples.metrics import over_mini_batches, packing_metrics
from megastep.samples.packing import mini_batches
from megastep.samples.validation import validate
from megastep.types import ExpertShape, Group, MicroBatch


def model_limits(config: Config) -> tuple[int, ExpertShape | None]:
    """What rollouts of the configured model can hold: its vocabulary, and with replay its experts (see `validate`)."""
    arch = read_architecture(config.model.path)
    if arch.experts is None or not config.routing_replay.enabled:
        return arch.vocab, None
    return arch.vocab, ExpertShape(arch.experts.count, arch.experts.top_k, arch.experts.layers)


class Learner:
    def __init__(self, config: Config, policy: Policy, tell: Callable[[str], None] = print):
        self.config, self.policy, self.tell = config, policy, tell
        self.arch = read_architecture(config.model.path)
        self.vocab, self.experts = model_limits(config)

    def learn(self, groups: list[Group]) -> dict[str, float]:
        """One optimizer step per mini-batch of prompts. No groups, which filters can lead to: nothing is learned."""
        validate(groups, self.vocab, self.experts)
        parts = mini_batches(groups, self.config.mini_batch_prompts)
        return self._learn(parts, self.config.loss.reduction) if parts else {}

    def warm_start(
        self, demonstrations: list[Group], on_step: Callable[[float], None]
    ) -> dict[str, float]:
        """Supervised epochs over demonstrations, then a fresh optimizer for what follows; `on_step` gets each loss."""
        settings, config = self.config.warm_start, self.config
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
        self.policy.call("begin", optimizer, supervised, settings.optimizer_steps)
        random = np.random.default_rng([config.train.seed, 0xDE])
        loss = float("nan")
        for _ in range(settings.epochs):
            shuffled = [demonstrations[i] for i in random.permutation(len(demonstrations))]
            for batch in mini_batches(shuffled, settings.batch):
                loss = self._learn([batch], "token").get(
                    "train/loss", loss
                )  # none where nothing is trained
                on_step(loss)
        self.begin()
        return {"warm_start/loss": loss}

    def begin(self) -> None:
        """The policy as it is now is where reinforcement learning starts: fresh optimizer, reference of the KL."""
        self.policy.call(
            "begin", self.config.optimizer, self.config.policy_loss, self.config.optimizer_steps
        )

    def _learn(self, parts: list[list[Group]], reduction: str) -> dict[str, float]:
        begun = time.perf_counter()
        laid_out = [self.lay_out(part, reduction) for part in parts]
        laid_out_at = time.perf_counter()
        # [data rank][mini-batch] micro-batches
        of_ranks = [
            [batches[rank] for batches, _ in laid_out] for rank in range(self.config.data_ranks)
        ]
        updates = self.policy.scatter("learn", of_ranks)[0]
        for update in updates:
            if update.skipped is not None:
                self.tell(f"an optimizer step was left out: {update.skipped}")
        per_mini_batch = [
            update.metrics | metrics for update, (_, metrics) in zip(updates, laid_out, strict=True)
        ]
        metrics = over_mini_batches(per_mini_batch)
        return metrics | {
            "train/optimizer_steps": len(updates) - metrics["train/empty_mini_batches"],
            "time/pack_s": laid_out_at - begun,
            "time/update_s": time.perf_counter() - laid_out_at,
        }

    def lay_out(
        self, groups: list[Group], reduction: str
    ) -> tuple[list[list[MicroBatch]], dict[str, float]]:
        """Micro-batches of each data-parallel rank, and what is to be said about them."""
        config, layout = self.config, self.config.policy.parallel
        advantage = config.advantage
        samples = make_samples(
            groups, advantage.estimator, reduction, advantage.gamma, advantage.step_coef
        )
        batches, report = lay_out(
            samples,
            ranks=config.data_ranks,
            budget_tokens=config.budget_tokens,
            align_tokens=layout.tensor,
            pack_layout=config.train.pack_layout,
            on_conflict=config.routing_replay.on_conflict,
            attention_tokens=6 * self.arch.hidden,
            rounds_of=layout.pipeline if layout.virtual > 1 else 1,
        )
        return batches, packing_metrics(report, batches, config.budget_tokens)
