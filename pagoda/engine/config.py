"""EngineConfig: every setting of the engine, validated once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pagoda.engine.policy import QUEUE_POLICIES
from pagoda.engine.pressure.config import PressureConfig
from pagoda.engine.tenants import TenantSpec
from pagoda.errors import ConfigError
from pagoda.kinds import is_integer, is_number


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of an engine.

    Attributes:
        block_size: tokens per KV block.
        max_num_seqs: most samples running at once.
        token_budget: most tokens computed in one step. Higher: faster prefill; lower: steadier decode.
        queue_policy: the order of admission; a key of QUEUE_POLICIES.
        lease_share: most of the pool that leases may hold. They also leave room for one request of the full context.
        tenants: what each tenant gets, by namespace; others get no share and no class of their own.
        pressure: what is done when there is more to do than room.

    Raises:
        ConfigError: a value is out of range, or of another type.
    """

    block_size: int = 16
    max_num_seqs: int = 64
    token_budget: int = 512
    queue_policy: str = "fcfs"
    lease_share: float = 0.5
    tenants: Mapping[str, TenantSpec] = field(default_factory=dict)
    pressure: PressureConfig = field(default_factory=PressureConfig.off)

    def __post_init__(self) -> None:
        for name in ("block_size", "max_num_seqs", "token_budget"):
            value = getattr(self, name)
            if not is_integer(value) or value < 1:
                raise ConfigError(f"{name} must be a whole number of at least 1, got {value!r}")
        if self.token_budget < self.max_num_seqs:
            raise ConfigError(
                f"token_budget ({self.token_budget}) must be at least max_num_seqs ({self.max_num_seqs}): "
                "every running sample decodes one token a step"
            )
        if not is_number(self.lease_share) or not 0 <= self.lease_share <= 1:
            raise ConfigError(f"lease_share must be in [0, 1], got {self.lease_share!r}")
        if self.queue_policy not in list(QUEUE_POLICIES):
            raise ConfigError(f"queue_policy must be one of {', '.join(QUEUE_POLICIES)}, got {self.queue_policy!r}")
        for name, spec in self.tenants.items():
            if not isinstance(spec, TenantSpec):
                raise ConfigError(f"tenant {name!r} must have a TenantSpec, got {spec!r}")
        if not isinstance(self.pressure, PressureConfig):
            raise ConfigError(f"pressure must be a PressureConfig, got {self.pressure!r}")
