"""A progress bar on a terminal, for steps that keep someone waiting at start."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import rich.console
import rich.progress

from pagoda.files import Progress, no_progress


@contextmanager
def terminal_progress() -> Iterator[Progress]:
    """Yield a `Progress` that draws bars on stderr while the block runs, or nothing where stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield no_progress
        return
    with rich.progress.Progress(console=rich.console.Console(stderr=True), transient=True) as bars:
        tasks: dict[str, rich.progress.TaskID] = {}

        def show(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done)

        yield show
