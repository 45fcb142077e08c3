"""What a request's kv_policy may say, and a server's: for those who read either."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagoda.errors import ConfigError, InvalidRequest
from pagoda.sparse.base import SparsePolicy
from pagoda.sparse.spec import Full, UnderPressure
from pagoda.sparse.spec import KVPolicy as KVPolicy
from pagoda.sparse.spec import parse_kv_policy as parse_kv_policy


def as_policy(given: object) -> KVPolicy:
    """A policy as it is, or the one that text or a mapping names; raises InvalidRequest."""
    if isinstance(given, str | Mapping):
        return parse_kv_policy(given)
    if not isinstance(given, SparsePolicy | UnderPressure | Full):
        raise InvalidRequest(
            f"kv_policy must be a policy, or text or a mapping that names one, got {given!r}", param="kv_policy"
        )
    return given


def default_policy(given: str | Mapping[str, Any] | None) -> SparsePolicy | UnderPressure | None:
    """The kv_policy of requests that name none; raises ConfigError."""
    try:
        policy = None if given is None else parse_kv_policy(given)
    except InvalidRequest as error:
        raise ConfigError(str(error)) from None
    return None if isinstance(policy, Full) else policy
