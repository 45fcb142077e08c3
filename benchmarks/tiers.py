"""Restore bandwidth of the tiers against what the machine can do, and the time to rebuild a disk index.

    python -m benchmarks.tiers --folder /path/on/the/disk

DRAM is held against memcpy (numpy.copyto between two arrays of the same sizes), disk against O_DIRECT reads of the same
files at the same block size. Both sides of a pair take turns in one run, and medians over the rounds are reported.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from pagoda.kv.keys import BlockKey
from pagoda.kv.tiers.base import Tier
from pagoda.kv.tiers.direct_io import open_direct
from pagoda.kv.tiers.disk import DiskTier
from pagoda.kv.tiers.dram import DramTier
from pagoda.kv.tiers.records import Found, Record, RecordId, Stored, Target

BATCH = 16


def rid(number: int) -> RecordId:
    return RecordId(BlockKey(hashlib.sha256(number.to_bytes(8, "little")).digest()))


def aligned(num_rows: int, row_bytes: int) -> np.ndarray:
    """Touched, page-aligned rows, as the staging buffers of a transfer are."""
    memory = mmap.mmap(-1, num_rows * row_bytes)
    memory.madvise(mmap.MADV_HUGEPAGE)
    rows = np.frombuffer(memory, dtype=np.uint8).reshape(num_rows, row_bytes)
    rows[:] = 1
    return rows


def seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def compare(name: str, num_bytes: int, rounds: int, pair: dict[str, Callable[[], None]]) -> dict[str, object]:
    """Run the works of `pair` in turns; GB/s of each (median), and the first as a share of the second."""
    times: dict[str, list[float]] = {label: [] for label in pair}
    for _ in range(rounds):
        for label, work in pair.items():
            times[label].append(seconds(work))
    rates = {label: num_bytes / statistics.median(taken) / 1e9 for label, taken in times.items()}
    first, second = rates.values()
    shares = [b / a for a, b in zip(*times.values(), strict=True)]
    result = {
        "what": name,
        **{label: round(rate, 2) for label, rate in rates.items()},
        "share": round(first / second, 3),
    }
    result["share_by_round"] = [round(share, 2) for share in sorted(shares)]
    print(json.dumps(result))
    return result


def restore(tier: Tier, out: np.ndarray, threads: int) -> None:
    """Read every record, in batches over `threads`."""

    def read(start: int) -> None:
        rows = range(start, min(start + BATCH, len(out)))
        if any(not isinstance(r, Found) for r in tier.get_into([Target(rid(i), out[i]) for i in rows])):
            raise RuntimeError("a record was not found")

    if threads == 1:
        for start in range(0, len(out), BATCH):
            read(start)
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, range(0, len(out), BATCH)))


def memcpy(source: np.ndarray, out: np.ndarray, threads: int) -> None:
    """Copy row by row, in the batches and over the threads that `restore` uses."""

    def copy(start: int) -> None:
        for row in range(start, min(start + BATCH, len(out))):
            np.copyto(out[row], source[row])

    if threads == 1:
        for start in range(0, len(out), BATCH):
            copy(start)
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(copy, range(0, len(out), BATCH)))


def direct_read(folder: Path, out: np.ndarray) -> None:
    """Read as many bytes as `out` has from the tier's own segment files, at the same block size."""
    row_bytes, row = out.shape[1], 0
    for path in sorted(folder.glob("segment-*")):
        descriptor = open_direct(path)
        offset, end = 4 << 20, path.stat().st_size
        while offset + row_bytes <= end and row < len(out):
            os.preadv(descriptor, [out[row].data], offset)
            offset, row = offset + row_bytes, row + 1
        os.close(descriptor)
    if row < len(out):
        raise RuntimeError("the segments are smaller than the data")


def fill(tier: Tier, source: np.ndarray) -> None:
    for start in range(0, len(source), BATCH):
        rows = range(start, min(start + BATCH, len(source)))
        if any(not isinstance(r, Stored) for r in tier.put([Record(rid(i), source[i]) for i in rows])):
            raise RuntimeError("a record was not stored")


def against_memcpy(source: np.ndarray, out: np.ndarray, threads: int, rounds: int) -> None:
    with DramTier(out.nbytes) as dram:
        fill(dram, source)
        pair = {"dram": lambda: restore(dram, out, threads), "memcpy": lambda: memcpy(source, out, threads)}
        compare(f"dram {out.shape[1] >> 10} KiB, {threads} threads", out.nbytes, rounds, pair)


def against_direct_reads(folder: Path, source: np.ndarray, out: np.ndarray, rounds: int) -> None:
    kib = out.shape[1] >> 10
    with DiskTier(folder, 4 * out.nbytes) as disk:
        wrote = seconds(lambda: fill(disk, source))
        print(json.dumps({"what": f"disk write {kib} KiB", "GB/s": round(out.nbytes / wrote / 1e9, 2)}))
        pair = {"disk": lambda: restore(disk, out, 1), "direct_read": lambda: direct_read(folder, out)}
        compare(f"disk {kib} KiB", out.nbytes, rounds, pair)


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
    parser.add_argument("--mib", type=int, default=512, help="data per measurement (default 512)")
    parser.add_argument("--block-kib", type=int, nargs="+", default=[2048, 128, 16], help="record sizes")
    parser.add_argument("--rounds", type=int, default=7, help="repetitions, of which the median counts (default 7)")
    parser.add_argument("--records", type=int, default=100_000, help="for the rebuild (default 100,000; 0 skips it)")
    options = parser.parse_args()

    for kib in options.block_kib:
        source, out = (aligned((options.mib << 10) // kib, kib << 10) for _ in range(2))
        source[:] = np.random.default_rng(0).integers(0, 256, kib << 10, dtype=np.uint8)
        for threads in (1, 2):
            against_memcpy(source, out, threads, options.rounds)
        with tempfile.TemporaryDirectory(dir=options.folder) as name:
            against_direct_reads(Path(name), source, out, options.rounds)
    if options.records:
        with tempfile.TemporaryDirectory(dir=options.folder) as name:
            rebuild(Path(name), options.records)


if __name__ == "__main__":
    main()
