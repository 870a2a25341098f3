"""Where metrics go: `metrics.jsonl` always, wandb and TensorBoard beside it; and the report of a run.

What each metric means: `megastep/report/meanings.py`.
"""

import contextlib
import json
import re
import secrets
import sys
from dataclasses import asdict
from pathlib import Path

import yaml

from megastep.config import Config
from megastep.errors import ReportError
from megastep.files import atomic_write
from megastep.redaction import redacted
from megastep.report import curves, page
from megastep.report.tokens import Speller
from megastep.samples import store
from megastep.samples.metrics import rollout_metrics

LATEST = "rollouts/latest.safetensors"  # run.report_prompts of the newest step, without routing
LAST_STEP = 10**12  # more than any run has, and drawable


# ---------------------------------------------------------------- metrics


class MetricsLog:
    """One JSON object per step. Resuming cuts what was logged after the checkpoint, so that no step is there twice."""

    def __init__(
        self,
        folder: Path,
        from_step: int,
        wandb_mode: str,
        config: dict,
        tensorboard: bool = False,
        **wandb_place,
    ):
        """`config` goes to wandb; `wandb_place`: project, entity and id there."""
        self.path = folder / "metrics.jsonl"
        kept = [row for row in read_metrics(folder) if row["step"] <= from_step]
        atomic_write(self.path, "".join(json.dumps(row) + "\n" for row in kept))
        is_new = from_step < 0
        self.wandb = _start_wandb(folder, wandb_mode, config, is_new, **wandb_place)
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

    def write(self, step: int, metrics: dict[str, float]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step, **metrics}) + "\n")
        if self.wandb is not None:
            try:
                self.wandb.log(metrics, step=step)
            except ConnectionError as error:  # as below
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
            # Its helper process may be gone: whoever stops a job sends the signal to all of its processes. What was
            # logged is in metrics.jsonl and, but for the end, in wandb's own folder.
            try:
                self.wandb.finish()
            except Exception as error:
                print(f"wandb did not finish: {error}", file=sys.stderr)
                self._forget_wandb()
        if self.tensorboard is not None:
            self.tensorboard.close()

    def _forget_wandb(self) -> None:
        """Else it would try again when Python exits, and print a traceback."""
        import wandb

        with contextlib.suppress(Exception):
            wandb.teardown()


def read_metrics(folder: Path) -> list[dict]:
    path = folder / "metrics.jsonl"
    if not path.is_file():
        return []
    rows = []
    for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            break  # the last line of a run that was killed while it wrote
        except (
            RecursionError,
            ValueError,
        ) as error:  # too deep, or a number of thousands of digits
            raise ReportError(
                f"{path}: line {number}: not readable as JSON: {str(error)[:120]}"
            ) from None
        rows.append(_checked_row(row, f"{path}: line {number}"))
    return rows


def _checked_row(row: object, where: str) -> dict:
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
):
    if mode == "disabled":
        return None
    import wandb

    run = wandb.init(
        project=project,
        entity=entity,
        name=folder.name,
        dir=folder,
        mode=mode,
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
    """Of this run alone, however many have its name; kept, so that the run goes on under it."""
    path = folder / "wandb_id"
    if is_new or not path.is_file():
        path.write_text(secrets.token_hex(8))
    return path.read_text().strip()


def _start_tensorboard(folder: Path, from_step: int):
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(
        str(folder / "tensorboard"), purge_step=from_step + 1
    )  # hides what a resumed run does again


# ---------------------------------------------------------------- the report


def write_report(folder: Path) -> list[Path]:
    """report.html of a run, or of an evaluation, from whatever of it is there; curves.png once it has two steps."""
    rows, config = _rows(folder), _config(folder)
    picture = curves.draw(rows)
    text = page.render(folder.resolve().name, config, rows, picture, _played(folder, config, rows))
    written = {folder / "report.html": text.encode()}
    if picture is not None:
        written = {folder / "curves.png": picture} | written
    for path, content in written.items():
        atomic_write(path, content)
    return list(written)


def write_rollout_report(rollouts: Path, model: Path | None) -> list[Path]:
    """FILE.html beside a file of rollouts: their metrics and trajectories, as text with the tokenizer of `model`."""
    try:
        groups = store.read(rollouts)
    except store.StoreError as error:
        raise ReportError(str(error)) from None
    config = {"model": {"path": str(model)}} if model else {}
    speller, problems = _speller(config, "--model FOLDER")
    if model and problems:
        raise ReportError(f"--model {model}: {problems[0]}")
    rows = [{"step": 0, **rollout_metrics(groups)}]
    played = page.Played(groups, rollouts.name, speller, problems)
    path = rollouts.with_name(f"{rollouts.name}.html")
    atomic_write(path, page.render(rollouts.name, config, rows, None, played).encode())
    return [path]


def _rows(folder: Path) -> list[dict]:
    if not any((folder / name).is_file() for name in ("config.yaml", "metrics.jsonl")):
        raise ReportError(
            f"{folder}: not a run directory; it has neither config.yaml nor metrics.jsonl"
        )
    rows = read_metrics(folder)
    evaluation = folder / "metrics.json"  # of `megastep eval`
    if not rows and evaluation.is_file():
        return [_checked_row(_with_step_0(evaluation), str(evaluation))]
    return rows


def _with_step_0(path: Path) -> object:
    try:
        found = json.loads(path.read_text(errors="replace"))
    except (RecursionError, ValueError) as error:
        raise ReportError(f"{path}: not readable as JSON: {str(error)[:120]}") from None
    return {"step": 0, **found} if isinstance(found, dict) else found


def _config(folder: Path) -> dict:
    """As it was written: a model that has moved since is no reason not to show the run."""
    path = folder / "config.yaml"
    try:
        found = yaml.safe_load(path.read_text()) if path.is_file() else {}
    except (
        yaml.YAMLError,
        RecursionError,
        ValueError,
    ) as error:  # ValueError: not text, a date that is none
        raise ReportError(
            f"{path}: not readable as YAML: {' '.join(str(error).split())[:200]}"
        ) from None
    return found if isinstance(found, dict) else {}


def _played(folder: Path, config: dict, rows: list[dict]) -> page.Played:
    """The newest rollouts of a run, or those of an evaluation."""
    path = _newest_rollouts(folder, rows)
    if path is None:
        return page.Played()
    source = str(path.relative_to(folder))
    try:
        groups = store.read(path)
    except store.StoreError as error:
        return page.Played(source=source, problems=[str(error)])
    speller, problems = _speller(config, "config.yaml")
    return page.Played(groups, source, speller, problems)


def _newest_rollouts(folder: Path, rows: list[dict]) -> Path | None:
    """`latest` holds some prompts of the newest step; a file of that step with all of them is better."""
    numbered = {
        int(found[1]): path
        for path in folder.glob("rollouts/step_*.safetensors")
        if (found := re.fullmatch(r"step_(\d+)\.safetensors", path.name))
    }
    newest = numbered.get(max(numbered, default=None))
    candidates = [folder / LATEST, newest, folder / "rollouts.safetensors"]
    if rows and newest is not None and max(numbered) >= rows[-1]["step"]:
        candidates = [newest]
    return next((path for path in candidates if path is not None and path.is_file()), None)


def _speller(config: dict, source: str) -> tuple[Speller, list[str]]:
    """`source`: where a model can be named."""
    from megastep.errors import RenderError
    from megastep.rollout.renderer import load_tokenizer

    model = page.setting(config, "model", "path")
    if not isinstance(model, str):
        return Speller(), [f"no model is given ({source}): tokens are shown as ids"]
    try:
        return Speller(load_tokenizer(model)), []
    except RenderError as error:
        return Speller(), [f"tokens are shown as ids: {error}"]
