"""The report of a run, an evaluation or a rollout file: report.html and curves.png."""

import json
import re
from pathlib import Path

import yaml

from megastep.errors import RenderError, ReportError, StoreError
from megastep.files import atomic_write
from megastep.report import curves, page
from megastep.report.metrics_log import check_row, read_metrics
from megastep.report.tokens import TokenDecoder
from megastep.samples import store
from megastep.samples.metrics import rollout_metrics

# run.report_prompts prompts of the newest training step, without routing
LATEST = "rollouts/latest.safetensors"


def write_report(folder: Path) -> list[Path]:
    """Write report.html from the files present, and curves.png from two training steps on."""
    rows = _rows(folder)
    config = _config(folder)
    picture = curves.draw(rows)
    rollouts = _saved_rollouts(folder, config, rows)
    text = page.render(folder.resolve().name, config, rows, picture, rollouts)
    contents: dict[Path, bytes] = {}
    if picture is not None:
        contents[folder / "curves.png"] = picture
    contents[folder / "report.html"] = text.encode()
    for path, content in contents.items():
        atomic_write(path, content)
    return list(contents)


def write_rollout_report(rollout_file: Path, model: Path | None) -> list[Path]:
    """Write FILE.html next to a rollout file: metrics, and trajectories decoded with `model`."""
    try:
        groups = store.read(rollout_file)
    except StoreError as error:
        raise ReportError(str(error)) from None
    config = {"model": {"path": str(model)}} if model else {}
    decoder, problems = _decoder(config, "--model FOLDER")
    if model and problems:
        raise ReportError(f"--model {model}: {problems[0]}")
    rows = [{"step": 0, **rollout_metrics(groups)}]
    rollouts = page.SavedRollouts(groups, rollout_file.name, decoder, problems)
    path = rollout_file.with_name(f"{rollout_file.name}.html")
    atomic_write(path, page.render(rollout_file.name, config, rows, None, rollouts).encode())
    return [path]


def _rows(folder: Path) -> list[dict]:
    if not any((folder / name).is_file() for name in ("config.yaml", "metrics.jsonl")):
        raise ReportError(
            f"{folder}: not a run directory; it has neither config.yaml nor metrics.jsonl"
        )
    rows = read_metrics(folder)
    evaluation = folder / "metrics.json"  # of `megastep eval`
    if not rows and evaluation.is_file():
        return [check_row(_with_step_0(evaluation), str(evaluation))]
    return rows


def _with_step_0(path: Path) -> object:
    try:
        found = json.loads(path.read_text(errors="replace"))
    except (RecursionError, ValueError) as error:
        raise ReportError(f"{path}: not readable as JSON: {str(error)[:120]}") from None
    return {"step": 0, **found} if isinstance(found, dict) else found


def _config(folder: Path) -> dict:
    """The file's content without validation: its model may have moved since."""
    path = folder / "config.yaml"
    if not path.is_file():
        return {}
    try:
        found = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, RecursionError, ValueError) as error:  # ValueError: not text, bad date
        reason = " ".join(str(error).split())[:200]
        raise ReportError(f"{path}: not readable as YAML: {reason}") from None
    return found if isinstance(found, dict) else {}


def _saved_rollouts(folder: Path, config: dict, rows: list[dict]) -> page.SavedRollouts:
    """The newest rollouts of a run, or those of an evaluation."""
    path = _newest_rollouts(folder, rows)
    if path is None:
        return page.SavedRollouts()
    source = str(path.relative_to(folder))
    try:
        groups = store.read(path)
    except StoreError as error:
        return page.SavedRollouts(source=source, problems=[str(error)])
    decoder, problems = _decoder(config, "config.yaml")
    return page.SavedRollouts(groups, source, decoder, problems)


def _newest_rollouts(folder: Path, rows: list[dict]) -> Path | None:
    """The numbered file if it is of the newest training step, for `latest` holds fewer prompts."""
    numbered = {
        int(found[1]): path
        for path in folder.glob("rollouts/step_*.safetensors")
        if (found := re.fullmatch(r"step_(\d+)\.safetensors", path.name))
    }
    newest_step = max(numbered, default=-1)
    newest = [numbered[newest_step]] if numbered else []
    if rows and newest_step >= rows[-1]["step"]:
        candidates = newest
    else:
        candidates = [folder / LATEST, *newest, folder / "rollouts.safetensors"]
    return next((path for path in candidates if path.is_file()), None)


def _decoder(config: dict, source: str) -> tuple[TokenDecoder, list[str]]:
    """`source`: where the user can name a model."""
    from megastep.rollout.renderer import load_tokenizer

    model = page.setting(config, "model", "path")
    if not isinstance(model, str):
        return TokenDecoder(), [f"no model is given ({source}): tokens are shown as ids"]
    try:
        return TokenDecoder(load_tokenizer(model)), []
    except RenderError as error:
        return TokenDecoder(), [f"tokens are shown as ids: {error}"]
