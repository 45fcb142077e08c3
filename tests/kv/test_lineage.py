"""Public prefixes and adapters: whose KV a sequence may read, by tokens, in the pool and in the names outside it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pagoda.errors import LeaseRefused, OutOfBlocks
from pagoda.kv.cache import KVCache
from pagoda.kv.keys import Scope
from pagoda.kv.lease import Lease
from pagoda.kv.lineage import PUBLIC, Lineages, common_reach
from pagoda.kv.radix_node import as_tokens
from tests.kv.fakes import TokenPool, make

A, B = Scope("a"), Scope("b")


def tokens(seed: int, length: int) -> np.ndarray:
    return as_tokens(np.random.default_rng(seed).integers(0, 50, length))


def compute(cache: KVCache, pool: TokenPool, sequence: np.ndarray, scope: Scope) -> int:
    """Run a sequence as a request does; returns its hit."""
    lease = cache.acquire(sequence, scope)
    cache.reserve(lease, sequence.size - lease.num_computed_tokens)
    pool.fill(lease, sequence, lease.num_computed_tokens, sequence.size)
    cache.advance(lease, sequence, sequence.size)
    cache.release(lease, sequence)
    cache.check()
    return lease.num_hit_tokens


def joined(*parts: np.ndarray) -> np.ndarray:
    return np.concatenate(parts)


def test_a_published_prefix_is_everybodys_and_what_follows_is_not() -> None:
    cache, pool = make(100, 4)
    public, mine = tokens(1, 24), tokens(2, 9)
    assert compute(cache, pool, joined(public, mine), A) == 0
    assert compute(cache, pool, joined(public, mine), B) == 0
    assert cache.publish(joined(public, mine)[:26], A) == 24  # whole blocks; a copy of what A has
    cache.check()
    assert compute(cache, pool, joined(public, mine), Scope("c")) == 24
    assert compute(cache, pool, joined(public, tokens(3, 9)), Scope("c", salt="s")) == 24
    assert compute(cache, pool, joined(public, mine), Scope("c")) == 32
    assert compute(cache, pool, joined(public, mine), Scope("d")) == 24
    assert cache.unpublish(public[:3]) == 0
    assert cache.unpublish(joined(public, mine[:1])) == 1
    assert compute(cache, pool, joined(public, mine), Scope("e")) == 0


def test_what_is_not_cached_is_public_when_it_is_computed() -> None:
    cache, pool = make(100, 4)
    public = tokens(1, 24)
    assert cache.publish(public, A) == 0
    assert compute(cache, pool, joined(public, tokens(2, 5)), A) == 0
    assert compute(cache, pool, joined(public, tokens(3, 5)), B) == 24
    assert compute(cache, pool, public[:14], B) == 13  # a beginning of it, and it ends within a block
    assert compute(cache, pool, joined(public[:14], tokens(4, 5)), B) == 14  # on its own copy of that block
    assert compute(cache, pool, joined(public[:14], tokens(4, 5)), A) == 12  # parts meet at block boundaries
    assert compute(cache, pool, joined(public[:14], tokens(4, 5)), A) == 18
    with pytest.raises(LeaseRefused, match="whole blocks"):
        cache.publish(public[:3], A)


def test_two_tenants_that_arrive_together_compute_the_public_part_once() -> None:
    cache, _ = make(100, 4)
    public = tokens(1, 24)
    cache.publish(public, A)
    first = cache.acquire(joined(public, tokens(2, 9)), A)
    pending = cache.pending(joined(public, tokens(2, 9)), B, 0)
    assert pending is not None
    assert (pending.lease, pending.num_tokens) == (first, 24)
    cache.release(first, first.prompt)
    cache.check()


def test_before_its_first_token_an_adapter_shares_the_bases_blocks() -> None:
    cache, pool = make(100, 4)
    before, after = tokens(1, 22), tokens(2, 12)
    adapted = replace(A, adapter="x", adapter_from=22)
    assert compute(cache, pool, joined(before, tokens(3, 4)), A) == 0
    assert compute(cache, pool, joined(before, after), adapted) == 20  # the block of token 22 is the adapter's
    assert compute(cache, pool, joined(before, after), adapted) == 33
    assert compute(cache, pool, joined(before, after), A) == 22  # never what the adapter changed
    for other in (
        replace(adapted, adapter="y"),
        replace(adapted, adapter_from=23),
        replace(adapted, adapter_from=21),
    ):
        assert compute(cache, pool, joined(before, after), other) == 20
    assert compute(cache, pool, joined(before, after), replace(A, adapter="x")) == 0  # changed from the first token on
    assert compute(cache, pool, joined(before, after), replace(B, adapter="x", adapter_from=22)) == 0


def test_public_then_own_then_adapted() -> None:
    cache, pool = make(200, 4)
    public, own, after = tokens(1, 16), tokens(2, 12), tokens(3, 12)
    cache.publish(public, A)
    everything = joined(public, own, after)
    adapted = replace(A, adapter="x", adapter_from=28)
    assert compute(cache, pool, everything, adapted) == 0
    assert compute(cache, pool, joined(public, own, tokens(4, 8)), A) == 28
    assert compute(cache, pool, everything, replace(B, adapter="x", adapter_from=28)) == 16
    assert compute(cache, pool, everything, adapted) == 39
    lineage = cache._tree.lineages.of(everything, adapted)
    assert [(segment.start, segment.scope.adapter) for segment in lineage] == [(0, ""), (16, ""), (28, "x")]
    assert lineage[0].scope == PUBLIC
    base = cache._tree.lineages.of(joined(public, own, tokens(4, 8)), A)
    assert common_reach(lineage, base) == 28
    assert common_reach(lineage, cache._tree.lineages.of(everything, B)) == 16


def test_a_tenant_with_a_share_pays_nothing_for_what_is_public() -> None:
    cache, pool = make(100, 4)
    cache.tenants.of("a")
    cache.publish(tokens(1, 24), A)
    compute(cache, pool, joined(tokens(1, 24), tokens(2, 8)), A)
    assert cache.tenants.held_and_cached(cache.tenants.of("a")) == (0, 2)
    assert cache.tenants.held_and_cached(cache.tenants.of(PUBLIC.namespace)) == (0, 6)
    assert cache.purge("a", joined(tokens(1, 24), tokens(2, 4))) == 2
    cache.check()
    assert compute(cache, pool, joined(tokens(1, 24), tokens(2, 8)), A) == 24


def test_many_public_prefixes_are_bounded() -> None:
    lineages = Lineages(4)
    for seed in range(64):
        lineages.publish(as_tokens([seed] * 8))
    lineages.publish(as_tokens([5] * 4))  # the beginning of another
    with pytest.raises(LeaseRefused, match="64"):
        lineages.publish(as_tokens([99] * 4))


@pytest.mark.parametrize("windows", [(None,), (None, 9), (9,)])
def test_random_use_reads_right_and_crosses_no_border(windows: tuple[int | None, ...]) -> None:
    rng = np.random.default_rng(4)
    cache, pool = make(60 * len(windows), 4, windows)
    texts = [tokens(seed, 40) for seed in range(3)]
    scopes = [A, B, replace(A, salt="s"), replace(A, adapter="x", adapter_from=13), replace(B, adapter="x")]
    computed: list[tuple[Scope, np.ndarray]] = []
    public: list[np.ndarray] = []
    running: list[tuple[Lease, np.ndarray]] = []
    for step in range(900):
        action = rng.random()
        if action < 0.02 and len(public) < 4:
            text = texts[rng.integers(3)][: rng.integers(4, 40)]
            scope = scopes[rng.integers(3)]
            cache.publish(text, scope)
            public.append(text[: text.size // 4 * 4])
        elif action < 0.03 and public:
            cache.unpublish(public.pop())
            public = [text for text in public if any(np.array_equal(text, p) for p in cache._tree.lineages.published)]
        elif action < 0.5 and len(running) < 5:
            scope, text = scopes[rng.integers(5)], texts[rng.integers(3)]
            sequence = joined(text[: rng.integers(1, 40)], tokens(step % 40, int(rng.integers(1, 14))))
            lease = cache.acquire(sequence, scope)
            running.append((lease, sequence))
            hit = lease.num_hit_tokens
            for group, window in enumerate(windows):
                first = 0 if window is None else max(0, hit - window + 1)
                assert pool.read(lease, group, first, hit).tolist() == sequence[first:hit].tolist()
            readable = [_readable(where, scope, seen, sequence) for where, seen in computed]
            assert hit <= max([0, *readable, *(_common(text, sequence) for text in public)])
        elif running:
            index = int(rng.integers(len(running)))
            lease, sequence = running[index]
            count = min(int(rng.integers(1, 12)), sequence.size - lease.num_computed_tokens)
            try:
                if count:
                    cache.reserve(lease, count)
                    start = lease.num_computed_tokens
                    pool.fill(lease, sequence, start, start + count)
                    cache.advance(lease, sequence, start + count)
                    computed.append((lease.scope, sequence[: start + count]))
            except OutOfBlocks:
                count = 0
            if not count:
                running.pop(index)
                cache.release(lease, sequence)
        cache.check()
        pool.poison(cache)
    for lease, sequence in running:
        cache.release(lease, sequence)
    cache.clear()
    cache.check()
    assert cache.num_free_blocks == cache.num_blocks


def _common(one: np.ndarray, other: np.ndarray) -> int:
    length = min(one.size, other.size)
    return int((np.cumprod(one[:length] == other[:length]) == 1).sum())


def _readable(where: Scope, scope: Scope, seen: np.ndarray, sequence: np.ndarray) -> int:
    """How much of what one scope computed a sequence of another may read."""
    if (where.namespace, where.salt) != (scope.namespace, scope.salt):
        return 0
    common = _common(seen, sequence)
    if where == scope:
        return common
    return min([common, *(each.adapter_from for each in (where, scope) if each.adapter)])
