"""Benchmark folding and packing: time and memory, compared with SkyRL's step-wise merging.

    ours    megastep.samples.lay_out: steps → tries → micro-batches of 8 ranks, 32,768 tokens each,
            padded to 8; with routing, the routing of every micro-batch is gathered too
    theirs  skyrl.train.generators.utils.merge_stepwise_output, then
            convert_prompts_responses_to_batch_tensors

    workload     trajectories × turns; prompt 800, response 120, observation 500 tokens;
                 8 trajectories per prompt
    _stripped    the same without the first 80 tokens of each response (its thinking) in the next
                 prompt, where prefix merging merges no step

Each side gets its own input format: numpy arrays for ours, Python lists for theirs. Seconds are CPU
seconds of the process, one thread, the best of several runs. SkyRL's merging rejects routing and is
always measured without. Routing is 48 layers × top-8, each token recorded once per trajectory, as
by an engine that leaves out a prefix it has already returned.

`peak_ratio`: peak memory of lay_out, results included, over the size of the input arrays; the
larger of the runs with and without routing.

SkyRL is installed into a separate environment, once, in $XDG_CACHE_HOME/megastep/peer-skyrl (or
~/.cache); it reuses torch and other packages of the environment that runs this script.

    python tools/bench_datapath.py [--runs 5]

The last line is JSON:
{"workloads": {NAME: {ours_s, peer_s, speedup, with_routing_s, peak_ratio}}, "exponent": x}.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy: one thread on both sides

import argparse
import gc
import json
import subprocess
import sys
import sysconfig
import time
import tracemalloc
import venv
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megastep.samples import lay_out, make_samples
from megastep.types import Group, Step, Trajectory

WORKLOADS = {"512x4": (512, 4), "256x8": (256, 8), "64x30": (64, 30)}
# Tokens.
PROMPT = 800
RESPONSE = 120
OBSERVATION = 500
THINKING = 80

SAMPLES_PER_PROMPT = 8
VOCAB = 150_000
LAYERS = 48
TOP_K = 8
EXPERTS = 128

RANKS = 8
BUDGET_TOKENS = 32_768
ALIGN_TOKENS = 8
PEER = (
    "skyrl==0.3.0",
    "skyrl-gym==0.4.0",
    "pandas",
    "torchdata",
    "jaxtyping",
    "datasets",
    "multiprocess",
    "pyarrow",
    "python-dateutil",
    "six",
    "dill",
    "xxhash",
    "loguru",
)


# ---------------------------------------------------------------- workloads


def make_groups(trajectories: int, turns: int, stripped: bool, routing: bool) -> list[Group]:
    rng = np.random.default_rng(0)
    groups = trajectories // SAMPLES_PER_PROMPT
    return [_make_group(rng, id, turns, stripped, routing) for id in range(groups)]


def _make_group(rng, id: int, turns: int, stripped: bool, routing: bool) -> Group:
    prompt = _ids(rng, PROMPT)
    prompt_routing = _routing(rng, PROMPT) if routing else None
    group = Group(id, [])
    for index in range(SAMPLES_PER_PROMPT):
        steps = []
        ids = prompt
        recorded = 0  # leading tokens of `ids` whose routing an earlier step recorded
        for i in range(turns):
            response = _ids(rng, RESPONSE)
            step_routing = None
            if routing:
                step_routing = _routing(rng, len(ids) + RESPONSE - 1 - recorded)
                if i == 0:
                    step_routing[:PROMPT] = prompt_routing  # equal in all trajectories
            steps.append(
                Step(
                    index=i,
                    last=i == turns - 1,
                    prompt_ids=ids,
                    response_ids=response,
                    loss_mask=np.ones(RESPONSE, bool),
                    logprobs=np.full(RESPONSE, -0.1, np.float32),
                    versions=np.array([[0, RESPONSE]], np.int32),
                    reward=float(i == turns - 1 and index % 2),
                    routing=step_routing,
                    routing_start=recorded,
                )
            )
            recorded = len(ids) if stripped else len(ids) + RESPONSE - 1
            kept = response[THINKING if stripped else 0 :]
            ids = np.concatenate([ids, kept, _ids(rng, OBSERVATION)])
        group.trajectories.append(Trajectory(id, index, steps))
    return group


def _ids(rng, n: int) -> np.ndarray:
    return rng.integers(0, VOCAB, n, dtype=np.int32)


def _routing(rng, n: int) -> np.ndarray:
    return rng.integers(0, EXPERTS, (n, LAYERS, TOP_K), dtype=np.uint8)


def array_bytes(groups: list[Group]) -> int:
    """The size of all arrays of all steps."""
    total = 0
    for step in _steps(groups):
        total += sum(a.nbytes for a in vars(step).values() if isinstance(a, np.ndarray))
    return total


def _steps(groups: list[Group]) -> list[Step]:
    return [s for g in groups for t in g.trajectories for s in t.steps]


# ---------------------------------------------------------------- ours


def run_ours(samples):
    micro_batches, _ = lay_out(samples, RANKS, BUDGET_TOKENS, ALIGN_TOKENS)
    routing = [micro.trie.routing() for rank in micro_batches for micro in rank]
    return micro_batches, routing


def cpu_seconds(run, runs: int) -> float:
    best = float("inf")
    for _ in range(runs):
        gc.collect()
        start = time.process_time()
        result = run()
        best = min(best, time.process_time() - start)
        del result
    return best


def peak_bytes(run) -> int:
    """Peak of the bytes that `run` allocates, its result included."""
    gc.collect()
    tracemalloc.start()
    result = run()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del result
    return peak


def measure_ours(
    shape: tuple[int, int], stripped: bool, routing: bool, runs: int
) -> tuple[float, float]:
    """CPU seconds, and the peak memory over the size of the input."""
    groups = make_groups(*shape, stripped, routing)
    samples = make_samples(groups, "grpo", "token")
    ratio = peak_bytes(lambda: run_ours(samples)) / array_bytes(groups)
    return cpu_seconds(lambda: run_ours(samples), runs), ratio


def growth(runs: int) -> tuple[list[tuple[int, float]], float]:
    """Seconds for 1, 2, 4 and 8 times the trajectories, and the fitted exponent."""
    sizes = (128, 256, 512, 1024)
    found = []
    for trajectories in sizes:
        samples = make_samples(make_groups(trajectories, 8, False, False), "grpo", "token")
        found.append((trajectories, cpu_seconds(lambda: run_ours(samples), runs)))  # noqa: B023
    exponent = np.polyfit(np.log(sizes), np.log([seconds for _, seconds in found]), 1)[0]
    return found, float(exponent)


# ---------------------------------------------------------------- theirs, in its own environment

PEER_SCRIPT = """
import json, sys, time, typing
import typing_extensions
typing.TypedDict = typing_extensions.TypedDict  # pydantic needs it below Python 3.12
import numpy as np, torch
torch.set_num_threads(1)
from loguru import logger
logger.remove()
from skyrl.train.dataset.preprocess import convert_prompts_responses_to_batch_tensors
from skyrl.train.generators.base import TrajectoryID
from skyrl.train.generators.utils import merge_stepwise_output

class Tokenizer:
    pad_token_id = 0

def load(path):
    data = np.load(path)
    prompts = [p.tolist() for p in np.split(data["prompts"], data["prompt_ends"][:-1])]
    responses = data["responses"].tolist()
    turns = int(data["turns"])
    samples = int(data["samples_per_prompt"])
    length = len(responses[0])
    n = len(responses)
    last = [i % turns == turns - 1 for i in range(n)]
    trajectories = [i // turns for i in range(n)]
    return {
        "prompt_token_ids": prompts,
        "response_ids": responses,
        "loss_masks": [[1] * length for _ in range(n)],
        "rewards": [[0.0] * (length - 1) + [float(end)] for end in last],
        "stop_reasons": ["stop"] * n,
        "rollout_logprobs": [[-0.1] * length for _ in range(n)],
        "rollout_metrics": None,
        "is_last_step": last,
        "rollout_expert_indices": None,
        "trajectory_ids": [TrajectoryID(str(t // samples), t % samples) for t in trajectories],
    }

batch = load(sys.argv[1])
runs = int(sys.argv[2])
best = float("inf")
for _ in range(runs):
    start = time.process_time()
    merged = merge_stepwise_output(batch)
    tensors = convert_prompts_responses_to_batch_tensors(
        Tokenizer,
        merged["prompt_token_ids"],
        merged["response_ids"],
        merged["rewards"],
        merged["loss_masks"],
        merged["rollout_logprobs"],
    )
    best = min(best, time.process_time() - start)
print(json.dumps({"seconds": best, "rows": len(merged["response_ids"])}))
"""


class PeerError(RuntimeError):
    """The peer cannot be installed or run."""


def peer_python() -> Path:
    """The interpreter of the peer's environment, which is created on first use."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "megastep" / "peer-skyrl"
    python = folder / "bin" / "python"
    done = folder / "complete"
    if done.exists() and done.read_text() == sys.prefix:
        return python
    print(f"installing {PEER[0]} into {folder} ...", flush=True)
    venv.create(folder, with_pip=True, clear=True)
    site = next((folder / "lib").glob("python*")) / "site-packages"
    # Reuse torch, transformers etc. of this environment: the peer's pins would fetch gigabytes.
    (site / "reuse.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--ignore-installed", *PEER]
    result = subprocess.run(install, capture_output=True, text=True)
    if result.returncode:
        raise PeerError(
            f"the peer {PEER[0]} cannot be installed into {folder}:\n{result.stderr.strip()[-800:]}"
        )
    done.write_text(sys.prefix)
    return python


def measure_peer(shape: tuple[int, int], stripped: bool, runs: int, folder: Path) -> float:
    steps = _steps(make_groups(*shape, stripped, routing=False))
    file = folder / "workload.npz"
    prompts = [s.prompt_ids for s in steps]
    np.savez(
        file,
        prompts=np.concatenate(prompts),
        prompt_ends=np.cumsum([len(p) for p in prompts]),
        responses=np.stack([s.response_ids for s in steps]),
        turns=shape[1],
        samples_per_prompt=SAMPLES_PER_PROMPT,
    )
    result = subprocess.run(
        [peer_python(), "-c", PEER_SCRIPT, file, str(runs)], capture_output=True, text=True
    )
    file.unlink()
    if result.returncode:
        raise PeerError(f"the peer {PEER[0]} failed:\n{result.stderr.strip()[-800:]}")
    return json.loads(result.stdout.splitlines()[-1])["seconds"]


# ---------------------------------------------------------------- report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--runs", type=int, default=5, help="runs of each measurement; the best counts"
    )
    args = parser.parse_args()
    try:
        python = peer_python()
    except (PeerError, OSError, subprocess.SubprocessError) as error:
        print(
            f"bench_datapath: {error}\nneeds a package index (pip) and a writable cache folder",
            file=sys.stderr,
        )
        return 2
    print(
        f"{'workload':<16}{'ours s':>9}{'theirs s':>10}{'speed-up':>10}"
        f"{'with routing s':>16}{'peak ratio':>12}"
    )
    workloads = {}
    for stripped in (False, True):
        for workload, shape in WORKLOADS.items():
            name = f"{workload}_stripped" if stripped else workload
            peer = measure_peer(shape, stripped, min(args.runs, 3), python.parent)
            ours, plain_ratio = measure_ours(shape, stripped, False, args.runs)
            routed, routed_ratio = measure_ours(shape, stripped, True, min(args.runs, 3))
            row = {
                "ours_s": ours,
                "peer_s": peer,
                "speedup": peer / ours,
                "with_routing_s": routed,
                "peak_ratio": max(plain_ratio, routed_ratio),
            }
            workloads[name] = {key: round(value, 4) for key, value in row.items()}
            print(
                f"{name:<16}{ours:>9.4f}{peer:>10.3f}{peer / ours:>9.1f}×{routed:>16.3f}"
                f"{row['peak_ratio']:>12.2f}",
                flush=True,
            )
    found, exponent = growth(args.runs)
    print("\ntrajectories (8 turns)  " + "  ".join(f"{n}: {seconds:.4f} s" for n, seconds in found))
    print(f"seconds grow with trajectories to the power {exponent:.2f}\n")
    print(json.dumps({"workloads": workloads, "exponent": round(exponent, 3)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
