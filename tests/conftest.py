"""For all tests: random inputs are made at whatever speed a busy machine has, and no test hangs on a lucky draw."""

import asyncio
import gc
import os
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

FOLDER = Path(__file__).parent

# Before anything loads torch, and OpenMP with it. Other tests and other programs want the cores too, and a thread that
# spins keeps them from the very one it waits for: the kernels' tests took four times as long.
os.environ.setdefault("GOMP_SPINCOUNT", "0")

# Workers take file after file. These take longest: begun first, they keep none at work when the others are done.
LONGEST = (
    "soak/test_soak.py",
    "engine/test_hedging.py",
    "kernels/test_quantized_native.py",
    "kernels/test_attention.py",
    "kernels/test_fused.py",
    "kv/test_cache_stateful.py",
    "model/test_smollm2.py",
    "engine/test_formats.py",
    "server/test_restart.py",
    "benchmarks/test_blend.py",
    "server/test_dashboard_browser.py",
    "server/test_kv_admin.py",
    "server/test_caches.py",
    "sparse/test_recall_in_engine.py",
    "sparse/test_policies.py",
    "sparse/test_in_engine.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ranks = {FOLDER / name: rank for rank, name in enumerate(LONGEST)}
    items.sort(key=lambda item: ranks.get(item.path, len(ranks)))


# What is imported stays: the collector need not look at it, neither while it grows nor between tests, nor often at all.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)
    gc.enable()


settings.register_profile("pagoda", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("pagoda")


class _Hasty:
    """asyncio in whose sleep a second takes a tenth."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    @staticmethod
    async def sleep(seconds: float) -> None:
        await asyncio.sleep(seconds / 10)


@pytest.fixture(autouse=True, scope="session")
def haste() -> Iterator[None]:
    """A quarter of a second in each of hundreds of tests: uvicorn rests as it ends, and clients read certificates."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("uvicorn.server.asyncio", _Hasty())
        patch.setattr(ssl.SSLContext, "load_verify_locations", lambda *_, **__: None)  # no test has a server with TLS
        yield


@pytest.fixture(autouse=True)
def same_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests without a seed draw the same tokens in each run: one in some hundred would end an answer early."""
    monkeypatch.setattr("pagoda.model.sampler.secrets.randbits", lambda _: 1)
