"""Narrowed: rows that go on alone compute what they compute among the others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pagoda.kernels import AttentionOutput
from pagoda.model.batch import ForwardBatch
from pagoda.model.decoder import Decoder
from pagoda.model.hooks import Narrowed
from tests.model import models
from tests.model.paged import PagedRun

VARIANTS = ["llama", "qwen2-mixed-windows", "gemma2", "gemma3"]


def decoder_of(variant: str, folder: Path) -> Decoder:
    return models.load(models.save(models.build(variant), folder))


class Narrow:
    """Drops rows after a layer."""

    needs_mass = False

    def __init__(self, layer: int, drop: list[int]) -> None:
        self.layer, self.drop = layer, drop
        self.batches: list[ForwardBatch] = []

    def before_attention(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch
    ) -> ForwardBatch:
        self.batches.append(batch)
        return batch

    def after_attention(self, layer: int, batch: ForwardBatch, output: AttentionOutput) -> Narrowed | None:
        if layer != self.layer:
            return None
        keep = torch.ones(len(batch.token_ids), dtype=torch.bool)
        keep[self.drop] = False
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
    assert now.query_start.tolist() == [0, 2, 4, 6, 7]
    assert now.context_lens.tolist() == [5, 8, 4, 1]  # up to and with the last row of each run
    assert now.positions.tolist() == [3, 4, 6, 7, 2, 3, 0]
    assert [now.block_tables[0][i].tolist() for i in range(4)] == [
        batch.block_tables[0][i].tolist() for i in (0, 0, 1, 2)
    ]
    assert now.slot_mapping[0].tolist() == batch.slot_mapping[0][keep].tolist()
    assert now.logits_rows.tolist() == [3, 5, 6]
    assert now.max_query_len == 2
    assert (now.query_start.dtype, now.context_lens.dtype) == (torch.int32, torch.int32)


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
    hook = Narrow(1, drop)
    found = run.step([(one, 40), (two, 40)], hook, all_logits=False)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert [len(batch.token_ids) for batch in hook.batches] == [80, 80] + [80 - len(drop)] * (len(hook.batches) - 2)


def test_rows_after_a_long_common_context_attend_to_it_together(tmp_path: Path) -> None:
    decoder = decoder_of("llama", tmp_path)
    run = PagedRun(decoder, num_blocks=64)
    sequence = run.add([i % 120 + 1 for i in range(100)])
    run.step([(sequence, 60)])
    expected = run.step([(sequence, 40)], all_logits=False)
    sequence.num_computed = 60
    found = run.step([(sequence, 40)], Narrow(1, list(range(0, 39, 2))), all_logits=False)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
