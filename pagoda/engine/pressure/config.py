"""PressureConfig: when each level of the ladder is gone to, and what it does. Every value can come from a TOML file.

levels = [1, 2, 4, 5]              # 3 is passed over
batch_share = 0.5
memory_limit = "6GiB"

[thresholds]
pool = [0.8, 0.85, 0.9, 0.95, inf]

[classes.batch]
max_wait_s = 3600
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pagoda.engine.pressure.ladder import LadderConfig, Thresholds
from pagoda.engine.tenants import ServiceClass
from pagoda.errors import ConfigError
from pagoda.kinds import is_integer, is_number
from pagoda.kv.sizes import parse_size
from pagoda.toml import parse_toml


@dataclass(frozen=True, slots=True)
class ClassLimits:
    """What a service class bears.

    Attributes:
        max_wait_s: how long a request should wait for its first token at most. The ladder measures waiting against it,
            and while admissions are held, a request that would wait longer is refused.
        max_waiting: most samples in the queue while admissions are held.

    Raises:
        ConfigError: either is not positive.
    """

    max_wait_s: float
    max_waiting: int

    def __post_init__(self) -> None:
        if not 0 < self.max_wait_s < math.inf or self.max_waiting < 1:
            raise ConfigError(
                f"a class needs a max_wait_s above 0 and a max_waiting of at least 1, got {self.max_wait_s} and "
                f"{self.max_waiting}"
            )


_CLASSES = MappingProxyType(
    {
        ServiceClass.INTERACTIVE: ClassLimits(max_wait_s=5.0, max_waiting=256),
        ServiceClass.STANDARD: ClassLimits(max_wait_s=30.0, max_waiting=256),
        ServiceClass.BATCH: ClassLimits(max_wait_s=600.0, max_waiting=1024),
    }
)


@dataclass(frozen=True, slots=True)
class PressureConfig:
    """How an engine meets pressure.

    Attributes:
        ladder: when which level is gone to.
        window_s: over which rates are taken.
        batch_share: level 1: of `max_num_seqs`, how many samples may run before another is admitted.
        prefill_share: level 1: of `token_budget`, how many prompt tokens a step may compute.
        free_share: level 2: of the pool, how much is kept free by evicting what nobody holds.
        longest_share: of the pool, how much a request may need: level 3 shrinks those that allow it to about that,
            level 4 refuses longer ones.
        classes: level 4: what is refused, by class.
        max_queued_tokens: most prompt tokens in the queue, at any level: they are memory.
        memory_limit: most bytes of resident memory; None takes the limit of the process's cgroup, if it has one.

    Raises:
        ConfigError: a value is out of range.
    """

    ladder: LadderConfig = field(default_factory=LadderConfig)
    window_s: float = 3.0
    batch_share: float = 0.75
    prefill_share: float = 0.5
    free_share: float = 0.05
    longest_share: float = 0.25
    classes: Mapping[ServiceClass, ClassLimits] = field(default_factory=lambda: _CLASSES)
    max_queued_tokens: float = 4_000_000
    memory_limit: int | None = None

    def __post_init__(self) -> None:
        for name in ("batch_share", "prefill_share", "longest_share"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"{name} must be above 0 and at most 1, got {getattr(self, name)}")
        if not 0 <= self.free_share < 1:
            raise ConfigError(f"free_share must be at least 0 and below 1, got {self.free_share}")
        for name in ("window_s", "max_queued_tokens"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)}")
        if self.memory_limit is not None and self.memory_limit < 1:
            raise ConfigError(f"memory_limit must be at least a byte, got {self.memory_limit}")

    @classmethod
    def off(cls) -> PressureConfig:
        """No level is ever gone to, and nothing is refused for want of room: who asks waits."""
        return cls(LadderConfig(levels=frozenset()), max_queued_tokens=math.inf)

    @classmethod
    def load(cls, path: Path) -> PressureConfig:
        """Read a TOML file, as the head of this module shows it.

        Raises:
            ConfigError: it cannot be read, or a name or value in it is wrong.
        """
        try:
            return cls.from_table(parse_toml(path.read_text(encoding="utf-8")))
        except (OSError, UnicodeDecodeError, ConfigError) as error:
            raise ConfigError(f"the pressure ladder in {path}: {error}") from None

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> PressureConfig:
        """The defaults, with what a table says otherwise.

        Raises:
            ConfigError: as `load`.
        """
        own = {each.name for each in fields(cls)} - {"ladder", "classes"}
        ladder = {each.name for each in fields(LadderConfig)}
        _check_names(table, own | ladder | {"classes"})
        steps: dict[str, Any] = {
            name: _number(name, table[name]) for name in ("leave", "rise_s", "fall_s") & table.keys()
        }
        if "levels" in table:
            steps["levels"] = frozenset(_numbers("levels", table["levels"]))
        if "thresholds" in table:
            steps["thresholds"] = _thresholds(table["thresholds"])
        rest: dict[str, Any] = {name: _number(name, table[name]) for name in (own - {"memory_limit"}) & table.keys()}
        if "memory_limit" in table:
            rest["memory_limit"] = _size("memory_limit", table["memory_limit"])
        return cls(LadderConfig(**steps), classes=_classes(table.get("classes", {})), **rest)


def _thresholds(table: Any) -> Thresholds:
    _check_names(table, {each.name for each in fields(Thresholds)})
    return Thresholds(**{name: tuple(_numbers(name, values)) for name, values in table.items()})


def _classes(table: Any) -> Mapping[ServiceClass, ClassLimits]:
    _check_names(table, set(ServiceClass))
    classes = dict(_CLASSES)
    for name, limits in table.items():
        _check_names(limits, {each.name for each in fields(ClassLimits)})
        defaults = classes[ServiceClass(name)]
        classes[ServiceClass(name)] = ClassLimits(
            _number("max_wait_s", limits.get("max_wait_s", defaults.max_wait_s)),
            int(_number("max_waiting", limits.get("max_waiting", defaults.max_waiting))),
        )
    return classes


def _check_names(table: Any, known: set[str]) -> None:
    if not isinstance(table, Mapping):
        raise ConfigError(f"there should be a table with {', '.join(sorted(known))}, not {table!r}")
    if unknown := table.keys() - known:
        raise ConfigError(f"{sorted(unknown)[0]} is not known; there are {', '.join(sorted(known))}")


def _number(name: str, value: Any) -> float:
    if not is_number(value):
        raise ConfigError(f"{name} must be a number, got {value!r}")
    return value


def _size(name: str, value: Any) -> int:
    if not isinstance(value, str) and not is_integer(value):
        raise ConfigError(f"{name} must be bytes, or such as '2GiB', got {value!r}")
    return parse_size(value)


def _numbers(name: str, values: Any) -> list[float]:
    if not isinstance(values, list):
        raise ConfigError(f"{name} must be a list of numbers, got {values!r}")
    return [_number(f"{name}[{index}]", value) for index, value in enumerate(values)]
