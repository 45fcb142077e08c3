"""`pagoda replay`: what a cache, its policies and its tiers would have hit of real traffic. No model is loaded."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from pagoda.cli.plan import load_shape
from pagoda.errors import ConfigError
from pagoda.kv.sizes import parse_size

if TYPE_CHECKING:
    from pagoda.plan.study import Setup, Summary
    from pagoda.plan.trace_files import Trace
    from pagoda.plan.traces import TraceRequest

_MACHINE = "What is simulated"
_FLEET = "Several replicas"
_DEFAULT_MODEL = "llama-3.1-8b"
_DEFAULT_SIZES = ("1%", "5%", "10%", "25%")


def replay(
    trace: Annotated[list[Path], typer.Argument(help="Trace files of one format, or folders of sessions.")],
    format: Annotated[str, typer.Option(help="auto, mooncake, bailian, sessions, lengths or access-log.")] = "auto",
    policy: Annotated[
        list[str] | None, typer.Option(help="Eviction policy of the device; repeatable. \\[default: reuse lru]")
    ] = None,
    device: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SIZE",
            help="KV memory of the device, such as 40GiB or 10% of the trace's different blocks; repeatable. "
            "\\[default: 1% 5% 10% 25%]",
        ),
    ] = None,
    tier: Annotated[
        list[str] | None,
        typer.Option(metavar="SPEC", help="As in `pagoda plan`: dram:512GiB, disk:4TB@3GB. Fastest first; repeatable."),
    ] = None,
    target_hit_rate: Annotated[
        str | None, typer.Option(metavar="PERCENT", help="Find the least DRAM, and disk, that hits so much.")
    ] = None,
    bound: Annotated[bool, typer.Option(help="Belady's bound, which keeps the trace in memory.")] = True,
    model: Annotated[
        str | None,
        typer.Option(
            help=f"Whose KV and speed; as in `pagoda plan`. \\[default: an access log's own, else {_DEFAULT_MODEL}]",
            rich_help_panel=_MACHINE,
        ),
    ] = None,
    hardware: Annotated[str, typer.Option(help="See `pagoda plan --list`.", rich_help_panel=_MACHINE)] = "h100",
    devices: Annotated[int, typer.Option(min=1, help="Devices to a replica.", rich_help_panel=_MACHINE)] = 1,
    kv_format: Annotated[
        str,
        typer.Option(help="fp32, bf16, fp16, fp8_e4m3, fp8_e5m2, int8, int4 or KEYS/VALUES.", rich_help_panel=_MACHINE),
    ] = "bf16",
    output_speed: Annotated[
        float | None,
        typer.Option(
            min=0.01,
            help="Output tokens/s of a request, which holds its blocks meanwhile. \\[default: it holds them no time]",
            rich_help_panel=_MACHINE,
        ),
    ] = None,
    interval: Annotated[
        float, typer.Option(min=0, help="Seconds between the starts of sessions.", rich_help_panel=_MACHINE)
    ] = 4.0,
    replicas: Annotated[
        int | None, typer.Option(min=1, help="Simulate so many, with each --device to each.", rich_help_panel=_FLEET)
    ] = None,
    routing: Annotated[
        list[str] | None,
        typer.Option(
            help="round-robin, least-load or prefix-aware; repeatable. \\[default: all]", rich_help_panel=_FLEET
        ),
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with curves and tables.")] = None,
    png: Annotated[Path | None, typer.Option(help="Write the curves as PNG; needs matplotlib.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Replay request traces through the cache's own tree and policies, and say what would have hit."""
    from pagoda.cli import replay_report as report
    from pagoda.kv.eviction import DEFAULT_POLICY
    from pagoda.plan.study import bounds, find_tier, study, summarize
    from pagoda.plan.trace_files import open_trace

    opened = open_trace(trace, format, interval)
    setup = _setup(model or _model_of(opened), hardware, devices, kv_format, tier or (), output_speed)
    target = None if target_hit_rate is None else _share(target_hit_rate)
    summary = summarize(_shown(opened, "reading")(), *([] if bound else [0]))
    sizes = [_blocks(text, summary, setup) for text in device or _DEFAULT_SIZES]
    policies = list(dict.fromkeys(policy or (DEFAULT_POLICY, "lru")))
    result = report.Result(opened.name, opened.format, summary, setup)
    if replicas is not None:
        result.fleets = _fleets(opened, setup, summary, sizes, policies[0], replicas, routing or ())
    else:
        stream = _shown(opened, "replaying")
        result.points = study(stream, setup, sizes, policies, summary.block_tokens)
        result.bounds = bounds(summary, setup, sizes)
    if target is not None:
        for kind in report.tiers_to_try(setup):
            stream = _shown(opened, f"sizing {kind.name}")
            result.answers.append(find_tier(stream, setup, sizes[0], policies[0], summary, kind, target))
        result.target = target
    if html is not None:
        report.write_html(result, html)
    if png is not None:
        report.write_curves(result, png)
    if as_json:
        print(json.dumps(result.to_json(), indent=1))
    else:
        report.print_result(result)


def _model_of(trace: Trace) -> str:
    """The model of an access log, if it is one of the built-in ones; else the default."""
    from pagoda.plan.access_log import logged_model
    from pagoda.plan.catalog import find_shape

    name = logged_model(trace.files[0]) if trace.format == "access-log" else None
    return name if name is not None and find_shape(name) is not None else _DEFAULT_MODEL


def _setup(
    model: str, hardware: str, devices: int, kv_format: str, tiers: Iterable[str], output_speed: float | None
) -> Setup:
    from pagoda.plan.capacity import kv_copies
    from pagoda.plan.footprint import Footprint
    from pagoda.plan.hardware import find_hardware, parse_tier_plan
    from pagoda.plan.study import Setup
    from pagoda.plan.work import WEIGHT_FORMATS, Machine

    shape, device = load_shape(model), find_hardware(hardware, devices)
    copies = kv_copies(shape, devices)
    return Setup(
        machine=Machine(shape, device, WEIGHT_FORMATS[shape.weight_format]),
        footprint=Footprint(shape, kv_format, copies=copies),
        tiers=tuple(parse_tier_plan(text, device.host_link * devices / copies) for text in tiers),
        seconds_per_output_token=None if output_speed is None else 1 / output_speed,
    )


def _share(text: str) -> float:
    """`60%` or `0.6`."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(%?)\s*", text)
    share = float(found[1]) / (100 if found[2] else 1) if found else 0.0
    if not 0 < share <= 1:
        raise ConfigError(f"not a share: {text!r}; write such as 60%")
    return share


def _blocks(text: str, summary: Summary, setup: Setup) -> int:
    """A size of the device in blocks of the trace."""
    if text.strip().endswith("%"):
        return max(1, round(summary.num_different * _share(text)))
    count = int(parse_size(text) // setup.block_bytes(summary.block_tokens))
    if count < 1:
        raise ConfigError(f"a device of {text} holds not one of the trace's blocks of {summary.block_tokens} tokens")
    return count


def _shown(trace: Trace, what: str) -> Callable[[], Iterator[TraceRequest]]:
    """The trace's requests, with a progress bar while they are read."""

    def stream() -> Iterator[TraceRequest]:
        with _progress(what, trace.num_bytes) as advance:
            yield from trace.requests(advance)

    return stream


@contextmanager
def _progress(what: str, num_bytes: int) -> Iterator[Callable[[int], None]]:
    """A bar that is told of every line and redrawn now and then: drawing is dearer than reading."""
    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    pending = 0
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=num_bytes)

        def advance(count: int) -> None:
            nonlocal pending
            pending += count
            if pending >= num_bytes // 200:
                bar.advance(task, pending)
                pending = 0

        yield advance


def _fleets(
    trace: Trace, setup: Setup, summary: Summary, sizes: Iterable[int], policy: str, replicas: int, names: Iterable[str]
) -> list[tuple[str, int, Any]]:
    from pagoda.cluster.routing import ROUTING_POLICIES, make_routing
    from pagoda.plan.fleet import Fleet

    tokens_per_s = 1 / setup.machine.prefill_s(8192) * 8192
    fleets = [
        (
            name,
            size,
            Fleet(
                [setup.replay(size, policy, summary.block_tokens) for _ in range(replicas)],
                make_routing(name, replicas, max_blocks=2 * replicas * size),
                tokens_per_s,
            ),
        )
        for name in names or ROUTING_POLICIES
        for size in sizes
    ]
    for request in _shown(trace, "replaying")():
        for _, _, fleet in fleets:
            fleet.serve(request)
    return [(name, size, fleet.report()) for name, size, fleet in fleets]
