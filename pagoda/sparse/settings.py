"""Settings: what the settings of all policies have in common."""

from __future__ import annotations

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
    budget: Budget = "fit"

    def check(self, ok: bool, setting: str, message: str) -> None:
        """Refuse a setting."""
        if not ok:
            raise InvalidRequest(f"{self.name}: {setting} {message}, got {getattr(self, setting)}", param="kv_policy")

    @classmethod
    def from_fields(cls, given: Mapping[str, Any]) -> Self:
        """See SparsePolicy."""
        known = [each.name for each in fields(cls)]
        for name, value in given.items():
            if name not in known:
                message = f"{cls.name} has no setting {str(name)[:64]!r}; it has {', '.join(known)}"
                raise InvalidRequest(message, param="kv_policy")
            cls.check_type(name, value)
        return cls(**given)

    @classmethod
    def check_type(cls, setting: str, value: Any) -> None:
        """Refuse a value of a type that the setting cannot have, where __post_init__ does not."""
        if setting == "budget" and type(value) is not int and not isinstance(value, str):
            message = f"{cls.name}: budget must be a whole number or a size, got {str(value)[:64]!r}"
            raise InvalidRequest(message, param="kv_policy")

    def with_budget(self, num_tokens: int) -> Self:
        """See SparsePolicy."""
        return replace(self, budget=num_tokens)

    @property
    def num_tokens(self) -> int:
        """The budget, which must be in tokens by now."""
        assert isinstance(self.budget, int), "the engine turns budgets into tokens before it uses them"
        return self.budget
