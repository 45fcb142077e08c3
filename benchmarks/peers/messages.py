"""What harness and adapters say to each other: Requests there, Results back. Standard library only."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt to continue greedily by exactly `max_tokens` tokens, end tokens ignored.

    It is due `at` seconds after the round began; with `after`, as soon as that request (by index) has ended.
    """

    tokens: list[int]
    max_tokens: int
    at: float = 0.0
    after: int | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """When a request was due and when each of its output tokens came, in seconds since the round began."""

    due: float
    times: list[float]
    tokens: list[int]

    @property
    def ttft(self) -> float:
        """Seconds from due to the first token."""
        return self.times[0] - self.due

    @property
    def end(self) -> float:
        """When the last token came."""
        return self.times[-1]


@dataclass(frozen=True, slots=True)
class Round:
    """What is measured at once: `requests`, after `setup` has been served untimed on an empty cache."""

    requests: list[Request]
    setup: list[Request]

    def to_json(self) -> dict[str, Any]:
        """As plain lists and numbers."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Round:
        """The inverse of `to_json`."""
        return cls(*([Request(**one) for one in value[name]] for name in ("requests", "setup")))
