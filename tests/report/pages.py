"""Run directories to report on, and a parser for the pages."""

import json
import math
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import yaml
from PIL import Image

from megastep.report.metrics_log import read_metrics
from megastep.report.run_report import write_report
from megastep.samples import store
from tests.samples.rollouts import group_of, trajectory

WORDS = "configs/models/chase"
BYTES = "configs/models/bytes"
ATTACK = (
    "</pre></span><script>alert(1)</script><img src=x onerror=alert(2)>"
    '" onmouseover="alert(3)\' \x00\x1b\u202e'
)


class Page(HTMLParser):
    """The elements of a page as (tag, attributes, inner text); each must be properly closed."""

    EMPTY = {"meta", "img"}

    def __init__(self, text: str):
        super().__init__()
        self.elements = []
        self.open = []
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


def make_run(folder: Path, rows: list[dict], rollouts=None, model: str = WORDS) -> Path:
    (folder / "rollouts").mkdir(parents=True)
    (folder / "config.yaml").write_text(
        yaml.safe_dump({"model": {"path": model}, "train": {"steps": 9}})
    )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if rollouts is not None:
        store.write(folder / "rollouts" / "step_3.safetensors", rollouts)
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
    """Two trajectories; one has two turns, and its second prompt lacks the scratchpad."""

    def ids(text):
        return tokenizers[WORDS].encode(text, add_special_tokens=False)

    first = ids("<bos> <user> hops 1 from 7 <eot> <asst>")
    response = ids("<think> 1 7 </think> call 7 <eot>")
    second = first + ids("call 7 <eot> <tool> 3 <eot> <asst>")
    good = trajectory(
        (first, response),
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
