"""`pagoda top`: a running server's cache, live in the terminal: the dashboard's figures as text."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from pagoda.cli.remote import DEFAULT_URL, AdminKey, ApiKey, Replica, Url, ask
from pagoda.errors import PagodaError
from pagoda.kv.sizes import format_size

_USES = {"leased": "yellow", "shared": "green", "private": "blue", "cached": "cyan", "free": "bright_black"}
_BAR_WIDTH = 60
_MAX_PREFIXES = 10


@dataclass(frozen=True, slots=True)
class Reading:
    """What the server said, and when: `time.monotonic()` seconds."""

    at: float
    state: dict[str, Any]


def top(
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
    replica: Replica = None,
    api_key: ApiKey = None,
    every: Annotated[float, typer.Option(min=0.2, help="Seconds between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Look twice, print once and exit.")] = False,
) -> None:
    """The cache of a running server, live. Ctrl-C ends it."""

    def read() -> Reading:
        state = ask("GET", "/v1/kv/overview", url=url, admin_key=admin_key, replica=replica, api_key=api_key)
        return Reading(time.monotonic(), state)

    console = Console(highlight=False)
    before = now = read()
    if once:
        time.sleep(every)
        console.print(screen(before, read()))
        return
    try:
        with Live(screen(before, now), console=console, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(every)
                try:
                    before, now = now, read()
                except PagodaError as error:
                    live.update(Group(screen(before, now), Text(f"\n{error}", style="red")), refresh=True)
                    continue
                live.update(screen(before, now), refresh=True)
    except KeyboardInterrupt:
        pass


def screen(before: Reading, now: Reading) -> RenderableType:
    """All that is shown; rates are between the two readings."""
    if before.state["server"]["started"] != now.state["server"]["started"]:
        before = now
    return Group(*_parts(before, now))


def _parts(before: Reading, now: Reading) -> Iterator[RenderableType]:
    state = now.state
    pool, requests, server = state["pool"], state["requests"], state["server"]
    yield Text.from_markup(
        f"[bold]{escape(server['model'])}[/]  {pool['running']:,} running, {pool['waiting']:,} waiting, "
        f"{requests['finished']:,} finished, {requests['preemptions']:,} preemptions"
    )
    yield _pool(state["map"]["counts"])
    yield Text.from_markup(
        f"hit rate [bold]{_share(requests['hit_tokens'], requests['query_tokens'])}[/]   time to first token: "
        + ", ".join(
            f"{kind} [bold]{_seconds(state['ttft'][kind]['p50_s'])}[/] (95%: {_seconds(state['ttft'][kind]['p95_s'])})"
            for kind in ("cold", "warm")
        )
    )
    yield _pressure(state["pressure"])
    if state["tiers"]:
        yield _tiers(before, now)
    if state["misses"]:
        rows = [(each["reason"], f"{each['tokens']:,}", f"{each['requests']:,}") for each in state["misses"]]
        yield _table(("missed because", "tokens", "requests"), rows)
    if state["tenants"]:
        yield _table(("tenant", "held", "cached", "leased", "hit rate", "evicted"), map(_tenant_row, state["tenants"]))
    if state["tree"]:
        yield _prefixes(state["tree"])


def _pool(counts: dict[str, int]) -> Text:
    total = sum(counts.values())
    bar, text = Text("\n"), Text()
    left = _BAR_WIDTH
    for use, style in _USES.items():
        width = left if use == "free" else min(left, -(-counts[use] * _BAR_WIDTH // total))
        left -= width
        bar.append("█" * width, style)
        text.append(f"  {use} {counts[use]:,}", style)
    return bar + text + Text(f"  of {total:,} blocks\n")


def _pressure(pressure: dict[str, Any]) -> Text:
    signals, level = pressure["signals"], pressure["level"]
    text = Text("pressure ")
    text.append(f"{level} ({pressure['name']})", "bold red" if level >= 4 else "bold")
    text.append(
        f"   {signals['pool']:.0%} held, longest wait {signals['queue']:.0%} of what it may be, "
        f"{signals['preemptions']:.1f} preemptions a second, {sum(pressure['refused'].values()):,} refused, "
        f"{format_size(pressure['resident_bytes'])} resident"
    )
    if limit := pressure["memory_limit_bytes"]:
        text.append(f" of {format_size(limit)}")
    return text


def _tiers(before: Reading, now: Reading) -> Table:
    elapsed = now.at - before.at
    earlier = {tier["name"]: tier for tier in before.state["tiers"]}

    def rate(tier: dict[str, Any], field: str) -> str:
        change = tier[field] - earlier.get(tier["name"], tier)[field]
        return f"{max(0, change) / elapsed:,.0f}/s" if elapsed else ""

    rows = []
    for tier in now.state["tiers"]:
        used, room = tier["used_bytes"], tier["capacity_bytes"]
        size = "" if used is None else format_size(used) + (f" of {format_size(room)}" if room else "")
        figures = size, rate(tier, "written_records"), rate(tier, "restored_tokens"), f"{tier['restored_tokens']:,}"
        rows.append((tier["name"], tier["state"], *figures))
    return _table(("tier", "state", "used", "records written", "tokens restored", "restored in all"), rows)


def _tenant_row(tenant: dict[str, Any]) -> tuple[str, ...]:
    blocks = (f"{tenant[f'num_{kind}_blocks']:,}" for kind in ("held", "cached", "leased"))
    hits = _share(tenant["num_hit_tokens"], tenant["num_query_tokens"])
    return _name(tenant["tenant"]), *blocks, hits, f"{tenant['num_evicted_blocks']:,}"


def _prefixes(tree: list[dict[str, Any]]) -> Table:
    most_hit = sorted(tree, key=lambda run: -run["num_hits"])[:_MAX_PREFIXES]
    rows = [
        (_name(run["tenant"]), f"{run['num_hits']:,}", f"{run['num_tokens']:,}", repr(run.get("preview", ""))[1:-1])
        for run in most_hit
    ]
    table = _table(("prefixes of", "hits", "tokens", ""), rows)
    for column in table.columns[:-1]:
        column.no_wrap, column.min_width = True, len(str(column.header))  # the texts take what is left, not all
    table.columns[-1].justify = "left"
    table.columns[-1].no_wrap = True
    table.columns[-1].ratio = 1
    table.expand = True  # only then is there a rest, of which a ratio is a share
    return table


def _table(names: tuple[str, ...], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for index, name in enumerate(names):
        table.add_column(name, justify="right" if index else "left", overflow="ellipsis")
    for row in rows:
        table.add_row(*map(escape, row))
    return table


def _name(tenant: str) -> str:
    return tenant or "(all requests)"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value * 1000:,.0f} ms"
