"""SizingPlan: all figures for one model on one hardware, for the terminal, JSON or other programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pagoda.errors import ConfigError
from pagoda.kv.formats import default_block_size
from pagoda.plan.capacity import (
    Cost,
    Offer,
    Room,
    Technique,
    TierFigures,
    Workload,
    cost,
    kv_copies,
    num_tokens,
    num_users,
    offers,
    room,
    techniques,
    tier_figures,
)
from pagoda.plan.footprint import Footprint, GroupTerm
from pagoda.plan.hardware import HARDWARE, Hardware, parse_tier_plan
from pagoda.plan.shape import ModelShape
from pagoda.plan.work import WEIGHT_FORMATS, Machine


@dataclass(frozen=True, slots=True)
class Question:
    """What to size.

    Attributes:
        contexts: in tokens, prompt and output together.
        shared: leading tokens that all requests have in common.
        block_size: None for what is usual in a format.
        weight_format: None for the model's own.
        tiers: as `parse_tier_plan` reads them.
        utilization: share of device memory that weights and KV may take.
        compute_share, bandwidth_share: see Machine.
        users: how many to find hardware for; None for no search.
        min_tokens_per_s: what each of them gets at least.
    """

    contexts: Sequence[int]
    shared: int = 0
    kv_format: str = "bf16"
    block_size: int | None = None
    weight_format: str | None = None
    tiers: Sequence[str] = ()
    utilization: float = 0.9
    compute_share: float = 0.5
    bandwidth_share: float = 0.7
    users: int | None = None
    min_tokens_per_s: float = 10.0


@dataclass(frozen=True, slots=True)
class ContextFigures:
    """Requests of one length: bytes that one holds (alone, beyond what is shared), how many fit, what tokens cost."""

    context: int
    bytes_each: float
    users: int
    prefill_s: float
    cost: Cost | None


@dataclass(frozen=True, slots=True)
class SizingPlan:
    """The answers; `tiers` has one entry for each context, and for each tier in it."""

    shape: ModelShape
    hardware: Hardware
    question: Question
    weight_format: str
    room: Room
    block_size: int
    terms: tuple[GroupTerm, ...]
    bytes_per_token: float
    num_tokens: int
    contexts: tuple[ContextFigures, ...]
    techniques: tuple[Technique, ...]
    tiers: tuple[tuple[TierFigures, ...], ...]
    offers: tuple[Offer, ...]

    def to_json(self) -> dict[str, Any]:
        """Everything as plain dictionaries, lists, numbers and strings."""
        return asdict(self)


def make_plan(shape: ModelShape, hardware: Hardware, question: Question) -> SizingPlan:
    """Answer a question.

    Raises:
        ConfigError: a name is not known or a figure out of range.
    """
    if not question.contexts:
        raise ConfigError("give at least one context length")
    weights = question.weight_format or shape.weight_format
    if weights not in WEIGHT_FORMATS:
        raise ConfigError(f"no weight format is called {weights!r}; there are {', '.join(WEIGHT_FORMATS)}")
    machine = Machine(shape, hardware, WEIGHT_FORMATS[weights], question.compute_share, question.bandwidth_share)
    copies = kv_copies(shape, hardware.count)
    block_size = default_block_size(question.kv_format) if question.block_size is None else question.block_size
    footprint = Footprint(shape, question.kv_format, block_size, copies)
    space = room(machine, question.utilization)
    works = [Workload(context, question.shared) for context in question.contexts]
    # Every device loads its part of the KV over a link of its own.
    tiers = [parse_tier_plan(text, hardware.host_link * hardware.count / copies) for text in question.tiers]
    found: list[Offer] = []
    if question.users is not None:
        others = (hardware, *(device for device in HARDWARE.values() if device.name != hardware.name))
        found = offers(
            machine,
            [replace(device, count=1) for device in others],
            question.kv_format,
            block_size,
            question.utilization,
            question.users,
            question.min_tokens_per_s,
            works[-1],
        )
    return SizingPlan(
        shape=shape,
        hardware=hardware,
        question=question,
        weight_format=weights,
        room=space,
        block_size=block_size,
        terms=tuple(footprint.terms()),
        bytes_per_token=footprint.bytes_per_token,
        num_tokens=num_tokens(footprint, space.kv),
        contexts=tuple(
            ContextFigures(
                context=work.context,
                bytes_each=footprint.blocks(work.context, work.shared) * footprint.block_bytes,
                users=num_users(footprint, space.kv, work),
                prefill_s=machine.prefill_s(work.context),
                cost=cost(machine, footprint, space.kv, work),
            )
            for work in works
        ),
        techniques=tuple(
            techniques(
                shape,
                question.kv_format,
                space.kv,
                question.contexts,
                question.shared,
                question.block_size,
                hardware.count,
            )
        ),
        tiers=tuple(
            tuple(tier_figures(machine, footprint, tier, context) for tier in tiers) for context in question.contexts
        ),
        offers=tuple(found),
    )
