"""How fast do weights get from the policy into an engine?

A random Qwen3-MoE of 0.5 GB in fp32 (8 layers, hidden 512, 16 experts of 512), one vLLM engine, a policy of one rank or
more (policy.ranks and its layout may be given). A push is everything that training waits for: calls frozen, weights
through shared memory into the engine, packed there as vLLM wants them, caches dropped, calls resumed. The measure is a
plain copy of the same bytes by one thread from one piece of memory into another. Both take turns; the best of each
counts.

The share in a training step is that of chase: rollout of 8 prompts × 8 samples, update, push.

    python tools/bench_sync.py [--pushes 5] [key=value ...]

The last line is JSON: {"gb_per_s", "memcpy_gb_per_s", "ratio", "share_of_step"}. Bar: ratio 0.3; a missed bar
is printed.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the engine and the ranks share the cores

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megastep.cluster import Cluster
from megastep.config import Config, load
from megastep.models.architecture import read_architecture
from megastep.rollout.task import Task
from megastep.trainer.learner import Learner
from megastep.weights.mapping import rows_of

BAR = 0.3
SHAPE = dict(
    hidden_size=512,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    num_experts=16,
    moe_intermediate_size=512,
    vocab_size=8192,
)


def make_config(folder: Path, overrides: list[str]) -> Config:
    """chase with a model of half a gigabyte; its tokenizer uses the first few tokens of the vocabulary."""
    source = Path("configs/models/chase")
    shutil.copytree(source, folder, dirs_exist_ok=True)
    shape = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(shape | SHAPE))
    small = [
        "rollout.prompts=8",
        "rollout.samples_per_prompt=8",
        "warm_start.trajectories=0",
        "optimizer.warmup_steps=0",
    ]
    return load("configs/chase.yaml", [f"model.path={folder}", *small, *overrides])


def model_bytes(folder: str) -> int:
    rows = rows_of(read_architecture(folder)).values()
    return sum(
        4 * torch.Size(shape).numel() for row in rows if not row.is_copy for _, shape in row.hf
    )


def seconds(run: Callable) -> float:
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def push_and_copy(cluster: Cluster, nbytes: int, pushes: int) -> tuple[float, float]:
    source, target = (torch.zeros(nbytes // 4) + 1 for _ in range(2))  # touched: no page is new
    pushed, copied = [], []
    for _ in range(pushes):
        copied.append(seconds(lambda: target.copy_(source)))
        pushed.append(seconds(cluster.sync))
    print(f"push  best {min(pushed):.3f} s of {', '.join(f'{s:.3f}' for s in pushed)}")
    print(f"copy  best {min(copied):.3f} s of {', '.join(f'{s:.3f}' for s in copied)}", flush=True)
    return min(pushed), min(copied)


def share_of_step(config: Config, cluster: Cluster) -> float:
    task, learner = Task.load(config), Learner(config, cluster.policy)
    pool, stream = task.pool(cluster.engines.generate), task.stream()
    print(f"\n{'step':<6}{'rollout':>9}{'update':>9}{'push':>9}")
    for step in range(1, 4):
        groups = []
        parts = (
            seconds(
                lambda: groups.extend(asyncio.run(pool.run(stream.take(config.rollout.prompts))))
            ),
            seconds(lambda: learner.learn(groups)),
            seconds(cluster.sync),
        )
        print(f"{step:<6}" + "".join(f"{part:8.2f}s" for part in parts), flush=True)
    return parts[-1] / sum(parts)  # of the last step: the first ones pay for caches


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pushes", type=int, default=5, help="timed pushes; the best counts")
    args, overrides = parser.parse_known_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        config = make_config(Path(folder), overrides)
        nbytes = model_bytes(folder)
        print(
            f"{nbytes / 1e9:.2f} GB, {config.policy.ranks} rank(s), {config.engine.num_engines} engine(s)",
            flush=True,
        )
        with Cluster(config) as cluster:
            push, copy = push_and_copy(cluster, nbytes, args.pushes)
            share = share_of_step(config, cluster)
    ratio = copy / push
    print("\nthe bar is met" if ratio >= BAR else f"\nthe bar of {BAR} is missed")
    print(
        json.dumps(
            {
                "gb_per_s": round(nbytes / push / 1e9, 3),
                "memcpy_gb_per_s": round(nbytes / copy / 1e9, 3),
                "ratio": round(ratio, 3),
                "share_of_step": round(share, 4),
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
