"""Restore bandwidth of the tiers against what the machine can do, and the time to rebuild a disk index.

    python -m benchmarks.tiers --folder /path/on/the/disk

DRAM is held against memcpy (numpy.copyto between two arrays of the same sizes, in as many threads), disk against direct
reads of a flat file at the same block size, by one thread and by two, whichever is faster. The works take turns in one
run, some milliseconds each, so that what slows the machine slows all. Restores are verified, as in service. Between the
pool and buffers, blocks are copied by the engine's thread: held against memcpy too.

With `--lmcache PYTHON`, of an environment that has `lmcache`, its CPU and disk backends take turns too. vLLM's own
offloading needs a GPU.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import mmap
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from pagoda.kv.keys import BlockKey
from pagoda.kv.layout import KVLayout
from pagoda.kv.pool import BlockPool
from pagoda.kv.tiers.base import Tier
from pagoda.kv.tiers.direct_io import open_direct, write_blocks
from pagoda.kv.tiers.disk import DiskTier
from pagoda.kv.tiers.dram import DramTier
from pagoda.kv.tiers.records import Found, Record, RecordId, Stored, Target

BATCH_BYTES = 8 << 20
"""What a restore asks for in one call: the largest piece of `pagoda.kv.hierarchy`."""

SLICE_BYTES = 32 << 20
"""What one work does before it is the next one's turn: short, so that what slows the machine slows all alike."""

Work = Callable[[range], None]
"""Moves the given rows."""


def rid(number: int) -> RecordId:
    return RecordId(BlockKey(hashlib.sha256(number.to_bytes(8, "little")).digest()))


def aligned(num_rows: int, row_bytes: int) -> np.ndarray:
    """Touched, page-aligned rows, as the staging buffers of a transfer are."""
    memory = mmap.mmap(-1, num_rows * row_bytes)
    memory.madvise(mmap.MADV_HUGEPAGE)
    rows = np.frombuffer(memory, dtype=np.uint8).reshape(num_rows, row_bytes)
    rows[:] = 1
    return rows


def compare(what: str, out: np.ndarray, rounds: int, works: Mapping[str, Work]) -> None:
    """Run the works in turns, slice by slice: GB/s of each, and the first as a share of the fastest limit.

    Limits are all others but LMCache.

    Rates are over all slices; the spread of the share is that of the middle half of the slices.
    """
    step = max(1, SLICE_BYTES // out.shape[1])
    slices = [range(start, min(start + step, len(out))) for start in range(0, len(out), step)]
    times: dict[str, list[float]] = {label: [] for label in works}
    for number in range(rounds + 1):
        for rows in slices:
            for label, work in works.items() if number % 2 else reversed(works.items()):
                start_s = time.perf_counter()
                work(rows)
                if number:  # the first round warms up
                    times[label].append((time.perf_counter() - start_s) / len(rows))
    rates = {label: out.shape[1] / statistics.median(taken) / 1e9 for label, taken in times.items()}
    first, *others = works
    fastest = max((label for label in others if label != "lmcache"), key=rates.__getitem__)
    low, middle, high = statistics.quantiles([b / a for a, b in zip(times[first], times[fastest], strict=True)], n=4)
    share = {"of": fastest, "median": round(middle, 2), "quartiles": [round(low, 2), round(high, 2)]}
    print(json.dumps({"what": what, "GB/s": {k: round(v, 2) for k, v in rates.items()}, "share": share}), flush=True)


def spread_over(threads: int, step: int, work: Callable[[range], object]) -> Work:
    """Cut rows into pieces of `step`, and take turns at them on so many threads."""

    def pieces(rows: range) -> list[range]:
        return [rows[i : i + step] for i in range(0, len(rows), step)]

    def in_turn(pieces: Sequence[range]) -> None:
        for piece in pieces:
            work(piece)

    if threads == 1:
        return lambda rows: in_turn(pieces(rows))
    pool = ThreadPoolExecutor(threads)

    def side_by_side(rows: range) -> None:
        for done in [pool.submit(in_turn, pieces(rows)[i::threads]) for i in range(threads)]:
            done.result()

    return side_by_side


def per_batch(rows: np.ndarray) -> int:
    return max(1, BATCH_BYTES // rows.shape[1])


def restore(tier: Tier, out: np.ndarray, threads: int) -> Work:
    """Read records, in batches."""
    targets = [Target(rid(i), row) for i, row in enumerate(out)]

    def read(rows: range) -> None:
        if any(not isinstance(r, Found) for r in tier.get_into(targets[rows.start : rows.stop])):
            raise RuntimeError("a record was not found")

    return spread_over(threads, per_batch(out), read)


def memcpy(source: np.ndarray, out: np.ndarray, threads: int) -> Work:
    """Copy row by row, in the batches and over the threads that `restore` uses."""
    pairs = list(zip(out, source, strict=True))

    def copy(rows: range) -> None:
        for to, row in pairs[rows.start : rows.stop]:
            np.copyto(to, row)

    return spread_over(threads, per_batch(out), copy)


def direct_read(descriptor: int, out: np.ndarray, threads: int) -> Work:
    """Read a flat file of as many bytes as `out` has, a row at a time."""
    views: Sequence[memoryview] = [row.data for row in out]
    size = out.shape[1]

    def read(rows: range) -> None:
        for row in rows:
            if os.preadv(descriptor, [views[row]], row * size) != size:
                raise RuntimeError("a read came back short")

    return spread_over(threads, 1 if threads > 1 else len(out), read)


def fill(tier: Tier, source: np.ndarray) -> None:
    step = per_batch(source)
    for start in range(0, len(source), step):
        rows = range(start, min(start + step, len(source)))
        if any(not isinstance(r, Stored) for r in tier.put([Record(rid(i), source[i]) for i in rows])):
            raise RuntimeError("a record was not stored")


@contextmanager
def lmcache(python: Path | None, folder: Path, out: np.ndarray) -> Iterator[Callable[[str], dict[str, Work]]]:
    """LMCache with as many records as `out` has; yields what makes works of a backend: none without a Python."""
    if python is None:
        yield lambda backend: {}
        return
    program = Path(__file__).with_name("tiers_lmcache.py")
    command = [str(python), str(program), str(folder), str(out.shape[1]), str(len(out))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        to, answers = process.stdin, process.stdout
        assert to is not None
        assert answers is not None

        def wait_for(word: str) -> None:
            for line in answers:
                if line.strip() == word:  # whatever else it prints
                    return
            raise RuntimeError("LMCache ended")

        def work_of(backend: str) -> dict[str, Work]:
            def work(rows: range) -> None:
                to.write(f"{backend} {rows.start} {rows.stop}\n")
                to.flush()
                wait_for("done")

            return {"lmcache": work}

        wait_for("ready")
        yield work_of
        process.kill()


def against_memcpy(source: np.ndarray, out: np.ndarray, threads: int, rounds: int, peer: dict[str, Work]) -> None:
    with DramTier(out.nbytes) as dram:
        fill(dram, source)
        works = {"dram": restore(dram, out, threads), "memcpy": memcpy(source, out, threads)} | peer
        compare(f"dram, {out.shape[1] >> 10} KiB, {threads} threads", out, rounds, works)


def against_direct_reads(folder: Path, source: np.ndarray, out: np.ndarray, rounds: int, peer: dict[str, Work]) -> None:
    kib = out.shape[1] >> 10
    flat = folder / "flat"
    flat.touch()
    descriptor = open_direct(flat)
    os.posix_fallocate(descriptor, 0, source.nbytes)
    for i, row in enumerate(source):
        write_blocks(descriptor, i * source.shape[1], row)
    with DiskTier(folder / "tier", 2 * out.nbytes) as disk:
        start_s = time.perf_counter()
        fill(disk, source)
        wrote = time.perf_counter() - start_s
        print(json.dumps({"what": f"disk write, {kib} KiB", "GB/s": round(out.nbytes / wrote / 1e9, 2)}))
        works = {
            "disk": restore(disk, out, 1),
            "direct": direct_read(descriptor, out, 1),
            "direct, 2 threads": direct_read(descriptor, out, 2),
        }
        compare(f"disk, {kib} KiB", out, rounds, works | peer)
    os.close(descriptor)


def between_pool_and_buffers(num_layers: int, num_kv_heads: int, head_dim: int, num_bytes: int, rounds: int) -> None:
    layout = KVLayout.for_attention(
        num_layers=num_layers, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=16, dtype="bfloat16"
    )
    source, out = (aligned(num_bytes // layout.block_bytes, layout.block_bytes) for _ in range(2))
    pool = BlockPool(layout, len(out))
    blocks = np.random.default_rng(0).permutation(len(out)).tolist()

    def export(rows: range) -> None:
        for row in rows:
            pool.export_block(blocks[row], out[row])

    def bring(rows: range) -> None:
        for row in rows:
            pool.import_block(blocks[row], source[row])

    for what, work in {"export": export, "import": bring}.items():
        works = {what: work, "memcpy": memcpy(source, out, 1)}
        compare(f"{what}, blocks of {num_layers} x {layout.block_bytes // num_layers >> 10} KiB", out, rounds, works)


def rebuild(folder: Path, num_records: int) -> None:
    """The time from opening to serving, for `num_records` records of 8 KiB."""
    capacity = num_records * (8 << 10) * 2
    batch = np.zeros((512, 8 << 10), dtype=np.uint8)
    with DiskTier(folder, capacity) as tier:
        for start in range(0, num_records, len(batch)):
            rows = range(start, min(start + len(batch), num_records))
            tier.put([Record(rid(i), batch[i - start]) for i in rows])
    start_s = time.perf_counter()
    with DiskTier(folder, capacity) as tier:
        taken = time.perf_counter() - start_s
        print(json.dumps({"what": "rebuild", "records": tier.usage().num_records, "seconds": round(taken, 2)}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="on the disk to measure (default: the temporary folder)")
    parser.add_argument("--mib", type=int, default=128, help="data per measurement (default 128)")
    parser.add_argument("--block-kib", type=int, nargs="+", default=[2048, 1024, 512, 256, 128], help="record sizes")
    parser.add_argument("--rounds", type=int, default=11, help="repetitions (default 11)")
    parser.add_argument("--records", type=int, default=100_000, help="for the rebuild (default 100,000; 0 skips it)")
    parser.add_argument("--lmcache", type=Path, metavar="PYTHON", help="a Python that has lmcache, to compare with")
    options = parser.parse_args()

    for kib in options.block_kib:
        source, out = (aligned((options.mib << 10) // kib, kib << 10) for _ in range(2))
        source[:] = np.random.default_rng(0).integers(0, 256, kib << 10, dtype=np.uint8)
        with (
            tempfile.TemporaryDirectory(dir=options.folder) as name,
            tempfile.TemporaryDirectory(dir=options.folder) as peer_folder,
            lmcache(options.lmcache, Path(peer_folder), out) as peer,
        ):
            against_memcpy(source, out, 1, options.rounds, peer("cpu"))
            against_memcpy(source, out, 2, options.rounds, {})
            against_direct_reads(Path(name), source, out, options.rounds, peer("disk"))
    for shape in ((30, 3, 64), (32, 8, 128)):
        between_pool_and_buffers(*shape, options.mib << 20, options.rounds)
    if options.records:
        with tempfile.TemporaryDirectory(dir=options.folder) as name:
            rebuild(Path(name), options.records)


if __name__ == "__main__":
    main()
