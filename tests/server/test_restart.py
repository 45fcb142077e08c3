"""`pagoda serve --tier disk:...` as a process of its own: stopped or killed, it comes back warm and answers alike.

PAGODA_KILLS=200 kills it as often as a release asks for.
"""

from __future__ import annotations

import json
import os
import random
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
from pagoda.kv.tiers.disk import DiskTier
from pagoda.kv.tiers.records import Found, Target
from tests.model import models, tokenizers_made_here

ROOT = Path(__file__).parents[2]
# A model as tiny as this one computes faster than a busy machine restores: let the server believe that it is slow.
SLOW_MODEL = """
import functools
from pagoda.engine import scheduler
scheduler.PrefillSpeed = functools.partial(scheduler.PrefillSpeed, 100.0)
"""
PROGRAM = (
    SLOW_MODEL
    + """
from pagoda.cli import main
main()
"""
)
# Importing takes longer than everything else a server does here. So one process imports, and forks a server for each
# line that it reads: a file for its stderr and the arguments.
NURSERY = (
    SLOW_MODEL
    + """
import json, os, signal, sys
import pagoda.engine.engine, pagoda.kv.tiers.disk, pagoda.server.app, pagoda.server.run, uvicorn
from pagoda.cli import main
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for line in sys.stdin:
    log, *sys.argv = json.loads(line)
    pid = os.fork()
    if not pid:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
        main()
        os._exit(0)
    print(pid, flush=True)
"""
)
CAPACITY = 16 << 20
LONGEST_LIFE_S = 0.7
KILLS = int(os.environ.get("PAGODA_KILLS", "6"))
PROMPTS = [
    f"Ledger {n}: the harbour master counts the boats at dawn and at dusk, {n} days in a row, and writes down "
    "the tide, the wind and the name of every captain who paid." * 2
    for n in range(6)
]


@dataclass
class Asked:
    """A server, as its clients see it."""

    url: str

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


@dataclass
class Server(Asked):
    process: subprocess.Popen[str]
    printed: list[str]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = tokenizers_made_here.byte_level()
    built = models.build("llama", vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=512)
    return tokenizers_made_here.save(tokenizer, models.save(built, tmp_path_factory.mktemp("tiny")))


def arguments(model: Path, disk: Path) -> list[str]:
    command = ["serve", str(model), "--port", "0", "--dtype", "float32", "--kv-memory", "1MiB"]
    return [*command, "--log-level", "warning", "--tier", f"disk:{disk}:{CAPACITY}"]


@contextmanager
def serving(model: Path, disk: Path) -> Iterator[Server]:
    command = [sys.executable, "-c", PROGRAM, *arguments(model, disk)]
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
        server = Server(found[1], process, printed)
        _await_health(server)
        yield server
    finally:
        process.kill()
        process.wait()


def _await_health(server: Asked) -> None:
    for _ in range(500):
        try:
            if httpx.get(f"{server.url}/health").is_success:
                return
        except httpx.TransportError:
            time.sleep(0.02)
    pytest.fail("the server does not answer")


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


@contextmanager
def nursery() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", NURSERY]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


@dataclass
class Child(Asked):
    """A server forked by the nursery."""

    pid: int
    log: Path

    @classmethod
    def born(cls, nursery: subprocess.Popen[str], model: Path, disk: Path, log: Path) -> Child:
        assert nursery.stdin is not None
        assert nursery.stdout is not None
        nursery.stdin.write(json.dumps([str(log), "pagoda", *arguments(model, disk)]) + "\n")
        nursery.stdin.flush()
        pid = int(nursery.stdout.readline())
        end = time.monotonic() + 60
        while (found := re.search(r"curl (http://127\.0\.0\.1:\d+)", log.read_text() if log.exists() else "")) is None:
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.01)
        child = cls(found[1], pid, log)
        _await_health(child)
        return child

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        while Path(f"/proc/{self.pid}").exists():
            time.sleep(0.002)


def check_accounts(disk: Path) -> int:
    """Open what a killed server left: everything in it verifies and is counted exactly. Returns the records."""
    with DiskTier(disk, CAPACITY) as tier:
        usage, infos = tier.usage(), list(tier.scan())
        assert usage.num_records == len(infos) == len({info.id for info in infos})
        assert usage.payload_bytes == sum(info.num_bytes for info in infos)
        assert usage.used_bytes == sum(path.stat().st_size for path in disk.iterdir()) <= CAPACITY
        found = tier.get_into([Target(info.id, bytearray(info.num_bytes)) for info in infos])
        assert found == [Found(info.num_bytes) for info in infos]
        assert not [name for name in tier.stats() if name.startswith(("corrupt", "truncated", "wrong", "foreign"))]
    return len(infos)


@pytest.mark.slow
def test_killed_in_traffic_it_comes_back_warm_and_right(model: Path, tmp_path: Path) -> None:
    engine = Engine(str(model), dtype="float32", kv_memory="1MiB", progress=False)
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)

    def right(prompt: str) -> str:
        return engine.generate(prompt, params)[0].text

    first = right(PROMPTS[0])
    rng = random.Random(11)
    disk = tmp_path / "kv"
    num_warm = num_answers = num_records = 0
    with nursery() as parent, ThreadPoolExecutor(4) as clients:
        for kill in range(KILLS):
            server = Child.born(parent, model, disk, tmp_path / f"log-{kill}")
            text, cached = server.ask(PROMPTS[0])
            assert text == first
            num_warm += cached > 50
            if not kill:
                assert cached == 0
                server.until_stored(5)  # from here on the first prompt is on disk
            # New prompts, so that there is something to write, and old ones.
            prompts = [f"{kill}: {prompt}" for prompt in PROMPTS] + [f"{max(0, kill - 1)}: {PROMPTS[1]}"]
            asked = [(prompt, clients.submit(server.ask, prompt)) for prompt in prompts]
            time.sleep(rng.random() * LONGEST_LIFE_S)
            server.kill()
            for prompt, answer in asked:
                error = answer.exception()
                assert error is None or isinstance(error, httpx.TransportError), error
                assert error is not None or answer.result()[0] == right(prompt)
                num_answers += error is None
            num_records = check_accounts(disk)
            assert num_records >= 5
            assert "Traceback" not in server.log.read_text()
        server = Child.born(parent, model, disk, tmp_path / "log-last")
        assert [server.ask(prompt)[0] for prompt in prompts] == [right(prompt) for prompt in prompts]
        server.kill()
    print(
        f"{KILLS} kills, {num_warm} warm restarts, {num_answers} answers in traffic, {num_records} records in the end"
    )
    assert num_warm == KILLS - 1
    assert KILLS < 5 or num_answers > 0
