"""`pagoda tier`: look into a tier, check it, empty it, measure it. SPEC is what `pagoda serve --tier` takes."""

from __future__ import annotations

import hashlib
import os
import shutil
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from pagoda.cli.tables import counted
from pagoda.errors import ConfigError, TierUnavailable
from pagoda.kv.sizes import format_size, parse_size

if TYPE_CHECKING:
    from pagoda.kv.tiers.base import Tier
    from pagoda.kv.tiers.records import GetResult, RecordInfo
    from pagoda.kv.tiers.spec import TierSpec

_BATCH_BYTES = 16 << 20

Spec = Annotated[str, typer.Argument(metavar="SPEC", help="Such as disk:/path:100GiB, exactly as the server has it.")]
Key = Annotated[str | None, typer.Option(help="Key of sealed records: env:NAME or file:PATH, in hexadecimal.")]

app = typer.Typer(name="tier", help="Look into the tiers below the KV cache.", no_args_is_help=True)


@app.command(name="ls")
def ls(
    spec: Spec,
    key: Key = None,
    limit: Annotated[int, typer.Option(min=0, help="Records to name, beside the totals.")] = 0,
) -> None:
    """How full SPEC is, and what is in it."""
    console = Console(highlight=False)
    with _opened(spec, key) as tier:
        usage, infos = tier.usage(), list(tier.scan())
    now = time.time()
    leased = sum(info.lease_until > now for info in infos)
    of = "" if usage.capacity_bytes is None else f" of {format_size(usage.capacity_bytes)}"
    records = counted(usage.num_records, "record")
    console.print(f"{records}, {leased:,} leased; {format_size(usage.used_bytes)}{of} used")
    if _parsed(spec).kind == "disk":
        free = format_size(usage.used_bytes - usage.payload_bytes)
        console.print(f"{free} of that hold no record: a file that was taken stays, for the records to come")
    table = Table("record size", "records", "payload", title="By size", title_justify="left")
    for size, count in sorted(Counter(info.num_bytes for info in infos).items()):
        table.add_row(format_size(size), f"{count:,}", format_size(size * count))
    if infos:
        console.print(table)
    for info in infos[:limit]:
        lease = f"leased for {info.lease_until - now:.0f} s" if info.lease_until > now else "no lease"
        place = f"group {info.id.group} shard {info.id.shard}"
        console.print(f"{info.id.key.hex()} {place} {format_size(info.num_bytes)} {lease}", soft_wrap=True)


@app.command()
def verify(spec: Spec, key: Key = None) -> None:
    """Read every record of SPEC and check it. Damaged ones are counted by reason, and dropped. Status 1 if any were."""
    import numpy as np

    from pagoda.kv.tiers.records import Target

    outcomes: Counter[str] = Counter()
    num_bytes = 0
    started = time.perf_counter()
    with _opened(spec, key) as tier:
        infos = list(tier.scan())
        with _progress("verifying", len(infos)) as advance:
            for batch in _batches(infos):
                results = tier.get_into([Target(info.id, np.empty(info.num_bytes, np.uint8)) for info in batch])
                outcomes.update(_outcome(result) for result in results)
                num_bytes += sum(info.num_bytes for info in batch)
                advance(len(batch))
    seconds = time.perf_counter() - started
    good = outcomes.pop("good", 0)
    gone = outcomes.pop("missing", 0)  # somebody else's eviction: no damage
    Console(highlight=False).print(
        f"{good:,} records are good, {sum(outcomes.values()):,} are not, {gone:,} went meanwhile; "
        f"{format_size(num_bytes)} read in {seconds:.1f} s"
    )
    for reason, count in sorted(outcomes.items()):
        print(f"{reason}: {count:,}")
    if outcomes:
        raise typer.Exit(1)


@app.command()
def purge(
    spec: Spec,
    key: Key = None,
    tenant: Annotated[str | None, typer.Option(help="Only this tenant's.")] = None,
    secret: Annotated[
        str, typer.Option(envvar="PAGODA_SECRET", help="The servers' --secret, to know the tenant's.")
    ] = "",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete every record of SPEC, or a tenant's, leased ones too. It is only cached KV."""
    from pagoda.kv.keys import KEY_BYTES, KeyChain
    from pagoda.kv.tiers.records import Deleted

    if tenant is not None:
        if not yes and not typer.confirm(f"Delete all records of tenant {tenant!r} from {spec}?"):
            raise typer.Exit(1)
        owner = KeyChain(bytes(KEY_BYTES), hashlib.sha256(secret.encode()).digest()).owner(tenant)
        with _opened(spec, key) as tier:
            print(f"{counted(tier.purge(owner), 'record')} deleted")
        return
    with _opened(spec, key) as tier:
        infos = list(tier.scan())
        size = format_size(sum(info.num_bytes for info in infos))
        if not yes and not typer.confirm(f"Delete {counted(len(infos), 'record')}, {size}, from {spec}?"):
            raise typer.Exit(1)
        num_deleted = 0
        with _progress("deleting", len(infos)) as advance:
            for batch in _batches(infos):
                results = tier.delete([info.id for info in batch])
                num_deleted += sum(isinstance(result, Deleted) for result in results)
                advance(len(batch))
    print(f"{counted(num_deleted, 'record')} deleted")


@app.command()
def bench(
    spec: Spec,
    key: Key = None,
    record: Annotated[list[str] | None, typer.Option(help="Record size; repeatable.")] = None,
    total: Annotated[str, typer.Option(help="Bytes to move in each round.")] = "64MiB",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; medians are shown.")] = 5,
) -> None:
    """Measure writing and reading SPEC, verified as in service.

    A disk or shared memory is measured beside what is there (`SPEC`'s folder must have the room); a Redis or object
    store in place, with records that are deleted afterwards.
    """
    sizes = [parse_size(size) for size in record or ("64KiB", "512KiB", "2MiB")]
    num_bytes = parse_size(total)
    table = Table("record size", "put GB/s", "get GB/s", "get one, ms", title=spec, title_justify="left")
    with _bench_tier(spec, key, 2 * num_bytes) as tier, _progress("measuring", len(sizes) * rounds) as advance:
        for size in sizes:
            measured = [_round(tier, size, max(1, num_bytes // size), advance) for _ in range(rounds)]
            put, get, one = (statistics.median(figures) for figures in zip(*measured, strict=True))
            table.add_row(format_size(size), f"{put:.2f}", f"{get:.2f}", f"{one * 1e3:.3f}")
    Console(highlight=False).print(table)


def _round(tier: Tier, size: int, count: int, advance: Callable[[int], None]) -> tuple[float, float, float]:
    """Put and get `count` records; returns GB/s of both, and the seconds that getting a single one takes."""
    import numpy as np

    from pagoda.kv.keys import BlockKey
    from pagoda.kv.tiers.records import Found, Record, RecordId, Stored, Target, aligned_empty

    ids = [RecordId(BlockKey(os.urandom(32))) for _ in range(count)]
    step = max(1, _BATCH_BYTES // size)
    data = np.frombuffer(os.urandom(size), dtype=np.uint8)
    out = aligned_empty(min(step, count) * size).reshape(-1, size)
    out[:] = 1  # touched: fresh pages would be measured as well
    try:
        started = time.perf_counter()
        for first in range(0, count, step):
            stored = tier.put([Record(id, data) for id in ids[first : first + step]])
            if not all(isinstance(result, Stored) for result in stored):
                raise TierUnavailable(
                    f"a record was not stored: {next(r for r in stored if not isinstance(r, Stored))}"
                )
        put_s = time.perf_counter() - started
        started = time.perf_counter()
        for first in range(0, count, step):
            found = tier.get_into([Target(id, row) for id, row in zip(ids[first : first + step], out, strict=False)])
            if not all(isinstance(result, Found) for result in found):
                raise TierUnavailable(f"a record was not found: {next(r for r in found if not isinstance(r, Found))}")
        get_s = time.perf_counter() - started
        started = time.perf_counter()
        tier.get_into([Target(ids[0], out[0])])
        one_s = time.perf_counter() - started
    finally:
        tier.delete(ids)
    advance(1)
    return count * size / put_s / 1e9, count * size / get_s / 1e9, one_s


def _parsed(spec: str) -> TierSpec:
    from pagoda.kv.tiers.spec import parse_tier

    return parse_tier(spec)


@contextmanager
def _opened(text: str, key: str | None) -> Iterator[Tier]:
    """An existing tier. Opening one that is not there would make it, and a mistyped path look like an empty tier."""
    from pagoda.kv.tiers.spec import load_key, open_tier

    spec = _parsed(text)
    if spec.kind == "dram":
        raise ConfigError("a dram tier is memory of the process that serves; ask its /metrics")
    path = Path(
        f"/dev/shm/pagoda-{spec.location}" if spec.kind == "shm" and "/" not in spec.location else spec.location
    )
    if spec.kind in ("disk", "shm") and not path.exists():
        raise ConfigError(f"there is no tier at {path}")
    if spec.kind == "disk":
        _check_size(path, spec.capacity_bytes or 0)
    with open_tier(spec, key=None if key is None else load_key(key)) as tier:
        yield tier


def _check_size(folder: Path, capacity_bytes: int) -> None:
    """Refuse a SIZE that the folder was not made with: opening it so would drop what is there."""
    from pagoda.kv.tiers.disk import usual_segment_bytes
    from pagoda.kv.tiers.disk_lock import DirectoryLock

    sizes = [file.stat().st_size for file in folder.glob("*") if file.is_file()]
    segment_bytes = usual_segment_bytes(capacity_bytes)
    if (sizes and max(sizes) > DirectoryLock.FILE_BYTES and segment_bytes not in sizes) or sum(sizes) > capacity_bytes:
        raise ConfigError(f"{folder} was made with another size than {format_size(capacity_bytes)}; give the server's")


@contextmanager
def _bench_tier(text: str, key: str | None, num_bytes: int) -> Iterator[Tier]:
    """The tier to measure: for disk and shared memory a new one beside the given, which goes afterwards."""
    from dataclasses import replace

    from pagoda.kv.tiers.spec import load_key, open_tier

    spec = _parsed(text)
    scratch: Path | None = None
    if spec.kind == "disk":
        scratch = Path(spec.location) / f"bench-{os.getpid()}"
        spec = replace(spec, location=str(scratch), capacity_bytes=max(num_bytes, 256 << 20))
    elif spec.kind == "shm":
        folder = Path(spec.location).parent if "/" in spec.location else Path("/dev/shm")
        scratch = folder / f"pagoda-bench-{os.getpid()}"
        spec = replace(spec, location=str(scratch), capacity_bytes=max(num_bytes, 64 << 20))
    try:
        with open_tier(spec, key=None if key is None else load_key(key)) as tier:
            yield tier
    finally:
        if scratch is not None and scratch.is_dir():
            shutil.rmtree(scratch)
        elif scratch is not None:
            scratch.unlink(missing_ok=True)


def _batches(infos: Sequence[RecordInfo]) -> Iterator[list[RecordInfo]]:
    rest = iter(infos)
    while first := next(rest, None):
        yield [first, *islice(rest, max(0, _BATCH_BYTES // max(1, first.num_bytes) - 1))]


def _outcome(result: GetResult) -> str:
    from pagoda.kv.tiers.records import Corrupt, Failed, Found, Missing

    match result:
        case Found():
            return "good"
        case Missing():
            return "missing"
        case Corrupt(reason):
            return f"corrupt, {reason}"
        case Failed():
            return "failed"
        case _:
            return f"rejected, {result.reason.value}"


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)
