"""Where metrics go: `metrics.jsonl` always, wandb beside it.

    train/loss        next-token loss of the batch, mean over trained tokens, before the update
    train/grad_norm   norm of the whole gradient before clipping
    train/lr          learning rate of the update
    time/step_s       seconds of the step
"""

import json
import os
from pathlib import Path


class MetricsLog:
    """One JSON object per step. Resuming cuts what was logged after the checkpoint, so that no step is there twice."""

    def __init__(self, folder: Path, from_step: int, wandb_mode: str, config: dict):
        self.path = folder / "metrics.jsonl"
        kept = [row for row in read_metrics(folder) if row["step"] <= from_step]
        self.path.write_text("".join(json.dumps(row) + "\n" for row in kept))
        self.wandb = _start_wandb(folder, wandb_mode, config)

    def write(self, step: int, metrics: dict[str, float]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step, **metrics}) + "\n")
        if self.wandb is not None:
            self.wandb.log(metrics, step=step)

    def close(self) -> None:
        if self.wandb is not None:
            self.wandb.finish()


def read_metrics(folder: Path) -> list[dict]:
    path = folder / "metrics.jsonl"
    if not path.is_file():
        return []
    rows = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break  # the last line of a run that was killed while it wrote
    return rows


def _start_wandb(folder: Path, mode: str, config: dict):
    if mode == "auto":
        mode = "online" if os.environ.get("WANDB_API_KEY") else "offline"
    if mode == "disabled":
        return None
    import wandb

    return wandb.init(
        project="megastep",
        name=folder.name,
        dir=folder,
        mode=mode,
        config=config,
        id=folder.name,
        resume="allow",
        settings=wandb.Settings(silent=True, console="off"),
    )
