"""Kernels: plain tensors in, plain tensors out. They know blocks and slots; never requests, trees or models.

The memory that attention reads, for one layer:

    plane   block 0               block 1               block 2
            | K, head by head | V | K, head by head | V | K, ...        the layer's part of all blocks; those of
              ^                     ^                     ^             others may lie between: strides are 64-bit
    KVView    keys[0], values[0]    keys[1], ...          keys[2], ...  [num_kv_heads, block_size, head_dim] each

    block_table[r]   [ 7 | 2 | 5 | * ]      KV entry j of request r is in block block_table[r][j // block_size],
                       0..15  ..   ^        at offset j % block_size; entries outside what r sees are never read
    slot             block_id * block_size + offset: where `write_kv` puts a row

    q rows   | request 0: 3 rows | request 1: 1 row | ...      query_start = [0, 3, 4, ...]
             row i of n sees entries 0 .. context_len - n + i

`dispatch` holds the public functions and picks the backend; `checks` the argument rules; `reference` is the oracle in
torch, and `quantized` what it does to codes and scales; `matrices` are the forms that weights may have; `native` calls
the C++ in csrc/. Nothing here keeps a reference to a tensor after it returns.
"""

from pagoda.kernels.cascade import find_shared_prefixes
from pagoda.kernels.dispatch import (
    add_rms_norm,
    argmax,
    backend_name,
    gelu_mul,
    has_matrix_tiles,
    linear,
    paged_attention,
    recall_entries,
    rms_norm,
    rope_write_kv,
    silu_mul,
    turn_kv,
    write_kv,
)
from pagoda.kernels.fused import FusedDecoder, can_fuse
from pagoda.kernels.matrices import CompactMatrix, Int8Matrix, Matrix
from pagoda.kernels.recall import Recall
from pagoda.kernels.steering import LayerStep, RowRecall, Steering
from pagoda.kernels.types import AttentionOutput, FirstTokens, KVView, SharedPrefix, Staging

__all__ = [
    "AttentionOutput",
    "CompactMatrix",
    "FirstTokens",
    "FusedDecoder",
    "Int8Matrix",
    "KVView",
    "LayerStep",
    "Matrix",
    "Recall",
    "RowRecall",
    "SharedPrefix",
    "Staging",
    "Steering",
    "add_rms_norm",
    "argmax",
    "backend_name",
    "can_fuse",
    "has_matrix_tiles",
    "find_shared_prefixes",
    "gelu_mul",
    "linear",
    "paged_attention",
    "recall_entries",
    "rms_norm",
    "rope_write_kv",
    "silu_mul",
    "turn_kv",
    "write_kv",
]
