"""Overload in simulated time: a load of three classes against an engine whose steps take what its plan says they take.

The clock stands still but for steps and idling, so the same load gives the same figures on every machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from pagoda.engine.params import SamplingParams
from pagoda.engine.pressure.config import ClassLimits, PressureConfig
from pagoda.engine.tenants import ServiceClass, TenantSpec
from pagoda.errors import Overloaded
from pagoda.kv.keys import Scope
from tests.engine.fakes import VOCAB, make_core

STEP_S, TOKEN_S = 0.1, 0.01  # a step of one decode takes 0.11 s, one of sixteen 0.26 s: batches pay
SHARES = {ServiceClass.INTERACTIVE: 0.2, ServiceClass.STANDARD: 0.5, ServiceClass.BATCH: 0.3}
LIMITS = {
    ServiceClass.INTERACTIVE: ClassLimits(max_wait_s=5.0, max_waiting=256),
    ServiceClass.STANDARD: ClassLimits(max_wait_s=15.0, max_waiting=256),
    ServiceClass.BATCH: ClassLimits(max_wait_s=60.0, max_waiting=1024),
}


@dataclass
class Outcome:
    """What became of a load.

    Attributes:
        goodput: output tokens a second of requests whose first token came within what their class should wait.
        waits: seconds to the first token, by class; who was let in and never got one waited until the end.
    """

    goodput: float = 0.0
    waits: dict[ServiceClass, list[float]] = field(default_factory=lambda: {kind: [] for kind in ServiceClass})
    refused: Counter[str] = field(default_factory=Counter)
    preempted: int = 0
    seconds: Mapping[int, float] = field(default_factory=dict)

    def p99(self, kind: ServiceClass) -> float:
        waits = sorted(self.waits[kind])
        return waits[int(0.99 * (len(waits) - 1))]


def overload(
    patch: pytest.MonkeyPatch, pressure: PressureConfig, *, per_s: float, seconds: float, seed: int = 1, **options: Any
) -> Outcome:
    """Let requests of three classes arrive at random for so many simulated seconds."""
    now = [1000.0]
    patch.setattr("time.perf_counter", lambda: now[0])
    tenants = {str(kind): TenantSpec(service_class=kind) for kind in ServiceClass}
    settings = {"max_num_seqs": 16, "token_budget": 64, "max_model_len": 128} | options
    core, runner = make_core(tenants=tenants, pressure=pressure, **settings)
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1 / per_s, int(2 * per_s * seconds))) + now[0]
    families = [rng.integers(1, VOCAB, 24).tolist() for _ in range(8)]
    kinds = rng.choice(len(SHARES), arrivals.size, p=list(SHARES.values()))
    outcome, end = Outcome(), now[0] + seconds
    live: dict[str, tuple[ServiceClass, float, list[float], list[int]]] = {}
    index = 0
    while now[0] < end:
        while index < arrivals.size and arrivals[index] <= now[0]:
            kind, at = list(SHARES)[kinds[index]], float(arrivals[index])
            own = rng.integers(1, VOCAB, int(rng.integers(6, 20))).tolist()
            params = SamplingParams(max_tokens=int(rng.integers(8, 40)), temperature=0.0, ignore_eos=True)
            prompt = families[int(rng.integers(8))] + own
            try:
                core.add(f"r{index}", prompt, params, scope=Scope(str(kind)))
                core._requests[f"r{index}"].arrived_at = at
                live[f"r{index}"] = kind, at, [], []
            except Overloaded as error:
                outcome.refused[error.reason] += 1
            index += 1
        if not core.has_work:
            core.pressure.look()
            now[0] += 0.01
            continue
        before = len(runner.steps)
        outputs = core.step()
        now[0] += STEP_S + TOKEN_S * sum(sum(step) for step in runner.steps[before:])
        for output in outputs:
            kind, at, firsts, tokens = live[output.request_id]
            if not firsts:
                firsts.append(now[0] - at)
            tokens.append(output.usage.num_output_tokens)
            if output.finished and firsts[0] <= LIMITS[kind].max_wait_s:
                outcome.goodput += output.usage.num_output_tokens / seconds
    for kind, at, firsts, _ in live.values():
        outcome.waits[kind].append(firsts[0] if firsts else end - at)
    core.abort_all()
    core.cache.check()
    outcome.preempted = core._scheduler.num_preempted
    outcome.seconds = {int(level): round(each, 1) for level, each in core.pressure.report.seconds.items()}
    return outcome
