"""One virtual environment per engine, made once and kept, and work that is done in one."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.peers.engines import Environment

_MARK = "installed"


class InstallError(Exception):
    """An environment could not be made; the message ends with pip's last lines."""


class SideError(Exception):
    """Work in an environment failed; the message ends with its last lines."""


def python_of(environment: Environment | None, folder: Path, tell: Callable[[str], None]) -> Path:
    """The interpreter of an environment below `folder`, which is made if it is not there or its packages changed.

    Raises:
        InstallError: venv or pip failed.
    """
    if environment is None:
        return Path(sys.executable)
    home = folder / environment.name
    python = home / "bin" / "python"
    wanted = hashlib.sha256(repr(environment).encode()).hexdigest()
    mark = home / _MARK
    if mark.is_file() and mark.read_text() == wanted:
        return python
    if home.exists():
        shutil.rmtree(home)
    tell(f"{environment.name}: making a virtual environment")
    _run([sys.executable, "-m", "venv", str(home)])
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    for step in environment.steps:
        tell(f"{environment.name}: installing {' '.join(step)} (minutes)")
        _run([*pip, "install", "--quiet", *step])
    if environment.removed:
        _run([*pip, "uninstall", "--quiet", "--yes", *environment.removed])
    mark.write_text(wanted)
    return python


def done_by(python: Path, script: Path, work: Mapping[str, Any]) -> dict[str, Any]:
    """What `python script WORK.json RESULT.json` makes of this work.

    Raises:
        SideError: it failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder) / "work.json", Path(folder) / "result.json"
        asked.write_text(json.dumps(work))
        done = subprocess.run(
            [str(python), str(script), str(asked), str(answered)],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        if done.returncode:
            raise SideError(f"{script.name} failed:\n" + "\n".join(done.stderr.splitlines()[-8:]))
        result: dict[str, Any] = json.loads(answered.read_text())
    return result


def _run(command: list[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise InstallError(f"{' '.join(command)} failed:\n" + "\n".join(done.stdout.splitlines()[-15:]))
