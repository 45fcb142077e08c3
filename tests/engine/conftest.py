from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine.restores import SimulatedTime


@pytest.fixture
def time() -> Iterator[SimulatedTime]:
    time = SimulatedTime()
    yield time
    time.end()


@pytest.fixture
def quick_breakers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tier that was taken out is tried again at once."""
    monkeypatch.setattr("pagoda.kv.breaker._FIRST_BACKOFF_S", 0.01)
    monkeypatch.setattr("pagoda.kv.breaker._LAST_BACKOFF_S", 0.02)
