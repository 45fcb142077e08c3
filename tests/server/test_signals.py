"""`pagoda serve` as a process of its own, with a fake engine: what signals do."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
from types import SimpleNamespace
from pagoda import cli
from pagoda.cli import options
from tests.server.fake_backend import FakeBackend

sizes = dict(num_blocks=1000, block_size=16, bytes_total=2**30, tokens_total=16000, users_at_full_context=7.8)
cache = SimpleNamespace(kv_format="auto", **sizes)
core = SimpleNamespace(pressure=SimpleNamespace(report=SimpleNamespace(memory_limit=None)))
engine = SimpleNamespace(model_name="fake", max_model_len=2048, core=core, cache_info=lambda: cache)
options.load_engine = lambda model, **settings: engine
options.as_async = lambda engine: FakeBackend(step_s=0.02)
sys.argv = ["pagoda", "serve", "--port", "0", "--log-level", "error"]
cli.main()
"""


@pytest.fixture
def served() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and its URL, taken from the curl line it prints."""
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stderr is not None
    try:
        printed = ""
        while "curl" not in printed:
            line = process.stderr.readline()
            assert line, printed
            printed += line
        assert "1.0 GiB = 1,000 blocks of 16 = 16,000 tokens = 7.8 users at full context" in printed
        found = re.search(r"curl (http://127\.0\.0\.1:\d+)", printed)
        assert found
        _await_health(found[1])
        yield process, found[1]
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def _await_health(url: str) -> None:
    for _ in range(200):
        try:
            if httpx.get(f"{url}/health").is_success:
                return
        except httpx.TransportError:
            time.sleep(0.02)
    pytest.fail("the server did not come up")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_streams_finish(served: tuple[subprocess.Popen[str], str], number: signal.Signals) -> None:
    process, url = served
    body = {"prompt": "x", "max_tokens": 25, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=10) as response:
        lines = response.iter_lines()
        next(lines)
        process.send_signal(number)
        text = "".join(lines)
    assert '"finish_reason":"length"' in text
    assert text.endswith("[DONE]")
    assert process.wait(5) == 0


def test_a_second_interrupt_ends_at_once(served: tuple[subprocess.Popen[str], str]) -> None:
    process, url = served
    body = {"prompt": "x", "max_tokens": 1000, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=10) as response:
        lines = response.iter_lines()  # kept: once collected, it closes the connection
        next(lines)
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(3) == 130
