"""Files that readers see complete or not at all."""

import os
from pathlib import Path


def atomic_write(path: Path, content: str | bytes) -> None:
    """Replace `path` in one step: a reader, or a kill, meets the old content or the new one."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        if isinstance(content, str):
            partial.write_text(content)
        else:
            partial.write_bytes(content)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
