"""`megastep view` of damaged run directories, and unwritable folders: one line with the file."""

import json
from pathlib import Path

import pytest

from tests.bad_input.harness import CONFIG, rejected, run

CONFIG_TEXT = "model: {path: configs/models/chase}\ntrain: {steps: 3}\n"
ROW = {"step": 1, "reward/mean": 0.5, "train/loss": 1.0, "time/step_s": 2.0}


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "config.yaml").write_text(CONFIG_TEXT)
    (tmp_path / "metrics.jsonl").write_text(json.dumps(ROW) + "\n")
    return tmp_path


CONFIGS = [
    b"\xff\xfe\x80\x00binary",
    b"\x80abc: 1",
    bytes(range(256)),
    b"model: [",
    b"a: b: c",
    b"\tx: 1",
    b"model: *nothing",
    b"[" * 20_000,
    b"!!python/object/apply:os.mkdir [marker]",
    b"a: 2020-13-45",
    b"? [a]\n: b",
]


@pytest.mark.parametrize("content", CONFIGS, ids=lambda content: repr(content[:12]))
def test_an_unreadable_config_is_named(content, folder):
    (folder / "config.yaml").write_bytes(content)
    rejected("view", folder, names=str(folder / "config.yaml"))


@pytest.mark.parametrize(
    "text",
    [
        "model: 3",
        "model: {path: [1, 2]}",
        "model: {path: {}}",
        "model: {path: nowhere}",
        "[]",
        "3",
        "train: {steps: [1]}",
        "train: {steps: .nan}",
        "model: {path: ''}",
        "env: {name: [x]}",
        "loss: {type: {a: 1}}",
        "a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\nd: &d [*c, *c]\ne: &e [*d, *d]\n"
        "model: {path: [*e, *e]}",
    ],
)
def test_a_config_with_wrong_types_is_accepted(text, folder):
    (folder / "config.yaml").write_text(text)
    assert run("view", folder).code == 0


STEPS = [None, "1", 1.5, True, -1, [], {}, 10**13, 10**30]


@pytest.mark.parametrize("step", STEPS, ids=str)
def test_a_row_without_a_step_is_named(step, folder):
    (folder / "metrics.jsonl").write_text(
        json.dumps(ROW) + "\n" + json.dumps({**ROW, "step": step}) + "\n"
    )
    rejected("view", folder, names=f"{folder / 'metrics.jsonl'}: line 2: ")


@pytest.mark.parametrize(
    "line",
    [
        "[]",
        "3",
        "null",
        '"x"',
        "{}",
        '{"reward/mean": 1}',
        "[" * 100_000,
        '{"step": ' + "9" * 5000 + "}",
    ],
    ids=lambda line: line[:20],
)
def test_a_line_that_is_not_a_row_is_named(line, folder):
    (folder / "metrics.jsonl").write_text(f"{line}\n")
    rejected("view", folder, names=f"{folder / 'metrics.jsonl'}: line 1: ")


def test_resuming_names_an_invalid_row(tmp_path):
    """Before any process starts: a resumed run removes the rows after its checkpoint."""
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "metrics.jsonl").write_text("{}\n")
    rejected(
        "train",
        CONFIG,
        f"run.dir={tmp_path}",
        "run.name=r",
        "warm_start.trajectories=0",
        "run.wandb=disabled",
        names=f"{tmp_path / 'r' / 'metrics.jsonl'}: line 1: step is None",
    )


VALUES = [
    "1e308",
    "-1e308",
    "1e-320",
    "NaN",
    "Infinity",
    "-Infinity",
    "9" * 400,
    "-" + "9" * 400,
    "null",
    '"x"',
    "[]",
    "{}",
    "true",
    "1e999",
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: value[:12])
def test_any_value_of_a_metric_is_accepted(value, folder):
    """Also with its opposite: the length of an axis from -1e308 to 1e308 overflows."""
    rows = [
        f'{{"step": {step}, "reward/mean": {v}, "train/loss": {v}, "time/step_s": {v}}}'
        for step, v in enumerate((value, "-1e308", "1e308", "0.5"))
    ]
    (folder / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    result = run("view", folder)
    assert result.code == 0, result.err
    assert (folder / "curves.png").stat().st_size > 1000


@pytest.mark.parametrize(
    "text",
    ["", "[]", "3", "{", "[" * 100_000, '{"step": "x"}', "9" * 5000],
    ids=lambda text: text[:12] or "empty",
)
def test_an_unreadable_evaluation_is_named(text, folder):
    (folder / "metrics.jsonl").unlink()
    (folder / "metrics.json").write_text(text)
    rejected("view", folder, names=str(folder / "metrics.json"))


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "curves.png", "report.html"])
def test_a_folder_in_place_of_a_file(name, folder):
    (folder / name).unlink(missing_ok=True)
    (folder / name).mkdir()
    result = run("view", folder)
    # A run needs only one of config.yaml and metrics.jsonl.
    assert result.code in (0, 2) and "Traceback" not in result.err


OUTS = [
    "/proc/out.safetensors",
    "/dev/null/out",
    "{tmp}/nowhere/out",
    "{tmp}",
    "{tmp}/" + "x" * 255,
    "/sys/out",
    "/proc/1/out",
    "{tmp}/file/out",
    "",
]


@pytest.mark.parametrize("out", OUTS, ids=lambda out: out[:20] or "empty")
def test_an_out_file_that_cannot_be_written(out, tmp_path):
    (tmp_path / "file").write_text("")
    rejected("rollout", CONFIG, "--out", out.format(tmp=tmp_path), names="--out")


def test_an_out_file_whose_log_cannot_be_written(tmp_path):
    (tmp_path / "out.log").mkdir()
    rejected(
        "rollout",
        CONFIG,
        "--out",
        str(tmp_path / "out"),
        names=f"--out {tmp_path}/out: cannot be written",
    )


@pytest.mark.parametrize("command", ["train", "eval"])
@pytest.mark.parametrize(
    "folder", ["/proc/runs", "/dev/null", "{tmp}/file", "{tmp}/file/deeper", "/sys/runs"]
)
def test_a_run_directory_that_cannot_be_written(command, folder, tmp_path):
    (tmp_path / "file").write_text("")
    folder = folder.format(tmp=tmp_path)
    rejected(
        command, CONFIG, f"run.dir={folder}", "warm_start.trajectories=0", names=f"{folder}/chase-"
    )
