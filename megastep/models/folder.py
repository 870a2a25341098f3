"""A model folder's config.json as transformers reads it, in policy ranks and engines."""

from pathlib import Path

from megastep.config import Config
from megastep.errors import ConfigError


def check_readable(config: Config) -> None:
    """Load config.json with transformers: models/architecture.py checks only what it reads."""
    from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(config.model.path, trust_remote_code=False)
    except Exception as error:  # transformers raises many types for invalid values
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        where = Path(config.model.path) / "config.json"
        raise ConfigError(
            [f"model.path: {where}: transformers cannot read it ({reason})"]
        ) from None
