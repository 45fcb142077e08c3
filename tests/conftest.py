"""For all tests: random inputs are made at whatever speed a busy machine has, and no test hangs on a lucky draw."""

import gc
import os

import pytest
from hypothesis import HealthCheck, settings

# Before anything loads torch, and OpenMP with it. Other tests and other programs want the cores too, and a thread that
# spins keeps them from the very one it waits for: the kernels' tests took four times as long.
os.environ.setdefault("GOMP_SPINCOUNT", "0")

# What is imported stays: the collector need not look at it, neither while it grows nor between tests.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


settings.register_profile("pagoda", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("pagoda")


@pytest.fixture(autouse=True)
def same_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests without a seed draw the same tokens in each run: one in some hundred would end an answer early."""
    monkeypatch.setattr("pagoda.model.sampler.secrets.randbits", lambda _: 1)
