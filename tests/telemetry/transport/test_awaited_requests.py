"""The requests that a client says it waits for: all that were sent and have not ended, with what was received
of them.
"""

from __future__ import annotations

from kvscope_telemetry.messages.commands import (
    Accepted,
    Awaited,
    Finished,
    GetStatus,
    Refused,
    RequestTiming,
    Submit,
    Tokens,
    Usage,
)
from kvscope_telemetry.transport.client_sockets import AwaitedRequests


def _finished(request_id: str, index: int = 0) -> Finished:
    return Finished(request_id=request_id, index=index, finish_reason="stop", usage=Usage(), timing=RequestTiming())


def test_request_is_awaited_until_its_last_completion() -> None:
    requests = AwaitedRequests()
    requests.sent(GetStatus())
    requests.sent(Submit(request_id="r", prompt="x"))
    assert requests.all() == (Awaited(request_id="r"),)
    requests.record_reply(Accepted(request_id="r", numbers=(1, 2), num_prompt_tokens=1))
    for index in (0, 1, 1):
        requests.record_reply(Tokens(request_id="r", index=index, token_ids=(1,), text="a"))
    requests.record_reply(_finished("r", 0))
    assert requests.all() == (Awaited(request_id="r", heard=(-1, 2)),)
    requests.record_reply(_finished("r", 1))
    assert requests.all() == ()


def test_refused_requests_and_foreign_ids_are_not_awaited() -> None:
    requests = AwaitedRequests()
    requests.sent(Submit(request_id="r", prompt="x"))
    requests.record_reply(Tokens(request_id="other", token_ids=(1,), text="a"))
    requests.record_reply(_finished("other"))
    requests.record_reply(Refused(request_id="r", reason="why"))
    assert requests.ids == []


def test_refused_duplicate_id_does_not_end_the_first_request() -> None:
    requests = AwaitedRequests()
    requests.sent(Submit(request_id="r", prompt="x"))
    requests.record_reply(Accepted(request_id="r", numbers=(1,), num_prompt_tokens=1))
    requests.sent(Submit(request_id="r", prompt="y"))
    requests.record_reply(Refused(request_id="r", reason="in use"))
    assert requests.ids == ["r"]


def test_replies_for_unknown_completions_do_not_change_the_awaited_requests() -> None:
    requests = AwaitedRequests()
    requests.sent(Submit(request_id="r", prompt="x"))
    requests.record_reply(Accepted(request_id="r", numbers=(1,), num_prompt_tokens=1))
    for index in (-1, 1, 1 << 40):
        requests.record_reply(Tokens(request_id="r", index=index, token_ids=(1,), text="a"))
        requests.record_reply(_finished("r", index))
    assert requests.all() == (Awaited(request_id="r", heard=(0,)),)
