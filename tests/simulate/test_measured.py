"""X8: times from a run directory: what they are, and that they predict another setting."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from megastep.config import Config, load, to_yaml
from megastep.errors import ReportError
from megastep.plan.planning import Plan, make_plan
from megastep.simulate.episodes import Distributions, Episodes
from megastep.simulate.measured import Calibration, Measured, MeasuredRun
from megastep.simulate.simulation import Result, simulate

TRUE = Measured(token_s=2e-3, update_base_s=1.0, update_token_s=1e-3, sync_s=0.4, step_s=0.1)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(config())


def config(*overrides: str) -> Config:
    return load(
        "configs/chase.yaml",
        [
            "rollout.prompts=8",
            "rollout.samples_per_prompt=4",
            "train.mini_batch_prompts=4",
            *overrides,
        ],
    )


def episodes(of: Config) -> Episodes:
    lengths = {"turns": "1..4", "prompt-tokens": "20", "observation-tokens": "3"}
    return Distributions.of(of, lengths | {"env-seconds": "0"})


def write_run(folder: Path, of: Config, result: Result) -> Path:
    """A run directory as training leaves it, of a simulation with known times."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(to_yaml(of))
    rows = [{"step": 0}]
    for number, row in enumerate(result.rows, 1):
        step_s = row.metrics["time/step_s"] + TRUE.step_s
        rows.append({"step": number, **row.metrics, "time/step_s": step_s})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def run(plan, tmp_path_factory) -> MeasuredRun:
    made = simulate(config(), plan, TRUE, episodes(config()), steps=8)
    return MeasuredRun.read(write_run(tmp_path_factory.mktemp("runs") / "a", config(), made))


def calibrate(run: MeasuredRun, plan: Plan, drawn: Episodes) -> Measured:
    def simulated(times: Measured) -> Calibration:
        result = simulate(run.config, plan, times, drawn, len(run.rows) + 1)
        return Calibration(result.mean("time/rollout_s"), result.mean("train/tokens_computed"))

    return run.calibrated(simulated)


def test_calibration_finds_the_times_of_a_known_run(run, plan):
    found = calibrate(run, plan, episodes(config()))
    assert found.token_s == pytest.approx(TRUE.token_s, rel=0.03)
    assert found.sync_s == pytest.approx(TRUE.sync_s)
    assert found.step_s == pytest.approx(TRUE.step_s, abs=1e-6)
    tokens = run.mean("train/tokens_computed") / 2  # per mini-batch
    update_s = found.update_base_s + found.update_token_s * tokens
    assert update_s == pytest.approx(TRUE.update_base_s + TRUE.update_token_s * tokens, rel=0.02)


@pytest.mark.parametrize("change", ["async.max_staleness=2", "rollout.samples_per_prompt=8"])
def test_a_synchronous_run_predicts_another_setting(run, plan, change):
    other = config(change)
    expected = simulate(other, plan, TRUE, episodes(other), steps=6)
    found = calibrate(run, plan, episodes(config()))
    predicted = simulate(other, plan, found, episodes(other), steps=6)
    assert predicted.trajectories_per_s == pytest.approx(expected.trajectories_per_s, rel=0.05)
    synchronous = simulate(config(), plan, found, episodes(config()), steps=6)
    assert not math.isclose(predicted.step_s, synchronous.step_s, rel_tol=0.1)


def test_environments_that_take_all_the_time_leave_none_to_the_engine(run, plan):
    """The search ends, though no engine is fast enough for the measured rollouts."""
    slow = replace(episodes(config()), env_s=Distributions.of(config(), {}).env_s)
    assert calibrate(run, plan, slow).token_s < TRUE.token_s / 100


def test_a_run_without_rollout_files_has_its_mean_lengths(run):
    episode = run.episodes("2").episode(0, 0)
    assert len(episode.turns) == round(run.mean("rollout/turns_mean"))
    assert episode.turns[0].response_tokens == round(run.mean("turn/response_tokens_mean"))
    assert episode.turns[0].env_s == 2.0


def test_other_folders_are_one_line(tmp_path):
    with pytest.raises(ReportError, match="not a run directory"):
        MeasuredRun.read(tmp_path / "nothing")
    (tmp_path / "config.yaml").write_text(to_yaml(config()))
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    with pytest.raises(ReportError, match="has 0 training steps"):
        MeasuredRun.read(tmp_path)
