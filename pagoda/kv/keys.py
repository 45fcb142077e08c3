"""Scope and BlockKey: who may share a block, and its name outside the device.

    scope  = namespace (tenant) + cache_salt + adapter
    root   = H(fingerprint, scope)
    key[i] = H(key[i-1], tokens of block i, extra of block i)
    owner  = H(namespace): marks stored blocks, so that a tenant's can be counted and purged by who knows no tenants

The device tree compares tokens and hashes nothing; keys are made only for blocks that enter or are sought in
lower tiers and events. Keys are HMACs under a cluster secret, so a stored key tells nothing to who lacks the secret.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NewType

import numpy as np
import numpy.typing as npt

from pagoda.errors import ConfigError, InvariantError

BlockKey = NewType("BlockKey", bytes)
OwnerTag = NewType("OwnerTag", bytes)
KEY_BYTES = 32
OWNER_BYTES = 16
NO_OWNER = OwnerTag(bytes(OWNER_BYTES))
MAX_SECRET_BYTES = 64
NARROW, WIDE = "<i4", "<i8"


@dataclass(frozen=True, slots=True)
class Scope:
    """Requests share prefixes only within equal scopes.

    `namespace` is the tenant, from the API key and never from the client's word alone; `salt` is the client's
    `cache_salt`; `adapter` is the content hash of a LoRA adapter, which changes KV from token `adapter_from` on.
    `after` is the cache's own: the tokens before a part of a sequence that begins in another scope (see Lineages).
    """

    namespace: str = ""
    salt: str = ""
    adapter: str = ""
    adapter_from: int = 0
    after: bytes = field(default=b"", repr=False)

    @property
    def tokens_before(self) -> npt.NDArray[np.int64]:
        """`after` as tokens."""
        return np.frombuffer(self.after, dtype="<i8")

    def to_bytes(self) -> bytes:
        """An unambiguous encoding: each field with its length in front, the rarer ones only where they are set."""
        rare = (str(self.adapter_from).encode(), self.after) if self.adapter_from or self.after else ()
        names = (self.namespace.encode(), self.salt.encode(), self.adapter.encode())
        return b"".join(_with_length(part) for part in (*names, *rare))


class KeyChain:
    """Derives BlockKeys for one model fingerprint under one secret.

    Args:
        fingerprint: `KVLayout.fingerprint` of the model that computes the blocks.
        secret: at most 64 bytes; shared by the processes that share stored blocks.

    Raises:
        ConfigError: either has a wrong length.
    """

    def __init__(self, fingerprint: bytes, secret: bytes = b"") -> None:
        if len(fingerprint) != KEY_BYTES:
            raise ConfigError(f"a model fingerprint has {KEY_BYTES} bytes, got {len(fingerprint)}")
        if len(secret) > MAX_SECRET_BYTES:
            raise ConfigError(f"the cluster secret has at most {MAX_SECRET_BYTES} bytes, got {len(secret)}")
        self._fingerprint = fingerprint
        # Copying a state that has taken in the secret is faster than taking it in again for every key.
        self._root = hashlib.blake2b(digest_size=KEY_BYTES, key=secret, person=b"pagoda root")
        self._block = hashlib.blake2b(digest_size=KEY_BYTES, key=secret, person=b"pagoda block")
        self._owner = hashlib.blake2b(digest_size=OWNER_BYTES, key=secret, person=b"pagoda owner")

    def for_model(self, fingerprint: bytes) -> KeyChain:
        """Keys under the same secret, for another model."""
        other = copy.copy(self)
        other._fingerprint = fingerprint
        return other

    def owner(self, namespace: str) -> OwnerTag:
        """What marks stored blocks of a namespace, whatever the model: who lacks the secret cannot tell whose."""
        state = self._owner.copy()
        state.update(namespace.encode())
        return OwnerTag(state.digest())

    def root(self, scope: Scope) -> BlockKey:
        """The parent key of a sequence's first block."""
        state = self._root.copy()
        state.update(self._fingerprint + scope.to_bytes())
        return BlockKey(state.digest())

    def child(self, parent: BlockKey, tokens: npt.NDArray[np.integer], extra: bytes = b"") -> BlockKey:
        """The key of a block of `tokens` (one whole block) after `parent`.

        `extra` names what the tokens alone do not: content digests of images or audio placed in the block.
        """
        return self._key(parent, _header(extra, tokens.size) + tokens.astype(_width(tokens), copy=False).tobytes())

    def chain(self, parent: BlockKey, tokens: npt.NDArray[np.integer], block_size: int) -> Sequence[BlockKey]:
        """Keys of every block of `tokens` after `parent`: what repeated `child` gives, and faster.

        Raises:
            InvariantError: `tokens` does not end at a block boundary.
        """
        if tokens.size % block_size:
            raise InvariantError(f"{tokens.size} tokens are not whole blocks of {block_size}")
        keys: list[BlockKey] = []
        if _width(tokens) == WIDE:
            for block in tokens.reshape(-1, block_size):
                keys.append(parent := self.child(parent, block))
            return keys
        data, step, header = tokens.astype(NARROW).tobytes(), 4 * block_size, _header(b"", block_size)
        for start in range(0, len(data), step):
            keys.append(parent := self._key(parent, header + data[start : start + step]))
        return keys

    def _key(self, parent: BlockKey, content: bytes) -> BlockKey:
        state = self._block.copy()
        state.update(parent + content)
        return BlockKey(state.digest())


def _with_length(data: bytes) -> bytes:
    """The bytes with their length in front, so that what follows cannot be read as part of them."""
    return len(data).to_bytes(4, "big") + data


def _header(extra: bytes, num_tokens: int) -> bytes:
    return _with_length(extra) + num_tokens.to_bytes(4, "big")


def _width(tokens: npt.NDArray[np.integer]) -> str:
    """How tokens are encoded: in four bytes, or in eight if pseudo-tokens of images are among them."""
    return NARROW if tokens.dtype == np.int32 or (tokens == tokens.astype(NARROW)).all() else WIDE
