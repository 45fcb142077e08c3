"""An engine in a process of its own: asked, paused, failing, ending, hanging; with the fake adapter."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.peers.engines import EngineSpec
from benchmarks.peers.messages import Request, Round
from benchmarks.peers.process import PeerError, PeerGoneError, PeerProcess
from tests.waiting import PATIENCE_S


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[PeerProcess]:
    spec = EngineSpec("fake", "fake", None)
    found = PeerProcess(spec, Path(sys.executable), tmp_path / "fake.log", timeout_s=PATIENCE_S)
    yield found
    found.close()


def ask(peer: PeerProcess, *tokens: int) -> list[list[int]]:
    return [result.tokens for result in peer.run(Round([Request([token], 2) for token in tokens], []))]


def test_it_answers_whatever_it_prints(peer: PeerProcess, tmp_path: Path) -> None:
    assert peer.load({"model": "none"}) == {"model": "none"}
    assert ask(peer, 7, 8) == [[0, 0], [1, 1]]
    assert "engines may print" in (tmp_path / "fake.log").read_text()


def test_it_goes_on_after_a_pause_and_uses_no_core_in_it(peer: PeerProcess) -> None:
    peer.load({})
    peer.pause()
    assert peer.idle_cpus(0.1) == 0
    peer.resume()
    assert ask(peer, 7) == [[0, 0]]


def test_an_error_is_told_and_the_engine_can_be_asked_again(peer: PeerProcess) -> None:
    peer.load({})
    with pytest.raises(PeerError, match="ValueError: token 0 is no token"):
        ask(peer, 0)
    assert ask(peer, 7) == [[0, 0]]


def test_a_process_that_ends_is_named_with_its_last_words(peer: PeerProcess) -> None:
    peer.load({})
    with pytest.raises(PeerGoneError, match=r"process of fake ended with status 1; .*fake.log ends with: the end"):
        ask(peer, 1)
    with pytest.raises(PeerGoneError):
        ask(peer, 7)


def test_a_process_that_takes_too_long_is_killed(peer: PeerProcess) -> None:
    peer.load({})
    peer._timeout_s = 0.3
    with pytest.raises(PeerGoneError, match="took over 0 s"):
        ask(peer, 2)
