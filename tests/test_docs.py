"""Documentation against the project: generated pages, links, paths, keys, commands, examples."""

import argparse
import asyncio
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path

import numpy as np
import pytest
import yaml

from megastep import cli
from megastep.config import Config, load
from megastep.report.meanings import MEANINGS, meaning_of
from megastep.rollout.env import check_options, find_env
from tests.fetched import FETCHED, shape_overrides
from tools import gen_docs

DOCS = sorted(Path("docs").glob("*.md"))
RECIPES = sorted(Path("configs/recipes").glob("*.md"))
PAGES = [Path("README.md"), Path("CONTRIBUTING.md"), *DOCS, *RECIPES, Path("tests/gpu/README.md")]
SHAPE = "configs/models/qwen3-8b"  # stands for a model with weights
RUNS_A_CONFIG = ("train", "sft", "eval", "rollout", "config", "plan")

every_page = pytest.mark.parametrize("page", PAGES, ids=str)


def prose_and_code(page: Path) -> tuple[str, list[str]]:
    """The text outside of fenced blocks, and the blocks."""
    text = page.read_text()
    blocks = re.findall(r"^```.*?^```", text, re.DOTALL | re.MULTILINE)
    for block in blocks:
        text = text.replace(block, "")
    return text, blocks


def code_spans(page: Path) -> list[str]:
    return re.findall(r"`([^`\n]+)`", prose_and_code(page)[0])


def config_keys(cls: type = Config, prefix: str = "") -> Iterator[str]:
    for field in fields(cls):
        name = "async" if field.name == "asynchronous" and not prefix else field.name
        yield prefix + name
        if is_dataclass(field.type):
            yield from config_keys(field.type, f"{prefix}{name}.")


KEYS = set(config_keys())
SECTIONS = {key for key in KEYS if "." not in key}


# ---------------------------------------------------------------- generated pages


@pytest.mark.parametrize("path", gen_docs.render())
def test_generated_page_is_up_to_date(path):
    assert Path(path).read_text() == gen_docs.render()[path], "run tools/gen_docs.py"


def test_every_requirement_named_by_a_test_is_on_the_page():
    listed = {**gen_docs.STEPWISE, **gen_docs.STACK, **gen_docs.BEYOND}
    named = gen_docs.tests_by_requirement()
    assert set(named) <= set(listed)
    required = {*gen_docs.STEPWISE, *gen_docs.STACK}
    assert required <= set(named), "a requirement without a test"


def test_every_page_is_in_the_navigation():
    nav = json.dumps(yaml.safe_load(Path("mkdocs.yml").read_text())["nav"])
    assert {page.name for page in DOCS} == set(re.findall(r'"([\w-]+\.md)"', nav))


def test_site_builds(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    done = subprocess.run(
        [*command, "--site-dir", tmp_path], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "index.html").is_file()


# ---------------------------------------------------------------- links, paths, names


@every_page
def test_links_exist(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose_and_code(page)[0]):
        if "://" not in target and not target.startswith("#"):
            assert (page.parent / target.partition("#")[0]).exists(), target


@every_page
def test_paths_exist(page):
    named = r"(?<![\w./-])(?:megastep|tests|docs|configs|launch|tools)/[\w./*-]*[\w/*]"
    for path in re.findall(named, page.read_text()):
        if "NAME" in path or "..." in path:
            continue
        found = list(Path().glob(path)) if "*" in path else [Path(path)]
        assert found and all(p.exists() for p in found), path


@every_page
def test_config_keys_exist(page):
    for span in code_spans(page):
        found = re.match(r"([a-z_]+(?:\.[a-z_]+)+)(?!\w|\.\w|/)", span)
        if not found or found[1].split(".")[0] not in SECTIONS or found[1].endswith((".md", ".py")):
            continue
        key = found[1]
        assert key in KEYS or key.startswith(("env.options.", "rollout.template.")), key


@every_page
def test_metrics_exist(page):
    metric_sections = {name.split("/")[0] for name in MEANINGS} | {"eval"}
    for span in code_spans(page):
        if re.fullmatch(r"[a-z_]+/\w+(/\w+)*", span) and span.split("/")[0] in metric_sections:
            assert span in MEANINGS or meaning_of(span), span


def retired_terms() -> Iterator[tuple[str, bool]]:
    """(term, does it concern whole names only) of the glossary's list."""
    section = Path("docs/glossary.md").read_text().partition("## Not used here")[2]
    rows = re.findall(r"^\| ([a-z].*?) \|", section, re.MULTILINE)
    for row in rows[1:]:  # the first is the header
        for term in row.split(", "):
            word, _, qualifier = term.partition(" (")
            yield word, bool(qualifier)


def test_no_retired_term_in_config_keys_and_metrics():
    terms = list(retired_terms())
    assert ("credit", False) in terms and ("replay", True) in terms
    names = {part for key in KEYS for part in key.split(".")}
    names |= {part for name in MEANINGS for part in name.split("/")}
    for term, whole in terms:
        used = {name for name in names if name == term or (not whole and term in words(name))}
        assert not used, f"{term}: used in {used}"


def words(name: str) -> set[str]:
    """The words of a name, and pairs of them."""
    single = name.split("_")
    return {*single, *(f"{a}_{b}" for a, b in zip(single, single[1:]))}


# ---------------------------------------------------------------- commands


def commands(page: Path) -> list[list[str]]:
    """Shell commands of a page, without those whose next line is an error."""
    found = []
    for block in prose_and_code(page)[1]:
        lines = block.replace("\\\n", "").splitlines()
        for line, following in zip(lines, [*lines[1:], ""]):
            if line.startswith("$ ") and not following.startswith("error:"):
                found.append(shlex.split(line[2:], comments=True))
    return found


def subcommands() -> set[str]:
    actions = cli._parser()._actions
    (choices,) = (a.choices for a in actions if isinstance(a, argparse._SubParsersAction))
    return set(choices)


@every_page
def test_subcommands_exist(page):
    known = subcommands()
    used = {span.split()[1] for span in code_spans(page) if re.match(r"megastep [a-z]", span)}
    for command in commands(page):
        if Path(command[0]).name == "megastep":
            used.add(command[1])
    assert used <= known


@every_page
def test_settings_of_commands_are_valid(page):
    for command in commands(page):
        overrides = [word for word in command if re.match(r"[a-z_.]+=", word)]
        config = next((word for word in command if word.endswith(".yaml")), None)
        if "launch/local.sh" in command:
            recipe = next((word for word in command if word in FETCHED), "arithmetic")
            config = "configs/local.yaml" if "chase" in command else f"configs/{recipe}.yaml"
        elif not {*RUNS_A_CONFIG, "launch/slurm.sbatch", "launch/ray_job.sh"} & set(command):
            continue
        if config is None or not config.startswith("configs/"):
            continue
        models = [word for word in overrides if word.startswith("model.path=")]
        shapes = [f"model.path=configs/models/{Path(model).name.lower()}" for model in models]
        shapes = shape_overrides(config) or shapes
        if any(word.startswith("loss.teacher=") for word in overrides):
            shapes.append("loss.teacher=configs/models/chase")
        for values in compared(command, overrides):
            load(config, [*values, *shapes], has_cuda=True)


def compared(command: list[str], overrides: list[str]) -> list[list[str]]:
    """The settings of each simulation of `plan --compare KEY=A,B,C`, else the only ones."""
    if "--compare" not in command:
        return [overrides]
    argument = command[command.index("--compare") + 1]
    key, _, values = argument.partition("=")
    others = [word for word in overrides if word != argument]
    return [[*others, f"{key}={value}"] for value in values.split(",")]


@every_page
def test_scripts_exist(page):
    for command in commands(page):
        for word in command:
            if re.match(r"(launch|tools)/[\w./]+$", word):
                assert Path(word).is_file(), word


# ---------------------------------------------------------------- the example


@pytest.mark.parametrize("page", ["README.md", "docs/environments.md"])
def test_example_environment(page, tmp_path, monkeypatch):
    (source,) = re.findall(r"```python\n# adder\.py\n(.*?)```", Path(page).read_text(), re.DOTALL)
    name = "adder_of_" + Path(page).stem.lower()
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    adder = find_env(f"{name}:Adder")
    check_options(adder, {"tries": 3})

    async def episode(*answers: str):
        env = adder({"a": 2, "b": 3}, tries=3)
        assert (await env.start())[0]["content"] == "What is 2 + 3?"
        return [await env.step(answer, np.zeros(1, np.int32)) for answer in answers]

    wrong, right = asyncio.run(episode("4", "5"))
    assert not wrong.done and wrong.reward == 0 and wrong.observation[0]["role"] == "user"
    assert right.done and right.reward == 1 and right.metrics == {"success": True}
    assert asyncio.run(episode("1", "1", "1"))[-1].done


def test_example_config(tmp_path):
    text = Path("README.md").read_text()
    (block,) = re.findall(r"```yaml\n# adder\.yaml\n(.*?)```", text, re.DOTALL)
    tree = yaml.safe_load(block)
    tree["model"]["path"] = str(Path(SHAPE).resolve())
    (tmp_path / "adder.yaml").write_text(yaml.safe_dump(tree))
    config = load(tmp_path / "adder.yaml", has_cuda=True)
    assert config.env.name == "adder:Adder" and config.rollout.max_turns == 3
