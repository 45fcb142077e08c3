"""A tier in one line, as the command line and configuration files give it.

    dram:8GiB                           host memory
    shm:NAME:4GiB                       memory shared by the processes of this machine; NAME may be a file's path
    disk:/var/cache/pagoda:100GiB       a local disk; one process
    s3://BUCKET/PREFIX  gs://  az://  file:///FOLDER          an object store, or a folder as one; many processes
    redis://HOST:PORT/DB  rediss://  unix://SOCKET            Redis or Valkey

Any of them may end in `?write=through` (each full block at once) or `?write=back` (what the device evicts), and in
`?codec=NAME`: how blocks are stored there (`split`, `int8`, ...; see docs/formats.md), and in `?ttl=7d`: how long they
are kept at most (`s`, `m`, `h`, `d`). They are joined by `&`.
Sizes take B, KB, MB, GB, TB (powers of 1000), KiB, MiB, GiB, TiB and K, M, G, T (of 1024).
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType

from pagoda.errors import ConfigError
from pagoda.kv.sizes import parse_duration, parse_size
from pagoda.kv.tiers.accounts import Shares
from pagoda.kv.tiers.base import Tier

_OBJECT_SCHEMES = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "file")
_REDIS_SCHEMES = ("redis", "rediss", "unix")
_OPTION = re.compile(r"(.+)[?&](write|codec|ttl)=([^?&]*)")
_REQUEST_TIMEOUT = timedelta(seconds=10)
_MAX_RETRIES = 2


@dataclass(frozen=True, slots=True)
class TierSpec:
    """One tier to open.

    Attributes:
        kind: dram, shm, disk, object or redis.
        location: a folder, a name or an address; empty for dram.
        capacity_bytes: its budget; None where the service behind it has its own.
        write: when it gets a block, as the hierarchy calls it; empty for what suits its kind.
        codec: how blocks are stored there; empty for as they are.
        ttl_s: how long a record lasts there at most; None: as its kind has it.
    """

    kind: str
    location: str
    capacity_bytes: int | None
    write: str = ""
    codec: str = ""
    ttl_s: float | None = None


def parse_tier(text: str) -> TierSpec:
    """Read a one-line description of a tier. Raises ConfigError that says what is wrong."""
    place, options = text, dict[str, str]()
    while found := _OPTION.fullmatch(place):  # what else an address asks for is its service's
        place, name, value = found.groups()
        if name in options or not value:
            raise ConfigError(f"the tier {text!r} does not say what {name} is, or says it twice")
        options[name] = value
    try:
        ttl_s = parse_duration(options["ttl"]) if "ttl" in options else None
    except ConfigError as error:
        raise ConfigError(f"the tier {text!r} has a wrong ttl: {error}") from None
    return replace(_parse_place(place), write=options.get("write", ""), codec=options.get("codec", ""), ttl_s=ttl_s)


def _parse_place(text: str) -> TierSpec:
    scheme, separator, rest = text.partition("://")
    if separator:
        if scheme in _OBJECT_SCHEMES and rest.strip("/"):
            return TierSpec("object", text, None)
        if scheme in _REDIS_SCHEMES and rest:
            return TierSpec("redis", text, None)
        raise ConfigError(f"the tier {text!r} has no bucket, folder or host, or a scheme that is not known here")
    kind, *parts = text.split(":")
    match kind, parts:
        case "dram", [size]:
            return TierSpec("dram", "", _size(text, size))
        case "shm" | "disk", [_, *_, size] if ":".join(parts[:-1]):
            return TierSpec(kind, ":".join(parts[:-1]), _size(text, size))
        case "dram", _:
            raise ConfigError(f"the tier {text!r} is not of the form dram:SIZE")
        case "shm", _:
            raise ConfigError(f"the tier {text!r} is not of the form shm:NAME:SIZE")
        case "disk", _:
            raise ConfigError(f"the tier {text!r} is not of the form disk:FOLDER:SIZE")
    raise ConfigError(f"the tier {text!r} is of no kind known here: dram, shm, disk, s3, gs, az, file, redis")


def _size(text: str, size: str) -> int:
    try:
        return parse_size(size)
    except ConfigError as error:
        raise ConfigError(f"the tier {text!r} has a wrong size: {error}") from None


def open_tier(spec: TierSpec, *, key: bytes | None = None, shares: Shares = MappingProxyType({})) -> Tier:
    """Open the tier that `spec` describes, its records sealed if there is a `key`. The codec is the caller's to add.

    `shares` are of a tier that evicts by itself: in Redis and object stores the service decides.

    Raises ConfigError for a setting that cannot work or an extra that is not installed, TierUnavailable if the tier
    does not answer.
    """
    tier = _open(spec, shares)
    tier.ttl_s = spec.ttl_s or tier.ttl_s
    if key is None:
        return tier
    try:
        from pagoda.kv.tiers.encrypted import EncryptedTier
    except ImportError as error:
        tier.close()
        raise _missing("encryption", "cryptography") from error
    return EncryptedTier(tier, key)


def load_key(source: str) -> bytes:
    """The key in "env:NAME" or "file:PATH": 16, 24 or 32 bytes in hexadecimal. Raises ConfigError."""
    kind, _, where = source.partition(":")
    try:
        text = {"env": lambda: os.environ[where], "file": lambda: Path(where).read_text()}[kind]()
    except (KeyError, OSError) as error:
        raise ConfigError(f"no encryption key at {source!r}; give env:NAME or file:PATH") from error
    try:
        key = bytes.fromhex(text.strip())
    except ValueError as error:
        raise ConfigError(f"the encryption key at {source!r} is not hexadecimal") from error
    if len(key) not in (16, 24, 32):
        raise ConfigError(f"the encryption key at {source!r} has {len(key)} bytes, not 16, 24 or 32")
    return key


def _open(spec: TierSpec, shares: Shares) -> Tier:
    match spec:
        case TierSpec("dram", _, int(capacity)):
            from pagoda.kv.tiers.dram import DramTier

            return DramTier(capacity, shares=shares)
        case TierSpec("disk", folder, int(capacity)):
            from pagoda.kv.tiers.disk import DiskTier

            return DiskTier(Path(folder), capacity, shares=shares)
        case TierSpec("shm", name, int(capacity)):
            from pagoda.kv.tiers.shared import SharedTier

            path = Path(name) if "/" in name else Path(f"/dev/shm/pagoda-{name}")
            return SharedTier(path, capacity, shares=shares)
        case TierSpec("object", url, _):
            return _open_object(url)
        case TierSpec("redis", url, _):
            try:
                from pagoda.kv.tiers.redis import RedisTier
            except ImportError as error:
                raise _missing("redis", "redis") from error
            return RedisTier(url)
    raise ConfigError(f"no tier can be opened from {spec}")


def _open_object(url: str) -> Tier:
    """Split an address into the store (a bucket or a folder) and the prefix in it."""
    try:
        from obstore.exceptions import BaseError
        from obstore.store import LocalStore, from_url

        from pagoda.kv.tiers.object import ObjectTier
    except ImportError as error:
        raise _missing("object", "obstore") from error
    scheme, _, rest = url.partition("://")
    if scheme == "file":
        return ObjectTier(LocalStore(rest, mkdir=True))
    bucket, _, prefix = rest.partition("/")
    try:
        store = from_url(
            f"{scheme}://{bucket}",
            client_options={
                "timeout": _REQUEST_TIMEOUT,
                "allow_http": os.environ.get("AWS_ENDPOINT_URL", "").startswith("http:"),  # an endpoint given so
            },
            retry_config={"max_retries": _MAX_RETRIES, "retry_timeout": _REQUEST_TIMEOUT},
        )
    except (BaseError, ValueError) as error:
        raise ConfigError(f"no object store can be opened at {url!r}: {error}") from error
    return ObjectTier(store, prefix)


def _missing(extra: str, package: str) -> ConfigError:
    return ConfigError(f"this tier needs the package {package}: pip install 'pagoda-kv[{extra}]'")
