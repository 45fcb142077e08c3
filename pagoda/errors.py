"""Every exception Pagoda raises on purpose.

    PagodaError
    ├── ConfigError            a setting is wrong; raised before anything starts
    ├── RequestError           the caller's fault; the server answers 4xx
    │   ├── InvalidRequest     a parameter is missing, of the wrong type or out of range
    │   ├── ContextTooLong     prompt + max_tokens do not fit the model or the pool
    │   ├── ModelNotFound      no such model is served or can be loaded
    │   └── RequestAborted     the client left, or the engine is shutting down
    ├── MemoryPressure         not now: the same call may succeed later
    │   ├── OutOfBlocks        the pool cannot supply the blocks asked for
    │   ├── LeaseRefused       a promise to keep a prefix cannot be given; the message says why
    │   │   └── PoolIsLeased   the pool has no room for it under its bound on leases; a tier may have
    │   ├── NoReplica          no replica of the cluster takes requests
    │   └── Overloaded         the request is refused for what already waits; it says when to come back
    ├── ModelError
    │   ├── UnsupportedModel   an architecture or a variant that no decoder here knows
    │   └── WeightsError       a weights file is missing, truncated or of the wrong shape
    ├── TierError              a memory tier failed; callers treat it as a miss
    │   ├── TierUnavailable    it is down, hung or its circuit breaker is open
    │   └── CorruptRecord      bytes that do not verify; never served
    ├── WireError              bytes from another process that are no message of ours
    ├── KernelError            wrong shapes, dtypes or strides for a kernel
    └── InvariantError         Pagoda's own bookkeeping is broken: a bug, always

The library raises these and plain `TypeError`s for misuse; nothing here is raised for control flow.
"""

from __future__ import annotations


class PagodaError(Exception):
    """Base class of every deliberate error."""


class ConfigError(PagodaError, ValueError):
    """A setting is wrong; nothing was started."""


class RequestError(PagodaError):
    """The request cannot be served as asked.

    `param` names the offending field of the request, where there is one.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidRequest(RequestError, ValueError):
    """A parameter is missing, of the wrong type, or out of range."""


class ContextTooLong(RequestError):
    """The prompt and the tokens asked for do not fit; the message has the numbers."""


class ModelNotFound(RequestError):
    """No such model is served or can be loaded."""


class RequestAborted(RequestError):
    """The request ended before its answer: the client left or the engine stops."""


class MemoryPressure(PagodaError):
    """There is no room now; nothing changed, and the same call may succeed later."""


class OutOfBlocks(MemoryPressure):
    """The pool cannot supply `needed` blocks; `available` of them are free or evictable."""

    def __init__(self, needed: int, available: int) -> None:
        super().__init__(f"{needed} KV blocks needed, {available} free or evictable")
        self.needed = needed
        self.available = available


class LeaseRefused(MemoryPressure):
    """A prefix cannot be promised to stay; the message says why."""


class PoolIsLeased(LeaseRefused):
    """The pool has no room for a lease under its bound on all of them."""


class NoReplica(MemoryPressure):
    """No replica of the cluster takes requests now."""


class Overloaded(MemoryPressure):
    """A request is refused for what already runs and waits, for a `reason` that programs can read.

    `retry_after_s` is when the same request may be taken.
    """

    def __init__(self, message: str, *, reason: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after_s = retry_after_s


class ModelError(PagodaError):
    """A model cannot be loaded or run."""


class UnsupportedModel(ModelError):
    """An architecture or a variant that no decoder here knows."""


class WeightsError(ModelError):
    """A weights file is missing, truncated, or of the wrong shape."""


class TierError(PagodaError):
    """A memory tier failed; callers treat it as a miss."""


class TierUnavailable(TierError):
    """The tier is down, hung, or taken out by its circuit breaker."""


class CorruptRecord(TierError):
    """Stored bytes that do not verify; they are dropped, never served."""


class WireError(PagodaError, ValueError):
    """Bytes from another process that are no message of ours; nothing of them was used."""


class KernelError(PagodaError, ValueError):
    """Wrong shapes, dtypes or strides for a kernel."""


class InvariantError(PagodaError, AssertionError):
    """Pagoda's own bookkeeping is broken: a bug, always."""
