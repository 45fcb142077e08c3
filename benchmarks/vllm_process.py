"""A vLLM in a process of its own, for `benchmarks.vllm` and the tests against the real one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Self

from benchmarks.peers.engines import all_cores

ROOT = Path(__file__).resolve().parents[1]
_START_S = 300.0


class VllmError(Exception):
    """vLLM ended; the message has the last lines of its log."""


class VllmProcess:
    """`benchmarks.vllm_driver`, in a process group that is gone when this is closed.

    Args:
        python: an interpreter that has vLLM.
        model: a folder.
        connector: its KV transfer config; None for vLLM alone.
        log: where its output goes.
        env: more of the environment; PYTHONPATH has this repository.
    """

    def __init__(
        self,
        python: Path,
        model: Path,
        connector: Mapping[str, Any] | None,
        log: Path,
        *,
        env: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> None:
        self._log = log
        asked = {"model": str(model), "kv_transfer_config": connector, **settings}
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [str(python), "-m", "benchmarks.vllm_driver", json.dumps(asked)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                cwd=ROOT,
                text=True,
                env={**os.environ, "PYTHONPATH": str(ROOT), **_ENV, **(env or {})},
                start_new_session=True,
            )
        self._read()

    def run(self, tokens: list[int], max_tokens: int = 1, **more: Any) -> dict[str, Any]:
        """Generate; see the driver."""
        return self._ask({"op": "run", "tokens": tokens, "max_tokens": max_tokens, **more})

    def reset(self) -> None:
        """Let vLLM forget its own prefix cache."""
        if not self._ask({"op": "reset"})["done"]:
            raise VllmError("vLLM refused to reset its prefix cache")

    def metrics(self) -> list[str]:
        """Pagoda's lines of `/metrics`."""
        lines: list[str] = self._ask({"op": "metrics"})["lines"]
        return lines

    def end(self, timeout_s: float = 60.0) -> list[int]:
        """Let it end as it would; returns the processes it leaves running, which are killed."""
        deadline = time.monotonic() + timeout_s
        self._ask({"op": "end"})
        self._process.wait(timeout_s)
        while (left := self.group()) and time.monotonic() < deadline:
            time.sleep(0.1)  # Python's own resource tracker ends a moment after those it watches
        self.close()
        return left

    def group(self) -> list[int]:
        """The processes it started that still run, itself included."""
        found = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = path.read_text().rpartition(")")[2].split()
            except OSError:
                continue  # ended meanwhile
            if int(fields[3]) == self._process.pid and fields[0] != "Z":  # its session
                found.append(int(path.parent.name))
        return found

    def kill(self) -> None:
        """End it as a crash would."""
        for pid in self.group():
            os.kill(pid, signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        """Make sure that nothing of it runs."""
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        pipe: IO[str] | None = self._process.stdin
        assert pipe is not None
        try:
            pipe.write(json.dumps(message) + "\n")
            pipe.flush()
        except BrokenPipeError:
            pass  # reading tells why
        return self._read()

    def _read(self) -> dict[str, Any]:
        pipe = self._process.stdout
        assert pipe is not None
        line = pipe.readline()
        if not line:
            self.kill()
            tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-25:])
            raise VllmError(f"vLLM ended with {self._process.returncode}:\n{tail}")
        answer: dict[str, Any] = json.loads(line)
        return answer


# One GiB of KV; the same cores with and without a connector, for which vLLM would reserve one; no messages to others.
_ENV = {
    "VLLM_CPU_OMP_THREADS_BIND": all_cores(),
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOOPBACK_IP": "127.0.0.1",
}


def pagoda_connector(*tiers: str, **more: Any) -> dict[str, Any]:
    """The KV transfer config that loads Pagoda's connector."""
    return {
        "kv_connector": "PagodaConnector",
        "kv_connector_module_path": "pagoda.integrations.vllm_connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"tiers": list(tiers), **more},
    }


def vllm_python() -> Path | None:
    """The interpreter of PAGODA_VLLM_PYTHON, or of the environment that `make bench-peers` made; None without."""
    named = os.environ.get("PAGODA_VLLM_PYTHON")
    path = Path(named) if named else Path.home() / ".cache" / "pagoda" / "peers" / "vllm" / "bin" / "python"
    return path if path.is_file() else None
