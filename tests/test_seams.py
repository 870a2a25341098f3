"""D8: all modules that choose between GPU and CPU (DESIGN: one code path).

A new `cuda`, `nccl` or Transformer Engine in any other module fails here: move it to one of these
seams, or add the module with what it chooses.
"""

import ast
import re
from pathlib import Path

# By module: what it chooses.
SEAMS = {
    "megastep/policy/model.py": "Transformer Engine's or Megatron's local layers, and fusions",
    "megastep/policy/megatron_settings.py": "defaults of Megatron's fusions and overlap",
    "megastep/policy/optimizer.py": "the same for the optimizer",
    "megastep/policy/attention.py": "the attention kernel: three for CUDA, one for CPU",
    "megastep/distributed/parallel.py": "device and communication backend: nccl or gloo",
    "megastep/distributed/cpu.py": "replacements of torch.cuda on a CPU",
    "megastep/checkpoint/saver.py": "the random state of the device, by Megatron's names",
    "megastep/sync/sender.py": "the weight-transfer backend: nccl and ipc, or shared memory",
    "megastep/sync/receiver.py": "the same in vLLM's workers",
    "megastep/sync/engines.py": "nothing: aborts an nccl group",
    "megastep/sync/nccl.py": "nothing: groups and messages of NCCL",
    "megastep/sync/nccl_transport.py": "nothing: sends over NCCL",
    "megastep/rollout/engine.py": "the GPUs of an engine",
    "megastep/config/": "the backend of a placement, and what needs a GPU",
    "tools/gen_docs.py": "nothing: names requirements",
    "megastep/plan/": "nothing: estimates for GPUs",
    "megastep/simulate/": "nothing: estimates for GPUs",
    "tools/bench_simulate.py": "nothing: estimates for GPUs",
    "megastep/doctor/": "nothing: reports what is there",
    "megastep/cli.py": "nothing: plans for GPUs",
    "megastep/conversion/commands.py": "the CPU, always",
}
SOURCES = sorted([*Path("megastep").rglob("*.py"), *Path("tools").glob("*.py")])
DEVICE = re.compile(r"(?i:cuda|nccl|transformer_engine|\bapex\b)|\bTE[A-Z][a-z]\w+")


def words(tree: ast.AST) -> set[str]:
    """Names, attributes, imports and strings of the code, without docstrings."""
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        and node.body
        and isinstance(node.body[0], ast.Expr)
        and isinstance(node.body[0].value, ast.Constant)
    }
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {alias.name for alias in node.names} | {getattr(node, "module", None) or ""}
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.keyword):
            found.add(node.arg or "")
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in docstrings
        ):
            found.add(node.value)
    return found


def of_gpus(source: str) -> set[str]:
    return {word for word in words(ast.parse(source)) if DEVICE.search(word)}


def seam_of(path: Path) -> str | None:
    return next((seam for seam in SEAMS if path.as_posix().startswith(seam)), None)


def test_d8_only_seams_name_a_gpu():
    outside = {
        path.as_posix(): found
        for path in SOURCES
        if seam_of(path) is None and (found := of_gpus(path.read_text()))
    }
    assert not outside


def test_d8_every_seam_names_a_gpu():
    """Remove a module that no longer does from the list."""
    for seam in SEAMS:
        paths = [path for path in SOURCES if seam_of(path) == seam]
        assert any(of_gpus(path.read_text()) for path in paths), seam


def test_the_check_itself():
    assert of_gpus('"""torch.cuda"""\nx = 1  # nccl') == set()
    assert of_gpus("import torch\ntorch.cuda.empty_cache()") == {"cuda"}
    assert of_gpus("tensor.to('cuda:0')") == {"cuda:0"}
    assert of_gpus("from megatron.core.extensions.transformer_engine import TENorm")
    assert of_gpus("init(backend='nccl')") == {"nccl"}
