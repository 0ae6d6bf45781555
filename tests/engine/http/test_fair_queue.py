"""HTTP clients are served fairly: how they are identified, what each may hold, and whose text is tokenized next."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from tests.engine.http.served import Served, answer_on, read_all, wait_for

from kvscope_engine.http.api_state import HttpLimits
from kvscope_engine.http.client_limits import client_name
from kvscope_engine.http.schemas.api_errors import ApiError
from kvscope_engine.http.tokenizer_threads import SMALL_BYTES, TokenizerThreads, WorkOwner
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.commands import Command, Reply, Submit

COMPLETIONS = "/v1/completions"
ENDLESS = {"prompt": "x", "max_tokens": 1_000_000, "stream": True}


def submits_of(served: Served) -> list[Submit]:
    """Return a list that collects the engine's submissions from now on."""
    seen: list[Submit] = []
    submit = served.engine.submit

    def noted(asked: Submit, *args: Any) -> Any:
        seen.append(asked)
        return submit(asked, *args)

    served.engine.submit = noted
    return seen


def bearer(key: str) -> str:
    return f"Authorization: Bearer {key}"


def test_requests_with_the_same_api_key_count_as_one_client_and_each_request_as_a_batch(
    serving: Callable[..., Served],
) -> None:
    served = serving(api_key="first,second")
    seen = submits_of(served)
    for key in ("first", "second", "first"):
        assert served.ask(COMPLETIONS, {"prompt": ["a", "b"], "max_tokens": 1}, bearer(key))[0] == 200
    assert served.ask("/v1/models", None, bearer("third"))[0] == 401
    clients = [submit.client for submit in seen]
    assert clients == [clients[0]] * 2 + [clients[2]] * 2 + [clients[0]] * 2
    assert clients[0] != clients[2]
    assert "first" not in clients[0]
    assert len({submit.batch for submit in seen}) == 3


def test_clients_with_one_shared_key_are_distinguished_by_address(serving: Callable[..., Served]) -> None:
    served = serving(api_key="only", trust_forwarded=True)
    seen = submits_of(served)
    for lines in ((), ("X-Forwarded-For: 10.0.0.1, 10.0.0.9",), ("X-Forwarded-For: 10.0.0.9",)):
        assert served.ask(COMPLETIONS, {"prompt": "a", "max_tokens": 1}, bearer("only"), *lines)[0] == 200
    near, *far = [submit.client for submit in seen]
    assert near == client_name("", "127.0.0.1")
    assert far == [client_name("", "10.0.0.9")] * 2


def test_forwarded_address_is_ignored_unless_trusted(served: Served) -> None:
    seen = submits_of(served)
    served.ask(COMPLETIONS, {"prompt": "a", "max_tokens": 1}, "X-Forwarded-For: 10.0.0.9")
    assert [submit.client for submit in seen] == [client_name("", "127.0.0.1")]


def test_ipv6_addresses_of_one_network_and_mapped_ipv4_addresses_count_as_one_client() -> None:
    assert client_name("", "2001:db8::1") == client_name("", "2001:db8::ffff:1")
    assert client_name("", "2001:db8::1") != client_name("", "2001:db8:0:1::1")
    assert client_name("", "::ffff:10.0.0.1") == client_name("", "10.0.0.1")
    assert client_name("", "10.0.0.1", ["nonsense"]) == client_name("", "10.0.0.1")
    assert client_name("k", "10.0.0.1") == client_name("k", "10.0.0.2", ["10.0.0.3"])


def test_number_of_choices_is_bounded_per_client(serving: Callable[..., Served]) -> None:
    served = serving(api_key="first,second", limits=HttpLimits(max_choices=4), step_s=0.002)
    status, answer = served.ask(COMPLETIONS, {"prompt": ["a", "b"], "n": 3}, bearer("first"))
    assert (status, answer["error"]["message"]) == (400, "6 choices (n for each prompt) are not accepted: at most 4")
    with served.post(COMPLETIONS, ENDLESS | {"n": 3}, bearer("first")) as connection:
        assert connection.recv(1)
        data = read_all(served.post(COMPLETIONS, {"prompt": "a", "n": 2}, bearer("first"), "Connection: close"))
        assert data.startswith(b"HTTP/1.1 429 ")
        assert b"retry-after: 1" in data.lower()
        assert served.ask(COMPLETIONS, {"prompt": "a", "n": 1, "max_tokens": 1}, bearer("first"))[0] == 200
        assert served.ask(COMPLETIONS, {"prompt": "a", "n": 4, "max_tokens": 1}, bearer("second"))[0] == 200
    wait_for(lambda: served.ask(COMPLETIONS, {"prompt": "a", "n": 2}, bearer("first"))[0] == 200, "room again")


def test_second_client_gets_a_slot_while_another_uses_all(serving: Callable[..., Served]) -> None:
    served = serving(api_key="first,second", limits=HttpLimits(max_requests=16), step_s=0.002)
    taken = [served.post(COMPLETIONS, ENDLESS, bearer("first")) for _ in range(16)]
    try:
        assert all(connection.recv(1) for connection in taken)
        assert served.ask(COMPLETIONS, {"prompt": "a", "max_tokens": 1}, bearer("first"))[0] == 429
        assert served.ask(COMPLETIONS, {"prompt": "a", "max_tokens": 1}, bearer("second"))[0] == 200
    finally:
        for connection in taken:
            connection.close()


def test_many_prompts_of_one_client_do_not_delay_another(
    serving: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine receives one submission of each client in turn."""
    served = serving(api_key="first,second", step_s=0.002)
    seen, came, gate = submits_of(served), list[Command](), threading.Event()
    receiver = served.service.receiver
    answer = receiver.answer

    def noted_answer(client: bytes, command: Command) -> Reply | None:
        reply = answer(client, command)
        came.extend([command] if isinstance(command, Submit) else [])
        return reply

    monkeypatch.setattr(receiver, "answer", noted_answer)
    served.engine.may_step = gate
    try:
        running = served.post(COMPLETIONS, ENDLESS, bearer("first"))
        wait_for(lambda: served.engine.step_count, "a step that lasts")
        many = served.post(COMPLETIONS, {"prompt": ["a"] * 100, "max_tokens": 1}, bearer("first"))
        wait_for(lambda: len(came) == 101, "all that wait")
        few = served.post(COMPLETIONS, {"prompt": "b", "max_tokens": 1}, bearer("second"), "Connection: close")
        wait_for(lambda: len(came) == 102, "one more")
    finally:
        gate.set()
    assert answer_on(few)[0] == 200
    place = next(place for place, submit in enumerate(seen) if submit.prompt == "b")
    assert place < 20, "the prompt waited for the other client's hundred"
    many.close()
    running.close()


def run(side: TokenizerThreads, scenario: Callable[[], Any]) -> None:
    async def whole() -> None:
        await asyncio.wait_for(scenario(), 60)

    try:
        asyncio.run(whole())
    finally:
        side.close()


def test_tokenization_alternates_between_clients_and_requests() -> None:
    side, order, gate, begun = TokenizerThreads(), list[str](), threading.Event(), threading.Event()

    def piece(name: str) -> Callable[[], None]:
        return lambda: order.append(name)

    def wait() -> None:
        begun.set()
        gate.wait()

    async def scenario() -> None:
        large = 2 * SMALL_BYTES
        first = asyncio.create_task(side.run(WorkOwner("much", "0"), large, wait))
        while not begun.is_set():
            await asyncio.sleep(0.001)
        others = [
            asyncio.create_task(side.run(WorkOwner(client, batch), large, piece(client + batch)))
            for client, batch in [("much", "1")] * 3 + [("much", "2"), ("little", "1")]
        ]
        await asyncio.sleep(0)
        await side.run(WorkOwner("much", "3"), 10, piece("small"))
        assert order == ["small"], "a small text waits for a large one"
        gate.set()
        await asyncio.gather(first, *others)

    run(side, scenario)
    assert order.index("little1") <= 2
    assert order.index("much2") < [place for place, name in enumerate(order) if name == "much1"][1]


def test_tokenization_for_a_disconnected_client_is_cancelled() -> None:
    side, gate = TokenizerThreads(), threading.Event()

    async def scenario() -> None:
        first = asyncio.create_task(side.run(WorkOwner("a", "0"), 2 * SMALL_BYTES, gate.wait))
        second = asyncio.create_task(side.run(WorkOwner("a", "1"), 2 * SMALL_BYTES, gate.wait))
        await asyncio.sleep(0)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        assert len(side._queue) <= 1
        gate.set()
        await first
        assert len(side._queue) == 0

    run(side, scenario)


def test_tokenization_error_is_a_client_error() -> None:
    side = TokenizerThreads()

    def bad() -> None:
        raise BadInput("the prompt has 9 tokens: send at most 4")

    async def scenario() -> None:
        with pytest.raises(ApiError) as error:
            await side.run(WorkOwner("a", "0"), 1, bad)
        assert (error.value.status, error.value.code) == (400, "context_length_exceeded")

    run(side, scenario)
