"""Where two renderings of a conversation part."""

from __future__ import annotations

from collections.abc import Sequence


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading tokens are equal."""
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
