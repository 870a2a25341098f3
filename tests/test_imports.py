"""Imports go one way, and modules that must load quickly import no heavy library."""

import ast
from pathlib import Path

# A package may import from itself and from the layers above its own line.
LAYERS = [
    ("errors", "types", "text", "files", "redaction", "signals", "console"),
    ("models", "config"),  # config checks the model's architecture, models/folder.py reads a Config
    ("samples",),
    ("distributed",),
    ("weights",),
    ("checkpoint",),
    ("sync",),
    ("policy",),
    ("rollout",),
    ("envs",),
    ("cluster",),
    ("report",),
    ("plan",),
    ("conversion",),
    ("doctor",),
    ("trainer",),
    ("simulate",),
    ("cli",),
    ("__main__",),
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
FRAMEWORKS = {"ray", "vllm", "megatron", "transformers"}
MEGATRON_STATE_READER = "distributed/parallel.py"


def modules():
    root = Path("megastep")
    for path in sorted(root.rglob("*.py")):
        if path.parent == root and path.name == "__init__.py":
            continue
        yield path, path.relative_to(root).parts[0].removesuffix(".py"), ast.parse(path.read_text())


def imported(tree) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_imports_go_one_way():
    for path, package, tree in modules():
        ours = {n.split(".")[1] for n in imported(tree) if n.startswith("megastep.")}
        for other in ours - {"__version__"}:
            assert LEVEL[other] <= LEVEL[package], f"{path} imports megastep.{other}"


def test_light_packages_import_no_framework():
    for path, package, tree in modules():
        if package in ("samples", "types", "config", "models") and path.name != "folder.py":
            heavy = {n.split(".")[0] for n in imported(tree)} & FRAMEWORKS
            assert not heavy, f"{path} imports {heavy}"


def test_one_module_reads_megatrons_parallel_state():
    for path, _, tree in modules():
        if path.as_posix() != f"megastep/{MEGATRON_STATE_READER}":
            assert not any("parallel_state" in n for n in imported(tree)), path


def test_vllms_processes_import_no_megatron():
    """They import the receiver; Megatron would take seconds and needs preparation on a CPU."""
    trees = {path: tree for path, _, tree in modules()}
    pending = [Path("megastep/sync/receiver.py")]
    seen = set()
    while pending:
        path = pending.pop()
        if path in seen or path not in trees:
            continue
        seen.add(path)
        names = imported(trees[path])
        assert not any(name.split(".")[0] == "megatron" for name in names), path
        for name in names:
            module = Path(*name.split("."))
            pending += [module.with_suffix(".py"), module / "__init__.py"]
    assert Path("megastep/sync/nccl.py") in seen
