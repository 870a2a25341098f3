"""Cost of a policy update under four pack layouts, and overhead over a bare Megatron schedule.

    flat_padded   each step a sequence, padded to the longest, output layer on every token
    flat          each step a sequence, packed, output layer on every token
    merge         linear prefix merging, packed, output layer on every token
    trie          every distinct token once, output layer on the loss rows

    search        4 turns, 5 samples per prompt; prompt 60, response 40, observation 100 tokens;
                  nothing stripped from the history
    think         8 turns, 4 samples per prompt; prompt 100, thinking 60, answer 12, observation 60;
                  thinking stripped
    long_think    the same, 16 turns

Random tokens of 4, 2 and 1 prompts, so that each workload has about 9,000 distinct tokens; a
4-layer MoE in fp32: hidden 256, 8 heads of 32 over 2 key heads, 8 experts top-2 of 256, vocabulary
8192. "Output layer on every token" is Megatron's own output layer and cross entropy, plus the
entropy, which every update reports. The first three use torch's causal SDPA, sequence by sequence;
the trie uses cpu_attention.py. policy.logits_chunk_rows is large enough that no logits
are recomputed. Seconds are CPU seconds of the process, one thread: packing, forward, backward and
gradient sums, without the optimizer; the best of the interleaved runs. Peak memory is the largest
addition of an update to the process.

`overhead_vs_megatron`: our update over Megatron's forward_backward_func on a plain GPTModel, both
on equal sequences, all tokens trained. The plain GPTModel uses torch's SDPA, since Megatron's own
attention builds [T, T] scores.

    python tools/bench_layout.py [--runs 3] [--workloads search,think]

Bars: 1.7, 4.5 and 6 times merge; every distinct token once; less memory than merge; overhead at
most 1.05. Missed bars are printed. The last line is JSON: {"workloads": {NAME: {speedup_vs_merge,
speedup_vs_flat, computed_over_distinct, peak_bytes_trie, peak_bytes_merge, max_rel_grad_diff}},
"overhead_vs_megatron": x}.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch

import argparse
import contextlib
import functools
import gc
import json
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
warnings.filterwarnings("ignore")

from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

from megastep.config import Config
from megastep.distributed import parallel
from megastep.policy import attention, batch, cpu_attention, model, worker
from megastep.samples import lay_out, make_samples
from megastep.types import Group, LossTable, MicroBatch, Step, Trajectory, Trie
from megastep.weights.megatron import load_hf
from megastep.weights.random_init import RandomWeights


@dataclass(frozen=True)
class Workload:
    prompts: int
    turns: int
    samples_per_prompt: int
    prompt_tokens: int
    thinking_tokens: int
    answer_tokens: int
    observation_tokens: int


WORKLOADS = {
    "search": Workload(4, 4, 5, 60, 0, 40, 100),
    "think": Workload(2, 8, 4, 100, 60, 12, 60),
    "long_think": Workload(1, 16, 4, 100, 60, 12, 60),
}
SETUPS = ("flat_padded", "flat", "merge", "trie")
PARTS = ("attention", "experts", "head", "data")
MODEL = dict(
    model_type="qwen3_moe",
    hidden_size=256,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=32,
    intermediate_size=256,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=256,
    norm_topk_prob=True,
    vocab_size=8192,
    max_position_embeddings=4096,
    rms_norm_eps=1e-6,
    hidden_act="silu",
    tie_word_embeddings=False,
    rope_theta=10000.0,
    initializer_range=0.05,
)
BUDGET_TOKENS = 16_384
MIN_SPEEDUP = {"search": 1.7, "think": 4.5, "long_think": 6.0}
MAX_OVERHEAD = 1.05


# ---------------------------------------------------------------- workloads


def make_groups(workload: Workload) -> list[Group]:
    random = np.random.default_rng(0)
    return [make_group(random, id, workload) for id in range(workload.prompts)]


def make_group(random, id: int, workload: Workload) -> Group:
    def some_tokens(n: int) -> np.ndarray:
        return random.integers(MODEL["vocab_size"], size=n, dtype=np.int32)

    prompt = some_tokens(workload.prompt_tokens)
    trajectories = []
    for index in range(workload.samples_per_prompt):
        history = prompt
        steps = []
        for turn in range(workload.turns):
            last = turn == workload.turns - 1
            response = some_tokens(workload.thinking_tokens + workload.answer_tokens)
            steps.append(
                Step(
                    index=turn,
                    last=last,
                    prompt_ids=history,
                    response_ids=response,
                    loss_mask=np.ones(len(response), bool),
                    logprobs=np.full(len(response), -9, np.float32),
                    versions=np.array([[0, len(response)]], np.int32),
                    reward=float(index % 2 and last),
                )
            )
            answer = response[workload.thinking_tokens :]
            history = np.concatenate([history, answer, some_tokens(workload.observation_tokens)])
        trajectories.append(Trajectory(id, index, steps))
    return Group(id, trajectories)


def micro_batches(groups: list[Group], setup: str) -> list[MicroBatch]:
    samples = make_samples(groups, "grpo", "token")
    if setup == "flat_padded":
        return padded(samples)
    by_rank, _ = lay_out(
        samples, 1, BUDGET_TOKENS, pack_layout=setup, attention_tokens=6 * MODEL["hidden_size"]
    )
    return by_rank[0]


def padded(samples) -> list[MicroBatch]:
    """As many steps as the budget holds, each padded to the longest of all."""
    tries = [
        lay_out([sample], 1, BUDGET_TOKENS, pack_layout="flat")[0][0][0].trie for sample in samples
    ]
    longest = max(map(len, tries))
    size = BUDGET_TOKENS // longest
    return [rectangle(tries[at : at + size], longest) for at in range(0, len(tries), size)]


def rectangle(tries: list[Trie], length: int) -> MicroBatch:
    """One micro-batch of tries without branches, each padded to `length`."""
    columns = ("target", "advantage", "weight", "rollout_logprob", "group", "trajectory", "step")
    loss = LossTable(
        src=np.concatenate([t.loss.src + np.int32(i * length) for i, t in enumerate(tries)]),
        **{name: np.concatenate([getattr(t.loss, name) for t in tries]) for name in columns},
    )
    rows = np.arange(len(tries), dtype=np.int32)
    trie = Trie(
        tokens=np.concatenate([np.pad(t.tokens, (0, length - len(t))) for t in tries]),
        position=np.tile(np.arange(length, dtype=np.int32), len(tries)),
        end=np.repeat((rows + 1) * np.int32(length), length),
        loss=loss,
    )
    return MicroBatch(trie, sum(map(len, tries)))


def steps_of(groups: list[Group]) -> list[Step]:
    return [
        step for group in groups for trajectory in group.trajectories for step in trajectory.steps
    ]


def distinct_tokens(groups: list[Group]) -> int:
    """Distinct prefixes that predict a token, counted independently of the code under test."""
    prefixes = set()
    for step in steps_of(groups):
        ids = np.concatenate([step.prompt_ids, step.response_ids])[:-1]
        prefixes |= {hash(ids[: n + 1].tobytes()) for n in range(len(ids))}
    return len(prefixes)


# ---------------------------------------------------------------- set-ups


@contextlib.contextmanager
def patched(*patches):
    """Each patch: (owner, name, replacement of the function)."""
    originals = [(owner, name, owner.__dict__[name]) for owner, name, _ in patches]
    for owner, name, function in patches:
        setattr(owner, name, function)
    try:
        yield
    finally:
        for owner, name, function in originals:
            setattr(owner, name, function)


def all_rows_forward(self, batch):
    """PolicyModel.forward with Megatron's output layer on every token."""
    hidden = self.decoder(
        hidden_states=self.embedding(input_ids=batch.tokens, position_ids=None),
        attention_mask=None,
        rotary_pos_emb=self.rotary_pos_emb(batch.rope_tokens, packed_seq=True)[batch.position],
        packed_seq_params=batch.attention,
    )
    labels = torch.zeros_like(batch.tokens[0])
    rows = batch.rows
    labels[rows.src[rows.source]] = rows.target  # no branches: one target per source
    losses, entropies = all_rows_head(self, hidden, labels)
    table_src = rows.src[rows.source][rows.to_table]
    return torch.stack([-losses[table_src], entropies[table_src]])


def all_rows_head(self, hidden, labels):
    logits, _ = self.output_layer(hidden)
    with torch.no_grad():
        entropies = entropy_of(logits.squeeze(1))
    return vocab_parallel_cross_entropy(logits.float(), labels.unsqueeze(1)).squeeze(1), entropies


def entropy_of(logits):
    p = logits.softmax(-1)
    return logits.logsumexp(-1) - p.mul_(logits).sum(-1)


class SdpaAttention(torch.nn.Module):
    """torch's causal attention of [s, b, heads, dim], or sequence by sequence of [T, 1, …]."""

    def __init__(self, config, softmax_scale=None, **unused):
        super().__init__()

    def forward(self, query, key, value, *unused, packed_seq_params=None, **unused_too):
        lengths = [len(query)] if packed_seq_params is None else packed_seq_params.blocks
        parts = [[x.permute(1, 2, 0, 3) for x in t.split(lengths)] for t in (query, key, value)]
        return torch.cat([causal(*qkv).permute(2, 0, 1, 3).flatten(2) for qkv in zip(*parts)])


def causal(q, k, v):
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True
    )


def sequence_lengths(trie: Trie, groups: int) -> list[int]:
    return np.diff([*trie.sequence_starts().tolist(), len(trie)]).tolist()


def patched_for(setup: str):
    """The output layer and the attention of a set-up."""
    if setup == "trie":
        return contextlib.nullcontext()
    return patched(
        (model.PolicyModel, "forward", all_rows_forward),
        (attention.TrieAttention, "forward", SdpaAttention.forward),
        (cpu_attention, "blocks_of", sequence_lengths),
    )


def update(policy, groups: list[Group], setup: str) -> list[MicroBatch]:
    """An update without the optimizer step; the gradients stay in the buffers."""
    batches = micro_batches(groups, setup)
    with patched_for(setup):
        for chunk in policy.chunks:
            chunk.zero_grad_buffer()
        policy._run(batches, policy._loss)
    return batches


def make_policy(folder: Path) -> worker.PolicyWorker:
    (folder / "config.json").write_text(json.dumps(MODEL))
    config = Config()
    config.model.path = str(folder)
    config.model.init = "random"
    config.loss.old_logprobs = "rollout"
    config.routing_replay.enabled = False
    config.policy.logits_chunk_rows = BUDGET_TOKENS
    return worker.PolicyWorker(config)


def gradients(policy) -> list[torch.Tensor]:
    return [p.main_grad.clone() for p in policy.chunks[0].parameters()]


def largest_difference(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """Of all parameters: norm of the difference over norm of the gradient."""
    return max(((a - b).norm() / b.norm()).item() for a, b in zip(ours, theirs, strict=True))


# ---------------------------------------------------------------- measuring


def cpu_seconds(run) -> float:
    gc.collect()
    start = time.process_time()
    run()
    return time.process_time() - start


def best_interleaved(runs: int, **functions) -> dict[str, float]:
    """The best CPU time of each; interleaved, so that noise of the machine affects all of them."""
    for run in functions.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(runs):
        for name, run in functions.items():
            times[name].append(cpu_seconds(run))
    return {name: min(found) for name, found in times.items()}


def peak_bytes(run) -> int:
    """The peak of the process's memory during `run`, minus its memory before."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    run()
    return memory("VmHWM") - before


def memory(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def peaks_in_subprocess(workloads: list[str]) -> dict[str, dict[str, int]]:
    """`peaks` in a process whose allocator returns freed tensors at once: slower, but exact."""
    command = [sys.executable, __file__, "--peaks", "--workloads", ",".join(workloads)]
    environment = {
        **os.environ,
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "65536",
    }
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def peaks(policy, workloads: list[str]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for name in workloads:
        groups = make_groups(WORKLOADS[name])
        update(policy, groups, "trie")
        found[name] = {}
        for setup in ("merge", "trie"):
            found[name][setup] = peak_bytes(functools.partial(update, policy, groups, setup))
    return found


# ---------------------------------------------------------------- breakdown


class Stopwatch:
    """CPU seconds of functions, forward and backward."""

    def __init__(self):
        self.seconds = dict.fromkeys(PARTS, 0.0)

    def timed(self, part, function):
        """Backward is timed until the gradient of the function's first tensor argument."""

        @functools.wraps(function)
        def run(*args, **kwargs):
            at = next(i for i, a in enumerate(args) if torch.is_tensor(a))
            with self.counting(part):
                watched = args[at].view_as(args[at]) if args[at].requires_grad else args[at]
                result = function(*args[:at], watched, *args[at + 1 :], **kwargs)
            self.watch_backward(part, result, watched)
            return result

        return run

    def watch_backward(self, part, result, watched):
        out = result[0] if isinstance(result, tuple) else result
        if not (torch.is_tensor(out) and out.requires_grad and watched.requires_grad):
            return
        began = []
        out.register_hook(lambda grad: began.append(time.process_time()))
        watched.register_hook(lambda grad: self.add(part, time.process_time() - began.pop()))

    @contextlib.contextmanager
    def counting(self, part):
        start = time.process_time()
        yield
        self.add(part, time.process_time() - start)

    def add(self, part, seconds):
        self.seconds[part] += seconds


def breakdown(policy, groups: list[Group], setup: str) -> dict[str, float]:
    from megatron.core.transformer.moe.moe_layer import MoELayer

    watch = Stopwatch()

    def data(function):
        def run(*args, **kwargs):
            with watch.counting("data"):
                return function(*args, **kwargs)

        return run

    here = sys.modules[__name__]
    with patched(
        (
            attention.TrieAttention,
            "forward",
            watch.timed("attention", attention.TrieAttention.forward),
        ),
        (SdpaAttention, "forward", watch.timed("attention", SdpaAttention.forward)),
        (MoELayer, "forward", watch.timed("experts", MoELayer.forward)),
        (model, "row_logprobs", watch.timed("head", model.row_logprobs)),
        (here, "all_rows_head", watch.timed("head", all_rows_head)),
        (here, "micro_batches", data(micro_batches)),
        (worker, "prepare", data(batch.prepare)),
    ):
        total = cpu_seconds(lambda: update(policy, groups, setup))
    return {**watch.seconds, "rest": total - sum(watch.seconds.values())}


# ---------------------------------------------------------------- against bare Megatron


def bare_megatron(policy, tokens: torch.Tensor):
    """Megatron's forward_backward_func on a plain GPTModel with the same data parallelism."""
    with patched((model, "TrieAttention", SdpaAttention), (model, "PolicyModel", model.GPTModel)):
        chunks = model.build_model(policy.arch, policy.config.policy)
    load_hf(chunks, policy.arch, RandomWeights(policy.arch, seed=0))
    chunks = model.wrap_for_training(chunks, policy.config.policy)
    chunks[0].module.config.finalize_model_grads_func = worker._finalize_sums
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)

    def loss_of(losses):
        loss = losses[:, :-1].sum() / losses[:, :-1].numel()
        return loss, torch.tensor(1, dtype=torch.int), loss.detach()

    def forward_step(data, chunk):
        return chunk(next(data), positions, None, labels=tokens.roll(-1, 1)), loss_of

    def run():
        for chunk in chunks:
            chunk.zero_grad_buffer()
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter([tokens])],
            model=chunks,
            num_microbatches=1,
            seq_length=tokens.shape[1],
            micro_batch_size=len(tokens),
            forward_only=False,
        )

    return run


def sequence_group(id: int, ids: np.ndarray) -> Group:
    """One step that trains on every token but the first."""
    response = ids[1:]
    step = Step(
        index=0,
        last=True,
        prompt_ids=ids[:1],
        response_ids=response,
        loss_mask=np.ones(len(response), bool),
        logprobs=np.full(len(response), -9, np.float32),
        versions=np.array([[0, len(response)]], np.int32),
    )
    return Group(id, [Trajectory(id, 0, [step])])


def overhead(policy, runs: int) -> float:
    tokens = np.random.default_rng(1).integers(MODEL["vocab_size"], size=(8, 513), dtype=np.int32)
    groups = [sequence_group(i, row) for i, row in enumerate(tokens)]

    def ours():
        batches, _ = lay_out(make_samples(groups, "grpo", "token"), 1, BUDGET_TOKENS)
        for chunk in policy.chunks:
            chunk.zero_grad_buffer()
        loss_metrics = policy._run(batches[0], policy._loss)
        worker._reduce_metrics(loss_metrics)
        policy._agreement()
        policy.optimizer.prepare_grads()
        norm = policy.optimizer.get_grad_norm()
        assert policy._find_nonfinite(batches[0], loss_metrics, norm) is None

    # Ours skips the last token, which predicts nothing: 512 tokens per sequence for both.
    bare = bare_megatron(policy, torch.from_numpy(tokens[:, :512].astype(np.int64)))
    times = best_interleaved(max(runs, 5), ours=ours, bare=bare)
    print(
        f"\noverhead: ours {times['ours']:.3f} s, bare Megatron {times['bare']:.3f} s, "
        "8 sequences of 512 tokens"
    )
    return times["ours"] / times["bare"]


# ---------------------------------------------------------------- report


def measure(policy, name: str, runs: int, peak: dict[str, int]) -> dict:
    groups = make_groups(WORKLOADS[name])
    updates = {setup: functools.partial(update, policy, groups, setup) for setup in SETUPS}
    times = best_interleaved(runs, **updates)
    tokens = {}
    grads = {}
    for setup in SETUPS:
        batches = update(policy, groups, setup)
        tokens[setup] = sum(len(m.trie) for m in batches)
        grads[setup] = gradients(policy)
    distinct = distinct_tokens(groups)
    steps = steps_of(groups)
    rows = sum(len(step.response_ids) for step in steps)
    print(
        f"\n{name}: {len(groups)} prompts, {len(steps)} steps, {distinct} distinct tokens, "
        f"{rows} trained"
    )
    print(
        f"  {'':12}{'tokens':>8}{'seconds':>9}{'× merge':>9}   "
        + "".join(f"{p:>10}" for p in (*PARTS, "rest"))
    )
    for setup in SETUPS:
        parts = breakdown(policy, groups, setup)
        speedup = times["merge"] / times[setup]
        print(
            f"  {setup:12}{tokens[setup]:8}{times[setup]:9.2f}{speedup:9.2f}   "
            + "".join(f"{parts[p]:10.2f}" for p in (*PARTS, "rest"))
        )
    print(f"  peak memory: merge {peak['merge'] / 1e6:.0f} MB, trie {peak['trie'] / 1e6:.0f} MB")
    return {
        "speedup_vs_merge": times["merge"] / times["trie"],
        "speedup_vs_flat": times["flat"] / times["trie"],
        "computed_over_distinct": tokens["trie"] / distinct,
        "peak_bytes_trie": peak["trie"],
        "peak_bytes_merge": peak["merge"],
        "max_rel_grad_diff": max(largest_difference(g, grads["flat"]) for g in grads.values()),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--runs", type=int, default=3, help="timed runs of each set-up; the best counts"
    )
    parser.add_argument(
        "--workloads", default=",".join(WORKLOADS), help="some of search,think,long_think"
    )
    parser.add_argument("--peaks", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    names = args.workloads.split(",")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, parallel.alone():
        policy = make_policy(Path(folder))
        if args.peaks:
            print(json.dumps(peaks(policy, names)))
            return 0
        peak = peaks_in_subprocess(names)
        workloads = {name: measure(policy, name, args.runs, peak[name]) for name in names}
        result = {"workloads": workloads, "overhead_vs_megatron": overhead(policy, args.runs)}
    missed = bars_missed(result)
    print("\n".join(f"missed: {line}" for line in missed) or "every bar is met")
    print(json.dumps(result))
    return 0


def bars_missed(result: dict) -> list[str]:
    missed = []
    for name, found in result["workloads"].items():
        speedup = found["speedup_vs_merge"]
        if speedup < MIN_SPEEDUP[name]:
            missed.append(f"{name}: {speedup:.2f} times merge, below {MIN_SPEEDUP[name]}")
        computed = found["computed_over_distinct"]
        if round(computed, 2) != 1.0:
            missed.append(f"{name}: {computed:.3f} tokens computed per distinct token")
        if found["peak_bytes_trie"] >= found["peak_bytes_merge"]:
            missed.append(f"{name}: more memory than merge")
    if result["overhead_vs_megatron"] > MAX_OVERHEAD:
        missed.append(f"overhead {result['overhead_vs_megatron']:.3f}, above {MAX_OVERHEAD}")
    return missed


if __name__ == "__main__":
    sys.exit(main())
