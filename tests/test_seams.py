"""D8: what differs between a GPU and a CPU is chosen in few places, and these are all of them (DESIGN: one code path).

A new `cuda`, `nccl` or Transformer Engine anywhere else fails here: move it behind one of these seams, or, if it is a
new one, write down what it chooses.
"""

import ast
import re
from pathlib import Path

# What may be named in each module, and what is decided there.
SEAMS = {
    "megastep/policy/model.py": "the layers: Transformer Engine's or Megatron's local ones, and their fusions",
    "megastep/policy/attention.py": "the attention kernel: FlexAttention and Transformer Engine, or torch's for CPU",
    "megastep/distributed/parallel.py": "the communication backend and the device: nccl on the rank's GPU, or gloo",
    "megastep/distributed/cpu.py": "what stands in for torch.cuda where there is none",
    "megastep/checkpoint/saver.py": "the random state of the device, under Megatron's names for it",
    "megastep/sync/sender.py": "the weight-transfer backend: nccl and ipc, or shared memory",
    "megastep/sync/receiver.py": "its other end, in vLLM's workers",
    "megastep/rollout/engine.py": "which GPUs an engine sees",
    "megastep/config/": "which backend goes with which placement, and what is refused without a GPU",
    "megastep/plan/": "nothing: estimates for GPUs",
    "megastep/cli.py": "nothing: plans for GPUs",
    "megastep/conversion/commands.py": "none at all: it works on the CPU",
}
SOURCES = sorted([*Path("megastep").rglob("*.py"), *Path("tools").glob("*.py")])
DEVICE = re.compile(r"(?i:cuda|nccl|transformer_engine|\bapex\b)|\bTE[A-Z][a-z]\w+")


def words(tree: ast.AST) -> set[str]:
    """Names, attributes, imports and texts of the code; docstrings are not code."""
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


def test_d8_a_gpu_is_named_at_the_seams_only():
    outside = {
        path.as_posix(): found
        for path in SOURCES
        if seam_of(path) is None and (found := of_gpus(path.read_text()))
    }
    assert not outside


def test_d8_every_seam_is_one():
    """A seam that names no GPU any more is to be taken off the list."""
    for seam in SEAMS:
        paths = [path for path in SOURCES if seam_of(path) == seam]
        assert any(of_gpus(path.read_text()) for path in paths), seam


def test_the_check_itself():
    assert of_gpus('"""torch.cuda"""\nx = 1  # nccl') == set()
    assert of_gpus("import torch\ntorch.cuda.empty_cache()") == {"cuda"}
    assert of_gpus("tensor.to('cuda:0')") == {"cuda:0"}
    assert of_gpus("from megatron.core.extensions.transformer_engine import TENorm")
    assert of_gpus("init(backend='nccl')") == {"nccl"}
