"""API keys and the tenant each one speaks for, its `Scope.namespace`: tenants never share KV. And the admin key."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from fastapi import Request

from pagoda.engine.tenants import RESERVED, TenantSpec
from pagoda.errors import ConfigError
from pagoda.server.errors import HttpError
from pagoda.toml import parse_toml

ADMIN_HEADER = "x-admin-key"


class ApiKeys:
    """A set of keys, kept as digests only.

    Args:
        tenants: key -> tenant name; several keys may name one tenant.
        specs: what tenants get of the engine; those not named here get what all get.

    Attributes:
        specs: as above, for the engine.

    Raises:
        ConfigError: there is no key, or one is empty or not printable ASCII without spaces, or a spec has no key, or a
            tenant has a name that means something else.
    """

    def __init__(self, tenants: Mapping[str, str], specs: Mapping[str, TenantSpec] = MappingProxyType({})) -> None:
        if not tenants:
            raise ConfigError("no API key given")
        for key in tenants:
            if not (key and key.isascii() and key.isprintable() and " " not in key):
                raise ConfigError("an API key must be printable ASCII without spaces")
        if taken := RESERVED & set(tenants.values()):
            raise ConfigError(f"no tenant may be called {min(taken)!r}")
        if strangers := specs.keys() - set(tenants.values()):
            raise ConfigError(f"tenant {sorted(strangers)[0]!r} has no key")
        self.specs = specs
        self._tenants = [(_digest(key), tenant) for key, tenant in tenants.items()]

    @classmethod
    def single(cls, key: str) -> ApiKeys:
        """One key, a tenant of its own."""
        return cls({key: _own_tenant(key)})

    @classmethod
    def load(cls, path: Path) -> ApiKeys:
        """Read a key file.

        A `.toml` file has a `[keys]` table of `tenant = "key"` or `tenant = ["key", "key"]`, and may have a table
        `[tenants.NAME]` of what a tenant gets, as TenantSpec reads it. Any other file has one
        key a line, optionally followed by its tenant; `#` starts a comment line. A key without a tenant is a tenant of
        its own.

        Raises:
            ConfigError: the file cannot be read or is not of that form.
        """
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read API keys from {path}: {error}") from None
        try:
            pairs, specs = _toml(text) if path.suffix == ".toml" else (_line_pairs(text), {})
            if len(dict(pairs)) != len(pairs):
                raise ConfigError("a key appears twice")
            return cls(dict(pairs), specs)
        except ConfigError as error:
            raise ConfigError(f"API keys in {path}: {error}") from None

    def namespace(self, authorization: str | None) -> str:
        """The tenant of an `Authorization: Bearer KEY` header.

        Takes the same time whichever key is given: all digests are compared.

        Raises:
            HttpError: 401, the header is absent, malformed or holds no known key.
        """
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise HttpError(401, "invalid_api_key", "Send your API key in the header: Authorization: Bearer KEY.")
        given = _digest(key.strip())
        found = None
        for digest, tenant in self._tenants:
            if hmac.compare_digest(digest, given):
                found = tenant
        if found is None:
            raise HttpError(401, "invalid_api_key", "The API key is not known to this server.")
        return found


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()


def key_name(authorization: str | None) -> str:
    """What the key of a header is called in reports: the start of its digest."""
    return _digest((authorization or "").partition(" ")[2].strip()).hex()[:12]


def _own_tenant(key: str) -> str:
    return "key-" + _digest(key).hex()[:16]


def _toml(text: str) -> tuple[list[tuple[str, str]], dict[str, TenantSpec]]:
    file = parse_toml(text)
    return _toml_pairs(file.get("keys")), _toml_specs(file.get("tenants", {}))


def _toml_specs(table: object) -> dict[str, TenantSpec]:
    if not isinstance(table, dict) or not all(isinstance(spec, dict) for spec in table.values()):
        raise ConfigError("tenants must be tables: [tenants.NAME]")
    specs = {}
    for tenant, spec in table.items():
        try:
            specs[tenant] = TenantSpec.from_table(spec)
        except ConfigError as error:
            raise ConfigError(f"tenant {tenant!r}: {error}") from None
    return specs


def _toml_pairs(table: object) -> list[tuple[str, str]]:
    if not isinstance(table, dict):
        raise ConfigError("there is no [keys] table")
    pairs: list[tuple[str, str]] = []
    for tenant, value in table.items():
        keys = value if isinstance(value, list) else [value]
        if not all(isinstance(key, str) for key in keys):
            raise ConfigError(f"{tenant} must be a string or a list of strings")
        pairs += [(key, tenant) for key in keys]
    return pairs


def _line_pairs(text: str) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) > 2:
            raise ConfigError(f"line {number} must be KEY or KEY TENANT")
        pairs.append((words[0], words[1] if len(words) == 2 else _own_tenant(words[0])))
    return pairs


def require_admin(admin_key: str) -> Callable[[Request], Awaitable[None]]:
    """A dependency that refuses whoever has not the admin key."""

    async def check(request: Request) -> None:
        if not is_admin(request, admin_key):
            message = "Send the server's admin key in the header X-Admin-Key."
            if request.headers.get(ADMIN_HEADER):
                message = "The key in the header X-Admin-Key is not the server's admin key."
            raise HttpError(403, "admin_key_required", message)

    return check


def is_admin(request: Request, admin_key: str | None) -> bool:
    """Whether a request has the admin key."""
    given = request.headers.get(ADMIN_HEADER, "")
    return admin_key is not None and hmac.compare_digest(given.encode(), admin_key.encode())
