"""Prompts over real sockets to servers that answer well, badly, slowly or not at all."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.telemetry.collectors.certificates import CERTIFICATE, PRIVATE_KEY
from tests.telemetry.collectors.prompting.conftest import (
    Call,
    FakeOpenAI,
    chat_chunk,
    event,
    replies_until,
    replies_until_end,
    wait_for,
)

from kvscope_telemetry.collectors.prompting.prompter import Prompter
from kvscope_telemetry.errors import BadInput, EngineDead
from kvscope_telemetry.messages.commands import (
    Abort,
    Accepted,
    Control,
    Done,
    Failed,
    Finished,
    GetStatus,
    LoadedAdapter,
    Refused,
    Submit,
    Tokens,
)
from kvscope_telemetry.messages.sampling_params import SamplingParams
from kvscope_telemetry.messages.structured import Structured

Prompt = Callable[..., Prompter]
HELLO = Submit(request_id="a", prompt="hello")
USAGE: Any = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}


def stream_hello(call: Call) -> None:
    call.stream()
    call.event(**chat_chunk("Hel"))
    call.event(**chat_chunk("lo", finish_reason="stop"))
    call.event(**USAGE)
    call.done()


def text_of(replies: list[Any]) -> str:
    return "".join(reply.text for reply in replies if isinstance(reply, Tokens))


def last_failure(prompter: Prompter) -> Any:
    """Return the last reply after checking that its reason is one short line."""
    *_, last = replies_until_end(prompter)
    assert "\n" not in last.reason
    assert len(last.reason) < 500
    return last


def test_streamed_answer_is_received_completely(fake: FakeOpenAI, prompt: Prompt) -> None:
    fake.script = stream_hello
    prompter = prompt(f"{fake.address}/?rank=2", api_key="secret")
    prompter.send(HELLO)
    first, *_, last = replies = replies_until_end(prompter)
    assert first == Accepted(request_id="a", numbers=(), num_prompt_tokens=0)
    assert text_of(replies) == "Hello"
    assert isinstance(last, Finished)
    assert (last.finish_reason, last.usage.prompt_tokens, last.usage.completion_tokens) == ("stop", 3, 2)
    (call,) = fake.calls
    assert (call.path, call.body["model"], call.body["return_token_ids"]) == ("/v1/chat/completions", "m", True)
    assert (call.headers["Authorization"], call.headers["X-data-parallel-rank"]) == ("Bearer secret", "2")


def test_model_name_is_requested_once(fake: FakeOpenAI, prompt: Prompt) -> None:
    fake.script = stream_hello
    fake.models = {"data": [{"id": "first"}, {"id": "second"}]}
    prompter = prompt(f"{fake.address}/?model=second")
    for name in ("a", "b", "c"):
        prompter.send(Submit(request_id=name, prompt="hello", raw=True))
    replies_until_end(prompter, 3)
    assert fake.num_asked_models == 1
    assert {call.body["model"] for call in fake.calls} == {"second"}
    assert not any("return_token_ids" in call.body for call in fake.calls)


@pytest.mark.parametrize(
    ("version", "word"),
    [
        (None, "structured_outputs"),
        (b"<html>", "structured_outputs"),
        ({"version": "dev"}, "structured_outputs"),
        ({"version": "0.11.0"}, "structured_outputs"),
        ({"version": "1.0"}, "structured_outputs"),
        ({"version": "0.10.1.1"}, "guided_regex"),
        ({"version": "0.9.2rc1"}, "guided_regex"),
    ],
)
def test_older_server_gets_the_older_field_for_structured_output(
    fake: FakeOpenAI, prompt: Prompt, version: Any, word: str
) -> None:
    fake.script, fake.version = stream_hello, version
    prompter = prompt(fake.address)
    form = Structured(kind="regex", text="a+")
    prompter.send(Submit(request_id="a", prompt="hello", sampling=SamplingParams(structured=form)))
    replies_until_end(prompter)
    (call,) = fake.calls
    assert {"structured_outputs", "guided_regex"} & call.body.keys() == {word}
    assert call.body[word] == (form.text if word == "guided_regex" else {"regex": form.text})


@pytest.mark.parametrize("is_chunked", [True, False])
def test_answer_split_at_any_byte_is_received_completely(fake: FakeOpenAI, prompt: Prompt, is_chunked: bool) -> None:
    whole = event(**chat_chunk("Grüße")) + event(**chat_chunk("!", finish_reason="stop")) + event(**USAGE)

    def drip(call: Call) -> None:
        call.stream(is_chunked=is_chunked)
        for byte in whole:
            call.piece(bytes([byte]))
        call.done()

    fake.script = drip
    prompter = prompt(fake.address)
    prompter.send(HELLO)
    replies = replies_until_end(prompter)
    assert text_of(replies) == "Grüße!"
    assert isinstance(replies[-1], Finished)


def test_several_completions_keep_their_index(fake: FakeOpenAI, prompt: Prompt) -> None:
    def both(call: Call) -> None:
        call.stream()
        for index in (1, 0):
            call.event(choices=[{"index": index, "text": f"{index}", "finish_reason": "length"}])
        call.done()

    fake.script = both
    prompter = prompt(fake.address)
    prompter.send(Submit(request_id="a", prompt="x", raw=True, sampling=SamplingParams(n=2)))
    replies = replies_until_end(prompter, 2)
    assert [(r.index, r.text) for r in replies if isinstance(r, Tokens)] == [(1, "1"), (0, "0")]
    assert [(r.index, r.finish_reason) for r in replies if isinstance(r, Finished)] == [(0, "length"), (1, "length")]
    assert fake.calls[0].body["n"] == 2


@pytest.mark.parametrize(
    ("status", "body", "kind", "words"),
    [
        (400, {"error": {"message": "max_tokens is too large"}}, "application/json", "HTTP 400: max_tokens is too"),
        (401, {"error": "Unauthorized"}, "application/json", "needs an API key: use --api-key-file (HTTP 401)"),
        (404, {"error": {"message": "no model `m`"}}, "application/json", "answers with HTTP 404: no model `m`"),
        (404, b"", "text/plain", "not found (HTTP 404)"),
        (422, {"detail": [{"msg": "bad field"}]}, "application/json", "answers with HTTP 422: bad field"),
        (429, {"error": {"message": "too many"}}, "application/json", "answers with HTTP 429: too many"),
        (500, b"<html>oops</html>", "text/html", "answers with HTTP 500"),
        (302, b"", "text/plain", "redirects (HTTP 302)"),
        (200, b"<html>hello</html>", "text/html", "answers with a web page instead of an event stream"),
        (200, {"choices": []}, "application/json", "answers with application/json instead of an event stream"),
    ],
)
def test_error_response_refuses_the_prompt_with_its_reason(
    fake: FakeOpenAI, prompt: Prompt, status: int, body: Any, kind: str, words: str
) -> None:
    fake.script = lambda call: call.answer(status, body, kind)
    prompter = prompt(fake.address)
    prompter.send(HELLO)
    last = last_failure(prompter)
    assert isinstance(last, Refused)
    assert last.reason.startswith(f"{fake.url}/v1/chat/completions ")
    assert words in last.reason


def test_model_name_is_requested_again_after_a_404(fake: FakeOpenAI, prompt: Prompt) -> None:
    fake.script = lambda call: call.answer(404, {"error": {"message": "no model `m`"}})
    prompter = prompt(fake.address)
    prompter.send(HELLO)
    last_failure(prompter)
    fake.models, fake.script = {"data": [{"id": "other"}]}, stream_hello
    prompter.send(Submit(request_id="b", prompt="hello"))
    assert isinstance(replies_until_end(prompter)[-1], Finished)
    assert fake.calls[-1].body["model"] == "other"


@pytest.mark.parametrize(
    ("models", "words"),
    [
        (b"<html>", "/v1/models is not a list of models"),
        ({"data": []}, "/v1/models lists no model"),
        (b"", "is not a list"),
    ],
)
def test_server_without_a_model_is_reported(fake: FakeOpenAI, prompt: Prompt, models: Any, words: str) -> None:
    fake.models = models
    prompter = prompt(fake.address)
    prompter.send(HELLO)
    assert words in last_failure(prompter).reason


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (lambda call: None, "closed the connection before its answer was complete"),
        (lambda call: call.done(), "closed the connection before its answer was complete"),
        (lambda call: call.event(error={"message": "out of memory"}), "ended its answer: out of memory"),
        (lambda call: call.piece(b"data: {\n\n"), "its answer cannot be read"),
        (lambda call: call.piece(b"data: " + b"x" * 1_100_000), "one event of the answer has more than 1 MB"),
    ],
)
def test_interrupted_answer_fails_with_its_reason(
    fake: FakeOpenAI, prompt: Prompt, more: Callable[[Call], None], words: str
) -> None:
    def begin(call: Call) -> None:
        call.stream()
        call.event(**chat_chunk("Hel"))
        more(call)

    fake.script = begin
    prompter = prompt(fake.address)
    prompter.send(HELLO)
    replies = replies_until_end(prompter)
    assert text_of(replies) == "Hel"
    assert isinstance(replies[-1], Failed)
    assert words in replies[-1].reason
    assert replies[-1].request_id == "a"


def test_silent_server_times_out(fake: FakeOpenAI, prompt: Prompt) -> None:
    fake.script = Call.wait_for_disconnect
    prompter = prompt(fake.address, silence_s=0.2)
    prompter.send(HELLO)
    assert "did not answer within 0.2 s" in last_failure(prompter).reason


def test_refused_connection_is_reported(prompt: Prompt) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    prompter = prompt(f"vllm://127.0.0.1:{port}")
    prompter.send(HELLO)
    assert last_failure(prompter).reason == f"nobody listens at http://127.0.0.1:{port}/v1/models"


def test_abort_closes_the_connection(fake: FakeOpenAI, prompt: Prompt) -> None:
    gone = threading.Event()

    def endless(call: Call) -> None:
        call.stream()
        call.event(**chat_chunk("Hel"))
        call.wait_for_disconnect()
        gone.set()

    fake.script = endless
    prompter = prompt(fake.address)
    prompter.send(HELLO)
    replies_until(prompter, text_of)
    prompter.send(Abort(request_id="a"))
    done, end = prompter.poll_replies()
    assert done == Done(request_id="a")
    assert isinstance(end, Finished)
    assert (end.finish_reason, end.usage.completion_tokens) == ("abort", 1)
    assert gone.wait(60)
    prompter.send(Abort(request_id="unknown"))
    assert prompter.poll_replies() == [Done(request_id="unknown")]


def test_abort_before_an_answer_and_close_end_all_requests(fake: FakeOpenAI, prompt: Prompt) -> None:
    num_gone = []

    def silent(call: Call) -> None:
        call.wait_for_disconnect()
        num_gone.append(1)

    fake.script = silent
    prompter = prompt(fake.address)
    for name in ("a", "b", "c"):
        prompter.send(Submit(request_id=name, prompt="hello"))
    wait_for(lambda: len(fake.calls) == 3)
    prompter.send(Abort(request_id="b"))
    assert [type(reply) for reply in prompter.poll_replies()] == [Done, Finished]
    wait_for(lambda: len(num_gone) == 1)
    prompter.close()
    wait_for(lambda: len(num_gone) == 3)
    assert prompter.poll_replies() == []
    with pytest.raises(EngineDead, match="is closed"):
        prompter.send(HELLO)


def test_forty_concurrent_prompts_are_all_answered(fake: FakeOpenAI, prompt: Prompt) -> None:
    fake.script = stream_hello
    prompter = prompt(fake.address)
    for number in range(40):
        prompter.send(Submit(request_id=f"{number}", prompt="hello"))
    replies = replies_until_end(prompter, 40)
    assert {reply.finish_reason for reply in replies if isinstance(reply, Finished)} == {"stop"}
    assert text_of(replies).count("H") == 40


def test_unsupported_and_excess_requests_are_refused_locally(
    fake: FakeOpenAI, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.script = Call.wait_for_disconnect
    prompter = prompt(fake.address)
    prompter.send(Submit(request_id="l", prompt="x", sampling=SamplingParams(logprobs=1)))
    prompter.send(Control(action="pause", tag=5))
    prompter.send(HELLO)
    prompter.send(HELLO)
    monkeypatch.setattr("kvscope_telemetry.collectors.prompting.prompter.MAX_CONCURRENT_REQUESTS", 1)
    prompter.send(Submit(request_id="b", prompt="x"))
    option, status, twice, many = prompter.poll_replies()
    assert "logprobs=1 is not accepted for vLLM" in option.reason  # type: ignore[union-attr]
    assert status == Failed(reason="vLLM can be watched but not controlled", tag=5)
    assert "request_id='a' is not accepted" in twice.reason  # type: ignore[union-attr]
    assert "1 requests are already in progress" in many.reason  # type: ignore[union-attr]
    with pytest.raises(BadInput, match="more than 8 MB"):
        prompter.send(Submit(request_id="big", prompt="x" * 9_000_000))
    assert not fake.num_hung_up


def test_models_with_a_parent_are_adapters_and_requested_by_name(fake: FakeOpenAI, prompt: Prompt) -> None:
    """vLLM and SGLang list adapters as models with a parent."""
    fake.script = stream_hello
    prompter = prompt(fake.address)
    assert prompter.adapters is None
    fake.models["data"] += [{"id": "sql", "owned_by": "vllm", "parent": "m", "root": "/adapters/sql"}]
    prompter.send(GetStatus())
    wait_for(lambda: prompter.adapters is not None)
    assert prompter.adapters == (LoadedAdapter(name="sql", path="/adapters/sql"),)
    prompter.send(Submit(request_id="a", prompt="hello", adapter="sql"))
    prompter.send(Submit(request_id="b", prompt="hello"))
    replies_until_end(prompter, 2)
    assert sorted(call.body["model"] for call in fake.calls) == ["m", "sql"]
    fake.models["data"].pop()
    prompter.send(GetStatus())
    wait_for(lambda: prompter.adapters == ())


def test_tls_needs_a_trusted_certificate(fake: FakeOpenAI, prompt: Prompt, tmp_path: Path) -> None:
    certificate, key = tmp_path / "c.pem", tmp_path / "k.pem"
    certificate.write_text(CERTIFICATE)
    key.write_text(PRIVATE_KEY)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    fake.http.socket = context.wrap_socket(fake.http.socket, server_side=True)
    fake.script = stream_hello
    address = fake.address.replace("127.0.0.1", "localhost")
    trusting = prompt(f"{address}/?ca={certificate}")
    trusting.send(HELLO)
    assert isinstance(replies_until_end(trusting)[-1], Finished)
    strict = prompt(f"{address}/?tls=1")
    strict.send(HELLO)
    assert "certificate is not trusted" in last_failure(strict).reason
