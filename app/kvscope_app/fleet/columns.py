"""The columns of the fleet's table: their titles, what a cell says, and what it is sorted by. Knows no Qt."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Final

from kvscope_app.look.number_text import NOTHING, count, percent, plural, seconds
from kvscope_app.session.state_text import STATE_WORDS
from kvscope_telemetry.fleet.row import FleetRow
from kvscope_telemetry.messages.model_names import short_name
from kvscope_telemetry.source import SourceState

ENGINE_NAMES: Final = {"vllm": "vLLM", "sglang": "SGLang"}
_ORDER_OF_STATES: Final = tuple(SourceState)


class Column(IntEnum):
    """From left to right."""

    MAP = 0
    NAME = 1
    STATE = 2
    ENGINE = 3
    VERSION = 4
    MODEL = 5
    USAGE = 6
    RUNNING = 7
    WAITING = 8
    FIRST_TOKEN = 9
    HIT_RATE = 10
    PREEMPTIONS = 11


TITLES: Final = {
    Column.MAP: "Pool",
    Column.NAME: "Engine",
    Column.STATE: "State",
    Column.USAGE: "KV in use",
    Column.RUNNING: "Running",
    Column.WAITING: "Waiting",
    Column.FIRST_TOKEN: "First token",
    Column.HIT_RATE: "Hit rate",
    Column.PREEMPTIONS: "Preempted/s",
    Column.ENGINE: "Kind",
    Column.VERSION: "Version",
    Column.MODEL: "Model",
}
TIPS: Final = {
    Column.MAP: "The block pool by address: held by requests, cached, free. Sorts by number of blocks",
    Column.USAGE: "The share of the pool that requests hold",
    Column.RUNNING: "Requests running now",
    Column.WAITING: "Requests waiting for blocks",
    Column.FIRST_TOKEN: "Median time to first token over the last minute",
    Column.HIT_RATE: "Share of the last minute's prompt tokens found in the prefix cache",
    Column.PREEMPTIONS: "Preemptions per second over the last minute",
}
NUMBERS: Final = range(Column.USAGE, len(Column))

Key = tuple[float, str]
_KEYS: Final[dict[Column, Callable[[FleetRow], float | None]]] = {
    Column.MAP: lambda row: row.num_blocks,
    Column.USAGE: lambda row: row.usage,
    Column.RUNNING: lambda row: row.num_running,
    Column.WAITING: lambda row: row.num_waiting,
    Column.FIRST_TOKEN: lambda row: row.first_token_s,
    Column.HIT_RATE: lambda row: row.hit_rate,
    Column.PREEMPTIONS: lambda row: row.preemptions_per_s,
    Column.STATE: lambda row: _ORDER_OF_STATES.index(row.state),
}


def sort_key(row: FleetRow, column: Column) -> Key | None:
    """What it is compared by; None: unknown, which comes last whichever way is sorted."""
    if column in _KEYS:
        value = _KEYS[column](row)
        return None if value is None else (float(value), "")
    text = text_of(row, column)
    return None if text == NOTHING else (0.0, text.casefold())


def text_of(row: FleetRow, column: Column) -> str:
    """What a cell says."""
    if column is Column.MAP:
        return "" if row.bins is not None else NOTHING
    if column is Column.NAME:
        return row.name
    if column is Column.STATE:
        return state_text(row)
    if column is Column.USAGE:
        return NOTHING if row.usage is None else percent(row.usage, 0)
    if column is Column.RUNNING:
        return _count(row.num_running)
    if column is Column.WAITING:
        return _count(row.num_waiting)
    if column is Column.FIRST_TOKEN:
        return ("≤ " if row.is_first_token_bound else "") + seconds(row.first_token_s)
    if column is Column.HIT_RATE:
        return NOTHING if row.hit_rate is None else percent(row.hit_rate, 0)
    if column is Column.PREEMPTIONS:
        return NOTHING if row.preemptions_per_s is None else f"{row.preemptions_per_s:.2f}"
    if column is Column.ENGINE:
        return ENGINE_NAMES.get(row.engine, row.engine) or NOTHING
    if column is Column.VERSION:
        return row.version or NOTHING
    return short_name(row.model) if row.model else NOTHING


def state_text(row: FleetRow) -> str:
    """The state, and why where there is more to say."""
    word = STATE_WORDS[row.state]
    return f"{word}: {row.reason}" if row.reason else word


def tip_of(row: FleetRow) -> str:
    """All about it that has no column."""
    lines = [row.entry.address.text, state_text(row)]
    if row.num_blocks is not None:
        lines.append(plural(row.num_blocks, "block"))
    if row.bins is not None and row.entry.address.is_foreign:
        lines.append("kvscope assigns the cell positions: this engine does not report where its blocks are.")
    return "\n".join(lines)


def words_of(row: FleetRow) -> str:
    """What it is found by."""
    texts = (text_of(row, column) for column in (Column.NAME, Column.STATE, *Column) if column not in NUMBERS)
    return " ".join((row.entry.address.text, *texts)).casefold()


def _count(number: int | None) -> str:
    return NOTHING if number is None else count(number)
