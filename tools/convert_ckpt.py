#!/usr/bin/env python3
"""Hugging Face weights ↔ megastep checkpoints.

    tools/convert_ckpt.py import HF_FOLDER CHECKPOINT
    tools/convert_ckpt.py export CHECKPOINT HF_FOLDER [--shard-size 5GB]

Streams: memory stays near one shard of the Hugging Face folder, whatever the size of the model. The result is
written beside its destination and renamed into place, so an interrupted conversion leaves nothing half done.
A checkpoint may have been written under any parallel layout; the export holds what `transformers` and vLLM load.
"""

import argparse
import os
import re
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a matter of files and memory: no device is needed or touched
os.environ.setdefault("OMP_NUM_THREADS", "1")


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    try:
        convert(args)
    except ValueError as error:  # ArchitectureError, ConvertError, CheckpointError: each one line
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error.filename or args.destination}: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; nothing was left behind", file=sys.stderr)
        return 130
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    direction = parser.add_subparsers(dest="direction", required=True, metavar="import|export")
    sub = direction.add_parser("import", help="Hugging Face folder → checkpoint (step 0, no optimizer state)")
    sub.add_argument("source", metavar="HF_FOLDER", help="config.json, tokenizer and safetensors")
    sub.add_argument("destination", metavar="CHECKPOINT", help="a new folder")
    sub = direction.add_parser("export", help="checkpoint → Hugging Face folder")
    sub.add_argument("source", metavar="CHECKPOINT", help="such as runs/NAME/checkpoints/step_100")
    sub.add_argument("destination", metavar="HF_FOLDER", help="a new folder")
    sub.add_argument("--shard-size", type=size, default="5GB", help="largest safetensors file (default 5GB)")
    return parser.parse_args(argv)


def size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(KB|MB|GB)", text.strip(), re.IGNORECASE)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 500MB or 5GB")
    return int(float(match[1]) * {"KB": 1e3, "MB": 1e6, "GB": 1e9}[match[2].upper()])


def convert(args: argparse.Namespace) -> None:
    from tqdm import tqdm

    from megastep.architecture import read_architecture
    from megastep.policy.manifest import HF, read_manifest
    from megastep.sync import offline
    from megastep.sync.hf_files import refuse_non_empty

    warnings.filterwarnings("ignore")
    refuse_non_empty(args.destination)
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


if __name__ == "__main__":
    sys.exit(main())
