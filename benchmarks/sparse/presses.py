"""NVIDIA's kvpress over our conversations, in an environment of its own."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.peers.engines import Environment
from benchmarks.peers.venvs import python_of
from benchmarks.peers.weights import export
from benchmarks.quality.compare import Compared
from benchmarks.sparse.conversations import Conversation
from benchmarks.sparse.quality import figures

_ENVIRONMENT = Environment("kvpress", (("torch==2.13.0",), ("kvpress==0.5.5", "transformers<5.3")))
_SIDE = Path(__file__).with_name("presses_side.py")


class PressError(Exception):
    """The other half failed; the message ends with its last lines."""


def measure(
    model: str,
    told: Sequence[Conversation],
    fractions: Sequence[float],
    venvs: Path,
    tell: Callable[[str], None],
) -> dict[str, Any]:
    """Points as `quality.Questions.measure` has them, for the policies that both have.

    Raises:
        InstallError: the environment could not be made.
        PressError: the measurement failed.
    """
    python = python_of(_ENVIRONMENT, venvs, tell)
    weights = export(model, venvs, tell)
    work = {
        "model": str(weights.folder),
        "threads": os.cpu_count(),
        "fractions": list(fractions),
        "conversations": [asdict(each) for each in told],
    }
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder) / "work.json", Path(folder) / "answers.json"
        asked.write_text(json.dumps(work))
        done = subprocess.run(
            [str(python), str(_SIDE), str(asked), str(answered)],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        if done.returncode:
            raise PressError("kvpress failed:\n" + "\n".join(done.stderr.splitlines()[-8:]))
        result: dict[str, Any] = json.loads(answered.read_text())
    for point in result["points"]:
        answers = [[Compared(**one) for one in of] for of in point.pop("answers")]
        point["known"] = figures([of[:1] for of in answers])
        point["asked_again"] = figures([of[1:] for of in answers])
    return result
