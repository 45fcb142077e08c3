"""Which backend and instruction set the environment chooses; each case in a fresh interpreter."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

built = pytest.mark.skipif(
    importlib.util.find_spec("pagoda._native") is None, reason="the native extension is not built"
)
SHOW = "import pagoda.kernels as k; print(k.backend_name())"
HIDE_NATIVE = "import sys; sys.modules['pagoda._native'] = None; "


def python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PAGODA_")}
    return subprocess.run([sys.executable, "-c", code], env={**clean, **env}, capture_output=True, text=True)


@built
def test_native_is_the_default() -> None:
    assert python(SHOW).stdout.strip() == "native"


def test_the_reference_can_be_forced_and_is_silent() -> None:
    result = python(SHOW, PAGODA_KERNELS="reference")
    assert result.stdout.strip() == "reference"
    assert result.stderr == ""


def test_a_missing_extension_is_one_warning() -> None:
    result = python(HIDE_NATIVE + SHOW + "; import pagoda.kernels, pagoda.kernels.dispatch")
    assert result.stdout.strip() == "reference"
    assert result.stderr.count("RuntimeWarning") == 1


def test_a_missing_extension_that_was_asked_for_is_an_error() -> None:
    result = python(HIDE_NATIVE + SHOW, PAGODA_KERNELS="native")
    assert "ConfigError" in result.stderr


def test_an_unknown_backend_is_an_error() -> None:
    assert "ConfigError" in python(SHOW, PAGODA_KERNELS="cuda").stderr


@built
def test_the_instruction_set_can_be_forced() -> None:
    code = "import pagoda.kernels; from pagoda import _native; print(_native.isa())"
    assert python(code, PAGODA_ISA="portable").stdout.strip() == "portable"
    assert "ConfigError" in python(code, PAGODA_ISA="mmx").stderr
