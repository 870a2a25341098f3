"""The largest value of every number in a config. Beyond these lie typing errors, infinities, and hangs.

Limits are generous: none is what a cluster or a model can bear, which other checks and `megastep plan` know better.
"""

import math
import os
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

INT_LIMIT = 2**31 - 1  # what torch, numpy and vLLM all take, for seeds too
FLOAT_LIMIT = 1e9
SECONDS = 10_000_000  # 115 days; waiting primitives overflow at some larger number
RANKS = 16_384  # the planner lays out as many in seconds

MOST: dict[str, float] = {
    "policy.ranks": RANKS,
    "policy.parallel.tensor": RANKS,
    "policy.parallel.pipeline": RANKS,
    "policy.parallel.virtual": RANKS,
    "policy.parallel.expert": RANKS,
    "policy.parallel.expert_tensor": RANKS,
    "policy.parallel.context": RANKS,
    "engine.num_engines": RANKS,
    "engine.tensor_parallel": RANKS,
    "engine.max_sequences": 1 << 20,
    "engine.restarts": 1_000_000,
    "sync.bucket_mb": 1 << 17,
    "cluster.object_store_mb": 1 << 24,
    "engine.cpu_kv_gb": 1 << 16,
    "data.generated_rows": 1_000_000,
    "data.held_out": 1_000_000,
    "warm_start.trajectories": 1_000_000,
    "rollout.prompts": 1 << 20,
    "rollout.samples_per_prompt": 1 << 16,
    "rollout.max_turns": 1 << 20,
    "rollout.concurrency": 1 << 20,
    "eval.prompts": 1 << 20,
    "eval.samples_per_prompt": 1 << 16,
    "train.micro_batch_tokens": 1 << 30,
    "policy.logits_chunk_rows": 1 << 30,
    "rollout.temperature": 100,
    "eval.temperature": 100,
    "cluster.cpus_per_process": 1024,
    "optimizer.lr": 1,
    "optimizer.min_lr": 1,
    "warm_start.lr": 1,
    "optimizer.eps": 1,
    "optimizer.weight_decay": 10,
    "loss.kl_coef": 1000,
    "loss.entropy_coef": 1000,
    "policy.moe_aux_loss_coef": 1000,
    "policy.moe_z_loss_coef": 1000,
    "asynchronous.max_staleness": 1000,
    "engine.start_timeout_s": SECONDS,
    "engine.request_timeout_s": SECONDS,
    "engine.health_every_s": SECONDS,
    "engine.health_timeout_s": SECONDS,
    "cluster.timeout_s": SECONDS,
    "rollout.env_timeout_s": SECONDS,
}


def beyond(config: Any) -> Iterator[tuple[str, Any, str]]:
    """Keys whose number is not finite or too large, with the value and what would be right."""
    for key, value in _leaves(config, ""):
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, bool) or not isinstance(number, int | float):
                continue
            most = MOST.get(key, INT_LIMIT if isinstance(number, int) else FLOAT_LIMIT)
            if not math.isfinite(number):
                yield key, value, "must be a finite number"
                break
            if number > most:
                yield key, value, f"must be {most:.0f} or less"
                break


def _leaves(section: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for f in fields(section):
        value = getattr(section, f.name)
        if is_dataclass(value):
            yield from _leaves(value, f"{prefix}{f.name}.")
        else:
            yield f"{prefix}{f.name}", value


def machine_memory() -> int:
    """Bytes of this machine, or of the container that it is seen from."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and (text := limit.read_text().strip()).isdigit():
        return min(total, int(text))
    return total
