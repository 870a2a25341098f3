"""launch/local.sh: what it writes and starts for each recipe; training itself is a stand-in."""

import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Prints its arguments, and the answer of the retrieval server it is given.
MEGASTEP = f"""#!{sys.executable}
import json, sys, urllib.request
urls = [word.partition("=")[2] for word in sys.argv if word.startswith("env.options.url=")]
health = [urllib.request.urlopen(url.replace("retrieve", "health")).read().decode() for url in urls]
print(json.dumps({{"arguments": sys.argv[1:], "health": health}}))
"""


@pytest.fixture
def project(tmp_path):
    """The repository by links, with a stand-in for `megastep` and without installation."""
    for name in ("megastep", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    scripts = {
        "launch/local.sh": (ROOT / "launch/local.sh").read_text(),
        "launch/setup.sh": "#!/bin/sh\n",
        "tools/get_model.py": "import sys\nprint('get_model', *sys.argv[1:])\n",
        ".venv/bin/megastep": MEGASTEP,
        ".venv/bin/python": f'#!/bin/sh\nexec {sys.executable} "$@"\n',
    }
    for name, text in scripts.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    return tmp_path


def run(project, *arguments, code=0) -> tuple[list[str], dict]:
    """The lines before training, and what training was given."""
    ended = subprocess.run(
        [project / "launch/local.sh", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": str(project)},
    )
    assert ended.returncode == code, ended.stderr
    *lines, last = ended.stdout.splitlines() or [""]
    return lines, json.loads(last) if code == 0 else {"error": ended.stderr}


def test_the_default_recipe_gets_its_model(project):
    lines, given = run(project, "train.steps=3")
    assert lines == ["get_model smollm2-135m models/smollm2-135m"]
    assert given["arguments"] == ["train", "configs/arithmetic.yaml", "train.steps=3"]


def test_another_model_is_not_downloaded(project):
    lines, given = run(project, "model.path=elsewhere")
    assert lines == [] and given["arguments"][-1] == "model.path=elsewhere"


def test_chase_needs_no_model(project):
    lines, given = run(project, "chase")
    assert lines == [] and given["arguments"] == ["train", "configs/local.yaml"]


def test_s17_sql_writes_its_data_once(project):
    (project / "models/smollm2-135m").mkdir(parents=True)
    lines, given = run(project, "sql")
    assert lines == ["data/sql: 8 databases, train, eval and demonstrations.jsonl"]
    assert given["arguments"] == ["train", "configs/sql.yaml"]
    assert (project / "data/sql/databases/shop_7.sqlite").is_file()
    lines, _ = run(project, "sql")
    assert lines == []


def test_s17_search_has_a_server_that_ends_with_training(project):
    (project / "models/smollm2-135m").mkdir(parents=True)
    lines, given = run(project, "search", "train.steps=3")
    command, config, url, steps = given["arguments"]
    assert (command, config, steps) == ("train", "configs/search.yaml", "train.steps=3")
    assert lines[-1].startswith("retrieval server: ") and lines[-1].endswith(url.partition("=")[2])
    passages = len((project / "data/search/corpus.jsonl").read_text().splitlines())
    assert given["health"] == [json.dumps({"passages": passages})]
    assert ended(url.partition("=")[2].replace("retrieve", "health"))


def ended(url: str) -> bool:
    """Whether the server stops answering within a few seconds."""
    for _ in range(50):
        try:
            urllib.request.urlopen(url, timeout=5).close()
        except OSError:
            return True
        time.sleep(0.1)
    return False


def test_a_server_of_ones_own_is_used(project):
    (project / "models/smollm2-135m").mkdir(parents=True)
    (project / "data/search").mkdir(parents=True)
    (project / "data/search/demonstrations.jsonl").touch()
    # The stand-in cannot reach it: the command ends with its error.
    _, given = run(project, "search", "env.options.url=http://127.0.0.1:1/retrieve", code=1)
    assert "Connection refused" in given["error"]


def test_an_unknown_recipe_is_an_error(project):
    _, given = run(project, "chess", code=2)
    assert given["error"].startswith("error: chess: no such recipe\nusage: ")
