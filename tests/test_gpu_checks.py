"""The checks of tests/gpu, on the CPU at small size: within their limits, and beyond them where
something is wrong. Also collection, the skip without a GPU, and the JSON result."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megastep.config import validate
from tests import cases
from tests.gpu import checks
from tests.gpu.expected import EXPECTED
from tests.gpu.results import Results
from tests.gpu.test_3_layouts import CONTEXT_LAYOUTS as CONTEXT
from tests.gpu.test_3_layouts import HALF_OFFLOADED, LAYOUTS, LONG
from tests.gpu.test_5_engines import SCENES, config_of
from tests.policy.updates import make_groups

CPU = torch.device("cpu")
MODEL = "qwen3_moe_dense_layer"


def within(prefix: str, errors: dict[str, float]) -> None:
    for name, error in errors.items():
        assert error <= EXPECTED[f"{prefix}/{name}"].limit, (name, error)


# ---------------------------------------------------------------- attention


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (6, 1)])
def test_attention(heads, kv_heads, head_dim, precision):
    trie = checks.branching_trie(300, seed=head_dim)
    errors = checks.attention_errors("cpu", trie, heads, kv_heads, head_dim, precision, CPU)
    within(f"attention/{precision}", errors)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_attention_that_ignores_branches_is_found(precision, monkeypatch):
    def causal(kind, query, key, value, trie, scale):
        q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (query, key, value))
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=True
        )
        return out.squeeze(0).transpose(0, 1)

    monkeypatch.setattr(checks, "attend", causal)
    trie = checks.branching_trie(300, seed=64)
    errors = checks.attention_errors("cpu", trie, 4, 2, 64, precision, CPU)
    assert all(
        error > 3 * EXPECTED[f"attention/{precision}/{n}"].limit for n, error in errors.items()
    )


# ---------------------------------------------------------------- logprobs and layouts


def train(
    pool, folder, groups, precision, layout=None, replay=True, updates=1, **settings
) -> list[dict]:
    return pool.run(
        cases.train_a_little,
        folder=folder,
        layout=layout or {},
        groups=groups,
        settings=checks.policy_settings(precision, replay) | settings,
        pack_layout="trie",
        updates=updates,
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_logprobs_with_replayed_routing(precision, ranks, models):
    """And beyond the limit with free routers, so that the check sees a routing that is ignored."""
    folder, model = models(MODEL)
    groups = make_groups(replay=True)
    for replay in (True, False):
        results = train(ranks(1), folder, groups, precision, replay=replay, updates=0)
        found = checks.logprob_errors(
            checks.merged(results, "before"), model, groups, precision, replay=True
        )
        for name in ("max",) if precision == "fp32" else ("mean", "max"):
            limit = EXPECTED[f"logprobs/{precision}/{name}"].limit
            assert (found[name] <= limit) == replay, (name, found)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_layout_against_one_rank(precision, ranks, models):
    """With full recomputation; and beyond the limit with another learning rate."""
    folder, _ = models(MODEL)
    groups = make_groups(replay=True)
    one_rank = train(ranks(1), folder, groups, precision)
    settings = {"policy.recompute": ["full"]}
    results = train(ranks(2), folder, groups, precision, dict(tensor=2), **settings)
    within(f"layouts/{precision}", checks.layout_errors(results, one_rank))
    settings["optimizer.lr"] = 0.0
    results = train(ranks(2), folder, groups, precision, dict(tensor=2), **settings)
    errors = checks.layout_errors(results, one_rank)
    assert errors["after"] > EXPECTED[f"layouts/{precision}/after"].limit, errors


def test_memory_of_an_offloaded_policy(ranks, models):
    folder, _ = models(MODEL)
    (found,) = ranks(1).run(cases.memory_while_offloaded, folder=folder, layout={}, settings={})
    weights = sum(p.nbytes for p in models(MODEL)[1].parameters())
    assert found["offloaded"] / weights <= EXPECTED["offload/policy/memory"].limit
    assert found["onloaded"] == found["training"] > 1.5 * found["offloaded"]


@pytest.mark.parametrize(
    "world, layout, settings",
    [
        *((world, layout, {}) for world, layout in LAYOUTS.values()),
        *((world, layout, {"train.pack_layout": "flat"}) for world, layout in CONTEXT.values()),
        (1, {}, HALF_OFFLOADED),
    ],
)
def test_configs_of_the_layout_tests_are_valid(world, layout, settings, models):
    settings = checks.policy_settings("bf16", replay=True) | settings | {"policy.ranks": world}
    config = cases.make_config(models(MODEL, **LONG)[0], layout, settings)
    assert validate(config, has_cuda=True) == []


@pytest.mark.parametrize("scene", SCENES.values(), ids=SCENES)
def test_configs_of_the_engine_tests_are_valid(scene, models):
    """For machines with GPUs, of which they use as many as their mark has."""
    config = config_of(scene, models("qwen3_moe")[0])
    assert validate(config, has_cuda=True) == []
    of_engines = 0 if config.cluster.colocate else scene.engines * scene.tensor_parallel
    assert scene.gpus == scene.ranks + of_engines


# ---------------------------------------------------------------- the command and its result


def test_figures_and_their_limits_are_on_the_page():
    rows = re.findall(r"^\| `([a-z\d_/]+)` \| (\S+) \| (.+) \|$", page(), re.MULTILINE)
    assert {name: (float(limit), meaning) for name, limit, meaning in rows} == EXPECTED


def test_every_figure_is_reported_by_a_test():
    sources = " ".join(path.read_text() for path in Path("tests/gpu").glob("test_*.py"))
    prefixes = set(re.findall(r'figure\(\s*f?"([a-z\d]+)/', sources))
    assert prefixes == {name.split("/")[0] for name in EXPECTED}


def page() -> str:
    return Path("tests/gpu/README.md").read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="they would run")
def test_without_a_gpu_all_are_skipped_for_one_reason(tmp_path):
    result = tmp_path / "result.json"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu"],
        capture_output=True,
        text=True,
        timeout=200,
        env=os.environ | {"MEGASTEP_GPU_RESULTS": str(result)},
    )
    assert done.returncode == 0, done.stdout
    assert f"results: {result}" in done.stdout
    found = json.loads(result.read_text())
    assert (found["passed"], found["failed"]) == (0, 0) and found["skipped"] > 100
    assert {test["reason"] for test in found["tests"].values()} == {"no CUDA device"}
    files = {name.partition("::")[0] for name in found["tests"]}
    assert files == {path.name for path in Path("tests/gpu").glob("test_*.py")}


def report(name: str, outcome: str, **more) -> SimpleNamespace:
    defaults = {"duration": 1.0, "user_properties": [], "longrepr": None, "longreprtext": ""}
    return SimpleNamespace(nodeid=f"tests/gpu/{name}", outcome=outcome, **(defaults | more))


def test_the_result_has_figures_errors_and_the_environment(tmp_path):
    results = Results()
    results.add(report("a.py::one", "passed"))
    results.add(report("a.py::one", "passed", user_properties=[("attention/fp32/output", 1e-6)]))
    error = f"{Path.home()}/checks.py:3: error\n" * 40
    results.add(report("a.py::two", "failed", longreprtext=error))
    results.add(report("a.py::two", "passed"))  # the tear-down
    results.add(report("a.py::three", "skipped", longrepr=("a.py", 3, "Skipped: needs 2 GPUs")))
    results.write(tmp_path / "result.json", [{"name": "GPU 0"}])
    found = json.loads((tmp_path / "result.json").read_text())
    assert (found["passed"], found["failed"], found["skipped"]) == (1, 1, 1)
    assert found["environment"] == [{"name": "GPU 0"}]
    assert found["tests"]["a.py::one"]["figures"] == {"attention/fp32/output": 1e-6}
    assert found["tests"]["a.py::one"]["seconds"] == 2.0
    lines = found["tests"]["a.py::two"]["error"]
    assert lines[-1] == "~/checks.py:3: error" and len(lines) == 25
    assert found["tests"]["a.py::three"]["reason"] == "needs 2 GPUs"
