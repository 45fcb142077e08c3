"""For all tests: random inputs are made at whatever speed a busy machine has, and no test hangs on a lucky draw."""

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("pagoda", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("pagoda")


@pytest.fixture(autouse=True)
def same_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests without a seed draw the same tokens in each run: one in some hundred would end an answer early."""
    monkeypatch.setattr("pagoda.model.sampler.secrets.randbits", lambda _: 1)
