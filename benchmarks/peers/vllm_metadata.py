"""vLLM's bookkeeping for a prompt it knows in full: run by `benchmarks.metadata --vllm PYTHON`, in vLLM's environment.

Prints one JSON line: microseconds of each call, round by round. The same calls as our `hit`, in its words: hash the
prompt's blocks, match them, allocate what is missing, free all.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

BLOCK_SIZE = 16


def manager_for(num_tokens: int) -> KVCacheManager:
    """Its KVCacheManager over one layer, with room for the prompt twice."""
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype=torch.float16)
    config = KVCacheConfig(2 * num_tokens // BLOCK_SIZE + 2, [], [KVCacheGroupSpec(["layer"], spec)])
    return KVCacheManager(config, 2 * num_tokens, BLOCK_SIZE, BLOCK_SIZE)


def main(num_tokens: int, rounds: int) -> None:
    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
    manager = manager_for(num_tokens)
    tokens = torch.randint(0, 128_000, (num_tokens,), generator=torch.Generator().manual_seed(0)).tolist()
    times: dict[str, list[float]] = {name: [] for name in ("hash", "match", "allocate", "free")}

    def timed(name: str, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        started = time.perf_counter()
        result = call(*args, **options)
        times[name].append(1e6 * (time.perf_counter() - started))
        return result

    for turn in range(rounds + 1):
        params = SamplingParams(max_tokens=1)
        request = timed("hash", Request, str(turn), tokens, params, None, block_hasher=hasher)
        blocks, num_hit_tokens, *_ = timed("match", manager.get_computed_blocks, request)
        if turn and num_hit_tokens < num_tokens - BLOCK_SIZE:
            raise SystemExit(f"vLLM found {num_hit_tokens} of {num_tokens} tokens")
        missing = num_tokens - num_hit_tokens
        timed("allocate", manager.allocate_slots, request, missing, num_hit_tokens, blocks)
        request.num_computed_tokens = num_tokens
        timed("free", manager.free, request)
        if turn == 0:  # the round that filled the cache
            for values in times.values():
                values.clear()
    json.dump(times, sys.stdout)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
