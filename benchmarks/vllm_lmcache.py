"""LMCache in its multi-process mode, for `benchmarks.vllm`: its environment over vLLM's, its server, its connector."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

# Without its dependencies, which would put other versions over vLLM's; what it needs here and vLLM has not comes after.
_STEPS = (
    ("--no-deps", "lmcache==0.5.6"),
    ("--no-deps", "aiofile", "caio", "aiofiles", "msgpack", "nvtx", "sortedcontainers", "redis", "xxhash"),
    ("--no-deps", "opentelemetry-exporter-prometheus==0.66b2"),
)


def lmcache_python(vllm: Path, home: Path, tell: Callable[[str], None]) -> Path:
    """An interpreter that has vLLM's packages and LMCache, made below `home` if it is not there."""
    python, mark = home / "bin" / "python", home / "installed"
    if mark.is_file():
        return python
    tell("LMCache: making a virtual environment")
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(home)], check=True)
    where = "import site; print(site.getsitepackages()[0])"
    theirs = subprocess.run([vllm, "-c", where], capture_output=True, text=True, check=True).stdout.strip()
    ours = subprocess.run([python, "-c", where], capture_output=True, text=True, check=True).stdout.strip()
    (Path(ours) / "vllm.pth").write_text(theirs + "\n")
    for step in _STEPS:
        subprocess.run([python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *step], check=True)
    mark.touch()
    return python


class LMCacheServer:
    """`lmcache server` with a small memory and a folder, on this machine only."""

    def __init__(self, python: Path, folder: Path, chunk_size: int, log: Path) -> None:
        self._port = _free_port()
        command = [
            str(python), "-c", "import sys; from lmcache.cli.main import main; sys.exit(main())", "server",
            "--host", "127.0.0.1", "--port", str(self._port),
            "--http-host", "127.0.0.1", "--http-port", str(_free_port()),
            "--supported-transfer-mode", "engine_driven", "--chunk-size", str(chunk_size),
            "--l1-size-gb", "0.5", "--l1-init-size-gb", "1", "--eviction-policy", "LRU",
            "--l2-adapter", json.dumps({"type": "fs", "base_path": str(folder)}),
        ]  # fmt: skip
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command, stdout=output, stderr=output, start_new_session=True,
                env={**os.environ, "LMCACHE_TRACK_USAGE": "false"},
            )  # fmt: skip
        deadline = time.monotonic() + 120
        while not _answers(self._port):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.close()
                tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
                raise RuntimeError(f"the LMCache server did not start:\n{tail}")
            time.sleep(0.2)

    @property
    def connector(self) -> dict[str, Any]:
        """The KV transfer config for it: the connector that LMCache ships."""
        return {
            "kv_connector": "LMCacheMPConnector",
            "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": self._port},
        }

    def close(self) -> None:
        """End it and all that it started."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)
            try:
                self._process.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0
