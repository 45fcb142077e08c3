"""Replicas as processes of this machine: started, restarted when they die, ended together.

    parent: router ── listening socket, pipe, token ──────────> replica 0
                   └─────────────────────────────────────────> replica 1   ...

The parent binds each replica's address, so it is known before the replica listens, and stays the same when the replica
is started again. A replica ends when its pipe closes, so none outlives the parent, however that ends.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from pagoda.errors import ConfigError
from pagoda.server.sockets import bind

logger = logging.getLogger(__name__)

ENV = "PAGODA_REPLICA"
TOKEN_ENV = "PAGODA_CLUSTER_TOKEN"
HOST = "127.0.0.1"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_FINE_AFTER_S = 60.0
_POLL_S = 0.1
_REFUSED = 2  # how the command line ends when a setting is wrong


@dataclass(frozen=True, slots=True)
class ReplicaOf:
    """What a replica is told of by its parent: which it is, of how many, and the descriptors it inherits."""

    number: int
    count: int
    listen_fd: int
    life_fd: int

    @classmethod
    def from_environment(cls) -> ReplicaOf | None:
        """Of this process; None if it is no replica. Its own children are none."""
        text = os.environ.pop(ENV, None)
        return None if text is None else cls(**json.loads(text))

    def own(self, path: Path | None) -> Path | None:
        """A file's name for this replica alone."""
        return None if path is None else path.with_name(f"{path.name}.{self.number}")

    def listen(self) -> socket.socket:
        """The socket that the parent bound."""
        return socket.socket(fileno=self.listen_fd)

    def die_with_parent(self) -> None:
        """From now on, end as on SIGTERM when the parent is gone."""

        def wait() -> None:
            os.read(self.life_fd, 1)
            os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=wait, name="pagoda-parent", daemon=True).start()


class _Process:
    """One replica, through all its restarts."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.address = bind(HOST, 0)
        self.port: int = self.address.getsockname()[1]
        self.process: subprocess.Popen[bytes] | None = None
        self.started_at = 0.0
        self.pause_s = _FIRST_PAUSE_S
        self.restart_at: float | None = None


class LocalReplicas:
    """Runs `command` once for each replica.

    Args:
        command: the program and its arguments; the environment tells it which replica it is.
        environment: besides this process's own.
        token: the cluster's; a fresh one when None.
    """

    def __init__(
        self,
        count: int,
        command: Sequence[str],
        environment: Mapping[str, str] = MappingProxyType({}),
        *,
        token: str | None = None,
    ) -> None:
        if count < 1:
            raise ConfigError(f"there must be a replica, got {count}")
        self.token = secrets.token_urlsafe(32) if token is None else token
        self._command = list(command)
        self._environment = {
            "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // count)),
            **os.environ,
            TOKEN_ENV: self.token,
            **environment,
        }
        self._replicas = [_Process(number) for number in range(count)]
        self._life = os.pipe()
        self.num_restarts = 0

    @property
    def urls(self) -> list[str]:
        """Where they answer."""
        return [f"http://{HOST}:{replica.port}" for replica in self._replicas]

    @property
    def pids(self) -> list[int]:
        """The processes that run now."""
        return [replica.process.pid for replica in self._replicas if replica.process is not None]

    async def run(self) -> None:
        """Start them, and start again whichever ends, until cancelled; then end them.

        Raises:
            ConfigError: one refuses its settings, as all would, however often.
        """
        try:
            for replica in self._replicas:
                self._start(replica)
            while True:
                await asyncio.sleep(_POLL_S)
                for replica in self._replicas:
                    self._look_after(replica)
        finally:
            await self._stop()

    def _start(self, replica: _Process) -> None:
        listener, life = replica.address.fileno(), self._life[0]
        told = {"number": replica.number, "count": len(self._replicas), "listen_fd": listener, "life_fd": life}
        replica.process = subprocess.Popen(
            self._command,
            env={**self._environment, ENV: json.dumps(told)},
            stdin=subprocess.DEVNULL,
            pass_fds=(listener, life),
            start_new_session=True,  # Ctrl-C is for the router, which ends them in order
        )
        # Only the replica may hold it: once it is dead, connections must be refused and not wait in a queue.
        replica.address.close()
        replica.started_at = time.monotonic()

    def _look_after(self, replica: _Process) -> None:
        now = time.monotonic()
        if replica.restart_at is not None:
            if now >= replica.restart_at:
                self._restart(replica)
            return
        if replica.process is None or replica.process.poll() is None:
            return
        status = replica.process.returncode
        if status == _REFUSED:
            raise ConfigError(f"replica {replica.number} does not start; it said why")
        if now - replica.started_at >= _FINE_AFTER_S:
            replica.pause_s = _FIRST_PAUSE_S
        pause_s = replica.pause_s
        logger.error("replica %d ended with status %d; it is started again in %g s", replica.number, status, pause_s)
        replica.restart_at = now + pause_s
        replica.pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _restart(self, replica: _Process) -> None:
        try:
            replica.address = bind(HOST, replica.port)
        except ConfigError as error:
            logger.error("replica %d: %s", replica.number, error)
            replica.restart_at = time.monotonic() + replica.pause_s
            return
        replica.restart_at = None
        self.num_restarts += 1
        self._start(replica)

    async def _stop(self, grace_s: float = 15.0) -> None:
        """End all: politely, and after a while not."""
        processes = [replica.process for replica in self._replicas if replica.process is not None]
        for process in processes:
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + grace_s
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        for end in self._life:
            os.close(end)
