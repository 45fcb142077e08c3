from __future__ import annotations

import numpy as np
import pytest

from pagoda.engine.prefill_speed import PrefillSpeed


def learned(flat_s: float, by_depth_s: float, noise: float = 0.0) -> PrefillSpeed:
    """After steps of a machine on which a token at depth d costs `flat_s + d * by_depth_s`."""
    speed, rng = PrefillSpeed(), np.random.default_rng(3)
    for step in range(60):
        start = 512 * (step % 5)
        seconds = 512 * (flat_s + (start + 256) * by_depth_s) * (1 + noise * rng.standard_normal())
        speed.note([(start, start + 512)], seconds)
    return speed


def test_a_guess_until_something_was_computed() -> None:
    assert PrefillSpeed().seconds_per_token(0, 100) > 0


def test_cost_grows_with_depth_as_it_was_seen_to() -> None:
    speed = learned(1e-3, 1e-6)
    assert speed.seconds_per_token(0, 512) == pytest.approx(1.256e-3, rel=0.01)
    assert speed.seconds_per_token(6000, 8000) == pytest.approx(8e-3, rel=0.01)


def test_noise_does_not_turn_the_line_around() -> None:
    speed = learned(1e-3, 0, noise=0.3)
    near, far = speed.seconds_per_token(0, 512), speed.seconds_per_token(4000, 8000)
    assert 0.6e-3 < near <= far < 4e-3


def test_a_step_of_several_prompts_counts_their_mean_depth() -> None:
    mixed, plain = PrefillSpeed(), PrefillSpeed()
    mixed.note([(0, 200), (400, 600)], 0.4)
    plain.note([(200, 600)], 0.4)
    assert mixed.seconds_per_token(0, 100) == plain.seconds_per_token(0, 100) == pytest.approx(1e-3)


def test_decodes_say_nothing_and_speed_changes_are_followed() -> None:
    speed = learned(1e-3, 1e-6)
    before = speed.seconds_per_token(0, 512)
    speed.note([(500, 501)] * 8, 5.0)
    assert speed.seconds_per_token(0, 512) == before
    for _ in range(40):
        speed.note([(0, 512)], 512 * 10e-3)
    assert speed.seconds_per_token(0, 512) == pytest.approx(10e-3, rel=0.2)
