"""Attention to shared leading blocks: the same numbers as without sharing, and the sharing that batches really have."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from pagoda.errors import KernelError
from pagoda.kernels import SharedPrefix, find_shared_prefixes, native, reference
from tests.kernels.pools import PagedBatch, make_batch
from tests.kernels.test_attention import check, run

BLOCK = 4


def found(batch: PagedBatch) -> tuple[SharedPrefix, ...]:
    return find_shared_prefixes(batch.block_table, batch.query_start, batch.context_lens, BLOCK)


def random_sharing(seed: int) -> tuple[list[tuple[int, int]], tuple[SharedPrefix, ...]]:
    """Requests with prefixes in common, decodes and prefills, among others without."""
    draw = random.Random(seed)
    lens: list[tuple[int, int]] = []
    shared = []
    for _ in range(draw.randint(1, 3)):
        if draw.random() < 0.5:
            lens.append((draw.randint(1, 60), 1))
        count, num_blocks = draw.randint(1, 6), draw.choice([1, 2, 9, 40, 150])
        shared.append(SharedPrefix(len(lens), count, num_blocks))
        for _ in range(count):
            new = draw.choice([1, 1, 1, 2, 17, 60])
            lens.append((num_blocks * BLOCK + draw.choice([0, 1, 5, 30]) + new, new))
    return lens, tuple(shared)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(8))
def test_the_same_as_without_sharing(isa: str, seed: int, dtype: torch.dtype) -> None:
    lens, shared = random_sharing(seed)
    group, head_dim = random.Random(seed).choice([(1, 64), (3, 64), (4, 24), (8, 32)])
    batch = make_batch(lens, group=group, head_dim=head_dim, block_size=BLOCK, dtype=dtype, shared=shared, seed=seed)
    check(batch, shared=shared)
    check(batch, shared=shared[:1], softcap=3.0)


def test_many_rows_straddle_tiles(isa: str) -> None:
    """Fifty requests of three rows each: the shared tiles end in the middle of a request."""
    shared = (SharedPrefix(0, 50, 12),)
    lens = [(48 + i % 7 + 3, 3) for i in range(50)]
    check(make_batch(lens, block_size=BLOCK, dtype=torch.bfloat16, shared=shared), shared=shared)


def test_finds_what_the_batch_shares() -> None:
    shared = (SharedPrefix(1, 3, 6), SharedPrefix(5, 2, 4))
    lens = [(30, 1), (25, 1), (27, 2), (40, 5), (30, 1), (20, 1), (17, 1)]
    batch = make_batch(lens, block_size=BLOCK, shared=shared)
    assert found(batch) == shared


def test_finds_only_blocks_before_the_rows() -> None:
    """Two samples of one prompt that still compute its last block: that one is not behind all of their rows."""
    batch = make_batch([(25, 1), (25, 1)], block_size=BLOCK, shared=(SharedPrefix(0, 2, 6),))
    assert found(batch) == (SharedPrefix(0, 2, 6),)
    longer = dataclasses.replace(batch, query_start=torch.tensor([0, 4, 8], dtype=torch.int32))
    assert found(longer) == (SharedPrefix(0, 2, 5),)


def test_a_request_that_shares_little_does_not_shorten_the_prefix_of_the_others() -> None:
    batch = make_batch(
        [(90, 1)] * 2 + [(90, 1)] * 2, block_size=BLOCK, shared=(SharedPrefix(0, 2, 20), SharedPrefix(2, 2, 20))
    )
    batch.block_table[2:, :5] = batch.block_table[0, :5]
    assert found(batch) == (SharedPrefix(0, 2, 20), SharedPrefix(2, 2, 20))


@pytest.mark.parametrize("lens", [[(40, 1)], [(8, 1), (8, 1)], [(40, 1), (41, 1)]], ids=["alone", "short", "strangers"])
def test_finds_nothing(lens: list[tuple[int, int]]) -> None:
    assert found(make_batch(lens, block_size=BLOCK)) == ()


@pytest.mark.parametrize("backend", [native, reference])
@pytest.mark.parametrize(
    "shared",
    [
        (SharedPrefix(0, 3, 6),),  # more requests than there are
        (SharedPrefix(0, 2, 7),),  # beyond what both have before their rows
        (SharedPrefix(0, 0, 6),),
        (SharedPrefix(0, 2, 0),),
        (SharedPrefix(-1, 2, 1),),
        (SharedPrefix(0, 2, 6), SharedPrefix(1, 1, 6)),
    ],
    ids=str,
)
def test_refuses_what_is_not_shared(backend: object, shared: tuple[SharedPrefix, ...]) -> None:
    batch = make_batch([(25, 1), (28, 1)], block_size=BLOCK, shared=(SharedPrefix(0, 2, 6),))
    with pytest.raises(KernelError):
        run(backend, batch, shared=shared)


@pytest.mark.parametrize("backend", [native, reference])
def test_refuses_other_blocks_and_windows(backend: object) -> None:
    strangers = make_batch([(25, 1), (28, 1)], block_size=BLOCK)
    with pytest.raises(KernelError, match="other blocks"):
        run(backend, strangers, shared=(SharedPrefix(0, 2, 6),))
    batch = make_batch([(25, 1), (28, 1)], block_size=BLOCK, shared=(SharedPrefix(0, 2, 6),))
    with pytest.raises(KernelError, match="window"):
        run(backend, batch, window=8, shared=(SharedPrefix(0, 2, 6),))
