"""`megastep import` and `megastep export`: Hugging Face weights ↔ checkpoints.

Both stream: memory stays near one shard of the Hugging Face folder, at any model size. The result
is written next to its destination and renamed, so an interrupted conversion leaves nothing behind.
A checkpoint may have any parallel layout; transformers and vLLM load the export.
"""

import argparse
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

from megastep import signals
from megastep.config import paths
from megastep.errors import RunFailed


def add_commands(commands) -> None:
    """Add `import` and `export` to the subcommands of an argparse parser."""
    sub = commands.add_parser(
        "import",
        help="Hugging Face folder → checkpoint",
        epilog="example: megastep import HF_FOLDER imported",
        description="Write HF_FOLDER as a checkpoint of training step 0, without optimizer state. "
        "Train from it with run.resume=CHECKPOINT.",
    )
    sub.add_argument("source", metavar="HF_FOLDER", help="config.json, tokenizer and safetensors")
    sub.add_argument("destination", metavar="CHECKPOINT", help="a new folder")
    sub.set_defaults(run=run, direction="import")
    sub = commands.add_parser(
        "export",
        help="checkpoint → Hugging Face folder",
        epilog="example: megastep export runs/NAME/checkpoints/step_100 HF_FOLDER",
        description="Write a checkpoint as a Hugging Face folder for transformers and vLLM.",
    )
    sub.add_argument("source", metavar="CHECKPOINT", help="such as runs/NAME/checkpoints/step_100")
    sub.add_argument("destination", metavar="HF_FOLDER", help="a new folder")
    sub.add_argument(
        "--shard-size", type=size, default="5GB", help="largest safetensors file (default 5GB)"
    )
    sub.set_defaults(run=run, direction="export")


def size(text: str) -> int:
    """Bytes of a size such as 500MB or 5GB."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(KB|MB|GB)", text.strip(), re.IGNORECASE)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 500MB or 5GB")
    return int(float(match[1]) * {"KB": 1e3, "MB": 1e6, "GB": 1e9}[match[2].upper()])


def run(args: argparse.Namespace) -> int:
    """Convert; returns the exit code."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the conversion runs on the CPU
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return exit_code(lambda: _convert(args), args.destination)


def exit_code(convert: Callable[[], None], destination: str | Path) -> int:
    """Call `convert`; errors and signals become one line and an exit code."""
    try:
        convert()
    except ValueError as error:  # ArchitectureError, WeightsError, CheckpointError
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RunFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        mistake = paths.name_too_long(error)
        if mistake is not None:
            print(f"error: {mistake}", file=sys.stderr)
            return 2
        print(f"error: {error.filename or destination}: {error.strerror}", file=sys.stderr)
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

    from megastep.distributed import cpu

    cpu.import_megatron()
    from megastep.checkpoint.manifest import HF, read_manifest
    from megastep.conversion import offline
    from megastep.models.architecture import read_architecture
    from megastep.weights.hf_files import check_empty

    signals.has_started()  # from here on there are files to remove
    check_empty(args.destination)
    model_folder = Path(args.source)
    if args.direction == "export":
        read_manifest(args.source)
        model_folder = Path(args.source) / HF
    total = offline.parameter_count(read_architecture(model_folder))
    with tqdm(total=total, unit="parameter", desc=args.direction) as bar:
        if args.direction == "import":
            offline.import_hf(args.source, args.destination, bar.update)
        else:
            offline.export_hf(args.source, args.destination, args.shard_size, bar.update)
    print(f"wrote {args.destination}")
