"""X8: `megastep plan CONFIG --simulate`: its output and its errors."""

import pytest

from megastep.samples import store
from megastep.simulate.command import Request, parse_compare, run_simulation
from megastep.types import Group
from tests.bad_input.harness import rejected, run
from tests.samples.rollouts import trajectory

CONFIG = "configs/chase.yaml"
SMALL = ["rollout.prompts=4", "rollout.samples_per_prompt=2", "train.mini_batch_prompts=4"]
LENGTHS = ["--prompt-tokens", "20", "--observation-tokens", "4"]


def simulated(*more: str) -> str:
    result = run("plan", CONFIG, "--simulate", "--steps", "2", *LENGTHS, *more, *SMALL, limit_s=120)
    assert result.code == 0, result.err
    return result.out


def test_it_prints_throughput_idle_time_staleness_and_what_binds():
    lines = dict(line.split("  ", 1) for line in simulated().splitlines() if "  " in line)
    assert set(lines) == {
        "tokens/s/GPU",
        "seconds per training step",
        "ranks idle",
        "engines idle",
        "GPUs idle",
        "prompt tokens from prefix caches",
        "staleness",
        "object store",
        "what binds",
    }
    assert lines["staleness"].split() == ["mean", "0.00,", "at", "most", "0"]


def test_it_says_that_nothing_was_measured_and_what_is_assumed():
    assert simulated().startswith("simulated, not measured: 2 training steps on 2 GPUs")
    assert "memory_efficiency=0.5" in simulated("--assume", "memory_efficiency=0.5")


def test_a_comparison_has_a_row_per_value():
    lines = simulated("--compare", "async.max_staleness=0,1,2").splitlines()
    header, *rows = lines[-4:]
    assert header.split()[:2] == ["async.max_staleness", "tokens/s/GPU"]
    assert [row.split()[0] for row in rows] == ["0", "1", "2"]
    speeds = [float(row.split()[1]) for row in rows]
    assert speeds[1] > speeds[0]  # rollouts overlap with training


def test_a_list_is_one_value_of_a_comparison():
    assert parse_compare("policy.recompute=[],[full],[core_attn,mlp]") == (
        "policy.recompute",
        ["[]", "[full]", "[core_attn,mlp]"],
    )


def test_a_config_that_does_not_fit_is_named():
    assert "does not fit" not in simulated()
    assert "does not fit" in simulated("--gpu-gib", "1")


def test_the_configs_engines_reach_the_simulation():
    lines = simulated("--compare", "engine.num_engines=1,2", "--response-tokens", "9").splitlines()
    assert [row.split()[3] for row in lines[-2:]] == ["2", "3"]  # GPUs


def test_lengths_come_from_a_rollout_file(tmp_path):
    """4 prompts × 2 trajectories of 3 + 2 and 2 + 1 new tokens a step."""
    path = tmp_path / "rollouts.safetensors"
    steps = ([1, 2, 3], [5, 6]), ([1, 2, 3, 5, 6, 7, 8], [9])
    store.write(path, [Group(0, [trajectory(*steps, rewards=[0.0, 1.0])])])
    request = Request(CONFIG, SMALL, steps=2, rollouts=path, distributions={"env-seconds": "7"})
    text = run_simulation(request)
    assert f"1 groups of {path}, environment 7 s" in text
    seconds = float(text.split("seconds per training step")[1].split(":")[0])
    assert 14 < seconds < 20  # two environment calls, then little
    tokens_per_s = float(text.split("tokens/s/GPU")[1].split(",")[0]) * 2
    assert tokens_per_s == pytest.approx(4 * 2 * 8 / seconds, rel=0.01)


@pytest.mark.parametrize(
    "arguments, names",
    [
        (["--compare", "async.max_stalness=0,1"], "async.max_stalness"),
        (["--compare", "async.max_staleness"], "--compare"),
        (["--compare", "async.max_staleness="], "--compare"),
        (["--compare", "async.max_staleness=0,x"], "async.max_staleness"),
        (["--compare", "cluster.colocate=true,false", "async.max_staleness=1"], "async"),
        (["--measured", "no/such/folder"], "no/such/folder"),
        (["--rollouts", "no/such/file"], "no/such/file"),
        (["--turns", "many"], "--turns"),
        (["--env-seconds", "5~1"], "--env-seconds"),
        (["--assume", "speed=1"], "--assume"),
        (["--steps", "0"], "--steps"),
        (["--rollouts", "x.safetensors", "--turns", "3"], "--turns"),
        (["--measured", "runs/x", "--assume", "layer_s=1"], "--assume"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_wrong_arguments_are_one_line(arguments, names):
    rejected("plan", CONFIG, "--simulate", *arguments, names=names, limit_s=60)


@pytest.mark.parametrize("argument", ["--turns=3", "--compare=a=1", "--assume=x=1", "--steps=2"])
def test_arguments_of_a_simulation_need_it(argument):
    assert "--simulate" in rejected("plan", CONFIG, argument, names=argument.split("=")[0])[0]
