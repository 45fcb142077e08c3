"""Overload with and without the pressure ladder: `python -m benchmarks.pressure`.

First a closed loop finds how many requests a second the engine completes; then requests of three classes arrive at
random, several times as many, at an engine without the ladder and at one with it: the same requests at the same times.
Prompts share long prefixes, of which the pool cannot keep all. A refused request is lost.

Goodput counts the output of requests whose first token came within what their class should wait at most. The engine
with the ladder runs once more with the two lower classes allowing that their contexts be compressed (`--compress`,
level 3), and once for each queue policy in `--policies`: what grouping requests by prefix brings. All of that is done
`--rounds` times in turn, each time with other requests, and added up.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks import consoles
from pagoda import Engine, SamplingParams
from pagoda.engine.pressure.config import ClassLimits, PressureConfig
from pagoda.engine.tenants import ServiceClass, TenantSpec
from pagoda.errors import Overloaded
from pagoda.kv.keys import Scope

SHARES = {ServiceClass.INTERACTIVE: 0.2, ServiceClass.STANDARD: 0.5, ServiceClass.BATCH: 0.3}  # of the requests
TENANTS = {str(kind): TenantSpec(service_class=kind) for kind in ServiceClass}
LIMITS = {
    ServiceClass.INTERACTIVE: ClassLimits(max_wait_s=5.0, max_waiting=256),
    ServiceClass.STANDARD: ClassLimits(max_wait_s=15.0, max_waiting=256),
    ServiceClass.BATCH: ClassLimits(max_wait_s=60.0, max_waiting=1024),
}


@dataclass(frozen=True)
class Arrival:
    at: float
    kind: ServiceClass
    prompt: list[int]
    max_tokens: int


@dataclass
class Met:
    """What became of an arrival. Times are seconds from the start."""

    arrival: Arrival
    ended_at: float = 0.0
    first_at: float | None = None
    num_tokens: int = 0
    num_hit_tokens: int = 0
    is_done: bool = False

    @property
    def wait_s(self) -> float:
        """To the first token; who never got one counts as having waited until the end."""
        return (self.ended_at if self.first_at is None else self.first_at) - self.arrival.at

    @property
    def is_good(self) -> bool:
        return self.is_done and self.wait_s <= LIMITS[self.arrival.kind].max_wait_s


@dataclass
class Outcome:
    name: str
    seconds: float
    met: list[Met] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    refused_kinds: Counter[ServiceClass] = field(default_factory=Counter)
    preemptions: int = 0
    computed_tokens: int = 0
    compressed: int = 0
    levels: Counter[int] = field(default_factory=Counter)
    goodputs: list[float] = field(default_factory=list)  # of each round

    def add(self, other: Outcome) -> None:
        """Count another round of the same."""
        self.seconds += other.seconds
        self.met += other.met
        self.refused += other.refused
        self.refused_kinds += other.refused_kinds
        self.preemptions += other.preemptions
        self.computed_tokens += other.computed_tokens
        self.compressed += other.compressed
        self.levels += other.levels
        self.goodputs += other.goodputs

    @property
    def goodput(self) -> float:
        return sum(one.num_tokens for one in self.met if one.is_good) / self.seconds

    def quantile(self, kind: ServiceClass, share: float) -> float:
        """Of the times to first token."""
        waits = sorted(one.wait_s for one in self.met if one.arrival.kind is kind)
        return waits[min(len(waits) - 1, int(share * len(waits)))] if waits else 0.0

    def figures(self) -> dict[str, Any]:
        good = [one for one in self.met if one.is_good]
        prompts = sum(len(one.arrival.prompt) for one in self.met if one.first_at is not None)
        return {
            "goodput_tokens_s": self.goodput,
            "goodput_tokens_s_of_rounds": self.goodputs,
            "good_requests": len(good),
            "done_requests": sum(one.is_done for one in self.met),
            "refused": dict(self.refused),
            "preemptions": self.preemptions,
            "computed_tokens": self.computed_tokens,
            "compressed_contexts": self.compressed,
            "hit_rate": sum(one.num_hit_tokens for one in self.met) / max(1, prompts),
            "seconds_by_level": self.levels,
            "ttft_s": {
                str(kind): {"p50": self.quantile(kind, 0.5), "p99": self.quantile(kind, 0.99)} for kind in ServiceClass
            },
            "good_share": {
                str(kind): sum(one.arrival.kind is kind for one in good)
                / max(1, sum(one.arrival.kind is kind for one in self.met) + self.refused_kinds[kind])
                for kind in ServiceClass
            },
        }


class Requests:
    """Random requests: a prefix of one of several families, and something of their own."""

    def __init__(self, args: argparse.Namespace, vocab_size: int) -> None:
        self._rng = np.random.default_rng(args.seed)
        self._args = args
        self._vocab_size = vocab_size
        self._families = [self._tokens(args.shared) for _ in range(args.families)]

    def _tokens(self, count: int) -> list[int]:
        return self._rng.integers(100, self._vocab_size, count).tolist()

    def make(self, at: float) -> Arrival:
        args, rng = self._args, self._rng
        kind = list(SHARES)[rng.choice(len(SHARES), p=list(SHARES.values()))]
        family = self._families[rng.integers(len(self._families))]
        own = self._tokens(int(rng.integers(args.own // 2, 2 * args.own)))
        return Arrival(at, kind, family + own, int(rng.integers(args.output // 2, 2 * args.output)))

    def arrivals(self, per_s: float, seconds: float) -> list[Arrival]:
        gaps = self._rng.exponential(1 / per_s, int(2 * per_s * seconds) + 20)
        return [self.make(float(at)) for at in np.cumsum(gaps) if at < seconds]


@dataclass(frozen=True)
class Variant:
    """How an engine is set up for a run; `compress` is what the lower classes allow under pressure."""

    name: str
    policy: str = "fcfs"
    ladder: bool = True
    compress: str | None = None


def make_engine(args: argparse.Namespace, variant: Variant) -> Engine:
    yields = {ServiceClass.STANDARD, ServiceClass.BATCH}
    tenants = {
        name: replace(spec, compress_under_pressure=variant.compress if spec.service_class in yields else None)
        for name, spec in TENANTS.items()
    }
    return Engine(
        args.model,
        dtype=args.dtype,
        kv_memory=args.kv_memory,
        max_model_len=args.shared + 4 * (args.own + args.output),
        max_num_seqs=args.running,
        queue_policy=variant.policy,
        tenants=tenants,
        pressure=PressureConfig(classes=LIMITS) if variant.ladder else None,
        progress=False,
    )


def serve(engine: Engine, name: str, arrivals: Sequence[Arrival], seconds: float) -> Outcome:
    """Let requests arrive at their times; what is not finished `seconds` after the start is cut off."""
    core, outcome = engine.core, Outcome(name, seconds)
    waiting, live = deque(arrivals), dict[str, Met]()
    started = time.perf_counter()
    while (now := time.perf_counter() - started) < seconds and (waiting or core.has_work):
        while waiting and waiting[0].at <= now:
            arrival = waiting.popleft()
            request_id = f"r{len(waiting)}"
            params = SamplingParams(max_tokens=arrival.max_tokens, temperature=0.0, ignore_eos=True)
            try:
                core.add(request_id, arrival.prompt, params, scope=Scope(str(arrival.kind)))
            except Overloaded as error:
                outcome.refused[error.reason] += 1
                outcome.refused_kinds[arrival.kind] += 1
                continue
            live[request_id] = Met(arrival, ended_at=seconds)
            outcome.met.append(live[request_id])
        if not core.has_work:
            core.pressure.look()
            time.sleep(max(0.0, min(0.05, waiting[0].at - now)) if waiting else 0.0)
            continue
        for output in core.step():
            met = live[output.request_id]
            met.first_at = met.first_at or time.perf_counter() - started
            met.num_tokens, met.num_hit_tokens = output.usage.num_output_tokens, output.usage.num_hit_tokens
            met.is_done = output.finished
    core.abort_all()
    outcome.preemptions = core._scheduler.num_preempted
    outcome.computed_tokens = sum(tenant.num_computed_tokens for tenant in core.cache.tenants.all())
    outcome.compressed = core.pressure.report.num_compressed
    outcome.levels = Counter({int(level): round(each, 2) for level, each in core.pressure.report.seconds.items()})
    outcome.goodputs = [outcome.goodput]
    core.cache.check()
    return outcome


def capacity(args: argparse.Namespace) -> float:
    """Requests a second that the engine completes when there are always as many as it can run."""
    engine = make_engine(args, Variant("capacity", ladder=False))
    requests = Requests(args, engine.spec.vocab_size)
    live, done, added, started = 0, 0, 0, time.perf_counter()
    while (elapsed := time.perf_counter() - started) < args.calibrate:
        while live < args.running:
            one = requests.make(0.0)
            params = SamplingParams(max_tokens=one.max_tokens, temperature=0.0, ignore_eos=True)
            engine.core.add(f"c{added}", one.prompt, params, scope=Scope(str(one.kind)))
            live, added = live + 1, added + 1
        ended = sum(output.finished for output in engine.core.step())
        live, done = live - ended, done + ended
    engine.core.abort_all()
    engine.close()
    return max(0.1, done / elapsed)


def print_outcomes(outcomes: Sequence[Outcome]) -> None:
    """Goodput in tokens a second; the times to first token that 99% do not exceed."""
    table = Table(box=None)
    waits = [f"{kind} p99" for kind in ServiceClass]
    for column in ("", "goodput", "in time", "refused", "preempted", "compressed", "computed", "hits", *waits):
        table.add_column(column, justify="right" if column else "left")
    for outcome in outcomes:
        figures = outcome.figures()
        table.add_row(
            outcome.name,
            f"{outcome.goodput:.1f}/s",
            f"{figures['good_requests']} of {len(outcome.met) + outcome.refused.total()}",
            str(outcome.refused.total()),
            str(outcome.preemptions),
            str(outcome.compressed),
            f"{outcome.computed_tokens:,}",
            f"{figures['hit_rate']:.0%}",
            *(f"{outcome.quantile(kind, 0.99):.1f} s" for kind in ServiceClass),
        )
    consoles.progress().print(table)


def plot(outcomes: Sequence[Outcome], path: Path) -> None:
    """Goodput; the times to first token by class, against what each should wait; what was refused or preempted."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(13, 4), layout="constrained")
    names, at = [outcome.name for outcome in outcomes], np.arange(len(outcomes))
    left.bar(at, [outcome.goodput for outcome in outcomes], 0.6)
    left.set(title="Goodput", ylabel="output tokens/s of requests in time")
    left.set_xticks(at, names)
    for outcome in outcomes:
        for colour, kind in enumerate(ServiceClass):
            waits = [outcome.quantile(kind, share) for share in np.linspace(0, 1, 101)[:-1]]
            style = "-" if outcome is outcomes[-1] else ":"
            middle.plot(waits, np.linspace(0, 1, 100), style, color=f"C{colour}", label=f"{kind}, {outcome.name}")
    for colour, kind in enumerate(ServiceClass):
        middle.axvline(LIMITS[kind].max_wait_s, color=f"C{colour}", alpha=0.3, linewidth=4)
    middle.set(title="Time to first token", xlabel="seconds; thick lines: what the class should wait", ylabel="share")
    middle.set_xscale("log")
    middle.legend(fontsize=7)
    right.bar(at - 0.2, [outcome.refused.total() for outcome in outcomes], 0.4, label="refused")
    right.bar(at + 0.2, [outcome.preemptions for outcome in outcomes], 0.4, label="preempted")
    right.set(title="Refused and preempted", ylabel="requests")
    right.set_xticks(at, names)
    right.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kv-memory", default="160MiB", help="of the pool (default: %(default)s)")
    parser.add_argument("--running", type=int, default=16, help="most samples at once (default: %(default)s)")
    parser.add_argument("--families", type=int, default=8, help="shared prefixes (default: %(default)s)")
    parser.add_argument("--shared", type=int, default=256, help="tokens of each (default: %(default)s)")
    parser.add_argument("--own", type=int, default=64, help="own tokens of a prompt, about (default: %(default)s)")
    parser.add_argument("--output", type=int, default=48, help="tokens of an answer, about (default: %(default)s)")
    parser.add_argument("--load", type=float, default=5.0, help="times the capacity (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=50.0, help="of each run (default: %(default)s)")
    parser.add_argument("--calibrate", type=float, default=20.0, help="seconds to find capacity (default: %(default)s)")
    parser.add_argument("--policies", nargs="*", default=["lpm"], help="more queue policies (default: lpm)")
    parser.add_argument(
        "--compress", default="streaming:128", help="what lower classes allow, or '' (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=1, help="of all variants in turn (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--plot", type=Path, help="write a picture")
    args = parser.parse_args()

    per_s = capacity(args)
    print(f"capacity: {per_s:.2f} requests/s; offered: {args.load * per_s:.2f}", file=sys.stderr)
    variants = [Variant("no ladder", ladder=False), Variant("ladder")]
    variants += [Variant("compress", compress=args.compress)] if args.compress else []
    variants += [Variant(policy, policy) for policy in args.policies]
    outcomes: list[Outcome] = []
    for number in range(args.rounds):
        for index, variant in enumerate(variants):
            engine = make_engine(args, variant)
            arrivals = Requests(args, engine.spec.vocab_size).arrivals(args.load * per_s, args.seconds)
            outcome = serve(engine, variant.name, arrivals, args.seconds)
            engine.close()
            if number:
                outcomes[index].add(outcome)
            else:
                outcomes.append(outcome)
        args.seed += 1
    print_outcomes(outcomes)
    result = {
        "capacity_per_s": per_s,
        "limits": {str(kind): asdict(limits) for kind, limits in LIMITS.items()},
        **{outcome.name: outcome.figures() for outcome in outcomes},
    }
    if args.out:
        args.out.write_text(json.dumps(result, indent=2))
    if args.plot:
        plot(outcomes, args.plot)


if __name__ == "__main__":
    main()
