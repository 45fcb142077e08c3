"""Full blocks that wait to enter the tree, against a model that knows what was ever computed: nobody can tell."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from pagoda.kv.cache import KVCache
from pagoda.kv.keys import KeyChain, Scope
from pagoda.kv.lease import Lease
from pagoda.kv.radix_node import TokenArray, as_tokens, common_prefix
from tests.kv.fakes import TokenPool, make

SCOPE = Scope("tenant")
SIZE = 4


@dataclass(eq=False)
class Run:
    lease: Lease
    tokens: TokenArray
    written: int = 0


class Bench:
    """A cache with room for everything, and what its leases computed."""

    def __init__(self, num_blocks: int = 4096) -> None:
        self.cache: KVCache
        self.pool: TokenPool
        self.cache, self.pool = make(num_blocks, SIZE)
        self.running: list[Run] = []
        self.ended: list[TokenArray] = []

    def begin(self, tokens: TokenArray, shareable: int | None = None) -> Run:
        """A lease that has what is known of its tokens, or of the first `shareable`, and computed nothing yet."""
        hit = None if shareable is None else self.cache.lookup(tokens[:shareable], SCOPE)
        lease = self.cache.acquire(tokens, SCOPE, hit)
        run = Run(lease, tokens, lease.num_computed_tokens)
        self.running.append(run)
        return run

    def start(self, tokens: TokenArray, chunk: int = 1 << 20) -> Run:
        run = self.begin(tokens)
        while run.written < tokens.size:
            self.compute(run, min(chunk, tokens.size - run.written))
        return run

    def compute(self, run: Run, count: int) -> None:
        self.cache.reserve(run.lease, count)
        self.pool.fill(run.lease, run.tokens, run.written, run.written + count)
        run.written += count
        self.cache.advance(run.lease, run.tokens, run.written)

    def generate(self, run: Run, new: list[int]) -> None:
        for token in new:
            run.tokens = np.append(run.tokens, np.int32(token))
            self.compute(run, 1)

    def release(self, run: Run) -> None:
        self.running.remove(run)
        self.ended.append(run.tokens[: run.written])
        self.cache.release(run.lease, run.tokens)

    def expected(self, query: TokenArray) -> int:
        whole = [run.tokens[: run.written // SIZE * SIZE] for run in self.running]
        return max((common_prefix(known, query[:-1]) for known in [*whole, *self.ended]), default=0)


def test_what_is_generated_is_found_as_soon_as_a_block_is_full() -> None:
    bench = Bench()
    run = bench.start(as_tokens(range(8)))
    for count in range(1, 20):
        bench.generate(run, [100 + count])
        query = np.append(run.tokens, np.int32(0))
        assert bench.cache.lookup(query, SCOPE).num_tokens == run.written // SIZE * SIZE
        bench.cache.check()


def test_blocks_wait_until_somebody_could_find_them() -> None:
    bench = Bench()
    run, other = bench.start(as_tokens(range(8))), bench.start(as_tokens(range(50, 58)))
    bench.generate(run, list(range(100, 112)))
    bench.generate(other, list(range(100, 112)))
    assert run.lease.num_committed_blocks == 2
    bench.cache.lookup(as_tokens([0, 1, 2, 3, 9]), SCOPE)
    assert run.lease.num_committed_blocks == 2
    assert bench.cache.lookup(as_tokens([*range(8), 100, 101, 7]), SCOPE).num_tokens == 10
    assert run.lease.num_committed_blocks == 5
    assert other.lease.num_committed_blocks == 2
    bench.release(other)
    assert bench.cache.lookup(as_tokens([*range(50, 58), *range(100, 112), 0]), SCOPE).num_tokens == 20


def test_two_that_generate_the_same_share_its_blocks_at_once() -> None:
    bench = Bench()
    one, other = bench.start(as_tokens(range(9))), bench.start(as_tokens(range(9)))
    for token in range(100, 120):
        bench.generate(one, [token])
        bench.generate(other, [token])
        whole = one.written // SIZE
        assert one.lease.tables[0].ids[:whole].tolist() == other.lease.tables[0].ids[:whole].tolist()
    bench.generate(one, list(range(120, 128)))
    bench.generate(other, list(range(120, 128)))
    whole = one.written // SIZE
    assert one.lease.tables[0].ids[:whole].tolist() == other.lease.tables[0].ids[:whole].tolist()


def test_who_passes_where_blocks_wait_has_them_committed() -> None:
    """Two compute one prompt: a long chunk of the one passes the end of the leaf where the other's blocks wait."""
    bench = Bench()
    prompt = as_tokens(range(24))
    one, other = bench.begin(prompt.copy()), bench.begin(prompt.copy())
    bench.compute(one, 8)
    bench.compute(one, 8)
    bench.compute(other, 24)
    bench.cache.check()
    bench.compute(one, 8)
    bench.generate(one, list(range(100, 112)))
    bench.cache.check()
    assert bench.cache.lookup(np.append(one.tokens, np.int32(0)), SCOPE).num_tokens == 36
    assert bench.cache.num_held_blocks == 9


@pytest.mark.parametrize("tail", [range(100, 108), range(50, 58)], ids=["the same", "another"])
def test_who_may_hit_less_than_is_known_passes_what_waits(tail: range) -> None:
    bench = Bench()
    run = bench.start(as_tokens(range(12)))
    bench.generate(run, list(range(100, 112)))
    late = bench.begin(as_tokens([*range(12), *tail]), shareable=5)
    bench.compute(late, 20 - late.written)
    bench.cache.check()
    assert bench.cache.lookup(np.append(run.tokens, np.int32(0)), SCOPE).num_tokens == 24


def test_a_fork_writes_to_no_block_that_was_reserved_before_it() -> None:
    bench = Bench()
    run = bench.start(as_tokens(range(6)))
    bench.cache.reserve(run.lease, 10)  # and not advanced
    twin = bench.cache.fork(run.lease)
    bench.cache.reserve(run.lease, 1)
    bench.cache.check()
    assert not set(run.lease.tables[0].ids[1:].tolist()) & set(twin.tables[0].ids[1:].tolist())


def test_who_listens_is_told_of_a_full_block_at_once() -> None:
    bench = Bench()
    told: list[object] = []
    bench.cache.tell(KeyChain(bytes(32), b"secret"), told.extend)
    run = bench.start(as_tokens(range(8)))
    bench.generate(run, list(range(100, 108)))
    assert run.lease.num_committed_blocks == 4


@pytest.mark.parametrize("seed", range(12))
def test_random_use_finds_all_that_was_computed(seed: int) -> None:
    rng, bench = np.random.default_rng(seed), Bench()
    num_late = 0
    for _ in range(250):
        act = rng.random()
        run = bench.running[rng.integers(len(bench.running))] if bench.running else None
        known = [*bench.ended, *(each.tokens for each in bench.running)]
        base = known[rng.integers(len(known))] if known else as_tokens([])
        query = np.concatenate(
            [base[: rng.integers(base.size + 1)], as_tokens(rng.integers(0, 2, 1 + rng.integers(9)))]
        )
        if run is None or (act < 0.1 and len(bench.running) < 8):
            bench.start(query.astype(np.int32), chunk=1 + int(rng.integers(12)))
        elif act < 0.75:
            bench.generate(run, rng.integers(0, 2, 1 + rng.integers(12)).tolist())
        elif act < 0.8:
            bench.running.append(Run(bench.cache.fork(run.lease), run.tokens.copy(), run.written))
        elif act < 0.9:
            bench.release(run)
        else:
            assert bench.cache.lookup(query, SCOPE).num_tokens == bench.expected(query)
        num_late += len(bench.cache._late)
        bench.cache.check()
        for each in bench.running:
            assert bench.pool.read(each.lease, 0, 0, each.written).tolist() == each.tokens[: each.written].tolist()
    assert num_late > 0
    for sequence in [*bench.ended, *(each.tokens[: each.written // SIZE * SIZE] for each in bench.running)]:
        assert bench.cache.find(sequence, SCOPE).num_tokens == sequence.size
    for each in list(bench.running):
        bench.release(each)
    bench.cache.check()
    assert bench.cache.num_held_blocks == 0
