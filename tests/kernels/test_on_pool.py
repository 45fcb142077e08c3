"""Kernels on a real pool: they find every layer's plane, and touch nothing outside the blocks that they are given."""

from __future__ import annotations

import pytest
import torch

from pagoda import kernels
from pagoda.kernels import KVView
from pagoda.kv.formats import parse_format
from pagoda.kv.layout import KVLayout, LayerSpec
from pagoda.kv.pool import BlockPool

POISON = 0xFF  # NaN in bfloat16, and in the scales of codes
HEADS, DIM, BLOCK, TOKENS = 4, 64, 16, 75
TABLE = [6, 1, 4, 5, 2]  # of eight blocks, partly in order
LAYOUTS = {
    "plain": (["bf16"] * 3, [None] * 3),
    "stride padded": (["bf16"] * 2, [None] * 2),
    "mixed formats": (["bf16", "int8", "bf16"], [None] * 3),
    "alike groups": (["bf16"] * 4, [None, 32, None, 32]),
    "groups of other bytes": (["int8", "bf16", "bf16", "int8"], [None, None, 32, 32]),
}


def make_layout(name: str) -> KVLayout:
    formats, windows = LAYOUTS[name]
    heads = 16 if name == "stride padded" else HEADS
    specs = [
        parse_format(kv_format).attention(heads, DIM, BLOCK, window, "bfloat16")
        for kv_format, window in zip(formats, windows, strict=True)
    ]
    return KVLayout(specs, BLOCK)


def rows_of(spec: LayerSpec) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two queries, and keys and values of all tokens."""
    heads = spec.parts[0].shape[0]
    k, v = torch.randn(2, TOKENS, heads, DIM).bfloat16()
    return torch.randn(2, 2 * heads, DIM).bfloat16(), k, v


def view_of(pool: BlockPool, layer: int) -> KVView:
    return KVView.of({part.name: pool.view(layer, part.name) for part in pool.layout.layers[layer].parts})


@pytest.mark.parametrize("name", LAYOUTS)
def test_attention_on_a_pool_is_that_on_memory_of_the_layers_own(name: str) -> None:
    layout = make_layout(name)
    positions = torch.arange(TOKENS)
    slots = torch.tensor(TABLE)[positions // BLOCK] * BLOCK + positions % BLOCK
    table, ordered = torch.tensor([TABLE, range(5)], dtype=torch.int32).split(1)
    starts, lens = torch.tensor([0, 2], dtype=torch.int32), torch.tensor([TOKENS], dtype=torch.int32)
    others = [block for block in range(8) if block not in TABLE]
    for group in layout.groups:
        pool = BlockPool(layout, 8)
        pool._bytes.fill_(POISON)
        torch.manual_seed(0)
        rows = {layer: rows_of(layout.layers[layer]) for layer in group.layers}
        for layer, (_, k, v) in rows.items():
            kernels.write_kv(view_of(pool, layer), k, v, slots)
        for layer, (q, k, v) in rows.items():
            alone = view_of(BlockPool(KVLayout([layout.layers[layer]], BLOCK), 5), 0)
            kernels.write_kv(alone, k, v, positions)
            out, expected = (
                kernels.paged_attention(q, view, blocks, starts, lens, scale=DIM**-0.5, window=group.window).out
                for view, blocks in ((view_of(pool, layer), table), (alone, ordered))
            )
            assert torch.equal(out, expected)
            for part in layout.layers[layer].parts:
                assert (pool.view(layer, part.name)[others].contiguous().view(torch.uint8) == POISON).all()
