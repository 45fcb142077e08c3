"""NamedCaches: what each cache holds, by id. The promise itself is a lease of the same name in the engine's cache."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from pagoda.server.errors import HttpError

MAX_CACHES = 256
MAX_CHARS = 16 << 20


@dataclass(eq=False)
class NamedCache:
    """A cache of one tenant. `expires_at` is Unix time.

    Attributes:
        prompt, messages, tools: what it holds: a raw prompt, or how conversations begin.
        num_tokens: of the prefix; `held_tokens` of them, whole blocks, are sure to hit.
    """

    id: str
    namespace: str
    model: str
    display_name: str | None
    cache_salt: str
    prompt: str | None
    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...]
    num_tokens: int
    expires_at: float
    held_tokens: int = 0
    created_at: float = field(default_factory=time.time)

    @property
    def num_chars(self) -> int:
        """How much memory its content takes, roughly."""
        return len(self.prompt or "") + len(str(self.messages)) + len(str(self.tools))


def new_cache_id() -> str:
    """A name that nobody can guess."""
    return f"cache-{secrets.token_hex(16)}"


class NamedCaches:
    """Caches by tenant and id, at most 256 and 16 Mi characters of each tenant. Safe to use from several threads."""

    def __init__(self) -> None:
        self._shelves: dict[str, dict[str, NamedCache]] = {}
        self._lock = threading.Lock()

    def get(self, namespace: str, cache_id: str) -> NamedCache:
        """A tenant's cache.

        Raises:
            HttpError: 404, there is none of this id, it is another tenant's, or its time is over.
        """
        with self._lock:
            cache = self._live(namespace).get(cache_id)
        if cache is None:
            message = f"You have no cache {cache_id[:200]!r} here: it has expired, was deleted, or never was."
            raise HttpError(404, "cached_content_not_found", message, param="cached_content")
        return cache

    def all_of(self, namespace: str) -> list[NamedCache]:
        """A tenant's caches, the oldest first."""
        with self._lock:
            return list(self._live(namespace).values())

    def check_room(self, cache: NamedCache) -> None:
        """Whether a tenant may have this cache too.

        Raises:
            HttpError: 409, it has too many, or too large ones.
        """
        with self._lock:
            others = self._live(cache.namespace).values()
            num_chars = cache.num_chars + sum(other.num_chars for other in others)
            if len(others) >= MAX_CACHES or num_chars > MAX_CHARS:
                message = f"You may have {MAX_CACHES} caches of {MAX_CHARS} characters in all: delete some."
                raise HttpError(409, "too_many_caches", message)

    def put(self, cache: NamedCache) -> None:
        """Keep a cache."""
        with self._lock:
            self._shelves.setdefault(cache.namespace, {})[cache.id] = cache

    def drop(self, namespace: str, cache_id: str) -> None:
        """Forget a cache, if it is there."""
        with self._lock:
            self._shelves.get(namespace, {}).pop(cache_id, None)

    def keep_only(self, ids: Collection[str]) -> None:
        """Forget the caches of all tenants that are not among `ids`."""
        with self._lock:
            kept = {
                tenant: {name: cache for name, cache in shelf.items() if name in ids}
                for tenant, shelf in self._shelves.items()
            }
            self._shelves = {tenant: shelf for tenant, shelf in kept.items() if shelf}

    def _live(self, namespace: str) -> dict[str, NamedCache]:
        """A tenant's caches without those whose time is over."""
        shelf = self._shelves.get(namespace, {})
        now = time.time()
        for name in [name for name, cache in shelf.items() if cache.expires_at <= now]:
            del shelf[name]
        return shelf
