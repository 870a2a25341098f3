"""CPU time of agents: model calls per CPU second, with an engine that answers at once.

    engine       250 sampled tokens, with routing of 48 layers × top-8, a view of one array
    environment  an observation of 250 tokens per turn; all texts are generated beforehand
    tokenizer    byte-level BPE with a vocabulary of 32k, trained on synthetic text; ChatML
    cases        first prompts of 1k, 8k and 32k tokens × 1, 8 and 50 turns × rollout.mode tokens
                 and chat; 8 samples per prompt

What is left is the cost of the project itself: rendering, tokenization, bookkeeping of routing and
event loop. Seconds are CPU seconds of the process, all its threads, the best of `--rounds`.

    alone        LocalPool and Agent in this process
    forgetful    the same, with an encoder that keeps nothing; for chat_32k_50 only
    1 worker     an agent worker and the keeper of its routing, both Ray actors; this process, the
    2 workers    driver, makes one call per episode and one per group

    python tools/bench_agents.py [--modes chat] [--prompts 8] [--turns 8 50] [--rounds 1]

The last line is JSON: {"driver_ms_per_episode_8", "worker_calls_per_cpu_s": {CASE: ...},
"speedup_chat_32k_50", "setups": {SETUP: {CASE: {"calls_per_cpu_s", "cpu_ms_per_call"}}}}, with
cases such as chat_32k_50. The first is the driver's CPU time per episode of 8 turns, the largest of
all cases with workers; calls per CPU second are those of one worker with its keeper; the speedup is
alone over forgetful.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("RAYON_NUM_THREADS", "1")

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, product, starmap
from pathlib import Path
from typing import Any

import numpy as np
import ray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megastep.config import Config
from megastep.rollout.agent import Agent, Limits
from megastep.rollout.data import Prompt
from megastep.rollout.encoding import Encoder
from megastep.rollout.env import Env, Outcome
from megastep.rollout.generation import Generation, Sampling
from megastep.rollout.keeper import RoutingKeeper
from megastep.rollout.pool import LocalPool, Pool
from megastep.rollout.renderer import Renderer
from megastep.rollout.worker import AgentWorker
from megastep.rollout.workers import Workers
from megastep.types import FinishReason, Group, StopReason

MODES = ("tokens", "chat")
PROMPT_KTOKENS = (1, 8, 32)
TURNS = (1, 8, 50)
RESPONSE_TOKENS = 250
OBSERVATION_TOKENS = 250
LAYERS = 48
TOP_K = 8
EXPERTS = 128
SAMPLES_PER_PROMPT = 8
CONCURRENCY = 64
LABEL = "train"  # the pool's
MIN_CALLS = 400  # per round
VOCAB = 32_768
TRAINING_WORDS = 500_000
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Case:
    mode: str  # rollout.mode
    prompt_ktokens: int
    turns: int

    @property
    def name(self) -> str:
        return f"{self.mode}_{self.prompt_ktokens}k_{self.turns}"

    @property
    def prompts(self) -> int:
        """As many as give MIN_CALLS."""
        return -(-MIN_CALLS // (SAMPLES_PER_PROMPT * self.turns))

    @property
    def calls(self) -> int:
        return self.prompts * SAMPLES_PER_PROMPT * self.turns


@dataclass(frozen=True)
class Measured:
    calls: int
    cpu_s: float  # of the processes that run the agents
    driver_ms: float = 0.0  # per episode, of this process if others run the agents

    @property
    def calls_per_cpu_s(self) -> float:
        return self.calls / self.cpu_s

    @property
    def cpu_ms_per_call(self) -> float:
        return 1000 * self.cpu_s / self.calls


# ---------------------------------------------------------------- texts and tokenizer


class Corpus:
    """Random words, spelled from syllables, with frequencies as in natural text."""

    def __init__(self, seed: int):
        self.random = np.random.default_rng(seed)
        syllables = np.array([c + v for c in "bcdfghjklmnprstvwz" for v in "aeiou"])
        chosen = self.random.choice(syllables, (60_000, 4))
        lengths = self.random.integers(1, 5, len(chosen))
        self.words = ["".join(row[:length]) for row, length in zip(chosen, lengths)]
        frequency = 1 / np.arange(10, len(self.words) + 10)
        self.probability = frequency / frequency.sum()

    def text(self, words: int) -> str:
        drawn = self.random.choice(len(self.words), words, p=self.probability)
        return " ".join(self.words[i] for i in drawn)


def train_tokenizer(corpus: Corpus) -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        show_progress=False,
    )
    texts = (corpus.text(1000) for _ in range(TRAINING_WORDS // 1000))
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", chat_template=CHATML
    )


@dataclass
class Texts:
    """What a case needs, made before the time is taken. Nothing but a prompt is repeated."""

    prompts: list[str]
    observations: list[str]
    responses: list[np.ndarray]  # [RESPONSE_TOKENS] i32

    @classmethod
    def make(cls, case: Case, corpus: Corpus, tokenizer: PreTrainedTokenizerFast) -> "Texts":
        def pieces(number: int, tokens: int) -> list[list[int]]:
            ids: list[int] = []
            while len(ids) < number * tokens:
                ids += tokenizer.encode(corpus.text(20_000))
            return [ids[i * tokens : (i + 1) * tokens] for i in range(number)]

        ends = [tokenizer.eos_token_id]
        responses = pieces(case.calls, RESPONSE_TOKENS - 1)
        return cls(
            prompts=tokenizer.batch_decode(pieces(case.prompts, case.prompt_ktokens * 1000)),
            observations=tokenizer.batch_decode(pieces(case.calls, OBSERVATION_TOKENS)),
            responses=[np.array(ids + ends, np.int32) for ids in responses],
        )


# ---------------------------------------------------------------- engine and environment


class Engine:
    """A `generate` that answers at once."""

    def __init__(self, responses: list[np.ndarray], tokens: int):
        """tokens: the most of a sequence."""
        self.responses = responses
        self.calls = count()
        self.logprobs = np.full(RESPONSE_TOKENS, -1, np.float32)
        self.versions = np.array([[0, RESPONSE_TOKENS]], np.int32)
        experts = np.random.default_rng(0).permutation(EXPERTS)[: LAYERS * TOP_K]
        rows = np.resize(experts.astype(np.uint8), (LAYERS, TOP_K))
        self.routing = np.tile(rows, (tokens, 1, 1))  # [tokens, L, K]

    async def __call__(
        self, prompt_ids, sampling, *, session, routing_start=0, routing_version=None
    ) -> Generation:
        return Generation(
            ids=self.responses[next(self.calls)],
            logprobs=self.logprobs,
            versions=self.versions,
            finish=FinishReason.STOP,
            routing=self.routing[routing_start : len(prompt_ids) + RESPONSE_TOKENS - 1],
            routing_start=routing_start,
        )


class Talk(Env):
    """Returns the next observation and never ends."""

    def __init__(self, row: dict, *, texts: Texts, turns: count):
        self.prompt = texts.prompts[row["prompt"]]
        self.observations = texts.observations
        self.turns = turns

    async def start(self):
        return [{"role": "user", "content": self.prompt}]

    async def step(self, text, ids):
        return Outcome([{"role": "user", "content": self.observations[next(self.turns)]}])


# ---------------------------------------------------------------- measuring


def make_pool(case: Case, texts: Texts, renderer: Renderer) -> LocalPool:
    # Tokens of the template and of words that are cut are some more.
    most_tokens = 1200 * case.prompt_ktokens + 700 * case.turns
    engine = Engine(texts.responses, most_tokens)
    limits = Limits(case.turns, most_tokens, RESPONSE_TOKENS + 1, env_timeout_s=600.0)
    agent = Agent(engine, renderer, limits, Sampling(RESPONSE_TOKENS))
    options = {"texts": texts, "turns": count()}
    return LocalPool(agent, Talk, SAMPLES_PER_PROMPT, CONCURRENCY, options, LABEL)


def run_all(case: Case, pool: Pool) -> float:
    """All episodes of a case; returns the CPU seconds of this process."""
    prompts = [Prompt(i, {"prompt": i}) for i in range(case.prompts)]
    groups: list[Group] = []

    async def run() -> None:  # asyncio.run formats what it returns
        groups.extend(await pool.run(prompts))

    begin_s = time.process_time()
    asyncio.run(run())
    cpu_s = time.process_time() - begin_s
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    for trajectory in trajectories:
        assert trajectory.stop_reason == StopReason.MAX_TURNS, trajectory.env_metrics
        assert all(step.routing is not None for step in trajectory.steps)
    assert sum(len(trajectory.steps) for trajectory in trajectories) == case.calls
    return cpu_s


def alone(case: Case, corpus: Corpus, tokenizer: PreTrainedTokenizerFast) -> Measured:
    renderer = Renderer(tokenizer, case.mode)  # a new one: it has encoded nothing
    pool = make_pool(case, Texts.make(case, corpus, tokenizer), renderer)
    return Measured(case.calls, run_all(case, pool))


def forgetful(case: Case, corpus: Corpus, tokenizer: PreTrainedTokenizerFast) -> Measured:
    renderer = Renderer(tokenizer, case.mode)
    renderer.encoder = Encoder(renderer.tokenizer, cache_bytes=0)
    pool = make_pool(case, Texts.make(case, corpus, tokenizer), renderer)
    return Measured(case.calls, run_all(case, pool))


# ---------------------------------------------------------------- agent workers


class BenchWorker(AgentWorker):
    """An agent worker whose pool has the engine that answers at once."""

    async def prepare(self, case: Case, seed: int, tokenizer: PreTrainedTokenizerFast) -> None:
        texts = Texts.make(case, Corpus(seed), tokenizer)
        self.pools[LABEL] = make_pool(case, texts, Renderer(tokenizer, case.mode))

    async def cpu_s(self) -> float:
        return time.process_time()


class BenchKeeper(RoutingKeeper):
    def cpu_s(self) -> float:
        return time.process_time()


class NoFleet:
    """The engines are in the workers."""

    def listen(self, listener: Callable) -> None:
        pass

    def submit(self, coroutine: Coroutine) -> None:
        coroutine.close()


def write_model(folder: Path, tokenizer: PreTrainedTokenizerFast) -> Config:
    """A model folder with the tokenizer and the shape of the routing; no weights are needed."""
    shape = json.loads((ROOT / "configs/models/tiny-qwen3-moe/config.json").read_text())
    shape |= {
        "num_hidden_layers": LAYERS,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "vocab_size": VOCAB,
        "max_position_embeddings": 1 << 17,
    }
    (folder / "config.json").write_text(json.dumps(shape))
    tokenizer.save_pretrained(folder)
    config = Config()
    config.model.path = str(folder)
    config.env.name = "arithmetic"  # its pools are replaced
    return config


def in_workers(
    number: int, case: Case, corpus: Corpus, tokenizer: PreTrainedTokenizerFast
) -> Measured:
    with tempfile.TemporaryDirectory() as folder:
        config = write_model(Path(folder), tokenizer)
        actor = ray.remote(BenchWorker).options(num_cpus=0, max_concurrency=2 * CONCURRENCY)
        keepers = []

        def spawn_keeper(_node: str):
            keepers.append(ray.remote(BenchKeeper).options(num_cpus=0).remote(config))
            return keepers[-1]

        workers = Workers(
            lambda index: actor.remote(config, index, folder, sys.path, {}, None),
            number,
            NoFleet(),  # type: ignore[arg-type]
            spawn_keeper,
        )
        workers.start()
        actors = [slot.handle for slot in workers.slots]
        ray.get([a.prepare.remote(case, seed, tokenizer) for seed, a in enumerate(actors)])
        pool = workers.pool(make_pool(case, Texts([], [], []), Renderer(tokenizer, case.mode)))

        def cpu_s() -> float:
            return sum(ray.get([a.cpu_s.remote() for a in (*actors, *keepers)]))

        before_s = cpu_s()
        driver_s = run_all(case, pool)
        agents_s = cpu_s() - before_s
        workers.close()
    episodes = case.prompts * SAMPLES_PER_PROMPT
    return Measured(case.calls, agents_s, 1000 * driver_s / episodes)


Setup = Callable[[Case, Corpus, PreTrainedTokenizerFast], Measured]
SETUPS: dict[str, Setup] = {
    "alone": alone,
    "forgetful": forgetful,
    "1 worker": partial(in_workers, 1),
    "2 workers": partial(in_workers, 2),
}
COMPARED = Case("chat", 32, 50)


def best(setup: str, case: Case, rounds: int, corpus: Corpus, tokenizer) -> Measured:
    found = [SETUPS[setup](case, corpus, tokenizer) for _ in range(rounds)]
    fastest = min(found, key=lambda measured: measured.cpu_s)
    return replace(fastest, driver_ms=min(measured.driver_ms for measured in found))


Results = dict[str, dict[str, Measured]]  # by setup and case


def measure(cases: list[Case], rounds: int, corpus: Corpus, tokenizer) -> Results:
    print(
        f"\n{'case':16}{'setup':12}{'calls':>8}{'calls / CPU s':>16}{'CPU ms / call':>16}"
        f"{'driver, ms / episode':>24}"
    )
    results: Results = {setup: {} for setup in SETUPS}
    for case, setup in product(cases, SETUPS):
        if setup == "forgetful" and case != COMPARED:
            continue
        measured = best(setup, case, rounds, corpus, tokenizer)
        results[setup][case.name] = measured
        print(
            f"{case.name:16}{setup:12}{measured.calls:8}{measured.calls_per_cpu_s:16.1f}"
            f"{measured.cpu_ms_per_call:16.3f}{measured.driver_ms or float('nan'):24.3f}",
            flush=True,
        )
    return results


def summary(results: Results) -> dict[str, Any]:
    setups = {
        setup: {
            name: {
                "calls_per_cpu_s": round(measured.calls_per_cpu_s, 1),
                "cpu_ms_per_call": round(measured.cpu_ms_per_call, 3),
            }
            for name, measured in cases.items()
        }
        for setup, cases in results.items()
    }
    driver_ms = [
        measured.driver_ms
        for setup in ("1 worker", "2 workers")
        for name, measured in results[setup].items()
        if name.endswith("_8")
    ]
    by_worker = results["1 worker"].items()
    found: dict[str, Any] = {
        "driver_ms_per_episode_8": round(max(driver_ms), 3) if driver_ms else None,
        "worker_calls_per_cpu_s": {name: round(m.calls_per_cpu_s, 1) for name, m in by_worker},
    }
    name = COMPARED.name
    if name in results["forgetful"]:
        before = results["forgetful"][name].cpu_ms_per_call
        speedup = before / results["alone"][name].cpu_ms_per_call
        found[f"speedup_{name}"] = round(speedup, 1)
    return found | {"setups": setups}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--prompts", nargs="+", type=int, default=PROMPT_KTOKENS, metavar="KTOKENS")
    parser.add_argument("--turns", nargs="+", type=int, default=TURNS)
    parser.add_argument("--rounds", type=int, default=1)
    arguments = parser.parse_args()
    corpus = Corpus(seed=0)
    begin_s = time.perf_counter()
    tokenizer = train_tokenizer(corpus)
    seconds = time.perf_counter() - begin_s
    print(f"tokenizer: {len(tokenizer)} tokens, trained in {seconds:.1f} s", flush=True)
    cases = list(starmap(Case, product(arguments.modes, arguments.prompts, arguments.turns)))
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        results = measure(cases, arguments.rounds, corpus, tokenizer)
    finally:
        ray.shutdown()
    print(json.dumps(summary(results)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
