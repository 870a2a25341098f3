"""Recorded routing on its way from episodes to ranks: who touches how many bytes.

    episodes     two agent workers; an episode returns at once, with tokens and routing of 48 layers
                 × top-8 that follow from token and position, so that the samples of a prompt agree
    a step       6 prompts × 8 samples × 16k tokens in 4 turns, in two mini-batches; micro-batches
                 of 32k tokens, so that every group is divided among the ranks
    ranks        2 data-parallel × 1, 2 and 4 pipeline stages; they fetch and gather, and compute
                 nothing

Everything between them is the project's own: keeper, folding, packing, `Policy.learn`, the ranks'
fetch. Every layer of every recorded row begins with the same four experts, so routing is recognized
in any bytes; the driver's are those of each object that it serializes or deserializes.

    driver bytes     bytes of routing among these, and in results that Ray has copied to the driver
    rank / needed    bytes that a rank fetches / bytes of its layers of the distinct rows that its
                     micro-batches replay; the highest of all ranks
    driver s / GB    CPU seconds of the driver's process, all its threads, with routing minus those
                     of the same step without, per GB of distinct rows; the least of `--rounds`

    python tools/bench_routing.py [--stages 1 2 4] [--rounds 3]

The last line is JSON, with the highest of all cases: {"driver_bytes", "rank_bytes_over_needed",
"driver_s_per_gb"}.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy

import argparse
import asyncio
import json
import re
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import ray
from ray._private.serialization import SerializationContext

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megastep.config import Config, ParallelConfig
from megastep.policy.actor import Policy, PolicyRank, RankPlace
from megastep.rollout.data import Prompt
from megastep.rollout.keeper import spawn_keeper
from megastep.rollout.pool import LocalPool, Pool
from megastep.rollout.worker import AgentWorker
from megastep.rollout.workers import Workers
from megastep.samples import lay_out, make_samples
from megastep.samples.packing import mini_batches
from megastep.samples.prefix import share_prefixes
from megastep.samples.routing import routing_of_batches, routing_of_groups, tables_of
from megastep.samples.validation import model_limits, validate
from megastep.types import Group, MicroBatch, Step, StoredRouting, Trajectory, Update

PROMPTS = 6
SAMPLES = 8
TURNS = 4
PROMPT_TOKENS = 4096
RESPONSE_TOKENS = 2048
OBSERVATION_TOKENS = 1024
LAYERS, TOP_K, EXPERTS = 48, 8, 128
DATA_RANKS = 2
BUDGET_TOKENS = 32_768
MARK = np.array([97, 3, 55, 120], np.uint8)  # the first experts of every layer
# Between the buffers of an object Ray leaves up to 63 bytes of memory that other objects have used.
RUN = re.compile(b"(?:%b.{%d}){8,}" % (re.escape(MARK.tobytes()), TOP_K - len(MARK)), re.DOTALL)
DISTINCT = 4096  # rows of routing


def routing_rows() -> np.ndarray:
    """[DISTINCT, L, K] u8: MARK, then others."""
    random = np.random.default_rng(0)
    others = np.setdiff1d(np.arange(EXPERTS), MARK)
    keys = random.random((DISTINCT, LAYERS, len(others)))
    chosen = others[np.argpartition(keys, TOP_K - len(MARK), axis=-1)[..., : TOP_K - len(MARK)]]
    marks = np.broadcast_to(MARK, (DISTINCT, LAYERS, len(MARK)))
    return np.concatenate([marks, chosen], axis=-1).astype(np.uint8)


# ---------------------------------------------------------------- episodes


class Episodes:
    """Episodes of given tokens; a turn extends the previous one."""

    keeps_routing = True

    def __init__(self, with_routing: bool):
        self.rows = routing_rows() if with_routing else None

    async def run_episode(self, prompt: Prompt, index: int) -> Trajectory:
        ids = np.random.default_rng(prompt.id).integers(0, 50_000, PROMPT_TOKENS, np.int32)
        random = np.random.default_rng([prompt.id, index])
        steps: list[Step] = []
        recorded = 0
        for turn in range(TURNS):
            response = random.integers(0, 50_000, RESPONSE_TOKENS, np.int32)
            step = Step(
                index=turn,
                last=turn == TURNS - 1,
                prompt_ids=ids,
                response_ids=response,
                loss_mask=np.ones(RESPONSE_TOKENS, bool),
                logprobs=np.full(RESPONSE_TOKENS, -1, np.float32),
                versions=np.array([[0, RESPONSE_TOKENS]], np.int32),
                reward=float(index),
            )
            ids = np.concatenate([ids, response])
            if self.rows is not None:
                position = np.arange(recorded, len(ids) - 1)
                step.routing = self.rows[(ids[position] * 31 + position) % DISTINCT]
                step.routing_start = recorded
                recorded = len(ids) - 1
            steps.append(step)
            ids = np.append(ids, random.integers(0, 50_000, OBSERVATION_TOKENS, np.int32))
        share_prefixes(steps)
        return Trajectory(prompt.id, index, steps)


class BenchWorker(AgentWorker):
    def __init__(self, with_routing: bool):
        self.pools = {"train": Episodes(with_routing)}
        self.episodes = {}
        self.keeper = None


def agent_workers(config: Config, with_routing: bool) -> tuple[Pool, Workers]:
    actor = ray.remote(BenchWorker).options(num_cpus=0, max_concurrency=1000)
    fleet = SimpleNamespace(listen=lambda _: None, submit=lambda coroutine: coroutine.close())
    workers = Workers(
        lambda index: actor.remote(with_routing),
        2,
        fleet,
        partial(spawn_keeper, config) if with_routing else None,
    )
    workers.start()
    local = LocalPool(None, None, SAMPLES, SAMPLES, label="train")
    return workers.pool(local), workers


# ---------------------------------------------------------------- ranks


class Gather:
    """In place of a PolicyWorker: gathers the routing of its layers."""

    def __init__(self, layers: tuple[int, ...]):
        self.replayed_layers = set(layers)
        self.layers = slice(layers[0], layers[-1] + 1)
        self.needed = self.fetched = 0

    def learn(self, mini_batches: list, each) -> list[Update]:
        for micro_batches in each(mini_batches):
            self.needed += self._needed_bytes(micro_batches)
            for micro_batch in micro_batches:
                micro_batch.trie.routing(self.layers)
        self.fetched += each.__self__.fetched_bytes
        return [Update({}) for _ in mini_batches]

    def _needed_bytes(self, micro_batches: list[MicroBatch]) -> int:
        stored = [r for r in routing_of_batches(micro_batches) if isinstance(r, StoredRouting)]
        rows = 0
        for table in tables_of(stored):
            used = [r.rows for r in stored if r.table is table]
            rows += len(np.unique(np.concatenate(used)))
        return rows * len(self.replayed_layers) * TOP_K

    def ratio(self) -> float:
        ratio = self.fetched / self.needed if self.needed else 1.0
        self.needed = self.fetched = 0
        return ratio


class BenchRank(PolicyRank):
    def __init__(self, config: Config):
        self.config = config
        self._listener = None

    def start(self, rank: int, address: str, backend: str) -> RankPlace:
        stages = self.config.policy.parallel.stages(LAYERS)
        place = RankPlace(rank % DATA_RANKS, rank // DATA_RANKS)
        self.worker = Gather(stages[place.stage])
        self.place = place
        return place


# ---------------------------------------------------------------- the driver's bytes


class DriverBytes:
    """Counts routing in what this process serializes and deserializes."""

    def __init__(self):
        self.total = self.routing = 0
        self._deserialize = SerializationContext.deserialize_objects
        self._serialize = SerializationContext.serialize

    def __enter__(self) -> "DriverBytes":
        def deserialize(context, objects, references, *more):
            for found in objects:
                if found.data is not None:
                    self._count(bytes(found.data))
            return self._deserialize(context, objects, references, *more)

        def serialize(context, value, *more):
            made = self._serialize(context, value, *more)
            self._count(value if isinstance(value, bytes) else made.to_bytes())
            return made

        SerializationContext.deserialize_objects = deserialize
        SerializationContext.serialize = serialize
        return self

    def __exit__(self, *_) -> None:
        SerializationContext.deserialize_objects = self._deserialize
        SerializationContext.serialize = self._serialize

    def _count(self, content: bytes) -> None:
        self.total += len(content)
        self.routing += sum(len(run) for run in RUN.findall(content))


def copied_results() -> int:
    """Bytes of results that Ray keeps in this process."""
    return ray._private.worker.global_worker.core_worker.get_local_memory_store_bytes_used()


# ---------------------------------------------------------------- a step


@dataclass
class Measured:
    cpu_s: float
    stored_bytes: int
    copied_bytes: int = 0


def step(config: Config, pool: Pool, policy: Policy) -> Measured:
    """As the loop and the learner do it."""
    experts = model_limits(config)[1]
    held = copied_results()
    begin_s = time.process_time()
    prompts = [Prompt(i, {}) for i in range(PROMPTS)]
    groups: list[Group] = asyncio.run(pool.run(prompts))
    stored = sum(table.nbytes for table in tables_of(routing_of_groups(groups)))
    validate(groups, 1 << 17, experts if stored else None)
    copied = copied_results() - held
    packed = []
    for part in mini_batches(groups, PROMPTS // 2):
        samples = make_samples(part, "grpo", "token")
        packed.append(lay_out(samples, DATA_RANKS, BUDGET_TOKENS)[0])
    policy.learn([[batches[rank] for batches in packed] for rank in range(DATA_RANKS)])
    del groups, packed, samples, part
    return Measured(time.process_time() - begin_s, stored, copied)


@dataclass
class Result:
    driver_bytes: int
    ratio: float
    s_per_gb: float
    stored_gb: float


def measure(stages: int, rounds: int) -> Result:
    config = Config()
    config.model.path = "configs/models/qwen3-30b-a3b"
    config.policy.ranks = DATA_RANKS * stages
    config.policy.parallel = ParallelConfig(pipeline=stages)
    config.train.micro_batch_tokens = BUDGET_TOKENS
    actor = ray.remote(BenchRank).options(num_cpus=0)
    ranks = [actor.remote(config) for _ in range(config.policy.ranks)]
    policy = Policy(ranks)
    policy.start("none")
    pools = {kind: agent_workers(config, kind) for kind in (True, False)}
    with DriverBytes() as counted:  # also the first step of each, which starts everything
        warm = step(config, pools[True][0], policy)
        ratio = max(ray.get([rank.call.remote("ratio") for rank in ranks]))
    step(config, pools[False][0], policy)
    added_s = []
    for _ in range(rounds):
        with_routing = step(config, pools[True][0], policy)
        without = step(config, pools[False][0], policy)
        added_s.append(with_routing.cpu_s - without.cpu_s)
    for _, workers in pools.values():
        workers.close()
    for rank in ranks:
        ray.kill(rank)
    gb = warm.stored_bytes / 1e9
    driver_bytes = counted.routing + warm.copied_bytes
    return Result(driver_bytes, ratio, max(min(added_s), 0.0) / gb, gb)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stages", nargs="+", type=int, default=(1, 2, 4))
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    ray.init(
        num_cpus=2,
        object_store_memory=3 << 30,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
    )
    titles = ("stored GB", "driver bytes", "rank / needed", "driver s / GB")
    print(f"{'ranks':12}" + "".join(f"{title:>15}" for title in titles))
    results = []
    for stages in arguments.stages:
        result = measure(stages, arguments.rounds)
        results.append(result)
        print(
            f"{f'DP{DATA_RANKS} PP{stages}':12}{result.stored_gb:15.2f}{result.driver_bytes:15}"
            f"{result.ratio:15.3f}{result.s_per_gb:15.3f}",
            flush=True,
        )
    ray.shutdown()
    summary = {
        "driver_bytes": max(result.driver_bytes for result in results),
        "rank_bytes_over_needed": round(max(result.ratio for result in results), 3),
        "driver_s_per_gb": round(max(result.s_per_gb for result in results), 3),
    }
    print(json.dumps(summary))
    return 0


if __name__ == "__main__":
    sys.exit(main())
