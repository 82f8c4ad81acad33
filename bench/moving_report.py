"""What `bench/moving.py` found, as JSON, a table in markdown, and a chart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

_TITLES = {
    ("shards", "download"): "download, 64 MiB shards",
    ("checkpoint", "upload"): "upload, checkpoint of 8 files",
    ("small", "download"): "download, 4 KiB objects",
    ("small", "upload"): "upload, 4 KiB objects",
}


def write_report(output: Path, report: dict[str, Any]) -> str:
    """Write ``output`` with its three endings; the table."""
    table = markdown(report)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    output.with_suffix(".md").write_text(table)
    output.with_suffix(".svg").write_text(chart(report))
    return table


def markdown(report: dict[str, Any]) -> str:
    floors = ", ".join(f"{name} {rate:,.0f}" for name, rate in report["floors_MB_per_s"].items())
    machine = report["machine"]
    lines = [
        "# Moving bytes, beside the others",
        "",
        f"`make bench`: {report['rounds']} rounds in turn on {machine['cores']} cores that client and server share; medians."
        f" The machine itself, MB/s: {floors}.",
    ]
    for result in report["results"]:
        small = result["case"] == "small"
        unit, cost = ("objects/s", "CPU ms/object") if small else ("MB/s", "CPU s/GB")
        lines += [
            "",
            f"## {_title(result)}",
            "",
            f"{result['count']} × {result['bytes_each']:,} bytes.",
            "",
            f"| | {unit} | spread | {cost} | peak MiB | stager to it |",
            "| --- | ---: | ---: | ---: | ---: | ---: |",
        ]
        for name, entry in _ranked(result):
            scale = entry["objects_per_s"] / entry["MB_per_s"] if small else 1.0
            value = entry["objects_per_s"] if small else entry["MB_per_s"]
            spread = f"{entry['MB_per_s_low'] * scale:,.0f}–{entry['MB_per_s_high'] * scale:,.0f}"
            spent = entry["cpu_ms_per_object"] if small else entry["cpu_s_per_GB"]
            ratio = f"{entry['stager_to_it']:.2f}" if "stager_to_it" in entry else ""
            lines.append(
                f"| {name} | {value:,.0f} | {spread} | {spent:.2f} | {entry['rss_MiB']:.0f} | {ratio} |"
            )
    return "\n".join(lines) + "\n"


def chart(report: dict[str, Any]) -> str:
    """One group of bars a case, each as long as its share of the fastest."""
    height, shapes = 16, []
    for result in report["results"]:
        ranked = _ranked(result)
        if not ranked:
            continue
        most = ranked[0][1]["MB_per_s"]
        shapes.append(f'<text x="8" y="{height + 12}" class="title">{escape(_title(result))}</text>')
        height += 22
        for name, entry in ranked:
            small = result["case"] == "small"
            value = f"{entry['objects_per_s']:,.0f} objects/s" if small else f"{entry['MB_per_s']:,.0f} MB/s"
            width = max(1, round(400 * entry["MB_per_s"] / most))
            kind = "ours" if name == "stager" else "peer"
            shapes.append(
                f'<text x="128" y="{height + 11}" text-anchor="end">{escape(name)}</text>'
                f'<rect x="136" y="{height}" width="{width}" height="14" class="{kind}"/>'
                f'<text x="{142 + width}" y="{height + 11}">{value}</text>'
            )
            height += 18
        height += 12
    style = "text{font:11px sans-serif;fill:#444}.title{font-weight:bold;fill:#111}.ours{fill:#0b6e4f}.peer{fill:#a9b4bd}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 680 {height}" width="680" height="{height}">'
        f"<style>{style}</style>"
        f'<rect width="680" height="{height}" fill="#fff"/>' + "".join(shapes) + "</svg>\n"
    )


def _title(result: dict[str, Any]) -> str:
    return f"{_TITLES[result['case'], result['direction']]}, {result['server']}"


def _ranked(result: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return sorted(result["contenders"].items(), key=lambda item: -item[1]["MB_per_s"])
