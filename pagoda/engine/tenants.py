"""TenantSpec: what an operator grants a tenant. Tenants are named by `Scope.namespace`, and so by API keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from pagoda.errors import ConfigError
from pagoda.kinds import is_integer, is_number
from pagoda.kv.lineage import PUBLIC
from pagoda.kv.sizes import parse_size
from pagoda.kv.tenants import Share as Share

RESERVED = frozenset(("", PUBLIC.namespace))
"""What no tenant may be called: all requests together where there are no API keys, and what is published."""

PROMOTE_S = 30.0  # a request this old counts as one class higher, for one start in AGED_EVERY
AGED_EVERY = 8  # so classes above those that waited long lose no more than an eighth to them


class ServiceClass(StrEnum):
    """Whose requests go first: interactive before standard before batch. A tenant without one is standard."""

    INTERACTIVE = "interactive"
    STANDARD = "standard"
    BATCH = "batch"

    @property
    def rank(self) -> int:
        """0 is first."""
        return list(ServiceClass).index(self)


@dataclass(frozen=True, slots=True)
class TenantSpec:
    """What a tenant gets.

    Attributes:
        share: of the KV pool.
        service_class: its place in the queue.
        lease_bytes: most KV bytes that its leases and pins may hold; None leaves the engine's bound alone.
        compress_under_pressure: the kv_policy that its requests allow under pressure where they name none, such as
            `streaming:1024`; None: they allow none.

    Raises:
        ConfigError: a negative budget, no such class, or a value of another type.
    """

    share: Share = field(default_factory=Share)
    service_class: ServiceClass = ServiceClass.STANDARD
    lease_bytes: int | None = None
    compress_under_pressure: str | None = None

    def __post_init__(self) -> None:
        if self.lease_bytes is not None and not (is_integer(self.lease_bytes) and self.lease_bytes >= 0):
            raise ConfigError(f"a lease budget has 0 bytes or more, got {self.lease_bytes!r}")
        if not isinstance(self.share, Share):
            raise ConfigError(f"share must be a Share, got {self.share!r}")
        if self.service_class not in list(ServiceClass):
            raise ConfigError(f"class must be one of {', '.join(ServiceClass)}, got {self.service_class!r}")
        object.__setattr__(self, "service_class", ServiceClass(self.service_class))

    @classmethod
    def from_table(cls, table: Mapping[str, object]) -> TenantSpec:
        """Read `guaranteed`, `weight` (numbers), `class`, `lease_budget` (bytes, or such as "2GiB") and
        `compress_under_pressure` (such as "streaming:1024"; the engine checks it).

        Raises:
            ConfigError: an unknown name, or a value that is none of these.
        """
        known = "guaranteed", "weight", "class", "lease_budget", "compress_under_pressure"
        if unknown := table.keys() - set(known):
            raise ConfigError(f"{sorted(unknown)[0]} is not known; there are {', '.join(known)}")
        numbers = {}
        for name in ("guaranteed", "weight"):
            value = table.get(name, getattr(Share(), name))
            if not is_number(value):
                raise ConfigError(f"{name} must be a number, got {value!r}")
            numbers[name] = float(value)
        named: Any = table.get("class", ServiceClass.STANDARD)
        budget = table.get("lease_budget")
        if budget is not None and not isinstance(budget, str) and not is_integer(budget):
            raise ConfigError(f"lease_budget must be bytes, or such as '2GiB', got {budget!r}")
        policy = table.get("compress_under_pressure")
        if policy is not None and not isinstance(policy, str):
            raise ConfigError(f"compress_under_pressure must be such as 'streaming:1024', got {policy!r}")
        lease_bytes = None if budget is None else parse_size(budget)
        return cls(Share(**numbers), named, lease_bytes, policy)
