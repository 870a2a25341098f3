"""The run directory: where a run keeps what it has, and where it goes on.

runs/NAME/config.yaml     as resolved, without secrets
          metrics.jsonl   a line per step; step 0 is before the first
          log.txt         what Ray's actors, vLLM and Megatron say
          start/step_0/   the policy after the warm start, which is also the reference of the KL
          origin.json     of a run that began with the checkpoint of another: which, and the other's reference
          checkpoints/step_N/
          rollouts/latest.safetensors     trajectories for the report (run.report_prompts)
          rollouts/step_N.safetensors     with run.rollouts_every
          wandb/ wandb_id
          lock            held by the process that writes here; it ends with that process, however that ends
"""

import fcntl
import json
import os
import socket
import time
import weakref
from dataclasses import dataclass
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
from megastep.report.writing import LATEST
from megastep.weights.hf_files import HFReader
from megastep.weights.mapping import check_shape, param_mappings

_ORIGIN, _LOCK = "origin.json", "lock"


@dataclass
class Run:
    folder: Path
    checkpoint: Path | None  # to go on from; None: a new run
    state: LoopState
    newest: Path | None = None  # checkpoint in the folder when it was looked at

    @classmethod
    def find(cls, config: Config, name: str) -> "Run":
        folder = Path(config.run.dir) / (
            config.run.name or f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
        )
        resume, origin = config.run.resume, Origin.read(folder)
        if origin is not None and Path(resume).resolve() == origin.checkpoint:
            resume = "auto"  # the same command goes on with what it began
        checkpoint = where_to_resume(config, folder, resume)
        if checkpoint is None:
            check_weights_fit(config)
        state = LoopState.read(checkpoint) if checkpoint else LoopState(step=0)
        check_not_newer(folder, state.step)
        run = cls(folder, checkpoint, state, latest(folder / "checkpoints"))
        reference = run.reference() if config.loss.kl_coef > 0 and state.step > 0 else None
        if reference is not None:
            read_manifest(reference)  # refuses one that is gone
            check_no_code(reference)
        return run

    def create(self, config: Config) -> None:
        """Make the run directory this process's own. Nobody else may have gone on with it since `find`."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.lock = lock(self.folder)
            if latest(self.checkpoints) != self.newest:
                raise RunDirError(
                    f"{self.folder}: another process has just written to it; start again"
                )
            write_config(self.folder, config)
            if self.comes_from_another:
                Origin(self.checkpoint, self.reference()).write(self.folder)
            elif self.checkpoint is None:
                (self.folder / _ORIGIN).unlink(missing_ok=True)
        except OSError as error:
            raise RunDirError(f"{self.folder}: cannot be written ({error.strerror})") from None

    def resume_hint(self) -> str:
        saved = latest(self.checkpoints) or latest(self.start)
        if saved is None:
            return "no checkpoint was written yet"
        return f"the same command with run.name={self.folder.name} goes on from the last checkpoint, {saved}"

    @property
    def last_row(self) -> int:
        """The last step whose metrics stand; a run that begins writes its step 0 itself."""
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
        """The policy with which the run that the checkpoint belongs to began; None: the weights of `model`."""
        folder = _run_of(self.checkpoint)
        start, origin = folder / "start" / "step_0", Origin.read(folder)
        return (
            origin.reference if origin and origin.reference else start if start.is_dir() else None
        )

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
    """For its owner alone: a secret may stand where no key gives it away."""
    path = folder / "config.yaml"
    path.touch(mode=0o600)
    path.chmod(0o600)
    path.write_text(to_yaml(config))


def lock(folder: Path) -> IO[str]:
    """Hold the folder for as long as the file is open. The kernel lets go of it when the process ends, by kill -9 too.

    Children do not inherit it: Python's files close when another program is executed, and after a fork this one does.
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
    held = weakref.ref(file)
    os.register_at_fork(after_in_child=lambda: held() and held().close())
    return file


def _run_of(checkpoint: Path) -> Path:
    return checkpoint.resolve().parent.parent


def check_not_newer(folder: Path, step: int) -> None:
    """Checkpoints of a run that began elsewhere would be taken for its own, and its own be removed as older ones."""
    newest = latest(folder / "checkpoints")
    if newest is not None and read_manifest(newest)["step"] > step:
        raise CheckpointError(
            f"{newest}: is ahead of step {step}, where run.resume lets this run begin; give another "
            "run.name, or run.resume=auto to go on from it"
        )


def where_to_resume(config: Config, folder: Path, resume: str) -> Path | None:
    """The checkpoint to start from, checked."""
    if resume == "never":
        return None
    found = Path(resume)
    if resume == "auto":
        origin = Origin.read(folder)
        found = (
            latest(folder / "checkpoints")
            or latest(folder / "start")
            or (origin and origin.checkpoint)
        )
    if found is not None:
        ours = read_architecture(config.model.path).hf
        check_same_model(found, read_manifest(found)["model"], ours)
        check_no_code(found)
    return found


def check_weights_fit(config: Config) -> None:
    """Every tensor is there and has the shape that config.json gives it; only headers are read."""
    if config.model.init != "hf":
        return
    reader = HFReader(config.model.path)
    for mapping in param_mappings(read_architecture(config.model.path)).values():
        for name, shape in mapping.hf:
            check_shape(name, reader.shape(name), shape)
