"""Which rows are computed anew, and what the guard does."""

from __future__ import annotations

import pytest
import torch

from pagoda.blend.select import choose, deviations

NO_LIMIT = float("inf")


def kv(rows: int, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    return scale * torch.randn(rows, 2, 4), torch.randn(rows, 2, 4)


def test_what_is_equal_does_not_deviate_and_scales_do_not_matter() -> None:
    torch.manual_seed(0)
    keys, values = kv(6)
    assert deviations((keys, values), (keys, values)).tolist() == [0.0] * 6
    changed = keys.clone()
    changed[2] += 1.0
    small = deviations((changed, values), (keys, values))
    assert small.argmax() == 2
    assert (small[[0, 1, 3, 4, 5]] == 0).all()
    torch.testing.assert_close(deviations((100 * changed, values), (100 * keys, values)), small)
    # a pair without anything in common: |a - b|^2 is 2 on average where |b|^2 is 1
    far = deviations(kv(4000), kv(4000))
    assert far.mean() == pytest.approx(2.0, rel=0.05)


def test_keys_and_values_count_alike() -> None:
    torch.manual_seed(0)
    keys, values = kv(2, scale=50.0)
    off_keys, off_values = keys.clone(), values.clone()
    off_keys[0] += keys.norm(dim=(1, 2)).mean() / 8**0.5
    off_values[1] += values.norm(dim=(1, 2)).mean() / 8**0.5
    both = deviations((off_keys, off_values), (keys, values))
    assert both[0] == pytest.approx(float(both[1]), rel=0.3)


@pytest.mark.parametrize(("ratio", "count"), [(0.0, 0), (0.1, 1), (0.15, 2), (0.5, 5), (1.0, 10)])
def test_the_rows_that_deviate_most_are_chosen(ratio: float, count: int) -> None:
    deviation = torch.tensor([3.0, 9.0, 1.0, 7.0, 5.0, 0.0, 8.0, 2.0, 6.0, 4.0])
    choice = choose(deviation, ratio, NO_LIMIT)
    expected = sorted(range(10), key=lambda row: -deviation[row])[:count]
    assert choice.chosen.nonzero()[:, 0].tolist() == sorted(expected)
    assert choice.left == pytest.approx(sum(range(10 - count)) / 10)
    assert not choice.is_raised
    assert not choice.is_whole


def test_the_guard_chooses_more_until_little_is_left() -> None:
    deviation = torch.tensor([8.0, 4.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0])
    choice = choose(deviation, 0.1, 0.35)  # after 1 row 0.8 is left, after 2 0.4, after 3 0.3
    assert choice.chosen.tolist() == [True] * 3 + [False] * 7
    assert choice.left == pytest.approx(0.3)
    assert choice.is_raised
    assert not choice.is_whole


def test_the_guard_computes_all_where_blending_would_save_little() -> None:
    choice = choose(torch.ones(10), 0.1, 0.3)  # 7 of 10 would be needed
    assert choice.chosen.all()
    assert choice.is_raised
    assert choice.is_whole
    assert choice.left == 0.0
    asked = choose(torch.ones(10), 0.8, 0.3)  # whoever asks for as much gets it, and no more
    assert asked.chosen.sum() == 8
    assert not asked.is_raised


def test_what_is_not_finite_is_computed() -> None:
    deviation = torch.tensor([0.1, float("nan"), 0.2, float("inf"), 0.1, 0.1, 0.1, 0.1])
    choice = choose(deviation, 0.0, 1.0)
    assert choice.chosen[[1, 3]].all()
    assert choice.chosen.sum() == 2
    assert choice.is_raised


def test_no_rows() -> None:
    choice = choose(torch.empty(0), 0.15, 0.5)
    assert choice.chosen.tolist() == []
    assert choice.left == 0.0
    assert not choice.is_whole
