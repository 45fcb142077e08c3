"""`pagoda cluster` where Ray cannot do its part."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest

from pagoda.cli.cluster import cluster
from pagoda.errors import ConfigError


def fake(monkeypatch: pytest.MonkeyPatch, name: str, **attributes: Any) -> ModuleType:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    for key, value in attributes.items():
        setattr(module, key, value)
    monkeypatch.setitem(sys.modules, name, module)
    return module


def test_a_ray_that_does_not_start_is_an_error_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def init(**settings: Any) -> None:
        asked.append(settings)
        raise Exception("timed out")

    fake(monkeypatch, "ray", init=init, serve=fake(monkeypatch, "ray.serve"))
    fake(monkeypatch, "pagoda.cluster.ray_app", application=None)
    with pytest.raises(ConfigError, match="Ray does not start: timed out"):
        cluster()
    with pytest.raises(ConfigError, match="Ray does not start"):
        cluster(ray_address="ray://elsewhere")
    assert asked == [{"include_dashboard": False, "_node_ip_address": "127.0.0.1"}, {"address": "ray://elsewhere"}]


def test_fewer_at_most_than_at_least_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, "ray")
    with pytest.raises(ConfigError, match="--max-replicas is 1"):
        cluster(replicas=2, max_replicas=1)
