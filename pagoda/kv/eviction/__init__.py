"""Eviction policies."""

from pagoda.kv.eviction.base import Evictable, EvictionPolicy
from pagoda.kv.eviction.keys import FIFO, LRU

__all__ = ["FIFO", "LRU", "Evictable", "EvictionPolicy"]
