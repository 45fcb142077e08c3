"""`pagoda top` against a real server, and what it makes of a restart."""

from __future__ import annotations

import asyncio
import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

from pagoda import cli
from pagoda.cli.top import Reading, screen

from .test_cache_control import ask, folder, serve
from .test_dashboard import ADMIN, A, overview

__all__ = ["folder"]


def shown(before: Reading, now: Reading, width: int = 140) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(screen(before, now))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


async def test_what_it_shows(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    async with serve(folder, admin_key="root", tiers=("dram:1MiB",)) as live:
        first = Reading(0.0, await overview(live, ADMIN))
        assert "hit rate -" in shown(first, first)
        await ask(live, "At [bold]dawn[/]?")
        await ask(live, "At [bold]dusk[/]?")
        text = shown(first, Reading(2.0, await overview(live, ADMIN)))
        for part in (
            "0 running, 0 waiting, 2 finished",
            "acme",
            "count the boats",
            "diverged",
            "dram",
            "ok",
            "0/s",
        ):
            assert part in text
        own = Reading(2.0, await overview(live, A))
        run = {"tenant": "acme", "num_hits": 1234, "num_tokens": 56789, "preview": "a text of the operator's " * 9}
        long = Reading(2.0, {**own.state, "tree": [run]})
        for width in (60, 80, 100):
            (row,) = [line for line in shown(long, long, width).splitlines() if "56,789" in line]
            assert row.split()[:5] == ["acme", "1,234", "56,789", "a", "text"]  # it is the text that is cut
            assert len(row) <= width
        assert "count the boats" not in shown(own, own)
        monkeypatch.setattr(
            sys, "argv", ["pagoda", "top", "--once", "--every", "0.2", "--url", live.url.removeprefix("http://")]
        )
        monkeypatch.setenv("PAGODA_ADMIN_KEY", "root")
        with pytest.raises(SystemExit):
            await asyncio.to_thread(cli.main)
        assert "2 finished" in capsys.readouterr().out


async def test_rates_start_anew_with_the_server(folder: Path) -> None:
    async with serve(folder, admin_key="root", tiers=("dram:1MiB",)) as live:
        state = await overview(live, ADMIN)
        before = {**state, "server": {**state["server"], "started": 0}}
        assert "/s" not in shown(Reading(0.0, before), Reading(2.0, state))
