"""CodedTier: blocks stored in another form than the pool's; see formats/codecs.py.

A record's name in the store is a hash of its name and the codec's, so a folder that was written with another codec, or
with none, holds nothing for this one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

from pagoda.errors import CorruptRecord
from pagoda.kv.formats.codecs import BlockCodec
from pagoda.kv.keys import KEY_BYTES, BlockKey
from pagoda.kv.tiers.base import Tier
from pagoda.kv.tiers.records import (
    Corrupt,
    DeleteResult,
    Found,
    GetResult,
    LookupResult,
    PutResult,
    Record,
    RecordId,
    Stored,
    Target,
    aligned_empty,
    readable,
    writable,
)
from pagoda.kv.tiers.wrapped import WrappedTier


class CodedTier(WrappedTier):
    """`inner`, holding what the codec makes of blocks of `block_bytes`.

    Callers see blocks and their sizes; `usage` and `scan` tell what is stored, the names of records too.
    """

    def __init__(self, inner: Tier, codec: BlockCodec, block_bytes: int) -> None:
        super().__init__(inner, f"{inner.name} in {codec.name}")
        self.is_lossy = codec.is_lossy
        self._codec = codec
        self._block_bytes = block_bytes

    def _stored_id(self, record: RecordId) -> RecordId:
        key = hashlib.blake2b(record.key, key=self._codec.stored_as.encode(), digest_size=KEY_BYTES).digest()
        return replace(record, key=BlockKey(key))

    def _lookup(self, ids: Sequence[RecordId]) -> list[LookupResult]:
        return [self._whole(found) for found in self.inner.lookup([self._stored_id(record) for record in ids])]

    def _whole(self, result: LookupResult) -> LookupResult:
        return Found(self._block_bytes) if isinstance(result, Found) else result

    def _put(self, records: Sequence[Record]) -> list[PutResult]:
        stored = [
            replace(each, id=self._stored_id(each.id), data=self._codec.encode(each.id.group, readable(each.data)))
            for each in records
        ]
        results = self.inner.put(stored)
        return [Stored(self._block_bytes) if isinstance(result, Stored) else result for result in results]

    def _get_into(self, targets: Sequence[Target]) -> list[GetResult]:
        buffers = [aligned_empty(self._codec.most_bytes) for _ in targets]
        asked = [Target(self._stored_id(t.id), buffer) for t, buffer in zip(targets, buffers, strict=True)]
        results: list[GetResult] = []
        for target, inner, result in zip(targets, asked, self.inner.get_into(asked), strict=True):
            if not isinstance(result, Found):
                results.append(result)
                continue
            try:
                stored = readable(inner.buffer)[: result.num_bytes]
                self._codec.decode(target.id.group, stored, writable(target.buffer)[: self._block_bytes])
            except CorruptRecord:
                self.inner.delete([inner.id])
                results.append(Corrupt("codec"))
            else:
                results.append(Found(self._block_bytes))
        return results

    def _delete(self, ids: Sequence[RecordId]) -> list[DeleteResult]:
        return self.inner.delete([self._stored_id(record) for record in ids])

    def _set_lease(self, ids: Sequence[RecordId], until: float) -> list[LookupResult]:
        return [self._whole(found) for found in self.inner.set_lease([self._stored_id(r) for r in ids], until)]
