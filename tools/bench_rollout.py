"""What do our agents cost on top of vLLM, and do they use its prefix cache?

    one turn     256 prompts of 64 tokens, 64 sampled tokens each: agents, pool, Ray and engine against vLLM's own
                 `LLM.generate` with the same engine settings, prompts and lengths. Both stand ready in one run and
                 take turns; the best round of each counts.
    turns        64 trajectories of 8 turns on two engines; prompt 64, response 32, observation 96 tokens, appended.
                 vLLM says how many prompt tokens of each call it had in its cache; possible is what the same
                 trajectory's calls before it left there, in whole blocks of the cache.
    routes       2 to 16 such turns: how many tokens' experts an engine ships for a trajectory, and the exponent of
                 its growth with the turns. 1 is linear; shipping every prompt's again would come near 2.

A random Qwen3-MoE: 8 layers, 32 experts, top-4, hidden 128. Bars: 0.9 of raw, 0.9 of the cache, exponent 1.1 at most.

    python tools/bench_rollout.py [--rounds 3]

The last line is JSON: {"one_turn_ratio", "cache_share", "routes_exponent"}. A missed bar is printed.
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
from megastep.rollout.pool import Pool
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
PROMPT, ONE_TURN, RESPONSE, OBSERVATION = 64, 64, 32, 96
CALLS, TRAJECTORIES, TURNS, MOST_TURNS = 256, 64, 8, (2, 4, 8, 16)
RATIO, SHARE, EXPONENT = 0.9, 0.9, 1.1


class Talk(Env):
    """Says `observation` tokens of its own after every response, and never ends."""

    def __init__(self, row: dict):
        self.random = np.random.default_rng(row["seed"])

    def words(self, tokens: int) -> str:
        return "".join(
            map(chr, self.random.integers(97, 123, tokens))
        )  # the tokenizer's tokens are bytes

    async def start(self):
        return [{"role": "user", "content": self.words(PROMPT)}]

    async def step(self, text, ids):
        return Outcome([{"role": "user", "content": self.words(OBSERVATION)}])


def prompts(count: int) -> list[Prompt]:
    return [Prompt(seed, {"seed": seed}) for seed in range(count)]


def pool(generate, turns: int, response: int) -> Pool:
    renderer = Renderer.for_model(TOKENIZER, "tokens")
    renderer.stop_ids = ()  # every response has its full length; the token that closes it is appended
    limits = Limits(turns, MODEL["max_position_embeddings"], response + 1, env_timeout_s=60.0)
    return Pool(
        Agent(generate, renderer, limits, Sampling(response)), Talk, samples_per_prompt=1, concurrency=CALLS
    )


def make_config(folder: Path, engines: int) -> Config:
    config = Config()
    config.model.path, config.engine.num_engines = str(folder), engines
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
    """`LLM.generate` in a process of its own, which waits while we measure ourselves."""

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
        0, "shm", has_gpu=False, gpu_ids=None, own_weights=True, folder=".", log=None
    )
    os.environ.update(engine._environment(config, setup))
    for output in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    from vllm import LLM

    llm = LLM(**engine._arguments(config, setup))
    params = [
        engine._sampling_params(Sampling(ONE_TURN, seed=seed), 0) for seed in range(len(token_ids))
    ]
    pipe.send(llm.llm_engine.vllm_config.cache_config.block_size)
    while True:
        try:
            pipe.recv()
        except EOFError:
            llm.llm_engine.engine_core.shutdown()
            return
        llm.reset_prefix_cache()
        begun = time.perf_counter()
        outputs = llm.generate(
            [{"prompt_token_ids": ids} for ids in token_ids], params, use_tqdm=False
        )
        seconds = time.perf_counter() - begun
        assert all(
            len(o.outputs[0].token_ids) == ONE_TURN and o.outputs[0].routed_experts is not None
            for o in outputs
        )
        pipe.send(seconds)


# ---------------------------------------------------------------- measuring


class Counting:
    """`generate`, and what its calls were: (session, prompt tokens, answer)."""

    def __init__(self, generate):
        self.generate, self.calls = generate, []

    async def __call__(self, prompt_ids, sampling, *, session, **routing) -> Generation:
        made = await self.generate(prompt_ids, sampling, session=session, **routing)
        self.calls.append((session, len(prompt_ids), made))
        return made


def one_turn(folder: Path, rounds: int) -> tuple[float, int]:
    """Our tokens/s over vLLM's own, and the tokens of a block of its cache."""
    config = make_config(folder, engines=1)
    renderer = Renderer.for_model(TOKENIZER, "tokens")
    asked = [
        renderer.prompt_ids(asyncio.run(Talk(prompt.row).start())).tolist()
        for prompt in prompts(CALLS)
    ]
    raw = Raw(config, asked)
    ours, theirs = [], []
    try:
        with Cluster(config, with_policy=False) as cluster:
            for _ in range(rounds + 1):  # the first is not counted
                theirs.append(raw.seconds())
                ours.append(our_seconds(cluster))
    finally:
        raw.close()
    tokens = CALLS * ONE_TURN
    print(f"one turn, {CALLS} × {ONE_TURN} tokens, best of {rounds}")
    print(
        f"  vLLM's LLM.generate {tokens / min(theirs[1:]):7.0f} tokens/s   rounds {_seconds(theirs[1:])}"
    )
    print(
        f"  our agents          {tokens / min(ours[1:]):7.0f} tokens/s   rounds {_seconds(ours[1:])}",
        flush=True,
    )
    return min(theirs[1:]) / min(ours[1:]), raw.block_tokens


def our_seconds(cluster: Cluster) -> float:
    cluster.engines.pause()  # drops the cache
    cluster.engines.resume()
    begun = time.perf_counter()
    groups = asyncio.run(pool(cluster.engines.generate, 1, ONE_TURN).run(prompts(CALLS)))
    seconds = time.perf_counter() - begun
    assert all(g.trajectories[0].steps[0].loss_mask.sum() == ONE_TURN for g in groups)
    return seconds


def _seconds(values: list[float]) -> str:
    return ", ".join(f"{value:.2f} s" for value in values)


def cache_share(cluster: Cluster, block: int) -> float:
    counting = Counting(cluster.engines.generate)
    asyncio.run(pool(counting, TURNS, RESPONSE).run(prompts(TRAJECTORIES)))
    left: dict[str, int] = {}  # tokens whose keys the session's calls have left in the cache
    prompt_tokens = possible = cached = 0
    for session, length, made in counting.calls:
        # A prompt's last token is always computed, and so is the block that it is in.
        possible += min(left.get(session, 0), length - 1) // block * block
        left[session] = length + len(made.ids) - 1
        prompt_tokens, cached = prompt_tokens + length, cached + made.cached_tokens
    print(
        f"\n{TURNS} turns, {TRAJECTORIES} trajectories, {cluster.config.engine.num_engines} engines, blocks of {block}: "
        f"{prompt_tokens} prompt tokens, {possible} could be cached, {cached} were",
        flush=True,
    )
    return cached / possible


def routes_exponent(cluster: Cluster) -> float:
    print("\nturns   tokens whose experts are shipped, per trajectory   prompt tokens asked with")
    shipped = []
    for turns in MOST_TURNS:
        counting = Counting(cluster.engines.generate)
        asyncio.run(pool(counting, turns, RESPONSE).run(prompts(8)))
        shipped.append(sum(len(made.routing) for _, _, made in counting.calls) / 8)
        print(
            f"{turns:5}{shipped[-1]:20.0f}{sum(length for _, length, _ in counting.calls) / 8:52.0f}",
            flush=True,
        )
    return float(np.polyfit(np.log(MOST_TURNS), np.log(shipped), 1)[0])


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
        ratio, block = one_turn(Path(folder), rounds)
        with Cluster(make_config(Path(folder), engines=2), with_policy=False) as cluster:
            result = {
                "one_turn_ratio": ratio,
                "cache_share": cache_share(cluster, block),
                "routes_exponent": routes_exponent(cluster),
            }
    met = (
        result["one_turn_ratio"] >= RATIO
        and result["cache_share"] >= SHARE
        and result["routes_exponent"] <= EXPONENT
    )
    print("\nevery bar is met" if met else f"\na bar is missed: {RATIO}, {SHARE}, {EXPONENT}")
    print(json.dumps({name: round(value, 4) for name, value in result.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
