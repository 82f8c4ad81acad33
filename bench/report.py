"""What benchmarks share: medians and spreads, a table, a chart, and what machine it was."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path


def spread(values: Sequence[float]) -> dict[str, float]:
    """The median of a figure, with the least and the most."""
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table; all but the first column to the right."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def machine() -> str:
    """What the figures were taken on."""
    with open("/proc/cpuinfo") as file:
        models = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    model = models[0] if models else platform.machine()
    return (
        f"{os.cpu_count()} cores of {model}, Linux {platform.release()}, Python {platform.python_version()}"
    )


_ROW, _BAR, _LEFT, _WIDTH = 26, 17, 190, 760
_OURS, _THEIRS, _INK = "#1f6feb", "#9aa4b2", "#24292f"


def write_bars(
    path: Path, title: str, groups: Mapping[str, Mapping[str, float]], *, ours: str, note: str
) -> None:
    """A chart of bars as SVG: one group of bars for each way of measuring, each on its own scale.

    Args:
        path: The file.
        title: What is measured, with its unit.
        groups: Title of the group, name of the contender, figure.
        ours: What names of our own contenders begin with.
        note: A line below the chart.
    """
    parts: list[str] = []
    y = 44
    for name, bars in groups.items():
        parts.append(_text(12, y, name, weight="bold"))
        y += 10
        most = max(bars.values())
        for contender, value in bars.items():
            width = max(1.0, (_WIDTH - _LEFT - 110) * value / most)
            colour = _OURS if contender.startswith(ours) else _THEIRS
            parts.append(_text(_LEFT - 8, y + 14, contender, anchor="end"))
            parts.append(
                f'<rect x="{_LEFT}" y="{y + 1}" width="{width:.1f}" height="{_BAR}" rx="2" fill="{colour}"/>'
            )
            parts.append(_text(_LEFT + width + 6, y + 14, f"{value:,.0f}"))
            y += _ROW
        y += 24
    parts.append(_text(12, y, note, size=11))
    height = y + 14
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        f'font-family="system-ui, sans-serif"><rect width="100%" height="100%" fill="white"/>'
    )
    body = "\n".join([head, _text(12, 22, title, size=15, weight="bold"), *parts, "</svg>\n"])
    path.write_text(body)


def _text(
    x: float, y: float, text: str, *, size: int = 13, weight: str = "normal", anchor: str = "start"
) -> str:
    return (
        f'<text x="{x:.0f}" y="{y:.0f}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" '
        f'fill="{_INK}">{escape(text)}</text>'
    )
