"""The cache under random use, against a model that knows only sequences of tokens.

Each slot of the fake pool holds a token. Whatever the cache says is a hit must read back as exactly the prompt's
tokens. Whatever is free is poisoned after each step, so a hit on a freed block, a lost copy-on-write or a write to a
shared block shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from pagoda.errors import LeaseRefused, OutOfBlocks
from pagoda.kv.cache import KVCache
from pagoda.kv.directives import Directive
from pagoda.kv.eviction import make_policy
from pagoda.kv.keys import KeyChain, Scope
from pagoda.kv.lease import Lease
from pagoda.kv.radix_node import as_tokens
from pagoda.kv.retained import Retained
from pagoda.kv.tenants import Share
from tests.kv.fakes import TokenPool, make
from tests.kv.test_events import Listener, names_in_tree

# No shrinking: a failing run of this machine is read, not waited for.
SETTINGS = settings(
    max_examples=50, stateful_step_count=40, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate]
)
SCOPES = [Scope(), Scope("tenant"), Scope("tenant", salt="s")]


@dataclass
class Running:
    lease: Lease
    tokens: np.ndarray  # the whole sequence known so far
    written: int


class CacheMachine(RuleBasedStateMachine):
    windows: tuple[int | None, ...] = (None,)
    policy = "lru"
    shares: Mapping[str, Share] = MappingProxyType({})
    kv_format = "fp32"
    listens = True  # to events: then full blocks enter the tree at once, and else when somebody could find them

    def __init__(self) -> None:
        super().__init__()
        self.running: list[Running] = []
        self.history: list[tuple[Scope, np.ndarray]] = []
        self.promised: dict[Retained, np.ndarray] = {}
        self.now = 0.0

    @initialize(block_size=st.sampled_from([1, 2, 4]), num_blocks=st.integers(6, 30))
    def start(self, block_size: int, num_blocks: int) -> None:
        self.cache: KVCache
        self.pool: TokenPool
        self.cache, self.pool = make(
            num_blocks,
            block_size,
            self.windows,
            make_policy(self.policy),
            clock=lambda: self.now,
            shares=self.shares,
            kv_format=self.kv_format,
        )
        self.cache.retention.limit_blocks = num_blocks // 2
        self.listener = Listener()
        if self.listens:
            self.cache.tell(KeyChain(bytes(32), b"secret"), self.listener.hear)

    def pick(self, index: int) -> Running:
        return self.running[index % len(self.running)]

    @rule(
        scope=st.sampled_from(SCOPES),
        own=st.lists(st.integers(0, 2), min_size=1, max_size=12),
        base=st.integers(0, 50),
        keep=st.integers(0, 30),
    )
    def acquire(self, scope: Scope, own: list[int], base: int, keep: int) -> None:
        prefix: list[int] = []
        if self.history:
            scope, old = self.history[base % len(self.history)]
            prefix = old[:keep].tolist()
        tokens = as_tokens(prefix + own)
        expected = self.cache.lookup(tokens, scope).num_tokens
        lease = self.cache.acquire(tokens, scope)
        hit = lease.num_hit_tokens
        self.running.append(Running(lease, tokens, hit))
        assert hit <= expected < tokens.size
        if self.kv_format == "int4":
            assert hit == expected
            assert hit % self.cache.block_size == 0
        if None in self.windows:
            assert expected - hit < self.cache.block_size  # only a tail that could not be copied is given up
        self.verify(lease, tokens, hit)
        if None in self.windows and not any(self.windows):
            known = [old[:end] for s, old in self.history if s == scope for end in [old.size]]
            best = max((int((np.cumprod(o[: tokens.size] == tokens[: o.size]) == 1).sum()) for o in known), default=0)
            assert expected <= best  # never more than was ever computed in this scope
        self.history.append((scope, tokens[:hit]))

    @precondition(lambda self: self.running)
    @rule(index=st.integers(0, 99), count=st.integers(1, 9), new=st.lists(st.integers(0, 2), min_size=9, max_size=9))
    def compute(self, index: int, count: int, new: list[int]) -> None:
        run = self.pick(index)
        known = run.tokens.size
        if run.written + count > known:  # decoding: the tokens past the prompt are new
            run.tokens = as_tokens([*run.tokens.tolist(), *new[: run.written + count - known]])
        before = run.lease.num_blocks, self.cache.num_available_blocks
        used = self.used_by_others(run.lease.scope)
        try:
            self.cache.reserve(run.lease, count)
        except OutOfBlocks:
            assert (run.lease.num_blocks, self.cache.num_available_blocks) == before
            return
        for name, num_used in self.used_by_others(run.lease.scope).items():
            assert num_used >= min(used[name], self.cache.tenants.guaranteed(name))
        self.pool.fill(run.lease, run.tokens, run.written, run.written + count)
        run.written += count
        self.cache.advance(run.lease, run.tokens, run.written)
        self.history.append((run.lease.scope, run.tokens[: run.written]))

    @precondition(lambda self: self.running)
    @rule(
        index=st.integers(0, 99),
        cuts=st.lists(st.integers(0, 20), min_size=2, max_size=4, unique=True),
        priority=st.sampled_from([0, 20, 35, 80]),
        duration_s=st.sampled_from([1.0, 3.0, None]),
    )
    def direct(self, index: int, cuts: list[int], priority: int, duration_s: float | None) -> None:
        ends = sorted(cuts)
        pairs = zip(ends[::2], ends[1::2], strict=False)
        directives = [Directive(start, stop, priority, duration_s) for start, stop in pairs]
        self.cache.direct(self.pick(index).lease, directives)

    def used_by_others(self, scope: Scope) -> dict[str, int]:
        tenants = [tenant for tenant in self.cache.tenants.all() if tenant.name != scope.namespace]
        return {tenant.name: self.cache._allocator.num_used_by(tenant.index) for tenant in tenants}

    @precondition(lambda self: self.running and len(self.running) < 8)
    @rule(index=st.integers(0, 99))
    def fork(self, index: int) -> None:
        run = self.pick(index)
        twin = self.cache.fork(run.lease)
        self.running.append(Running(twin, run.tokens.copy(), run.written))

    @precondition(lambda self: self.running)
    @rule(index=st.integers(0, 99))
    def release(self, index: int) -> None:
        run = self.pick(index)
        self.running.remove(run)
        self.cache.release(run.lease, run.tokens)

    @precondition(lambda self: hasattr(self, "cache"))
    @rule(count=st.integers(1, 8))
    def evict(self, count: int) -> None:
        free, cached = self.cache.num_free_blocks, self.cache.num_cached_blocks
        freed = self.cache.evict(count)
        assert freed >= min(count, cached)
        assert self.cache.num_free_blocks == free + freed

    @precondition(lambda self: getattr(self, "history", None))
    @rule(base=st.integers(0, 50), keep=st.integers(0, 30), ttl_s=st.sampled_from([1.0, 3.0, None]))
    def retain(self, base: int, keep: int, ttl_s: float | None) -> None:
        scope, old = self.history[base % len(self.history)]
        before = self.cache.num_available_blocks
        try:
            retained = self.cache.retention.retain(old[:keep], scope, ttl_s=ttl_s, owner=scope.salt)
        except LeaseRefused:
            assert self.cache.num_available_blocks == before
            return
        self.promised[retained] = old[: retained.num_tokens]

    @precondition(lambda self: getattr(self, "history", None))
    @rule(base=st.integers(0, 50), keep=st.integers(0, 12), what=st.sampled_from(["prefix", "scope", "namespace"]))
    def purge(self, base: int, keep: int, what: str) -> None:
        scope, old = self.history[base % len(self.history)]
        prefix = old[: keep if what == "prefix" else 0]
        where = scope.namespace if what == "namespace" else scope
        promised = self.promised.items()
        spared = [lease for lease, tokens in promised if not self.goes(lease.scope, tokens, where, prefix)]
        before = self.cache.blocks_by_namespace().total()
        gone = self.cache.purge(where, prefix)
        assert before - self.cache._tree.block_ids().size == gone
        assert not any(lease.released for lease in spared)
        assert self.cache.lookup(np.append(prefix, [0]), scope).num_tokens < max(1, prefix.size)
        for run in self.running:
            assert run.lease.is_detached or not self.goes(run.lease.scope, run.lease.prompt, where, prefix)

    def goes(self, scope: Scope, tokens: np.ndarray, where: Scope | str, prefix: np.ndarray) -> bool:
        inside = scope == where if isinstance(where, Scope) else scope.namespace == where
        return inside and tokens[: prefix.size].tolist() == prefix.tolist()

    @precondition(lambda self: getattr(self, "promised", None))
    @rule(index=st.integers(0, 99))
    def purge_lease(self, index: int) -> None:
        lease = list(self.promised)[index % len(self.promised)]
        tokens = self.promised[lease]
        assert self.cache.purge_lease(lease) > 0
        assert lease.released
        assert self.cache.lookup(np.append(tokens, [0]), lease.scope).num_tokens < tokens.size

    @precondition(lambda self: hasattr(self, "cache"))
    @rule(seconds=st.sampled_from([0.5, 2.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.cache.retention.expire()

    @precondition(lambda self: getattr(self, "promised", None))
    @rule(index=st.integers(0, 99))
    def let_go(self, index: int) -> None:
        self.cache.retention.release(list(self.promised)[index % len(self.promised)])

    def verify(self, lease: Lease, tokens: np.ndarray, length: int) -> None:
        for group, window in enumerate(self.windows):
            start = 0 if window is None else max(0, length - window + 1)
            assert self.pool.read(lease, group, start, length).tolist() == tokens[start:length].tolist()

    @invariant()
    def books_balance(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check()
        for run in self.running:
            self.verify(run.lease, run.tokens, run.written)
        self.promised = {retained: tokens for retained, tokens in self.promised.items() if not retained.released}
        assert len(self.promised) == len(self.cache.retention.leases)
        assert self.cache.retention.num_blocks <= self.cache.retention.limit_blocks
        for retained, tokens in self.promised.items():
            query = np.append(tokens, [0])
            assert self.cache.lookup(query, retained.scope).num_tokens == retained.num_tokens
        self.pool.poison(self.cache)
        if self.listens:
            assert self.listener.names == names_in_tree(self.cache)

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        for run in self.running:
            self.cache.release(run.lease, run.tokens)
        for retained in list(self.cache.retention.leases):
            self.cache.retention.release(retained)
        self.cache.check()
        if self.cache.events is not None:
            self.cache.events.tell_all()
            assert self.listener.names == names_in_tree(self.cache)
        assert self.cache.num_held_blocks == 0
        self.cache.clear()
        self.cache.check()
        assert not self.listener.names
        assert self.cache.num_free_blocks == self.cache.num_blocks


class QuietMachine(CacheMachine):
    listens = False


class QuietReuseMachine(CacheMachine):
    listens = False
    policy = "reuse"
    shares = MappingProxyType({"tenant": Share(guaranteed=0.4)})


class QuietWholeBlocksMachine(CacheMachine):
    listens = False
    kv_format = "int4"


class ReuseMachine(CacheMachine):
    policy = "reuse"


class HybridMachine(CacheMachine):
    windows = (None, 5, 5)
    policy = "reuse"


class WindowMachine(CacheMachine):
    windows = (6,)


class SharesMachine(CacheMachine):
    shares = MappingProxyType({"tenant": Share(guaranteed=0.4, weight=0.5)})


class HybridSharesMachine(CacheMachine):
    windows = (None, 5)
    policy = "slru"
    shares = MappingProxyType({"": Share(guaranteed=0.2), "tenant": Share(guaranteed=0.4)})


class WholeBlocksMachine(CacheMachine):
    windows = (None, 5)
    kv_format = "int4"


MACHINES = [
    WholeBlocksMachine,
    CacheMachine,
    QuietMachine,
    QuietReuseMachine,
    QuietWholeBlocksMachine,
    ReuseMachine,
    HybridMachine,
    WindowMachine,
    SharesMachine,
    HybridSharesMachine,
]


@pytest.mark.parametrize("machine", MACHINES)
def test_random_use(machine: type[CacheMachine]) -> None:
    run_state_machine_as_test(machine, settings=SETTINGS)
