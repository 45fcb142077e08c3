"""Capacity: what fits, who pays what, and what to buy.

    memory = weights + reserve + KV        users = (KV - what they share) / what each has alone

Plain arithmetic on Footprint and Machine; every function returns figures and changes nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from pagoda.errors import ConfigError
from pagoda.kv.formats import default_block_size
from pagoda.kv.room import most_running, split_room, staged_room
from pagoda.plan.footprint import Footprint, without_sharing_heads, without_windows
from pagoda.plan.hardware import Hardware, TierPlan
from pagoda.plan.shape import ModelShape
from pagoda.plan.work import Machine

DEVICE_COUNTS = (1, 2, 4, 8)  # of one copy of a model: what is in one machine
MAX_NUM_SEQS, TOKEN_BUDGET = 64, 512  # of the engine, unless told otherwise


@dataclass(frozen=True, slots=True)
class Workload:
    """What requests look like: `context` tokens of prompt and output together, the first `shared` the same for all."""

    context: int
    shared: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.shared < self.context:
            raise ConfigError(f"a shared prefix of {self.shared} tokens does not fit in a context of {self.context}")


@dataclass(frozen=True, slots=True)
class Room:
    """Where the memory of all devices goes, in bytes. `kv` is negative if the weights alone do not fit."""

    total: int
    weights: float
    reserve: float
    kv: float


@dataclass(frozen=True, slots=True)
class Technique:
    """What one way to keep KV costs and allows; `users` for each context."""

    label: str
    bytes_per_token: float
    num_tokens: int
    users: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TierFigures:
    """What a tier holds of contexts of one length, and whether loading one beats computing it.

    `break_even` is the bandwidth, in bytes/s, at which both take equally long.
    """

    tier: TierPlan
    num_tokens: int | None
    num_contexts: int | None
    load_s: float
    recompute_s: float
    break_even: float


@dataclass(frozen=True, slots=True)
class Cost:
    """US$ per million tokens.

    `prompt_cold` computes all of a prompt, `prompt_warm` only what is not shared, `output` is decoding with `batch`
    requests at once, each of which gets `tokens_per_s`.
    """

    prompt_cold: float
    prompt_warm: float
    output: float
    batch: int
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Offer:
    """Hardware that serves some users: `replicas` of `hardware`, each for `users_each`."""

    hardware: Hardware
    replicas: int
    users_each: int
    price_per_hour: float
    tokens_per_s: float
    output_cost: float


def kv_copies(shape: ModelShape, num_devices: int) -> float:
    """How many devices keep the same KV when layers are split over devices by heads; a latent cannot be split."""
    return num_devices / min(num_devices, 1 if shape.latent else shape.num_kv_heads)


def room(machine: Machine, utilization: float) -> Room:
    """Split the memory of all devices; `utilization` of it may be used, the rest is reserve for activations and others.

    Raises:
        ConfigError: `utilization` is no share.
    """
    if not 0 < utilization <= 1:
        raise ConfigError(f"the usable share of memory is above 0 and at most 1, not {utilization}")
    total = machine.hardware.memory * machine.hardware.count
    weights = machine.shape.parameters.total * machine.weight_bytes
    reserve = total * (1 - utilization)
    return Room(total, weights, reserve, total - reserve - weights)


def num_tokens(footprint: Footprint, kv_bytes: float) -> int:
    """Tokens whose KV fits, if every layer keeps all of them, beside copies of the blocks that are being filled."""
    layout = footprint.layout
    num_bytes = max(0, int(kv_bytes / footprint.copies))
    running = most_running(layout, num_bytes, MAX_NUM_SEQS)
    blocks, _ = split_room(layout, num_bytes, staged_room(layout, running, TOKEN_BUDGET))
    return blocks // len(layout.groups) * layout.block_size


def num_users(footprint: Footprint, kv_bytes: float, work: Workload) -> int:
    """Requests that run at once, each at its full context, and each filling a block of each layer group."""
    copies = footprint.staged_bytes(0, TOKEN_BUDGET)
    shared = footprint.shared_blocks(work.context, work.shared) * footprint.block_bytes
    each = max(1, footprint.blocks(work.context, work.shared)) * footprint.block_bytes
    each += footprint.staged_bytes(1, TOKEN_BUDGET) - copies
    return max(0, int((kv_bytes - copies - shared) // each))


def techniques(
    shape: ModelShape,
    kv_format: str,
    kv_bytes: float,
    contexts: Sequence[int],
    shared: int,
    block_size: int | None,
    devices: int,
) -> list[Technique]:
    """What each way to save memory gives, from the plainest to all together.

    Blocks have `block_size` tokens, or where that is None what is usual in each format.
    """
    mha, full = without_sharing_heads(shape), without_windows(shape)

    def row(label: str, of: ModelShape, format: str, prefix: int = 0) -> Technique:
        size = default_block_size(format) if block_size is None else block_size
        footprint = Footprint(of, format, size, kv_copies(of, devices))
        users = tuple(
            num_users(footprint, kv_bytes, Workload(context, min(prefix, context - 1))) for context in contexts
        )
        return Technique(label, footprint.bytes_per_token, num_tokens(footprint, kv_bytes), users)

    rows = []
    if mha != shape:
        what = "the latent" if shape.latent else "grouped-query attention"
        rows.append(row(f"without {what}", mha, kv_format))
    if full != shape:
        rows.append(row("without sliding windows", full, kv_format))
    rows.append(row(f"as it is, {kv_format}", shape, kv_format))
    for smaller in ("fp8_e4m3", "int8", "int4"):
        if smaller != kv_format:
            rows.append(row(f"in {smaller}", shape, smaller))
    if shared:
        rows.append(row(f"{kv_format}, {shared:,} tokens shared", shape, kv_format, shared))
        if kv_format != "int4":
            rows.append(row(f"int4, {shared:,} tokens shared", shape, "int4", shared))
    return rows


def tier_figures(machine: Machine, footprint: Footprint, tier: TierPlan, context: int) -> TierFigures:
    """Compare loading `context` tokens from a tier with computing them. One copy is stored, and one is loaded."""
    num_bytes = footprint.cached_bytes(context) / footprint.copies
    recompute_s = machine.prefill_s(context)
    held = None if tier.capacity is None else int(tier.capacity // (num_bytes / context))
    return TierFigures(
        tier=tier,
        num_tokens=held,
        num_contexts=None if held is None else held // context,
        load_s=tier.latency_s + num_bytes / tier.bandwidth,
        recompute_s=recompute_s,
        break_even=num_bytes / recompute_s,
    )


def cost(machine: Machine, footprint: Footprint, kv_bytes: float, work: Workload) -> Cost | None:
    """What tokens cost with as many requests at once as fit; None if none does."""
    batch = num_users(footprint, kv_bytes, work)
    if not batch:
        return None
    per_million = machine.price_per_s * 1e6
    step_s = machine.decode_s(batch, work.context, footprint)
    return Cost(
        prompt_cold=per_million * machine.prefill_s(work.context) / work.context,
        prompt_warm=per_million * machine.prefill_s(work.context, work.shared) / work.context,
        output=per_million * step_s / batch,
        batch=batch,
        tokens_per_s=1 / step_s,
    )


def offers(
    machine: Machine,
    hardware: Iterable[Hardware],
    kv_format: str,
    block_size: int,
    utilization: float,
    users: int,
    min_tokens_per_s: float,
    work: Workload,
) -> list[Offer]:
    """Of each hardware the cheapest way to serve so many users at once, the cheapest first; none where nothing does.

    Raises:
        ConfigError: `users` is not positive.
    """
    if users < 1:
        raise ConfigError(f"the number of users must be positive, got {users}")
    found = []
    for device in hardware:
        ways = []
        for count in DEVICE_COUNTS:
            of = replace(machine, hardware=replace(device, count=count))
            footprint = Footprint(machine.shape, kv_format, block_size, kv_copies(machine.shape, count))
            most = min(users, num_users(footprint, room(of, utilization).kv, work))
            # The number of requests at once that are still fast enough: a step with more takes longer.
            fit = bisect_right(
                range(1, most + 1), 1 / min_tokens_per_s, key=lambda batch: of.decode_s(batch, work.context, footprint)
            )
            if fit:
                replicas = -(-users // fit)
                step_s = of.decode_s(-(-users // replicas), work.context, footprint)
                price_per_s = replicas * of.price_per_s
                output_cost = price_per_s * step_s / users * 1e6
                ways.append(Offer(of.hardware, replicas, fit, price_per_s * 3600, 1 / step_s, output_cost))
        if ways:
            found.append(min(ways, key=lambda offer: (offer.price_per_hour, -offer.tokens_per_s)))
    return sorted(found, key=lambda offer: offer.price_per_hour)
