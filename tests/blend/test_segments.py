"""What may be asked of blending, and what is noted of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagoda.blend.progress import BlendProgress, row_charge
from pagoda.blend.segments import BlendSpec, Span
from pagoda.blend.select import choose
from pagoda.errors import InvalidRequest


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ratio": -0.1}, "blend.ratio"),
        ({"ratio": 1.1}, "ratio"),
        ({"ratio": float("nan")}, "ratio"),
        ({"min_confidence": 1.5}, "min_confidence"),
        ({"min_confidence": float("nan")}, "min_confidence"),
        ({"max_deviation": -1.0}, "max_deviation"),
        ({"max_deviation": float("nan")}, "max_deviation"),
        ({"spans": (Span(4, 9), Span(8, 12))}, "overlap"),
        ({"spans": (Span(8, 12), Span(0, 4))}, "in order"),
        ({"spans": (Span(8, 4),)}, "end where it begins"),
        ({"spans": (Span(-1, 4),)}, "end where it begins"),
    ],
)
def test_bad_specs_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        BlendSpec(**{"spans": (Span(0, 4),), **changes})  # type: ignore[arg-type]


def test_a_passage_alone_follows_what_begins_the_prompt() -> None:
    tokens = np.arange(100, 120)
    for span, alone in (
        (Span(8, 11), [100, 108, 109, 110]),
        (Span(1, 3), [100, 101, 102]),
        (Span(0, 3), [100, 101, 102]),  # it begins the prompt itself
    ):
        assert span.alone(tokens).tolist() == alone
        assert span.num_anchor_tokens == len(alone) - (span.stop - span.start)


def test_what_is_abandoned_is_a_prompt_like_any_other() -> None:
    progress = BlendProgress(BlendSpec((Span(4, 20), Span(25, 30))), 40, 0.25)
    progress.note(np.arange(4, 20), choose(torch.arange(16.0), 0.25, float("inf")))
    assert (progress.chunk(4, 8), progress.longest(8)) == (20, 32)
    progress.abandon(num_hit_tokens=2)
    assert (progress.num_blended, progress.num_recomputed) == (0, 0)
    assert progress.num_given_up == 40 - 4 - 12  # from the first passage on, all but what was reused
    assert (progress.num_raised, progress.num_whole) == (1, 1)
    assert [progress.chunk(position, 8) for position in (0, 4, 38, 40, 100)] == [8] * 5
    assert progress.charge(0, 50) == 50
    assert progress.longest(8) == 8


def test_empty_passages_are_none() -> None:
    assert BlendSpec((Span(3, 3), Span(3, 7), Span(7, 7))).spans == (Span(3, 7),)
    assert BlendSpec(()).spans == ()


def test_what_precedes_the_first_passage_is_a_chunk_of_its_own() -> None:
    progress = BlendProgress(BlendSpec((Span(10, 20), Span(25, 30))), 40)
    assert progress.chunk(0, 8) == 8
    assert progress.chunk(0, 64) == 10
    assert progress.chunk(8, 64) == 2
    assert progress.chunk(10, 64) == 64
    assert progress.chunk(27, 3) == 3


def test_rows_of_passages_take_less_of_a_step() -> None:
    assert row_charge(0.15, 30) == pytest.approx((1 + 0.15 * 29) / 30)
    assert row_charge(0.0, 30) == 1 / 8  # a step's rows have to fit into memory
    assert row_charge(0.15, 1) == row_charge(1.0, 30) == 1.0
    progress = BlendProgress(BlendSpec((Span(10, 50), Span(60, 80))), 90, 0.25)
    assert progress.longest(12) == 48
    assert progress.chunk(0, 12) == 10  # what precedes passages, alone
    assert progress.chunk(10, 5) == 20
    assert progress.chunk(45, 5) == 8  # 5 tokens at a quarter, 3 in full
    assert progress.chunk(70, 64) >= 20
    for position in range(95):
        for budget in (1, 2, 5, 64):
            count = progress.chunk(position, budget)
            assert count >= 1
            assert progress.charge(position, count) <= budget
            if position >= 10:
                assert progress.charge(position, count + 1) > budget
    assert progress.charge(88, 1) == progress.charge(95, 1) == progress.charge(20, 1) == 1
    plain = BlendProgress(BlendSpec((Span(10, 50),)), 90)
    assert all(plain.chunk(position, 7) == 7 for position in range(10, 100))


def test_what_is_noted_twice_counts_once() -> None:
    progress = BlendProgress(BlendSpec((Span(0, 10),)), 10)
    half = choose(torch.arange(4.0), 0.5, float("inf"))
    for _ in range(2):
        progress.note(np.array([2, 3, 4, 5]), half)
    assert (progress.num_blended, progress.num_recomputed) == (2, 2)
    assert (progress.num_raised, progress.num_whole) == (0, 0)
    progress.note(np.array([6, 7]), choose(torch.tensor([9.0, 9.0]), 0.0, 1.0))
    assert (progress.num_blended, progress.num_recomputed) == (2, 4)
    assert (progress.num_raised, progress.num_whole) == (1, 1)
