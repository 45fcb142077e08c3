"""Records -> figures of every policy at every kept fraction, with intervals over conversations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

from benchmarks.quality.compare import Compared, Figure, mean_of
from benchmarks.quality.suite import PASSES
from benchmarks.sparse.records import Record

_REPORTED = ("num_kept_tokens", "num_blocks", "num_returned_blocks", "returned_bytes", "host_bytes", "sketch_bytes")
_ASKED = {"known": slice(0, 1), "asked_again": slice(1, None), "all": slice(0, None)}


def summary(records: Iterable[Record]) -> list[dict[str, Any]]:
    """For each kind and length: whether full KV masters it, and a point for each policy and kept fraction."""
    cells: dict[tuple[str, int], dict[tuple[str, float], list[Record]]] = {}
    for record in records:
        points = cells.setdefault((record.kind, record.length), {})
        points.setdefault((record.policy, record.fraction), []).append(record)
    tasks = []
    for (kind, length), points in sorted(cells.items()):
        found = [_point(*key, points[key]) for key in sorted(points, key=lambda key: (key[0], -key[1]))]
        full = next((each for each in found if each["policy"] == "full"), None)
        counts = full is not None and full["all"]["right"]["value"] >= PASSES
        tasks.append({"kind": kind, "length": length, "counts": counts, "points": found})
    return tasks


def _point(policy: str, fraction: float, records: Sequence[Record]) -> dict[str, Any]:
    point: dict[str, Any] = {"policy": policy, "fraction": fraction}
    point |= {name: figures([of.answers[part] for of in records]) for name, part in _ASKED.items()}
    reports = [of.sparse for of in records if of.sparse is not None]
    if reports:
        point |= {name: fmean(of[name] for of in reports) for name in _REPORTED}
        kv = [(of.sparse, of.num_steps, of.kv_bytes) for of in records if of.sparse is not None]
        point["fetched_per_step"] = fmean(of["fetched_bytes"] / (steps * whole) for of, steps, whole in kv)
        point["sketch_share"] = fmean(of["sketch_bytes"] / whole for of, _, whole in kv)
    return point


def figures(answers: Sequence[Sequence[Compared]]) -> dict[str, Any]:
    """Of the answers of each conversation.

    `right` counts whole answers, `right_change` against full KV's of the same questions. `perplexity_change` is that of
    the given answers' tokens, relative to full KV's.
    """

    def mean(value: Callable[[Compared], Sequence[float]]) -> Figure:
        return mean_of([[each for one in of for each in value(one)] for of in answers])

    ratio = mean(lambda one: [a - b for a, b in zip(one.nll, one.nll_full, strict=True)])
    return {
        "right": asdict(mean(lambda one: [all(one.right)])),
        "right_change": asdict(mean(lambda one: [float(all(one.right)) - float(all(one.right_full))])),
        "answer_nll": asdict(mean(lambda one: [sum(one.nll)])),
        "answer_nll_change": asdict(mean(lambda one: [sum(one.nll) - sum(one.nll_full)])),
        "perplexity_change": asdict(ratio.through(math.expm1)),
        "kl": asdict(mean(lambda one: one.kl)),
        "top1_agreement": asdict(mean(lambda one: one.agrees)),
        "num_answers": sum(map(len, answers)),
    }
