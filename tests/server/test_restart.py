"""`pagoda serve --tier disk:...` as a process of its own: stopped or killed, it comes back warm and answers alike."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from pagoda import Engine, SamplingParams
from tests.model import models, tokenizers_made_here

ROOT = Path(__file__).parents[2]
# A model as tiny as this one computes faster than a busy machine restores: let the server believe that it is slow.
PROGRAM = """
from pagoda.engine import scheduler
scheduler._FIRST_GUESS_S_PER_TOKEN = 100.0
from pagoda.cli import main
main()
"""
PROMPTS = [
    f"Ledger {n}: the harbour master counts the boats at dawn and at dusk, {n} days in a row, and writes down "
    "the tide, the wind and the name of every captain who paid." * 2
    for n in range(6)
]


@dataclass
class Server:
    process: subprocess.Popen[str]
    url: str
    printed: list[str]

    def ask(self, prompt: str) -> tuple[str, int]:
        """The answer and how many tokens of the prompt were cached."""
        body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        response = httpx.post(f"{self.url}/v1/completions", json=body, timeout=30)
        response.raise_for_status()
        answer: dict[str, Any] = response.json()
        return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    def metric(self, name: str) -> float:
        """A sample of /metrics, by its name and labels as written there."""
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        return next(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + " "))

    def until_stored(self, num_records: int) -> None:
        """Wait for the writer: what is not on disk yet is not there after a kill."""
        end = time.monotonic() + 10
        while self.metric('pagoda_tier_records{tier="disk"}') < num_records:
            assert time.monotonic() < end, "nothing came to the disk"
            time.sleep(0.02)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = tokenizers_made_here.byte_level()
    built = models.build("llama", vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=512)
    return tokenizers_made_here.save(tokenizer, models.save(built, tmp_path_factory.mktemp("tiny")))


@contextmanager
def serving(model: Path, disk: Path) -> Iterator[Server]:
    command = [sys.executable, "-c", PROGRAM, "serve", str(model), "--port", "0", "--dtype", "float32"]
    command += ["--kv-memory", "1MiB", "--log-level", "warning", "--tier", f"disk:{disk}:64MiB"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stderr is not None
    printed: list[str] = []
    try:
        while not printed or "curl" not in printed[-1]:
            line = process.stderr.readline()
            assert line, "".join(printed)
            printed.append(line)
        found = re.search(r"curl (http://127\.0\.0\.1:\d+)", printed[-1])
        assert found
        # Somebody has to read on, or the process would block once the pipe is full.
        reader = threading.Thread(target=lambda: printed.extend(process.stderr or ()), daemon=True)
        reader.start()
        server = Server(process, found[1], printed)
        _await_health(server)
        yield server
    finally:
        process.kill()
        process.wait()


def _await_health(server: Server) -> None:
    for _ in range(500):
        try:
            if httpx.get(f"{server.url}/health").is_success:
                return
        except httpx.TransportError:
            time.sleep(0.02)
    pytest.fail("".join(server.printed))


def stop(server: Server) -> None:
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(20) == 0


def test_a_server_that_is_started_again_is_warm(model: Path, tmp_path: Path) -> None:
    with serving(model, tmp_path / "kv") as server:
        text, cached = server.ask(PROMPTS[0])
        assert cached == 0
        stop(server)  # at once: stopping writes what is queued
    with serving(model, tmp_path / "kv") as server:
        again, cached = server.ask(PROMPTS[0])
        assert again == text
        assert cached > 50
        assert cached % 16 == 0
        assert server.metric("pagoda_restored_tokens_total") == cached
        assert server.metric('pagoda_tier_restored_tokens_total{tier="disk"}') == cached
        [tier] = httpx.get(f"{server.url}/health").json()["tiers"]
        assert tier["name"] == "disk"
        assert tier["state"] == "closed"
        assert tier["num_records"] >= cached // 16
        stop(server)
        assert "Traceback" not in "".join(server.printed)


@pytest.mark.slow
def test_killed_in_traffic_it_comes_back_warm_and_right(model: Path, tmp_path: Path) -> None:
    engine = Engine(str(model), dtype="float32", kv_memory="1MiB", progress=False)
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    expected = {prompt: engine.generate(prompt, params)[0].text for prompt in PROMPTS}
    for round_number in range(3):
        with serving(model, tmp_path / "kv") as server, ThreadPoolExecutor(4) as clients:
            text, cached = server.ask(PROMPTS[0])
            assert text == expected[PROMPTS[0]]
            assert (cached > 50) == (round_number > 0)
            server.until_stored(5)
            asked = [(prompt, clients.submit(server.ask, prompt)) for prompt in PROMPTS[: 3 + round_number] * 4]
            time.sleep(0.03 * (1 + round_number))
            server.process.send_signal(signal.SIGKILL)
            for prompt, answer in asked:
                error = answer.exception()
                assert error is None or isinstance(error, httpx.TransportError), error
                assert error is not None or answer.result()[0] == expected[prompt]
    with serving(model, tmp_path / "kv") as server:
        assert {prompt: server.ask(prompt)[0] for prompt in PROMPTS} == expected
        assert server.ask(PROMPTS[0])[1] > 50
        printed = "".join(server.printed)
    assert "Traceback" not in printed
