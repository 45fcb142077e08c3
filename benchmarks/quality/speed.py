"""How fast an engine goes on from a long context, alone: what a quantized cache should not cost."""

from __future__ import annotations

import time
from collections.abc import Sequence

from benchmarks.quality.forced import Forced
from pagoda import SamplingParams
from pagoda.kv.keys import Scope


def decode_rate(forced: Forced, tokens: Sequence[int], steps: int) -> float:
    """Tokens a second, generating `steps` of them after these."""
    params = SamplingParams(max_tokens=steps + 1, temperature=0.0, ignore_eos=True)
    with forced.free() as engine:
        engine.core.add("speed", list(tokens), params, scope=Scope(salt="speed"))
        while not engine.core.step():
            pass
        started = time.perf_counter()
        while engine.core.has_work:
            engine.core.step()
    return steps / (time.perf_counter() - started)
