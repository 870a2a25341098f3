"""One word for one thing: retired terms of docs/glossary.md do not return."""

import re
from pathlib import Path

import pytest

RETIRED = {
    "weight sync": r"push(es|ed)?",
    "rollout, episode": r"play(s|ed|ing)?",
    "padding": r"fillers?",
    "staleness": r"ages|how old|patience",
    "advantage": r"credit(s|ed)?",
    "drop": r"giv(e|es|en) up",
    "check_..., reject": r"(?<!Connection )refus(e|es|ed)(_\w+)?",  # the name of an error
    "log, report, print": r"says|said|tells|told|speaks",
    "next to, alongside": r"beside",
    "colocated, disaggregated": r"tak(e|ing) turns|apart",
    "resume, continue": r"go(es)? on|gone on|com(e|es) back",
    "degenerate": r"(says|proves) nothing",
    "shard": r"stretch(es)?",
    "engine slot": r"seats?",
}
ALLOWED = {
    "docs/glossary.md",  # lists them
    "tests/test_docs.py",
    "tests/test_vocabulary.py",
    "tools/make_models.py",  # the vocabulary of a model
}


def sources() -> list[Path]:
    found = [Path("README.md"), Path("CONTRIBUTING.md")]
    for folder, suffixes in {
        "megastep": (".py",),
        "tests": (".py", ".md"),
        "tools": (".py",),
        "docs": (".md",),
        "configs": (".yaml", ".md"),
        "launch": (".sh", ".sbatch", ".py"),
    }.items():
        found += [path for path in Path(folder).rglob("*") if path.suffix in suffixes]
    return [path for path in found if path.as_posix() not in ALLOWED]


@pytest.mark.parametrize("term", RETIRED)
def test_retired_terms_are_not_used(term):
    retired = re.compile(rf"(?<![\w-])({RETIRED[term]})(?![\w-])", re.IGNORECASE)
    found = [
        f"{path}:{number}: {line.strip()}"
        for path in sources()
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if retired.search(line)
    ]
    assert not found, f"say {term}:\n" + "\n".join(found)


def test_the_check_itself(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("megastep", "tests", "tools", "docs", "configs", "launch"):
        Path(name).mkdir()
    for name in ("README.md", "CONTRIBUTING.md"):
        Path(name).write_text("a plain text\n")
    test_retired_terms_are_not_used("weight sync")
    Path("megastep/x.py").write_text("weights are pushed\n")
    with pytest.raises(AssertionError, match=r"say weight sync:\s+megastep/x.py:1"):
        test_retired_terms_are_not_used("weight sync")
