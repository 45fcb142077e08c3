"""NVIDIA's kvpress over our conversations, in an environment of its own."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.peers.engines import Environment
from benchmarks.peers.venvs import python_of
from benchmarks.peers.weights import export
from benchmarks.sparse.conversations import conversations
from benchmarks.sparse.records import Record, Records
from pagoda.model.tokenizer import Tokenizer

_ENVIRONMENT = Environment("kvpress", (("torch==2.13.0",), ("kvpress==0.5.5", "transformers<5.3")))
_SIDE = Path(__file__).with_name("presses_side.py")


class PressError(Exception):
    """The other half failed; the message ends with its last lines."""


def measure(
    model: str,
    tokenizer: Tokenizer,
    kind: str,
    length: int,
    indices: range,
    fractions: Sequence[float],
    venvs: Path,
    records: Records,
    tell: Callable[[str], None],
) -> None:
    """Add records of the policies that both have, as `kvpress h2o`, and of full KV as it computes it.

    Raises:
        InstallError: the environment could not be made.
        PressError: the measurement failed; what was measured before is kept.
    """
    told = dict(enumerate(conversations(tokenizer, kind, length, indices.stop)))
    missing = [index for index in indices if (kind, length, index, "kvpress full", 1.0) not in records]
    python = python_of(_ENVIRONMENT, venvs, tell)
    weights = export(model, venvs, tell)
    work = {
        "model": str(weights.folder),
        "threads": torch.get_num_threads(),
        "fractions": list(fractions),
        "conversations": {index: asdict(told[index]) for index in missing},
    }
    with tempfile.TemporaryDirectory() as folder:
        asked, said = Path(folder) / "work.json", Path(folder) / "stderr"
        asked.write_text(json.dumps(work))
        with (
            said.open("w") as stderr,
            subprocess.Popen(
                [str(python), str(_SIDE), str(asked)], stdout=subprocess.PIPE, stderr=stderr, text=True
            ) as side,
        ):
            assert side.stdout is not None
            for line in side.stdout:
                for answered in json.loads(line):
                    tell(f"kvpress: {kind}, conversation {answered['index']}, {answered['policy']}")
                    records.add(Record.of({"kind": kind, "length": length, **answered}))
        if side.returncode:
            raise PressError("kvpress failed:\n" + "\n".join(said.read_text().splitlines()[-8:]))
