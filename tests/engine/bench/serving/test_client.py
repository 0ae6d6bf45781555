"""The client over real sockets: what it sends, when, and what it makes of answers whole, slow, cut or wrong."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from tests.engine.bench.serving.conftest import answer, chunk, usage
from tests.telemetry.foreign.prompting.conftest import Call, FakeOpenAI, event

from kvscope_engine.bench.serving.client import Driven, count_tokens
from kvscope_engine.bench.serving.codec import Words
from kvscope_engine.bench.serving.target import address_of, reached
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.foreign.http_get import NoAnswer
from kvscope_telemetry.foreign.prompting.question import CHAT

Ask = Callable[..., Driven]


def test_a_whole_answer(fake: FakeOpenAI, ask: Ask) -> None:
    (one,) = ask(tokens=4).timelines
    assert not one.error
    assert (one.num_output_tokens, one.told_prompt_tokens) == (4, 3)
    assert "".join(one.pieces) == " 0 1 2 3"
    assert one.start_s <= one.times_s[0]
    assert one.times_s == sorted(one.times_s)
    assert one.end_s == one.times_s[-1]


def test_what_is_sent(fake: FakeOpenAI, ask: Ask) -> None:
    ask(tokens=2, api_key="secret", asking={"extra": {"min_p": 0.0}})
    (call,) = fake.calls
    assert call.path == "/v1/completions"
    assert call.headers["Authorization"] == "Bearer secret"
    assert call.body == {
        "model": "m",
        "prompt": "one two 0",
        "max_tokens": 2,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "min_p": 0.0,
    }


def test_a_server_without_ignore_eos_is_told_by_min_tokens(fake: FakeOpenAI, ask: Ask) -> None:
    ask(tokens=2, asking={"knows_ignore_eos": False})
    ask(tokens=2, asking={"ignore_eos": False})
    first, second = (call.body for call in fake.calls)
    assert first["min_tokens"] == 2
    assert "ignore_eos" not in first
    assert not {"min_tokens", "ignore_eos"} & second.keys()


def test_a_chat(fake: FakeOpenAI, ask: Ask) -> None:
    def chat(call: Call) -> None:
        assert call.body["messages"] == [{"role": "user", "content": "one two 0"}]
        call.stream(is_chunked=False)
        call.event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}])
        call.event(choices=[{"index": 0, "delta": {"content": "word"}}])
        call.event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}], usage={"prompt_tokens": 9})
        call.done()

    fake.script = chat
    (one,) = ask(asking={"endpoint": CHAT}).timelines
    assert (one.error, one.pieces, one.told_prompt_tokens) == ("", ["word"], 9)
    assert one.end_s >= one.times_s[0]


def test_events_cut_anywhere(fake: FakeOpenAI, ask: Ask) -> None:
    def cut(call: Call) -> None:
        call.stream()
        data = event(**chunk("ä")) + event(**chunk("b", finish_reason="stop")) + event(**usage(3, 2))
        for place in range(len(data)):
            call.piece(data[place : place + 1])
        call.done()

    fake.script = cut
    (one,) = ask().timelines
    assert (one.error, one.pieces, one.num_output_tokens) == ("", ["ä", "b"], 2)


def test_tokens_without_usage_are_counted(fake: FakeOpenAI, ask: Ask) -> None:
    def silent(call: Call) -> None:
        call.stream()
        call.event(**chunk("the "))
        call.event(**chunk("old man", finish_reason="length"))
        call.done()

    fake.script = silent
    found = ask().timelines
    assert found[0].num_output_tokens == 0
    count_tokens(found, Words())
    assert found[0].num_output_tokens == 2

    class Exact(Words):
        is_exact = True

    found[0].num_output_tokens = 0
    count_tokens(found, Exact())
    assert found[0].num_output_tokens == 3


def broken_in_the_middle(call: Call) -> None:
    call.stream()
    call.event(**chunk("a"))


def ended_in_the_middle(call: Call) -> None:
    call.stream(is_chunked=False)
    call.event(**chunk("a"))


def error_in_the_middle(call: Call) -> None:
    call.stream()
    call.event(**chunk("a"))
    call.event(error={"message": "out of memory"})
    call.done()


def no_json(call: Call) -> None:
    call.stream()
    call.piece(b"data: {nothing\n\n")
    call.done()


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (broken_in_the_middle, "closed the connection before its answer was complete"),
        (ended_in_the_middle, "closed the connection before its answer was complete"),
        (error_in_the_middle, "ended its answer: out of memory"),
        (no_json, "its answer cannot be read"),
        (lambda call: call.answer(200, b"<html>", "text/html; charset=utf-8"), "a web page instead of an event stream"),
        (lambda call: call.answer(200, {"choices": []}), "application/json instead of an event stream"),
        (lambda call: call.answer(400, {"error": {"message": "ignore_eos is not known"}}), "400: ignore_eos is not"),
        (lambda call: call.answer(429, b"busy", "text/plain"), "HTTP 429: busy"),
        (lambda call: call.answer(401, b""), "needs an API key: use --api-key-file"),
        (lambda call: call.answer(500, b""), "answers with HTTP 500"),
        (lambda call: call.answer(307, b"", location="http://elsewhere"), "redirects"),
    ],
)
def test_what_goes_wrong_is_said(fake: FakeOpenAI, ask: Ask, script: Callable[[Call], None], words: str) -> None:
    fake.script = lambda call: script(call) if call.body["prompt"].endswith("1") else answer(call)
    first, second, third = ask(3).timelines
    assert words in second.error
    assert fake.url in second.error
    assert (first.error, third.error) == ("", "")


def test_a_server_that_says_nothing_is_given_up(fake: FakeOpenAI, ask: Ask) -> None:
    fake.script = Call.wait_hung_up
    (one,) = ask(timeout_s=0.05).timelines
    assert one.error == f"{fake.url}/v1/completions did not answer within 0.05 s"


def test_at_most_so_many_at_a_time(fake: FakeOpenAI, ask: Ask) -> None:
    lock, now, most = threading.Lock(), 0, 0

    def counted(call: Call) -> None:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        call.stream()
        with lock:
            now -= 1  # before the client can know that it is over
        call.event(**chunk("a", finish_reason="stop"))
        call.done()

    fake.script = counted
    assert not any(one.error for one in ask(12, max_concurrency=2).timelines)
    assert most <= 2


def test_as_many_at_a_time_as_come(fake: FakeOpenAI, ask: Ask) -> None:
    together = threading.Barrier(20, timeout=60)

    def held(call: Call) -> None:
        together.wait()
        answer(call)

    fake.script = held
    driven = ask(20)
    assert [one.error for one in driven.timelines] == [""] * 20
    assert driven.cpu_share > 0
    assert driven.duration_s > 0


def test_none_is_sent_before_it_is_due(ask: Ask) -> None:
    begun_s = time.perf_counter()
    timelines = ask(2, starts_s=[0.0, 0.05]).timelines
    assert timelines[1].start_s - begun_s >= 0.049


def test_who_is_not_there() -> None:
    with pytest.raises(NoAnswer, match=r"nobody listens at http://127.0.0.1:1$"):
        reached(address_of("http://127.0.0.1:1"), "m", asking=None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "url",
    ["", "localhost:8000", "ftp://host", "http://", "http://host:port", "http://h:99999", "http://k@h", "http://h?q=1"],
)
def test_urls_that_are_not_accepted(url: str) -> None:
    with pytest.raises(BadInput, match=r"is not accepted: http://HOST:PORT"):
        address_of(url)


@pytest.mark.parametrize("url", ["http://h:80/gate/v1/", "http://h/gate", "http://h/gate/v1"])
def test_the_api_s_own_path_may_be_said(url: str) -> None:
    assert address_of(url).url("/v1/models") == "http://h:80/gate/v1/models"
