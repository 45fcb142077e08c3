"""What is asked: each workload makes one Round of Requests per round, the same for every engine.

Prompts are tokens of Python's own sources, cut at places that differ from round to round, so that nothing is cached but
what a round's `setup` has served.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.peers.messages import Request, Round

RATES = (4.0, 6.0, 8.0, 10.0, 12.0, 14.0, 16.0)


@dataclass(frozen=True, slots=True)
class Workload:
    """A named way to make rounds, and which figure of `measure.Figures` counts."""

    name: str
    title: str
    figure: str
    make: Callable[[int], Round]
    rate: float | None = None

    @property
    def key(self) -> str:
        """The name, with the rate where there is one."""
        return self.name if self.rate is None else f"{self.name}@{self.rate:g}"


class Texts:
    """Cuts of one long list of tokens, at places that a seed decides."""

    def __init__(self, tokens: Sequence[int], seed: str) -> None:
        self._tokens = tokens
        self._random = random.Random(seed)

    def cut(self, length: int) -> list[int]:
        """`length` tokens.

        Raises:
            ValueError: there are not so many.
        """
        if length > len(self._tokens):
            raise ValueError(f"{length} tokens are wanted, the text has {len(self._tokens)}")
        start = self._random.randrange(len(self._tokens) - length + 1)
        return list(self._tokens[start : start + length])

    def arrivals(self, count: int, rate: float) -> list[float]:
        """Times of a Poisson process in seconds; the first is 0."""
        times = [0.0]
        while len(times) < count:
            times.append(times[-1] + self._random.expovariate(rate))
        return times


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tokens, requests and seconds of the workloads."""

    prefix: int = 2048
    long_prefix: int = 7000
    own: int = 32
    decode: int = 128
    batch: int = 16
    shared_batch: int = 32
    shared_out: int = 64
    open_prefix: int = 1024
    open_own: int = 128
    open_out: int = 64
    open_seconds: float = 20.0
    rates: tuple[float, ...] = RATES


FULL = Sizes()
QUICK = Sizes(
    prefix=256,
    long_prefix=512,
    own=16,
    decode=16,
    batch=4,
    shared_batch=4,
    shared_out=8,
    open_prefix=128,
    open_own=32,
    open_out=8,
    open_seconds=2.0,
    rates=(1.0, 4.0),
)


def workloads(tokens: Sequence[int], size: Sizes, replay: Sequence[Request] | None) -> list[Workload]:
    """All workloads; (f) only if there are sessions to replay. The 16 tokens more in (a) and (b) are a question."""

    def texts(name: str, round_index: int) -> Texts:
        return Texts(tokens, f"{name} {round_index}")

    def cold(i: int) -> Round:
        return Round([Request(texts("a", i).cut(size.prefix + 16), 1)], [])

    def warm(i: int) -> Round:
        text = texts("b", i)
        prefix = text.cut(size.prefix)
        return Round([Request(prefix + text.cut(16), 1)], [Request(prefix + text.cut(16), 1)])

    def decode(i: int) -> Round:
        return Round([Request(texts("c", i).cut(size.decode), size.decode)], [])

    def batch(i: int) -> Round:
        text = texts("d", i)
        return Round([Request(text.cut(size.decode), size.decode) for _ in range(size.batch)], [])

    def shared(name: str, length: int, out: int) -> Callable[[int], Round]:
        def make(i: int) -> Round:
            text = texts(name, i)
            prefix = text.cut(length)
            setup = [Request(prefix + text.cut(size.own), 1)]
            return Round([Request(prefix + text.cut(size.own), out) for _ in range(size.shared_batch)], setup)

        return make

    def poisson(rate: float) -> Callable[[int], Round]:
        def make(i: int) -> Round:
            text = texts(f"g {rate}", i)
            prefix = text.cut(size.open_prefix)
            setup = [Request(prefix + text.cut(size.open_own), 1)]
            times = text.arrivals(round(size.open_seconds * rate), rate)
            return Round([Request(prefix + text.cut(size.open_own), size.open_out, at=at) for at in times], setup)

        return make

    n, p, q = size.batch, size.prefix, size.long_prefix
    shape = f"{size.shared_batch} requests, {{}} tokens shared and warm, {size.own} own, {{}} out"
    found = [
        Workload("a", f"cold prefill, {p + 16} tokens", "ttft_ms", cold),
        Workload("b", f"warm first token, {p} of {p + 16} tokens shared", "ttft_ms", warm),
        Workload("c", f"one stream, {size.decode} in, {size.decode} out", "stream_tok_s", decode),
        Workload("d", f"{n} requests, {size.decode} in, {size.decode} out", "output_tok_s", batch),
        Workload("e", shape.format(p, size.shared_out), "output_tok_s", shared("e", p, size.shared_out)),
        Workload("e2", shape.format(q, size.decode), "output_tok_s", shared("e2", q, size.decode)),
    ]
    if replay:
        title = f"replay of {sum(r.after is None for r in replay)} agent sessions, {len(replay)} requests"
        found.append(Workload("f", title, "total_s", lambda i: Round(list(replay), [])))
    title = f"open loop, {size.open_prefix} shared and warm, {size.open_own} own, {size.open_out} out, {{:g}} a second"
    found += [Workload("g", title.format(rate), "ttft_p99_ms", poisson(rate), rate) for rate in size.rates]
    return found
