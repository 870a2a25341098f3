"""A model folder's config.json as transformers sees it: ranks and engines read it too, long after the start."""

from pathlib import Path

from megastep.config import Config
from megastep.errors import ConfigError


def check_readable(config: Config) -> None:
    """models/architecture.py has looked at what it needs; transformers wants the other entries to be right as well."""
    from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(config.model.path, trust_remote_code=False)
    except Exception as error:  # the library raises many kinds for wrong types and values
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        where = Path(config.model.path) / "config.json"
        raise ConfigError(
            [f"model.path: {where}: transformers cannot read it ({reason})"]
        ) from None
