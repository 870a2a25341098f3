"""X9: the report of a run, and `megastep view`."""

import base64
import json
import math
import subprocess
import sys
from html import unescape

import pytest
import yaml
from hypothesis import given, settings

from megastep import cli
from megastep.errors import ReportError
from megastep.report import page
from megastep.report.run_report import write_report
from megastep.report.tokens import TokenDecoder, visible
from megastep.samples import store
from tests.report.pages import (
    ATTACK,
    BYTES,
    ROWS,
    WORDS,
    Page,
    cells,
    chase_group,
    make_run,
    report,
)
from tests.samples.rollouts import group_of, groups, trajectory


def test_x9_the_report_of_a_run(tmp_path, tokenizers):
    folder = make_run(tmp_path / "a-run", ROWS, [chase_group(tokenizers)])
    found = report(folder)
    assert "a-run" in found.text and "3 of 9" in found.text and WORDS in found.text
    assert cells(found, "eval/success") == ["0.25 at 0", "0.875 at 3", "0.875 at 3", "0.25 – 0.875"]
    assert cells(found, "reward/success") == ["0.25 at 1", "0.5 at 3", "0.75 at 2", "0.25 – 0.75"]
    assert cells(found, "mismatch/kl") == ["0.1 at 1", "0.3 at 3", "0.1 at 1", "0.1 – 0.3"]
    # A loss has no best value.
    assert cells(found, "train/loss") == ["0.5 at 1", "0.3 at 3", "", "0.1 – 0.5"]
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
    # The second prompt, from where it differs from the first turn on: without the scratchpad.
    assert (
        prompts[1] == "8 tokens shared with the previous turn, then call 7<eot><tool> 3<eot><asst>"
    )
    responses = [e[2] for e in found.find("pre", class_="response")]
    assert responses[:2] == ["<think> 1 7 </think> call 7<eot>", "answer 3<eot>"]
    turns = [e[2] for e in found.find("div", class_="turn")]
    assert turns[1].startswith("turn 2: finish stop, reward 1, 15 prompt tokens, 3 response tokens")
    assert "<eot>" in [e[2] for e in found.find("b", class_="special")]


def test_x9_token_tooltips(tmp_path, tokenizers):
    group = chase_group(tokenizers)
    spans = report(make_run(tmp_path / "run", ROWS, [group])).tokens()
    ids = group.trajectories[1].steps[0].response_ids.tolist()
    titles = [span[1]["title"] for span in spans]
    assert (
        titles[1]
        == f"id {ids[1]} · logprob -0.2500 (p 0.779) · version 4 · trained · experts 36,37 | 38,39"
    )
    assert titles[4].startswith(f"id {ids[4]} · logprob nan")
    # The last token was never forwarded, so it has no routing.
    assert titles[6] == f"id {ids[6]} · logprob -0.2000 (p 0.819) · version 5 · trained"
    assert titles[9].endswith("version 0 · not trained") and "untrained" in spans[9][1]["class"]
    assert "logprob not recorded" in titles[10]
    assert [span[1]["class"].split()[0] for span in spans[:5]] == ["p0", "p0", "p4", "p9", "p9"]


def test_x9_model_output_is_escaped(tmp_path, tokenizers):
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
    # Every byte of it is still readable.
    shown = "".join(span[2] for span in found.tokens()).replace("▫", "")
    assert shown == unescape(visible(ATTACK)) and shown.endswith(r"\u0000\u001b\u202e")
    (policy,) = found.find("meta", **{"http-equiv": "Content-Security-Policy"})
    assert policy[1]["content"].startswith("default-src 'none'")


@pytest.mark.parametrize("text", ["naïve 日本 🙂 x", "a b\n\nc", "🙂🙂", "é"])
def test_characters_of_several_tokens(tokenizers, text):
    ids = tokenizers[BYTES].encode(text, add_special_tokens=False)
    pieces = TokenDecoder(tokenizers[BYTES]).pieces(ids)
    assert "".join(pieces) == text and len(pieces) == len(ids)
    assert pieces[0] == ("" if len(text[0].encode()) > 1 else text[0])


def test_bytes_that_are_not_utf8(tokenizers):
    end = tokenizers[BYTES].eos_token_id
    lead = tokenizers[BYTES].encode("🙂", add_special_tokens=False)[0]
    pieces = TokenDecoder(tokenizers[BYTES]).pieces([lead] * 9 + [end])
    assert len(pieces) == 10 and pieces[-1] == tokenizers[BYTES].decode([end])
    # No character has more than four bytes: the token is shown as it is.
    assert pieces[:4] == ["", "", "", "\ufffd" * 4]


# ---------------------------------------------------------------- incomplete runs


def no_metrics(folder):
    (folder / "metrics.jsonl").unlink()


def truncated_line(folder):
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


def truncated_rollouts(folder):
    path = folder / "rollouts" / "step_3.safetensors"
    path.write_bytes(path.read_bytes()[:-30])


DAMAGES = {
    no_metrics: "There are no metrics yet.",
    empty_metrics: "There are no metrics yet.",
    truncated_line: "2 of 9",
    one_step: "1.5 at 1",
    not_numbers: "nan at 4 1 not finite",
    no_config: "no model is given (config.yaml)",
    model_moved: "somewhere/else: has no tokenizer",
    no_rollouts: "No rollouts were saved.",
    truncated_rollouts: "step_3.safetensors: truncated",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_report_of_an_incomplete_run(tmp_path, tokenizers, damage):
    folder = make_run(tmp_path / "run", ROWS, [chase_group(tokenizers)])
    damage(folder)
    found = report(folder)
    assert DAMAGES[damage] in found.text
    assert bool(found.tokens()) == (damage not in (no_rollouts, truncated_rollouts))


def test_trajectories_without_steps_or_responses(tmp_path):
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
    # step_10 has all prompts of that training step, latest only some.
    (folder / "metrics.jsonl").write_text('{"step": 10}\n')
    assert "rollouts/step_10.safetensors" in report(folder).text
    (folder / "metrics.jsonl").write_text('{"step": 10}\n{"step": 11}\n')
    assert "rollouts/latest.safetensors" in report(folder).text


def test_report_of_an_evaluation(tmp_path):
    folder = make_run(tmp_path / "eval", [])
    (folder / "metrics.jsonl").unlink()
    (folder / "metrics.json").write_text('{"eval/success": 0.5}')
    store.write(folder / "rollouts.safetensors", [group_of(trajectory(([1], [2])))])
    found = report(folder)
    assert cells(found, "eval/success")[0] == "0.5 at 0" and "rollouts.safetensors" in found.text
    assert "of 9" not in found.text  # training steps
    assert not found.find("img") and not (folder / "curves.png").exists()  # one point


def test_long_responses_are_shortened(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "STEP_TOKENS", 3)
    monkeypatch.setattr(page, "TOKENS", 15)
    rollouts = [group_of(trajectory((range(9, 29), range(30, 50))), id=id) for id in range(5)]
    found = report(make_run(tmp_path / "run", [], rollouts))
    ids = [span[1]["title"].split()[1] for span in found.tokens()]
    # Three trajectories have more than 15 tokens.
    assert ids == ["30", "31", "32", "47", "48", "49"] * 3
    assert "… 14 tokens are not shown …" in found.text and "3 of the 5 trajectories" in found.text


@settings(max_examples=30, deadline=None)
@given(groups())
def test_any_rollout_can_be_shown(tokenizers, sampled):
    rollouts = page.SavedRollouts(sampled, "file", TokenDecoder(tokenizers[WORDS]))
    html = page.render("run", {}, [], b"", rollouts)
    shown = [e[1]["title"].split()[1] for e in Page(html).tokens()]
    assert shown == [
        str(id) for t in page._chosen(sampled) for s in t.steps for id in s.response_ids.tolist()
    ]


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


def test_megastep_view_rejects_a_folder_that_is_no_run(tmp_path, capsys):
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


def test_megastep_view_rejects_a_file_that_is_no_rollout_file(tmp_path, tokenizers, capsys):
    file = tmp_path / "chase.safetensors"
    store.write(file, [chase_group(tokenizers)])
    for arguments, reason in (
        ([__file__], f"{__file__}: not a rollout file"),
        ([file, "--model", tmp_path], f"--model {tmp_path}: "),
        (
            [make_run(tmp_path / "run", ROWS), "--model", WORDS],
            f"--model {WORDS}: a run names its model; leave it out",
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


def test_heavy_libraries_are_imported_late():
    heavy = {"matplotlib", "transformers", "torch"}
    code = f"import sys, megastep.report, megastep.cli; print({heavy} & set(sys.modules))"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
        == "set()\n"
    )


def test_turns_of_sub_agents_show_their_role_and_what_they_continue(tmp_path, tokenizers):
    """A planner, two workers that continue it, and a history that begins anew."""

    def ids(text):
        return tokenizers[WORDS].encode(text, add_special_tokens=False)

    plan = ids("<bos> <user> hops 1 from 7 <eot> <asst>")
    answer = ids("call 7 <eot>")
    one = plan + answer + ids("<user> from 1 <eot> <asst>")
    two = plan + answer + ids("<user> hops 2 <eot> <asst>")
    more = one + answer + ids("<user> from 3 <eot> <asst>")
    short = ids("<bos> <tool> 3 <eot> <asst>")
    steps = [(prompt, answer) for prompt in (plan, one, two, more, short)]
    roles = ["planner", "worker", "worker", "worker", None]
    found = trajectory(*steps, env_metrics={"roles": roles, "untrained": {"role": 1}})
    page = report(make_run(tmp_path / "run", ROWS, [group_of(found, id=3)]))
    turns = [e[2].partition("finish")[0] for e in page.find("div", class_="turn")]
    assert turns == [
        "turn 1: planner, ",
        "turn 2: worker, ",
        "turn 3: worker, ",
        "turn 4: worker, ",
        "turn 5: ",
    ]
    prompts = [e[2] for e in page.find("pre", class_="prompt")]
    shared = len(plan + answer)
    assert prompts[1].startswith(f"{shared} tokens shared with the previous turn, then")
    assert prompts[2].startswith(f"{shared + 1} tokens shared with the previous turn, then")
    assert prompts[3].startswith(f"{len(one + answer)} tokens shared with turn 2, then")
    assert prompts[4].startswith("1 tokens shared with the previous turn, then")
    (heading,) = [e[2] for e in page.find("summary") if e[2].startswith("prompt")]
    assert "roles" not in heading and "untrained" in heading
