"""What the ladder is worth: three classes at several times the capacity, with it and without, in simulated time.

A step takes what its plan says it takes, and nothing else takes any time, so the same load gives the same figures on
every machine. `python -m benchmarks.pressure` measures the same on a real model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

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
        num_refused: of all that came.
        waits: seconds to the first token, by class; who was let in and never got one waited until the end.
    """

    goodput: float = 0.0
    waits: dict[ServiceClass, list[float]] = field(default_factory=lambda: {kind: [] for kind in ServiceClass})
    num_refused: int = 0
    levels: Mapping[int, float] = field(default_factory=dict)

    def p99(self, kind: ServiceClass) -> float:
        return float(np.quantile(self.waits[kind], 0.99))


@dataclass
class Client:
    kind: ServiceClass
    came_at: float
    first_s: float | None = None


def overload(
    patch: pytest.MonkeyPatch, pressure: PressureConfig, per_s: float, *, seconds: float = 60.0, seed: int = 1
) -> Outcome:
    """Let requests arrive at random for so many simulated seconds."""
    now = 1000.0
    patch.setattr("time.perf_counter", lambda: now)
    patch.setattr("pagoda.engine.process_memory.num_throttles", lambda: 0)
    tenants = {str(kind): TenantSpec(service_class=kind) for kind in ServiceClass}
    core, runner = make_core(
        600, tenants=tenants, pressure=pressure, max_num_seqs=16, token_budget=64, max_model_len=128
    )
    rng = np.random.default_rng(seed)
    arrivals = now + np.cumsum(rng.exponential(1 / per_s, int(2 * per_s * seconds)))
    kinds = rng.choice(len(SHARES), arrivals.size, p=list(SHARES.values()))
    families = [rng.integers(1, VOCAB, 24).tolist() for _ in range(8)]
    clients: dict[str, Client] = {}
    outcome, start, num_come = Outcome(), now, 0
    while now < start + seconds:
        for index in range(num_come, int(np.searchsorted(arrivals, now))):
            name, client = f"r{index}", Client(list(SHARES)[kinds[index]], float(arrivals[index]))
            prompt = families[rng.integers(8)] + rng.integers(1, VOCAB, rng.integers(6, 20)).tolist()
            params = SamplingParams(max_tokens=int(rng.integers(8, 40)), temperature=0.0)
            try:
                core.add(name, prompt, params, scope=Scope(str(client.kind)))
            except Overloaded:
                outcome.num_refused += 1
            else:
                core._requests[name].arrived_at = client.came_at
                clients[name] = client
        num_come = int(np.searchsorted(arrivals, now))
        num_steps = len(runner.steps)
        outputs = core.step()
        now += STEP_S + TOKEN_S * sum(sum(step) for step in runner.steps[num_steps:])
        for output in outputs:
            client = clients[output.request_id]
            client.first_s = client.first_s or now - client.came_at
            if output.finished and client.first_s <= LIMITS[client.kind].max_wait_s:
                outcome.goodput += output.usage.num_output_tokens / seconds
    for client in clients.values():
        outcome.waits[client.kind].append(client.first_s or now - client.came_at)
    core.abort_all()
    core.cache.check()
    outcome.levels = core.pressure.report.seconds
    return outcome


ON = PressureConfig(classes=LIMITS, memory_limit=1 << 50)


def test_at_five_times_the_capacity_it_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interactive requests alone are as many as the engine can take."""
    without, with_it = (
        [overload(monkeypatch, pressure, 9.0, seed=seed) for seed in (1, 2)] for pressure in (PressureConfig.off(), ON)
    )
    assert sum(each.goodput for each in with_it) > sum(each.goodput for each in without)
    waits = [max(each.p99(ServiceClass.INTERACTIVE) for each in outcomes) for outcomes in (with_it, without)]
    assert waits[0] < waits[1]
    assert all({1, 2, 3}.isdisjoint(each.levels) for each in with_it)  # memory was never short


def test_at_ten_times_the_capacity_it_keeps_goodput_and_latency(monkeypatch: pytest.MonkeyPatch) -> None:
    without, with_it = (overload(monkeypatch, pressure, 18.0) for pressure in (PressureConfig.off(), ON))
    assert with_it.goodput > 1.4 * without.goodput
    assert with_it.p99(ServiceClass.INTERACTIVE) < without.p99(ServiceClass.INTERACTIVE) / 2
    assert with_it.num_refused > 500
