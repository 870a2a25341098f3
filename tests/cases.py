"""Functions that test ranks run. Each builds its policy under a parallel layout."""

import errno
import gc
import hashlib
import os
import time
import weakref
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from megastep.checkpoint import saver
from megastep.checkpoint.loop_state import LoopState
from megastep.checkpoint.manifest import hash_files
from megastep.config import Config, ParallelConfig
from megastep.distributed import parallel
from megastep.errors import CheckpointError, ReplayError, TrainingError
from megastep.policy import worker as policy_worker
from megastep.policy.routing_fetch import RoutingFetch
from megastep.policy.worker import PolicyWorker
from megastep.samples import lay_out
from megastep.samples.packing import join
from megastep.samples.routing import Layout, routing_of_batches, tables_of
from megastep.trainer.learner import Learner
from megastep.types import FinishReason, Sample
from megastep.weights.hf_files import HFReader
from tests import ranks
from tests.models import some_tokens
from tests.policy import updates as update_rollouts
from tests.samples.rollouts import by_reference, resolver, step


def make_config(folder, layout: dict, settings: dict) -> Config:
    """`settings`: config values by dotted key."""
    config = Config()
    config.model.path = str(folder)
    config.policy.parallel = ParallelConfig(**layout)
    for key, value in settings.items():
        *sections, name = key.split(".")
        section = config
        for part in sections:
            section = getattr(section, part)
        assert hasattr(section, name), key
        setattr(section, name, value)
    return config


def make_worker(folder, layout: dict, settings: dict | None = None) -> PolicyWorker:
    """Supervised training by default."""
    defaults = {"loss.type": "nll", "optimizer.lr": 1e-3, "routing_replay.enabled": False}
    config = make_config(folder, layout, {**defaults, **(settings or {})})
    parallel.start(config.policy.parallel, *ranks.current)
    return PolicyWorker(config)


def next_token_batches(worker: PolicyWorker, sequences: int = 4):
    """This rank's micro-batches of some_tokens; all but the first tokens train, weighed equally."""
    tokens = some_tokens(sequences).numpy().astype(np.int32)
    weight = 1 / tokens[:, 1:].size
    samples = [
        Sample(step(0, t[:1], t[1:]), i, 0, advantage=1.0, weight=weight)
        for i, t in enumerate(tokens)
    ]
    p = worker.config.policy.parallel
    batches, _ = lay_out(
        samples,
        parallel.place().data_size,
        budget_tokens=2 * tokens.shape[1],
        align_tokens=p.tensor,
        pack_layout="flat",
        rounds_of=p.pipeline if p.virtual > 1 else 1,
    )
    return batches[parallel.place().data]


def next_token_step(worker: PolicyWorker) -> dict[str, float]:
    (update,) = worker.learn([next_token_batches(worker)])
    metrics = update.metrics
    return {name: metrics[f"train/{name}"] for name in ("loss", "grad_norm", "lr")}


def logprobs_and_round_trip(folder, layout: dict):
    """{(sequence, target position): (logprob, entropy)} of this rank's sequences, on the last
    stage; and on rank 0 whether the export is bit-exact."""
    worker = make_worker(folder, layout)
    batches = next_token_batches(worker)
    found = {}
    for batch, (logprobs, entropies) in zip(batches, worker.logprobs_and_entropies(batches)):
        loss = batch.trie.loss
        for g, src, *values in zip(
            loss.group.tolist(), loss.src, logprobs.tolist(), entropies.tolist()
        ):
            if g >= 0:
                found[g, int(batch.trie.position[src]) + 1] = values
    place = parallel.place()
    if place.rank > 0:
        assert not list(worker.hf_tensors())
        return found, None
    original = HFReader(folder)
    exported = {name: torch.equal(tensor, original(name)) for name, tensor in worker.hf_tensors()}
    return found, set(exported) == set(original.file_of) and all(exported.values())


def take_steps(folder, layout: dict, steps: int, precision: str = "fp32") -> list[dict]:
    worker = make_worker(folder, layout, {"policy.precision": precision})
    return [next_token_step(worker) for _ in range(steps)]


def take_steps_with_offload(folder, layout: dict, steps: int) -> tuple[list[dict], int]:
    """take_steps, with the policy offloaded between steps; and gradient bytes while offloaded."""
    worker = make_worker(folder, layout)
    metrics = []
    for _ in range(steps):
        metrics.append(next_token_step(worker))
        worker.offload()
        gradient_bytes = sum(p.main_grad.untyped_storage().nbytes() for p in worker._parameters())
        worker.onload()
    return metrics, gradient_bytes


def optimizers_alive_at_a_new_stage(folder, layout: dict) -> list[bool]:
    """Whether the state of the last stage's Adam exists while the next one is built."""
    worker = make_worker(folder, layout)
    next_token_step(worker)
    (state, *_) = worker.optimizer.chained_optimizers[0].optimizer.state.values()
    moment = weakref.ref(state["exp_avg"])
    del state, _
    alive = []
    build = policy_worker.build_optimizer

    def spy(*arguments):
        alive.append(moment() is not None)
        return build(*arguments)

    with mock.patch.object(policy_worker, "build_optimizer", spy):
        worker.begin(worker.config.optimizer, worker.config.policy_loss, 1)
    return alive


def tied_copies(folder, layout: dict, steps: int):
    """This stage's copy of a tied embedding after some steps."""
    worker = make_worker(folder, layout)
    for _ in range(steps):
        next_token_step(worker)
    (chunk,) = worker.chunks
    return chunk.module.shared_embedding_or_output_weight().detach().numpy().copy()


def export(folder, layout: dict, destination, precision: str = "fp32") -> None:
    make_worker(folder, layout, {"policy.precision": precision}).export(
        destination, shard_bytes=200_000
    )


def fresh_tensors(folder, layout: dict, seed: int) -> dict[str, np.ndarray]:
    """Initial weights with model.init = random, by HF name; on rank 0."""
    worker = make_worker(folder, layout, {"model.init": "random", "train.seed": seed})
    return {name: tensor.numpy().copy() for name, tensor in worker.hf_tensors()}


def save_then_continue(
    folder, layout: dict, root, before: int, after: int, precision: str = "fp32", asynchronous=False
):
    """Steps, a checkpoint, more steps: the metrics of the latter."""
    worker = make_worker(
        folder, layout, {"policy.precision": precision, "checkpoint.asynchronous": asynchronous}
    )
    for _ in range(before):
        next_token_step(worker)
    worker.save(root, LoopState(worker.step))
    metrics = [next_token_step(worker) for _ in range(after)]
    deadline = time.monotonic() + 60
    while not (Path(root) / f"step_{before}").exists() and time.monotonic() < deadline:
        worker.seal_written()  # as the loop does
        time.sleep(0.05)
    return metrics


def helper_forks_before_the_model(folder) -> bool:
    """Whether the saver's helper process runs when the model is built."""
    running = []

    def build(*arguments):
        running.append(saver.filesystem_async._results_queue is not None)
        return build_model(*arguments)

    build_model = policy_worker.build_model
    saver.filesystem_async._results_queue = None  # as in a new process
    with mock.patch.object(policy_worker, "build_model", build):
        make_worker(folder, {})
    return running == [True]


def saves(folder, root, settings: dict, count: int) -> None:
    worker = make_worker(folder, {}, settings)
    for _ in range(count):
        next_token_step(worker)
        worker.save(root, LoopState(worker.step))
    worker.finish_saving()


def load_and_continue(
    folder, layout: dict, checkpoint, steps: int, precision: str = "fp32"
) -> list[dict]:
    worker = make_worker(folder, layout, {"policy.precision": precision})
    worker.load(checkpoint)
    return [next_token_step(worker) for _ in range(steps)]


def random_numbers_after_load(folder, layout: dict, root) -> tuple:
    """The next random numbers, without and with a save and load before them."""
    worker = make_worker(folder, layout)
    next_token_step(worker)
    worker.save(root, LoopState(worker.step))
    expected = torch.rand(3).tolist()
    parallel.seed_everything(99)
    worker.load(f"{root}/step_1")
    return expected, torch.rand(3).tolist()


def loading_error(folder, layout: dict, checkpoint) -> str:
    try:
        make_worker(folder, layout).load(checkpoint)
    except ValueError as error:
        return str(error)
    return "loaded"


def who_hashes(folder, layout: dict, root) -> tuple[int, list[int]]:
    """Process ids of a background save: this rank's, and those that hashed its files."""
    worker = make_worker(folder, layout, {"checkpoint.asynchronous": True})
    pids = Path(root) / f"hashed_by_{dist.get_rank()}"

    def recording_hash_files(*arguments):
        with pids.open("a") as file:
            file.write(f"{os.getpid()}\n")
        return hash_files(*arguments)

    with mock.patch.object(saver, "hash_files", recording_hash_files):
        worker.save(Path(root) / "checkpoints", LoopState(1))
        worker.finish_saving()
    return os.getpid(), [int(line) for line in pids.read_text().split()]


def read_errors(folder, layout: dict, root, asynchronous: bool) -> tuple[str, str]:
    """The errors of a save and a load while rank 1 cannot read files."""
    worker = make_worker(folder, layout, {"checkpoint.asynchronous": asynchronous})
    worker.save(root, LoopState(1))
    worker.finish_saving()

    def broken(file, name):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def save():
        worker.save(root, LoopState(2))
        worker.finish_saving()

    with mock.patch("hashlib.file_digest", broken if dist.get_rank() == 1 else hashlib.file_digest):
        return _file_error_of(save), _file_error_of(lambda: worker.load(Path(root) / "step_1"))


def write_error_of_rank_0(folder, layout: dict, root) -> str:
    """The error of a save where `root` is a file; only rank 0 accesses it."""
    worker = make_worker(folder, layout)
    return _file_error_of(lambda: worker.save(root, LoopState(1)))


def _file_error_of(action) -> str:
    try:
        action()
    except (OSError, CheckpointError) as error:
        return str(error)
    return "no error"


def save_and_export(folder, layout: dict, root, destination) -> None:
    worker = make_worker(folder, layout)
    for _ in range(2):
        next_token_step(worker)
    worker.save(root, LoopState(worker.step))
    worker.export(destination)


UPDATE = {
    "loss.type": "ppo_clip",
    "loss.old_logprobs": "rollout",
    "loss.clip_high": 0.3,
    "routing_replay.min_agreement": 0.0,
    "optimizer.lr": update_rollouts.LR,
    "optimizer.eps": update_rollouts.EPS,
}


def updates(folder, layout: dict, combinations: list[dict], recompute: list[str]) -> list[dict]:
    """One update from the initial weights per combination of pack layout, budget and replay.

    Every rank returns the metrics, rank 0 also the parameters after the update, by HF name.
    """
    worker = make_worker(folder, layout, {**UPDATE, "policy.recompute": recompute})
    initial = [p.detach().clone() for p in worker._parameters()]
    return [_update_from(worker, initial, **combination) for combination in combinations]


def _update_from(
    worker, initial, pack_layout: str, budget_tokens: int | None, replay: bool
) -> dict:
    _reset(worker, initial)
    groups = update_rollouts.make_groups(replay)
    p = worker.config.policy.parallel
    place = parallel.place()
    worker.config.routing_replay.enabled = replay
    if budget_tokens is None:  # the smallest that holds the longest path
        longest = update_rollouts.longest_path(groups)
        budget_tokens = -(-longest // p.tensor) * p.tensor
    batches = update_rollouts.micro_batches(
        groups,
        place.data_size,
        budget_tokens,
        pack_layout,
        p.tensor,
        p.pipeline if p.virtual > 1 else 1,
    )
    (update,) = worker.learn([batches[place.data]])
    assert update.skipped is None
    result = {
        name: update.metrics[f"train/{name}"] for name in ("loss", "grad_norm", "tokens_trained")
    }
    tensors = {name: tensor.numpy().copy() for name, tensor in worker.hf_tensors()}
    return {**result, "micro_batches": len(batches[0]), "parameters": tensors}


def _reset(worker, initial) -> None:
    """Restore the initial weights and clear the optimizer's state."""
    with torch.no_grad():
        for p, start in zip(worker._parameters(), initial):
            p.copy_(start)
    for part in worker.optimizer.chained_optimizers:
        for state in part.optimizer.state.values():
            for value in state.values():
                value.zero_()


def learn_and_read(folder, layout: dict, settings: dict, root) -> dict:
    """Two calls of `learn` with mini-batches of different sizes, and all that reads weights after.

    Metrics of the updates; the gradient buckets; on rank 0 the exported tensors; logprobs of this
    rank's micro-batches under the weights and, in `reloaded`, under those of a checkpoint.
    """
    worker = make_worker(folder, layout, settings)
    batches = next_token_batches(worker, sequences=4)
    more_batches = next_token_batches(worker, sequences=12)
    assert len(batches) < len(more_batches)
    metrics = []
    exported = []
    for _ in range(2):
        metrics += [update.metrics for update in worker.learn([batches, more_batches])]
        exported.append({name: tensor.numpy().copy() for name, tensor in worker.hf_tensors()})
    worker.save(root, LoopState(1))
    logprobs = worker.logprobs(batches)
    worker.load(Path(root) / "step_1")
    return {
        "metrics": [{k: m[f"train/{k}"] for k in ("loss", "grad_norm")} for m in metrics],
        "buckets": [len(b.buckets) for chunk in worker.chunks for b in chunk.buffers],
        "exported": exported,
        "logprobs": logprobs,
        "reloaded": worker.logprobs(batches),
    }


def megatrons_settings(folder, layout: dict, settings: dict) -> dict:
    """Megatron's configs of a worker as dictionaries, and the learning rates of an update."""
    worker = make_worker(folder, layout, settings)
    next_token_step(worker)
    return {
        "TransformerConfig": _plain_fields(worker._megatron),
        "DistributedDataParallelConfig": _plain_fields(worker.chunks[0].ddp_config),
        "OptimizerConfig": _plain_fields(worker.optimizer.chained_optimizers[0].config),
        "rates": sorted({group["lr"] for group in worker.optimizer.param_groups}),
    }


def _plain_fields(config) -> dict:
    plain = (bool, int, float, str, type(None))
    return {name: value for name, value in vars(config).items() if isinstance(value, plain)}


# ---------------------------------------------------------------- the learner and its worker


class LocalPolicy:
    """The policy of a cluster as a Learner uses it, with this rank's worker only."""

    def __init__(self, worker: PolicyWorker):
        self.worker = worker

    def learn(self, by_data_rank: list) -> list:
        return self.worker.learn(by_data_rank[parallel.place().data])

    def begin(self, *arguments) -> None:
        self.worker.begin(*arguments)

    def load(self, checkpoint) -> None:
        self.worker.load(checkpoint)


class RecordingWorker(PolicyWorker):
    def update(self, micro_batches):
        update = super().update(micro_batches)
        tensors = {name: tensor.numpy().copy() for name, tensor in self.hf_tensors()}
        self.updates.append({"metrics": update.metrics, "parameters": tensors})
        return update


def learn(folder, settings: dict, batches: list) -> list[tuple[dict, list[dict]]]:
    """Per batch of groups: the learner's metrics, and metrics and parameters of each update."""
    config = make_config(folder, {}, settings)
    parallel.start(config.policy.parallel, *ranks.current)
    worker = RecordingWorker(config)
    learner = Learner(config, LocalPolicy(worker))
    found = []
    for groups in batches:
        worker.updates = []
        found.append((learner.learn(groups), worker.updates))
    return found


def warm_start(folder, settings: dict, groups: list) -> dict[str, list]:
    """Losses of a warm start on demonstrations; temperature and loss type per step and after."""
    config = make_config(folder, {}, settings)
    parallel.start(config.policy.parallel, *ranks.current)
    worker = PolicyWorker(config)
    found: dict[str, list] = {"losses": [], "temperatures": [], "kinds": []}

    def record() -> None:
        found["temperatures"].append(worker.temperature)
        found["kinds"].append(worker.loss.type)

    def on_step(metrics: dict[str, float]) -> None:
        found["losses"].append(metrics["train/loss"])
        record()

    Learner(config, LocalPolicy(worker)).warm_start(groups, on_step)
    record()
    return found


def rows_kept(folder, settings: dict) -> set[int]:
    """The `kept_rows` arguments of `prepare`."""
    from megastep.policy import worker as module

    worker = make_worker(folder, {}, settings)
    with mock.patch.object(module, "prepare", wraps=module.prepare) as prepare:
        next_token_step(worker)
    return {call.args[3] for call in prepare.call_args_list}


def bucket_sizes(folder, settings: dict) -> list[int]:
    """Bytes of the shared-memory buckets of a weight sync."""
    from types import SimpleNamespace

    from megastep.sync.shm_transport import ShmTransport

    worker = make_worker(folder, {}, settings)
    engines = SimpleNamespace(init_weight_transfer_engine=lambda info: None)
    transport = ShmTransport(worker.chunks, worker.arch, worker.config, engines)
    return [bucket.nbytes for bucket in transport.buckets]


def order_of_a_gather(folder, layout: dict) -> str:
    """What `gather_hf` does, in order: b broadcast, w wait for the GPU, r read by the caller,
    f memory of a tensor freed."""
    from megastep.weights import megatron

    worker = make_worker(folder, layout)
    events: list[str] = []
    broadcast = dist.broadcast

    def record_broadcast(message, src):
        events.append("b")
        broadcast(message, src=src)

    with (
        mock.patch.object(megatron.parallel, "synchronize", lambda: events.append("w")),
        mock.patch.object(megatron.dist, "broadcast", record_broadcast),
    ):
        for _, tensor in megatron.gather_hf(worker.chunks, worker.arch, bucket_bytes=1 << 18):
            events.append("r")
            weakref.finalize(tensor, events.append, "f")
            del tensor
    return "".join(events)


# ---------------------------------------------------------------- logprobs, routing, failures


def batches_of(worker, groups, budget_tokens: int = 4096, pack_layout: str = "trie"):
    place = parallel.place()
    p = worker.config.policy.parallel
    rounds_of = p.pipeline if p.virtual > 1 else 1
    by_rank = update_rollouts.micro_batches(
        groups, place.data_size, budget_tokens, pack_layout, p.tensor, rounds_of
    )
    return by_rank[place.data]


def by_step(batches, values) -> dict:
    """{(group, trajectory, step): values of its rows}; empty on ranks without the output layer."""
    found: dict[tuple, list] = {}
    for batch, column in zip(batches, values):
        loss = batch.trie.loss
        keys = list(zip(loss.group.tolist(), loss.trajectory.tolist(), loss.step.tolist()))
        for row, key in enumerate(keys):
            if key[0] >= 0:
                found.setdefault(key, []).append(column[row])
    return {key: np.array(column) for key, column in found.items()}


def logprobs_by_reference(folder, layout: dict) -> tuple[dict, dict, int, int]:
    """Logprobs with routing in the steps' arrays, and by reference; the bytes that the rank fetched
    for these, and those of all layers."""
    worker = make_worker(folder, layout, {"loss.type": "reinforce", "routing_replay.enabled": True})
    groups = update_rollouts.make_groups(replay=True)
    batches = batches_of(worker, groups)
    plain = by_step(batches, worker.logprobs(batches))

    references: dict = {}
    stages = worker.config.policy.parallel.stages(worker.arch.layers)
    stored = [by_reference(group, Layout(stages), references) for group in groups]
    batches = batches_of(worker, stored)
    stage = parallel.place().pipeline
    tables = tables_of(routing_of_batches(batches))
    of_stage = [table.references[stage] for table in tables]
    routing = RoutingFetch([batches], of_stage, stage, worker.replayed_layers, resolver(references))
    for ready in routing.one_ahead([batches]):
        fetched = by_step(ready, worker.logprobs(ready))
    return plain, fetched, routing.fetched_bytes, sum(table.nbytes for table in tables)


def logprobs_of(
    folder, layout: dict, groups, replay: bool = True, temperature: float = 1.0
) -> dict:
    settings = {
        "loss.type": "reinforce",
        "routing_replay.enabled": replay,
        "rollout.temperature": temperature,
    }
    worker = make_worker(folder, layout, settings)
    batches = batches_of(worker, groups)
    return by_step(batches, worker.logprobs(batches))


def train_a_little(
    folder, layout: dict, groups, settings: dict, pack_layout: str, updates: int = 1
) -> dict:
    """Logprobs by step before and after some updates on these groups, and the metrics of each."""
    worker = make_worker(folder, layout, {**UPDATE, **settings})
    batches = batches_of(worker, groups, pack_layout=pack_layout)
    before = by_step(batches, worker.logprobs(batches))
    metrics = []
    for _ in range(updates):
        update = worker.update(batches)
        assert update.skipped is None, update.skipped
        metrics.append(update.metrics)
    return {
        "before": before,
        "after": by_step(batches, worker.logprobs(batches)),
        "metrics": metrics,
        "memory": resident(worker),
    }


def old_logprobs(folder, layout: dict, groups, budget_tokens: int) -> dict:
    worker = make_worker(folder, layout)
    batches = batches_of(worker, groups, budget_tokens)
    worker.compute_old_logprobs(batches)
    with_head = [b for b in batches if b.trie.loss.old_logprob is not None]
    return by_step(with_head, [b.trie.loss.old_logprob for b in with_head])


def teacher_after_update(folder, teacher, layout: dict, groups, temperature: float) -> dict:
    """The teacher's logprobs after an update of the student."""
    settings = {
        "loss.type": "distill",
        "loss.teacher": str(teacher),
        "optimizer.lr": 1e-2,
        "rollout.temperature": temperature,
        "routing_replay.enabled": True,
        "routing_replay.min_agreement": 0.0,
    }
    worker = make_worker(folder, layout, settings)
    batches = batches_of(worker, groups)
    worker.learn([batches])
    worker.compute_teacher_logprobs(batches)
    with_head = [b for b in batches if b.trie.loss.teacher_logprob is not None]
    return by_step(with_head, [b.trie.loss.teacher_logprob for b in with_head])


def reference_after_updates(folder, layout: dict, groups) -> list[dict]:
    worker = make_worker(
        folder, layout, {"loss.kl_coef": 0.1, "loss.type": "reinforce", "optimizer.lr": 1e-2}
    )
    batches = batches_of(worker, groups)
    before = by_step(batches, worker.logprobs(batches))
    worker.compute_reference_logprobs(batches)
    for _ in range(2):
        worker.update(batches)
    after = by_step(batches, worker.logprobs(batches))
    worker.compute_reference_logprobs(batches)
    reference = by_step(batches, [b.trie.loss.ref_logprob for b in batches])
    return [before, after, reference, by_step(batches, worker.logprobs(batches))]


def shifted_then_right(folder, layout: dict, shifted, groups) -> tuple:
    worker = make_worker(folder, layout, {"loss.type": "reinforce", "routing_replay.enabled": True})
    before = [p.detach().clone() for p in worker._parameters()]
    try:
        worker.update(batches_of(worker, shifted))
        error = "trained on it"
    except ReplayError as found:
        error = str(found)
    unchanged = all(torch.equal(p, b) for p, b in zip(worker._parameters(), before))
    if any(step.routing is None for step in update_rollouts.steps_of(groups)):
        return error, unchanged, None
    metrics = worker.update(batches_of(worker, groups)).metrics
    return error, unchanged, metrics["routing_replay/agreement"]


def nonfinite_then_finite_update(folder, layout: dict, nonfinite: str) -> tuple:
    worker = make_worker(
        folder, layout, {"loss.type": "reinforce", "routing_replay.enabled": False}
    )
    batches = batches_of(worker, update_rollouts.make_groups(replay=False))
    hook = None
    if nonfinite == "advantage":
        for batch in batches:
            loss = batch.trie.loss
            loss.advantage[(loss.group == 1) & (loss.trajectory == 2) & (loss.step == 0)] = np.nan
    else:
        weight = next(p for n, p in worker.chunks[0].named_parameters() if "linear_qkv.weight" in n)
        hook = weight.register_hook(lambda grad: grad * float("inf"))
    before = [p.detach().clone() for p in worker._parameters()]
    bad = worker.update(batches)
    unchanged = all(torch.equal(p, b) for p, b in zip(worker._parameters(), before))
    if hook is not None:
        hook.remove()
    good = worker.update(batches_of(worker, update_rollouts.make_groups(replay=False)))
    changed = any(not torch.equal(p, b) for p, b in zip(worker._parameters(), before))
    return bad.skipped, bad.metrics["train/skipped"], unchanged, changed, good.skipped


def router_loss_gradients(
    folder, layout: dict, align: int, paddings: int, settings: dict | None = None
) -> dict[str, np.ndarray]:
    """Gradients of the router losses only, by HF name.

    The first data rank has a micro-batch of some_tokens; all others are padding. With this eps Adam
    subtracts the gradient unchanged.
    """
    of_routers = {"policy.moe_aux_loss_coef": 0.3, "policy.moe_z_loss_coef": 0.02}
    adam = {"optimizer.lr": 1e5, "optimizer.eps": 1e5, "optimizer.clip_grad": 0.0}
    worker = make_worker(folder, layout, {**of_routers, **adam, **(settings or {})})
    tokens = some_tokens().numpy().astype(np.int32)
    samples = [
        Sample(step(0, t[:1], t[1:]), i, 0, advantage=1.0, weight=0.0) for i, t in enumerate(tokens)
    ]
    [[real]], _ = lay_out(
        samples, ranks=1, budget_tokens=128, align_tokens=align, pack_layout="flat"
    )
    batches = [join([], align, None) for _ in range(1 + paddings)]
    if parallel.place().data == 0:
        batches[0] = real
    before = {name: tensor.numpy().copy() for name, tensor in worker.hf_tensors()}
    assert worker.update(batches).skipped is None
    return {name: before[name] - tensor.numpy() for name, tensor in worker.hf_tensors()}


def empty_update(folder, layout: dict) -> dict:
    """Three mini-batches: the second is padding, the others are all on the first data rank."""
    worker = make_worker(
        folder,
        layout,
        {
            "loss.type": "reinforce",
            "loss.kl_coef": 0.1,
            "optimizer.schedule": "linear",
            "policy.moe_z_loss_coef": 0.1,
        },
    )
    worker.begin(worker.config.optimizer, worker.config.policy_loss, optimizer_steps=4)
    align = worker.config.policy.parallel.tensor
    groups = update_rollouts.make_groups(replay=False)
    real = update_rollouts.micro_batches(groups, 1, 4096, "trie", align)[0]
    paddings = [join([], align, None) for _ in real]
    mine = real if parallel.place().data == 0 else paddings
    trains = worker.learn([mine])[0]
    weights, adam = _weights_and_adam(worker)
    empty = worker.learn([paddings])[0]
    weights_then, adam_then = _weights_and_adam(worker)
    trains_again = worker.learn([mine])[0]
    return {
        "metrics": [trains.metrics, empty.metrics, trains_again.metrics],
        "skipped": empty.skipped,
        "unchanged": all(map(torch.equal, weights, weights_then))
        and all(map(torch.equal, adam, adam_then)),
        "changed_again": not all(map(torch.equal, weights, _weights_and_adam(worker)[0])),
        "steps": worker.step,
    }


def learn_with_masked(folder, masked: list[list[int]]) -> list[tuple[dict, bool]]:
    """Per batch of two prompts, each a mini-batch: metrics, and whether the weights changed.

    `masked`: the ids of truncated prompts, per batch.
    """
    from megastep.samples import filters

    worker = make_worker(
        folder,
        {},
        {
            "loss.type": "reinforce",
            "filters.truncated": "mask",
            "rollout.prompts": 2,
            "train.mini_batch_prompts": 1,
        },
    )
    learner = Learner(worker.config, LocalPolicy(worker))
    found = []
    for ids in masked:
        groups = update_rollouts.make_groups(replay=False)
        for trajectory in [t for group in groups for t in group.trajectories if group.id in ids]:
            trajectory.steps[-1].finish = FinishReason.LENGTH
        before, _ = _weights_and_adam(worker)
        metrics = learner.learn(filters.apply(groups, worker.config)[0])
        found.append((metrics, not all(map(torch.equal, before, worker._parameters()))))
    return found


def fresh_then_trained(folder, layout: dict, root, groups) -> tuple[dict, dict]:
    """Logprobs of fresh weights, and of the checkpoint after two updates."""
    worker = make_worker(folder, layout, FRESH_WITH_REFERENCE)
    batches = batches_of(worker, groups)
    fresh = by_step(batches, worker.logprobs(batches))
    for _ in range(2):
        worker.learn([batches])
    worker.save(root / "checkpoints", LoopState(2))
    return fresh, by_step(batches, worker.logprobs(batches))


def resumed_reference(folder, layout: dict, root, groups) -> tuple[dict, dict]:
    """Logprobs of the reference and of the policy in a run resumed from that checkpoint."""
    from megastep.trainer.learner import load_policy
    from megastep.trainer.rundir import Run

    worker = make_worker(folder, layout, FRESH_WITH_REFERENCE)
    run = Run(root, root / "checkpoints" / "step_2", LoopState(2))
    load_policy(run, Learner(worker.config, LocalPolicy(worker)))
    batches = batches_of(worker, groups)
    worker.compute_reference_logprobs(batches)
    with_head = [b for b in batches if b.trie.loss.ref_logprob is not None]
    reference = by_step(with_head, [b.trie.loss.ref_logprob for b in with_head])
    return reference, by_step(batches, worker.logprobs(batches))


FRESH_WITH_REFERENCE = {
    "model.init": "random",
    "loss.kl_coef": 0.1,
    "loss.type": "reinforce",
    "optimizer.lr": 1e-2,
}


def _weights_and_adam(worker) -> tuple[list, list]:
    states = [
        s for part in worker.optimizer.chained_optimizers for s in part.optimizer.state.values()
    ]
    adam = [value.clone() for state in states for value in state.values()]
    return [p.detach().clone() for p in worker._parameters()], adam


def learning_rates(folder, root, schedules: list[tuple[dict, int, int]]) -> list[tuple[list, list]]:
    """Per schedule: the learning rate that each update reports, and the largest change of a weight,
    which equals it without momentum. `resume` > 0: save and load after so many updates."""
    results = []
    worker = make_worker(folder, {}, {"optimizer.betas": [0.0, 0.0], "optimizer.eps": 1e-12})
    for number, (settings, steps, resume) in enumerate(schedules):
        optimizer = replace(worker.config.optimizer, **settings)
        worker.begin(optimizer, worker.config.policy_loss, steps)
        rates, moved = [], []
        for n in range(steps):
            if n == resume > 0:
                worker.save(f"{root}/{number}", LoopState(n))
                worker.begin(optimizer, worker.config.policy_loss, steps)
                worker.load(f"{root}/{number}/step_{n}")
            before = [p.detach().clone() for p in worker._parameters()]
            rates.append(next_token_step(worker)["lr"])
            moved.append(
                max((p - b).abs().max().item() for p, b in zip(worker._parameters(), before))
            )
        results.append((rates, moved))
    return results


def error_of_overflowing_update(folder, layout: dict, settings: dict) -> str:
    worker = make_worker(folder, layout, settings)
    return _error_of(lambda: next_token_step(worker))


def errors_with_nonfinite_weight(
    folder, layout: dict, root, bad_rank: int, value: float
) -> list[str]:
    """The errors of a save and an export where one element on one rank is not finite."""
    worker = make_worker(folder, layout)
    if parallel.place().rank == bad_rank:
        named = worker.chunks[-1].named_parameters()
        weight = [p for n, p in named if "linear_proj.weight" in n][-1]
        weight.detach().view(-1)[5] = value
    return [
        _error_of(lambda: worker.save(root / "checkpoints", LoopState(3))),
        _error_of(lambda: worker.export(root / "exported")),
    ]


def _error_of(action) -> str:
    try:
        action()
    except TrainingError as error:
        return str(error)
    return "no error"


def attach_replay_with(folder, setting: str, value) -> str:
    """The error of routing replay where Megatron's config has this value."""
    from megastep.policy import routing_replay

    worker = make_worker(folder, {})
    chunk = worker.chunks[0].module
    setattr(chunk.config, setting, value)
    try:
        routing_replay.attach(chunk)
    except ReplayError as error:
        return str(error)
    return "attached"


# ---------------------------------------------------------------- reports on other trainers


def logprobs_after_a_discarded_decoder(folder, groups) -> dict:
    """logprobs_of, with a model that builds its decoder twice and keeps the second."""
    from megatron.core.models.gpt import gpt_model

    build = gpt_model.TransformerBlock

    def build_twice(*arguments, **named):
        build(*arguments, **named)
        return build(*arguments, **named)

    with mock.patch.object(gpt_model, "TransformerBlock", build_twice):
        return logprobs_of(folder, {}, groups)


def update_after_forward_passes(folder, groups, before: list, align: int) -> tuple:
    """One update under recomputation, after forward-only passes over the groups `before` and with
    padding: parameters, layers with unused routing, and replayed choices of each layer."""
    worker = make_worker(
        folder, {}, {**UPDATE, "routing_replay.enabled": True, "policy.recompute": ["full"]}
    )
    for passed in before:
        worker.logprobs(batches_of(worker, passed))
    (batches,) = update_rollouts.micro_batches(groups, 1, 4096, "trie", align)
    paddings = [
        join([], align, (update_rollouts.LAYERS, update_rollouts.TOP_K)) for _ in range(align > 1)
    ]
    assert worker.update([*batches, *paddings]).skipped is None
    layers = worker._all_layer_replays()
    unused = [x.layer for x in layers if x.target is not None or x.recompute_targets]
    parameters = [p.detach().numpy().copy() for p in worker._parameters()]
    return parameters, unused, [int(layer.recorded) for layer in layers]


# ---------------------------------------------------------------- memory


def memory_while_offloaded(folder, layout: dict, settings: dict) -> dict[str, int]:
    """Bytes of tensors on this rank's device: while training, offloaded, and onloaded again."""
    worker, batches = worker_and_batches(folder, layout, settings, tokens=64, micro_batches=1)
    worker.update(batches)
    found = {"training": _device_bytes(worker)}
    worker.offload()
    found["offloaded"] = _device_bytes(worker)
    worker.onload()
    found["onloaded"] = _device_bytes(worker)
    assert worker.update(batches).skipped is None
    return found


def _device_bytes(worker: PolicyWorker) -> int:
    if torch.cuda.is_available():
        gc.collect()
        return torch.cuda.memory_allocated()
    # Adam's state is in CPU memory before and after.
    weights = sum(p.nbytes for p in worker._parameters())
    return weights + sum(p.main_grad.untyped_storage().nbytes() for p in worker._parameters())


def memory_of_update(
    folder, layout: dict, settings: dict, tokens: int, micro_batches: int
) -> dict[str, int]:
    """Resident bytes of this rank, and the peak that one pass over the micro-batches adds."""
    worker, batches = worker_and_batches(folder, layout, settings, tokens, micro_batches)
    worker.update(batches)  # allocates the resident tensors
    # The lowest of three: on a busy machine gloo's threads free their buffers late, which adds up
    # to a third.
    passes = [_peak_allocated(lambda: worker._run(batches, worker._loss)) for _ in range(3)]
    return resident(worker) | {"activations": min(passes)}


def worker_and_batches(
    folder, layout: dict, settings: dict, tokens: int, micro_batches: int
) -> tuple:
    """A worker, and micro-batches of `tokens` tokens, all of them trained."""
    worker = make_worker(folder, layout, settings)
    vocab = worker.arch.vocab
    ids = np.random.default_rng(0).integers(
        vocab, size=(micro_batches * parallel.place().data_size, tokens + 1)
    )
    samples = [
        Sample(step(0, row[:1], row[1:]), i, 0, advantage=1.0, weight=1e-3)
        for i, row in enumerate(ids.astype(np.int32))
    ]
    batches, _ = lay_out(
        samples,
        parallel.place().data_size,
        budget_tokens=tokens,
        pack_layout="flat",
        align_tokens=worker.config.policy.parallel.tensor,
    )
    mine = batches[parallel.place().data]
    assert len(mine) == micro_batches
    return worker, mine


def resident(worker: PolicyWorker) -> dict[str, int]:
    buffers = [b for chunk in worker.chunks for b in chunk.buffers + chunk.expert_parallel_buffers]
    optimizer = 0
    for part in worker.optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            for param in group["params"]:
                state = [v for k, v in part.optimizer.state[param].items() if k != "step"]
                # In fp32 the optimizer updates the weight itself: there is no master copy.
                if param.dtype != worker._megatron.params_dtype:
                    state.append(param)
                optimizer += sum(t.nbytes for t in state if t.device == param.device)
    return {
        "weights": sum(b.param_data.nbytes for b in buffers),
        "optimizer": optimizer,
        "gradients": sum(b.grad_data.nbytes for b in buffers),
    }


def _peak_allocated(run) -> int:
    """On a CPU by torch's profiler: the peak of the sum of all allocations and releases."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        run()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    return int(np.cumsum([e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]).max())
