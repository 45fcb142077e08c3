"""Tables of figures on terminals of any width: a figure that lost digits would be another figure."""

from __future__ import annotations

from rich.console import Console
from rich.table import Column, Table


def counted(count: int, noun: str) -> str:
    """`1 hit`, `1,024 hits`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def print_tables(console: Console, *tables: Table) -> None:
    """Print tables, no figure cut. Figures are what stands right: where room is short, texts and headers wrap, and
    where that is not enough, lines are longer than the terminal is wide. Mutates the tables."""
    roomy = console.options.update(width=1000)
    for table in tables:
        if console.measure(table, options=roomy).maximum > console.width:
            for column in table.columns:
                if column.justify == "right":
                    column.width = _least_width(console, column)
            needed = console.measure(table, options=roomy).minimum
            if needed > console.width:
                table.width = needed
        console.print(table, crop=False)


def _least_width(console: Console, column: Column) -> int:
    """What the longest figure and the longest word of the header need."""
    figures = max((console.measure(cell).maximum for cell in column.cells), default=0)
    return max(figures, console.measure(column.header).minimum)
