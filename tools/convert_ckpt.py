#!/usr/bin/env python3
"""`megastep import` and `megastep export` from a clone: Hugging Face weights ↔ checkpoints.

tools/convert_ckpt.py import HF_FOLDER CHECKPOINT
tools/convert_ckpt.py export CHECKPOINT HF_FOLDER [--shard-size 5GB]
"""

import argparse
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megastep import signals
from megastep.conversion import commands


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands.add_commands(parser.add_subparsers(required=True, metavar="import|export"))
    args = parser.parse_args(argv)
    warnings.filterwarnings("ignore")  # of libraries, about missing GPU features
    with signals.listening():
        return args.run(args)


if __name__ == "__main__":
    sys.exit(main())
