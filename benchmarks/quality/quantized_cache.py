"""Transformers' QuantizedCache over the same texts and tasks, in an environment of its own, against its own full run.

    cache             bits of a value           how
    quanto int4       4.5                       groups of 64 values of a token; the newest 128 tokens in full
    hqq int4          4.5                       the same groups, scales sought for least error
    hqq int8          8.5                       the same
    fp8               8                         one scale for a layer's keys, one for its values; none is kept in full

Groups have a scale and a zero of two bytes each. A cache that cannot run here is reported with its error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers.engines import Environment
from benchmarks.peers.venvs import done_by, python_of
from benchmarks.peers.weights import export
from benchmarks.quality.cases import Case, Size
from benchmarks.quality.compare import Compared
from benchmarks.quality.suite import Tell, answered, distance
from benchmarks.quality.tasks import Task

CACHES: Mapping[str, Mapping[str, Any]] = {
    "quanto int4": {"backend": "quanto", "nbits": 4},
    "hqq int4": {"backend": "hqq", "nbits": 4, "axis_key": 1, "axis_value": 1},
    "hqq int8": {"backend": "hqq", "nbits": 8, "axis_key": 1, "axis_value": 1},
    "fp8": {"backend": "fp8"},
}
_ENVIRONMENT = Environment(
    "quantized-cache",
    (("torch==2.13.0",), ("transformers==5.24.0", "accelerate", "optimum-quanto==0.2.7", "hqq==0.2.8.post1")),
)
_SIDE = Path(__file__).with_name("quantized_side.py")


@dataclass(frozen=True)
class Work:
    """What is measured: passages by corpus, lists of tasks of one kind and length, decoding after a context."""

    model: str
    dtype: str
    texts: Mapping[str, Sequence[Case]]
    tasks: Sequence[Sequence[Task]]
    context: Sequence[int]
    size: Size


def measure(work: Work, venvs: Path, tell: Tell) -> dict[str, Any]:
    """`text`, `tasks` and `tokens_per_s` of every cache that runs here, as the suite has them; why others `failed`.

    Raises:
        InstallError: the environment could not be made.
        SideError: the measurement failed.
    """
    python = python_of(_ENVIRONMENT, venvs, tell)
    tell("Transformers' quantized caches")
    result = done_by(
        python,
        _SIDE,
        {
            "model": str(export(work.model, venvs, tell).folder),
            "dtype": work.dtype,
            "threads": torch.get_num_threads(),
            "caches": CACHES,
            "text": {corpus: [case.tokens for case in cases] for corpus, cases in work.texts.items()},
            "tasks": [
                [{"tokens": each.context, "questions": each.questions} for each in alike] for alike in work.tasks
            ],
            "context": work.context,
            "steps": work.size.followed,
        },
    )
    names = [name for name in CACHES if name not in result["failed"]]
    if not names:
        return {**result, "text": {}, "tasks": []}
    result["text"] = {
        corpus: {name: distance([Compared(**each[name]) for each in read], work.size.unit) for name in names}
        for corpus, read in result["text"].items()
    }
    result["tasks"] = [
        {
            "kind": alike[0].kind,
            "length": alike[0].length,
            **answered([[{name: Compared(**one) for name, one in asked.items()} for asked in each] for each in read]),
        }
        for alike, read in zip(work.tasks, result["tasks"], strict=True)
    ]
    return result
