"""The command line: `megastep envs`, exit codes."""

import pytest

from megastep.errors import ConfigError, RolloutFailed, RunFailed, UserError
from tests.bad_input.harness import CONFIG, run

BUILT_IN = ["arithmetic", "chase", "guess", "reasoning_gym", "search", "skyrl", "sql", "textarena"]


def test_envs_lists_the_built_in_environments_with_a_description():
    result = run("envs", limit_s=60)
    assert result.code == 0 and result.err == ""
    rows = [line.split(maxsplit=1) for line in result.out.splitlines()]
    assert [name for name, _ in rows] == BUILT_IN
    assert all(len(description) > 10 for _, description in rows)


# Every command, and what its implementation calls.
COMMANDS = [
    (["train", CONFIG], "megastep.trainer.loop.train"),
    (
        ["train", CONFIG, "--rollouts", "x.safetensors"],
        "megastep.trainer.saved_rollouts.train_on_rollouts",
    ),
    (["rollout", CONFIG, "--out", "x.safetensors"], "megastep.trainer.collect.rollout"),
    (["eval", CONFIG], "megastep.trainer.collect.evaluate"),
    (["config", CONFIG], "megastep.config.listing.resolved_text"),
    (["plan", CONFIG], "megastep.models.folder.check_readable"),
    (["view", "runs"], "megastep.report.run_report.write_report"),
]
RUNS = COMMANDS[:4]


def failing(monkeypatch, target: str, error: Exception) -> None:
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(target, fail)


def named(value: object) -> str:
    return " ".join(value[:1]) if isinstance(value, list) else str(value).rpartition(".")[2]


@pytest.mark.parametrize("argv, target", COMMANDS, ids=named)
@pytest.mark.parametrize("kind", [UserError, ConfigError])
def test_a_user_error_is_exit_code_2_and_one_line_per_problem(kind, argv, target, monkeypatch):
    failing(monkeypatch, target, kind(["a = 1: too small", "b = 2: too large"]))
    result = run(*argv)
    assert result.code == 2
    assert result.lines == ["error: a = 1: too small", "error: b = 2: too large"]


@pytest.mark.parametrize("argv, target", RUNS, ids=named)
@pytest.mark.parametrize("kind", [RunFailed, RolloutFailed])
def test_a_failed_run_is_exit_code_1_and_one_line(kind, argv, target, monkeypatch):
    failing(monkeypatch, target, kind("no engine is left"))
    result = run(*argv)
    assert result.code == 1 and result.lines == ["error: no engine is left"]


@pytest.mark.parametrize("argv, target", RUNS, ids=named)
def test_a_bug_keeps_its_traceback(argv, target, monkeypatch):
    failing(monkeypatch, target, ZeroDivisionError("a bug"))
    with pytest.raises(ZeroDivisionError, match="a bug"):
        run(*argv)
