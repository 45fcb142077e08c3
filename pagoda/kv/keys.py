"""Scope and BlockKey: who may share a block, and its name outside the device.

    scope  = namespace (tenant) + cache_salt + adapter
    root   = H(fingerprint, scope)
    key[i] = H(key[i-1], tokens of block i, extra of block i)

The device tree compares tokens and hashes nothing; keys are made only for blocks that enter or are sought in
lower tiers and events. Keys are HMACs under a cluster secret, so a stored key tells nothing to who lacks the secret.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NewType

import numpy as np
import numpy.typing as npt

BlockKey = NewType("BlockKey", bytes)
KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class Scope:
    """Requests share prefixes only within equal scopes.

    `namespace` is the tenant, from the API key and never from the client's word alone; `salt` is the client's
    `cache_salt`; `adapter` is the content hash of a LoRA adapter.
    """

    namespace: str = ""
    salt: str = ""
    adapter: str = ""

    def to_bytes(self) -> bytes:
        """An unambiguous encoding: each field with its length in front."""
        fields = [f.encode() for f in (self.namespace, self.salt, self.adapter)]
        return b"".join(len(f).to_bytes(4, "big") + f for f in fields)


class KeyChain:
    """Derives BlockKeys for one model fingerprint under one secret.

    Args:
        fingerprint: `KVLayout.fingerprint` of the model that computes the blocks.
        secret: at most 64 bytes; shared by the processes that share stored blocks.
    """

    def __init__(self, fingerprint: bytes, secret: bytes = b"") -> None:
        self._fingerprint = fingerprint
        self._secret = secret

    def root(self, scope: Scope) -> BlockKey:
        """The parent key of a sequence's first block."""
        return self._digest(b"root" + self._fingerprint + scope.to_bytes())

    def child(self, parent: BlockKey, tokens: npt.NDArray[np.integer], extra: bytes = b"") -> BlockKey:
        """The key of a block of `tokens` (one whole block) after `parent`.

        `extra` names what the tokens alone do not: content digests of images or audio placed in the block.
        """
        return self._digest(parent + extra + tokens.astype("<i8", copy=False).tobytes())

    def chain(self, parent: BlockKey, tokens: npt.NDArray[np.integer], block_size: int) -> Sequence[BlockKey]:
        """Keys of every whole block of `tokens` (length a multiple of `block_size`) after `parent`."""
        data = tokens.astype("<i8").tobytes()
        step = 8 * block_size
        keys: list[BlockKey] = []
        for start in range(0, len(data), step):
            parent = self._digest(parent + data[start : start + step])
            keys.append(parent)
        return keys

    def _digest(self, data: bytes) -> BlockKey:
        return BlockKey(hashlib.blake2b(data, digest_size=KEY_BYTES, key=self._secret).digest())
