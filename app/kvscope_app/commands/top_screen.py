"""Terminal screen of `kvscope top`: draws with curses and handles keys.

Owns the terminal while the screen is shown, and restores it in any case. `top_lines` formats the text.
"""

from __future__ import annotations

import curses
import locale
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from kvscope_app.commands.top_engine import ORDERS, EngineStatus, WatchedEngine
from kvscope_app.commands.top_lines import (
    Line,
    Style,
    Styled,
    engine_lines,
    in_encoding,
    legend_lines,
    request_lines,
    short_line,
)
from kvscope_telemetry.errors import BadInput

DRAW_S: Final = 0.5
_KEY_MS: Final = 200
_MIN_REQUEST_ROWS: Final = 6
"""Minimum number of rows for requests. If fewer would remain, all engines but the selected one are reduced to
one line.
"""
_KEYS: Final = "q quit   s sort"
_COLORS: Final = {
    Style.GOOD: curses.COLOR_GREEN,
    Style.WARN: curses.COLOR_YELLOW,
    Style.BAD: curses.COLOR_RED,
    Style.HELD: curses.COLOR_CYAN,
    Style.CACHED: curses.COLOR_BLUE,
}
_ATTRIBUTES: Final = {
    Style.BOLD: curses.A_BOLD,
    Style.MUTED: curses.A_DIM,
    Style.BAD: curses.A_BOLD,
    Style.SELECTED: curses.A_REVERSE,
}


def show(engines: Sequence[WatchedEngine]) -> None:
    """Draw until q is pressed. Raises BadInput for a terminal without cursor control, KeyboardInterrupt for Ctrl-C."""
    _require_terminal()
    with suppress(locale.Error):
        locale.setlocale(locale.LC_CTYPE, "")  # curses encodes text according to the locale
    os.environ.setdefault("ESCDELAY", "25")
    curses.wrapper(lambda window: _Screen(window, engines).run())


class _Screen:
    def __init__(self, window: curses.window, engines: Sequence[WatchedEngine]) -> None:
        self._window, self._engines = window, engines
        self._selected = 0
        self._orders = list(ORDERS)
        self._encoding = window.encoding
        self._attributes = _attributes()
        with suppress(curses.error):
            curses.curs_set(0)
        window.timeout(_KEY_MS)

    def run(self) -> None:
        last_read_s = 0.0
        readings: list[EngineStatus] = []
        while True:
            if time.monotonic() - last_read_s >= DRAW_S:
                readings = [engine.read(self._orders[0]) for engine in self._engines]
                last_read_s = time.monotonic()
            self._draw(readings)
            wait_start_s = time.monotonic()
            key = self._window.getch()
            if key in (ord("q"), ord("Q")):
                return
            if key in (curses.KEY_DOWN, ord("j")):
                self._selected = min(self._selected + 1, len(self._engines) - 1)
            elif key in (curses.KEY_UP, ord("k")):
                self._selected = max(self._selected - 1, 0)
            elif key in (ord("s"), ord("S")):
                self._orders.append(self._orders.pop(0))
                last_read_s = 0.0
            elif key == curses.KEY_RESIZE:
                curses.update_lines_cols()
            elif key < 0 and time.monotonic() - wait_start_s < _KEY_MS / 2_000:
                # If the terminal is gone, getch returns immediately: avoid a busy loop.
                time.sleep(_KEY_MS / 1_000)

    def _draw(self, readings: Sequence[EngineStatus]) -> None:
        height, width = self._window.getmaxyx()
        self._window.erase()
        for row, line in enumerate(self._lines(readings, width, height - 1)):
            self._write_line(row, line)
        engines = f"   ↑↓ jk engine ({self._selected + 1} of {len(readings)})" if len(readings) > 1 else ""
        self._write_line(height - 1, (Styled((_KEYS + engines)[: max(width - 1, 0)], Style.MUTED),))
        self._window.refresh()

    def _lines(self, readings: Sequence[EngineStatus], width: int, height: int) -> list[Line]:
        blocks = [engine_lines(each, width, is_selected=index == self._selected) for index, each in enumerate(readings)]
        if sum(map(len, blocks)) > height - _MIN_REQUEST_ROWS:
            blocks = [
                block if index == self._selected else [short_line(each, width)]
                for index, (block, each) in enumerate(zip(blocks, readings, strict=True))
            ]
        blocks = _visible_blocks(blocks, self._selected, max(height - _MIN_REQUEST_ROWS, 1))
        lines = [line for block in blocks for line in block]
        legend = legend_lines(width)
        has_legend = len(lines) + len(legend) + 1 <= height - _MIN_REQUEST_ROWS
        num_rows = height - len(lines) - 1 - (len(legend) + 1) * has_legend
        requests = request_lines(readings[self._selected], width, num_rows, self._orders[0])
        lines += [(), *requests] if requests else []
        if has_legend:
            lines += [()] * (height - len(lines) - len(legend)) + legend
        return lines[:height]

    def _write_line(self, row: int, line: Line) -> None:
        with suppress(curses.error):  # the last cell of a window cannot be written; the window may have shrunk
            self._window.move(row, 0)
            for text, style in line:
                self._window.addstr(in_encoding(text, self._encoding), self._attributes[style])


def _visible_blocks(blocks: list[list[Line]], selected: int, height: int) -> list[list[Line]]:
    """Return the selected engine's lines, and those of as many engines before and after it as fit in `height` lines."""
    first, last = selected, selected + 1
    num_lines = len(blocks[selected])
    while True:
        has_grown = False
        for index in (first - 1, last):
            if 0 <= index < len(blocks) and not first <= index < last and num_lines + len(blocks[index]) <= height:
                num_lines += len(blocks[index])
                first, last, has_grown = min(first, index), max(last, index + 1), True
        if not has_grown:
            return blocks[first:last]


def _attributes() -> dict[Style, int]:
    """Return the curses attributes of each style, without colours if the terminal has none or NO_COLOR is set."""
    attributes = {style: _ATTRIBUTES.get(style, curses.A_NORMAL) for style in Style}
    if not curses.has_colors() or os.environ.get("NO_COLOR"):
        return attributes
    background = 0
    with suppress(curses.error):
        curses.use_default_colors()
        background = -1
    with suppress(curses.error):
        for style, color in _COLORS.items():
            curses.init_pair(style, color, background)
            attributes[style] |= curses.color_pair(style)
    return attributes


def _require_terminal() -> None:
    name = os.environ.get("TERM", "")
    accepted = "a terminal with cursor control; `kvscope top --once` needs none"
    try:
        curses.setupterm(fd=sys.stdout.fileno())
        can_move = curses.tigetstr("cup")
    except curses.error:
        raise BadInput(f"TERM={name!r:.60} is not accepted: {accepted}") from None
    if not can_move:
        raise BadInput(f"TERM={name!r:.60} is not accepted: {accepted}")
