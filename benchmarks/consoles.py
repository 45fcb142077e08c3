"""Consoles of benchmarks: what goes into a file or a pipe is not cut to the width of a terminal that is not there."""

from __future__ import annotations

import os

from rich.console import Console

_WIDTH = 200  # of no terminal: every table of a report fits


def results() -> Console:
    """Standard output: what was measured."""
    return _wide_enough(Console())


def progress() -> Console:
    """Standard error: what is being measured."""
    return _wide_enough(Console(stderr=True))


def _wide_enough(console: Console) -> Console:
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _WIDTH
    return console
