"""The page of a replay: curves and tables in one HTML file that loads nothing, and the same curves as PNG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from pagoda.errors import ConfigError

_COLORS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5")
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 560, 320, 56, 44, 14

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1b1f; --soft: #75757f; --line: #d9d9df; --paper: #ffffff; }
@media (prefers-color-scheme: dark) { :root { --ink: #ececf1; --soft: #9a9aa5; --line: #3a3a44; --paper: #17171b; } }
body { margin: 0 auto; max-width: 76rem; padding: 1.5rem; background: var(--paper); color: var(--ink);
       font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.charts { display: flex; flex-wrap: wrap; gap: 1.5rem; } figure { margin: 0; flex: 1 1 24rem; }
svg { width: 100%; height: auto; } svg text { fill: var(--soft); font-size: 12px; }
figcaption { font-weight: 600; } .scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } th { color: var(--soft); font-weight: 500; }
.key { display: inline-block; margin-right: 1.2rem; } .key i { display: inline-block; width: 1.4rem; height: 3px;
       margin-right: .4rem; vertical-align: middle; }
"""


@dataclass(frozen=True, slots=True)
class Chart:
    """Curves over one axis: for each name its (x, y) points, by growing x. The names in `dashed` are bounds."""

    title: str
    x_label: str
    y_label: str
    curves: Mapping[str, Sequence[tuple[float, float]]]
    dashed: tuple[str, ...] = ()
    percent: bool = False


@dataclass(frozen=True, slots=True)
class Sheet:
    """A table of the page."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def write_page(path: Path, title: str, notes: Sequence[str], charts: Sequence[Chart], sheets: Sequence[Sheet]) -> None:
    """Write the HTML page.

    Raises:
        ConfigError: the file cannot be written.
    """
    figures = "".join(
        f"<figure><figcaption>{escape(c.title)}</figcaption>{_svg(c)}{_legend(c)}</figure>" for c in charts
    )
    text = (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style><h1>{escape(title)}</h1>"
        + "".join(f"<p>{escape(note)}</p>" for note in notes)
        + f'<div class="charts">{figures}</div>'
        + "".join(_table(sheet) for sheet in sheets)
        + "</html>\n"
    )
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error


def write_png(path: Path, charts: Sequence[Chart]) -> None:
    """Draw the charts side by side with matplotlib.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise ConfigError("a PNG needs matplotlib: pip install 'pagoda-kv[bench]'; --html needs nothing") from error
    figure, axes = pyplot.subplots(1, len(charts), figsize=(6 * len(charts), 4.2), squeeze=False)
    for axis, chart in zip(axes[0], charts, strict=True):
        for name, points in chart.curves.items():
            style: dict[str, Any] = {"marker": "o", "markersize": 3}
            if name in chart.dashed:
                style = {"color": "gray", "linestyle": (0, _dashes(chart, name))}
            factor = 100 if chart.percent else 1
            axis.plot([x for x, _ in points], [factor * y for _, y in points], label=name, **style)
        axis.set(title=chart.title, xlabel=chart.x_label, ylabel=chart.y_label, ylim=(0, None))
        axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=120, format="png")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        pyplot.close(figure)


def _svg(chart: Chart) -> str:
    points = [point for curve in chart.curves.values() for point in curve]
    x_max = max((x for x, _ in points), default=0) or 1
    y_step, y_max = _ticks(max((y for _, y in points), default=0) or 1)
    x_step, x_max = _ticks(x_max)

    def at(x: float, y: float) -> tuple[float, float]:
        across = _LEFT + x / x_max * (_WIDTH - _LEFT - 16)
        return round(across, 1), round(_HEIGHT - _BOTTOM - y / y_max * (_HEIGHT - _BOTTOM - _TOP), 1)

    out = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(chart.title)}">']
    right, bottom = at(x_max, 0)
    for number in range(round(y_max / y_step) + 1):
        _, y = at(0, number * y_step)
        label = f"{100 * number * y_step:.3g}%" if chart.percent else f"{number * y_step:.3g}"
        out.append(f'<line x1="{_LEFT}" y1="{y}" x2="{right}" y2="{y}" stroke="var(--line)"/>')
        out.append(f'<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{label}</text>')
    for number in range(round(x_max / x_step) + 1):
        x, _ = at(number * x_step, 0)
        out.append(f'<text x="{x}" y="{bottom + 16}" text-anchor="middle">{number * x_step:.4g}</text>')
    out.append(f'<text x="{(right + _LEFT) / 2}" y="{_HEIGHT - 6}" text-anchor="middle">{escape(chart.x_label)}</text>')
    for (name, curve), color in zip(chart.curves.items(), _colors(chart), strict=True):
        path = " ".join(f"{x},{y}" for x, y in (at(*point) for point in curve))
        dash = ' stroke-dasharray="{} {}"'.format(*_dashes(chart, name)) if name in chart.dashed else ""
        out.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"{dash}/>')
        for x, y in curve:
            across, up = at(x, y)
            shown = f"{100 * y:.1f}%" if chart.percent else f"{y:.3g}"
            tip = f"<title>{escape(name)}, {x:.4g}: {shown}</title>"
            out.append(f'<circle cx="{across}" cy="{up}" r="3.5" fill="{color}">{tip}</circle>')
    return "".join(out) + "</svg>"


def _dashes(chart: Chart, name: str) -> tuple[int, int]:
    """On and off of a bound's line."""
    return (6, 4) if chart.dashed.index(name) == 0 else (2, 3)


def _colors(chart: Chart) -> list[str]:
    solid = [name for name in chart.curves if name not in chart.dashed]
    return [
        "var(--soft)" if name in chart.dashed else _COLORS[solid.index(name) % len(_COLORS)] for name in chart.curves
    ]


def _legend(chart: Chart) -> str:
    keys = zip(chart.curves, _colors(chart), strict=True)
    return "".join(f'<span class="key"><i style="background:{color}"></i>{escape(name)}</span>' for name, color in keys)


def _table(sheet: Sheet) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in sheet.columns)
    rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in sheet.rows)
    title = f"<h2>{escape(sheet.title)}</h2>"
    return f'{title}<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _ticks(most: float) -> tuple[float, float]:
    """A round step, at most six of which reach `most`, and the least multiple of it that does."""
    decade = 10.0 ** math.floor(math.log10(most / 5))
    step = next(decade * round_ for round_ in (1, 2, 2.5, 5, 10) if most / 5 <= decade * round_ * 1.0001)
    return step, step * max(1, math.ceil(most / step - 1e-9))
