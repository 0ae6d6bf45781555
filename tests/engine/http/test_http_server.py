"""The API over raw sockets: malformed, endless, slow and excessive requests, clients that disconnect, engines that
stop and return.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from tests.engine.http.served import Served, answer_on, read_all, wait_for

from kvscope_engine.http.api_state import HttpLimits
from kvscope_engine.http.info_endpoints import why_not_served
from kvscope_telemetry.messages.commands import Abort, Command, Reply
from kvscope_telemetry.messages.telemetry import Progress

COMPLETIONS = "/v1/completions"


def events(data: bytes) -> list[Any]:
    """Return the events of a stream; the last is "[DONE]" or an error."""
    said = [line[6:] for line in data.replace(b"\r\n", b"\n").split(b"\n") if line.startswith(b"data: ")]
    return [text.decode() if text == b"[DONE]" else json.loads(text) for text in said]


def test_complete_answer_has_choices_and_usage(served: Served) -> None:
    status, answer = served.ask(COMPLETIONS, {"model": "fake", "prompt": "abc", "max_tokens": 3, "n": 2})
    assert status == 200
    assert answer["object"] == "text_completion"
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert [len(choice["text"].split()) for choice in answer["choices"]] == [3, 3]
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize(("model", "pool", "shown"), [(8192, 128, 128), (100, 128, 100), (100, 0, 100), (0, 0, None)])
def test_model_length_is_limited_by_the_pool(
    serving: Callable[..., Served], model: int, pool: int, shown: int | None
) -> None:
    served = serving(max_model_len=model, max_request_tokens=pool)
    served.wait_ready()
    assert served.ask("/v1/models")[1]["data"][0].get("max_model_len") == shown
    if pool == shown:
        status, answer = served.ask(COMPLETIONS, {"prompt": [1] * pool})
        assert (status, "send at most 127" in answer["error"]["message"]) == (400, True)


def test_stream_ends_with_usage(served: Served) -> None:
    body = {"prompt": ["a", "bc"], "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, usage, done = events(read_all(served.post(COMPLETIONS, body, "Connection: close")))
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"]["prompt_tokens"] == 3
    assert usage["usage"]["completion_tokens"] == 6
    choices = [chunk["choices"][0] for chunk in chunks]
    assert all(chunk["usage"] is None for chunk in chunks)
    for index in (0, 1):
        own = [choice for choice in choices if choice["index"] == index]
        assert [choice["finish_reason"] for choice in own] == [None, None, None, "length"]


def test_stream_has_usage_in_each_event(served: Served) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "abc", "max_tokens": 3, "stream": True, "stream_options": options}
    *chunks, last, done = events(read_all(served.post(COMPLETIONS, body, "Connection: close")))
    assert (last["choices"], done) == ([], "[DONE]")
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert (counts[-1], last["usage"]["completion_tokens"]) == (3, 3)
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {last["usage"]["prompt_tokens"]}


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"NaN", 400),
        (b'{"prompt": "x", "temperature": NaN}', 400),
        (b'{"prompt": "x", "temperature": 1e999}', 400),
        (b'{"prompt": "\\ud800"}', 400),
        (b'{"prompt": "\\ud800x"}', 400),
        (b'{"prompt": "\xff"}', 400),
        (b"[" * 100_000, 400),
        (b'{"prompt": "x", "n": ' + b"9" * 5000 + b"}", 400),
        (b'{"prompt": []}', 400),
        (b'{"prompt": ""}', 400),
        (b'{"prompt": ["a", 1]}', 400),
        (b'{"prompt": [-1]}', 400),
        (b'{"prompt": [["a"]]}', 400),
        (b'{"prompt": "x", "echo": true}', 400),
        (b'{"prompt": "x", "suffix": "y"}', 400),
        (b'{"prompt": "x", "priority": 5000}', 400),
        (b'{"prompt": "x", "stream_options": {}}', 400),
        (b'{"prompt": "x", "model": "other"}', 404),
    ],
)
def test_invalid_body_is_refused(served: Served, body: bytes, status: int) -> None:
    got, answer = answer_on(served.post(COMPLETIONS, body, "Connection: close"))
    assert got == status
    assert set(answer) == {"error"}
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert answer["error"]["message"]


def test_error_names_the_invalid_field(served: Served) -> None:
    assert served.ask(COMPLETIONS, {"prompt": "x", "top_p": 2})[1]["error"]["param"] == "top_p"
    assert served.ask(COMPLETIONS, {"prompt": "x", "model": "y"})[1]["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("head", "status"),
    [
        ("\x16\x03 garbage", 400),
        ("GET /health HTTP/1.1\nHost: localhost\nContent-Length: abc", 400),
        ("GET /nothing HTTP/1.1\nHost: localhost\nConnection: close", 404),
        ("PUT /v1/models HTTP/1.1\nHost: localhost\nConnection: close", 405),
        ("GET /v1/completions HTTP/1.1\nHost: localhost\nConnection: close", 405),
        ("GET /v1/models/%ff%00 HTTP/1.1\nHost: localhost\nConnection: close", 404),
        ("GET /health HTTP/1.1\nHost: somewhere.example\nConnection: close", 403),
        (f"GET /health HTTP/1.1\nHost: localhost\nX: {'a' * 40_000}\nConnection: close", 431),
        (f"POST {COMPLETIONS} HTTP/1.1\nHost: localhost\nContent-Length: 0\nConnection: close", 415),
        (f"POST {COMPLETIONS} HTTP/1.1\nHost: localhost\nContent-Type: text/plain\nContent-Length: 2", 415),
        (
            f"POST {COMPLETIONS} HTTP/1.1\nHost: localhost\nContent-Type: application/json\nContent-Length: {1 << 40}",
            413,
        ),
    ],
)
def test_invalid_http_request_head_is_refused_with_its_status_code(served: Served, head: str, status: int) -> None:
    got, answer = answer_on(served.send(head))
    # A head that arrives in pieces is refused after its first 32 KiB, one that arrives at once by its size.
    assert got == status or (status == 431 and got == 400)
    assert answer["error"]["message"]


def test_chunked_body_is_bounded(serving: Callable[..., Served]) -> None:
    served = serving(limits=HttpLimits(max_body_bytes=1000))
    head = f"POST {COMPLETIONS} HTTP/1.1\nHost: localhost\nContent-Type: application/json\nTransfer-Encoding: chunked"
    with served.send(head, b"7d0\r\n" + b"x" * 2000 + b"\r\n") as connection:
        assert answer_on(connection)[0] == 413


def test_incomplete_heads_and_bodies_time_out(serving: Callable[..., Served]) -> None:
    served = serving(limits=HttpLimits(header_s=0.2, chunk_s=0.2))
    assert answer_on(served.connect())[0] == 408
    half = served.connect()
    half.sendall(b"GET /health HT")
    assert answer_on(half)[0] == 408
    head = f"POST {COMPLETIONS} HTTP/1.1\nHost: localhost\nContent-Type: application/json\nContent-Length: 100"
    assert answer_on(served.send(head, b'{"prompt"'))[0] == 408


def test_requests_beyond_the_maximum_get_429(serving: Callable[..., Served]) -> None:
    served = serving(limits=HttpLimits(max_requests=1), step_s=0.002)
    with served.post(COMPLETIONS, {"prompt": "x", "max_tokens": 1_000_000, "stream": True}) as connection:
        assert connection.recv(1)
        data = read_all(served.post(COMPLETIONS, {"prompt": "x"}, "Connection: close"))
        assert b" 429 " in data.split(b"\r\n")[0]
        assert b"retry-after: 1" in data.lower()
        assert served.ask("/health")[0] == 200
    wait_for(lambda: served.ask(COMPLETIONS, {"prompt": "x", "max_tokens": 1})[0] == 200, "room again")


@pytest.mark.parametrize("stream", [True, False])
def test_disconnecting_aborts_all_completions(served: Served, stream: bool) -> None:
    connection = served.post(COMPLETIONS, {"prompt": "x", "max_tokens": 1_000_000, "n": 2, "stream": stream})
    wait_for(lambda: served.engine.num_unfinished == 2, "a running request")
    connection.close()
    wait_for(lambda: served.engine.num_unfinished == 0, "an end of what nobody wants")
    wait_for(lambda: served.api.engine_client.num_open == 0, "no history")


class ObservedGate(threading.Event):
    """Event that records that a thread waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.is_waited_for = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.is_waited_for.set()
        return super().wait(timeout)


def test_disconnecting_aborts_before_the_next_step(
    serving: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serving(step_s=0.002)
    connection = served.post(COMPLETIONS, {"prompt": "x", "max_tokens": 1_000_000, "stream": True})
    assert connection.recv(1)
    engine, receiver, gate = served.engine, served.service.receiver, ObservedGate()
    asked: list[Abort] = []
    aborted_at: list[int] = []
    answer, abort = receiver.answer, engine.abort

    def noted_answer(client: bytes, command: Command) -> Reply | None:
        reply = answer(client, command)
        asked.extend([command] if isinstance(command, Abort) else [])
        return reply

    def noted_abort(request_id: str, index: int | None) -> None:
        aborted_at.append(engine.step_count)
        abort(request_id, index)

    monkeypatch.setattr(receiver, "answer", noted_answer)
    monkeypatch.setattr(engine, "abort", noted_abort)
    engine.may_step = gate
    wait_for(gate.is_waited_for.is_set, "a step that lasts")
    step = engine.step_count
    connection.close()
    wait_for(lambda: asked, "an abort, while the step lasts")
    gate.set()
    wait_for(lambda: engine.num_unfinished == 0, "an end of what nobody wants")
    assert aborted_at == [step]


def test_connections_beyond_the_maximum_get_503(serving: Callable[..., Served]) -> None:
    served = serving(limits=HttpLimits(max_connections=2))
    with served.connect() as first, served.connect() as second:
        for kept in (first, second):
            kept.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert kept.recv(12) == b"HTTP/1.1 200"
        status, answer = answer_on(served.connect())
        assert status == 503
        assert answer["error"]["message"] == "2 connections are open already: no more are accepted"
    wait_for(lambda: served.ask("/version")[0] == 200, "room again")


def test_client_that_does_not_read_delays_no_other_client(serving: Callable[..., Served]) -> None:
    served = serving(limits=HttpLimits(write_s=0.5))
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow.connect(served.address)
    data = json.dumps({"prompt": "x", "max_tokens": 10_000_000, "stream": True, "n": 8}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with slow:
        slow.sendall(head.encode() + b"Content-Length: %d\r\n\r\n" % len(data) + data)
        wait_for(lambda: served.engine.num_unfinished == 8, "a running request")
        assert served.ask(COMPLETIONS, {"prompt": "x", "max_tokens": 5})[0] == 200
        wait_for(lambda: served.engine.num_unfinished == 0, "an end of what nobody reads")
    assert served.ask(COMPLETIONS, {"prompt": "x", "max_tokens": 5})[0] == 200


def test_engine_restart_ends_streams_and_is_recovered_from(serving: Callable[..., Served]) -> None:
    served = serving(step_s=0.002)
    connection = served.post(COMPLETIONS, {"prompt": "x", "max_tokens": 1_000_000, "stream": True}, "Connection: close")
    wait_for(lambda: served.engine.num_unfinished == 1, "a running request")
    served.stop_engine()
    chunks = events(read_all(connection))
    assert chunks[-1] == "[DONE]"  # the engine reported the abort
    assert chunks[-2]["choices"][0]["finish_reason"] == "abort"
    wait_for(lambda: served.ask("/health")[0] == 503, "no engine")
    status, answer = served.ask(COMPLETIONS, {"prompt": "x"})
    assert status == 503
    assert answer["error"]["code"] == "engine_away"
    assert served.ask("/v1/models")[0] == 503
    assert served.ask("/version")[0] == 200
    served.start_engine()
    wait_for(lambda: served.ask("/health")[0] == 200, "an engine again")
    assert served.ask(COMPLETIONS, {"prompt": "x", "max_tokens": 2})[0] == 200


def test_engine_failure_in_a_step_ends_the_stream_with_an_error(serving: Callable[..., Served]) -> None:
    served = serving(fail_at_step=3)
    data = read_all(served.post(COMPLETIONS, {"prompt": "x", "max_tokens": 9, "stream": True}, "Connection: close"))
    assert b'"message":"the engine died in a step' in data  # in the stream, or in place of one that had not started
    assert b"[DONE]" not in data


def test_health_reports_why_the_engine_does_not_serve(serving: Callable[..., Served]) -> None:
    served = serving()
    served.wait_ready()
    assert served.ask("/health") == (200, {"status": "ready"}), "health must not contain the model"
    status = served.api.engine_client.status
    assert status is not None
    ills: dict[str, dict[str, Any]] = {
        "the engine is stuck: its current step has taken 61 s": {"busy_s": 61.0},
        "the engine has been paused by Ada for 100 s": {"paused": True, "paused_by": "Ada", "paused_s": 100.0},
        "the engine is loading: load (25%)": {"phase": "loading", "progress": Progress(stage="load", done=1, total=4)},
        "the engine has ended": {"phase": "failed", "reason": "no secret"},
    }
    for words, fields in ills.items():
        assert why_not_served(msgspec.structs.replace(status, **fields), 1.0).startswith(words)
    assert why_not_served(msgspec.structs.replace(status, paused=True, paused_s=59.0, busy_s=59.0), 9.0) == ""
    assert why_not_served(status, 100.0) == "the engine is stuck: no telemetry for 100 s"


def test_wrong_api_key_gets_401(serving: Callable[..., Served]) -> None:
    served = serving(api_key="secret")
    for wrong in ((), ("Authorization: Bearer no",), ("Authorization: Basic secret",), ("Authorization: Bearer é",)):
        status, answer = served.ask("/v1/models", None, *wrong)
        assert status == 401
        assert answer["error"]["code"] == "invalid_api_key"
    assert served.ask("/v1/models", None, "Authorization: Bearer secret")[0] == 200
    assert served.ask("/health")[0] == 200


def test_stop_lets_running_requests_finish(serving: Callable[..., Served]) -> None:
    served = serving(step_s=0.002)
    connection = served.post(COMPLETIONS, {"prompt": "x", "max_tokens": 300, "stream": True})
    wait_for(lambda: served.engine.num_unfinished == 1, "a running request")
    served.server.stop()
    chunks = events(read_all(connection))
    assert chunks[-1] == "[DONE]"
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"


def test_stop_ends_requests_after_the_drain_time(serving: Callable[..., Served]) -> None:
    served = serving(step_s=0.002, limits=HttpLimits(drain_s=1))
    connection = served.post(COMPLETIONS, {"prompt": "x", "max_tokens": 1_000_000, "stream": True})
    wait_for(lambda: served.engine.num_unfinished == 1, "a running request")
    served.server.stop()
    assert "stopping" in events(read_all(connection))[-1]["error"]["message"]
    wait_for(lambda: served.engine.num_unfinished == 0, "an end of what nobody waits for")


def test_five_hundred_silent_connections_do_not_block_requests(served: Served) -> None:
    idle = [served.connect() for _ in range(500)]
    try:
        assert served.ask(COMPLETIONS, {"prompt": "x", "max_tokens": 2})[0] == 200
    finally:
        for connection in idle:
            connection.close()
