"""Native attention against the float32 reference, and the reference against a loop that follows the definition."""

from __future__ import annotations

import math
import random

import pytest
import torch

from pagoda.errors import KernelError
from pagoda.kernels import (
    AttentionOutput,
    KVView,
    SharedPrefix,
    find_shared_prefixes,
    native,
    paged_attention,
    reference,
)
from tests.kernels.pools import PagedBatch, make_batch

MIXED = [(37, 37), (90, 5), (1, 1), (70, 1), (130, 1), (16, 3)]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def run(
    backend: object,
    batch: PagedBatch,
    *,
    window: int | None = None,
    softcap: float | None = None,
    need_lse: bool = True,
    need_mass: bool = True,
    shared: tuple[SharedPrefix, ...] = (),
    places: torch.Tensor | None = None,
) -> AttentionOutput:
    result = backend.paged_attention(  # type: ignore[attr-defined]
        batch.q,
        batch.view,
        batch.block_table,
        batch.query_start,
        batch.context_lens,
        scale=batch.q.shape[2] ** -0.5,
        window=window,
        softcap=softcap,
        need_lse=need_lse,
        need_mass=need_mass,
        shared_prefixes=shared,
        places=places,
    )
    assert isinstance(result, AttentionOutput)
    return result


def check(
    batch: PagedBatch,
    *,
    window: int | None = None,
    softcap: float | None = None,
    shared: tuple[SharedPrefix, ...] = (),
    places: torch.Tensor | None = None,
) -> None:
    poisoned = batch.pool.clone()
    got = run(native, batch, window=window, softcap=softcap, shared=shared, places=places)
    want = run(reference, batch.widened(), window=window, softcap=softcap, places=places)
    assert torch.equal(batch.pool.view(torch.uint8), poisoned.view(torch.uint8)), "attention wrote to the pool"
    tolerance = TOLERANCE[batch.q.dtype]
    assert got.out.dtype == batch.q.dtype
    torch.testing.assert_close(got.out.float(), want.out, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(got.lse, want.lse, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(got.mass, want.mass, rtol=1e-4, atol=1e-5)


def definition(batch: PagedBatch, window: int | None, softcap: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention one row, one head, one KV entry at a time, in float64."""
    rows, heads, head_dim = batch.q.shape
    group = heads // batch.view.keys.shape[1]
    block_size = batch.view.keys.shape[2]
    out = torch.zeros(rows, heads, head_dim, dtype=torch.float64)
    mass = torch.zeros(len(batch.context_lens), heads // group, int(batch.context_lens.max()), dtype=torch.float64)
    for request, context in enumerate(batch.context_lens.tolist()):
        begin, end = batch.query_start[request : request + 2].tolist()
        for row in range(begin, end):
            position = context - (end - begin) + row - begin
            for head in range(heads):
                weights: dict[int, float] = {}
                for j in range(position + 1):
                    if window is None or j > position - window:
                        block = int(batch.block_table[request, j // block_size])
                        key = batch.view.keys[block, head // group, j % block_size]
                        score = float(batch.q[row, head].double() @ key.double()) * head_dim**-0.5
                        weights[j] = math.exp(softcap * math.tanh(score / softcap) if softcap else score)
                total = sum(weights.values())
                for j, weight in weights.items():
                    block = int(batch.block_table[request, j // block_size])
                    out[row, head] += batch.view.values[block, head // group, j % block_size].double() * weight / total
                    mass[request, head // group, j] += weight / total
    return out, mass


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_reference_follows_the_definition(window: int | None, softcap: float | None) -> None:
    batch = make_batch([(9, 9), (13, 2), (6, 1)], head_dim=8, block_size=4, window=window)
    got = run(reference, batch, window=window, softcap=softcap)
    out, mass = definition(batch, window, softcap)
    torch.testing.assert_close(got.out.double(), out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.mass, mass.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block_size", [1, 2, 7, 16, 64])
def test_block_sizes(isa: str, block_size: int, dtype: torch.dtype) -> None:
    check(make_batch(MIXED, block_size=block_size, dtype=dtype, seed=block_size))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [8, 24, 64, 128, 256])
@pytest.mark.parametrize("group", [1, 3, 8])
def test_shapes(isa: str, group: int, head_dim: int, dtype: torch.dtype) -> None:
    check(make_batch(MIXED, group=group, head_dim=head_dim, dtype=dtype, seed=group))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [1, 6, 64, 200])
def test_window(isa: str, window: int, dtype: torch.dtype) -> None:
    batch = make_batch(MIXED, window=window, dtype=dtype, block_size=7)
    want = run(reference, batch.widened(), window=window)
    assert not torch.isnan(want.out).any()
    check(batch, window=window)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_softcap(isa: str, dtype: torch.dtype) -> None:
    check(make_batch(MIXED, dtype=dtype), softcap=0.7)
    check(make_batch(MIXED, dtype=dtype, window=20), window=20, softcap=30.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_heads_share_one_kv_head(isa: str, dtype: torch.dtype) -> None:
    check(make_batch([(40, 40), (75, 1)], num_kv_heads=1, group=71, head_dim=32, dtype=dtype))


@pytest.mark.parametrize("block_size", [16, 24])
@pytest.mark.parametrize(("group", "head_dim"), [(2, 64), (5, 24), (7, 96), (16, 128)])
def test_few_rows_of_several_kv_heads(isa: str, group: int, head_dim: int, block_size: int) -> None:
    """Decode: a tile has several heads, long contexts are split, 20 KV heads of 7 rows are too many for one."""
    lens = [(1000, 1), (75, 1), (16 // group + 40, 16 // group)]
    options = {"group": group, "head_dim": head_dim, "block_size": block_size, "dtype": torch.bfloat16}
    check(make_batch(lens, num_kv_heads=20 if group == 7 else 3, **options))
    check(make_batch(lens, num_kv_heads=3, window=50, **options), window=50)


@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("window", [1, 15, 64, 300])
def test_windows_begin_anywhere(isa: str, window: int, block_size: int) -> None:
    """In a block's middle at most steps: entries before a window's begin lie in the same sixteen."""
    lens = [(length, rows) for length in (5, 320, 333, 335, 336) for rows in (1, 3)]
    check(
        make_batch(lens, window=window, block_size=block_size, group=3, head_dim=64, dtype=torch.bfloat16),
        window=window,
    )


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("head_dim", [24, 32, 96])
def test_many_rows_of_one_kv_head(isa: str, head_dim: int, window: int | None) -> None:
    """More than one tile has room for, of which some see nothing of what the others see."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        batch = make_batch(
            [(350, 250)], num_kv_heads=1, group=16, head_dim=head_dim, dtype=torch.bfloat16, window=window
        )
        check(batch, window=window)
    finally:
        torch.set_num_threads(before)


def test_later_scores_are_far_larger(isa: str) -> None:
    batch = make_batch([(300, 100), (200, 1)], group=8, dtype=torch.bfloat16)
    for request, context in enumerate(batch.context_lens.tolist()):
        for j in range(context // 2, context):
            batch.view.keys[int(batch.block_table[request, j // 16]), :, j % 16] *= 12
    check(batch)


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("group", [1, 8])
def test_split_context(isa: str, threads: int, group: int) -> None:
    """One long decode: the context is split and merged, with the same result for any number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check(make_batch([(2100, 1)], num_kv_heads=1, group=group, dtype=torch.bfloat16))
        check(make_batch([(1500, 2)], num_kv_heads=1, group=group, dtype=torch.bfloat16, window=900), window=900)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("seed", range(6))
def test_random_batches(isa: str, seed: int) -> None:
    rng = random.Random(seed)
    lens = []
    for _ in range(rng.randint(1, 6)):
        query_len = rng.choice([0, 1, 1, 1, rng.randint(2, 90)])
        lens.append((query_len + rng.choice([0, rng.randint(0, 150)]), query_len))
    window = rng.choice([None, rng.randint(1, 120)])
    batch = make_batch(
        lens,
        num_kv_heads=rng.randint(1, 3),
        group=rng.randint(1, 5),
        head_dim=8 * rng.randint(1, 16),
        block_size=rng.randint(1, 33),
        dtype=rng.choice([torch.float32, torch.bfloat16]),
        window=window,
        seed=seed,
    )
    check(batch, window=window, softcap=rng.choice([None, 5.0]))


def test_a_float32_row_does_not_depend_on_its_company(isa: str) -> None:
    """A token alone gets the bits that it gets among others, wherever it is in a turn of 64 entries."""
    batch = make_batch([(150, 150)])
    among = run(native, batch, need_mass=False).out
    starts = torch.tensor([0, 1], dtype=torch.int32)
    for row in (0, 2, 5, 16, 17, 40, 62, 63, 64, 70, 100, 149):
        lens = torch.tensor([row + 1], dtype=torch.int32)
        alone = PagedBatch(batch.pool, batch.view, batch.block_table, starts, lens, batch.q[row : row + 1])
        assert torch.equal(run(native, alone, need_mass=False).out, among[row : row + 1])


def some_rows(batch: PagedBatch, share: float, seed: int) -> tuple[PagedBatch, torch.Tensor, torch.Tensor]:
    """The batch with a share of its rows, which of them those are, and their places."""
    keep = torch.rand(len(batch.q), generator=torch.Generator().manual_seed(seed)) < share
    counts = batch.query_start.diff()
    places = torch.arange(len(keep)) + (batch.context_lens - batch.query_start[1:]).repeat_interleave(counts)
    kept_before = torch.cat((torch.zeros(1, dtype=torch.int64), keep.cumsum(0)))
    query_start = kept_before[batch.query_start].int()
    left = PagedBatch(batch.pool, batch.view, batch.block_table, query_start, batch.context_lens, batch.q[keep])
    return left, keep, places[keep].int()


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_see_what_they_saw_among_those_left_out(
    isa: str, window: int | None, share: float, dtype: torch.dtype
) -> None:
    batch = make_batch([(300, 290), (90, 30), (25, 1), (64, 64)], dtype=dtype, window=window)
    left, keep, places = some_rows(batch, share, seed=3)
    check(left, window=window, places=places)
    among = run(reference, batch.widened(), window=window)
    alone = run(reference, left.widened(), window=window, places=places)
    torch.testing.assert_close(alone.out, among.out[keep], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(alone.lse, among.lse[keep], rtol=1e-5, atol=1e-5)


def test_rows_left_of_requests_on_one_prefix(isa: str) -> None:
    shared = (SharedPrefix(0, 3, 5),)
    batch = make_batch([(200, 100), (180, 90), (120, 20)], dtype=torch.bfloat16, shared=shared)
    left, _, places = some_rows(batch, 0.2, seed=5)
    check(left, shared=shared, places=places)
    found = find_shared_prefixes(batch.block_table, left.query_start, left.context_lens, 16, places)
    assert found == shared
    early = places.clone()
    early[0] = 79  # sees one entry less than what is shared
    assert find_shared_prefixes(batch.block_table, left.query_start, left.context_lens, 16, early) != shared
    for backend in (native, reference):
        with pytest.raises(KernelError, match="new rows of request 0"):
            run(backend, left, shared=shared, places=early)


@pytest.mark.parametrize("backend", [native, reference])
@pytest.mark.parametrize("wrong", [[18, 18, 3], [19, 18, 3], [18, 20, 3], [-1, 19, 3], [18, 19, 9]])
def test_places_out_of_order_or_context_raise(backend: object, wrong: list[int]) -> None:
    batch = make_batch([(20, 2), (9, 1)])
    with pytest.raises(KernelError, match="places"):
        run(backend, batch, places=torch.tensor(wrong, dtype=torch.int32))


def test_large_scores_do_not_overflow(isa: str) -> None:
    batch = make_batch([(80, 80), (33, 1)], dtype=torch.bfloat16)
    batch.q.mul_(200)
    got, want = run(native, batch), run(reference, batch.widened())
    torch.testing.assert_close(got.out.float(), want.out, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(got.lse, want.lse, rtol=1e-4, atol=1e-3)


def test_optional_outputs_are_absent_unless_asked_for(isa: str) -> None:
    batch = make_batch(MIXED)
    got = run(native, batch, need_lse=False, need_mass=False)
    assert got.lse is None
    assert got.mass is None
    assert torch.equal(got.out, run(native, batch).out)


def test_empty_batches(isa: str) -> None:
    batch = make_batch([])
    got = run(native, batch)
    assert got.out.shape == (0, 6, 64)
    got = run(native, make_batch([(20, 0)]))
    assert got.out.shape == (0, 6, 64)
    assert torch.equal(got.mass, torch.zeros(1, 2, 20))


@pytest.mark.parametrize("backend", [native, reference])
def test_wrong_values_raise(backend: object) -> None:
    batch = make_batch([(20, 2), (9, 9)])

    def altered(**changes: torch.Tensor) -> PagedBatch:
        fields = {name: getattr(batch, name) for name in batch.__dataclass_fields__}
        return PagedBatch(**{**fields, **changes})

    outside = batch.block_table.clone()
    outside[1, 0] = batch.view.keys.shape[0]
    negative = batch.block_table.clone()
    negative[0, 1] = -1
    int32 = torch.int32
    for wrong in (
        altered(block_table=outside),
        altered(block_table=negative),
        altered(context_lens=torch.tensor([1, 9], dtype=int32)),
        altered(context_lens=torch.tensor([20, 9999], dtype=int32)),
        altered(query_start=torch.tensor([0, 12, 11], dtype=int32)),
        altered(query_start=torch.tensor([0, 2, 10], dtype=int32)),
        altered(query_start=torch.tensor([1, 2, 11], dtype=int32)),
    ):
        with pytest.raises(KernelError):
            run(backend, wrong)


def test_wrong_arguments_raise() -> None:
    batch = make_batch([(20, 2), (9, 9)])
    good = {
        "q": batch.q,
        "view": batch.view,
        "block_table": batch.block_table,
        "query_start": batch.query_start,
        "context_lens": batch.context_lens,
        "scale": 1.0,
    }
    paged_attention(**good)
    keys, values = batch.view.keys, batch.view.values
    for wrong in (
        {"q": batch.q[:, :5]},
        {"q": batch.q[..., :32]},
        {"q": batch.q.double()},
        {"q": batch.q.transpose(1, 2).contiguous().transpose(1, 2)},
        {"view": KVView(keys, values[:, :, :-1])},
        {"view": KVView(keys.int(), values.int())},
        {"view": KVView(keys.to(torch.int8), values)},
        {"view": KVView(keys[0], values[0])},
        {"block_table": batch.block_table.long()},
        {"block_table": batch.block_table[:1]},
        {"query_start": batch.query_start.long()},
        {"query_start": batch.query_start[:-1]},
        {"context_lens": batch.context_lens[:, None]},
        {"window": 0},
        {"softcap": -1.0},
    ):
        with pytest.raises(KernelError):
            paged_attention(**{**good, **wrong})


def test_head_sizes_that_vectors_do_not_take_go_to_the_reference() -> None:
    batch = make_batch([(20, 2)], head_dim=12)
    assert torch.equal(run(native, batch).out, run(reference, batch).out)
