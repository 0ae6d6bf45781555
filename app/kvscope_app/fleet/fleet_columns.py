"""Columns of the fleet table: titles, cell texts, and sort keys. Imports no Qt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvscope_app.fleet.map_picture import SIZE
from kvscope_app.session.state_text import STATE_TEXTS
from kvscope_app.ui.number_text import NOTHING, count, percent, plural, seconds
from kvscope_app.views.table import TableColumn
from kvscope_telemetry.collectors.external_engines import engine_name
from kvscope_telemetry.fleet.fleet_row import FleetRow
from kvscope_telemetry.messages.model_names import short_name
from kvscope_telemetry.source import SourceState

PADDING: Final = 14
_STATE_ORDER: Final = tuple(SourceState)


MAP, NAME, STATE, ENGINE, VERSION, MODEL, USAGE, RUNNING, WAITING, FIRST_TOKEN, HIT_RATE, PREEMPTIONS = range(12)
"""Indices of the fleet table's columns, from left to right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetColumn(TableColumn[[FleetRow]]):
    """Column of the fleet table. Without `key`, rows are sorted by the cell's text."""

    width: int = 0
    """Width in pixels at 100 % text size, or 0 to fill the space left by the other columns."""
    key: Callable[[FleetRow], float | None] | None = None


def state_text(row: FleetRow) -> str:
    word = STATE_TEXTS[row.state]
    return f"{word}: {row.reason}" if row.reason else word


def _number(
    title: str, tip: str, width: int, key: Callable[[FleetRow], float | None], text: Callable[[float], str]
) -> FleetColumn:
    def cell_text(row: FleetRow) -> str:
        value = key(row)
        return NOTHING if value is None else text(value)

    return FleetColumn(title, cell_text, tip, True, width=width, key=key)


def _first_token(row: FleetRow) -> str:
    return ("≤ " if row.is_first_token_bound else "") + seconds(row.first_token_s)


COLUMNS: Final = (
    FleetColumn(
        "Pool",
        lambda row: "" if row.bins is not None else NOTHING,
        "The block pool by address: held by requests, cached, free. Sorts by number of blocks",
        width=SIZE[0] + PADDING,
        key=lambda row: row.num_blocks,
    ),
    FleetColumn("Engine", lambda row: row.name),
    FleetColumn("State", state_text, width=150, key=lambda row: _STATE_ORDER.index(row.state)),
    FleetColumn("Kind", lambda row: engine_name(row.engine) or NOTHING, width=76),
    FleetColumn("Version", lambda row: row.version or NOTHING, width=90),
    FleetColumn("Model", lambda row: short_name(row.model) if row.model else NOTHING, width=130),
    _number(
        "KV in use",
        "The share of the pool that requests hold",
        84,
        lambda row: row.usage,
        lambda value: percent(value, 0),
    ),
    _number("Running", "Requests running now", 76, lambda row: row.num_running, count),
    _number("Waiting", "Requests waiting for blocks", 76, lambda row: row.num_waiting, count),
    FleetColumn(
        "First token",
        _first_token,
        "Median time to first token over the last minute",
        is_number=True,
        width=92,
        key=lambda row: row.first_token_s,
    ),
    _number(
        "Hit rate",
        "Share of the last minute's prompt tokens found in the prefix cache",
        76,
        lambda row: row.hit_rate,
        lambda value: percent(value, 0),
    ),
    _number(
        "Preempted/s",
        "Preemptions per second over the last minute",
        104,
        lambda row: row.preemptions_per_s,
        lambda value: f"{value:.2f}",
    ),
)
Key = tuple[float, str]


def sort_key(row: FleetRow, column: int) -> Key | None:
    """Return the value by which the cell is sorted, or None if it is unknown. Unknown values come last in both
    directions.
    """
    key = COLUMNS[column].key
    if key is not None:
        value = key(row)
        return None if value is None else (float(value), "")
    text = COLUMNS[column].text(row)
    return None if text == NOTHING else (0.0, text.casefold())


def fleet_row_tip(row: FleetRow) -> str:
    lines = [row.entry.address.text, state_text(row)]
    if row.num_blocks is not None:
        lines.append(plural(row.num_blocks, "block"))
    if row.bins is not None and row.entry.address.is_external:
        lines.append("kvscope assigns the cell positions: this engine does not report where its blocks are.")
    return "\n".join(lines)


def search_text(row: FleetRow) -> str:
    """Return the lower-case text in which the search field's words are looked up."""
    texts = (column.text(row) for column in COLUMNS if not column.is_number)
    return " ".join((row.entry.address.text, *texts)).casefold()
