"""A SizingPlan as tables in the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from pagoda.cli.tables import print_tables
from pagoda.kv.sizes import format_size
from pagoda.plan.capacity import Cost, TierFigures
from pagoda.plan.catalog import CATALOG, shape_of
from pagoda.plan.footprint import Footprint
from pagoda.plan.hardware import GB, HARDWARE, Hardware
from pagoda.plan.report import SizingPlan


def print_known() -> None:
    """The built-in models and hardware."""
    console = Console(highlight=False)
    models = _table("Models", "", "parameters", "layers", "KV heads x dim", "KV a token, bf16", "context")
    for name in CATALOG:
        shape = shape_of(name)
        latent = shape.latent and f"latent {shape.latent.rank} + {shape.latent.rope_dim}"
        heads = latent or f"{shape.num_kv_heads} x {shape.head_dim}"
        models.add_row(
            name,
            _billions(shape.parameters.total),
            str(shape.num_layers),
            heads,
            format_size(Footprint(shape).bytes_per_token),
            f"{shape.max_context:,}",
        )
    devices = _table("Hardware", "", "memory", "bandwidth", "dense bf16", "host link", "US$ an hour")
    for device in HARDWARE.values():
        devices.add_row(
            device.name,
            format_size(device.memory),
            _rate(device.bandwidth),
            f"{device.flops / 1e12:,.0f} TFLOP/s",
            _rate(device.host_link),
            f"{device.price:.2f}",
        )
    print_tables(console, models, devices)


def print_plan(plan: SizingPlan) -> None:
    """All of it."""
    console = Console(highlight=False)
    question, hardware, shape = plan.question, plan.hardware, plan.shape
    console.print(
        f"[bold]{shape.name}[/], {_billions(shape.parameters.total)} parameters in {plan.weight_format}, "
        f"KV in {question.kv_format}, on {_named(hardware)}"
    )
    _print_bytes(console, plan)
    room = plan.room
    console.print(
        f"\nMemory {format_size(room.total)} - weights {format_size(room.weights)}"
        f" - reserve {format_size(room.reserve)} = KV {format_size(room.kv) if room.kv > 0 else 'none'}"
        f" = {plan.num_tokens:,} tokens"
    )
    if not plan.num_tokens:
        console.print("[yellow]The weights leave no room: more --devices, or smaller --weights.[/]")
    _print_users(console, plan)
    _print_techniques(console, plan)
    _print_tiers(console, plan)
    _print_offers(console, plan)
    console.print(
        f"\n[dim]Assumed: {question.utilization:.0%} of memory used, {question.compute_share:.0%} of peak operations"
        f" and {question.bandwidth_share:.0%} of peak bandwidth reached, US$ {hardware.price:.2f} a device and hour.[/]"
    )


def _print_bytes(console: Console, plan: SizingPlan) -> None:
    table = _table("KV of a token", "layers", "formula", "bytes", left=2)
    for term in plan.terms:
        table.add_row(term.label, term.formula, f"{term.bytes_per_token:,.0f}")
    if len(plan.terms) > 1:
        table.add_row("together", "", f"{plan.bytes_per_token:,.0f}", style="bold")
    print_tables(console, table)


def _print_users(console: Console, plan: SizingPlan) -> None:
    shared = f", {plan.question.shared:,} tokens of it shared" if plan.question.shared else ""
    table = _table(
        f"Requests at once, each at its full context{shared}",
        *("context", "KV of each", "at once", "prefill", "tokens/s each"),
        *("prompt, cold", "prompt, shared part hit", "output"),
        caption="the last three: US$ per million tokens",
    )
    for figures in plan.contexts:
        table.add_row(
            f"{figures.context:,}",
            format_size(figures.bytes_each),
            f"{figures.users:,}",
            _seconds(figures.prefill_s),
            *_cost_cells(figures.cost, bool(plan.question.shared)),
        )
    print_tables(console, table)


def _cost_cells(cost: Cost | None, shared: bool) -> tuple[str, ...]:
    if cost is None:
        return ("-",) * 4
    warm = f"{cost.prompt_warm:.3f}" if shared else "-"
    return f"{cost.tokens_per_s:,.1f}", f"{cost.prompt_cold:.3f}", warm, f"{cost.output:.3f}"


def _print_techniques(console: Console, plan: SizingPlan) -> None:
    contexts = [f"at {context:,}" for context in plan.question.contexts]
    table = _table("What each way of keeping KV gives", "", "bytes a token", "tokens", *contexts)
    for way in plan.techniques:
        users = (f"{count:,}" for count in way.users)
        style = "bold" if way.label.startswith("as it is") else ""
        table.add_row(way.label, f"{way.bytes_per_token:,.0f}", f"{way.num_tokens:,}", *users, style=style)
    print_tables(console, table)


def _print_tiers(console: Console, plan: SizingPlan) -> None:
    table = _table(
        "Tiers: load a context or compute it again",
        *("tier", "bandwidth", "context", "holds", "load", "compute", "break-even", "loading is"),
    )
    for tiers in zip(*plan.tiers, strict=True):
        for figures, context in zip(tiers, plan.question.contexts, strict=True):
            table.add_row(*_tier_cells(figures, context))
        table.add_section()
    if plan.tiers and plan.tiers[0]:
        print_tables(console, table)


def _tier_cells(figures: TierFigures, context: int) -> tuple[str, ...]:
    tier = figures.tier
    holds = "-" if figures.num_contexts is None else f"{figures.num_contexts:,}"
    ratio = figures.recompute_s / figures.load_s
    verdict = f"{ratio:.1f}x faster" if ratio >= 1 else f"{1 / ratio:.1f}x slower"
    return (
        tier.name if tier.capacity is None else f"{tier.name} {format_size(tier.capacity)}",
        _rate(tier.bandwidth),
        f"{context:,}",
        holds,
        _seconds(figures.load_s),
        _seconds(figures.recompute_s),
        _rate(figures.break_even),
        verdict,
    )


def _print_offers(console: Console, plan: SizingPlan) -> None:
    users = plan.question.users
    if users is None:
        return
    title = (
        f"Hardware for {users:,} at once at {plan.question.contexts[-1]:,} tokens,"
        f" {plan.question.min_tokens_per_s:g} tokens/s each"
    )
    if not plan.offers:
        console.print(f"\n[yellow]{title}: none in the table holds the model and one such request.[/]")
        return
    table = _table(
        title,
        "devices",
        "copies of the model",
        "requests each",
        "price an hour",
        "tokens/s each",
        "output, US$ per million",
    )
    for offer in plan.offers:
        table.add_row(
            _named(offer.hardware, offer.replicas),
            f"{offer.replicas:,}",
            f"{offer.users_each:,}",
            f"{offer.price_per_hour:,.2f}",
            f"{offer.tokens_per_s:,.1f}",
            f"{offer.output_cost:.3f}",
        )
    print_tables(console, table)


def _table(title: str, *columns: str, left: int = 1, caption: str | None = None) -> Table:
    """A table whose first columns are text and whose others are figures."""
    table = Table(
        title=f"\n{title}", title_justify="left", title_style="bold", caption=caption, caption_justify="right", box=None
    )
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < left else "right", header_style="dim")
    return table


def _named(hardware: Hardware, replicas: int = 1) -> str:
    count = hardware.count * replicas
    return f"{count:,} x {hardware.name}"


def _billions(count: int) -> str:
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.0f} M"


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / GB:,.{0 if bytes_per_s >= 100 * GB else 2}f} GB/s"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
