"""Reading `kv_policy`: a request's object, `{"name": "h2o", "budget": 512}`, or a line of text, `h2o:budget=512`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagoda.errors import ConfigError, InvalidRequest
from pagoda.kv.sizes import parse_size
from pagoda.sparse.base import SparsePolicy
from pagoda.sparse.h2o import H2O
from pagoda.sparse.infinigen import InfiniGen
from pagoda.sparse.pyramid import Pyramid
from pagoda.sparse.quest import Quest
from pagoda.sparse.settings import shown
from pagoda.sparse.snapkv import SnapKV
from pagoda.sparse.streaming import Streaming

POLICIES: Mapping[str, type[SparsePolicy]] = {
    each.name: each for each in (Streaming, H2O, SnapKV, Pyramid, Quest, InfiniGen)
}
FIT = "fit"


@dataclass(frozen=True, slots=True)
class Full:
    """Not sparse, whatever the server's default is."""

    name: str = "none"


@dataclass(frozen=True, slots=True)
class UnderPressure:
    """Not sparse while the server has room; on level 3 of its pressure ladder, this policy's from then on.

    Raises:
        InvalidRequest: the policy chooses by what it has seen since the start, so it cannot begin later.
    """

    policy: SparsePolicy

    def __post_init__(self) -> None:
        if not begins_late(self.policy):
            message = f"under_pressure goes with streaming, which goes by positions alone; not with {self.policy.name}"
            raise InvalidRequest(message, param="kv_policy")


def begins_late(policy: SparsePolicy) -> bool:
    """Whether a policy can begin in the midst of a request: it chooses by positions, whatever was attended to."""
    return isinstance(policy, Streaming)


KVPolicy = SparsePolicy | UnderPressure | Full


def parse_kv_policy(given: str | Mapping[str, Any]) -> KVPolicy:
    """The policy that a request or an option names; `none` is full KV. With `under_pressure`, an UnderPressure.

    Raises:
        InvalidRequest: there is no such policy, or a setting is unknown, of the wrong type or out of range.
    """
    fields = _fields_of(given) if isinstance(given, str) else dict(given)
    known = ", ".join(("none", *POLICIES))
    if "name" not in fields:
        raise InvalidRequest(f"kv_policy needs a name, one of {known}", param="kv_policy")
    name = fields.pop("name")
    if name == "none":
        if fields:
            message = f"kv_policy none takes no settings, got {shown(next(iter(fields)))}"
            raise InvalidRequest(message, param="kv_policy")
        return Full()
    if not isinstance(name, str) or name not in POLICIES:
        raise InvalidRequest(f"there is no kv_policy {shown(name)}; it is one of {known}", param="kv_policy")
    budget = fields.get("budget")
    if isinstance(budget, str) and budget != FIT:
        try:
            parse_size(budget)
        except ConfigError as error:
            message = f"budget is a number of tokens, a size such as 64MiB, or fit: {error}"
            raise InvalidRequest(message, param="kv_policy") from None
    waits = fields.pop("under_pressure", False)
    if isinstance(given, str) and waits in ("true", "false"):
        waits = waits == "true"
    if not isinstance(waits, bool):
        raise InvalidRequest(f"under_pressure is true or false, got {shown(waits)}", param="kv_policy")
    policy = POLICIES[name].from_fields(fields)
    return UnderPressure(policy) if waits else policy


def _fields_of(text: str) -> dict[str, Any]:
    name, colon, rest = text.partition(":")
    fields: dict[str, Any] = {"name": name.strip()}
    for part in rest.split(",") if colon else ():
        setting, separator, value = (each.strip() for each in part.partition("="))
        if not separator:
            setting, value = "budget", setting  # h2o:512
        if not value:
            raise InvalidRequest(f"a setting is missing or empty in {shown(text)}", param="kv_policy")
        if setting in fields:
            raise InvalidRequest(f"{setting[:64]} is given twice in {shown(text)}", param="kv_policy")
        fields[setting] = _number_or_text(value)
    return fields


def _number_or_text(value: str) -> int | float | str:
    if re.fullmatch("[0-9]{1,11}", value):
        return int(value)
    return float(value) if re.fullmatch(r"[0-9]{1,11}\.[0-9]{1,11}", value) else value
