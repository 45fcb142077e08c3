"""Pagoda's own version, as the server and the command line tell it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def pagoda_version() -> str:
    """The installed distribution's version; `dev` for a source tree that is not installed."""
    try:
        return version("pagoda-kv")
    except PackageNotFoundError:
        return "dev"
