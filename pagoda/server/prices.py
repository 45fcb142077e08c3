"""Prices: what tokens cost, in an operator's table, and what the cache saved by it.

[prices]
input = 3.0        # a million prompt tokens, and tokens computed beside prompts for passages
output = 15.0      # a million generated tokens
read = 0.1         # of the input price: prompt tokens that hit, or were reused from passages
write_5m = 1.25    # of the input price: prompt tokens newly leased for up to five minutes
write_1h = 2.0     # or for longer
currency = "USD"
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path

from pagoda.errors import ConfigError
from pagoda.kinds import is_number
from pagoda.server.ledger import Counts
from pagoda.toml import parse_toml

PER = 1_000_000


@dataclass(frozen=True, slots=True)
class Prices:
    """What a million tokens cost, and how hits and leases change that. Without a table the unit is a prompt token.

    Raises:
        ConfigError: a price is not a number, or negative.
    """

    input: float = float(PER)
    output: float = 5.0 * PER
    read: float = 0.1
    write_5m: float = 1.25
    write_1h: float = 2.0
    currency: str = "prompt tokens"

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name == "currency":
                if not isinstance(value, str):
                    raise ConfigError(f"currency must be a string, got {value!r}")
            elif not is_number(value) or not 0 <= value < math.inf:
                raise ConfigError(f"{each.name} must be a number, 0 or more, got {value!r}")

    @classmethod
    def load(cls, path: Path) -> Prices:
        """Read a table.

        Raises:
            ConfigError: the file cannot be read, or has something else in it.
        """
        try:
            table = parse_toml(path.read_text(encoding="utf-8")).get("prices")
        except (OSError, UnicodeDecodeError, ConfigError) as error:
            raise ConfigError(f"cannot read prices from {path}: {error}") from None
        if not isinstance(table, dict) or (unknown := table.keys() - {each.name for each in fields(cls)}):
            what = f"it has {', '.join(sorted(unknown))}" if isinstance(table, dict) else "there is no [prices] table"
            raise ConfigError(f"prices in {path}: {what}")
        try:
            return cls(**table)
        except ConfigError as error:
            raise ConfigError(f"prices in {path}: {error}") from None

    def cost(self, counts: Counts) -> float:
        """What these tokens cost."""
        read = counts.read + counts.blended
        plain = counts.prompt - read - counts.written_5m - counts.written_1h + counts.extra
        relative = plain + self.read * read + self.write_5m * counts.written_5m + self.write_1h * counts.written_1h
        return (self.input * relative + self.output * counts.generated) / PER

    def cost_without_cache(self, counts: Counts) -> float:
        """What they would have cost had every prompt been computed, once, and nothing leased."""
        return (self.input * counts.prompt + self.output * counts.generated) / PER
