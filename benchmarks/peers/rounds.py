"""The measurement: engines take turns at each workload, round by round."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.peers.measure import Figures, figures
from benchmarks.peers.process import PeerError, PeerGoneError, PeerProcess
from benchmarks.peers.workloads import Workload

Tell = Callable[[str], None]
"""Called with what was done, once per engine, workload and round."""


@dataclass(slots=True)
class Outcome:
    """What one engine did at one workload: figures and outputs by round, and why there are no more of them."""

    figures: dict[int, Figures] = field(default_factory=dict)
    outputs: dict[int, list[list[int]]] = field(default_factory=dict)
    skipped: str | None = None


@dataclass(slots=True)
class Contest:
    """Runs rounds over loaded, paused engines and keeps the outcomes, by workload and engine.

    Attributes:
        ours: the engine that all others are compared with.
        slow_factor: another engine whose first round takes so many times the fastest one's is not measured again.
        overload_ms: where the p99 TTFT exceeds this, an engine is spared higher rates of that round.
    """

    peers: Mapping[str, PeerProcess]
    workloads: Sequence[Workload]
    ours: str
    slow_factor: float
    overload_ms: float
    outcomes: dict[tuple[str, str], Outcome] = field(default_factory=dict)
    _gone: dict[str, str] = field(default_factory=dict)

    def run(self, rounds: int, tell: Tell) -> None:
        """Measure `rounds` rounds. Who begins changes from one to the next."""
        names = list(self.peers)
        for index in range(rounds):
            order = names[index % len(names) :] + names[: index % len(names)]
            overloaded: set[str] = set()
            for workload in self.workloads:
                for name in order:
                    if not (workload.rate and name in overloaded):
                        self._measure(workload, name, index)
                    if workload.rate and self._is_overloaded(workload, name, index):
                        overloaded.add(name)
                    tell(f"round {index + 1}, ({workload.key}) {name}")
                if index == 0 and not workload.rate:
                    self._drop_slow(workload)

    def _measure(self, workload: Workload, name: str, index: int) -> None:
        outcome = self.outcomes.setdefault((workload.key, name), Outcome(skipped=self._gone.get(name)))
        if outcome.skipped:
            return
        peer = self.peers[name]
        peer.resume()
        try:
            results = peer.run(workload.make(index))
        except PeerGoneError as error:
            self._gone[name] = outcome.skipped = str(error)
        except PeerError as error:
            outcome.skipped = str(error)
        else:
            outcome.figures[index] = figures(results)
            outcome.outputs[index] = [result.tokens for result in results]
        finally:
            peer.pause()

    def _is_overloaded(self, workload: Workload, name: str, index: int) -> bool:
        outcome = self.outcomes.get((workload.key, name), Outcome())
        return index in outcome.figures and outcome.figures[index].ttft_p99_ms > self.overload_ms

    def _drop_slow(self, workload: Workload) -> None:
        measured = {
            name: outcome
            for name in self.peers
            if (outcome := self.outcomes[workload.key, name]).figures and not outcome.skipped
        }
        fastest = min((outcome.figures[0].total_s for outcome in measured.values()), default=0.0)
        for name, outcome in measured.items():
            if name != self.ours and outcome.figures[0].total_s > self.slow_factor * fastest:
                outcome.skipped = "slow: one round only"
