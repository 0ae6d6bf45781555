"""Formats the result of `bench kernels` as a table for a terminal, from its JSON form."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, Final

from kvscope_engine.text_table import table

HEADER: Final = ("operation", "case", "by", "us", "MB", "GB/s", "of a read", "TFLOP/s", "ours against it")
OURS: Final = "kvscope"


def text(report: dict[str, Any]) -> str:
    lines = ["\r\033[K" if sys.stderr.isatty() else "", headline(report), ""]
    lines.append(table(HEADER, [cells(row) for row in report["rows"]], left_aligned=(0, 1, 2)))
    lines += ["", *absences(report["absent"])]
    if report["stopped"]:
        lines.append(f"stopped, since the device takes no more after {report['stopped']}")
    return "\n".join(lines).rstrip()


def headline(report: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    threads = f"{report['threads']} thread" + "s" * (report["threads"] != 1)
    device_text = report["device"] if report["on"] == "cuda" else f"CPU, {threads}"
    driver = f"driver {report['driver']}, " if report["driver"] else ""
    return (
        f"{device_text}, {driver}{versions}; {report['date']}\n"
        f"{report['dtype']}, heads 32/8/128 and blocks of 16 unless named otherwise; medians of {report['rounds']} "
        f"rounds; a plain read takes {report['read_gb_per_s'] or 0.0:.1f} GB/s"
    )


def cells(row: dict[str, Any]) -> list[str]:
    flops = "" if row["tflop_per_s"] is None else f"{row['tflop_per_s']:.3g}"
    return [
        row["kernel"],
        row["case"],
        row["contender"],
        f"{row['time_us']:.1f}",
        f"{row['num_bytes'] / 1e6:.3g}",
        f"{row['gb_per_s']:.1f}",
        f"{row['share_of_read']:.0%}",
        flops,
        "" if row["contender"] == OURS else f"{row['ours_over_it']:.2f} x",
    ]


def absences(absent: list[dict[str, str]]) -> Iterator[str]:
    """Yield one line per absent contender and reason, with the number of cases in which it is absent and the first such
    case.
    """
    cases: dict[tuple[str, str], list[str]] = {}
    for each in absent:
        cases.setdefault((each["contender"], each["why"]), []).append(f"{each['kernel']} {each['case']}")
    for (name, why), cases_of_reason in cases.items():
        count = len(cases_of_reason)
        yield f"skipped: {name}: {why} ({count} case{'s' * (count > 1)}, first {cases_of_reason[0]})"
