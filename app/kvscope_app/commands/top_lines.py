"""Output of `kvscope top` as lines of a given width, for a terminal or as plain text. Imports no curses.

Decides the texts, the usage bar, and what is left out when there is little space. Removes control characters from texts
of engines.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Final, NamedTuple

from kvscope_app.commands.top_engine import RATE_S, WINDOW_S, EngineStatus, RequestReading
from kvscope_app.session.state_text import STATE_COLORS, STATE_TEXTS
from kvscope_app.ui.number_text import NOTHING, UNKNOWN, count, num_bytes, percent, plural, seconds
from kvscope_telemetry.printable import printable

_MAX_BAR_CELLS: Final = 60
_GAP: Final = "   "
_ASCII: Final = str.maketrans(
    {"█": "#", "▒": "=", "·": ".", "–": "-", "−": "-", "…": "~", "≤": "<", "µ": "u", "▸": ">", "▾": "v"}
)


class Style(IntEnum):
    PLAIN = 0
    BOLD = 1
    MUTED = 2
    GOOD = 3
    WARN = 4
    BAD = 5
    HELD = 6
    CACHED = 7
    SELECTED = 8


class Styled(NamedTuple):
    text: str
    style: Style = Style.PLAIN


Line = tuple[Styled, ...]
_STATE_STYLES: Final = {"good": Style.GOOD, "warn": Style.WARN, "bad": Style.BAD}
_COLUMNS: Final = (("request", 9), ("state", 10), ("tokens", 9), ("blocks", 8), ("age", 10))


def engine_lines(reading: EngineStatus, width: int, *, is_selected: bool = False) -> list[Line]:
    lines = [_heading(reading, is_selected=is_selected)]
    if reading.reason:
        lines += [
            (Styled(f"  {line}", Style.MUTED),) for line in _wrap(printable(reading.reason).split(), " ", width - 2)
        ]
    if reading.num_running is None and reading.usage is None and reading.device.utilization is None:
        return _clip(lines, width)
    lines += _pool_lines(reading, width)
    for items in (_rate_texts(reading), _device_texts(reading)):
        lines += [(Styled(f"  {line}"),) for line in _wrap(items, _GAP, width - 2)]
    return _clip(lines, width)


def short_line(reading: EngineStatus, width: int, *, is_selected: bool = False) -> Line:
    """Return one line about an engine, for screens with too little space for `engine_lines`."""
    usage = NOTHING if reading.usage is None else percent(reading.usage, 0)
    figures = f"  KV {usage}  {_count(reading.num_running)} running  {_count(reading.num_waiting)} waiting"
    mark, name, gap, state, *_ = _heading(reading, is_selected=is_selected)
    return _clip([(mark, name, gap, state, Styled(figures))], width)[0]


def request_lines(reading: EngineStatus, width: int, num_rows: int, order: str) -> list[Line]:
    """Return a heading and the first requests, at most `num_rows` lines. Empty if the engine's figures are unknown."""
    if num_rows < 2 or reading.num_running is None:
        return []
    if not reading.reports_requests:
        return _clip([(Styled("  This engine does not report individual requests.", Style.MUTED),)], width)
    if not reading.num_requests:
        return _clip([(Styled("  No requests.", Style.MUTED),)], width)
    titles = [
        f"{'▾' if title == order or (title, order) == ('request', 'number') else ''}{title}" for title, _ in _COLUMNS
    ]
    lines: list[Line] = [(Styled(_row_text(titles) + "  id", Style.BOLD),)]
    num_lines = num_rows - 1
    has_more = reading.num_requests > num_lines > 1
    listed = reading.requests[: num_lines - has_more]
    lines += [
        (Styled(_row_text(_request_cells(request)) + "  " + printable(request.request_id)),) for request in listed
    ]
    if has_more:
        lines.append((Styled(f"  and {plural(reading.num_requests - len(listed), 'more request')}", Style.MUTED),))
    return _clip(lines, width)


def legend_lines(width: int) -> list[Line]:
    text = (
        f"Tokens per second over the last {RATE_S} s; hit rate, time to first token and preemptions over "
        f"the last {WINDOW_S} s. Bar: █ held by requests, ▒ cached, · free."
    )
    return [(Styled(line, Style.MUTED),) for line in _wrap(text.split(), " ", width)]


def plain_text(lines: Iterable[Line]) -> str:
    return "\n".join("".join(piece.text for piece in line).rstrip() for line in lines)


def in_encoding(text: str, encoding: str) -> str:
    """Return `text`, or an ASCII replacement for it if it has a character that `encoding` lacks."""
    text = text.replace("\u202f", " ")
    try:
        text.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return text.translate(_ASCII).encode("ascii", "replace").decode("ascii")
    return text


def _heading(reading: EngineStatus, *, is_selected: bool) -> Line:
    style = _STATE_STYLES.get(STATE_COLORS[reading.state], Style.MUTED)
    description = "  ".join(
        printable(word) for word in (f"{reading.engine} {reading.version}".strip(), reading.model) if word
    )
    return (
        Styled("▸ " if is_selected else "  ", Style.BOLD),
        Styled(printable(reading.address), Style.SELECTED if is_selected else Style.BOLD),
        Styled("  "),
        Styled(STATE_TEXTS[reading.state], style),
        Styled(f"  {description}" if description else "", Style.MUTED),
    )


def _pool_lines(reading: EngineStatus, width: int) -> list[Line]:
    if not reading.num_blocks or reading.held_blocks is None:
        return [(Styled("  KV "), Styled(UNKNOWN, Style.MUTED))]
    usage = " " + percent(reading.usage, 0).rjust(5)
    num_cells = min(_MAX_BAR_CELLS, width - len("  KV []") - len(usage))
    lines: list[Line] = []
    if num_cells >= 4:
        num_held, num_cached, num_free = _bar_cells(reading, num_cells)
        padding = num_cells - num_held - num_cached - num_free
        lines.append(
            (
                Styled("  KV ["),
                Styled("█" * num_held, Style.HELD),
                Styled("▒" * num_cached, Style.CACHED),
                Styled("·" * num_free + " " * padding, Style.MUTED),
                Styled("]"),
                Styled(usage, _usage_style(reading.usage)),
            )
        )
    counts = ((reading.held_blocks, "held"), (reading.cached_blocks, "cached"), (reading.free_blocks, "free"))
    items = [*(f"{_count(number)} {word}" for number, word in counts), f"of {plural(reading.num_blocks, 'block')}"]
    return lines + [(Styled(f"  {line}"),) for line in _wrap(items, _GAP, width - 2)]


def _bar_cells(reading: EngineStatus, num_cells: int) -> tuple[int, int, int]:
    """Return how many of the bar's `num_cells` terminal cells show held, cached and free blocks.

    Each nonzero number of blocks gets at least one cell while cells remain.
    """
    total = max(reading.num_blocks or 0, 1)
    remaining, shares = num_cells, []
    for number in (reading.held_blocks, reading.cached_blocks):
        cells = min(remaining, max(round((number or 0) / total * num_cells), 1 if number else 0))
        shares.append(cells)
        remaining -= cells
    return shares[0], shares[1], remaining if reading.free_blocks is not None else 0


def _rate_texts(reading: EngineStatus) -> list[str]:
    bound = "≤ " * reading.is_first_token_bound if reading.first_token_p50_s is not None else ""
    hits = NOTHING if reading.hit_rate is None else percent(reading.hit_rate, 0)
    return [
        f"{_count(reading.num_running)} running",
        f"{_count(reading.num_waiting)} waiting",
        f"{_decimal(reading.preemptions_per_s, 2)} preempted/s",
        f"decode {_decimal(reading.decode_tokens_per_s)} tok/s",
        f"prefill {_decimal(reading.prefill_tokens_per_s)} tok/s",
        f"hit rate {hits}",
        f"first token p50 {bound}{seconds(reading.first_token_p50_s)}",
    ]


def _device_texts(reading: EngineStatus) -> list[str]:
    device = reading.device
    name = [printable(device.name)] if device.name else []
    memory_used = NOTHING if device.memory_used_bytes is None else num_bytes(device.memory_used_bytes)
    total = "" if device.memory_total_bytes is None else f" of {num_bytes(device.memory_total_bytes)}"
    power = NOTHING if device.power_watts is None else f"{device.power_watts:.0f} W"
    share = NOTHING if device.utilization is None else percent(device.utilization, 0)
    usage = f"engine uses {share} of the CPUs" if device.is_engines_share else f"busy {share}"
    return [*name, usage, f"memory {memory_used}{total}", f"power {power}"]


def _request_cells(request: RequestReading) -> list[str]:
    return [
        f"#{request.number}",
        request.state,
        count(request.num_tokens),
        count(request.num_blocks),
        seconds(request.age_s),
    ]


def _row_text(cells: Sequence[str]) -> str:
    return "".join(cell.rjust(width + 1) for cell, (_, width) in zip(cells, _COLUMNS, strict=True))


def _usage_style(usage: float | None) -> Style:
    return Style.BAD if (usage or 0) >= 0.98 else Style.WARN if (usage or 0) >= 0.9 else Style.PLAIN


def _count(number: int | None) -> str:
    return NOTHING if number is None else count(number)


def _decimal(value: float | None, digits: int = 1) -> str:
    if value is None:
        return NOTHING
    return count(value) if value >= 1000 else f"{value:.{digits}f}"


def _cell_width(letter: str) -> int:
    """Return the number of terminal cells that a character occupies: 0, 1 or 2."""
    if unicodedata.combining(letter):
        return 0
    return 2 if unicodedata.east_asian_width(letter) in "WF" else 1


def _wrap(texts: Sequence[str], gap: str, width: int) -> list[str]:
    """Join texts with `gap` into lines of at most `width` characters. A longer text has a line for itself."""
    lines: list[str] = []
    for word in texts:
        if lines and len(lines[-1]) + len(gap) + len(word) <= width:
            lines[-1] += gap + word
        else:
            lines.append(word)
    return lines


def _clip(lines: Iterable[Line], width: int) -> list[Line]:
    """Cut lines to `width` cells. A line that was cut ends in an ellipsis."""
    return [_clip_line(line, max(width, 1)) for line in lines]


def _clip_line(line: Line, width: int) -> Line:
    if sum(_cell_width(letter) for piece in line for letter in piece.text) <= width:
        return line
    remaining = width - 1
    pieces: list[Styled] = []
    for piece in line:
        kept_text = ""
        for letter in piece.text:
            remaining -= _cell_width(letter)
            if remaining < 0:
                return (*pieces, Styled(f"{kept_text}…", piece.style))
            kept_text += letter
        pieces.append(Styled(kept_text, piece.style))
    return tuple(pieces)
