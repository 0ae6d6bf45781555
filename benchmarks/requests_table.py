"""Measure the Requests view with very many requests: milliseconds to show, sort, filter, find and paint them."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np
from PySide6.QtCore import Qt
from tests.simulated_engine.engine import SimulatedEngine

from benchmarks.command_line import run_benchmark
from benchmarks.desktop_harness import WINDOW_SIZE, open_desktop, print_result
from kvscope_app.session.session import Session
from kvscope_app.ui.theme import DARK
from kvscope_app.views.requests.request_model import COLUMNS
from kvscope_app.views.requests.requests_view import RequestsView
from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.messages.telemetry import Event, RequestInfo, RequestRows
from kvscope_telemetry.source import SourceState, SourceStatus, Update

_REQUESTS_PER_UPDATE: Final = 1_000
_SORTED_BY: Final = ("Total", "TTFT", "Per token", "Reason for the delay", "Id")
_STEP_NS: Final = 10_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--requests", type=int, default=100_000, metavar="N", help="finished requests (default: 100000)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    with open_desktop():
        print_result(measure_requests(args.requests, WINDOW_SIZE), args.json)
    return 0


class _ScriptedSource:
    """A source of updates that were prepared in advance."""

    name = "bench"
    status = SourceStatus(SourceState.LIVE)

    def __init__(self, updates: Iterator[Update]) -> None:
        self._updates = updates

    def poll_update(self) -> Update | None:
        return next(self._updates, None)

    def close(self) -> None: ...


def measure_requests(num_requests: int, size: tuple[int, int]) -> dict[str, object]:
    session = Session(_ScriptedSource(_updates(num_requests)))
    view = RequestsView(session)
    view.resize(*size)
    view.apply_theme(DARK)
    view.show()
    collect_ms = _milliseconds(lambda: _poll_all(session, num_requests))
    result: dict[str, object] = {"requests": num_requests, "collect_ms": collect_ms}
    result["show_ms"] = _milliseconds(view.draw_all)
    result["refresh_ms"] = max(_milliseconds(view.draw_all) for _ in range(5))
    titles = [column.title for column in COLUMNS]
    result["sort_ms_max"] = max(
        _milliseconds(lambda title=title: view.table.sortByColumn(titles.index(title), Qt.SortOrder.DescendingOrder))  # type: ignore[misc]
        for title in _SORTED_BY
    )
    view.goals.setText("ttft:200 tpot:50")
    view.goals.editingFinished.emit()
    result["filter_ms_max"] = max(
        _milliseconds(lambda name=name: view.filter.setCurrentText(name))  # type: ignore[misc]
        for name in ("Missed goals", "Preempted", "Ended", "All")
    )
    result["find_ms"] = _milliseconds(lambda: view.search.setText("bench-99"))
    view.search.clear()
    result["paint_ms_max"] = max(_milliseconds(view.grab) for _ in range(5))
    view.close()
    session.close()
    return result


def _poll_all(session: Session, num_requests: int) -> None:
    while len(session.requests.log) < num_requests:
        session.poll()


def _milliseconds(action: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    action()
    return round((time.perf_counter() - began_s) * 1e3, 1)


def _updates(num_requests: int) -> Iterator[Update]:
    """Yield a snapshot, then updates. In each update, `_REQUESTS_PER_UPDATE` requests arrive, start, get tokens
    and finish.
    """
    engine = SimulatedEngine(num_blocks=256, num_running=1, parked_share=0.0)
    yield Update(snapshot=engine.snapshot())
    random, now_ns = np.random.default_rng(0), engine.hello.time_ns
    for first in range(1, num_requests + 1, _REQUESTS_PER_UPDATE):
        numbers = np.arange(first, min(first + _REQUESTS_PER_UPDATE, num_requests + 1))
        now_ns += 20 * _STEP_NS
        yield _lifecycle_update(numbers, now_ns, random)


def _lifecycle_update(
    numbers: np.ndarray[tuple[int], np.dtype[np.int64]], now_ns: int, random: np.random.Generator
) -> Update:
    count = numbers.size
    prompts, outputs = random.integers(8, 4096, count), random.integers(2, 256, count)
    waits_ns, prefill_ns = random.integers(0, 4 * _STEP_NS, count), random.integers(_STEP_NS, 9 * _STEP_NS, count)
    started_ns, first_ns = now_ns - 18 * _STEP_NS + waits_ns, now_ns - 14 * _STEP_NS + prefill_ns
    infos = tuple(
        RequestInfo(
            number=number,
            request_id=f"bench-{number}",
            arrival_ns=now_ns - 18 * _STEP_NS,
            num_prompt_tokens=prompt,
            max_tokens=256,
        )
        for number, prompt in zip(numbers.tolist(), prompts.tolist(), strict=True)
    )
    events = [
        Event(kind="admitted", time_ns=at_ns, number=number)
        for number, at_ns in zip(numbers.tolist(), started_ns.tolist(), strict=True)
    ]
    events += [Event(kind="finished", time_ns=now_ns, number=number) for number in numbers.tolist()]
    events.sort(key=lambda event: event.time_ns)
    rows = tuple(
        RequestRows(
            number=numbers.astype("<u4").tobytes(),
            state=np.full(count, state, "u1").tobytes(),
            num_computed_tokens=prompts.astype("<u4").tobytes(),
            num_cached_tokens=(prompts // 3).astype("<u4").tobytes(),
            num_output_tokens=tokens.astype("<u4").tobytes(),
            num_preemptions=(numbers % 7 == 0).astype("<u2").tobytes(),
            table_start=np.zeros(count, "<u4").tobytes(),
            table_count=np.zeros(count, "<u4").tobytes(),
        )
        for state, tokens in ((RequestState.RUNNING, np.ones(count, np.int64)), (RequestState.FINISHED, outputs))
    )
    times_ns = np.concatenate((first_ns, np.full(count, now_ns)))
    return Update(new_requests=infos, requests=rows, request_time_ns=times_ns, events=tuple(events))


if __name__ == "__main__":
    sys.exit(run_benchmark(__doc__, add_arguments, run))
