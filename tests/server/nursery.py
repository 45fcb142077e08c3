"""`pagoda serve` as processes of their own: one imports, which takes longest, and forks a server when told to."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.waiting import until

ROOT = Path(__file__).parents[2]
IMPORTS = "import pagoda.engine.engine, pagoda.kv.tiers.disk, pagoda.server.app, pagoda.server.run, uvicorn\n"
# A line asks for a server, with a file for what it prints and its arguments, or for the end of one.
LOOP = """
import json, os, sys
from pagoda.cli import main
for line in sys.stdin:
    asked = json.loads(line)
    if isinstance(asked, int):
        print(os.waitstatus_to_exitcode(os.waitpid(asked, 0)[1]), flush=True)
    elif pid := os.fork():
        print(pid, flush=True)
    else:
        log, *sys.argv = asked
        printed = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(printed, 1), os.dup2(printed, 2)
        main()
        sys.exit()
"""


class Server:
    """A server that answers; `log` has what it prints."""

    def __init__(self, nursery: Nursery, arguments: list[str], log: Path) -> None:
        self.log = log
        self._nursery = nursery
        self.pid = nursery.ask([str(log), "pagoda", "serve", "--port", "0", *arguments])
        nursery.living.add(self.pid)
        until(lambda: "curl" in self.printed or not Path(f"/proc/{self.pid}/cmdline").read_bytes())
        found = re.search(r"curl (http://127\.0\.0\.1:\d+)", self.printed)
        assert found, self.printed
        self.url = found[1]
        until(self._is_healthy)

    @property
    def printed(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def _is_healthy(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health").is_success
        except httpx.TransportError:
            return False

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def wait(self) -> int:
        """The exit status, once it has ended; that of the signal that killed it, negated."""
        status = self._nursery.ask(self.pid)
        self._nursery.living.remove(self.pid)
        return status

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        assert self.wait() == -signal.SIGKILL


class Nursery:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.living: set[int] = set()

    def ask(self, what: list[str] | int) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(what), file=self._process.stdin, flush=True)
        return int(self._process.stdout.readline())


@contextmanager
def nursery(prelude: str = "") -> Iterator[Nursery]:
    """Servers started here run `prelude` first; those that still live in the end are killed."""
    command = [sys.executable, "-c", IMPORTS + prelude + LOOP]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        made = Nursery(process)
        try:
            yield made
        finally:
            for pid in made.living:
                os.kill(pid, signal.SIGKILL)
