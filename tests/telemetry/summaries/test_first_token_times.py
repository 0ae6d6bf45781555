"""Which requests get their first token in a frame: a request whose first token was missed gets none later."""

from __future__ import annotations

import numpy as np

from kvscope_telemetry.messages.telemetry import Frame, RequestInfo, RequestRows
from kvscope_telemetry.summaries.moments import FirstTokens


def frame(outputs: dict[int, int], *, num_first: int, new: tuple[int, ...] = ()) -> Frame:
    """Return a step in which requests reached these output token counts, `num_first` of them from none."""
    rows = RequestRows(
        number=np.array(list(outputs), "<u4").tobytes(),
        num_output_tokens=np.array(list(outputs.values()), "<u4").tobytes(),
    )
    infos = tuple(
        RequestInfo(number=number, request_id=str(number), arrival_ns=1, num_prompt_tokens=3, max_tokens=9)
        for number in new
    )
    return Frame(
        epoch=1, seq=1, step=1, time_ns=1, requests=rows, new_requests=infos, first_token_ns=bytes(8 * num_first)
    )


def test_first_token_of_each_request_is_seen_in_exactly_one_frame() -> None:
    tokens = FirstTokens()
    assert tokens.frame(frame({1: 0, 2: 1}, num_first=1, new=(1, 2))) == [2]
    assert tokens.frame(frame({1: 1, 2: 2}, num_first=1)) == [1]
    assert tokens.frame(frame({1: 2, 2: 3}, num_first=0)) == []


def test_missed_first_token_is_not_assigned_to_a_later_frame() -> None:
    tokens = FirstTokens()
    assert tokens.frame(frame({1: 1}, num_first=0, new=(1, 2))) == []
    assert tokens.frame(frame({1: 2, 2: 1}, num_first=1)) == [2]
