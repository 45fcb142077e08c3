"""An engine in a process of its own: started, asked, and stopped while others compute."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from benchmarks.peers.engines import EngineSpec
from benchmarks.peers.messages import Result, Round

ROOT = Path(__file__).resolve().parents[2]


class PeerError(Exception):
    """An engine failed at what was asked; it can be asked something else."""


class PeerGoneError(PeerError):
    """An engine's process ended or took too long and was killed; the message names its log."""


class PeerProcess:
    """An adapter in its environment, in a process group that can be stopped and continued as a whole."""

    def __init__(self, spec: EngineSpec, python: Path, log: Path, timeout_s: float) -> None:
        self.spec = spec
        self._log = log
        self._timeout_s = timeout_s
        self._unread = b""
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                [str(python), "-m", f"benchmarks.peers.adapters.{spec.adapter}"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                cwd=ROOT,
                env={**os.environ, **spec.env},
                start_new_session=True,
            )

    def load(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Load the engine; returns what it says of itself."""
        info: dict[str, Any] = self._ask({"op": "load", "settings": settings})["info"]
        return info

    def run(self, work: Round) -> list[Result]:
        """Measure a round.

        Raises:
            PeerError: the engine reported an error.
            PeerGoneError: its process ended or ran out of time.
        """
        answer = self._ask({"op": "run", "round": work.to_json()})
        return [Result(**result) for result in answer["results"]]

    def pause(self) -> None:
        """Stop all its threads, also those that wait by spinning."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Undo `pause`."""
        self._signal(signal.SIGCONT)

    def idle_cpus(self, seconds: float = 1.0) -> float:
        """How many cores it uses although nothing is asked of it, measured over `seconds`."""
        before = self._cpu_s()
        time.sleep(seconds)
        return (self._cpu_s() - before) / seconds

    def close(self) -> None:
        """End the process."""
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._gone("ended") from None
        answer: dict[str, Any] = json.loads(self._read_line())
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer

    def _read_line(self) -> bytes:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        deadline = time.monotonic() + self._timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise self._gone(f"took over {self._timeout_s:.0f} s")
                piece = os.read(descriptor, 1 << 20)
                if not piece:
                    raise self._gone(f"ended with status {self._process.wait()}")
                self._unread += piece
        line, self._unread = self._unread.split(b"\n", 1)
        return line

    def _gone(self, why: str) -> PeerGoneError:
        self.close()
        lines = self._log.read_text(errors="replace").splitlines()
        return PeerGoneError(
            f"the process of {self.spec.name} {why}; {self._log} ends with: {lines[-1] if lines else ''}"
        )

    def _signal(self, number: signal.Signals) -> None:
        if self._process.returncode is None:
            os.killpg(self._process.pid, number)

    def _cpu_s(self) -> float:
        """CPU seconds of all processes of the group, from /proc: fields 5 (group), 14 and 15 (user and system time)."""
        ticks = 0
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = path.read_text().rpartition(")")[2].split()
            except OSError:
                continue  # ended meanwhile
            if int(fields[2]) == self._process.pid:
                ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")
