"""Narrowed: rows that go on alone compute what they compute among the others."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from pagoda.model.batch import ForwardBatch
from pagoda.model.decoder import Decoder
from pagoda.model.hooks import Narrowed
from tests.model import models
from tests.model.paged import PagedRun

VARIANTS = ["llama", "qwen2-mixed-windows", "gemma2", "gemma3"]


def decoder_of(variant: str, folder: Path) -> Decoder:
    return models.load(models.save(models.build(variant), folder))


class Drop:
    """Drops rows at a layer."""

    def __init__(self, layer: int, rows: list[int]) -> None:
        self.layer, self.rows = layer, rows
        self.batches: list[ForwardBatch] = []

    def narrow(self, batch: ForwardBatch) -> Narrowed:
        keep = torch.ones(len(batch.token_ids), dtype=torch.bool)
        keep[self.rows] = False
        self.batches.append(batch)
        return Narrowed.to(batch, keep)


def test_the_rows_that_are_left(tmp_path: Path) -> None:
    run = PagedRun(decoder_of("llama", tmp_path), num_blocks=32)
    first, second, third = (run.add(list(range(1, length))) for length in (10, 8, 6))
    run.step([(first, 3)])
    batch = run.batch([(first, 5), (second, 4), (third, 1)], all_logits=False)
    keep = torch.tensor([1, 1, 0, 1, 1, 0, 0, 1, 1, 1], dtype=torch.bool)
    narrowed = Narrowed.to(batch, keep)
    now = narrowed.batch
    assert narrowed.rows.tolist() == [0, 1, 3, 4, 7, 8, 9]
    assert now.query_start.tolist() == [0, 4, 6, 7]
    assert now.context_lens.tolist() == batch.context_lens.tolist() == [8, 4, 1]
    assert now.positions.tolist() == [3, 4, 6, 7, 2, 3, 0]
    assert now.places is not None
    assert now.places.tolist() == [3, 4, 6, 7, 2, 3, 0]
    assert now.block_tables is batch.block_tables
    assert now.slot_mapping[0].tolist() == batch.slot_mapping[0][keep].tolist()
    assert now.logits_rows.tolist() == [3, 5, 6]
    assert (now.query_start.dtype, now.places.dtype) == (torch.int32, torch.int32)
    fewer = Narrowed.to(now, torch.tensor([0, 0, 1, 1, 0, 1, 1], dtype=torch.bool)).batch
    assert fewer.query_start.tolist() == [0, 2, 3, 4]
    assert fewer.places is not None
    assert fewer.places.tolist() == [6, 7, 3, 0]


@pytest.mark.parametrize("variant", VARIANTS)
def test_dropped_rows_change_nothing_where_their_kv_is_there_already(variant: str, tmp_path: Path) -> None:
    """A second pass over the same tokens may drop any rows: layers above read what the first pass wrote."""
    decoder = decoder_of(variant, tmp_path)
    tokens = [[(7 * i + j) % 120 + 1 for i in range(40)] for j in range(2)]
    run = PagedRun(decoder, num_blocks=64)
    one, two = (run.add(t) for t in tokens)
    expected = run.step([(one, 40), (two, 40)], all_logits=False)
    for sequence in (one, two):
        sequence.num_computed = 0
    drop = [*range(3, 20), 22, 24, 25, 30, *range(41, 78)]
    found = run.step([(one, 40), (two, 40)], narrowing=Drop(1, drop), all_logits=False)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_rows_after_a_long_common_context_attend_to_it_together(tmp_path: Path) -> None:
    decoder = decoder_of("llama", tmp_path)
    run = PagedRun(decoder, num_blocks=64)
    sequence = run.add([i % 120 + 1 for i in range(100)])
    run.step([(sequence, 60)])
    expected = run.step([(sequence, 40)], all_logits=False)
    sequence.num_computed = 60
    found = run.step([(sequence, 40)], narrowing=Drop(1, list(range(0, 39, 2))), all_logits=False)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_all_rows_of_a_pass_may_stop(tmp_path: Path) -> None:
    run = PagedRun(decoder_of("llama", tmp_path), num_blocks=64)
    sequence = run.add(list(range(1, 60)))
    batch = run.batch([(sequence, 40)], all_logits=False)
    batch = dataclasses.replace(batch, logits_rows=torch.empty(0, dtype=torch.int64))
    found = run.decoder.forward(batch, run.kv, run.group_of_layer, narrowing=Drop(1, list(range(40))))
    assert found.shape == (0, run.decoder.spec.vocab_size)


def test_requests_that_share_blocks_may_lose_rows(tmp_path: Path) -> None:
    """One prefix in two tables: rows that stay attend to it together, whichever were dropped before them."""
    run = PagedRun(decoder_of("llama", tmp_path), num_blocks=64)
    prefix = [i % 120 + 1 for i in range(60)]
    one, two = run.add([*prefix, *range(5, 25)]), run.add([*prefix, *range(40, 60)])
    run.step([(one, 60)])
    shared = len(one.blocks[0][: 60 // run.block_size])
    two.blocks[0][:shared] = one.blocks[0][:shared]
    two.num_computed = shared * run.block_size
    rest = 80 - two.num_computed
    expected = run.step([(one, 20), (two, rest)], all_logits=False)
    one.num_computed, two.num_computed = 60, 80 - rest
    drop = [0, 1, 2, 8, 20, 21, 25]
    found = run.step([(one, 20), (two, rest)], narrowing=Drop(1, drop), all_logits=False)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
