"""Eviction policies: which evictable leaf of the tree goes next. Each serves one tree; `make_policy` makes one by name.

    keys.py       LRU, FIFO, LFU, GDSF: sort keys of a few lines
    segmented.py  SLRU, S3-FIFO: two queues
    queues.py     Queues: one policy's order apart by share and by priority
    reuse.py      ReuseRate, the default: learns who comes back, and when
    names.py      BlockNames: how a policy knows a block again

Other packages add policies under the entry-point group `pagoda.eviction_policies`: a name and a callable without
arguments that returns an EvictionPolicy. Built-in names come first.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points

from pagoda.errors import ConfigError
from pagoda.kv.eviction.base import Evictable, EvictionPolicy, Policy, SortKey
from pagoda.kv.eviction.keys import FIFO, GDSF, LFU, LRU
from pagoda.kv.eviction.queues import DEFAULT_PRIORITY, Queues
from pagoda.kv.eviction.reuse import ReuseRate
from pagoda.kv.eviction.segmented import S3FIFO, SLRU

ENTRY_POINTS = "pagoda.eviction_policies"
DEFAULT_POLICY = "reuse"

POLICIES: dict[str, Callable[[], EvictionPolicy]] = {
    "reuse": ReuseRate,
    "lru": LRU,
    "lfu": LFU,
    "fifo": FIFO,
    "slru": SLRU,
    "s3fifo": S3FIFO,
    "gdsf": GDSF,
}


def make_policy(name: str = DEFAULT_POLICY) -> EvictionPolicy:
    """A fresh policy for one tree.

    Raises:
        ConfigError: no policy has that name.
    """
    factory = POLICIES.get(name)
    if factory is not None:
        return factory()
    plugins = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if name not in plugins:
        raise ConfigError(f"no eviction policy is called {name!r}; there are {', '.join([*POLICIES, *plugins])}")
    policy: EvictionPolicy = plugins[name].load()()
    return policy


def policy_name(policy: EvictionPolicy) -> str:
    """What `make_policy` knows a policy by; for one that is not built in, its class."""
    kind = type(policy)
    return next((name for name, factory in POLICIES.items() if factory is kind), kind.__name__)


__all__ = [
    "DEFAULT_POLICY",
    "DEFAULT_PRIORITY",
    "FIFO",
    "GDSF",
    "LFU",
    "LRU",
    "POLICIES",
    "S3FIFO",
    "SLRU",
    "Evictable",
    "EvictionPolicy",
    "Policy",
    "Queues",
    "ReuseRate",
    "SortKey",
    "make_policy",
    "policy_name",
]
