"""TOML as operators write it: for every setting that a file can hold."""

from __future__ import annotations

import tomllib
from typing import Any

from pagoda.errors import ConfigError


def parse_toml(text: str) -> dict[str, Any]:
    """The tables in TOML text.

    Raises:
        ConfigError: it is no TOML; the message has the line, also where that is the last.
    """
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        last = f"at the end of line {max(1, len(text.splitlines()))}"
        raise ConfigError(f"it is no TOML: {str(error).replace('at end of document', last)}") from None
