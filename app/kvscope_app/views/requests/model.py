"""The Qt model of the request table. Cells are formatted when they are looked at, never before.

Rows are positions; a refresh changes what they hold, so scrolling stays put. Which request a row holds is
`number_at`; the view keeps its selection by number.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt
from PySide6.QtCore import QModelIndex, QObject, Qt, Signal
from PySide6.QtGui import QColor

from kvscope_app.look.number_text import NOTHING, count, seconds, short
from kvscope_app.look.plain_text import plain_tip
from kvscope_app.look.theme import DARK, Theme, owner_color
from kvscope_app.session.request_times import Ending
from kvscope_app.views.requests.request_columns import Filter, RequestColumns, judged, order_rows, took_s
from kvscope_app.views.table import LEFT, RIGHT, Column, Index, TableHead, TableModel
from kvscope_telemetry.goals import Goals, Judged, missed_words
from kvscope_telemetry.messages.request_state import RequestState

PROGRESS_ROLE: Final = Qt.ItemDataRole.UserRole + 1
"""Share of `max_tokens` that is there, 0 to 1."""
_DISPLAY: Final = int(Qt.ItemDataRole.DisplayRole)
_ALIGNMENT: Final = int(Qt.ItemDataRole.TextAlignmentRole)
_FOREGROUND: Final = int(Qt.ItemDataRole.ForegroundRole)
_DECORATION: Final = int(Qt.ItemDataRole.DecorationRole)
_PROGRESS: Final = int(PROGRESS_ROLE)
_TIP: Final = int(Qt.ItemDataRole.ToolTipRole)
_TOLD_ROLES: Final = frozenset((_DISPLAY, _ALIGNMENT, _FOREGROUND, _DECORATION, _PROGRESS, _TIP))
"""As plain integers: comparing with Qt's enumerations costs more than what is told."""

_STATE_COLORS: Final = {
    RequestState.WAITING: "warn",
    RequestState.RUNNING: "good",
    RequestState.PREEMPTED: "bad",
    RequestState.FINISHED: "muted",
    RequestState.UNKNOWN: "muted",
}
_ENDING_COLORS: Final = {Ending.ABORTED: "warn", Ending.REFUSED: "bad"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestColumn(Column[[RequestColumns, int]]):
    """A column, and the array it sorts by."""

    sort_by: str


def _state_text(columns: RequestColumns, row: int) -> str:
    state = RequestState(int(columns.state[row]))
    if state is RequestState.FINISHED:
        return _ending_text(columns, row)
    computed, prompt = int(columns.num_computed_tokens[row]), int(columns.num_prompt_tokens[row])
    if state is RequestState.RUNNING and not columns.num_output_tokens[row] and computed < prompt:
        return f"prefill {computed / prompt:.0%}"
    return state.name.lower()


def _ending_text(columns: RequestColumns, row: int) -> str:
    """How it ended. One that wrote all it may has finished, whoever heard of it."""
    ending, limit = Ending(int(columns.ending[row])), int(columns.max_tokens[row])
    if ending is Ending.UNKNOWN and limit and columns.num_output_tokens[row] >= limit:
        ending = Ending.FINISHED
    return "ended" if ending is Ending.UNKNOWN else ending.name.lower()


def _output_text(columns: RequestColumns, row: int) -> str:
    limit = int(columns.max_tokens[row])
    made = count(int(columns.num_output_tokens[row]))
    return f"{made} / {count(limit)}" if limit else made


def _counted(name: str) -> Callable[[RequestColumns, int], str]:
    return lambda columns, row: count(int(getattr(columns, name)[row]))


def _timed(name: str) -> Callable[[RequestColumns, int], str]:
    return lambda columns, row: seconds(float(getattr(columns, name)[row]))


def _speed_text(columns: RequestColumns, row: int) -> str:
    value = float(columns.tokens_per_s[row])
    return f"{short(value)} tok/s" if np.isfinite(value) else NOTHING


def _cached_text(columns: RequestColumns, row: int) -> str:
    value = int(columns.num_cached_tokens[row])
    return count(value) if value else NOTHING


def _preempted_text(columns: RequestColumns, row: int) -> str:
    value = int(columns.num_preemptions[row])
    return f"{value} ×" if value else NOTHING


def _id_text(columns: RequestColumns, row: int) -> str:
    return columns.request_ids[row]


def _adapter_text(columns: RequestColumns, row: int) -> str:
    return columns.adapters[row] or NOTHING


def _column(
    title: str,
    sort_by: str,
    text: Callable[[RequestColumns, int], str],
    sample: str,
    tip: str,
    *,
    is_number: bool = True,
) -> RequestColumn:
    return RequestColumn(title, text, tip, is_number, sample, sort_by=sort_by)


COLUMNS: Final = (
    _column("#", "number", _counted("number"), "00 000", "Request number in this engine"),
    _column(
        "State",
        "state",
        _state_text,
        "preempted",
        "Waiting, prefill, running, preempted; finished, aborted or refused; ended (cause not seen)",
        is_number=False,
    ),
    _column(
        "Adapter",
        "adapters",
        _adapter_text,
        "Adapter 0000",
        "The LoRA adapter that it is computed with",
        is_number=False,
    ),
    _column("Prompt", "num_prompt_tokens", _counted("num_prompt_tokens"), "00 000", "Tokens of the prompt"),
    _column("Cached", "num_cached_tokens", _cached_text, "00 000", "Prompt tokens taken from the prefix cache"),
    _column("Output", "num_output_tokens", _output_text, "0 000 / 0 000", "Tokens generated, of the maximum"),
    _column("Blocks", "num_blocks", _counted("num_blocks"), "0 000", "Blocks in its block tables"),
    _column("Preempted", "num_preemptions", _preempted_text, "Preempted", "Number of preemptions"),
    _column("Speed", "tokens_per_s", _speed_text, "000.0 tok/s", "Output tokens per second since the first token"),
    _column("Time", "time_s", _timed("time_s"), "00:00 min", "From arrival to end"),
    _column("TTFT", "ttft_s", _timed("ttft_s"), "000.0 ms", "Time from arrival to first token"),
    _column("Queued", "queue_s", _timed("queue_s"), "000.0 ms", "From arrival until it first ran"),
    _column("Id", "request_ids", _id_text, "chat-00000000", "The client's id for it", is_number=False),
)
_SIDES: Final = tuple(RIGHT if column.is_number else LEFT for column in COLUMNS)
OUTPUT_COLUMN: Final = next(index for index, column in enumerate(COLUMNS) if column.title == "Output")
ADAPTER_COLUMN: Final = next(index for index, column in enumerate(COLUMNS) if column.title == "Adapter")
"""Hidden where no request has one."""
_STATE: Final = next(index for index, column in enumerate(COLUMNS) if column.title == "State")


class RequestModel(TableModel):
    """The requests that pass the filter, in the chosen order."""

    table_head: ClassVar[TableHead] = TableHead.of(COLUMNS)

    reordering = Signal()
    """Rows are about to hold other requests: what Qt does to its selection meanwhile is nobody's choice."""
    reordered = Signal()

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.theme: Theme = DARK
        self.why: Callable[[int], str] = lambda number: ""
        """Why a request waits, in a sentence."""
        self.filter = Filter.ALL
        self.text = ""
        self.goals: Goals = {}
        self._sort_column = 0
        self._descending = True
        self._columns: RequestColumns | None = None
        self._rows = np.empty(0, np.intp)

    def show_columns(self, columns: RequestColumns) -> None:
        """Show new values."""
        if not len(columns):
            self._empty()
        elif self._columns is not None and len(self._rows):
            # Every row goes on holding its request, in the new columns, until they are put in order.
            found = np.searchsorted(columns.number, self._columns.number[self._rows])
            self._rows = np.minimum(found, len(columns) - 1).astype(np.intp)
        self._columns = columns
        self.reorder()

    def set_filter(self, wanted: Filter, text: str) -> None:
        """Show those requests alone."""
        self.filter, self.text = wanted, text
        self.reorder()

    def set_goals(self, goals: Goals) -> None:
        """From now on judge by these."""
        self.goals = goals
        self.reorder()

    @property
    def judged(self) -> Judged | None:
        """Who kept the goals; None where there are none, or no requests."""
        return None if self._columns is None or not self.goals else judged(self._columns, self.goals)

    def missed_goals(self, number: int) -> list[str]:
        """Each goal that a finished request missed, in words."""
        columns = self._columns
        found = [] if columns is None else np.flatnonzero(columns.number == number).tolist()
        if columns is None or not found or not self.goals or not judged(columns, self.goals).missed[found[0]]:
            return []
        return missed_words({name: float(each[found[0]]) for name, each in took_s(columns).items()}, self.goals)

    def sort(self, column: int, order: Qt.SortOrder = Qt.SortOrder.AscendingOrder) -> None:
        self._sort_column, self._descending = column, order is Qt.SortOrder.DescendingOrder
        self.reorder()

    def reorder(self) -> None:
        """Filter and sort what is held."""
        if self._columns is None:
            return
        sort_by = COLUMNS[self._sort_column].sort_by
        rows = order_rows(self._columns, self.filter, self.text, sort_by, self._descending, self.goals)
        self.reordering.emit()
        self._replace(rows)
        if len(rows):
            self.dataChanged.emit(self.index(0, 0), self.index(len(rows) - 1, len(COLUMNS) - 1))
        self.reordered.emit()

    def number_at(self, row: int) -> int | None:
        """The request in view row `row`."""
        if self._columns is None or not 0 <= row < len(self._rows):
            return None
        return int(self._columns.number[self._rows[row]])

    def request_id_at(self, row: int) -> str:
        """What the client called the request in view row `row`."""
        return "" if self._columns is None else self._columns.request_ids[self._rows[row]]

    def is_finished(self, row: int) -> bool:
        """Whether the request in view row `row` has ended."""
        return self._columns is not None and self._columns.state[self._rows[row]] == RequestState.FINISHED

    def json_at(self, row: int) -> str:
        """All that is held of a view row as a JSON object; what is not known is null."""
        if self._columns is None or not 0 <= row < len(self._rows):
            return ""
        at = int(self._rows[row])
        document: dict[str, object] = {}
        for name in (field.name for field in fields(self._columns)):
            value = getattr(self._columns, name)[at]
            plain = value if isinstance(value, str) else value.item()
            document[name] = None if isinstance(plain, float) and not np.isfinite(plain) else plain
        document["state"] = RequestState(int(self._columns.state[at])).name.lower()
        document["ending"] = Ending(int(self._columns.ending[at])).name.lower()
        return json.dumps(document, ensure_ascii=False, indent=2)

    def row_of(self, number: int) -> int | None:
        """The view row of a request, None when the filter hides it."""
        if self._columns is None:
            return None
        found = np.flatnonzero(self._columns.number[self._rows] == number)
        return int(found[0]) if found.size else None

    @property
    def has_adapters(self) -> bool:
        """Whether any request, shown or not, is computed with one."""
        return self._columns is not None and any(self._columns.adapters)

    @property
    def num_requests(self) -> int:
        """Requests there are, shown or not."""
        return 0 if self._columns is None else len(self._columns)

    def rowCount(self, parent: Index = QModelIndex()) -> int:  # noqa: B008
        return 0 if parent.isValid() else len(self._rows)

    def data(self, index: Index, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        if role not in _TOLD_ROLES:  # asked thousands of times a second
            return None
        if self._columns is None or not 0 <= index.row() < len(self._rows):
            return None
        row, column = int(self._rows[index.row()]), index.column()
        if role == _DISPLAY:
            return COLUMNS[column].text(self._columns, row)
        if role == _ALIGNMENT:
            return _SIDES[column]
        if role == _FOREGROUND and column == _STATE:
            return self.theme.color(self._state_color(row))
        if role == _TIP:
            return plain_tip(self.why(int(self._columns.number[row]))) if column == _STATE else None
        if role == _DECORATION and column == 0:
            return self._owner_color(row)
        return self._progress(row) if role == _PROGRESS and column == OUTPUT_COLUMN else None

    def _owner_color(self, row: int) -> QColor:
        """The page map's colour of the request."""
        assert self._columns is not None, "cells are asked for only when there are columns"
        return owner_color(int(self._columns.number[row]), self.theme)

    def _state_color(self, row: int) -> str:
        assert self._columns is not None, "cells are asked for only when there are columns"
        state, ending = RequestState(int(self._columns.state[row])), Ending(int(self._columns.ending[row]))
        return _ENDING_COLORS.get(ending, _STATE_COLORS[state])

    def _progress(self, row: int) -> float:
        assert self._columns is not None, "cells are asked for only when there are columns"
        return float(self._columns.num_output_tokens[row] / max(self._columns.max_tokens[row], 1))

    def _replace(self, rows: npt.NDArray[np.intp]) -> None:
        """Rows are added and removed at the end; what the others hold is told by dataChanged."""
        before = len(self._rows)
        if len(rows) > before:
            self.beginInsertRows(QModelIndex(), before, len(rows) - 1)
            self._rows = np.concatenate((self._rows, rows[before:]))
            self.endInsertRows()
        elif len(rows) < before:
            self._rows = np.concatenate((rows, self._rows[len(rows) :]))
            self.beginRemoveRows(QModelIndex(), len(rows), before - 1)
            self._rows = rows
            self.endRemoveRows()
        self._rows = rows

    def _empty(self) -> None:
        if len(self._rows):
            self.beginRemoveRows(QModelIndex(), 0, len(self._rows) - 1)
            self._rows = np.empty(0, np.intp)
            self.endRemoveRows()
