"""What an Engine is put together from: its cache with the tiers below it, and the identity of its KV."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from pagoda.errors import ConfigError
from pagoda.kv.cache import KVCache
from pagoda.kv.eviction import EvictionPolicy
from pagoda.kv.formats.codecs import BlockCodec, make_codec
from pagoda.kv.hierarchy import Hierarchy, WritePolicy
from pagoda.kv.keys import KeyChain
from pagoda.kv.layout import KVLayout
from pagoda.kv.pool import BlockPool
from pagoda.kv.tenants import Share
from pagoda.kv.tiered import TieredCache
from pagoda.kv.tiers.base import Tier
from pagoda.kv.tiers.coded import CodedTier
from pagoda.kv.tiers.spec import TierSpec, load_key, open_tier, parse_tier
from pagoda.model.loader import LoadedModel

_MEDIA = {"dram": "CPU", "disk": "DISK"}  # of tiers that one process has alone, as readers of block events call them


def make_cache(
    layout: KVLayout,
    pool: BlockPool,
    loaded: LoadedModel,
    policy: EvictionPolicy,
    tiers: Sequence[str],
    after_hits: int,
    secret: str | None,
    tier_key: str | None,
    shares: Mapping[str, Share],
    lossy: bool,
) -> KVCache:
    """The cache, with tiers below the pool if there are any."""
    if after_hits < 0:
        raise ConfigError(f"tier_after_hits must be 0 or more, got {after_hits}")
    if not tiers:
        return KVCache(layout, pool, policy, shares=shares)
    specs = [parse_tier(tier) for tier in tiers]
    policies = [_write_policy(spec) for spec in specs]
    codecs = [make_codec(spec.codec, layout) if spec.codec else None for spec in specs]
    key = None if tier_key is None else load_key(tier_key)
    keys = KeyChain(fingerprint(layout, loaded), hashlib.sha256((secret or "").encode()).digest())
    of_tiers = {keys.owner(name): share for name, share in shares.items()}
    # Memory of this process is not sealed: its KV lies open beside it in the pool.
    opened = [
        (_coded(open_tier(spec, key=None if spec.kind == "dram" else key, shares=of_tiers), codec, layout), policy)
        for spec, codec, policy in zip(specs, codecs, policies, strict=True)
    ]
    hierarchy = Hierarchy(opened, block_bytes=layout.block_bytes, num_groups=len(layout.groups), after_hits=after_hits)
    media = ["" if tier.is_lossy else _MEDIA.get(spec.kind, "") for spec, (tier, _) in zip(specs, opened, strict=True)]
    return TieredCache(layout, pool, hierarchy, keys, policy, shares, lossy, media)


def _coded(tier: Tier, codec: BlockCodec | None, layout: KVLayout) -> Tier:
    return tier if codec is None else CodedTier(tier, codec, layout.block_bytes)


def fingerprint(layout: KVLayout, loaded: LoadedModel) -> bytes:
    """32 bytes that differ whenever KV of one model is not KV of the other."""
    identity = {
        "weights": loaded.weights_identity,
        "ropes": repr(loaded.spec.ropes),
        "compute": str(loaded.decoder.dtype),
    }
    return layout.fingerprint(identity)


def _write_policy(spec: TierSpec) -> WritePolicy:
    """What SPEC asks for; else memory of this process is written when the pool evicts, what outlives it at once."""
    if not spec.write:
        return WritePolicy.BACK if spec.kind == "dram" else WritePolicy.THROUGH
    try:
        return WritePolicy(spec.write)
    except ValueError:
        raise ConfigError(f"a tier can be written {', '.join(WritePolicy)}, not {spec.write!r}") from None
