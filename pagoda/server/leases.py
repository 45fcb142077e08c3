"""How responses tell what became of the leases that a request asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pagoda.engine.outputs import LeaseOutcome


def lease_report(outcomes: Sequence[LeaseOutcome]) -> list[dict[str, Any]]:
    """One entry per lease: tokens asked for and kept, seconds, where they are held, and why not where none are."""
    return [
        {
            "requested_tokens": outcome.spec.num_tokens,
            "leased_tokens": outcome.num_tokens,
            "ttl_s": outcome.spec.ttl_s,
            "refused": outcome.refused,
            "held_in": outcome.held_in,
        }
        for outcome in outcomes
    ]
