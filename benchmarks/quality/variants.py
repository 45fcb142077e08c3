"""A variant: what is measured against the full-precision run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pagoda import Engine


@dataclass(frozen=True)
class Variant:
    """A name, and the keyword arguments of `Engine` that make it what it is."""

    name: str
    engine_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Variant:
        """From `name={"keyword": value, ...}`."""
        name, _, arguments = text.partition("=")
        try:
            kwargs = json.loads(arguments or "{}")
        except ValueError as error:
            raise ValueError(f"{text!r} is not NAME=JSON: {error}") from error
        if not name or not isinstance(kwargs, dict):
            raise ValueError(f"{text!r} is not NAME={{...}}")
        return cls(name, kwargs)


FULL = Variant("full", {"dtype": "bfloat16"})


def references(dtype: str) -> list[Variant]:
    """What every run measures: the full run again is exactly zero; FP32 is what rounding to BF16 costs by itself."""
    again = Variant("again", {"dtype": dtype})
    return [again] if dtype == "float32" else [again, Variant("fp32", {"dtype": "float32"})]


def open_engine(model: str, variant: Variant, *, token_budget: int, max_model_len: int | None) -> Engine:
    """An engine that computes one request at a time, in chunks of `token_budget`."""
    settings = {
        **FULL.engine_kwargs,
        "kv_memory": "768MiB",
        "max_num_seqs": 8,
        "token_budget": token_budget,
        "max_model_len": max_model_len,
        "progress": False,
    }
    return Engine(model, **{**settings, **variant.engine_kwargs})
