"""Metrics of a run: `metrics.jsonl`, and optionally wandb and TensorBoard.

The meaning of each metric: `megastep/report/meanings.py`.
"""

import contextlib
import json
import secrets
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, cast

from megastep.config import Config
from megastep.errors import ReportError
from megastep.files import atomic_write
from megastep.redaction import redacted

LAST_STEP = 10**12  # more than any run has; matplotlib can still draw it


class MetricsLog:
    """One JSON object per training step.

    Resuming removes the rows logged after the checkpoint, so that no training step appears twice.
    """

    def __init__(
        self,
        folder: Path,
        from_step: int,
        wandb_mode: str,
        config: dict,
        tensorboard: bool = False,
        **wandb_run: Any,
    ):
        """`config` is logged to wandb; `wandb_run` holds the project, entity and id there."""
        self.path = folder / "metrics.jsonl"
        self._keep_rows(from_step)
        is_new = from_step < 0
        self.wandb = _start_wandb(folder, wandb_mode, config, is_new, **wandb_run)
        self.tensorboard = _start_tensorboard(folder, from_step) if tensorboard else None

    @classmethod
    def of_run(cls, folder: Path, from_step: int, config: Config) -> "MetricsLog":
        run = config.run
        return cls(
            folder,
            from_step,
            run.wandb,
            redacted(asdict(config)),
            run.tensorboard,
            project=run.wandb_project,
            entity=run.wandb_entity,
            id=run.wandb_id,
        )

    def rewind(self, from_step: int) -> None:
        """Continue after this training step; wandb ignores the rows that it has already."""
        self._keep_rows(from_step)
        if self.tensorboard is not None:
            self.tensorboard.close()
            self.tensorboard = _start_tensorboard(self.path.parent, from_step)

    def _keep_rows(self, from_step: int) -> None:
        kept = [row for row in read_metrics(self.path.parent) if row["step"] <= from_step]
        atomic_write(self.path, "".join(json.dumps(row) + "\n" for row in kept))

    def write(self, step: int, metrics: dict[str, float]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step, **metrics}) + "\n")
        if self.wandb is not None:
            try:
                self.wandb.log(metrics, step=step)
            except ConnectionError as error:  # its helper process is gone, see close()
                print(f"wandb did not take step {step}: {error}", file=sys.stderr)
        if self.tensorboard is not None:
            for name, value in metrics.items():
                self.tensorboard.add_scalar(name, value, step)
            self.tensorboard.flush()

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        if self.wandb is not None:
            # A scheduler that stops a job signals all of its processes, wandb's helper included.
            # metrics.jsonl is complete; wandb's own folder lacks only the last rows.
            try:
                self.wandb.finish()
            except Exception as error:
                print(f"wandb did not finish: {error}", file=sys.stderr)
                self._teardown_wandb()
        if self.tensorboard is not None:
            self.tensorboard.close()

    def _teardown_wandb(self) -> None:
        """Keep wandb's exit handler from retrying and printing a traceback."""
        import wandb

        with contextlib.suppress(Exception):
            wandb.teardown()


def read_metrics(folder: Path) -> list[dict]:
    path = folder / "metrics.jsonl"
    if not path.is_file():
        return []
    rows = []
    for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1):
        where = f"{path}: line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            break  # the last line of a run that was killed while writing it
        except (RecursionError, ValueError) as error:  # nested too deep, or thousands of digits
            raise ReportError(f"{where}: not readable as JSON: {str(error)[:120]}") from None
        rows.append(check_row(row, where))
    return rows


def check_row(row: object, where: str) -> dict:
    if not isinstance(row, dict):
        raise ReportError(
            f'{where}: holds a {type(row).__name__}; an object such as {{"step": 1}} is needed'
        )
    step = row.get("step")
    if type(step) is not int or not 0 <= step <= LAST_STEP:
        raise ReportError(f"{where}: step is {step!r:.40}; a whole number from 0 on is needed")
    return row


def _start_wandb(
    folder: Path,
    mode: str,
    config: dict,
    is_new: bool,
    project: str = "megastep",
    entity: str | None = None,
    id: str | None = None,
) -> Any:
    if mode == "disabled":
        return None
    import wandb

    run = wandb.init(
        project=project,
        entity=entity,
        name=folder.name,
        dir=folder,
        mode=cast(Literal["online", "offline"], mode),
        config=config,
        id=id or _wandb_id(folder, is_new),
        resume="allow",
        settings=wandb.Settings(silent=True, console="off"),
    )
    if mode == "online":
        place = run.url or f"project {project}, entity {entity}, id {run.id}"
        print(f"metrics and config are uploaded to W&B: {place}")
    return run


def _wandb_id(folder: Path, is_new: bool) -> str:
    """An id per run, not per name; stored, so that a resumed run continues the same wandb run."""
    path = folder / "wandb_id"
    if is_new or not path.is_file():
        path.write_text(secrets.token_hex(8))
    return path.read_text().strip()


def _start_tensorboard(folder: Path, from_step: int) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    # purge_step hides the events that a resumed run writes again.
    return SummaryWriter(str(folder / "tensorboard"), purge_step=from_step + 1)
