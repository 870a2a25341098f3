"""The loop.

    driver    run directory, ranks, progress, metrics
    ranks     policy ← checkpoint; for each step: batch → update → save

The ranks train next-token prediction on walks through a hidden permutation: the table can be learned, and then
the loss falls from ln(vocabulary) to that of the first token alone.
"""

import os
import signal
import socket
import sys
import time
import traceback
from dataclasses import asdict
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch
import torch.multiprocessing as mp
from tqdm import tqdm

from megastep.architecture import read_architecture
from megastep.config import Config, to_yaml
from megastep.lifetime import end_with_parent
from megastep.policy.manifest import latest, read_manifest, refuse_other_model
from megastep.report import MetricsLog
from megastep.sync.convert import refuse_other_shape, rows_of
from megastep.sync.hf_files import HFReader


class RankError(RuntimeError):
    """A rank failed; the message is its traceback."""


# ---------------------------------------------------------------- driver


def train(config: Config, name: str) -> Path:
    """Run the configured job and return its run directory."""
    folder = Path(config.run.dir) / (config.run.name or f"{name}-{time.strftime('%Y%m%d-%H%M%S')}")
    resume = where_to_resume(config, folder)
    refuse_unfit_weights(config)
    done = read_manifest(resume)["step"] if resume else 0
    if done >= config.train.steps:
        print(f"{folder}: has its {done} steps already; raise train.steps to go on")
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(to_yaml(config))
    print(f"{folder}: " + (f"continues after step {done}" if done else "a new run"))
    log = MetricsLog(folder, done, config.run.wandb, asdict(config))
    first = last = None
    with Ranks(config, folder, resume) as ranks, progress(config, done) as bar:
        for step, metrics in ranks.results():
            log.write(step, metrics)
            last = metrics["train/loss"]
            first = last if first is None else first
            bar.set_postfix(loss=f"{last:.3f}", refresh=False)
            bar.update()
    log.close()
    saved = latest(folder / "checkpoints")
    print(f"loss {first:.3f} → {last:.3f}; metrics in {folder}/metrics.jsonl, checkpoint in {saved}")
    python = os.path.relpath(sys.executable)
    print(f"to use it elsewhere: {python} tools/convert_ckpt.py export {saved} HF_FOLDER")
    return folder


def where_to_resume(config: Config, folder: Path) -> Path | None:
    """The checkpoint to start from, checked."""
    if config.run.resume == "never":
        return None
    found = latest(folder / "checkpoints") if config.run.resume == "auto" else Path(config.run.resume)
    if found is not None:
        ours = read_architecture(config.model.path).hf
        refuse_other_model(found, read_manifest(found)["model"], ours)
    return found


def refuse_unfit_weights(config: Config) -> None:
    """Every tensor is there and has the shape that config.json gives it; only headers are read."""
    if config.model.init != "hf":
        return
    reader = HFReader(config.model.path)
    for row in rows_of(read_architecture(config.model.path)).values():
        for name, shape in row.hf:
            refuse_other_shape(name, reader.shape(name), shape)


def progress(config: Config, done: int) -> tqdm:
    return tqdm(total=config.train.steps, initial=done, desc="train", unit="step", file=sys.stdout, mininterval=0.5)


class Ranks:
    """The policy's processes. They end with the block, and with the driver if that is killed."""

    def __init__(self, config: Config, folder: Path, resume: Path | None):
        context = mp.get_context("spawn")
        self.log = folder / "log.txt"
        self.processes, self.pipes = [], []
        address = f"127.0.0.1:{_free_port()}"
        for rank in range(config.policy.ranks):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=rank_main, args=(rank, config, folder, resume, address, sender))
            process.start()
            sender.close()
            self.processes.append(process)
            self.pipes.append(receiver)

    def results(self):
        """(step, metrics) of each step; ends when all ranks have ended well."""
        open_pipes = list(self.pipes)
        while open_pipes:
            for pipe in wait(open_pipes):
                try:
                    kind, content = pipe.recv()
                except EOFError:  # this rank has ended
                    open_pipes.remove(pipe)
                    self._refuse_bad_end(self.pipes.index(pipe))
                    continue
                if kind == "error":
                    raise RankError(content)
                yield content

    def _refuse_bad_end(self, rank: int) -> None:
        self.processes[rank].join()
        code = self.processes[rank].exitcode
        if code != 0:
            raise RankError(f"rank {rank} ended with exit code {code}; its output is in {self.log}")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            if process.is_alive():
                process.kill()
        for process in self.processes:
            process.join()


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


# ---------------------------------------------------------------- one rank


def rank_main(rank: int, config: Config, folder: Path, resume: Path | None, address: str, results: Connection) -> None:
    os.environ["LOCAL_RANK"] = str(rank)  # which GPU: all ranks are on this machine
    _end_with_driver()
    _send_output_to(folder / "log.txt")
    try:
        run_rank(rank, config, folder, resume, address, results)
    except BaseException:
        results.send(("error", f"rank {rank}:\n{traceback.format_exc()}"))
        raise


def run_rank(rank: int, config: Config, folder: Path, resume: Path | None, address: str, results: Connection) -> None:
    from megastep.policy import parallel
    from megastep.policy.worker import PolicyWorker

    parallel.start(config.policy.parallel, rank, config.policy.ranks, address)
    policy = PolicyWorker(config)
    if resume:
        policy.load(resume)
    data = Walks(policy.arch.vocab, config.train.seed)
    while policy.step < config.train.steps:
        begin = time.perf_counter()
        batch = data.batch(policy.step, config.train.batch_sequences, config.train.sequence_tokens)
        metrics = {f"train/{key}": value for key, value in policy.train_step(batch).items()}
        metrics["time/step_s"] = time.perf_counter() - begin
        if rank == 0:
            results.send(("step", (policy.step, metrics)))
        every = config.checkpoint.every_steps
        if policy.step == config.train.steps or (every and policy.step % every == 0):
            policy.save(folder / "checkpoints")
    policy.finish_saving()
    parallel.stop()


class Walks:
    """Sequences that follow one hidden permutation of the vocabulary, each from a random start."""

    def __init__(self, vocab: int, seed: int):
        self.vocab, self.seed = vocab, seed
        self.next = torch.randperm(vocab, generator=torch.Generator().manual_seed(seed))

    def batch(self, step: int, sequences: int, length: int) -> torch.Tensor:
        """tokens [sequences, length]; depends on nothing but the seed and the step."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step + 1)
        token = torch.randint(self.vocab, (sequences,), generator=generator)
        tokens = [token]
        for _ in range(length - 1):
            token = self.next[token]
            tokens.append(token)
        return torch.stack(tokens, dim=1)


def _send_output_to(path: Path) -> None:
    """Megatron's and torch's chatter goes to the log, file descriptors included."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)


def _end_with_driver() -> None:
    """Ctrl-C is the driver's to handle, and a killed driver must not leave ranks behind."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
