"""Write the generated parts of docs/: configuration, metrics, requirements, layers, errors.

    python tools/gen_docs.py            write the pages
    python tools/gen_docs.py --check    exit code 1, naming the pages that are out of date
    python tools/gen_docs.py --plans    also the tables of configs/recipes/h100.md (40 s)

`tests/test_docs.py` and `tests/test_recipes.py` make the same checks.
"""

import argparse
import ast
import contextlib
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megastep import errors
from megastep.config import listing, schema
from megastep.report.meanings import MEANINGS
from megastep.simulate.hardware import Hardware, assumptions_text
from tests.test_imports import LAYERS

NOTICE = "<!-- Written by tools/gen_docs.py; do not edit. -->\n\n"

METRIC_SECTIONS = {
    "Reward and rollout": ("reward", "rollout", "env"),
    "Per model call": ("turn",),
    "Ranks, engines and agent workers": ("policy", "engine", "worker"),
    "Evaluation": ("eval",),
    "Asynchronous training": ("staleness", "async"),
    "Training batch": ("filter",),
    "Update": ("train", "warm_start"),
    "Engine against trainer": ("mismatch", "routing_replay"),
    "Time": ("time",),
}

METRICS_INTRODUCTION = """# Metrics

`metrics.jsonl` of a run holds one JSON object per training step. wandb and TensorBoard get the same
numbers. Metrics of trajectories count each trajectory once; metrics of model calls start with
`turn/`. `K` stands for a number, `REASON` for a word, `NAME` for any text. A mean over nothing is
left out. Over the mini-batches of a training step counts are added, maxima are maxima, all other
metrics are averaged.

Every rollout metric has a counterpart for held-out prompts: `reward/mean` is `eval/reward_mean`,
`reward/success` is `eval/success`, `rollout/turns_mean` is `eval/turns_mean`, `turn/count` is
`eval/turn/count`, `env/NAME` is `eval/env/NAME`.
"""

STEPWISE = {
    "S1": "Each model call is a sample with its own prompt and response; trajectories of different "
    "lengths share a batch.",
    "S2": "The outcome reward belongs to the last step; the advantage is computed once per "
    "trajectory and applies to all of its steps.",
    "S3": "The advantage applies at each step's own trained positions, with unequal steps.",
    "S4": "`gae` and `reinforce++` are rejected with a reason; `grpo`, `rloo` and `maxrl` are "
    "accepted.",
    "S5": "Rollout and evaluation metrics count trajectories; metrics of turns are named so, in "
    "synchronous and asynchronous training.",
    "S6": "Sampled ids are never tokenized again in token mode; chat mode renders the history anew "
    "and drops old thinking where the template does.",
    "S7": "Length limits apply to the rendered prompt of the current turn; an episode that reaches "
    "one keeps its earlier steps and is counted.",
    "S8": "An appended EOS is part of the sequence and not of the loss.",
    "S9": "Responses hold generated tokens only; observations are in the next prompt.",
    "S10": "Routing follows the same rule, with an appended EOS, an empty response or no routing.",
    "S11": "Prefix merging covers every form of history, in linear time, and reports sequences "
    "before and after.",
    "S12": "Merging keeps routing and the objective, per-step rewards included.",
    "S13": "Mini-batches count prompts: the number of optimizer steps does not depend on the "
    "number of turns, and no row is lost to rounding.",
    "S14": "Padding changes no gradient, no metric and no old logprob.",
    "S15": "Asynchronous training takes groups of any number of steps.",
    "S16": "A rollout that violates the data model is an error that names the violation.",
    "S17": "Recipes for a retrieval tool and for multi-turn SQL.",
    "S18": "Rewards rise in training, and step-wise training equals whole-trajectory training "
    "where the template allows both.",
}
STACK = {
    "D1": "Megatron-Core policy with tensor, sequence, pipeline, expert and data parallelism, and "
    "context parallelism with Transformer Engine.",
    "D2": "Routing replay through merging, packing, parallelism and recomputation.",
    "D3": "vLLM engines and policy ranks share one Ray placement group, colocated or "
    "disaggregated.",
    "D4": "Packed micro-batches under a token budget.",
    "D5": "Multi-node launchers for Slurm and Ray jobs, and recipes for H100 nodes.",
    "D6": "Export to Hugging Face folders that `transformers` and vLLM load.",
    "D7": "OmegaConf configs, wandb logging, pytest.",
    "D8": "Transformer Engine and apex where present.",
}
BEYOND = {
    "X1": "Trie training: every distinct token of a group is computed once, with the gradient of "
    "separate sequences.",
    "X2": "The whole stack runs on CPU, end to end, in CI.",
    "X3": "The LM head and the softmax run on the positions that predict a trained token.",
    "X4": "Pack layout, parallelism and micro-batch size do not change the gradient.",
    "X5": "Dynamic sampling and zero-variance filters per group of trajectories.",
    "X6": "A killed run resumes with the same numbers; complete and started groups survive.",
    "X7": "Training of any agent that uses the OpenAI API, through a recording endpoint.",
    "X8": "`megastep plan`: memory, micro-batches and traffic of a config without a GPU; its "
    "throughput, by simulation.",
    "X9": "A report per run: curves, trajectories, tokens, routed experts.",
    "X10": "OpenAI- and Anthropic-compatible recording endpoints; parallel calls, sub-agents, "
    "compaction and tools.",
    "X11": "Agents on Ray workers; the driver holds no routing.",
    "X12": "Families with MLA, shared experts, sinks and LoRA, with routing replay each.",
    "X13": "A pretrained LLM learns on a laptop.",
    "X14": "The Transformer Engine policy equals the CPU policy in CI.",
    "X15": "Python 3.11 to 3.13, megatron-core 0.16 to 0.19, one-command installation on GPU "
    "nodes.",
    "X16": "Tries across prompts and micro-batches.",
    "X17": "Exact training of truncated sampling; user-defined losses, estimators and filters.",
    "X18": "Runs survive a lost rank, worker, engine or node.",
    "X19": "A regression test for each silent bug reported by users of other trainers.",
}

# Tests that use an id in another sense.
HOMONYMS = {
    ("D2", "tests/bad_input/test_sql.py"),
    ("D2", "tests/envs/test_sql.py"),
    ("D3", "tests/test_redaction.py"),
    ("D4", "tests/rollout/test_renderer.py"),
}

CONFIGURATION_INTRODUCTION = """# Configuration

A config is a YAML file with the keys that differ from the defaults. `base: other.yaml` starts from
another file; `key=value` on the command line replaces single values. Relative paths in a file are
relative to that file. Unknown keys and invalid values end with one line per problem before any
process starts.

`megastep config CONFIG [key=value ...]` prints every value with the file, override or default that
it comes from; `megastep config --list` prints the tables below.
"""

REQUIREMENTS_INTRODUCTION = """# Requirements

Each behaviour has an id. A test names the id that it holds in its name (`test_s13_...`) or in a
docstring; the last column is collected from `tests/`. To run the tests of an id:
`launch/test.sh tests -k s13`.
"""


def metrics_page() -> str:
    lines = [METRICS_INTRODUCTION]
    known = {section for sections in METRIC_SECTIONS.values() for section in sections}
    unknown = {name.split("/")[0] for name in MEANINGS} - known
    assert not unknown, f"tools/gen_docs.py: METRIC_SECTIONS lacks {sorted(unknown)}"
    for title, sections in METRIC_SECTIONS.items():
        lines += [f"## {title}\n", "| metric | meaning |", "|---|---|"]
        lines += [
            f"| `{name}` | {_cell(meaning)} |"
            for name, meaning in MEANINGS.items()
            if name.split("/")[0] in sections
        ]
        lines.append("")
    return "\n".join(lines)


def requirements_page() -> str:
    tests = tests_by_requirement()
    lines = [REQUIREMENTS_INTRODUCTION]
    chapters = {"Step-wise training": STEPWISE, "The stack": STACK, "Further": BEYOND}
    for title, requirements in chapters.items():
        lines += [f"## {title}\n", "| id | behaviour | tests |", "|---|---|---|"]
        for id, behaviour in requirements.items():
            files = ", ".join(f"`{path}`" for path in sorted(tests.get(id, ())))
            lines.append(f"| {id} | {_cell(behaviour)} | {files or 'planned'} |")
        lines.append("")
    return "\n".join(lines)


def tests_by_requirement() -> dict[str, set[str]]:
    """Requirement id → test files that name it."""
    found: dict[str, set[str]] = {}
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        path = file.relative_to(ROOT).as_posix()
        for id in _ids_of(ast.parse(file.read_text())):
            if (id, path) not in HOMONYMS:
                found.setdefault(id, set()).add(path)
    return found


def _ids_of(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from (id.upper() for id in re.findall(r"(?<=_)[sdx]\d+(?=_)", node.name))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)):
            yield from re.findall(r"\b[SDX]\d+\b", ast.get_docstring(node) or "")


def configuration_page() -> str:
    """Every key of megastep/config/schema.py, a table per section."""
    lines = [CONFIGURATION_INTRODUCTION]
    for section in schema.sections():
        prefix = f"{section}."
        keys = [key for key in schema.settings() if key.rpartition(".")[0] == section]
        if not keys:
            continue
        lines += [f"## {schema.written(section)}\n", "| key | type | default | meaning |"]
        lines.append("|---|---|---|---|")
        for key in keys:
            found = schema.settings()[key]
            meaning = found.metadata["meaning"]
            allowed = listing.constraint_text(found)
            if allowed:
                meaning += f" ({allowed})"
            cells = [key.removeprefix(prefix), schema.type_name(found)]
            cells.append(listing.default_text(found))
            lines.append(
                "| " + " | ".join(f"`{_cell(cell)}`" for cell in cells) + f" | {_cell(meaning)} |"
            )
        lines.append("")
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def layers_block() -> str:
    width = len(str(len(LAYERS)))
    lines = [f"{i:>{width}}  {', '.join(names)}" for i, names in enumerate(LAYERS, start=1)]
    return "\n".join(["```", *lines, "```"])


def errors_block() -> str:
    """The tree in the docstring of megastep/errors.py."""
    lines = (errors.__doc__ or "").splitlines()
    indented = [line for line in lines if line.startswith("    ")]
    return "\n".join(["```", textwrap.dedent("\n".join(indented)), "```"])


def assumptions_block() -> str:
    return "\n".join(["```", assumptions_text(Hardware()), "```"])


PAGES: dict[str, Callable[[], str]] = {
    "docs/configuration.md": configuration_page,
    "docs/metrics.md": metrics_page,
    "docs/requirements.md": requirements_page,
}
# (page, name) → text between <!-- name --> and <!-- /name -->
BLOCKS: dict[tuple[str, str], Callable[[], str]] = {
    ("docs/architecture.md", "layers"): layers_block,
    ("docs/errors.md", "errors"): errors_block,
    ("docs/clusters.md", "assumptions"): assumptions_block,
}


def render() -> dict[str, str]:
    """Path → content of every page with a generated part."""
    rendered = {path: NOTICE + page().rstrip() + "\n" for path, page in PAGES.items()}
    for (path, name), block in BLOCKS.items():
        text = rendered.get(path) or (ROOT / path).read_text()
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        before, _, rest = text.partition(begin)
        _, found, after = rest.partition(end)
        assert found, f"{path}: lacks {begin} and {end}"
        rendered[path] = f"{before}{begin}\n\n{block()}\n\n{end}{after}"
    return rendered


def plans() -> dict[str, str]:
    """configs/recipes/h100.md with what `megastep plan` prints for each recipe."""
    from megastep.config import load
    from megastep.plan.planning import make_plan
    from megastep.plan.table import text as table

    def planned(found: re.Match) -> str:
        plan = make_plan(load(found[1], has_cuda=True))
        return f"$ megastep plan {found[1]}\n{table(plan)}\n```"

    def simulated(found: re.Match) -> str:
        return simulated_row(found[1], make_plan(load(found[1], has_cuda=True)))

    page = "configs/recipes/h100.md"
    command = re.compile(r"^\$ megastep plan (\S+)\n.*?^```", re.DOTALL | re.MULTILINE)
    row = re.compile(r"^\| `(configs/h100/\S+)` \|.*$", re.MULTILINE)
    with contextlib.chdir(ROOT):  # tables show paths as they are given
        return {page: row.sub(simulated, command.sub(planned, Path(page).read_text()))}


def simulated_row(path: str, plan: Any) -> str:
    """Of the table in configs/recipes/h100.md: what `megastep plan PATH --simulate` finds."""
    from megastep.simulate.episodes import Distributions
    from megastep.simulate.roofline import Roofline
    from megastep.simulate.simulation import simulate
    from megastep.simulate.table import markdown_row

    config = plan.config
    times = Roofline(config, plan, Hardware())
    return markdown_row(f"`{path}`", simulate(config, plan, times, Distributions.of(config, {})))


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the generated pages of docs/.")
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    parser.add_argument("--plans", action="store_true", help="with configs/recipes/h100.md")
    args = parser.parse_args()
    check = args.check
    stale = []
    for path, text in (render() | (plans() if args.plans else {})).items():
        file = ROOT / path
        if file.is_file() and file.read_text() == text:
            continue
        stale.append(path)
        if not check:
            file.write_text(text)
    for path in stale:
        print(f"{path}: {'out of date; run tools/gen_docs.py' if check else 'written'}")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
