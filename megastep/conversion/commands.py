"""`megastep import` and `megastep export`: Hugging Face weights ↔ checkpoints. tools/convert_ckpt.py is the same.

Both stream: memory stays near one shard of the Hugging Face folder, whatever the size of the model. The result is
written next to its destination and renamed, so an interrupted conversion leaves nothing behind. A checkpoint may have
been written under any parallel layout; the export holds what `transformers` and vLLM load.
"""

import argparse
import os
import re
import sys
from pathlib import Path

from megastep import signals
from megastep.config import paths


def add_commands(commands) -> None:
    """`import` and `export`, as subcommands of an argparse parser."""
    sub = commands.add_parser(
        "import",
        help="Hugging Face folder → checkpoint",
        epilog="example: megastep import HF_FOLDER imported",
        description="Write HF_FOLDER as a checkpoint of step 0, without optimizer state: run.resume=CHECKPOINT.",
    )
    sub.add_argument("source", metavar="HF_FOLDER", help="config.json, tokenizer and safetensors")
    sub.add_argument("destination", metavar="CHECKPOINT", help="a new folder")
    sub.set_defaults(run=run, direction="import")
    sub = commands.add_parser(
        "export",
        help="checkpoint → Hugging Face folder",
        epilog="example: megastep export runs/NAME/checkpoints/step_100 HF_FOLDER",
        description="Write a checkpoint as a Hugging Face folder, which transformers and vLLM load.",
    )
    sub.add_argument("source", metavar="CHECKPOINT", help="such as runs/NAME/checkpoints/step_100")
    sub.add_argument("destination", metavar="HF_FOLDER", help="a new folder")
    sub.add_argument(
        "--shard-size", type=size, default="5GB", help="largest safetensors file (default 5GB)"
    )
    sub.set_defaults(run=run, direction="export")


def size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(KB|MB|GB)", text.strip(), re.IGNORECASE)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 500MB or 5GB")
    return int(float(match[1]) * {"KB": 1e3, "MB": 1e6, "GB": 1e9}[match[2].upper()])


def run(args: argparse.Namespace) -> int:
    """Convert; the exit code is that of `megastep`."""
    os.environ["CUDA_VISIBLE_DEVICES"] = (
        ""  # a matter of files and memory: no device is needed or touched
    )
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        _convert(args)
    except ValueError as error:  # ArchitectureError, WeightsError, CheckpointError: each one line
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        mistake = paths.name_too_long(error)
        if mistake is not None:
            print(f"error: {mistake}", file=sys.stderr)
            return 2
        print(f"error: {error.filename or args.destination}: {error.strerror}", file=sys.stderr)
        return 1
    except signals.Stopped:
        print("stopped; nothing was left behind", file=sys.stderr)
        return signals.EXIT_CODE
    except KeyboardInterrupt:
        print("interrupted; nothing was left behind", file=sys.stderr)
        return signals.INTERRUPTED
    return 0


def _convert(args: argparse.Namespace) -> None:
    from tqdm import tqdm

    from megastep.checkpoint.manifest import HF, read_manifest
    from megastep.conversion import offline
    from megastep.models.architecture import read_architecture
    from megastep.weights.hf_files import check_empty

    signals.has_started()  # there will be files to remove
    check_empty(args.destination)
    config = args.source
    if args.direction == "export":
        read_manifest(args.source)
        config = Path(args.source) / HF
    total = offline.parameter_count(read_architecture(config))
    with tqdm(total=total, unit="parameter", desc=args.direction) as bar:
        if args.direction == "import":
            offline.import_hf(args.source, args.destination, bar.update)
        else:
            offline.export_hf(args.source, args.destination, args.shard_size, bar.update)
    print(f"wrote {args.destination}")
