"""Hardware: what a device can hold, read and compute, and what sits below it.

Figures are the vendors' for dense BF16; prices are round on-demand figures of 2025 and meant to be replaced.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from pagoda.errors import ConfigError
from pagoda.kv.sizes import parse_size

GB = 10**9


@dataclass(frozen=True, slots=True)
class Hardware:
    """`count` equal devices that hold one copy of a model between them.

    Attributes:
        memory: bytes of one device.
        bandwidth: bytes/s from that memory.
        flops: dense BF16 operations/s.
        host_link: bytes/s between host memory and one device.
        price: US$ per device and hour.
    """

    name: str
    memory: int
    bandwidth: float
    flops: float
    host_link: float
    price: float
    count: int = 1

    def __post_init__(self) -> None:
        if min(self.memory, self.bandwidth, self.flops, self.host_link, self.count) <= 0 or self.price < 0:
            raise ConfigError(f"hardware {self.name}: memory, bandwidth, operations, link and count must be positive")


def _device(name: str, memory_gib: float, bandwidth_gb: float, tflops: float, link_gb: float, price: float) -> Hardware:
    return Hardware(name, int(memory_gib * 2**30), bandwidth_gb * GB, tflops * 1e12, link_gb * GB, price)


_PCIE3, _PCIE4, _PCIE5 = 12.0, 25.0, 50.0  # what sixteen lanes carry in practice, GB/s

HARDWARE: Mapping[str, Hardware] = {
    device.name: device
    for device in (
        _device("b200", 180, 8000, 2250, _PCIE5, 6.0),
        _device("h200", 141, 4800, 989, _PCIE5, 3.5),
        _device("h100", 80, 3350, 989, _PCIE5, 3.0),
        _device("h100-pcie", 80, 2000, 756, _PCIE5, 2.5),
        _device("gh200", 96, 4000, 989, 450, 3.0),
        _device("a100-80gb", 80, 2039, 312, _PCIE4, 1.8),
        _device("a100-40gb", 40, 1555, 312, _PCIE4, 1.3),
        _device("l40s", 48, 864, 362, _PCIE4, 1.0),
        _device("a10", 24, 600, 125, _PCIE4, 0.6),
        _device("l4", 24, 300, 121, _PCIE4, 0.5),
        _device("t4", 16, 320, 65, _PCIE3, 0.35),
        _device("rtx-5090", 32, 1792, 210, _PCIE5, 0.7),
        _device("rtx-4090", 24, 1008, 165, _PCIE4, 0.4),
        _device("rtx-3090", 24, 936, 71, _PCIE4, 0.25),
        _device("mi300x", 192, 5300, 1307, _PCIE5, 3.0),
        _device("mi325x", 256, 6000, 1307, _PCIE5, 3.5),
        # One socket, eight channels of DDR5-4800, matrix tiles; its memory is the host's.
        _device("xeon-amx", 512, 300, 100, 300, 1.5),
    )
}


def find_hardware(name: str, count: int = 1) -> Hardware:
    """A device of the table, `count` of them.

    Raises:
        ConfigError: no device has that name.
    """
    found = HARDWARE.get(name.lower())
    if found is None:
        near = get_close_matches(name.lower(), HARDWARE, n=1)
        hint = f"is {near[0]} meant? There are" if near else "there are"
        raise ConfigError(f"no hardware is called {name!r}; {hint} {', '.join(HARDWARE)}; or give its figures")
    return Hardware(found.name, found.memory, found.bandwidth, found.flops, found.host_link, found.price, count)


@dataclass(frozen=True, slots=True)
class TierPlan:
    """A tier below the device: `capacity` in bytes, None without a limit of its own; `bandwidth` in bytes/s."""

    name: str
    capacity: int | None
    bandwidth: float
    latency_s: float


_TIERS: Mapping[str, tuple[float, float]] = {  # bandwidth in GB/s (0: the host link's) and latency in s
    "dram": (0, 20e-6),
    "disk": (6, 200e-6),
    "object": (1, 30e-3),
}


def parse_tier_plan(text: str, host_link: float) -> TierPlan:
    """A tier in one line: `dram:512GiB`, `disk:2TB`, `disk:2TB@3.5GB`, `object:@1GB`; after the @ its bytes/s.

    Raises:
        ConfigError: it is of no such form.
    """
    name, _, rest = text.partition(":")
    size, _, speed = rest.partition("@")
    if name not in _TIERS or (not size and name != "object"):
        raise ConfigError(f"the tier {text!r} is not of the form KIND:SIZE[@BANDWIDTH], KIND {', '.join(_TIERS)}")
    usual, latency_s = _TIERS[name]
    bandwidth = parse_size(speed.removesuffix("/s")) if speed else usual * GB or host_link
    return TierPlan(name, parse_size(size) if size else None, bandwidth, latency_s)
