"""Times of a run that took place, from its run directory.

    update        a base and seconds per token, fitted to its training steps; equal responses of a
                  prompt, which tries fold, are as frequent as in the run
    weight sync   the mean; other time of a training step: the mean
    engine        an iteration costs a base, that of HALF_BATCH sequences, and as much for each
                  sequence; a prefilled token costs PREFILL of a sampled one. The scale is the one
                  with which the simulation of the run itself waits as long for rollouts as it did

Predictions for another setting hold while ranks and engines compute as fast there: not if they then
share cores that they did not share before.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megastep.config import Config, load
from megastep.errors import ReportError
from megastep.report.metrics_log import read_metrics
from megastep.samples import store
from megastep.simulate.episodes import Distribution, Distributions, Episodes, Recorded
from megastep.simulate.roofline import Iteration, MicroBatchSize

HALF_BATCH = 32.0
PREFILL = 0.1  # one forward pass for many tokens, without sampling
WARM_UP = 1  # training steps that do not count
SEARCHES = 12
CLOSE = 0.01
LEAST_TOKEN_S = 1e-8


@dataclass(frozen=True)
class Measured:
    token_s: float  # of a sampled token in a large batch
    update_base_s: float  # per optimizer step
    update_token_s: float
    sync_s: float
    step_s: float
    call_s: float = 0.0  # in the fitted token_s

    def iteration(self, sequences: int) -> Iteration:
        return Iteration(0.0, self.token_s * sequences, 0.0, self.token_s * HALF_BATCH, 0.0)

    def prefill(self, new_tokens: int, cached_tokens: int) -> float:
        return PREFILL * self.token_s * new_tokens

    def update(self, rounds: list[list[MicroBatchSize]], forward_passes: int) -> float:
        tokens = sum(size.tokens for of_round in rounds for size in of_round)
        return self.update_base_s + self.update_token_s * tokens

    def step(self) -> float:
        return self.step_s

    def sync(self) -> float:
        return self.sync_s

    def switch(self, what: str) -> float:
        return 0.0  # in sync_s


class Calibration(NamedTuple):
    """Means per training step of a simulation of the run."""

    rollout_s: float
    tokens_computed: float


@dataclass(frozen=True)
class MeasuredRun:
    """The times in a run directory."""

    folder: Path
    config: Config
    rows: list[dict]  # of the training steps that count

    @classmethod
    def read(cls, folder: Path) -> "MeasuredRun":
        if not (folder / "metrics.jsonl").is_file() or not (folder / "config.yaml").is_file():
            raise ReportError(
                f"{folder}: not a run directory; metrics.jsonl and config.yaml are needed"
            )
        needed = {"time/update_s", "train/tokens_computed"}
        rows = [row for row in read_metrics(folder) if needed <= row.keys()]
        if len(rows) < WARM_UP + 2:
            raise ReportError(
                f"{folder}: has {len(rows)} training steps with an update; "
                f"{WARM_UP + 2} are needed for their times"
            )
        return cls(folder, load(folder / "config.yaml", has_cuda=True), rows[WARM_UP:])

    def episodes(self, env_s: str) -> Episodes:
        """Its saved rollouts, or episodes of its mean lengths."""
        seed = self.config.train.seed
        files = sorted(self.folder.glob("rollouts/step_*.safetensors"), key=_step_of)
        if files:
            groups = [group for path in files for group in store.read(path) if group.trajectories]
            return Recorded(groups, str(self.folder), Distribution.parse(env_s), seed)
        return Distributions.of(self.config, self._mean_lengths() | {"env-seconds": env_s})

    def _mean_lengths(self) -> dict[str, str | None]:
        turns = self.mean("rollout/turns_mean")
        response = self.mean("turn/response_tokens_mean")
        prompt = self.mean("turn/prompt_tokens_mean")
        # The prompt of turn t holds t - 1 responses and observations.
        grown = max(prompt - response * (turns - 1) / 2, 1.0)
        return {
            "turns": f"{turns:g}",
            "prompt-tokens": f"{grown:g}",
            "response-tokens": f"{response:g}",
            "observation-tokens": "1",
        }

    def mean(self, name: str) -> float:
        return float(np.mean([row.get(name, 0.0) for row in self.rows]))

    @property
    def rollout_s(self) -> float:
        return self.mean("time/rollout_s")

    def times(self, token_s: float) -> Measured:
        base_s, update_token_s = self._update()
        parts = ("time/rollout_s", "time/pack_s", "time/update_s", "time/sync_s", "time/eval_s")
        other_s = self.mean("time/step_s") - sum(map(self.mean, parts))
        return Measured(
            token_s=token_s,
            update_base_s=base_s,
            update_token_s=update_token_s,
            sync_s=self.mean("time/sync_s"),
            step_s=max(other_s, 0.0),
        )

    def _update(self) -> tuple[float, float]:
        """Base and slope per optimizer step, neither negative."""
        steps = np.array([max(row.get("train/optimizer_steps", 1), 1) for row in self.rows])
        tokens = np.array([row["train/tokens_computed"] for row in self.rows]) / steps
        pack = np.array([row.get("time/pack_s", 0.0) for row in self.rows])
        seconds = (np.array([row["time/update_s"] for row in self.rows]) + pack) / steps
        spread = float(((tokens - tokens.mean()) ** 2).sum())
        slope = 0.0
        if spread > 0:
            slope = float(((tokens - tokens.mean()) * (seconds - seconds.mean())).sum()) / spread
        slope = min(max(slope, 0.0), float(seconds.mean() / tokens.mean()))
        return float(seconds.mean() - slope * tokens.mean()), slope

    def calibrated(self, simulated: Callable[[Measured], Calibration]) -> Measured:
        """simulated: a simulation of this run with these times. Rollouts take longer the longer a
        token takes: the search keeps one value on either side."""
        token_s = 1e-4
        low: tuple[float, float] | None = None  # token_s, and rollout_s with it
        high: tuple[float, float] | None = None
        for _ in range(SEARCHES):
            found = simulated(self.times(token_s))
            if abs(found.rollout_s - self.rollout_s) <= CLOSE * self.rollout_s:
                break
            if found.rollout_s < self.rollout_s:
                low = (token_s, found.rollout_s)
            else:
                high = (token_s, found.rollout_s)
            token_s = _next_try(low, high, self.rollout_s)
            if token_s < LEAST_TOKEN_S:  # the environments alone take as long
                break
        folding = self.mean("train/tokens_computed") / max(found.tokens_computed, 1.0)
        times = self.times(token_s)
        return replace(times, update_token_s=times.update_token_s * folding)


def _next_try(
    low: tuple[float, float] | None, high: tuple[float, float] | None, wanted: float
) -> float:
    if low is None or high is None:
        token_s, rollout_s = low or high or (1e-4, wanted)
        return token_s * min(max(wanted / max(rollout_s, 1e-9), 0.01), 100.0)
    part = (wanted - low[1]) / (high[1] - low[1])
    return low[0] + (high[0] - low[0]) * min(max(part, 0.1), 0.9)


def _step_of(path: Path) -> int:
    return int(path.stem.removeprefix("step_"))
