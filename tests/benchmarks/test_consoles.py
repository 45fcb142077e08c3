"""What benchmarks print."""

from __future__ import annotations

import pytest
from rich.table import Table

from benchmarks import consoles


def test_a_table_is_not_cut_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    figures = [f"{number:.3f} [{number - 1:.3f}, {number + 1:.3f}]" for number in range(6)]
    table = Table(*["figure"] * len(figures))
    table.add_row(*figures)
    consoles.results().print(table)
    consoles.progress().print(table)
    printed = capsys.readouterr()
    for text in (printed.out, printed.err):
        assert all(figure in text for figure in figures)
