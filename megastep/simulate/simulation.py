"""The training loop of a config, in simulated time.

result = simulate(config, make_plan(config), Roofline(...), episodes, steps=8)
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from megastep.checkpoint.loop_state import LoopState
from megastep.config import Config
from megastep.console import Clock
from megastep.errors import ConfigError
from megastep.plan.planning import Plan
from megastep.rollout.data import PromptStream
from megastep.samples.packing import best_cuts, deal, mini_batches
from megastep.simulate.clock import SimulatedStream
from megastep.simulate.cluster import SimulatedCluster, SimulatedPool, SimulatedTrajectory
from megastep.simulate.episodes import Episodes
from megastep.simulate.roofline import MicroBatchSize, Times
from megastep.trainer.loop import Loop
from megastep.types import Group

PROMPTS = 1 << 16  # of the data set: rows differ only in their number
COUNTED_STEPS = 8  # by default, after the pipeline has filled


@dataclass
class Row:
    """A training step; cumulative figures are those at its end."""

    metrics: dict[str, float]
    ended_s: float
    tokens: int  # of its trajectories, each token once
    sampled: int
    busy: dict[str, float]  # seconds of all engines by what they did, cumulative
    training_s: float  # of the ranks, cumulative
    prefilled: int
    cached: int
    store_bytes: int  # routing of this batch and of groups that wait


@dataclass
class Result:
    config: Config
    plan: Plan
    rows: list[Row]
    first: int  # the rows from here on count
    last: int  # to here, exclusive
    episodes: str
    start_s: float = 0.0

    @property
    def gpus(self) -> int:
        policy = self.config.policy.ranks
        engine = self.config.engine
        if self.config.cluster.colocate:
            return policy
        return policy + engine.num_engines * engine.tensor_parallel

    @property
    def counted(self) -> list[Row]:
        return self.rows[self.first : self.last]

    @property
    def seconds(self) -> float:
        return self.counted[-1].ended_s - self._begun.ended_s

    @property
    def _begun(self) -> Row:
        """The state before the first counted step."""
        if self.first:
            return self.rows[self.first - 1]
        return Row({}, self.start_s, 0, 0, {}, 0.0, 0, 0, 0)

    @property
    def step_s(self) -> float:
        return self.seconds / len(self.counted)

    @property
    def tokens_per_gpu_s(self) -> float:
        return sum(row.tokens for row in self.counted) / self.seconds / self.gpus

    @property
    def sampled_per_gpu_s(self) -> float:
        return sum(row.sampled for row in self.counted) / self.seconds / self.gpus

    @property
    def trajectories_per_s(self) -> float:
        return sum(row.metrics["rollout/trajectories"] for row in self.counted) / self.seconds

    def mean(self, name: str) -> float:
        return sum(row.metrics.get(name, 0.0) for row in self.counted) / len(self.counted)

    def engine_fractions(self) -> dict[str, float]:
        """Of the engines' time, by what they did; the rest is idle."""
        total = self.seconds * self.config.engine.num_engines
        before = self._begun.busy
        busy = self.counted[-1].busy
        return {name: (s - before.get(name, 0.0)) / total for name, s in busy.items()}

    @property
    def engines_idle(self) -> float:
        return max(1 - sum(self.engine_fractions().values()), 0.0)

    @property
    def ranks_idle(self) -> float:
        """Neither training nor in a weight sync."""
        trained = self.counted[-1].training_s - self._begun.training_s
        return max(1 - trained / self.seconds - self.mean("time/sync_s") / self.step_s, 0.0)

    @property
    def gpus_idle(self) -> float:
        ranks = self.config.policy.ranks
        if self.config.cluster.colocate:  # either half works on the same GPUs
            return max(self.ranks_idle + self.engines_idle - 1, 0.0)
        engines = self.gpus - ranks
        return (ranks * self.ranks_idle + engines * self.engines_idle) / self.gpus

    @property
    def cache_hits(self) -> float:
        """Fraction of prompt tokens."""
        cached = self.counted[-1].cached - self._begun.cached
        prefilled = self.counted[-1].prefilled - self._begun.prefilled
        return cached / max(cached + prefilled, 1)

    @property
    def store_bytes(self) -> int:
        return max(row.store_bytes for row in self.counted)

    def binds(self) -> str:
        """What a faster run needs first: in asynchronous training the half that idles less, in
        synchronous training the longest part of a step."""
        rollout_s = self.mean("time/rollout_s")
        if self.config.asynchronous.max_staleness > 0:
            rollout_s = math.inf if self.engines_idle <= self.ranks_idle else 0.0
        parts = {
            f"rollout: {self._rollout_binds()}": rollout_s,
            "update": self.mean("time/update_s"),
            "weight sync": self.mean("time/sync_s"),
        }
        return max(parts, key=parts.__getitem__)

    def _rollout_binds(self) -> str:
        fractions = self.engine_fractions()
        if self.config.asynchronous.max_staleness > 0:
            idle = self.engines_idle
        else:  # only while rollouts run
            idle = max(self.mean("time/rollout_s") / self.step_s - sum(fractions.values()), 0.0)
        fractions["environments and the longest episodes"] = idle
        names = {
            "weights": "decoding reads weights",
            "KV cache": "decoding reads the KV cache",
            "compute": "decoding computes",
            "links": "all-reduces in decoding",
            "fixed": "fixed costs of an iteration",
        }
        largest = max(fractions, key=fractions.__getitem__)
        return names.get(largest, largest)


def simulate(
    config: Config,
    plan: Plan,
    times: Times,
    episodes: Episodes,
    steps: int | None = None,
    on_step: Callable[[int, int], None] = lambda done, total: None,
) -> Result:
    """steps: training steps that count, after those in which the pipeline fills."""
    ahead = config.asynchronous.max_staleness
    edge = 1 + math.ceil(ahead) if ahead else 0
    counted = steps or COUNTED_STEPS
    total = counted + 2 * edge
    config = replace(config, train=replace(config.train, steps=total))
    loop = SimulatedLoop(config, plan, times, episodes, on_step)
    loop.run([])
    rows = loop.log.rows
    return Result(
        config, plan, rows, edge, edge + counted, episodes.describe(), start_s=loop.started_s
    )


class SimulatedLoop(Loop):
    """The real loop, without evaluation, checkpoints and files."""

    stream_type = SimulatedStream
    stream: SimulatedStream
    log: Any

    def __init__(
        self,
        config: Config,
        plan: Plan,
        times: Times,
        episodes: Episodes,
        on_step: Callable[[int, int], None],
    ):
        cluster = SimulatedCluster(config, plan, times)
        pool = SimulatedPool(
            config.rollout.samples_per_prompt, config.rollout.concurrency, [], episodes
        )
        task = SimpleNamespace(
            pool=lambda generate: pool,
            eval_pool=lambda generate: pool,
            eval_prompts=list,
            stream=lambda: PromptStream([{}] * PROMPTS, config.train.seed, shuffle=False),
        )
        rundir: Any = SimpleNamespace(state=LoopState(step=0))
        log: Any = RowLog(self)
        super().__init__(config, task, cluster, rundir, log)  # type: ignore[arg-type]
        self.plan = plan
        self.times = times
        self.pool = pool
        self.simulated = cluster
        self.log = log
        self.line: Any = Progress(config.train.steps, on_step)
        self.learner: Any = SimulatedLearner(config, plan, times, cluster)
        self.started_s = 0.0

    def begin(self, demonstrations: list[Group]) -> None:
        self.simulated.stream = self.stream
        self.pool.routers += self._in_loop(self.simulated.routers)
        self.sync()
        self.clock = Clock(self.stream.now)
        self.started_s = self.stream.now()

    def _in_loop(self, make: Callable) -> Any:
        async def call() -> Any:
            return make()

        return self.stream.submit(call()).result()

    def advance(self) -> None:
        self.stream.wait(self.times.step())
        super().advance()

    def keep_rollouts(self, groups: list[Group]) -> None:
        self.batch = groups

    def evaluate(self) -> dict[str, float]:
        return {}

    def is_checkpoint_due(self) -> bool:
        return False

    def finish(self) -> None:
        pass

    def routing_bytes(self, tokens: int) -> int:
        """In the object store, by arithmetic: layers × top k × bytes of an index, per token."""
        experts = self.plan.arch.experts
        if experts is None or not self.config.routing_replay.enabled:
            return 0
        return tokens * sum(experts.layers) * experts.top_k * (1 if experts.count <= 256 else 2)


class RowLog:
    """In place of metrics.jsonl."""

    def __init__(self, loop: SimulatedLoop):
        self.loop = loop
        self.rows: list[Row] = []

    def write(self, step: int, metrics: dict[str, float]) -> None:
        loop = self.loop
        engines = loop.simulated.fleet.engines
        waiting = loop._in_loop(loop.stream.complete_groups)
        tokens = [distinct_tokens(group) for group in loop.batch]
        held = sum(tokens) + sum(map(distinct_tokens, waiting))
        self.rows.append(
            Row(
                metrics=metrics,
                ended_s=loop.stream.now(),
                tokens=sum(tokens),
                sampled=sum(map(sampled_tokens, loop.batch)),
                busy=_sum([engine.seconds for engine in engines]),
                training_s=loop.learner.busy_s,
                prefilled=sum(engine.prefilled_tokens for engine in engines),
                cached=sum(engine.cached_tokens for engine in engines),
                store_bytes=loop.routing_bytes(held),
            )
        )


def _sum(tables: list[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for table in tables for name in table)
    return {name: sum(table.get(name, 0.0) for table in tables) for name in names}


@dataclass
class Progress:
    total: int
    on_step: Callable[[int, int], None]
    done: int = 0

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_) -> None:
        pass

    def show(self, metrics: dict[str, float]) -> None:
        self.done += 1
        self.on_step(self.done, self.total)

    def print(self, text: str) -> None:
        pass


# ---------------------------------------------------------------- the training half


@dataclass
class SimulatedLearner:
    """Mini-batches and micro-batches as in trainer/learner.py, from lengths; then it waits."""

    config: Config
    plan: Plan
    times: Times
    cluster: SimulatedCluster
    busy_s: float = 0.0

    def learn(self, groups: list[Group]) -> dict[str, float]:
        parts = mini_batches(groups, self.config.mini_batch_prompts)
        if not parts:
            return {}
        loss = self.config.loss
        forward_passes = int(len(parts) > 1 and loss.old_logprobs == "policy")
        forward_passes += int(loss.kl_coef > 0) + int(loss.type == "distill")
        packed = [self.pack(part) for part in parts]
        seconds = sum(self.times.update(rounds, forward_passes) for rounds in packed)
        self.cluster.ranks.version += len(parts)
        self.busy_s += seconds
        self.cluster.stream.wait(seconds)
        sizes = [size for rounds in packed for of_round in rounds for size in of_round]
        return {
            "time/update_s": seconds,
            "train/optimizer_steps": len(parts),
            "train/tokens_computed": sum(size.tokens for size in sizes),
        }

    def pack(self, groups: list[Group]) -> list[list[MicroBatchSize]]:
        """Rounds of micro-batches: one of every data-parallel rank."""
        config = self.config
        parallel = config.policy.parallel
        budget = config.budget_tokens - config.budget_tokens % config.policy.align_tokens
        sizes: list[MicroBatchSize] = []
        for group in groups:
            for path, shared in leaves(group, config.train.pack_layout):
                sizes += part_sizes(path, shared, budget)
        attention_tokens = 6 * self.plan.arch.hidden
        costs = [size.tokens + size.pairs / attention_tokens for size in sizes]
        rounds_of = parallel.pipeline if parallel.virtual > 1 else 1
        dealt = deal([size.tokens for size in sizes], costs, budget, config.data_ranks, rounds_of)
        return [
            [
                MicroBatchSize(
                    sum(sizes[i].tokens for i in members), sum(sizes[i].pairs for i in members)
                )
                for members in of_round
            ]
            for of_round in zip(*dealt, strict=True)
        ]


def leaves(group: Group, pack_layout: str) -> list[tuple[list[int], list[int]]]:
    """Path and shared tokens of the steps of each trie: see packing.best_cuts."""
    tries: list[tuple[list[int], list[int]]] = []
    for trajectory in group.trajectories:
        assert isinstance(trajectory, SimulatedTrajectory)
        for number, turn in enumerate(trajectory.turns):
            is_first = number == 0
            starts_trie = pack_layout == "flat" or (is_first and pack_layout == "merge")
            if starts_trie or not tries:
                tries.append(([], []))
            path, shared = tries[-1]
            common = turn.new_tokens if is_first else turn.shared_tokens
            shared.append(min(common, path[-1]) if path else 0)
            path.append(turn.prompt_tokens + turn.response_tokens - 1)
    return tries


def part_sizes(path: list[int], shared: list[int], budget: int) -> list[MicroBatchSize]:
    """Of the parts into which packing cuts a trie."""
    if max(path) > budget:
        raise ConfigError(
            f"a model call of {max(path)} tokens does not fit a micro-batch of {budget}; raise "
            "train.micro_batch_tokens, or lower the lengths of the episodes"
        )
    cuts = best_cuts(path, shared, budget)
    sizes = []
    for first, stop in zip(cuts, [*cuts[1:], len(path)]):
        segments = [(0, path[first])]
        segments += [(shared[i], path[i]) for i in range(first + 1, stop)]
        tokens = sum(end - begin for begin, end in segments)
        pairs = sum((end**2 - begin**2) / 2 for begin, end in segments)
        sizes.append(MicroBatchSize(tokens, pairs))
    return sizes


def distinct_tokens(group: Group) -> int:
    """Tokens of the trajectories of a group, each trajectory's once."""
    return sum(
        turn.new_tokens + turn.response_tokens
        for trajectory in group.trajectories
        for turn in trajectory.turns  # type: ignore[attr-defined]
    )


def sampled_tokens(group: Group) -> int:
    return sum(
        turn.response_tokens
        for trajectory in group.trajectories
        for turn in trajectory.turns  # type: ignore[attr-defined]
    )
