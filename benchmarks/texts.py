"""Real text that is on every machine: the source of Python's standard library."""

from __future__ import annotations

import argparse
import email.message
import http.server
import inspect
import logging
import socketserver
import subprocess
import tarfile
from types import ModuleType

_MODULES: tuple[ModuleType, ...] = (argparse, subprocess, logging, tarfile, http.server, socketserver, email.message)


def source_text(min_chars: int, *, first: int = 0) -> str:
    """At least `min_chars` characters of source code, starting with the module at index `first`."""
    text = ""
    for module in _MODULES[first:] + _MODULES[:first]:
        text += inspect.getsource(module)
        if len(text) >= min_chars:
            return text
    raise ValueError(f"there are only {len(text)} characters")
