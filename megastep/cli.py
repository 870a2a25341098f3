"""The command line. torch is imported by the commands that need it, so that `--help` answers at once.

Exit codes: 0 done, 1 a failure (with its traceback), 2 a mistake in the config or its files (one line each),
130 interrupted.
"""

import argparse
import sys
import warnings
from pathlib import Path


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    warnings.filterwarnings("ignore")  # of the libraries, about the GPU parts that are not there
    return args.run(args)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megastep", description="Step-wise reinforcement learning of LLM agents on Megatron-Core, vLLM and Ray."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    train = commands.add_parser(
        "train",
        help="train as a config says",
        description="Train as CONFIG says. An existing run directory is continued (run.resume).",
        epilog="example: megastep train configs/local.yaml train.steps=20 policy.parallel.expert=1 policy.ranks=1",
    )
    train.add_argument("config", metavar="CONFIG", help="a YAML file, such as configs/local.yaml")
    train.add_argument("overrides", metavar="key=value", nargs="*", help="replaces an entry of the config")
    train.set_defaults(run=_train)
    return parser


def _train(args: argparse.Namespace) -> int:
    from megastep.config import ConfigError, load

    try:
        config = load(args.config, args.overrides)
    except ConfigError as error:
        return _refuse(error.problems)

    from megastep.policy.manifest import CheckpointError
    from megastep.sync.convert import ConvertError
    from megastep.train import RankError, train

    try:
        train(config, Path(args.config).stem)
    except (CheckpointError, ConvertError) as error:
        return _refuse([str(error)])
    except RankError as error:
        print(f"\nerror: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; the same command with run.name=... continues from the last checkpoint", file=sys.stderr)
        return 130
    return 0


def _refuse(problems: list[str]) -> int:
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
