"""What a request may say in `kv_transfer_params`, under "pagoda".

{"pagoda": {"lease_s": 3600, "priority": 80, "store": true, "wait_s": 0.5, "max_restored_tokens": 4096}}
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pagoda.errors import InvalidRequest
from pagoda.kinds import is_number
from pagoda.kv.lease import TierUse

NAME = "pagoda"
_FIELDS = ("lease_s", "priority", "store", "wait_s", "max_restored_tokens")
_DEFAULT_PRIORITY = 35  # as TensorRT-LLM's, and Pagoda's own


@dataclass(frozen=True, slots=True)
class Params:
    """What a request asks for.

    Attributes:
        use: what it allows of the tiers.
        lease_s: how long tiers must keep its prompt from its end on; 0: no longer than they like.
        priority: 0 to 100; when the tiers' queues have not room for all blocks of a step, higher ones are written.
    """

    use: TierUse = field(default_factory=TierUse)
    lease_s: float = 0.0
    priority: int = _DEFAULT_PRIORITY


def read_params(given: Mapping[str, Any] | None) -> Params:
    """Check a request's own settings; those of other connectors are none of ours.

    Raises:
        InvalidRequest: an unknown field, or a value of the wrong type or range.
    """
    own = (given or {}).get(NAME)
    if own is None:
        return Params()
    if not isinstance(own, Mapping):
        raise InvalidRequest(f"kv_transfer_params.{NAME} is an object, not {own!r}")
    unknown = sorted(set(own) - set(_FIELDS))
    if unknown:
        raise InvalidRequest(f"kv_transfer_params.{NAME} knows {', '.join(_FIELDS)}, not {', '.join(unknown)}")
    store = own.get("store", True)
    if not isinstance(store, bool):
        raise InvalidRequest(f"store is true or false, not {store!r}")
    most = _number(own, "max_restored_tokens")
    lease_s = _number(own, "lease_s") or 0.0
    if math.isinf(lease_s):
        raise InvalidRequest("lease_s must end")
    priority = _number(own, "priority")
    if priority is not None and priority > 100:
        raise InvalidRequest(f"priority is at most 100, not {priority:g}")
    use = TierUse(None if most is None else int(most), _number(own, "wait_s"), store)
    return Params(use, lease_s, _DEFAULT_PRIORITY if priority is None else int(priority))


def _number(own: Mapping[str, Any], name: str) -> float | None:
    value = own.get(name)
    if value is None:
        return None
    if not is_number(value) or not value >= 0:
        raise InvalidRequest(f"{name} is a number of at least 0, not {value!r}")
    return float(value)
