"""Settings: what the settings of all policies have in common."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

from pagoda.errors import InvalidRequest
from pagoda.sparse.base import Budget


@dataclass(frozen=True, slots=True)
class Settings:
    """A policy's settings.

    Attributes:
        budget: entries that stay in each layer: tokens, a size, or `fit`, until the engine says how many that is.
    """

    name: ClassVar[str]
    fractions: ClassVar[frozenset[str]] = frozenset()
    """Settings that need not be whole numbers."""
    budget: Budget = "fit"

    def check(self, ok: bool, setting: str, message: str) -> None:
        """Refuse a setting."""
        if not ok:
            got = shown(getattr(self, setting))
            raise InvalidRequest(f"{self.name}: {setting} {message}, got {got}", param="kv_policy")

    @classmethod
    def from_fields(cls, given: Mapping[str, Any]) -> Self:
        """See SparsePolicy."""
        known = {each.name: each.default for each in fields(cls)}
        for name, value in given.items():
            if name not in known:
                message = f"{cls.name} has no setting {str(name)[:64]!r}; it has {', '.join(known)}"
                raise InvalidRequest(message, param="kv_policy")
            if not (value is None and known[name] is None):
                cls.check_type(name, value)
        return cls(**given)

    @classmethod
    def check_type(cls, setting: str, value: Any) -> None:
        """Refuse a value of a type that the setting cannot have: JSON's true is no number."""
        types: tuple[type, ...] = (int,)
        what = "a whole number"
        if setting == "budget":
            types, what = (int, str), "a whole number or a size"
        elif setting in cls.fractions:
            types, what = (int, float), "a number"
        if type(value) not in types:
            raise InvalidRequest(f"{cls.name}: {setting} must be {what}, got {shown(value)}", param="kv_policy")

    def with_budget(self, num_tokens: int) -> Self:
        """See SparsePolicy."""
        return replace(self, budget=num_tokens)

    @property
    def num_tokens(self) -> int:
        """The budget, which must be in tokens by now."""
        assert isinstance(self.budget, int), "the engine turns budgets into tokens before it uses them"
        return self.budget


def shown(value: object) -> str:
    """A value as JSON has it, since that is how most callers wrote it; at most 64 characters."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    return text[:64]
