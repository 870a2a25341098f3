"""Throughput of the weight sync, compared with a memory copy.

A random Qwen3-MoE of 0.5 GB in fp32 (8 layers, hidden 512, 16 experts of 512), one vLLM engine, a
policy of one or more ranks (policy.ranks, policy.parallel.*). A weight sync is all that training
waits for: pause the calls, send the weights through shared memory, pack them in the engine, drop
caches, resume the calls. The baseline is a copy of the same bytes in memory by one thread. Both
alternate; the best of each counts.

The fraction of a training step is that of chase: rollout of 8 prompts × 8 samples, update, sync.

    python tools/bench_sync.py [--syncs 5] [key=value ...]

The last line is JSON: {"gb_per_s", "memcpy_gb_per_s", "ratio", "fraction_of_step"}. Target: ratio
0.3; the output reports a missed target.
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
from megastep.weights.mapping import param_mappings

TARGET = 0.3
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
    """chase with a model of 0.5 GB, whose tokenizer uses the first tokens of the vocabulary."""
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
    mappings = [m for m in param_mappings(read_architecture(folder)).values() if not m.is_copy]
    shapes = [shape for mapping in mappings for _, shape in mapping.hf]
    return sum(4 * torch.Size(shape).numel() for shape in shapes)


def seconds(run: Callable) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def time_sync_and_copy(cluster: Cluster, nbytes: int, repeats: int) -> tuple[float, float]:
    """The shortest weight sync and the shortest copy, in seconds."""
    # Written once, so that all pages exist.
    source = torch.zeros(nbytes // 4) + 1
    target = torch.zeros(nbytes // 4) + 1
    sync_s = []
    copy_s = []
    for _ in range(repeats):
        copy_s.append(seconds(lambda: target.copy_(source)))
        sync_s.append(seconds(cluster.sync))
    print(f"sync  best {min(sync_s):.3f} s of {', '.join(f'{s:.3f}' for s in sync_s)}")
    print(f"copy  best {min(copy_s):.3f} s of {', '.join(f'{s:.3f}' for s in copy_s)}", flush=True)
    return min(sync_s), min(copy_s)


def fraction_of_step(config: Config, cluster: Cluster) -> float:
    """The weight sync's fraction of the third training step; the first ones fill caches."""
    task = Task.load(config)
    learner = Learner(config, cluster.policy)
    pool = task.pool(cluster.engines.generate)
    stream = task.stream()
    print(f"\n{'step':<6}{'rollout':>9}{'update':>9}{'sync':>9}")
    for step in range(1, 4):
        start = time.perf_counter()
        groups = list(asyncio.run(pool.run(stream.take(config.rollout.prompts))))
        rollout_s = time.perf_counter() - start
        start = time.perf_counter()
        learner.learn(groups)
        update_s = time.perf_counter() - start
        sync_s = seconds(cluster.sync)
        print(f"{step:<6}{rollout_s:8.2f}s{update_s:8.2f}s{sync_s:8.2f}s", flush=True)
    return sync_s / (rollout_s + update_s + sync_s)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--syncs", type=int, default=5, help="timed weight syncs; the best counts")
    args, overrides = parser.parse_known_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        config = make_config(Path(folder), overrides)
        nbytes = model_bytes(folder)
        print(
            f"{nbytes / 1e9:.2f} GB, {config.policy.ranks} rank(s), "
            f"{config.engine.num_engines} engine(s)",
            flush=True,
        )
        with Cluster(config) as cluster:
            sync_s, copy_s = time_sync_and_copy(cluster, nbytes, args.syncs)
            fraction = fraction_of_step(config, cluster)
    ratio = copy_s / sync_s
    print("\nthe target is met" if ratio >= TARGET else f"\nthe target of {TARGET} is missed")
    print(
        json.dumps(
            {
                "gb_per_s": round(nbytes / sync_s / 1e9, 3),
                "memcpy_gb_per_s": round(nbytes / copy_s / 1e9, 3),
                "ratio": round(ratio, 3),
                "fraction_of_step": round(fraction, 4),
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
