"""EncryptedTier: AES-GCM around the records of any tier.

    stored payload = nonce (12 bytes, random) | ciphertext | tag (16), authenticated together with the record's id

So a store that is read by others tells nothing but sizes, times, and ids and owners (which are HMACs), and one that is
written by others cannot pass off one record as another. A record sealed under another key, or changed, is Corrupt.
Whose a record is and how long it lasts is the store's to know, as it acts on it: who can change that could as well
delete the record, or bring it back.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from pagoda.kv.tiers.base import Tier
from pagoda.kv.tiers.records import (
    ByteArray,
    Corrupt,
    Found,
    GetResult,
    LookupResult,
    Missing,
    PutResult,
    Record,
    RecordId,
    RecordInfo,
    Stored,
    Target,
    Usage,
    aligned_empty,
    readable,
    writable,
)
from pagoda.kv.tiers.wrapped import WrappedTier

_NONCE_BYTES = 12
_TAG_BYTES = 16
SEAL_BYTES = _NONCE_BYTES + _TAG_BYTES


class EncryptedTier(WrappedTier):
    """`inner`, holding sealed records 28 bytes longer. Sizes and `payload_bytes` are those of the callers' payloads."""

    def __init__(self, inner: Tier, key: bytes) -> None:
        super().__init__(inner, f"encrypted {inner.name}")
        self._cipher = AESGCM(key)

    def _lookup(self, ids: Sequence[RecordId]) -> list[LookupResult]:
        return [_opened_size(result) for result in self.inner.lookup(ids)]

    def _put(self, records: Sequence[Record]) -> list[PutResult]:
        results = self.inner.put([replace(record, data=self._seal(record)) for record in records])
        return [Stored(r.num_bytes - SEAL_BYTES) if isinstance(r, Stored) else r for r in results]

    def _get_into(self, targets: Sequence[Target]) -> list[GetResult]:
        outs = [writable(target.buffer) for target in targets]
        buffers = [aligned_empty(out.size + SEAL_BYTES) for out in outs]
        found = self.inner.get_into([Target(t.id, b) for t, b in zip(targets, buffers, strict=True)])
        return [
            self._open(target.id, buffer[: result.num_bytes], out) if isinstance(result, Found) else result
            for target, out, buffer, result in zip(targets, outs, buffers, found, strict=True)
        ]

    def _open(self, id: RecordId, sealed: ByteArray, out: ByteArray) -> GetResult:
        num_bytes, data = sealed.size - SEAL_BYTES, sealed.data
        try:
            self._cipher.decrypt_into(
                data[:_NONCE_BYTES], data[_NONCE_BYTES:], id.to_bytes(), out[: max(num_bytes, 0)].data
            )
        except (InvalidTag, ValueError):
            self.inner.delete([id])
            return Corrupt("seal")
        return Found(num_bytes)

    def _seal(self, record: Record) -> ByteArray:
        payload = readable(record.data)
        sealed = aligned_empty(payload.size + SEAL_BYTES)
        nonce = os.urandom(_NONCE_BYTES)
        sealed[:_NONCE_BYTES] = np.frombuffer(nonce, dtype=np.uint8)
        self._cipher.encrypt_into(nonce, payload.data, record.id.to_bytes(), sealed[_NONCE_BYTES:].data)
        return sealed

    def _set_lease(self, ids: Sequence[RecordId], until: float) -> list[LookupResult]:
        return [_opened_size(result) for result in self.inner.set_lease(ids, until)]

    def _scan(self) -> Iterator[RecordInfo]:
        for info in self.inner.scan():
            if info.num_bytes >= SEAL_BYTES:
                yield replace(info, num_bytes=info.num_bytes - SEAL_BYTES)

    def _usage(self) -> Usage:
        usage = self.inner.usage()
        return replace(usage, payload_bytes=usage.payload_bytes - usage.num_records * SEAL_BYTES)


def _opened_size(result: LookupResult) -> LookupResult:
    if isinstance(result, Found):
        return Found(result.num_bytes - SEAL_BYTES) if result.num_bytes >= SEAL_BYTES else Missing()
    return result
