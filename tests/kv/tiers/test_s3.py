"""The object tier on a real S3 server: its address, conditional puts, and a server that dies or hangs and comes back.

The contract suite runs on the same server.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import pytest

pytest.importorskip("obstore", reason="the object tier needs the extra 'object'")

import obstore
from obstore.exceptions import AlreadyExistsError

from pagoda.errors import TierUnavailable
from pagoda.kv.tiers import object as object_tier
from pagoda.kv.tiers.object import ObjectTier
from pagoda.kv.tiers.records import Failed, Found, Missing, Stored
from pagoda.kv.tiers.spec import open_tier, parse_tier
from tests.kv.tiers.kit import KIB, Clock, get, record, rid, s3_server
from tests.kv.tiers.s3 import S3Server
from tests.waiting import PATIENCE_S

TIMEOUT_S = 1
DEADLINE_S = 8.0  # on a busy machine


@pytest.fixture
def mortal() -> Iterator[S3Server]:
    """The server of all tests, which runs on afterwards."""
    server = s3_server()
    yield server
    if server.process is None:
        server.start()


T = TypeVar("T", bound=Sequence[object])


def once_warm(call: Callable[[], T]) -> T:
    """The first answer without an error: a server that just came up fails some requests."""
    end = time.monotonic() + PATIENCE_S
    while isinstance((answer := call())[0], Failed) and time.monotonic() < end:
        time.sleep(0.2)
    return answer


def within_deadline(started: float) -> bool:
    return time.monotonic() - started < DEADLINE_S


def test_an_address_and_the_usual_variables_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    server = s3_server()
    obstore.put(server.store("by-address"), "made", b"")
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    line = parse_tier("s3://by-address/some/prefix")
    with open_tier(line) as one, open_tier(line) as two:
        assert one.put([record(n, 200 * KIB) for n in range(3)]) == [Stored(200 * KIB)] * 3
        assert get(two, rid(1), 200 * KIB) in [
            (Found(200 * KIB), record(1, 200 * KIB).data),
            (Missing(), bytes(200 * KIB)),  # `two` looks again after some seconds
        ]
    with open_tier(line) as three:
        assert get(three, rid(2), 200 * KIB) == (Found(200 * KIB), record(2, 200 * KIB).data)
    with pytest.raises(TierUnavailable, match="cannot be listed"):
        open_tier(parse_tier("s3://no-such-bucket/x"))


def test_no_object_is_ever_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two writers that come upon the same name: the second one's put fails, and the first one's record stays."""
    store = s3_server().store("conditional")
    obstore.put(store, "name", b"first")
    with pytest.raises(AlreadyExistsError):
        obstore.put(store, "name", b"second", mode="create")
    monkeypatch.setattr(object_tier.secrets, "token_hex", lambda _: "0123456789abcdef")
    one, two = (ObjectTier(store, "writers", clock=Clock(1e9)) for _ in range(2))
    assert one.put([record(0)]) == [Stored(8 * KIB)]
    assert isinstance(two.put([record(1)])[0], Failed)
    assert two.usage().used_bytes == 0
    with ObjectTier(store, "writers") as three:
        assert get(three, rid(0), 8 * KIB) == (Found(8 * KIB), record(0).data)


@pytest.mark.slow
def test_a_server_that_dies_fails_calls_at_once_and_is_used_again_when_it_is_back(mortal: S3Server) -> None:
    store = mortal.store("mortal")
    obstore.put(store, "made", b"")
    tier = ObjectTier(store, "dying", refresh_s=0.0)
    assert once_warm(lambda: tier.put([record(n) for n in range(3)])) == [Stored(8 * KIB)] * 3
    mortal.kill()
    started = time.monotonic()
    assert isinstance(tier.put([record(7)])[0], Failed)
    assert isinstance(get(tier, rid(1))[0], Failed)
    with pytest.raises(TierUnavailable):
        tier.lookup([rid(1)])
    assert within_deadline(started)
    mortal.start()
    assert tier.lookup([rid(1)]) == [Found(8 * KIB)]
    assert once_warm(lambda: get(tier, rid(1), 8 * KIB)) == (Found(8 * KIB), record(1).data)
    assert once_warm(lambda: tier.put([record(7)])) == [Stored(8 * KIB)]
    with ObjectTier(store, "dying") as other:
        assert sorted(info.id.key for info in other.scan()) == sorted(rid(n).key for n in (0, 1, 2, 7))
        assert other.usage().used_bytes == tier.usage().used_bytes


@pytest.mark.slow
def test_a_server_that_hangs_costs_no_more_than_the_deadline(mortal: S3Server) -> None:
    obstore.put(mortal.store("mortal"), "made", b"")
    tier = ObjectTier(mortal.store("mortal", TIMEOUT_S), "hanging", refresh_s=3600.0)
    assert once_warm(lambda: tier.put([record(0)])) == [Stored(8 * KIB)]
    assert mortal.process is not None
    mortal.process.send_signal(signal.SIGSTOP)
    try:
        for call in (lambda: tier.put([record(1)])[0], lambda: get(tier, rid(0))[0]):
            started = time.monotonic()
            assert isinstance(call(), Failed)
            assert within_deadline(started)
    finally:
        mortal.process.send_signal(signal.SIGCONT)
    assert once_warm(lambda: get(tier, rid(0), 8 * KIB)) == (Found(8 * KIB), record(0).data)
