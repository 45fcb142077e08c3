"""`pagoda serve` as a process of its own, with a fake engine: what signals do."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.waiting import PATIENCE_S

from .nursery import Nursery, Server, nursery

FAKE_ENGINE = """
from types import SimpleNamespace
from pagoda.cli import options
from tests.server.fake_backend import FakeBackend

sizes = dict(num_blocks=1000, block_size=16, bytes_total=2**30, tokens_total=16000, users_at_full_context=7.8)
cache = SimpleNamespace(kv_format="auto", **sizes)
core = SimpleNamespace(pressure=SimpleNamespace(report=SimpleNamespace(memory_limit=None)))
engine = SimpleNamespace(model_name="fake", max_model_len=2048, core=core, cache_info=lambda: cache)
options.load_engine = lambda model, **settings: engine
options.as_async = lambda engine: FakeBackend(step_s=0.02)
"""


@pytest.fixture(scope="module")
def parent() -> Iterator[Nursery]:
    with nursery(FAKE_ENGINE) as parent:
        yield parent


@pytest.fixture
def server(parent: Nursery, tmp_path: Path) -> Server:
    server = Server(parent, ["--log-level", "error"], tmp_path / "log")
    assert "1.0 GiB = 1,000 blocks of 16 = 16,000 tokens = 7.8 requests at full context" in server.printed
    return server


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_streams_finish(server: Server, number: signal.Signals) -> None:
    body = {"prompt": "x", "max_tokens": 25, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S) as response:
        lines = response.iter_lines()
        next(lines)
        server.send(number)
        text = "".join(lines)
    assert '"finish_reason":"length"' in text
    assert text.endswith("[DONE]")
    assert server.wait() == 0


def test_a_second_interrupt_ends_at_once(server: Server) -> None:
    body = {"prompt": "x", "max_tokens": 1000, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S) as response:
        lines = response.iter_lines()  # kept: once collected, it closes the connection
        next(lines)
        server.send(signal.SIGINT)
        end = time.monotonic() + 0.3
        while time.monotonic() < end:
            assert next(lines) is not None  # it goes on
        server.send(signal.SIGINT)
        assert server.wait() == 130
