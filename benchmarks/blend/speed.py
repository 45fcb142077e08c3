"""What blending saves: TTFT of one request on an idle engine, and requests a second of several, all passages known."""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.blend.tasks import VARIANTS, Context, contexts
from benchmarks.quality.compare import Figure
from pagoda import Engine, SamplingParams
from pagoda.kv.keys import Scope

ALL = ("full", "prefix", *VARIANTS)
_names = itertools.count()
_OUTPUT = 8  # tokens of each answer, where throughput is measured


def measure(
    engine: Engine, rounds: int, passages: int, size: int, batch: int, log: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Every variant in every round, in another order each time, so that what else runs meets all of them alike."""
    pool = list(contexts(engine.tokenizer, "lookup", rounds + 1, passages, size))
    ttft: dict[str, list[float]] = {variant: [] for variant in ALL}
    per_s: dict[str, list[float]] = {variant: [] for variant in ALL}
    for number, context in enumerate(pool):
        log(f"speed: round {number + 1} of {len(pool)}")
        engine.core.cache.clear()
        # All passages are known: alone, and as a prompt of another order for prefix caching.
        engine.generate([context.tokens], SamplingParams(max_tokens=0), blends=[context.blend("naive")])
        other = context.reordered(number)
        engine.generate([other.tokens], SamplingParams(max_tokens=0), scope=Scope("prefix"))
        several = [context.reordered(1000 * (number + 1) + index) for index in range(batch)]
        for variant in random.Random(number).sample(ALL, len(ALL)):
            one, all_of_them = timed(engine, [context], variant, 1), timed(engine, several, variant, _OUTPUT)
            if number:  # the first warms up
                ttft[variant].append(one)
                per_s[variant].append(batch / all_of_them)
    return [
        {
            "variant": variant,
            "num_tokens": len(pool[0].tokens),
            "ttft_s": asdict(_median(ttft[variant])),
            "speedup": asdict(_median([a / b for a, b in zip(ttft["full"], ttft[variant], strict=True)])),
            "requests_per_s": asdict(_median(per_s[variant])),
        }
        for variant in ALL
    ]


def timed(engine: Engine, batch: Sequence[Context], variant: str, max_tokens: int) -> float:
    """Seconds until all of a batch are answered."""
    salt = f"full {next(_names)}" if variant == "full" else ""
    scope = Scope("prefix" if variant == "prefix" else "", salt)
    prompts = [[*context.tokens, *context.questions[0][0]] for context in batch]
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    started = time.perf_counter()
    engine.generate(prompts, params, scope=scope, blends=[context.blend(variant) for context in batch])
    return time.perf_counter() - started


def _median(values: Sequence[float]) -> Figure:
    """The median, and the range that holds the true one with 95% or more (sign test)."""
    ordered, n = sorted(values), len(values)
    out = max(0, int(n / 2 - 0.98 * n**0.5))
    return Figure(statistics.median(ordered), ordered[out], ordered[n - 1 - out], n)
