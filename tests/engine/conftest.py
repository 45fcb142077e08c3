from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine.restores import SimulatedTime


@pytest.fixture
def time() -> Iterator[SimulatedTime]:
    time = SimulatedTime()
    yield time
    time.end()
