"""Passages that nobody marked: cut alike wherever they stand."""

from __future__ import annotations

import random

import pytest

from pagoda.blend.chunks import MAX_CHARS, MIN_CHARS, cut_passages

WORDS = ["tide", "harbour", "count", "rope", "winch", "keel", "mast", "sail", "chart", "lamp"]


def text(paragraphs: int, seed: int, end: str = "\n\n") -> str:
    rng = random.Random(seed)
    return "".join(" ".join(rng.choices(WORDS, k=rng.randrange(20, 60))) + end for _ in range(paragraphs))


@pytest.mark.parametrize("end", ["\n\n", "\n", " "])
@pytest.mark.parametrize("paragraphs", [0, 1, 3, 200])
def test_pieces_are_the_text_within_bounds(end: str, paragraphs: int) -> None:
    whole = text(paragraphs, seed=1, end=end)
    pieces = cut_passages(whole)
    assert "".join(pieces) == whole
    assert all(MIN_CHARS <= len(piece) <= MAX_CHARS for piece in pieces[:-1])
    assert all(pieces)


def test_what_stands_before_moves_few_cuts() -> None:
    body = text(300, seed=2)
    alone = cut_passages(body)
    assert len(alone) > 15
    for before in ("An introduction of another length.\n\n", text(40, seed=3)):
        again = set(cut_passages(before + body))
        kept = sum(len(piece) for piece in alone if piece in again)
        assert kept > 0.8 * len(body)


def test_an_edit_changes_the_pieces_around_it_only() -> None:
    body = text(300, seed=4)
    edited = body[: len(body) // 2] + " changed " + body[len(body) // 2 :]
    before, after = set(cut_passages(body)), set(cut_passages(edited))
    assert len(before - after) <= 4
    assert len(after - before) <= 4


def test_a_text_without_any_end_is_cut_at_the_most() -> None:
    assert [len(piece) for piece in cut_passages("x" * (2 * MAX_CHARS + 5))] == [MAX_CHARS, MAX_CHARS, 5]
