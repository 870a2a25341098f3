"""S17: configs and commands of the recipe pages are valid. D5: also those of the cluster pages."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from megastep.config import load
from tests.fetched import shape_overrides
from tools.gen_docs import simulated_row

PAGES = sorted(page for page in Path("configs/recipes").glob("*.md") if page.stem != "h100")
H100 = sorted(Path("configs/h100").glob("qwen*.yaml"))
SHAPE = "configs/models/qwen3-30b-a3b"  # the model that the pages name
ON_CLUSTERS = ("README.md", "configs/recipes/h100.md", "docs/clusters.md")


def test_every_recipe_has_a_page():
    assert [page.stem for page in PAGES] == ["arithmetic", "chase", "search", "sql"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_of_a_page(page):
    commands = re.findall(r"^\$ \.venv/bin/megastep (.+)$", page.read_text(), re.MULTILINE)
    with_config = [
        words for words in map(shlex.split, commands) if words[0] in ("train", "eval", "rollout")
    ]
    assert {words[0] for words in with_config} >= {"train", "eval"}
    for _, config, *rest in with_config:
        assert Path(config).stem == page.stem
        load(config, [*(word for word in rest if "=" in word), *shape_overrides(config)])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_configs_of_a_page(page, tmp_path):
    for block in re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL):
        wanted = yaml.safe_load(block)
        wanted["base"] = str((Path("configs") / wanted["base"]).resolve())
        wanted["model"]["path"] = str(Path(SHAPE).resolve())
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(wanted))
        assert load(tmp_path / "config.yaml").policy.ranks == 8


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_columns_of_a_page(page):
    from megastep.rollout.env import find_env

    columns = re.findall(r"^\| `(\w+)` \|", page.read_text(), re.MULTILINE)
    assert columns == list(find_env(page.stem).columns)


# ---------------------------------------------------------------- clusters and H100 nodes


@pytest.mark.parametrize("page", ON_CLUSTERS)
def test_d5_settings_of_cluster_commands_are_valid(page):
    """With the shape of the model in place of its weights."""
    lines = Path(page).read_text().replace("\\\n", "").splitlines()
    trains = re.compile(r"^\$ .*\b(?:megastep train|launch/slurm\.sbatch|launch/ray_job\.sh) (.+)")
    commands = [found[1].split() for line in lines if (found := trains.search(line))]
    assert commands
    for config, *rest in commands:
        overrides = [word for word in rest if "=" in word]  # a comment may follow
        models = [Path(word).name.lower() for word in overrides if word.startswith("model.path=")]
        load(
            config,
            [*overrides, *(f"model.path=configs/models/{model}" for model in models)],
            has_cuda=True,
        )


def test_d5_every_model_has_a_colocated_and_a_disaggregated_recipe():
    nodes = {"qwen3-8b": 1, "qwen3-32b": 1, "qwen3-30b-a3b": 2, "qwen3-235b-a22b": 16}
    found = {path.stem: load(path, has_cuda=True) for path in H100}
    assert set(found) == set(nodes) | {f"{name}-disaggregated" for name in nodes}
    for stem, config in found.items():
        disaggregated = stem.endswith("-disaggregated")
        assert config.cluster.colocate != disaggregated
        gpus = config.policy.ranks + (
            config.engine.num_engines * config.engine.tensor_parallel if disaggregated else 0
        )
        assert gpus == 8 * nodes[stem.removesuffix("-disaggregated")]
        # Tensor parallelism stays inside a node.
        assert config.engine.tensor_parallel <= 8 and config.policy.parallel.tensor <= 8
        assert Path(config.model.path).name == stem.removesuffix("-disaggregated")


@pytest.mark.parametrize("path", H100, ids=lambda path: path.stem)
def test_d5_recipe_fits_nodes_of_8_gpus_and_96_cores(path, monkeypatch):
    """With enough threads where Adam runs on the CPU."""
    from megastep.cluster import Cluster, check_capacity

    monkeypatch.setattr(Cluster, "has_gpu", True)
    config = load(path, has_cuda=True)
    bundles = Cluster(config)._bundles()
    nodes = round(sum(bundle["GPU"] for bundle in bundles)) // 8
    check_capacity(bundles, [{"GPU": 8, "CPU": 96}] * nodes)
    assert config.cluster.cpus_per_process >= (5 if config.optimizer.cpu_offload_fraction else 1)


@pytest.mark.parametrize("path", H100, ids=lambda path: path.stem)
def test_x8_recipe_fits_and_its_table_is_on_the_page(path):
    from megastep.plan.planning import make_plan
    from megastep.plan.table import text

    plan = make_plan(load(path, has_cuda=True))
    assert not plan.problems()
    page = Path("configs/recipes/h100.md").read_text()
    assert f"$ megastep plan {path}\n{text(plan)}\n```" in page, (
        f"megastep plan {path} prints another table"
    )
    assert simulated_row(str(path), plan) in page, f"megastep plan {path} --simulate differs"
