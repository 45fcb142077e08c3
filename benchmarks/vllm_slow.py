"""Pagoda's connector over tiers made as slow as VLLM_SLOW_TIER says (bytes a second): for `benchmarks.vllm`."""

from __future__ import annotations

import os

from pagoda.integrations.vllm import settings
from pagoda.integrations.vllm_connector import PagodaConnector
from pagoda.kv.tiers.base import Tier
from pagoda.kv.tiers.fake import Faults, FaultyTier
from pagoda.kv.tiers.spec import TierSpec, open_tier

__all__ = ["PagodaConnector"]


def slow_tier(spec: TierSpec, *, key: bytes | None = None) -> Tier:
    return FaultyTier(open_tier(spec, key=key), Faults(bytes_per_s=float(os.environ["VLLM_SLOW_TIER"])))


settings.open_tier = slow_tier
