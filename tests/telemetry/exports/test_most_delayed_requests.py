"""Most delayed requests: those that waited in the queue, in a slow prefill, or while preempted."""

from __future__ import annotations

import pytest

from kvscope_telemetry.exports.phase_spans import RequestHistory
from kvscope_telemetry.exports.report.report_requests import request_rows
from kvscope_telemetry.exports.report.worst import worst_requests
from kvscope_telemetry.latencies import Moments
from kvscope_telemetry.messages.telemetry import SUSPENDED, RequestInfo, Stop
from kvscope_telemetry.request_phase import RequestPhase
from kvscope_telemetry.running_time import RunningTime

S = 1_000_000_000


def request_with_prefill(number: int, prefill_s: float) -> RequestHistory:
    info = RequestInfo(number=number, request_id=f"r{number}", arrival_ns=0, num_prompt_tokens=8_136)
    history = RequestHistory(1, info, 0, Moments(0))
    history.begin(RequestPhase.PREFILL, 0)
    history.begin(RequestPhase.DECODE, round(prefill_s * S))
    history.finish("finished", 20 * S)
    return history


def test_requests_with_a_slow_prefill_are_listed_with_the_reason() -> None:
    worst = worst_requests([request_with_prefill(1, 0.4), request_with_prefill(2, 12.0)], 20 * S, 5)
    assert [(each.history.info.number, each.lost_ns) for each in worst] == [(2, 12 * S)]
    assert worst[0].reasons == ("prefill took 12.00 s: 8,136 prompt tokens, 0 cached",)


@pytest.mark.parametrize(
    ("stops", "text"),
    [
        ([Stop(begin_ns=S, end_ns=3 * S, by="Ada")], "(without 2.00 s paused)"),
        ([Stop(begin_ns=S, end_ns=3 * S, kind=SUSPENDED)], "(without 2.00 s suspended)"),
        (
            [Stop(begin_ns=S, end_ns=3 * S), Stop(begin_ns=4 * S, end_ns=5 * S, kind=SUSPENDED)],
            "(without 3.00 s paused or suspended)",
        ),
        (
            [Stop(begin_ns=0, end_ns=S, by="Ada"), Stop(begin_ns=2 * S, end_ns=3 * S, kind=SUSPENDED)],
            "1.00 s suspended)",
        ),
    ],
)
def test_time_left_out_of_a_delay_says_whether_the_engine_was_paused_or_suspended(stops: list[Stop], text: str) -> None:
    info = RequestInfo(number=1, request_id="r1", arrival_ns=S, num_prompt_tokens=10)
    history = RequestHistory(1, info, S, Moments(S, running=RunningTime(stops)))
    history.begin(RequestPhase.QUEUED, S)
    history.begin(RequestPhase.DECODE, 9 * S)
    history.finish("finished", 10 * S)
    (worst,) = worst_requests([history], 20 * S, 5)
    assert text in worst.reasons[0]


def test_request_aborted_before_its_prompt_was_read_has_no_number_of_prompt_tokens_in_the_report() -> None:
    history = RequestHistory(
        1, RequestInfo(number=1, request_id="r1", arrival_ns=0, num_prompt_tokens=0), 0, Moments(0)
    )
    history.begin(RequestPhase.QUEUED, 0)
    history.finish("aborted", 3 * S)
    (row,) = request_rows(worst_requests([history], 20 * S, 5))
    assert row[2] == "–"
