"""X9: a run you can look at. D7: metrics beside metrics.jsonl. Every metric has a meaning somebody wrote down."""

import ast
import base64
import json
import math
import os
import subprocess
import sys
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from PIL import Image

from megastep import cli, config
from megastep.errors import ReportError
from megastep.policy.loss import MAXIMA, SUMS, means
from megastep.report import curves, page
from megastep.report.meanings import MEANINGS, meaning_of
from megastep.report.tokens import Speller, visible
from megastep.report.writing import MetricsLog, read_metrics, write_report
from megastep.rollout.renderer import load_tokenizer
from megastep.samples import lay_out, make_samples, store
from megastep.samples.filters import Dropped
from megastep.samples.metrics import (
    evaluation_metrics,
    filter_metrics,
    packing_metrics,
    rollout_metrics,
)
from tests.samples.rollouts import group_of, groups, trajectory

WORDS, BYTES = "configs/models/chase", "configs/models/bytes"
ATTACK = '</pre></span><script>alert(1)</script><img src=x onerror=alert(2)>" onmouseover="alert(3)\' \x00\x1b\u202e'


class Page(HTMLParser):
    """The elements of a page, as (tag, attributes, text inside); every one must be closed where it should."""

    EMPTY = {"meta", "img"}

    def __init__(self, text: str):
        super().__init__()
        self.elements, self.open = [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        element = [tag, dict(attributes), ""]
        self.elements.append(element)
        if tag not in self.EMPTY:
            self.open.append(element)

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        for element in self.open:
            element[2] += data

    def find(self, tag: str, **attributes) -> list:
        wanted = {name.rstrip("_"): value for name, value in attributes.items()}
        return [e for e in self.elements if e[0] == tag and wanted.items() <= e[1].items()]

    def tokens(self) -> list:
        return [e for e in self.find("span") if e[1].get("title", "").startswith("id ")]

    @property
    def text(self) -> str:
        return self.find("body")[0][2]


@pytest.fixture(scope="module")
def tokenizers():
    return {path: load_tokenizer(path) for path in (WORDS, BYTES)}


def make_run(folder: Path, rows: list[dict], played=None, model: str = WORDS) -> Path:
    (folder / "rollouts").mkdir(parents=True)
    (folder / "config.yaml").write_text(
        yaml.safe_dump({"model": {"path": model}, "train": {"steps": 9}})
    )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if played is not None:
        store.write(folder / "rollouts" / "step_3.safetensors", played)
    return folder


def report(folder: Path) -> Page:
    *pictures, page_path = write_report(folder)
    for picture in pictures:
        with Image.open(picture) as image:
            image.load()
            assert image.format == "PNG" and image.width > 200 and image.height > 200
    found = Page(page_path.read_text())
    assert len(found.find("img")) == len(pictures) == (len(read_metrics(folder)) > 1)
    return found


def chase_group(tokenizers):
    """Two trajectories, one of two turns whose scratchpad is gone from the second prompt."""

    def ids(text):
        return tokenizers[WORDS].encode(text, add_special_tokens=False)

    first, said = (
        ids("<bos> <user> hops 1 from 7 <eot> <asst>"),
        ids("<think> 1 7 </think> call 7 <eot>"),
    )
    second = first + ids("call 7 <eot> <tool> 3 <eot> <asst>")
    good = trajectory(
        (first, said),
        (second, ids("answer 3 <eot>"), [True, True, False]),
        rewards=[0.0, 1.0],
        env_metrics={"success": True},
    )
    good.steps[0].logprobs = np.array([-0.0, -0.25, -3.0, -9.0, math.nan, -0.1, -0.2], np.float32)
    good.steps[0].loss_mask[4] = False  # a trained token has a logprob
    good.steps[0].versions = np.array([[4, 5], [5, 2]], np.int32)
    good.steps[0].routing = np.arange((len(first) + 6) * 4, dtype=np.uint8).reshape(-1, 2, 2)
    bad = trajectory(
        (first, ids("answer 4 <eot>")), env_metrics={"success": False}, stop_reason="done"
    )
    bad.steps[0].logprobs = None
    return group_of(bad, good, id=7)


ROWS = [
    {"step": 0, "eval/success": 0.25},
    {
        "step": 1,
        "reward/success": 0.25,
        "reward/mean": 0.25,
        "train/loss": 0.5,
        "time/step_s": 2.0,
        "mismatch/kl": 0.1,
    },
    {
        "step": 2,
        "reward/success": 0.75,
        "reward/mean": 0.75,
        "train/loss": 0.1,
        "time/step_s": 1.0,
        "mismatch/kl": 0.2,
    },
    {
        "step": 3,
        "reward/success": 0.5,
        "reward/mean": 0.5,
        "train/loss": 0.3,
        "time/step_s": 3.0,
        "mismatch/kl": 0.3,
        "eval/success": 0.875,
        "train/made_up": 3,
    },
]


def cells(page: Page, metric: str) -> list[str]:
    """first, last, best, from – to"""
    texts = [e[2] for e in page.find("td")]
    at = texts.index(metric)
    return texts[at + 1 : at + 5]


def test_x9_the_report_of_a_run(tmp_path, tokenizers):
    folder = make_run(tmp_path / "a-run", ROWS, [chase_group(tokenizers)])
    found = report(folder)
    assert "a-run" in found.text and "3 of 9" in found.text and WORDS in found.text
    assert cells(found, "eval/success") == ["0.25 at 0", "0.875 at 3", "0.875 at 3", "0.25 – 0.875"]
    assert cells(found, "reward/success") == ["0.25 at 1", "0.5 at 3", "0.75 at 2", "0.25 – 0.75"]
    assert cells(found, "mismatch/kl") == ["0.1 at 1", "0.3 at 3", "0.1 at 1", "0.1 – 0.3"]
    assert cells(found, "train/loss") == [
        "0.5 at 1",
        "0.3 at 3",
        "",
        "0.1 – 0.5",
    ]  # its best is nobody's goal
    assert cells(found, "train/made_up")[0] == "3 at 3"
    ((_, attributes, _),) = found.find("img")
    picture = base64.b64decode(attributes["src"].removeprefix("data:image/png;base64,"))
    assert picture == (folder / "curves.png").read_bytes()


def test_x9_trajectories_turn_by_turn(tmp_path, tokenizers):
    found = report(make_run(tmp_path / "run", ROWS, [chase_group(tokenizers)]))
    best, worst = [e[2] for e in found.find("summary") if e[2].startswith("prompt")]
    assert (
        best.startswith("prompt 7, sample 1: reward 1, 2 turns, ended by done")
        and "sample 0: reward 0" in worst
    )
    prompts = [e[2] for e in found.find("pre", class_="prompt")]
    assert prompts[0] == "<bos><user> hops 1 from 7<eot><asst>"
    # the second prompt, from where it leaves the first turn: the scratchpad is not in it
    assert prompts[1] == "8 tokens as in the turn before, then call 7<eot><tool> 3<eot><asst>"
    responses = [e[2] for e in found.find("pre", class_="response")]
    assert responses[:2] == ["<think> 1 7 </think> call 7<eot>", "answer 3<eot>"]
    turns = [e[2] for e in found.find("div", class_="turn")]
    assert turns[1].startswith("turn 2: finish stop, reward 1, 15 prompt tokens, 3 response tokens")
    assert "<eot>" in [e[2] for e in found.find("b", class_="special")]


def test_x9_every_token_tells_what_is_known_of_it(tmp_path, tokenizers):
    group = chase_group(tokenizers)
    spans = report(make_run(tmp_path / "run", ROWS, [group])).tokens()
    ids = group.trajectories[1].steps[0].response_ids.tolist()
    titles = [span[1]["title"] for span in spans]
    assert (
        titles[1]
        == f"id {ids[1]} · logprob -0.2500 (p 0.779) · version 4 · trained · experts 36,37 | 38,39"
    )
    assert titles[4].startswith(f"id {ids[4]} · logprob nan")
    assert (
        titles[6] == f"id {ids[6]} · logprob -0.2000 (p 0.819) · version 5 · trained"
    )  # never forwarded
    assert titles[9].endswith("version 0 · not trained") and "untrained" in spans[9][1]["class"]
    assert "logprob not recorded" in titles[10]
    assert [span[1]["class"].split()[0] for span in spans[:5]] == ["p0", "p0", "p4", "p9", "p9"]


def test_x9_a_model_cannot_write_html(tmp_path, tokenizers):
    ids = tokenizers[BYTES].encode(ATTACK, add_special_tokens=False)
    evil = trajectory((ids, ids), stop_reason=ATTACK, env_metrics={ATTACK: ATTACK}, rewards=[1.0])
    rows = [{"step": 1, ATTACK: 1.0}, {"step": 2, ATTACK: 1.0}]
    folder = make_run(tmp_path / "<script>alert(0)", rows, [group_of(evil)], BYTES)
    config = {"model": {"path": BYTES}, "env": {"name": ATTACK}, "train": "<script>"}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    found = report(folder)
    tags = {e[0] for e in found.elements}
    assert tags <= {
        "html",
        "head",
        "meta",
        "title",
        "style",
        "body",
        "h1",
        "h2",
        "p",
        "b",
        "small",
        "table",
        "tr",
        "th",
        "td",
        "img",
        "details",
        "summary",
        "div",
        "pre",
        "span",
    }
    names = {name for e in found.elements for name in e[1]}
    assert names <= {
        "lang",
        "charset",
        "http-equiv",
        "content",
        "class",
        "title",
        "alt",
        "src",
        "open",
    }
    (image,) = found.find("img")
    assert image[1]["src"].startswith("data:")
    text = (folder / "report.html").read_text()
    assert not any(
        character in text for character in "\x00\x1b\u202e"
    ) and "http" not in text.replace("http-equiv", "")
    # and yet every byte of it can be read
    said = "".join(span[2] for span in found.tokens()).replace("▫", "")
    assert said == unescape(visible(ATTACK)) and said.endswith(r"\u0000\u001b\u202e")
    (policy,) = found.find("meta", **{"http-equiv": "Content-Security-Policy"})
    assert policy[1]["content"].startswith("default-src 'none'")


@pytest.mark.parametrize("text", ["naïve 日本 🙂 x", "a b\n\nc", "🙂🙂", "é"])
def test_characters_of_several_tokens(tokenizers, text):
    ids = tokenizers[BYTES].encode(text, add_special_tokens=False)
    pieces = Speller(tokenizers[BYTES]).pieces(ids)
    assert "".join(pieces) == text and len(pieces) == len(ids)
    assert pieces[0] == ("" if len(text[0].encode()) > 1 else text[0])


def test_bytes_that_are_no_text(tokenizers):
    end = tokenizers[BYTES].eos_token_id
    lead = tokenizers[BYTES].encode("🙂", add_special_tokens=False)[0]
    pieces = Speller(tokenizers[BYTES]).pieces([lead] * 9 + [end])
    assert len(pieces) == 10 and pieces[-1] == tokenizers[BYTES].decode([end])
    assert pieces[:4] == [
        "",
        "",
        "",
        "\ufffd" * 4,
    ]  # no character is that long: shown as what it is


# ---------------------------------------------------------------- runs that are not whole


def no_metrics(folder):
    (folder / "metrics.jsonl").unlink()


def cut_line(folder):
    text = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(text[:-20])


def empty_metrics(folder):
    (folder / "metrics.jsonl").write_text("")


def one_step(folder):
    (folder / "metrics.jsonl").write_text('{"step": 1, "train/loss": 1.5}\n')


def not_numbers(folder):
    row = {
        "step": 4,
        "train/loss": math.nan,
        "reward/mean": math.inf,
        "eval/success": None,
        "mismatch/kl": "x",
    }
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")


def no_config(folder):
    (folder / "config.yaml").unlink()


def model_moved(folder):
    (folder / "config.yaml").write_text("model: {path: somewhere/else}\n")


def no_rollouts(folder):
    (folder / "rollouts" / "step_3.safetensors").unlink()


def cut_rollouts(folder):
    path = folder / "rollouts" / "step_3.safetensors"
    path.write_bytes(path.read_bytes()[:-30])


DAMAGES = {
    no_metrics: "There are no metrics yet.",
    empty_metrics: "There are no metrics yet.",
    cut_line: "2 of 9",
    one_step: "1.5 at 1",
    not_numbers: "nan at 4 1 not finite",
    no_config: "no model is given (config.yaml)",
    model_moved: "somewhere/else: has no tokenizer",
    no_rollouts: "No rollouts were saved.",
    cut_rollouts: "step_3.safetensors: truncated",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_run_that_is_not_whole_is_shown_as_far_as_it_goes(tmp_path, tokenizers, damage):
    folder = make_run(tmp_path / "run", ROWS, [chase_group(tokenizers)])
    damage(folder)
    found = report(folder)
    assert DAMAGES[damage] in found.text
    assert bool(found.tokens()) == (damage not in (no_rollouts, cut_rollouts))


def test_trajectories_without_steps_or_words(tmp_path):
    empty = trajectory(([1, 2], []), stop_reason="abort")
    found = report(
        make_run(tmp_path / "run", [], [group_of(trajectory(stop_reason="context"), empty)])
    )
    assert "0 turns, ended by context" in found.text and "1 turn, ended by abort" in found.text


def test_the_newest_rollouts_are_shown(tmp_path):
    folder = make_run(tmp_path / "run", [])
    for number in (9, 10, 2):
        store.write(
            folder / "rollouts" / f"step_{number}.safetensors", [group_of(trajectory(([1], [2])))]
        )
    assert "rollouts/step_10.safetensors" in report(folder).text
    store.write(folder / "rollouts" / "latest.safetensors", [group_of(trajectory(([1], [2])))])
    (folder / "metrics.jsonl").write_text(
        '{"step": 10}\n'
    )  # a file with all of that step's prompts is there
    assert "rollouts/step_10.safetensors" in report(folder).text
    (folder / "metrics.jsonl").write_text('{"step": 10}\n{"step": 11}\n')
    assert "rollouts/latest.safetensors" in report(folder).text


def test_an_evaluation_has_a_report_too(tmp_path):
    folder = make_run(tmp_path / "eval", [])
    (folder / "metrics.jsonl").unlink()
    (folder / "metrics.json").write_text('{"eval/success": 0.5}')
    store.write(folder / "rollouts.safetensors", [group_of(trajectory(([1], [2])))])
    found = report(folder)
    assert cells(found, "eval/success")[0] == "0.5 at 0" and "rollouts.safetensors" in found.text
    assert "of 9" not in found.text  # of the training that it is not
    assert not found.find("img") and not (folder / "curves.png").exists()  # a dot is no curve


def test_what_is_too_long_is_cut_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "STEP_TOKENS", 3)
    monkeypatch.setattr(page, "TOKENS", 15)
    played = [group_of(trajectory((range(9, 29), range(30, 50))), id=id) for id in range(5)]
    found = report(make_run(tmp_path / "run", [], played))
    ids = [span[1]["title"].split()[1] for span in found.tokens()]
    assert (
        ids == ["30", "31", "32", "47", "48", "49"] * 3
    )  # three trajectories are more than 15 tokens
    assert "… 14 tokens are not shown …" in found.text and "3 of the 5 trajectories" in found.text


@settings(max_examples=30, deadline=None)
@given(groups())
def test_any_rollout_can_be_shown(tokenizers, played):
    html = page.render("run", {}, [], b"", page.Played(played, "file", Speller(tokenizers[WORDS])))
    shown = [e[1]["title"].split()[1] for e in Page(html).tokens()]
    assert shown == [
        str(id) for t in page._chosen(played) for s in t.steps for id in s.response_ids.tolist()
    ]


# ---------------------------------------------------------------- the picture


def test_panels_are_those_with_values():
    def panels(rows):
        return [
            p.title for p in (*curves.PANELS, curves._time_panel(rows)) if curves._lines(p, rows)
        ]

    assert panels(ROWS) == [
        "success",
        "reward",
        "loss",
        "KL of engine and trainer",
        "seconds per step",
    ]
    assert panels([{"step": 1, "train/loss": None}]) == []


def test_curves_name_metrics_that_exist():
    for panel in curves.PANELS:
        for name in panel.lines:
            assert meaning_of(name), name
    for name in (*page.HEADLINES, *page.HIGHER_IS_BETTER, *page.LOWER_IS_BETTER):
        assert (
            any(known.startswith(name) for known in MEANINGS)
            or meaning_of(f"{name}1")
            or meaning_of(name)
        ), name


# ---------------------------------------------------------------- the command


def test_megastep_view(tmp_path, capsys):
    folder = make_run(tmp_path / "run", ROWS)
    assert cli.main(["view", str(folder)]) == 0
    assert capsys.readouterr().out.split() == [
        str(folder / "curves.png"),
        str(folder / "report.html"),
    ]
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.yaml",
        "curves.png",
        "metrics.jsonl",
        "report.html",
        "rollouts",
    ]


def test_megastep_view_refuses_what_is_no_run(tmp_path, capsys):
    for folder in (tmp_path, tmp_path / "nowhere"):
        assert cli.main(["view", str(folder)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert (
            line
            == f"error: {folder}: not a run directory; it has neither config.yaml nor metrics.jsonl"
        )
    run = make_run(tmp_path / "run", [])
    (run / "report.html").mkdir()
    assert cli.main(["view", str(run)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "report.html" in line and "irectory" in line
    (run / "config.yaml").write_text("model: [")
    with pytest.raises(ReportError, match="not readable as YAML"):
        write_report(run)


def test_megastep_view_of_a_rollout_file(tmp_path, tokenizers, capsys):
    file = tmp_path / "chase.safetensors"
    store.write(file, [chase_group(tokenizers)])
    assert cli.main(["view", str(file), "--model", WORDS]) == 0
    assert capsys.readouterr().out.split() == [str(tmp_path / "chase.safetensors.html")]
    found = Page((tmp_path / "chase.safetensors.html").read_text())
    assert (
        "<think> 1 7 </think> call 7<eot>" in found.text
        and cells(found, "reward/mean")[0] == "0.5 at 0"
    )
    assert cli.main(["view", str(file)]) == 0
    assert (
        "no model is given (--model FOLDER): tokens are shown as ids"
        in Page((tmp_path / "chase.safetensors.html").read_text()).text
    )


def test_megastep_view_refuses_what_is_no_rollout_file(tmp_path, tokenizers, capsys):
    file = tmp_path / "chase.safetensors"
    store.write(file, [chase_group(tokenizers)])
    for arguments, reason in (
        ([__file__], f"{__file__}: not a rollout file"),
        ([file, "--model", tmp_path], f"--model {tmp_path}: "),
        (
            [make_run(tmp_path / "run", ROWS), "--model", WORDS],
            f"--model {WORDS}: a run names its model itself",
        ),
    ):
        assert cli.main(["view", *map(str, arguments)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: {reason}")


def test_megastep_view_takes_one_folder(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["view", str(tmp_path), "train.steps=3"])
    assert (
        stopped.value.code == 2
        and "unrecognized arguments: train.steps=3" in capsys.readouterr().err
    )


def test_the_report_loads_its_libraries_when_it_needs_them():
    heavy = {"matplotlib", "transformers", "torch"}
    code = f"import sys, megastep.report, megastep.cli; print({heavy} & set(sys.modules))"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
        == "set()\n"
    )


# ---------------------------------------------------------------- TensorBoard


def scalars(folder: Path) -> dict[str, list]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    return {
        name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]
    }


def test_d7_tensorboard_has_the_same_numbers(tmp_path):
    log = MetricsLog(tmp_path, 0, "disabled", {}, tensorboard=True)
    for number in (1, 2, 3):
        log.write(number, {"train/loss": number / 2, "turn/count": number})
    log.close()
    log = MetricsLog(
        tmp_path, 2, "disabled", {}, tensorboard=True
    )  # resumed after step 2: step 3 is done again
    log.write(3, {"train/loss": 9.0, "turn/count": 9})
    log.close()
    assert scalars(tmp_path) == {
        "train/loss": [(1, 0.5), (2, 1.0), (3, 9.0)],
        "turn/count": [(1, 1.0), (2, 2.0), (3, 9.0)],
    }
    assert [row["train/loss"] for row in read_metrics(tmp_path)] == [0.5, 1.0, 9.0]


WITHOUT_HELPER = """
import os, signal, sys
from pathlib import Path
from megastep.report.writing import MetricsLog
from tests.processes import alive, descendants, wait_for

with MetricsLog(Path(sys.argv[1]), 0, "offline", {}) as log:
    log.write(1, {"train/loss": 1.0})
    helpers = descendants(os.getpid())
    assert helpers, "wandb has no process of its own to stop"
    for pid, _ in helpers:
        os.kill(pid, signal.SIGTERM)
    wait_for(lambda: not alive(helpers), 60)
    log.write(2, {"train/loss": 2.0})
"""


def test_d7_a_run_whose_wandb_was_stopped_ends_without_a_traceback(tmp_path):
    """Whoever stops a Ray job sends SIGTERM to every process of it, wandb's helper too."""
    # An earlier test of this process may have left the address of its own helper, which nobody stops.
    own_helper = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}
    command = [sys.executable, "-c", WITHOUT_HELPER, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=own_helper)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert done.stderr.startswith("wandb did not ") and len(done.stderr.splitlines()) <= 2
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2]


def test_d7_no_tensorboard_unless_asked(tmp_path):
    log = MetricsLog(tmp_path, 0, "disabled", {})
    log.write(1, {"train/loss": 1.0})
    log.close()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_d7_tensorboard_that_is_not_installed(monkeypatch):
    assert config.load("configs/local.yaml", ["run.tensorboard=true"]).run.tensorboard
    monkeypatch.setattr(config, "find_spec", lambda name: None)
    assert not config.load("configs/local.yaml").run.tensorboard
    with pytest.raises(
        config.ConfigError, match="run.tensorboard = True: needs the package tensorboard"
    ):
        config.load("configs/local.yaml", ["run.tensorboard=true"])


# ---------------------------------------------------------------- what metrics mean


def undocumented(names) -> list[str]:
    return [name for name in names if meaning_of(name) is None]


def test_every_metric_of_a_rollout_and_its_layout_is_documented(tokenizers):
    played = [chase_group(tokenizers)]
    played[0].trajectories[1].env_metrics["look-ups"] = 3
    for t in played[0].trajectories:
        for s in t.steps:
            s.routing, s.routing_start = np.zeros((len(s) - 1, 2, 2), np.uint8), 0
    samples = make_samples(played, estimator="grpo", reduction="token")
    batches, folded = lay_out(samples, ranks=1, budget_tokens=64)
    names = {
        *rollout_metrics(played),
        *evaluation_metrics(played),
        *filter_metrics([Dropped(0, 0, "x")], 2),
        *packing_metrics(folded, batches, 64),
    }
    assert {
        "eval/env/look-ups",
        "routing_replay/conflict_rate",
        "eval/turn/count",
        "eval/pass_at_2",
    } <= names
    assert undocumented(names) == []


def test_seconds_per_step_are_those_of_its_parts():
    panel = curves._time_panel([{"time/step_s": 2.0, "time/run_s": 300.0, "time/sync_s": 1.0}])
    assert list(panel.lines) == ["time/step_s", "time/sync_s"]


def test_every_metric_of_an_update_is_documented():
    names = means(dict.fromkeys(SUMS, 1.0), dict.fromkeys(MAXIMA, 1.0))
    assert "mismatch/kl" in names and undocumented(names) == []


def test_every_metric_in_the_source_is_documented():
    """Names written out anywhere; those of samples/metrics.py and ages.py are put together, see above and there."""
    sections = {name.split("/")[0] for name in MEANINGS} | {"eval"}
    found = {}
    for path in Path("megastep").rglob("*.py"):
        put_together = (
            "megastep/samples/metrics.py",
            "megastep/samples/staleness.py",
            "megastep/trainer/collect.py",
        )
        if path.as_posix() in put_together or path.parent.name == "report":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            text = node.value if isinstance(node, ast.Constant) else None
            if (
                isinstance(text, str)
                and text.split("/")[0] in sections
                and text.replace("/", "").isidentifier()
            ):
                if text.count("/") == 1:
                    found[text] = path
    assert {"train/loss", "train/grad_norm", "routing_replay/agreement"} <= set(found)
    assert undocumented(found) == []


def test_a_metric_nobody_explained():
    assert undocumented(
        ["train/loss", "train/lots", "eval/success", "eval/lots", "reward/pass_at_x", "loss"]
    ) == [
        "train/lots",
        "eval/lots",
        "reward/pass_at_x",
        "loss",
    ]
    assert meaning_of("eval/turns_mean") == "held-out prompts: model calls of a trajectory, mean"
    assert all(
        meaning_of(f"eval/{name}")
        for name in ("reward_std", "stop_done", "env/a/b", "turn/finish_stop")
    )
