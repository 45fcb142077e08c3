"""Decoding behind long prompts: tokens a second and blocks held, full and sparse, in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from benchmarks.sparse.quality import POLICIES
from benchmarks.texts import source_text
from pagoda import Engine, SamplingParams
from pagoda.engine.kv_policy import parse_kv_policy
from pagoda.kv.keys import Scope


def measure(
    engine: Engine, length: int, batch: int, steps: int, rounds: int, fraction: float, tell: Callable[[str], None]
) -> dict[str, Any]:
    """`batch` different prompts of `length` tokens at once, each continued by `steps` tokens, at one kept fraction."""
    policies: dict[str, Mapping[str, Any] | None] = {"full": None}
    policies |= {name: policy(round(fraction * length)) for name, policy in POLICIES.items()}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in policies}
    for number in range(rounds):
        for name, policy in policies.items():
            tell(f"throughput: {name}, round {number + 1}/{rounds}, {batch} prompts of {length} tokens")
            found[name].append(_run(engine, length, batch, steps, policy, f"{name}-{number}"))
    return {
        "length": length,
        "batch": batch,
        "steps": steps,
        "fraction": fraction,
        "rounds": rounds,
        "policies": {
            name: {
                "decode_tokens_per_s": float(np.max([one["decode_tokens_per_s"] for one in runs])),
                "prefill_s": float(np.min([one["prefill_s"] for one in runs])),
                "held_blocks": runs[0]["held_blocks"],
                "host_bytes": runs[0]["host_bytes"],
            }
            for name, runs in found.items()
        },
    }


def _run(
    engine: Engine, length: int, batch: int, steps: int, policy: Mapping[str, Any] | None, salt: str
) -> dict[str, float]:
    core = engine.core
    tokens = engine.tokenizer.encode(source_text(5 * length * (batch + 1)))
    wish = None if policy is None else parse_kv_policy(policy)
    params = SamplingParams(max_tokens=steps, temperature=0.0, ignore_eos=True, kv_policy=wish)
    names = [f"{salt}-{index}" for index in range(batch)]
    started = time.perf_counter()
    for index, name in enumerate(names):
        core.add(name, tokens[index * length : (index + 1) * length], params, scope=Scope(salt=salt))
    first, held, host, decoded = 0.0, 0, 0, 0
    seen: set[str] = set()
    while core.has_work:
        outputs = core.step()
        if first:
            decoded += sum(len(delta.token_ids) for output in outputs for delta in output.deltas)
            held = max(held, core.cache.num_held_blocks)
        seen |= {output.request_id for output in outputs}
        host = max([host, *(output.sparse.host_bytes for output in outputs if output.sparse)])
        if not first and len(seen) == batch:
            first = time.perf_counter()
    ended = time.perf_counter()
    return {
        "prefill_s": first - started,
        "decode_tokens_per_s": decoded / (ended - first),
        "held_blocks": held,
        "host_bytes": host,
    }
