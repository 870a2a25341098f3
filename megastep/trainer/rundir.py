"""The run directory, and the checkpoint that a run resumes from.

runs/NAME/config.yaml     resolved, without secrets
          metrics.jsonl   a line per training step; step 0 is before the first
          log.txt         logs of Ray actors, vLLM and Megatron
          start/step_0/   the policy after the warm start, also the KL reference
          origin.json     the checkpoint of another run that this one started from, and the KL
                          reference of that run
          checkpoints/step_N/
          rollouts/latest.safetensors     trajectories for the report (run.report_prompts)
          rollouts/step_N.safetensors     with run.rollouts_every
          wandb/ wandb_id
          lock            held by the writing process; the kernel releases it
"""

import fcntl
import json
import os
import socket
import time
import weakref
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from megastep.checkpoint.loop_state import LoopState
from megastep.checkpoint.manifest import (
    check_same_model,
    check_types,
    latest,
    read_manifest,
    read_object,
)
from megastep.checkpoint.unpickle import check_no_code
from megastep.config import Config, to_yaml
from megastep.errors import CheckpointError, RunDirError
from megastep.files import atomic_write
from megastep.models.architecture import read_architecture
from megastep.report.run_report import LATEST
from megastep.weights.hf_files import check_complete

_ORIGIN, _LOCK = "origin.json", "lock"


@dataclass
class Run:
    folder: Path
    checkpoint: Path | None  # to resume from; None: a new run
    state: LoopState
    newest: Path | None = None  # the newest checkpoint when the folder was read

    @classmethod
    def find(cls, config: Config, name: str) -> "Run":
        own_name = config.run.name or f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
        folder = Path(config.run.dir) / own_name
        resume = config.run.resume
        origin = Origin.read(folder)
        if origin is not None and Path(resume).resolve() == origin.checkpoint:
            resume = "auto"  # the same command again: continue the run that it started
        checkpoint = where_to_resume(config, folder, resume)
        if checkpoint is None:
            check_weights_fit(config)
        if config.loss.teacher is not None:
            check_complete(config.loss.teacher)
        state = LoopState.read(checkpoint) if checkpoint else LoopState(step=0)
        check_not_newer(folder, state.step)
        run = cls(folder, checkpoint, state, latest(folder / "checkpoints"))
        reference = run.reference() if config.loss.kl_coef > 0 and state.step > 0 else None
        if reference is not None:
            read_manifest(reference)  # raises if it is gone
            check_no_code(reference)
        return run

    def create(self, config: Config) -> None:
        """Lock the run directory; raises if another process has written to it since `find`."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.lock = lock(self.folder)
            if latest(self.checkpoints) != self.newest:
                raise RunDirError(
                    f"{self.folder}: another process has just written to it; start again"
                )
            if self.comes_from_another and self.state.step > 0 and latest(self.start):
                raise RunDirError(
                    f"run.name = {self.folder.name}: has a start of its own, {self.start}, and "
                    f"cannot continue {self.checkpoint}; give another name"
                )
            write_config(self.folder, config)
            if self.comes_from_another:
                assert self.checkpoint is not None
                Origin(self.checkpoint, self.reference()).write(self.folder)
            elif self.checkpoint is None:
                (self.folder / _ORIGIN).unlink(missing_ok=True)
        except OSError as error:
            raise RunDirError(f"{self.folder}: cannot be written ({error.strerror})") from None

    def at_newest(self, config: Config) -> "Run":
        """This run as the next process would find it; without a checkpoint, as this one did."""
        resume = "auto" if latest(self.checkpoints) else config.run.resume
        settings = replace(config.run, name=self.folder.name, resume=resume)
        run = Run.find(replace(config, run=settings), self.folder.name)
        run.lock = self.lock
        return run

    def resume_hint(self) -> str:
        saved = latest(self.checkpoints) or latest(self.start)
        if saved is None:
            return "no checkpoint was written yet"
        return f"to resume from {saved}: the same command with run.name={self.folder.name}"

    @property
    def where_it_begins(self) -> str:
        return f"after step {self.state.step}" if self.checkpoint else "from the beginning"

    @property
    def last_row(self) -> int:
        """The last training step whose metrics are kept; a new run writes step 0."""
        return self.state.step or -1

    @property
    def log(self) -> Path:
        return self.folder / "log.txt"

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def start(self) -> Path:
        return self.folder / "start"

    @property
    def comes_from_another(self) -> bool:
        return self.checkpoint is not None and _run_of(self.checkpoint) != self.folder.resolve()

    def reference(self) -> Path | None:
        """The policy that the checkpoint's run started from; None: the weights of `model`."""
        assert self.checkpoint is not None
        folder = _run_of(self.checkpoint)
        start = folder / "start" / "step_0"
        if start.is_dir():
            return start
        origin = Origin.read(folder)
        return origin.reference if origin is not None else None

    def rollouts(self, step: int) -> Path:
        return self.latest_rollouts.with_name(f"step_{step}.safetensors")

    @property
    def latest_rollouts(self) -> Path:
        path = self.folder / LATEST
        path.parent.mkdir(exist_ok=True)
        return path


@dataclass
class Origin:
    checkpoint: Path
    reference: Path | None

    def write(self, folder: Path) -> None:
        paths = {name: path and str(path.resolve()) for name, path in vars(self).items()}
        atomic_write(folder / _ORIGIN, json.dumps(paths))

    @classmethod
    def read(cls, folder: Path) -> "Origin | None":
        if not (folder / _ORIGIN).is_file():
            return None
        paths = read_object(folder / _ORIGIN)
        check_types(folder / _ORIGIN, paths, {"checkpoint": str, "reference": (str, type(None))})
        return cls(Path(paths["checkpoint"]), paths["reference"] and Path(paths["reference"]))


def write_config(folder: Path, config: Config) -> None:
    """Readable by its owner only: a secret may be in a value that is not redacted."""
    path = folder / "config.yaml"
    path.touch(mode=0o600)
    path.chmod(0o600)
    path.write_text(to_yaml(config))


def lock(folder: Path) -> IO[str]:
    """Hold the folder as long as the file is open; the kernel releases it when the process ends.

    Children do not inherit it: the file closes on exec, and after a fork below.
    """
    file = (folder / _LOCK).open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read(200).strip() or "another process"
        advice = "wait for it to end, stop it, or give another run.name"
        raise RunDirError(f"{folder}: in use by {holder}; {advice}") from None
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    reference = weakref.ref(file)

    def close_in_child() -> None:
        held = reference()
        if held is not None:
            held.close()

    os.register_at_fork(after_in_child=close_in_child)
    return file


def _run_of(checkpoint: Path) -> Path:
    return checkpoint.resolve().parent.parent


def check_not_newer(folder: Path, step: int) -> None:
    """Newer checkpoints would be taken for this run's own, and its own be removed."""
    newest = latest(folder / "checkpoints")
    if newest is not None and read_manifest(newest)["step"] > step:
        raise CheckpointError(
            f"{newest}: is ahead of step {step}, where run.resume lets this run begin; give "
            "another run.name, or run.resume=auto to resume from it"
        )


def where_to_resume(config: Config, folder: Path, resume: str) -> Path | None:
    """The checkpoint to start from, checked."""
    if resume == "never":
        return None
    found: Path | None = Path(resume)
    if resume == "auto":
        origin = Origin.read(folder)
        found = latest(folder / "checkpoints") or latest(folder / "start")
        if found is None and origin is not None:
            found = origin.checkpoint
    if found is not None:
        ours = read_architecture(config.model.path).hf
        check_same_model(found, read_manifest(found)["model"], ours)
        check_no_code(found)
    return found


def check_weights_fit(config: Config) -> None:
    """Every tensor exists with the shape that config.json implies; reads headers only."""
    if config.model.init == "hf":
        check_complete(config.model.path)
