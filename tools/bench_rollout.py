"""Overhead of rollouts on top of vLLM, and use of its prefix cache.

    one turn     256 prompts of 64 tokens, 64 sampled tokens each: agents, pool, Ray and engine
                 against vLLM's `LLM.generate` with the same engine settings, prompts and lengths.
                 Both run in alternation; the best round of each counts.
    turns        64 trajectories of 8 turns on two engines; prompt 64, response 32, observation 96
                 tokens, appended. vLLM reports the cached prompt tokens of each call; possible are
                 those of earlier calls of the trajectory, in whole cache blocks.
    routing      2 to 16 such turns: tokens per trajectory whose routing an engine returns, and the
                 exponent of its growth with the turns. 1 is linear; returning the routing of every
                 prompt again would be close to 2.

A random Qwen3-MoE: 8 layers, 32 experts, top-4, hidden 128. Bars: 0.9 of vLLM's throughput, 0.9 of
the possible cache hits, exponent at most 1.1.

    python tools/bench_rollout.py [--rounds 3]

The last line is JSON: {"one_turn_ratio", "cache_share", "routes_exponent"}.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # engines share the cores

import argparse
import asyncio
import json
import multiprocessing
import shutil
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megastep.cluster import Cluster
from megastep.config import Config
from megastep.rollout import engine
from megastep.rollout.agent import Agent, Limits
from megastep.rollout.data import Prompt
from megastep.rollout.env import Env, Outcome
from megastep.rollout.generation import Generation, Sampling
from megastep.rollout.pool import LocalPool
from megastep.rollout.renderer import Renderer

TOKENIZER = Path("configs/models/bytes")
MODEL = dict(
    hidden_size=128,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    intermediate_size=256,
    moe_intermediate_size=64,
    num_experts=32,
    num_experts_per_tok=4,
    norm_topk_prob=True,
    vocab_size=272,
    max_position_embeddings=4096,
    initializer_range=0.1,
    tie_word_embeddings=False,
)
PROMPT_TOKENS = 64
ONE_TURN_TOKENS = 64  # response of the one-turn workload
RESPONSE_TOKENS = 32
OBSERVATION_TOKENS = 96
CALLS = 256
TRAJECTORIES = 64
TURNS = 8
ROUTING_TURNS = (2, 4, 8, 16)
MIN_RATIO = 0.9
MIN_CACHE_SHARE = 0.9
MAX_EXPONENT = 1.1


class Talk(Env):
    """Returns random observations and never ends."""

    def __init__(self, row: dict):
        self.random = np.random.default_rng(row["seed"])

    def words(self, tokens: int) -> str:
        # The tokenizer's tokens are bytes.
        return "".join(map(chr, self.random.integers(97, 123, tokens)))

    async def start(self):
        return [{"role": "user", "content": self.words(PROMPT_TOKENS)}]

    async def step(self, text, ids):
        return Outcome([{"role": "user", "content": self.words(OBSERVATION_TOKENS)}])


def prompts(count: int) -> list[Prompt]:
    return [Prompt(seed, {"seed": seed}) for seed in range(count)]


def pool(generate, turns: int, response_tokens: int) -> LocalPool:
    renderer = Renderer.for_model(TOKENIZER, "tokens")
    renderer.stop_ids = ()  # every response has its full length and gets its stop token appended
    max_prompt_tokens = MODEL["max_position_embeddings"]
    limits = Limits(turns, max_prompt_tokens, response_tokens + 1, env_timeout_s=60.0)
    agent = Agent(generate, renderer, limits, Sampling(response_tokens))
    return LocalPool(agent, Talk, samples_per_prompt=1, concurrency=CALLS)


def make_config(folder: Path, engines: int) -> Config:
    config = Config()
    config.model.path = str(folder)
    config.engine.num_engines = engines
    return config


def make_model(folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(0)
    shape = AutoConfig.for_model("qwen3_moe", **MODEL)
    AutoModelForCausalLM.from_config(shape, dtype=torch.float32).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TOKENIZER / name, folder)


# ---------------------------------------------------------------- vLLM alone


class Raw:
    """`LLM.generate` in another process, idle while megastep is measured."""

    def __init__(self, config: Config, token_ids: list[list[int]]):
        context = multiprocessing.get_context("spawn")
        self.pipe, there = context.Pipe()
        self.process = context.Process(target=serve_raw, args=(config, token_ids, there))
        self.process.start()
        there.close()
        self.block_tokens = self.pipe.recv()

    def seconds(self) -> float:
        self.pipe.send(True)
        return self.pipe.recv()

    def close(self) -> None:
        self.pipe.close()
        self.process.join(30)
        self.process.kill()


def serve_raw(config: Config, token_ids: list[list[int]], pipe) -> None:
    setup = engine.Setup(
        0, "shm", has_gpu=False, gpu_ids=None, own_weights=True, threads=1, folder=".", log=None
    )
    os.environ.update(engine._environment(config, setup))
    for output in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    from vllm import LLM

    llm = LLM(**engine._arguments(config, setup))
    params = [
        engine._sampling_params(Sampling(ONE_TURN_TOKENS, seed=seed), 0)
        for seed in range(len(token_ids))
    ]
    pipe.send(llm.llm_engine.vllm_config.cache_config.block_size)
    while True:
        try:
            pipe.recv()
        except EOFError:
            llm.llm_engine.engine_core.shutdown()
            return
        llm.reset_prefix_cache()
        begin = time.perf_counter()
        outputs = llm.generate(
            [{"prompt_token_ids": ids} for ids in token_ids], params, use_tqdm=False
        )
        seconds = time.perf_counter() - begin
        completions = [output.outputs[0] for output in outputs]
        assert all(len(c.token_ids) == ONE_TURN_TOKENS for c in completions)
        assert all(c.routed_experts is not None for c in completions)
        pipe.send(seconds)


# ---------------------------------------------------------------- measuring


class Counting:
    """`generate` that records its calls: (session, prompt tokens, generation)."""

    def __init__(self, generate):
        self.generate = generate
        self.calls = []

    async def __call__(self, prompt_ids, sampling, *, session, **routing) -> Generation:
        generation = await self.generate(prompt_ids, sampling, session=session, **routing)
        self.calls.append((session, len(prompt_ids), generation))
        return generation


def one_turn(folder: Path, rounds: int) -> tuple[float, int]:
    """megastep's tokens/s over vLLM's, and the tokens of a cache block."""
    config = make_config(folder, engines=1)
    renderer = Renderer.for_model(TOKENIZER, "tokens")
    token_ids = [
        renderer.prompt_ids(asyncio.run(Talk(prompt.row).start())).tolist()
        for prompt in prompts(CALLS)
    ]
    raw = Raw(config, token_ids)
    vllm_s = []
    megastep_s = []
    try:
        with Cluster(config, with_policy=False) as cluster:
            for _ in range(rounds + 1):
                vllm_s.append(raw.seconds())
                megastep_s.append(rollout_seconds(cluster))
    finally:
        raw.close()
    print(f"one turn, {CALLS} × {ONE_TURN_TOKENS} tokens, best of {rounds}")
    best_vllm_s = _print_rounds("vLLM's LLM.generate", vllm_s[1:])  # without the warm-up round
    best_megastep_s = _print_rounds("megastep's agents", megastep_s[1:])
    return best_vllm_s / best_megastep_s, raw.block_tokens


def _print_rounds(name: str, seconds: list[float]) -> float:
    """Returns the best."""
    tokens_per_s = CALLS * ONE_TURN_TOKENS / min(seconds)
    rounds = ", ".join(f"{value:.2f} s" for value in seconds)
    print(f"  {name:20}{tokens_per_s:7.0f} tokens/s   rounds {rounds}", flush=True)
    return min(seconds)


def rollout_seconds(cluster: Cluster) -> float:
    cluster.engines.pause()  # drops the cache
    cluster.engines.resume()
    begin = time.perf_counter()
    groups = asyncio.run(pool(cluster.engines.generate, 1, ONE_TURN_TOKENS).run(prompts(CALLS)))
    seconds = time.perf_counter() - begin
    assert all(g.trajectories[0].steps[0].loss_mask.sum() == ONE_TURN_TOKENS for g in groups)
    return seconds


def cache_share(cluster: Cluster, block_tokens: int) -> float:
    counting = Counting(cluster.engines.generate)
    asyncio.run(pool(counting, TURNS, RESPONSE_TOKENS).run(prompts(TRAJECTORIES)))
    computed: dict[str, int] = {}  # tokens whose keys the session's calls have put in the cache
    prompt_tokens = 0
    possible = 0
    cached = 0
    for session, length, generation in counting.calls:
        # The block of a prompt's last token is always computed.
        blocks = min(computed.get(session, 0), length - 1) // block_tokens
        possible += blocks * block_tokens
        computed[session] = length + len(generation.ids) - 1
        prompt_tokens += length
        cached += generation.cached_tokens
    engines = cluster.config.engine.num_engines
    print(
        f"\n{TURNS} turns, {TRAJECTORIES} trajectories, {engines} engines, "
        f"blocks of {block_tokens} tokens: {prompt_tokens} prompt tokens, "
        f"{possible} cacheable, {cached} cached",
        flush=True,
    )
    return cached / possible


def routes_exponent(cluster: Cluster) -> float:
    print("\nper trajectory: turns   tokens with returned routing   prompt tokens")
    routed_tokens = []
    for turns in ROUTING_TURNS:
        counting = Counting(cluster.engines.generate)
        asyncio.run(pool(counting, turns, RESPONSE_TOKENS).run(prompts(8)))
        routed = sum(len(generation.routing) for _, _, generation in counting.calls) / 8
        prompt_tokens = sum(length for _, length, _ in counting.calls) / 8
        routed_tokens.append(routed)
        print(f"{turns:21}{routed:31.0f}{prompt_tokens:16.0f}", flush=True)
    return float(np.polyfit(np.log(ROUTING_TURNS), np.log(routed_tokens), 1)[0])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="timed rounds of one turn; the best counts"
    )
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        ratio, block_tokens = one_turn(Path(folder), rounds)
        with Cluster(make_config(Path(folder), engines=2), with_policy=False) as cluster:
            result = {
                "one_turn_ratio": ratio,
                "cache_share": cache_share(cluster, block_tokens),
                "routes_exponent": routes_exponent(cluster),
            }
    met = (
        result["one_turn_ratio"] >= MIN_RATIO
        and result["cache_share"] >= MIN_CACHE_SHARE
        and result["routes_exponent"] <= MAX_EXPONENT
    )
    bars = f"{MIN_RATIO}, {MIN_CACHE_SHARE}, {MAX_EXPONENT}"
    print("\nevery bar is met" if met else f"\na bar is missed: {bars}")
    print(json.dumps({name: round(value, 4) for name, value in result.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
