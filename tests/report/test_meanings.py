"""Every metric has a meaning."""

import ast
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from megastep.policy.loss import MAXIMA, SUMS, means
from megastep.report.meanings import MEANINGS, meaning_of
from megastep.samples import lay_out, make_samples
from megastep.samples.filters import Dropped
from megastep.samples.metrics import (
    evaluation_metrics,
    filter_metrics,
    packing_metrics,
    rollout_metrics,
)
from tests.report.pages import chase_group


def undocumented(names) -> list[str]:
    return [name for name in names if meaning_of(name) is None]


def test_every_metric_of_a_rollout_and_its_layout_is_documented(tokenizers):
    rollouts = [chase_group(tokenizers)]
    rollouts[0].trajectories[1].env_metrics["look-ups"] = 3
    for t in rollouts[0].trajectories:
        for s in t.steps:
            s.routing = np.zeros((len(s) - 1, 2, 2), np.uint8)
            s.routing_start = 0
    samples = make_samples(rollouts, estimator="grpo", reduction="token")
    batches, folded = lay_out(samples, ranks=1, budget_tokens=64)
    names = {
        *rollout_metrics(rollouts),
        *evaluation_metrics(rollouts),
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


def test_every_metric_of_an_update_is_documented():
    names = means(dict.fromkeys(SUMS, 1.0), dict.fromkeys(MAXIMA, 1.0))
    assert "mismatch/kl" in names and undocumented(names) == []


def metric_literals(path: Path) -> Iterator[str]:
    """Strings of a module that are metric names, without prefixes such as rollout/stop_."""
    sections = {name.split("/")[0] for name in MEANINGS} | {"eval"}
    for node in ast.walk(ast.parse(path.read_text())):
        text = node.value if isinstance(node, ast.Constant) else None
        if not isinstance(text, str) or text.count("/") != 1 or text.endswith("_"):
            continue
        if text.split("/")[0] in sections and text.replace("/", "").isidentifier():
            yield text


def test_every_metric_in_the_source_is_documented():
    """Names written as literals; those composed in samples/ are tested above and there."""
    composed = ("megastep/samples/metrics.py", "megastep/samples/staleness.py")
    found = set()
    for path in Path("megastep").rglob("*.py"):
        if path.as_posix() not in composed and path.parent.name != "report":
            found |= set(metric_literals(path))
    assert {"train/loss", "train/grad_norm", "routing_replay/agreement"} <= found
    assert undocumented(sorted(found)) == []


def test_undocumented_metrics():
    assert undocumented(
        ["train/loss", "train/lots", "eval/success", "eval/lots", "reward/pass_at_x", "loss"]
    ) == [
        "train/lots",
        "eval/lots",
        "reward/pass_at_x",
        "loss",
    ]
    assert meaning_of("eval/turns_mean") == "held-out prompts: turns of a trajectory, mean"
    assert all(
        meaning_of(f"eval/{name}")
        for name in ("reward_std", "stop_done", "env/a/b", "turn/finish_stop")
    )
