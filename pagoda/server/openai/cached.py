"""`cached_content`: how a request goes on from a named cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pagoda.errors import InvalidRequest
from pagoda.server.openai.respond import Served


class Continuing(Protocol):
    """A request that may go on from a named cache."""

    @property
    def cached_content(self) -> str | None:
        """The cache's name."""

    @property
    def cache_salt(self) -> str | None:
        """The request's own salt."""


@dataclass(frozen=True)
class Start:
    """What stands before a request's own messages, the tools in force, and the salt they are cached under."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]]
    cache_salt: str


def start_of(served: Served, namespace: str, request: Continuing, tools: Sequence[Mapping[str, Any]] | None) -> Start:
    """What a chat begins with: nothing, or the content of the tenant's cache that it names.

    Raises:
        HttpError: there is no such cache.
        InvalidRequest: it holds a raw prompt, or the request has tools or a salt too.
    """
    if request.cached_content is None:
        return Start((), tools or (), request.cache_salt or "")
    cache = served.caches.get(namespace, request.cached_content)
    _check_salt(request)
    if tools:
        raise InvalidRequest("tools are part of the cached content: leave them out", param="tools")
    if cache.prompt is not None:
        raise InvalidRequest("this cache holds a prompt: use it with /v1/completions", param="cached_content")
    return Start(cache.messages, cache.tools, cache.cache_salt)


def prompt_start_of(served: Served, namespace: str, request: Continuing) -> tuple[str, str]:
    """The text that a completion's prompts go on from, and the salt it is cached under.

    Raises:
        HttpError: there is no such cache.
        InvalidRequest: it holds messages, or the request has a salt too.
    """
    if request.cached_content is None:
        return "", request.cache_salt or ""
    cache = served.caches.get(namespace, request.cached_content)
    _check_salt(request)
    if cache.prompt is None:
        raise InvalidRequest("this cache holds messages: use it with /v1/chat/completions", param="cached_content")
    return cache.prompt, cache.cache_salt


def _check_salt(request: Continuing) -> None:
    if request.cache_salt is not None:
        raise InvalidRequest("the cache has its own cache_salt: leave it out", param="cache_salt")
