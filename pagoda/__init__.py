"""Pagoda: the KV-cache memory hierarchy for LLM serving.

    from pagoda import Engine, SamplingParams

Importing this package loads nothing heavy; `Engine` and `AsyncEngine` load torch when they are first named.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagoda.engine.aio import AsyncEngine
    from pagoda.engine.engine import Engine
    from pagoda.engine.params import SamplingParams

# How long an idle OpenMP thread spins for its next piece of work before it sleeps: about 0.1 ms, which bridges the gaps
# within a step. The default is many milliseconds, and where other processes want the cores it made a step ten times
# slower. It counts only if it is set before torch loads OpenMP; after that, as inside vLLM, it would only reach the
# processes that the other engine starts.
if "torch" not in sys.modules:
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")

try:
    __version__ = version("pagoda-kv")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"

__all__ = ["AsyncEngine", "Engine", "SamplingParams", "__version__"]

_HOME = {
    "AsyncEngine": "pagoda.engine.aio",
    "Engine": "pagoda.engine.engine",
    "SamplingParams": "pagoda.engine.params",
}


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'pagoda' has no attribute {name!r}")
