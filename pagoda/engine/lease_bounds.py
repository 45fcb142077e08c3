"""What leases may hold of the pool: whatever is guaranteed or leased, the longest request must still be able to run."""

from __future__ import annotations

from pagoda.engine.config import EngineConfig
from pagoda.errors import ConfigError
from pagoda.kv.cache import KVCache


def bound_leases(cache: KVCache, config: EngineConfig, max_model_len: int) -> None:
    """Set how much of a pool leases may hold. Mutates its retention.

    Raises:
        ConfigError: tenants are guaranteed so much that a request of `max_model_len` tokens has no room.
    """
    retention = cache.retention
    room = cache.num_blocks - cache.peak_blocks(max_model_len, config.token_budget)
    kept = cache.tenants.num_kept
    if kept > max(0, room):
        raise ConfigError(
            f"tenants are guaranteed {kept} of {cache.num_blocks} KV blocks, and a context of "
            f"{max_model_len} tokens needs {cache.num_blocks - room} beside them: guarantee less, lower "
            "max_model_len or raise kv_memory (`--max-model-len`, `--kv-memory`)"
        )
    share, pool = int(config.lease_share * cache.num_blocks), f"the pool's {cache.num_blocks} blocks"
    retention.limit_blocks = max(0, min(share, room))
    retention.limit_cause = (
        f"`--lease-share` gives leases {config.lease_share:g} of {pool}"
        if share <= room
        else f"a context of {max_model_len} tokens must fit beside leases, and needs "
        f"{cache.num_blocks - room} of {pool}; lower `--max-model-len` or raise `--kv-memory`"
    )
    retention.guaranteed = {name: cache.tenants.guaranteed(name) for name in config.tenants}
    retention.unguaranteed_limit_blocks = max(0, room - kept)
    for name, spec in config.tenants.items():
        if spec.lease_bytes is not None:
            retention.owner_limits[name] = spec.lease_bytes // cache.layout.block_bytes
