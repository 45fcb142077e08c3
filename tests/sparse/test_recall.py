from __future__ import annotations

import math

import pytest
import torch

from pagoda.errors import OutOfBlocks
from pagoda.kernels import KVView, paged_attention, recall_entries
from pagoda.kernels.recall import sketched
from pagoda.sparse.host import BLOCK, HostPool
from pagoda.sparse.infinigen import PartialKeys
from pagoda.sparse.quest import KeyBounds
from pagoda.sparse.recall import RecalledKV, Sketch
from pagoda.sparse.skew import Asked

LAYERS, KV_HEADS, GROUP, DIM, BLOCK_SIZE, SCALE = 2, 2, 3, 8, 4, 0.5


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def host(num_tokens: int = 1024) -> HostPool:
    pool = HostPool(LAYERS, KV_HEADS, DIM, "float32", 0)
    return HostPool(LAYERS, KV_HEADS, DIM, "float32", num_tokens * pool.bytes_per_token)


def partial_keys(rank: int, alpha: float) -> PartialKeys:
    asked = Asked(LAYERS, KV_HEADS, DIM)
    for layer in range(LAYERS):
        asked.add(layer, randn(50, KV_HEADS * GROUP, DIM, seed=9))
    return PartialKeys(asked, rank, alpha)


# -- sketches ---------------------------------------------------------------------------------------------------------


def test_key_bounds_bound_every_key_of_a_block() -> None:
    keys, queries = randn(KV_HEADS, 24, DIM), randn(KV_HEADS, GROUP, DIM, seed=1)
    sketch = KeyBounds(DIM, unit=8)
    bounds = sketched(queries, sketch.columns(0)) @ sketch.of_keys(0, keys).mT
    best = (queries @ keys.mT).unflatten(-1, (3, 8)).amax(-1)
    assert bounds.shape == best.shape
    assert (bounds >= best - 1e-5).all()
    single = KeyBounds(DIM, unit=1)
    torch.testing.assert_close(sketched(queries, single.columns(0)) @ single.of_keys(0, keys).mT, queries @ keys.mT)


# -- host memory ------------------------------------------------------------------------------------------------------


def test_the_host_pool_returns_what_was_written_to_each_slot() -> None:
    pool = host()
    other = pool.allocate(BLOCK)
    slots = pool.allocate(BLOCK + 5)[: BLOCK + 5]
    keys, values = randn(KV_HEADS, BLOCK + 5, DIM), randn(KV_HEADS, BLOCK + 5, DIM, seed=1)
    pool.write(1, other, *2 * [torch.full((KV_HEADS, BLOCK, DIM), 7.0)])
    pool.write(1, slots, keys, values)
    entries = pool.entries(1)[:, slots]
    assert torch.equal(entries[:, :, 0], keys)
    assert torch.equal(entries[:, :, 1], values)
    assert torch.equal(pool.keys(1, slots), keys)


def test_the_host_pool_is_bounded_and_gets_its_blocks_back() -> None:
    pool = host(3 * BLOCK)
    assert pool.num_bytes == 3 * BLOCK * pool.bytes_per_token
    first, second = pool.allocate(1), pool.allocate(BLOCK + 1)
    assert pool.num_held_bytes == pool.num_bytes
    with pytest.raises(OutOfBlocks):
        pool.allocate(1)
    pool.free(torch.cat([second, first]))
    assert pool.num_held_bytes == 0
    assert len({*pool.allocate(3 * BLOCK).tolist()}) == 3 * BLOCK


# -- a request --------------------------------------------------------------------------------------------------------


class Device:
    """A request's places and recent tokens in a pool with shuffled block ids; NaN where nothing was written."""

    def __init__(self, recalled: RecalledKV, keys: torch.Tensor, values: torch.Tensor, places: torch.Tensor) -> None:
        unit, num_tokens = recalled.sketch.unit, keys.shape[2]
        self.recalled, self.keys, self.values, self.unit = recalled, keys, values, unit
        num_entries = places.shape[1] * unit + num_tokens - recalled.num_units * unit
        self.table = torch.randperm(40, generator=torch.Generator().manual_seed(3))[: -(-num_entries // BLOCK_SIZE)]
        shape = (40, KV_HEADS, BLOCK_SIZE, DIM)
        self.views = [KVView(*(torch.full(shape, torch.nan) for _ in range(2))) for _ in range(LAYERS)]
        recent = torch.arange(recalled.num_units * unit, num_tokens).expand(KV_HEADS, -1)
        self.num_entries = num_entries
        entries = torch.arange(num_entries)
        blocks, within = self.table[entries // BLOCK_SIZE], entries % BLOCK_SIZE
        recalled.place(places)
        for layer, view in enumerate(self.views):
            recalled.append(layer, 0, keys[layer], values[layer])
            tokens = torch.cat([self.tokens(places), recent], dim=1)[..., None].expand(-1, -1, DIM)
            view.keys[blocks, :, within] = keys[layer].gather(1, tokens).transpose(0, 1)
            view.values[blocks, :, within] = values[layer].gather(1, tokens).transpose(0, 1)

    def tokens(self, places: torch.Tensor) -> torch.Tensor:
        return (places[..., None] * self.unit + torch.arange(self.unit)).flatten(1)

    def attend(self, layer: int, queries: torch.Tensor) -> torch.Tensor:
        """Fetch and attend, one row."""
        recall_entries(queries, self.recalled.recall(layer, self.views[layer], self.table.int().numpy()))
        return paged_attention(
            queries[None].clone(),
            self.views[layer],
            self.table[None].int(),
            torch.tensor([0, 1], dtype=torch.int32),
            torch.tensor([self.num_entries], dtype=torch.int32),
            scale=SCALE,
        ).out[0]

    def masked(self, layer: int, queries: torch.Tensor) -> torch.Tensor:
        """Dense float32 attention over all tokens, those masked that are on the device nowhere."""
        num_tokens = self.keys.shape[2]
        visible = torch.zeros(KV_HEADS, num_tokens, dtype=torch.bool)
        visible[:, self.recalled.num_units * self.unit :] = True
        visible.scatter_(1, self.tokens(self.recalled.resident[layer]), True)
        scores = queries.view(KV_HEADS, GROUP, DIM) @ self.keys[layer].mT * SCALE
        return (scores.masked_fill(~visible[:, None], -torch.inf).softmax(-1) @ self.values[layer]).flatten(0, 1)


def sketches(keys: torch.Tensor) -> list[Sketch]:
    return [partial_keys(3, alpha=1.0), partial_keys(DIM, alpha=math.inf), KeyBounds(DIM, unit=BLOCK_SIZE)]


def opened(sketch: Sketch, num_tokens: int, num_units: int) -> RecalledKV:
    recalled = RecalledKV(sketch, host(), range(LAYERS), SCALE)
    recalled.reserve(num_tokens)
    recalled.settle(num_units)
    return recalled


@pytest.mark.parametrize("which", [0, 1, 2])
def test_attention_sees_exactly_what_is_on_the_device(which: int) -> None:
    keys, values = randn(LAYERS, KV_HEADS, 41, DIM, seed=4), randn(LAYERS, KV_HEADS, 41, DIM, seed=5)
    sketch = sketches(keys)[which]
    num_units, places = 32 // sketch.unit, 8 // sketch.unit
    device = Device(opened(sketch, 41, num_units), keys, values, torch.arange(places).expand(KV_HEADS, places))
    for step in range(4):
        for layer in range(LAYERS):
            queries = 3 * randn(KV_HEADS * GROUP, DIM, seed=10 * step + layer)
            torch.testing.assert_close(device.attend(layer, queries), device.masked(layer, queries))
            resident = device.recalled.resident[layer]
            assert all(len(set(row)) == places for row in resident.tolist())
    assert device.recalled.num_fetched > 0


@pytest.mark.parametrize("which", [0, 1, 2])
def test_what_a_query_needs_is_there_when_it_attends(which: int) -> None:
    """Every KV head's best tokens are fetched, whatever was on the device before."""
    keys, values = randn(LAYERS, KV_HEADS, 41, DIM, seed=4), randn(LAYERS, KV_HEADS, 41, DIM, seed=5)
    wanted = torch.tensor([13, 22])
    queries = torch.zeros(KV_HEADS, GROUP, DIM)
    for head, token in enumerate(wanted.tolist()):
        keys[0, head, token] *= 6
        queries[head] = keys[0, head, token]
    sketch = sketches(keys)[which]
    places = 8 // sketch.unit
    recalled = opened(sketch, 41, 32 // sketch.unit)
    device = Device(recalled, keys, values, torch.arange(places).expand(KV_HEADS, places))
    attended = device.attend(0, queries.flatten(0, 1)).view(KV_HEADS, GROUP, DIM)
    dense = (queries @ keys[0].mT * SCALE).softmax(-1) @ values[0]
    torch.testing.assert_close(attended, dense, rtol=1e-3, atol=1e-3)
    for head, token in enumerate(wanted.tolist()):
        assert token // sketch.unit in recalled.resident[0][head].tolist()


@pytest.mark.parametrize("which", [0, 1, 2])
def test_places_for_everything_give_full_attention(which: int) -> None:
    keys, values = randn(LAYERS, KV_HEADS, 41, DIM, seed=4), randn(LAYERS, KV_HEADS, 41, DIM, seed=5)
    sketch = sketches(keys)[which]
    num_units = 32 // sketch.unit
    order = torch.randperm(num_units, generator=torch.Generator().manual_seed(1)).expand(KV_HEADS, num_units)
    device = Device(opened(sketch, 41, num_units), keys, values, order)
    queries = randn(KV_HEADS * GROUP, DIM, seed=7)
    dense = (queries.view(KV_HEADS, GROUP, DIM) @ keys[1].mT * SCALE).softmax(-1) @ values[1]
    torch.testing.assert_close(device.attend(1, queries), dense.flatten(0, 1))
    assert device.recalled.num_fetched == 0


@pytest.mark.parametrize("which", [0, 1, 2])
def test_sketches_grow_as_tokens_are_appended(which: int) -> None:
    """Appended one by one or at once, in pieces that end inside units: the same is known of them."""
    keys, values = randn(LAYERS, KV_HEADS, 41, DIM, seed=4), randn(LAYERS, KV_HEADS, 41, DIM, seed=5)
    sketch = sketches(keys)[which]
    num_units = 41 // sketch.unit
    whole, pieces = (opened(sketch, 41, num_units) for _ in range(2))
    for layer in range(LAYERS):
        whole.append(layer, 0, keys[layer], values[layer])
    for start, stop in ((0, 10), (10, 11), (11, 12), (12, 41)):
        for layer in range(LAYERS):
            pieces.append(layer, start, keys[layer][:, start:stop], values[layer][:, start:stop])
    for layer in range(LAYERS):
        known = [each._sketches[layer][:, :, :num_units] for each in (whole, pieces)]
        torch.testing.assert_close(*known)
        torch.testing.assert_close(known[0], sketch.of_keys(layer, keys[layer][:, : num_units * sketch.unit]).mT)


def test_a_closed_request_leaves_nothing_in_host_memory() -> None:
    pool = host(3 * BLOCK)
    sketch = KeyBounds(DIM, unit=4)
    recalled = RecalledKV(sketch, pool, range(LAYERS), SCALE)
    recalled.reserve(BLOCK + 1)
    recalled.reserve(BLOCK + 2)
    recalled.append(0, 0, *2 * [randn(KV_HEADS, BLOCK + 2, DIM)])
    assert recalled.num_host_bytes == pool.num_held_bytes == 2 * BLOCK * pool.bytes_per_token
    assert recalled.num_sketch_bytes >= (BLOCK + 2) // 4 * KV_HEADS * 2 * DIM * 4
    with pytest.raises(OutOfBlocks):
        recalled.reserve(4 * BLOCK)
    assert recalled.num_host_bytes == 2 * BLOCK * pool.bytes_per_token
    recalled.close()
    assert pool.num_held_bytes == recalled.num_host_bytes == recalled.num_sketch_bytes == 0
