"""Qt model of the request table. Data is stored and sorted in numpy columns; cell texts are formatted when painted.

A refresh may assign another request to a table row instead of moving rows, so that the scroll position is stable.
`key_at` returns the request of a row; the view stores its selection by request.
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

from kvscope_app.ui.clock_text import clock_text
from kvscope_app.ui.number_text import NOTHING, count, percent, seconds, short
from kvscope_app.ui.plain_text import plain_tip
from kvscope_app.ui.theme import DARK, Theme, owner_color
from kvscope_app.views.requests.request_rows import NOT_YET, RequestQuery, judge_requests, latencies_s, order_rows
from kvscope_app.views.table import LEFT, RIGHT, Index, TableColumn, TableHead, TableModel
from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.request_log import Ending, RequestColumns
from kvscope_telemetry.slo import GoalResults, Goals, missed_goals_text

PROGRESS_ROLE: Final = Qt.ItemDataRole.UserRole + 1
"""Item role of the share of `max_tokens` that has been generated at the time shown, 0 to 1."""
_DISPLAY: Final = int(Qt.ItemDataRole.DisplayRole)
_ALIGNMENT: Final = int(Qt.ItemDataRole.TextAlignmentRole)
_FOREGROUND: Final = int(Qt.ItemDataRole.ForegroundRole)
_DECORATION: Final = int(Qt.ItemDataRole.DecorationRole)
_PROGRESS: Final = int(PROGRESS_ROLE)
_TOOL_TIP: Final = int(Qt.ItemDataRole.ToolTipRole)
_ROLES: Final = frozenset((_DISPLAY, _ALIGNMENT, _FOREGROUND, _DECORATION, _PROGRESS, _TOOL_TIP))
"""Item roles with data, as integers, because comparing Qt's enumerations takes longer than the remainder of `data`."""
_INITIAL_SORT_ORDER: Final = Qt.ItemDataRole.InitialSortOrderRole

_STATE_COLORS: Final = {
    RequestState.WAITING: "warn",
    RequestState.RUNNING: "good",
    RequestState.PREEMPTED: "bad",
    RequestState.FINISHED: "muted",
    RequestState.UNKNOWN: "muted",
}
_ENDING_COLORS: Final = {Ending.ABORTED: "warn", Ending.REFUSED: "bad"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestColumn(TableColumn[[RequestColumns, int]]):
    """Column of the request table. `sort_by` is the field of `RequestColumns` by which the table is sorted when the
    user clicks the column's title.
    """

    sort_by: str
    is_worst_first: bool = False
    """Whether the first click on the title sorts in descending order."""


def _state_text(columns: RequestColumns, row: int) -> str:
    code = int(columns.state[row])
    if code == NOT_YET:
        return "later"
    state = RequestState(code)
    if state is RequestState.FINISHED:
        return _ending_text(columns, row)
    computed, prompt = int(columns.num_computed_tokens[row]), int(columns.num_prompt_tokens[row])
    if state is RequestState.RUNNING and not columns.num_output_now[row] and computed < prompt:
        return f"prefill {computed / prompt:.0%}"
    return state.name.lower()


def _ending_text(columns: RequestColumns, row: int) -> str:
    """Return how the request ended. A request that generated its maximum of tokens counts as finished if its end is
    unknown.
    """
    ending, limit = Ending(int(columns.ending[row])), int(columns.max_tokens[row])
    if ending is Ending.UNKNOWN and limit and columns.num_output_tokens[row] >= limit:
        ending = Ending.FINISHED
    return "ended" if ending is Ending.UNKNOWN else ending.name.lower()


def _output_text(columns: RequestColumns, row: int) -> str:
    limit = int(columns.max_tokens[row])
    num_generated = count(int(columns.num_output_tokens[row]))
    return f"{num_generated} / {count(limit)}" if limit else num_generated


def _count_of(name: str) -> Callable[[RequestColumns, int], str]:
    return lambda columns, row: count(int(getattr(columns, name)[row]))


def _prompt_text(columns: RequestColumns, row: int) -> str:
    """Return the number of prompt tokens. It is unknown if the request was aborted before its prompt was tokenized."""
    value = int(columns.num_prompt_tokens[row])
    return count(value) if value else NOTHING


def _seconds_of(name: str) -> Callable[[RequestColumns, int], str]:
    return lambda columns, row: seconds(float(getattr(columns, name)[row]))


def _tpot_text(columns: RequestColumns, row: int) -> str:
    speed = float(columns.tokens_per_s[row])
    return seconds(1 / speed) if speed > 0 else NOTHING


def _speed_text(columns: RequestColumns, row: int) -> str:
    value = float(columns.tokens_per_s[row])
    return f"{short(value)} tok/s" if np.isfinite(value) else NOTHING


def _cached_text(columns: RequestColumns, row: int) -> str:
    value, share = int(columns.num_cached_tokens[row]), float(columns.cached_share[row])
    return f"{count(value)} ({percent(share, 0)})" if value and np.isfinite(share) else NOTHING


def _preempted_text(columns: RequestColumns, row: int) -> str:
    value = int(columns.num_preemptions[row])
    return f"{value} ×" if value else NOTHING


def _arrival_text(columns: RequestColumns, row: int) -> str:
    return clock_text(int(columns.arrival_ns[row]))


def _id_text(columns: RequestColumns, row: int) -> str:
    return columns.request_ids[row]


def _adapter_text(columns: RequestColumns, row: int) -> str:
    return columns.adapters[row] or NOTHING


def _client_text(columns: RequestColumns, row: int) -> str:
    value = int(columns.client[row])
    return count(value) if value else NOTHING


def _column(
    title: str,
    sort_by: str,
    text: Callable[[RequestColumns, int], str],
    sample: str,
    tip: str,
    *,
    is_number: bool = True,
    is_worst_first: bool = False,
) -> RequestColumn:
    return RequestColumn(title, text, tip, is_number, sample, sort_by=sort_by, is_worst_first=is_worst_first)


COLUMNS: Final = (
    _column("#", "number", _count_of("number"), "00 000", "Request number in this engine"),
    _column(
        "State",
        "state",
        _state_text,
        "preempted",
        "State at the time shown: waiting, prefill, running, preempted, finished, aborted or refused; ended (reason "
        "not recorded); later (arrives after this time)",
        is_number=False,
    ),
    _column(
        "Total",
        "time_s",
        _seconds_of("time_s"),
        "00:00 min",
        "From the request's arrival to its end, or so far",
        is_worst_first=True,
    ),
    _column(
        "Queued",
        "queue_s",
        _seconds_of("queue_s"),
        "000.0 ms",
        "From the request's arrival until it first ran, or so far",
        is_worst_first=True,
    ),
    _column(
        "TTFT",
        "ttft_s",
        _seconds_of("ttft_s"),
        "000.0 ms",
        "From the request's arrival to its first token",
        is_worst_first=True,
    ),
    _column(
        "Per token",
        "tpot_s",
        _tpot_text,
        "000.0 ms",
        "Mean time per output token after the first (TPOT)",
        is_worst_first=True,
    ),
    _column(
        "Reason for the delay",
        "delay_s",
        lambda columns, row: "",
        "waited 00.0 s for blocks held by #00, #00",
        "Where the request's time went, the longest delay first. Sorts by the time in which the request was not served",
        is_number=False,
        is_worst_first=True,
    ),
    _column("Preempted", "num_preemptions", _preempted_text, "0 ×", "Number of preemptions", is_worst_first=True),
    _column(
        "Cached",
        "cached_share",
        _cached_text,
        "0 000 (00 %)",
        "Prompt tokens taken from the prefix cache, and their share of the prompt",
    ),
    _column("Arrived", "arrival_ns", _arrival_text, "00:00:00.000", "Time at which the request arrived"),
    _column("Prompt", "num_prompt_tokens", _prompt_text, "00 000", "Tokens of the prompt"),
    _column("Output", "num_output_tokens", _output_text, "0 000 / 0 000", "Tokens generated, of the maximum"),
    _column(
        "Blocks",
        "num_blocks",
        _count_of("num_blocks"),
        "0 000",
        "Blocks in the request's block tables at the time shown",
    ),
    _column("Speed", "tokens_per_s", _speed_text, "000.0 tok/s", "Output tokens per second since the first token"),
    _column(
        "Adapter", "adapters", _adapter_text, "Adapter 0000", "LoRA adapter that the request uses", is_number=False
    ),
    _column(
        "Client",
        "client",
        _client_text,
        "000",
        "Client that sent the request; clients are numbered in the order of their first requests",
    ),
    _column("Id", "request_ids", _id_text, "chat-00000000", "Id that the client gave the request", is_number=False),
)
_SIDES: Final = tuple(RIGHT if column.is_number else LEFT for column in COLUMNS)
_COLUMN_INDEX: Final = {column.title: index for index, column in enumerate(COLUMNS)}
OUTPUT_COLUMN: Final = _COLUMN_INDEX["Output"]
ADAPTER_COLUMN: Final = _COLUMN_INDEX["Adapter"]
"""Index of the column of LoRA adapters, which is hidden if no request has one."""
CLIENT_COLUMN: Final = _COLUMN_INDEX["Client"]
"""Index of the column of clients, which is hidden if there is only one client or the engine does not report clients."""
REASON_COLUMN: Final = _COLUMN_INDEX["Reason for the delay"]
_STATE_COLUMN: Final = _COLUMN_INDEX["State"]


class RequestModel(TableModel):
    table_head: ClassVar[TableHead] = TableHead.of(COLUMNS)

    reordering = Signal()
    """Emitted before rows are assigned to other requests. Any change of the selection between this signal and
    `reordered` is made by Qt, not by the user.
    """
    reordered = Signal()

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.theme: Theme = DARK
        self.waiting_reason_of: Callable[[int], str] = lambda number: ""
        """Function from request number to a sentence on why the request waits at the time shown; "" if it does not
        wait.
        """
        self.reason: Callable[[int], str] = lambda key: ""
        """Function from request key to the reason for the request's delay, in one line."""
        self.query = RequestQuery()
        self.epoch = 0
        """Epoch of the engine run that is shown. Request numbers passed to this model are numbers in this
        engine run.
        """
        self._sort_column = 0
        self._is_descending = True
        self._columns: RequestColumns | None = None
        self._rows = np.empty(0, np.intp)

    @property
    def columns(self) -> RequestColumns | None:
        """Columns of all requests, including those that do not match the query."""
        return self._columns

    @property
    def shown_rows(self) -> npt.NDArray[np.intp]:
        return self._rows

    def show_columns(self, columns: RequestColumns, epoch: int) -> None:
        self.epoch = epoch
        if not len(columns):
            self._remove_all_rows()
        elif self._columns is not None and len(self._rows):
            # Until `reorder`, each view row keeps its request, located in the new columns.
            indices = np.searchsorted(columns.key, self._columns.key[self._rows])
            self._rows = np.minimum(indices, len(columns) - 1).astype(np.intp)
        self._columns = columns
        self.reorder()

    def set_query(self, query: RequestQuery) -> None:
        """Show only requests that match `query`, and evaluate the goals in `query`."""
        if query != self.query:
            self.query = query
            self.reorder()

    @property
    def goals(self) -> Goals:
        return self.query.goals

    @property
    def judged(self) -> GoalResults | None:
        """Requests that met and that missed the goals; None if there are no goals or no requests."""
        return None if self._columns is None or not self.goals else judge_requests(self._columns, self.goals)

    def missed_goals(self, number: int) -> list[str]:
        """Return a text for each goal that request `number` missed. It must be finished and belong to the engine run
        shown.
        """
        columns, row = self._columns, self._index_of(number)
        if columns is None or row is None or not self.goals or not judge_requests(columns, self.goals).missed[row]:
            return []
        return missed_goals_text({name: float(each[row]) for name, each in latencies_s(columns).items()}, self.goals)

    def key_of(self, number: int) -> int | None:
        row = self._index_of(number)
        return None if row is None or self._columns is None else int(self._columns.key[row])

    def sort(self, column: int, order: Qt.SortOrder = Qt.SortOrder.AscendingOrder) -> None:
        self._sort_column, self._is_descending = column, order is Qt.SortOrder.DescendingOrder
        self.reorder()

    def reorder(self) -> None:
        if self._columns is None:
            return
        sort_by = COLUMNS[self._sort_column].sort_by
        rows = order_rows(self._columns, self.query, sort_by, self._is_descending)
        self.reordering.emit()
        self._replace(rows)
        if len(rows):
            self.dataChanged.emit(self.index(0, 0), self.index(len(rows) - 1, len(COLUMNS) - 1))
        self.reordered.emit()

    def key_at(self, row: int) -> int | None:
        if self._columns is None or not 0 <= row < len(self._rows):
            return None
        return int(self._columns.key[self._rows[row]])

    def number_at(self, row: int) -> int | None:
        if self._columns is None or not 0 <= row < len(self._rows):
            return None
        return int(self._columns.number[self._rows[row]])

    def epoch_at(self, row: int) -> int:
        return 0 if self._columns is None else int(self._columns.epoch[self._rows[row]])

    def request_id_at(self, row: int) -> str:
        return "" if self._columns is None else self._columns.request_ids[self._rows[row]]

    def is_finished(self, row: int) -> bool:
        return self._columns is not None and self._columns.state[self._rows[row]] == RequestState.FINISHED

    def is_active(self, row: int) -> bool:
        """Whether the request in table row `row` is waiting or running at the time shown."""
        ended_states = (RequestState.FINISHED, NOT_YET)
        return self._columns is not None and self._columns.state[self._rows[row]] not in ended_states

    def num_in(self, *states: RequestState) -> int:
        return 0 if self._columns is None else int(np.count_nonzero(np.isin(self._columns.state, states)))

    def json_at(self, row: int) -> str:
        """Return all values of the request in table row `row` as a JSON object; null means unknown."""
        if self._columns is None or not 0 <= row < len(self._rows):
            return ""
        index = int(self._rows[row])
        document: dict[str, object] = {}
        for name in (field.name for field in fields(self._columns) if field.name != "key"):
            value = getattr(self._columns, name)[index]
            plain = value if isinstance(value, str) else value.item()
            document[name] = None if isinstance(plain, float) and not np.isfinite(plain) else plain
        code = int(self._columns.state[index])
        document["state"] = "later" if code == NOT_YET else RequestState(code).name.lower()
        document["ending"] = Ending(int(self._columns.ending[index])).name.lower()
        document["reason"] = self.reason(int(self._columns.key[index]))
        return json.dumps(document, ensure_ascii=False, indent=2)

    def row_of(self, number: int) -> int | None:
        """Return the table row of request `number` of the engine run shown, or None if it does not match the query."""
        index = self._index_of(number)
        found = np.flatnonzero(self._rows == index) if index is not None else np.empty(0, np.intp)
        return int(found[0]) if found.size else None

    def row_with(self, key: int) -> int | None:
        """Return the table row of the request with `key`, or None if it does not match the query."""
        found = np.flatnonzero(self._columns.key[self._rows] == key) if self._columns is not None else self._rows[:0]
        return int(found[0]) if found.size else None

    def _index_of(self, number: int) -> int | None:
        if self._columns is None:
            return None
        found = np.flatnonzero((self._columns.number == number) & (self._columns.epoch == self.epoch))
        return int(found[0]) if found.size else None

    @property
    def has_adapters(self) -> bool:
        """Whether any request uses a LoRA adapter, also among those that do not match the query."""
        return self._columns is not None and any(self._columns.adapters)

    @property
    def has_clients(self) -> bool:
        """Whether there are several clients, also among requests that do not match the query."""
        return self._columns is not None and len(self._columns) > 0 and bool(np.ptp(self._columns.client))

    def client_at(self, row: int) -> int:
        """Return the client of the request in table row `row`, 0 if unknown."""
        return 0 if self._columns is None else int(self._columns.client[self._rows[row]])

    @property
    def num_requests(self) -> int:
        return 0 if self._columns is None else len(self._columns)

    def headerData(self, section: int, orientation: Qt.Orientation, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        if role == _INITIAL_SORT_ORDER and 0 <= section < len(COLUMNS):
            order = Qt.SortOrder
            return order.DescendingOrder if COLUMNS[section].is_worst_first else order.AscendingOrder
        return super().headerData(section, orientation, role)

    def rowCount(self, parent: Index = QModelIndex()) -> int:  # noqa: B008
        return 0 if parent.isValid() else len(self._rows)

    def data(self, index: Index, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        if role not in _ROLES:  # called thousands of times per second
            return None
        if self._columns is None or not 0 <= index.row() < len(self._rows):
            return None
        row, column = int(self._rows[index.row()]), index.column()
        if role == _DISPLAY and column == REASON_COLUMN:
            return self.reason(int(self._columns.key[row]))
        if role == _DISPLAY:
            return COLUMNS[column].text(self._columns, row)
        if role == _ALIGNMENT:
            return _SIDES[column]
        if role == _FOREGROUND and column == _STATE_COLUMN:
            return self.theme.color(self._state_color(row))
        if role == _TOOL_TIP:
            return self._tip(row, column)
        if role == _DECORATION and column == 0:
            return self._owner_color(row)
        return self._progress(row) if role == _PROGRESS and column == OUTPUT_COLUMN else None

    def _owner_color(self, row: int) -> QColor:
        assert self._columns is not None, "cells are asked for only when there are columns"
        return owner_color(int(self._columns.number[row]), self.theme)

    def _tip(self, row: int, column: int) -> str | None:
        assert self._columns is not None, "cells are asked for only when there are columns"
        if column == REASON_COLUMN:
            return plain_tip(self.reason(int(self._columns.key[row])).replace("; ", "\n"))
        is_shown = column == _STATE_COLUMN and self._columns.epoch[row] == self.epoch
        return plain_tip(self.waiting_reason_of(int(self._columns.number[row]))) if is_shown else None

    def _state_color(self, row: int) -> str:
        assert self._columns is not None, "cells are asked for only when there are columns"
        code, ending = int(self._columns.state[row]), Ending(int(self._columns.ending[row]))
        if code == RequestState.FINISHED and ending in _ENDING_COLORS:
            return _ENDING_COLORS[ending]
        return "muted" if code == NOT_YET else _STATE_COLORS[RequestState(code)]

    def _progress(self, row: int) -> float:
        assert self._columns is not None, "cells are asked for only when there are columns"
        return float(self._columns.num_output_now[row] / max(self._columns.max_tokens[row], 1))

    def _replace(self, rows: npt.NDArray[np.intp]) -> None:
        """Replace the table rows, inserting and removing only at the end. The caller emits dataChanged for all other
        rows.
        """
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

    def _remove_all_rows(self) -> None:
        if len(self._rows):
            self.beginRemoveRows(QModelIndex(), 0, len(self._rows) - 1)
            self._rows = np.empty(0, np.intp)
            self.endRemoveRows()
