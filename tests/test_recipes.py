"""S17: what the recipes' pages say can be typed: their configs load, and so do their commands' settings."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from megastep.config import load

PAGES = sorted(Path("configs/recipes").glob("*.md"))
SHAPE = "configs/models/qwen3-30b-a3b"  # of the model that the pages name


def test_every_recipe_has_a_page():
    assert [page.stem for page in PAGES] == ["chase", "search", "sql"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_of_a_page(page):
    commands = re.findall(r"^\$ \.venv/bin/megastep (.+)$", page.read_text(), re.MULTILINE)
    with_config = [words for words in map(shlex.split, commands) if words[0] in ("train", "eval", "rollout")]
    assert {words[0] for words in with_config} >= {"train", "eval"}
    for command, config, *rest in with_config:
        assert Path(config).stem == page.stem
        load(config, [word for word in rest if "=" in word])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_configs_of_a_page(page, tmp_path):
    for block in re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL):
        wanted = yaml.safe_load(block)
        wanted["base"] = str((Path("configs") / wanted["base"]).resolve())
        wanted["model"]["path"] = SHAPE
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(wanted))
        assert load(tmp_path / "config.yaml").policy.ranks == 8


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_columns_of_a_page(page):
    from megastep.rollout.env import find_env

    columns = re.findall(r"^\| `(\w+)` \|", page.read_text(), re.MULTILINE)
    assert columns == list(find_env(page.stem).columns)
