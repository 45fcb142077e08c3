"""Replicas as processes: started, restarted, and never left behind. The program here is a tiny server."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from pagoda.cluster.local import ENV, LocalReplicas, ReplicaOf
from pagoda.errors import ConfigError
from tests.waiting import PATIENCE_S, until

ROOT = Path(__file__).parents[2]
PROGRAM = """
import http.server, os, signal, sys
from pagoda.cluster.local import ReplicaOf
me = ReplicaOf.from_environment()
me.die_with_parent()
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = f"{me.number} {me.count} {os.getpid()} {os.environ['PAGODA_CLUSTER_TOKEN']}".encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *args):
        pass
server = http.server.HTTPServer(("", 0), Handler, bind_and_activate=False)
server.socket = me.listen()
server.server_activate()
server.serve_forever()
"""
COMMAND = [sys.executable, "-c", PROGRAM]


@asynccontextmanager
async def running(count: int, command: list[str] = COMMAND) -> AsyncIterator[LocalReplicas]:
    replicas = LocalReplicas(count, command, {"PYTHONPATH": str(ROOT)})
    task = asyncio.create_task(replicas.run())
    try:
        yield replicas
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def ask(url: str) -> list[str]:
    async with asyncio.timeout(PATIENCE_S), httpx.AsyncClient(trust_env=False) as client:
        while True:
            try:
                return (await client.get(url)).text.split()
            except httpx.HTTPError:
                await asyncio.sleep(0.05)


async def test_each_knows_who_it_is_and_a_dead_one_comes_back_to_its_place() -> None:
    async with running(2) as replicas:
        first, second = [await ask(url) for url in replicas.urls]
        assert (first[:2], second[:2]) == (["0", "2"], ["1", "2"])
        assert first[3] == second[3] == replicas.token
        os.kill(int(first[2]), signal.SIGKILL)
        async with asyncio.timeout(PATIENCE_S):
            while (again := await ask(replicas.urls[0]))[2] == first[2]:
                await asyncio.sleep(0.05)
        assert again[:2] == ["0", "2"]
        assert replicas.num_restarts == 1
        pids = replicas.pids
    assert not any(_is_alive(pid) for pid in pids)


async def test_a_dead_ones_address_refuses_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or else requests would wait in a queue that nobody reads."""
    monkeypatch.setattr("pagoda.cluster.local._FIRST_PAUSE_S", PATIENCE_S)  # it does not come back meanwhile
    async with running(1) as replicas:
        pid = int((await ask(replicas.urls[0]))[2])
        os.kill(pid, signal.SIGKILL)
        while _is_alive(pid):
            await asyncio.sleep(0.01)
        async with httpx.AsyncClient(trust_env=False) as client:
            with pytest.raises(httpx.ConnectError):
                await client.get(replicas.urls[0], timeout=PATIENCE_S)


async def test_settings_that_are_refused_are_not_tried_for_ever() -> None:
    replicas = LocalReplicas(1, [sys.executable, "-c", "raise SystemExit(2)"])
    with pytest.raises(ConfigError, match="does not start"):
        await asyncio.wait_for(replicas.run(), PATIENCE_S)


def test_no_replica_outlives_a_parent_that_is_killed() -> None:
    parent = (
        "import asyncio, sys\n"
        "from pagoda.cluster.local import LocalReplicas\n"
        "replicas = LocalReplicas(2, sys.argv[1:])\n"
        "async def main():\n"
        "    task = asyncio.create_task(replicas.run())\n"
        "    await asyncio.sleep(0)\n"
        "    print(*replicas.pids, flush=True)\n"
        "    await task\n"
        "asyncio.run(main())\n"
    )
    process = subprocess.Popen([sys.executable, "-c", parent, *COMMAND], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    pids = [int(pid) for pid in process.stdout.readline().split()]
    process.kill()
    process.wait()
    process.stdout.close()
    assert len(pids) == 2
    until(lambda: not any(_is_alive(pid) for pid in pids))


def test_only_a_replica_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENV, raising=False)
    assert ReplicaOf.from_environment() is None


def _is_alive(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return status != "Z"
