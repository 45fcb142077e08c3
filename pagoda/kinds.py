"""Kinds of values that callers give: Python takes true for 1, and 2.0 for a place in a list until it is used as one."""

from __future__ import annotations

from numbers import Integral, Real
from typing import TypeGuard

from pagoda.errors import InvalidRequest


def is_integer(value: object) -> TypeGuard[int]:
    """Whether it is a whole number, Python's or NumPy's, and no bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Whether it is a number, Python's or NumPy's, and no bool; it may be infinite or NaN."""
    return isinstance(value, Real) and not isinstance(value, bool)


def require(ok: bool, message: str, *, param: str) -> None:
    """Refuse what a caller gave for `param`, unless `ok`.

    Raises:
        InvalidRequest: with the message.
    """
    if not ok:
        raise InvalidRequest(message, param=param)
