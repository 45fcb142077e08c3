"""What `kv_connector_extra_config` may say, and the tiers opened from it.

{"tiers": ["dram:8GiB", "disk:/var/cache/pagoda:100GiB"], "secret": "...", "tier_key": "env:NAME"}
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pagoda.errors import ConfigError
from pagoda.kv.hierarchy import Hierarchy, WritePolicy
from pagoda.kv.keys import KEY_BYTES, KeyChain, OwnerTag
from pagoda.kv.tiers.base import Tier
from pagoda.kv.tiers.spec import TierSpec, load_key, open_tier, parse_tier

_NAMES = ("tiers", "secret", "tier_key", "namespace", "identity")


@dataclass(frozen=True, slots=True)
class Settings:
    """See docs/vllm.md. `secret` is already the key of the names' HMACs; `identity` names the weights if it is set."""

    tiers: tuple[TierSpec, ...]
    secret: bytes
    tier_key: str | None = None
    namespace: str = ""
    identity: str = ""

    @property
    def owner(self) -> OwnerTag:
        """Whose all records are."""
        return KeyChain(bytes(KEY_BYTES), self.secret).owner(self.namespace)


def read_settings(extra: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> Settings:
    """Check what vLLM was configured with. Raises ConfigError."""
    unknown = sorted(set(extra) - set(_NAMES))
    if unknown:
        raise ConfigError(f"kv_connector_extra_config knows {', '.join(_NAMES)}, not {', '.join(unknown)}")
    tiers = extra.get("tiers")
    if not isinstance(tiers, list) or not tiers or not all(isinstance(tier, str) for tier in tiers):
        raise ConfigError('kv_connector_extra_config needs "tiers", a list such as ["disk:/var/cache/pagoda:100GiB"]')
    specs = tuple(parse_tier(tier) for tier in tiers)
    if any(spec.codec for spec in specs):
        raise ConfigError("vLLM's blocks are stored as they are: a tier here takes no codec")
    for spec in specs:
        if spec.write not in ("", WritePolicy.THROUGH):
            raise ConfigError(f"vLLM does not tell what it evicts: a {spec.kind} tier cannot be written {spec.write!r}")
    values = {name: extra.get(name, "") for name in _NAMES[1:]}
    for name, value in values.items():
        if not isinstance(value, str):
            raise ConfigError(f"kv_connector_extra_config: {name} must be a string, not {value!r}")
    secret = values["secret"] or environ.get("PAGODA_SECRET", "")
    return Settings(
        specs,
        hashlib.sha256(secret.encode()).digest(),
        values["tier_key"] or environ.get("PAGODA_TIER_KEY") or None,
        values["namespace"],
        values["identity"],
    )


def open_hierarchy(settings: Settings, block_bytes: int, rank: int, num_workers: int) -> Hierarchy:
    """The tiers of one worker, all written as soon as a block is full.

    Several workers share the budgets of memory and disk; each has a folder of its own.

    Raises:
        ConfigError, TierUnavailable: a tier cannot be opened; those before it are closed.
    """
    key = None if settings.tier_key is None else load_key(settings.tier_key)
    opened: list[tuple[Tier, WritePolicy]] = []
    try:
        for spec in settings.tiers:
            own = _share(spec, rank, num_workers)
            # Memory of this process is not sealed: its KV lies open beside it in vLLM's cache.
            opened.append((open_tier(own, key=None if own.kind == "dram" else key), WritePolicy.THROUGH))
    except Exception:
        for tier, _ in opened:
            tier.close()
        raise
    return Hierarchy(opened, block_bytes=block_bytes, num_groups=1)


def _share(spec: TierSpec, rank: int, num_workers: int) -> TierSpec:
    if num_workers == 1 or spec.kind not in ("dram", "disk") or spec.capacity_bytes is None:
        return spec
    location = str(Path(spec.location) / f"rank-{rank}") if spec.kind == "disk" else ""
    return replace(spec, location=location, capacity_bytes=spec.capacity_bytes // num_workers)
