"""Formats plain-text tables for terminals."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left_aligned: Collection[int] = (0,)) -> str:
    """Return `rows` under `header` as text without a trailing newline.

    `left_aligned`: indices of the left-aligned columns; the others are right-aligned.
    """
    lines = [list(header), *[list(row) for row in rows]]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    rule = ["─" * width for width in widths]
    return "\n".join(_line(line, widths, left_aligned) for line in [lines[0], rule, *lines[1:]])


def _line(cells: Sequence[str], widths: Sequence[int], left_aligned: Collection[int]) -> str:
    aligned = (
        cell.ljust(width) if column in left_aligned else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return "  ".join(aligned).rstrip()
