"""NamedCaches: what each cache holds, by id. The promise itself is a lease of the same name in the engine's cache."""

from __future__ import annotations

import asyncio
import json
import secrets
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pagoda.server.errors import HttpError
from pagoda.server.state_file import StateFile, not_saved

MAX_CACHES = 256
MAX_CHARS = 16 << 20


@dataclass(eq=False)
class NamedCache:
    """A cache of one tenant. `expires_at` is Unix time.

    Attributes:
        prompt, messages, tools: what it holds: a raw prompt, or how conversations begin.
        num_tokens: of the prefix; `held_tokens` of them, whole blocks, are sure to hit.
        is_held: false from a restart until its prefix is leased again.
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
    is_held: bool = True

    @cached_property
    def num_chars(self) -> int:
        """How much memory its content takes, roughly."""
        return len(self.prompt or "") + len(str(self.messages)) + len(str(self.tools))


def new_cache_id() -> str:
    """A name that nobody can guess."""
    return f"cache-{secrets.token_hex(16)}"


class NamedCaches:
    """Caches by tenant and id, at most 256 and 16 Mi characters of each tenant. Safe to use from several threads.

    Args:
        path: where they survive a restart, content and all; None keeps them for the life of the process.

    Raises:
        ConfigError: there is a file that holds something else.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._shelves: dict[str, dict[str, NamedCache]] = {}
        self._lock = threading.Lock()
        self._saving = threading.Lock()  # of two who save, the later writes the later state
        self._file = None if path is None else StateFile(path)
        if self._file is not None:
            try:
                for fields in self._file.load() or ():
                    self._put(_restored(fields))
            except (ValueError, KeyError, TypeError) as error:
                raise self._file.fault(error) from None

    def save(self) -> None:
        """Write the file, if there is one. Slow: call it from a thread of its own.

        Raises:
            OSError: it cannot be written.
        """
        if self._file is None:
            return
        with self._saving:
            with self._lock:
                caches = [cache for tenant in list(self._shelves) for cache in self._live(tenant).values()]
                text = json.dumps([asdict(cache) for cache in caches])
            self._file.save(text)

    async def save_for_client(self, outcome: str) -> None:
        """Write the file for a client's change.

        Raises:
            HttpError: 503, it cannot be written, and `outcome` is what came of the change.
        """
        try:
            await asyncio.to_thread(self.save)
        except OSError as error:
            raise not_saved(error, outcome) from None

    def unheld(self) -> list[NamedCache]:
        """Caches of an earlier run whose prefixes are not leased again yet."""
        with self._lock:
            return [cache for tenant in self._shelves for cache in self._live(tenant).values() if not cache.is_held]

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
            self._check_room(cache)

    def _check_room(self, cache: NamedCache) -> None:
        others = self._live(cache.namespace).values()
        num_chars = cache.num_chars + sum(other.num_chars for other in others)
        if len(others) >= MAX_CACHES or num_chars > MAX_CHARS:
            message = f"You may have {MAX_CACHES} caches of {MAX_CHARS} characters in all: delete some."
            raise HttpError(409, "too_many_caches", message)

    def add(self, cache: NamedCache) -> None:
        """Keep a new cache; raises as `check_room`, as others may have come since that was asked."""
        with self._lock:
            self._check_room(cache)
            self._put(cache)

    def _put(self, cache: NamedCache) -> None:
        self._shelves.setdefault(cache.namespace, {})[cache.id] = cache

    def drop(self, namespace: str, cache_id: str) -> None:
        """Forget a cache, if it is there."""
        with self._lock:
            self._shelves.get(namespace, {}).pop(cache_id, None)

    def keep_only(self, ids: Collection[str]) -> None:
        """Forget the caches of all tenants that are not among `ids`, nor still to be leased again."""
        with self._lock:
            kept = {
                tenant: {name: cache for name, cache in shelf.items() if name in ids or not cache.is_held}
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


def _restored(fields: Mapping[str, Any]) -> NamedCache:
    """A cache as `save` wrote it; raises ValueError, KeyError or TypeError if it is none."""
    kinds = {"id": str, "namespace": str, "model": str, "cache_salt": str, "num_tokens": int, "expires_at": float}
    if wrong := [name for name, kind in kinds.items() if not isinstance(fields[name], kind)]:
        raise ValueError(f"{', '.join(wrong)}: of another type")
    content = {name: tuple(fields[name]) for name in ("messages", "tools")}
    return NamedCache(**{**fields, **content, "held_tokens": 0, "is_held": False})
