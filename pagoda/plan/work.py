"""Work: how long a model's prefill and decode take on hardware, as the larger of arithmetic and memory traffic.

    prefill of n tokens after s   2 x parameters x (n - s)  +  2 x attention_dim x sum of what each token looks at
    a decode step of b requests   the same for b tokens; and it reads the weights once and every request's KV

Peaks are never reached: `compute_share` and `bandwidth_share` say how much of them is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pagoda.errors import ConfigError
from pagoda.plan.footprint import Footprint
from pagoda.plan.hardware import Hardware
from pagoda.plan.shape import ModelShape

# Bytes of a parameter. The four-bit ones carry a scale per 32 (mxfp4) or per 64 to 128 values (int4).
WEIGHT_FORMATS: Mapping[str, float] = {"fp32": 4, "bf16": 2, "fp8": 1, "int8": 1, "int4": 0.5625, "mxfp4": 0.53125}


def prefill_ops(shape: ModelShape, num_tokens: int, start: int = 0) -> float:
    """Operations to compute the KV of tokens `start` up to `num_tokens`."""
    linear = 2.0 * shape.parameters.active * (num_tokens - start)
    seen = sum(
        shape.windows.count(window) * (_looked_at(num_tokens, window) - _looked_at(start, window))
        for window in set(shape.windows)
    )
    return linear + 2.0 * shape.attention_dim * seen


def _looked_at(num_tokens: int, window: int | None) -> int:
    """Pairs of a token and one that it attends to, itself included, over the first `num_tokens`."""
    full = min(num_tokens, window or num_tokens)
    return full * (full + 1) // 2 + (num_tokens - full) * full


@dataclass(frozen=True, slots=True)
class Machine:
    """A model on hardware.

    Attributes:
        weight_bytes: bytes of a parameter.
        compute_share, bandwidth_share: of the peaks, what is reached.
    """

    shape: ModelShape
    hardware: Hardware
    weight_bytes: float
    compute_share: float = 0.5
    bandwidth_share: float = 0.7

    def __post_init__(self) -> None:
        if not 0 < self.compute_share <= 1 or not 0 < self.bandwidth_share <= 1:
            raise ConfigError("what is reached of a peak is a share above 0 and at most 1")

    @property
    def flops(self) -> float:
        """Operations/s reached by all devices."""
        return self.hardware.flops * self.hardware.count * self.compute_share

    @property
    def bandwidth(self) -> float:
        """Bytes/s read by all devices."""
        return self.hardware.bandwidth * self.hardware.count * self.bandwidth_share

    @property
    def price_per_s(self) -> float:
        """Of all devices."""
        return self.hardware.price * self.hardware.count / 3600

    def prefill_s(self, num_tokens: int, start: int = 0) -> float:
        """Seconds to compute tokens `start` up to `num_tokens`; at least one pass over the weights."""
        if num_tokens <= start:
            return 0.0
        read = self.shape.parameters.read_by(num_tokens - start) * self.weight_bytes
        return max(prefill_ops(self.shape, num_tokens, start) / self.flops, read / self.bandwidth)

    def decode_s(self, num_requests: int, context: int, footprint: Footprint) -> float:
        """Seconds of a step in which so many requests of `context` tokens get their next token."""
        parameters = self.shape.parameters
        read = parameters.read_by(num_requests) * self.weight_bytes + num_requests * footprint.read_bytes(context)
        attended = sum(min(context, window or context) for window in self.shape.windows)
        each = 2.0 * (parameters.active + parameters.output) + 2.0 * self.shape.attention_dim * attended
        return max(read / self.bandwidth, num_requests * each / self.flops)
