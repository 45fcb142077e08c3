"""LMCache's own local backends, for `benchmarks.tiers --lmcache PYTHON`; run by a Python that has `lmcache` (0.5.6).

    PYTHON benchmarks/tiers_lmcache.py FOLDER RECORD_BYTES COUNT     then lines "cpu FIRST LAST" or "disk FIRST LAST"

Each line is answered once records FIRST to LAST - 1 were read: from its CPU backend and copied into touched memory, as
a restore does; or from its disk backend (O_DIRECT) into its own pinned buffers. LMCache verifies no checksum.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend


def main() -> None:
    folder, record_bytes, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    gigabytes = 2 * record_bytes * count / 1e9 + 0.5
    config = LMCacheEngineConfig.from_defaults(
        local_cpu=True,
        max_local_cpu_size=gigabytes,
        local_disk=str(folder),
        max_local_disk_size=gigabytes,
        extra_config={"use_odirect": True},
    )
    metadata = LMCacheMetadata("m", 1, 1, 0, 0, torch.uint8, (1, 2, 256, 1, record_bytes // 512))
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    cpu = LocalCPUBackend(config, metadata, dst_device="cpu")
    disk = LocalDiskBackend(config, loop, cpu, dst_device="cpu", metadata=metadata)
    keys = [CacheEngineKey("m", 1, 0, number, torch.uint8) for number in range(count)]
    source = torch.randint(0, 256, (record_bytes,), dtype=torch.uint8)
    for key in keys:
        stored = cpu.allocate(torch.Size([record_bytes]), torch.uint8)
        stored.tensor.copy_(source)
        cpu.submit_put_task(key, stored)
        disk.submit_put_task(key, stored)
        while disk.exists_in_put_tasks(key):
            time.sleep(0.001)
    out = torch.ones((count, record_bytes), dtype=torch.uint8)
    print("ready", flush=True)
    for line in sys.stdin:
        name, first, last = line.split()
        for number in range(int(first), int(last)):
            backend: Any = cpu if name == "cpu" else disk
            found = backend.get_blocking(keys[number])
            if found is None:
                raise RuntimeError(f"record {number} is not there")
            if name == "cpu":
                out[number].copy_(found.tensor)
            found.ref_count_down()
        print("done", flush=True)


if __name__ == "__main__":
    main()
