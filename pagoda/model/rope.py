"""Rotary position parameters: which frequencies turn each pair of a head's dimensions.

    angle[position, i] = position * frequency[i]        cos and sin of it are multiplied by `attention_factor`

Every variant here fixes its frequencies once, whatever the sequence length, so a cached key stays right for ever.
Variants whose frequencies change with the length (dynamic NTK beyond the trained context, LongRoPE with two factor
lists) are refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pagoda.errors import UnsupportedModel


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Frequencies of one model; two models with equal `RopeSpec` rotate keys identically.

    `kind` is `default`, `linear`, `llama3`, `yarn` or `factors` (each frequency divided by its own constant). The
    fields of other kinds keep their defaults. `original_context` is the length the model was trained at before its
    context was stretched.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    frequency_factors: tuple[float, ...] = ()

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> RopeSpec:
        """Read `rope_parameters` (Transformers 5) or `rope_theta` with `rope_scaling` (before).

        Raises:
            UnsupportedModel: the variant's frequencies depend on the sequence length, or it is unknown.
        """
        scaling: dict[str, Any] = {
            "rope_theta": config.get("rope_theta", 10000.0),
            **(config.get("rope_scaling") or {}),
            **(config.get("rope_parameters") or {}),
        }
        theta = float(scaling["rope_theta"])
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if scaling.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
            raise UnsupportedModel(
                "rotary embeddings over a part of the head (partial_rotary_factor) are not supported"
            )
        max_context = config["max_position_embeddings"]
        # Dynamic NTK leaves the frequencies alone up to max_position_embeddings, and ModelSpec.max_context ends there.
        if kind in ("default", "dynamic"):
            return cls(theta)
        original = int(scaling.get("original_max_position_embeddings") or max_context)
        factor = float(scaling.get("factor") or max_context / original)
        if kind == "linear":
            return cls(theta, kind, factor)
        if kind == "llama3":
            low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
            return cls(theta, kind, factor, original, low_freq_factor=low, high_freq_factor=high)
        if kind == "yarn":
            return cls(
                theta,
                kind,
                factor,
                original,
                beta_fast=float(scaling.get("beta_fast") or 32.0),
                beta_slow=float(scaling.get("beta_slow") or 1.0),
                truncate=bool(scaling.get("truncate", True)),
                attention_factor=_yarn_attention_factor(scaling, factor),
            )
        if kind == "longrope" and scaling["long_factor"] == scaling["short_factor"]:
            attention_factor = scaling.get("attention_factor")
            if attention_factor is None:
                stretch = 1.0 + math.log(factor) / math.log(original) if factor > 1.0 else 1.0
                attention_factor = math.sqrt(stretch)
            factors = tuple(float(f) for f in scaling["short_factor"])
            return cls(theta, "factors", attention_factor=float(attention_factor), frequency_factors=factors)
        raise UnsupportedModel(
            f"rope type {kind!r} is not supported: its frequencies are unknown or change with the sequence length; "
            "supported are default, linear, llama3, yarn, and dynamic within max_position_embeddings"
        )

    def frequencies(self, head_dim: int) -> torch.Tensor:
        """Radians per position of each rotated pair, float32 `[head_dim / 2]`."""
        base = 1.0 / self.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        if self.kind == "linear":
            return base / self.factor
        if self.kind == "llama3":
            return self._llama3(base)
        if self.kind == "yarn":
            return self._yarn(base, head_dim)
        if self.kind == "factors":
            if len(self.frequency_factors) != head_dim // 2:
                raise UnsupportedModel(
                    f"{len(self.frequency_factors)} rope factors for a head of {head_dim} dimensions"
                )
            return base / torch.tensor(self.frequency_factors)
        return base

    def _llama3(self, base: torch.Tensor) -> torch.Tensor:
        """Slow waves are stretched by `factor`, fast ones kept, those between blended (Llama 3.1)."""
        turns = self.original_context * base / (2 * math.pi)
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = kept.clamp(0.0, 1.0)
        return base * (kept + (1.0 - kept) / self.factor)

    def _yarn(self, base: torch.Tensor, head_dim: int) -> torch.Tensor:
        """A linear ramp over dimensions between kept and stretched waves (YaRN, arXiv:2309.00071)."""

        def dimension_of(turns: float) -> float:
            return head_dim * math.log(self.original_context / (turns * 2 * math.pi)) / (2 * math.log(self.theta))

        low, high = dimension_of(self.beta_fast), dimension_of(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        width = high - low or 0.001
        stretched = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
        return base * (1.0 - stretched + stretched / self.factor)


def _yarn_attention_factor(scaling: Mapping[str, Any], factor: float) -> float:
    given = scaling.get("attention_factor")
    if given is not None:
        return float(given)

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1.0 else 1.0

    scale, scale_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
    return magnitude(scale) / magnitude(scale_all) if scale and scale_all else magnitude(1.0)
