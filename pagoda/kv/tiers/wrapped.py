"""WrappedTier: a tier around another, which passes on what it does not change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pagoda.kv.keys import OwnerTag
from pagoda.kv.tiers.base import Tier
from pagoda.kv.tiers.records import (
    DeleteResult,
    GetResult,
    LookupResult,
    PutResult,
    Record,
    RecordId,
    RecordInfo,
    Target,
    Usage,
)


class WrappedTier(Tier):
    """`inner`, called `name`, closed with it. Its counts are the inner one's, with the outcomes as they leave here."""

    def __init__(self, inner: Tier, name: str) -> None:
        super().__init__(name)
        self.inner = inner
        self.is_lossy = inner.is_lossy
        self.ttl_s = inner.ttl_s
        self.keeps_leases = inner.keeps_leases

    def _lookup(self, ids: Sequence[RecordId]) -> list[LookupResult]:
        return self.inner.lookup(ids)

    def _put(self, records: Sequence[Record]) -> list[PutResult]:
        return self.inner.put(records)

    def _get_into(self, targets: Sequence[Target]) -> list[GetResult]:
        return self.inner.get_into(targets)

    def _delete(self, ids: Sequence[RecordId]) -> list[DeleteResult]:
        return self.inner.delete(ids)

    def _purge(self, owner: OwnerTag) -> int:
        return self.inner.purge(owner)

    def _set_lease(self, ids: Sequence[RecordId], until: float) -> list[LookupResult]:
        return self.inner.set_lease(ids, until)

    def _scan(self) -> Iterator[RecordInfo]:
        return self.inner.scan()

    def _usage(self) -> Usage:
        return self.inner.usage()

    def stats(self) -> dict[str, int]:
        """See Tier."""
        return self.inner.stats() | self._tally.snapshot()

    def _close(self) -> None:
        self.inner.close()
