"""Waiting for what other threads, processes and tasks do: for a condition, never for a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

PATIENCE_S = 60.0
"""What nothing takes, however busy the machine is: who waits so long waits in vain."""


def until(condition: Callable[[], object], limit_s: float = PATIENCE_S) -> None:
    """Sleep until a condition is true."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.002)


async def eventually(condition: Callable[[], object], limit_s: float = PATIENCE_S) -> None:
    """Let other tasks run until a condition is true."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "it never came true"
        await asyncio.sleep(0.002)
