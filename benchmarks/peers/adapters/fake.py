"""An engine that computes nothing, for tests of the harness: it answers every step with the number of the request."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from benchmarks.peers.adapters.serve import Event, main


class FakeEngine:
    """Gives every request one token a step. Token 0 is an error, token 1 ends the process, token 2 takes for ever."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.added: list[int] = []
        self._left: dict[int, int] = {}

    def add(self, key: int, tokens: list[int], max_tokens: int) -> None:
        """Queue a request."""
        if tokens == [0]:
            raise ValueError("token 0 is no token")
        if tokens == [1]:
            sys.exit("the end")
        while tokens == [2]:
            pass
        self.added.append(key)
        self._left[key] = max_tokens

    def step(self) -> Iterable[Event]:
        """A token for all."""
        events = [Event(key, [key]) for key in self._left]
        self._left = {key: left - 1 for key, left in self._left.items() if left > 1}
        return events

    def reset(self) -> None:
        """There is nothing to forget."""

    def info(self) -> dict[str, Any]:
        """The settings."""
        print("engines may print")
        return dict(self.settings)


if __name__ == "__main__":
    main(FakeEngine)
