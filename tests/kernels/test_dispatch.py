"""Which backend and instruction set the environment chooses; each case in a process that has imported torch alone."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

built = pytest.mark.skipif(
    importlib.util.find_spec("pagoda._native") is None, reason="the native extension is not built"
)
SHOW = "import pagoda.kernels as k; print(k.backend_name())"
HIDE_NATIVE = "import sys; sys.modules['pagoda._native'] = None; "


# Importing torch takes longer than all else here: one process does, and forks for each line that it reads.
FORKS = """
import json, os, sys, torch, traceback
for line in sys.stdin:
    code, env, out, err = json.loads(line)
    pid = os.fork()
    if not pid:
        for path, file in ((out, 1), (err, 2)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), file)
        os.environ.update(env)
        try:
            exec(code)
        except Exception:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(pid, 0)
    print(flush=True)
"""


@dataclass(frozen=True)
class Printed:
    stdout: str
    stderr: str


Python = Callable[..., Printed]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Python]:
    folder: Path = tmp_path_factory.mktemp("printed")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PAGODA_")}
    command = [sys.executable, "-c", FORKS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=clean) as process:

        def run(code: str, **env: str) -> Printed:
            assert process.stdin is not None
            assert process.stdout is not None
            out, err = (folder / f"{name}-{len(list(folder.iterdir()))}" for name in ("out", "err"))
            print(json.dumps([code, env, str(out), str(err)]), file=process.stdin, flush=True)
            assert process.stdout.readline()
            return Printed(out.read_text(), err.read_text())

        yield run


@built
def test_native_is_the_default(python: Python) -> None:
    assert python(SHOW).stdout.strip() == "native"


def test_the_reference_can_be_forced_and_is_silent(python: Python) -> None:
    result = python(SHOW, PAGODA_KERNELS="reference")
    assert result.stdout.strip() == "reference"
    assert result.stderr == ""


def test_a_missing_extension_is_one_warning(python: Python) -> None:
    result = python(HIDE_NATIVE + SHOW + "; import pagoda.kernels, pagoda.kernels.dispatch")
    assert result.stdout.strip() == "reference"
    assert result.stderr.count("RuntimeWarning") == 1


def test_a_missing_extension_that_was_asked_for_is_an_error(python: Python) -> None:
    result = python(HIDE_NATIVE + SHOW, PAGODA_KERNELS="native")
    assert "ConfigError" in result.stderr


def test_an_unknown_backend_is_an_error(python: Python) -> None:
    assert "ConfigError" in python(SHOW, PAGODA_KERNELS="cuda").stderr


@built
def test_the_instruction_set_can_be_forced(python: Python) -> None:
    code = "import pagoda.kernels; from pagoda import _native; print(_native.isa())"
    assert python(code, PAGODA_ISA="portable").stdout.strip() == "portable"
    assert "ConfigError" in python(code, PAGODA_ISA="mmx").stderr
