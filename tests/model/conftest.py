"""Every test of this package gets a cache folder of its own."""

from __future__ import annotations

import pytest


@pytest.fixture
def cache(tmp_path_factory, monkeypatch):
    """An empty `PAGODA_CACHE`."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("PAGODA_CACHE", str(folder))
    return folder
