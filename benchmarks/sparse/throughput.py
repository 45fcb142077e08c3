"""Decoding behind long prompts: milliseconds a token and blocks held, full and sparse, in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.sparse.quality import with_budget
from benchmarks.texts import source_text
from pagoda import Engine, SamplingParams
from pagoda.engine.kv_policy import parse_kv_policy
from pagoda.kv.keys import Scope


def measure(
    engine: Engine,
    policies: Sequence[str],
    length: int,
    batch: int,
    steps: int,
    rounds: int,
    fractions: Sequence[float],
    tell: Callable[[str], None],
) -> dict[str, Any]:
    """`batch` different prompts of `length` tokens at once, each continued by `steps` tokens, at each kept fraction.

    Full KV is measured on prompts as short as what is kept, too. Prompts are hit in the cache where the policy allows
    it: what is timed begins when all are computed.
    """
    cells: dict[str, tuple[int, Mapping[str, Any] | None]] = {"full": (length, None)}
    for fraction in fractions:
        budget = round(fraction * length)
        cells[f"full, {fraction:.0%} of the prompt"] = budget, None
        cells |= {f"{policy}, {fraction:.0%}": (length, with_budget(policy, budget)) for policy in policies}
    best: dict[str, dict[str, float]] = {}
    for number in range(rounds):
        for name, (num_tokens, field) in cells.items():
            tell(f"throughput: {name}, round {number + 1}/{rounds}, {batch} prompts of {num_tokens} tokens")
            one = _run(engine, num_tokens, batch, steps, field, f"{name}-{number}")
            if name not in best or one["decode_tokens_per_s"] > best[name]["decode_tokens_per_s"]:
                best[name] = one
    shape = {"length": length, "batch": batch, "steps": steps, "rounds": rounds}
    return {**shape, "policies": best}


def _run(
    engine: Engine, length: int, batch: int, steps: int, policy: Mapping[str, Any] | None, name: str
) -> dict[str, float]:
    core = engine.core
    tokens = engine.tokenizer.encode(source_text(5 * length * (batch + 1)))
    wish = None if policy is None else parse_kv_policy(policy)
    params = SamplingParams(max_tokens=steps, temperature=0.0, ignore_eos=True, kv_policy=wish)
    names = [f"{name}-{index}" for index in range(batch)]
    for index, each in enumerate(names):
        core.add(each, tokens[index * length : (index + 1) * length], params, scope=Scope())
    held, decoded, outside, times = 0, 0, {"sketch_bytes": 0, "host_bytes": 0}, [0.0]
    seen: set[str] = set()
    while core.has_work:
        outputs = core.step()
        if len(seen) < batch:
            seen |= {output.request_id for output in outputs}
            times[0] = time.perf_counter()
            continue
        times.append(time.perf_counter())
        # The first step after the prompts compresses them: it is told apart.
        if len(times) > 2:
            decoded += sum(len(delta.token_ids) for output in outputs for delta in output.deltas)
        held = max(held, core.cache.num_held_blocks)
        for output in outputs:
            for part in outside:
                outside[part] = max(outside[part], getattr(output.sparse, part, 0))
    rate = decoded / (times[-1] - times[1])
    return {"decode_tokens_per_s": rate, "first_step_s": times[1] - times[0], "held_blocks": held, **outside}
