"""PressureReport: what the ladder tells the rest. Imports no torch, so that whoever only forwards it needs none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pagoda.engine.pressure.admission import Refusal
from pagoda.engine.pressure.ladder import Level, Signals


@dataclass(frozen=True, slots=True)
class PressureReport:
    """The ladder at one look.

    Attributes:
        level: the higher one of the two ladders; `memory_level` is that of memory's.
        entered, seconds: how often each level was gone to, and how long each lasted, since the start.
        refused: requests, by why.
        rss_bytes: resident memory of the process; the limit is None without one.
        num_compressed: running contexts that were made smaller, since the start.
    """

    level: Level = Level.CALM
    signals: Signals = field(default_factory=Signals)
    entered: Mapping[Level, int] = field(default_factory=dict)
    seconds: Mapping[Level, float] = field(default_factory=dict)
    refused: Mapping[Refusal, int] = field(default_factory=dict)
    rss_bytes: int = 0
    memory_limit: int | None = None
    num_compressed: int = 0
    memory_level: Level = Level.CALM
