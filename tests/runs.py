"""Whole runs through the command line."""

import os
import subprocess
import sys

from megastep.samples import store
from tests.processes import alive

LOCAL = "configs/local.yaml"
BARE = (
    "warm_start.trajectories=0",
    "policy.ranks=1",
    "policy.parallel.expert=1",
    "optimizer.warmup_steps=0",
)
FEW = (
    "rollout.prompts=2",
    "rollout.samples_per_prompt=2",
    "train.mini_batch_prompts=2",
    "eval.prompts=1",
    "eval.samples_per_prompt=1",
    "checkpoint.every_steps=1",
)


def megastep(command: str, folder, name: str, *more: str) -> list[str]:
    given = [f"run.dir={folder}", f"run.name={name}", "run.wandb=disabled", *more]
    return [sys.executable, "-m", "megastep", command, LOCAL, *given]


def run(command: list[str], timeout: int = 1000) -> subprocess.CompletedProcess:
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)


def begin(command: list[str]) -> subprocess.Popen:
    """In its own process group, as a shell would start it."""
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )


def left(processes: set) -> list[str]:
    """Processes still running, without Ray's two agents, which end a minute after the others."""
    return [line for line in alive(processes) if "Agent" not in line]


def exported(checkpoint, folder) -> dict:
    from megastep.weights.hf_files import HFReader

    subprocess.run(
        [sys.executable, "tools/convert_ckpt.py", "export", checkpoint, folder],
        check=True,
        capture_output=True,
    )
    reader = HFReader(folder)
    return {name: reader(name) for name in reader.file_of}


def trained_ids(folder, steps: int) -> list[int]:
    """Prompt ids of every training step; steps repeated after a resume count once."""
    return [
        g.id
        for n in range(1, steps + 1)
        for g in store.read(folder / "rollouts" / f"step_{n}.safetensors")
    ]
