"""Prompts to an engine that is watched from inside, sent to the API address named in its telemetry."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests.inside.conftest import hello_of
from tests.telemetry.collectors.prompting.conftest import (
    Call,
    FakeOpenAI,
    chat_chunk,
    replies_until,
    replies_until_end,
    wait_for,
)

from kvscope_inside import CacheState, Publisher
from kvscope_telemetry.addresses import open_source
from kvscope_telemetry.collectors.own_api import reachable_address
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.commands import (
    Abort,
    ChatMessage,
    Done,
    EstimatePrompt,
    Failed,
    Finished,
    GetStatus,
    LoadedAdapter,
    PromptEstimate,
    Refused,
    Submit,
    Tokens,
)
from kvscope_telemetry.mirror.sync import FIRST_TAG


def stream_hello(call: Call) -> None:
    call.stream()
    call.event(**chat_chunk("Hello", finish_reason="stop"))
    call.done()


@pytest.mark.parametrize(
    ("told", "endpoint", "is_same_machine", "host"),
    [
        ("vllm://127.0.0.1:8000", "ipc:///tmp/v", True, "127.0.0.1"),
        ("vllm://0.0.0.0:8000/?rank=2", "ipc:///tmp/v", True, "127.0.0.1"),
        ("vllm://[::]:8000", "tcp://gpu1:7000", False, "gpu1"),
        ("vllm://10.0.0.5:8000/?tls=1", "tcp://gpu1:7000", False, "10.0.0.5"),
        ("sglang://0.0.0.0:30000", "tcp://127.0.0.1:7000", True, "127.0.0.1"),
    ],
)
def test_announced_api_address_is_translated_to_one_reachable_from_this_machine(
    told: str, endpoint: str, is_same_machine: bool, host: str
) -> None:
    address = reachable_address(told, endpoint, is_same_machine=is_same_machine)
    assert (address.host, address.tls, address.rank) == (host, "tls" in told, 2 if "rank" in told else 0)


@pytest.mark.parametrize(
    ("told", "endpoint", "words"),
    [
        ("vllm://0.0.0.0:8000", "ssh://gpu1", "ssh connection does not forward: forward it, and attach to vllm://127"),
        (
            "vllm://127.0.0.1:8000",
            "tcp://gpu1:7000",
            "vLLM's own API at 127.0.0.1:8000, which can be reached only from its own",
        ),
        ("vllm://0.0.0.0:8000", "tcp://127.0.0.1:7000", "on another machine, whose address is not known here"),
    ],
)
def test_unreachable_api_is_explained_in_one_line(told: str, endpoint: str, words: str) -> None:
    with pytest.raises(BadInput) as raised:
        reachable_address(told, endpoint, is_same_machine=False)
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


def test_api_address_from_an_engine_reads_no_local_file() -> None:
    address = reachable_address("vllm://127.0.0.1:1/?ca=/etc/passwd&tokenizer=/etc", "ipc:///a", is_same_machine=True)
    assert (address.ca, address.tokenizer, address.tls) == ("", "", True)


@pytest.fixture
def watched(fake: FakeOpenAI, tmp_path: Path) -> Any:
    """Source attached to an engine in which kvscope_inside runs."""
    endpoint = f"ipc://{tmp_path}/e"
    state = CacheState(replace(hello_of(), api=fake.address))
    with Publisher(endpoint, state), open_source(endpoint) as source:

        def has_state() -> bool:
            source.update_mirror()
            return source.mirror.hello is not None

        wait_for(has_state)
        yield source


def test_prompts_go_to_the_api_and_commands_to_the_socket(watched: Any, fake: FakeOpenAI) -> None:
    fake.script = stream_hello
    watched.send(Submit(request_id="mine", prompt="hello"))
    replies = replies_until_end(watched)
    assert "".join(reply.text for reply in replies if isinstance(reply, Tokens)) == "Hello"
    headers = fake.calls[0].headers
    assert headers["X-Request-Id"] == "mine"
    watched.send(Abort(request_id="theirs"))
    (reply,) = replies_until(watched, bool)
    assert isinstance(reply, Failed), "the command must go to the engine, which does not support it here"


def test_prompt_is_estimated_by_the_api(watched: Any, fake: FakeOpenAI) -> None:
    fake.script = lambda call: call.answer(200, {"count": 9 if "messages" in call.body else 2, "tokens": []})
    watched.send(EstimatePrompt(messages=(ChatMessage(role="user", content="hello world"),), tag=7))
    (reply,) = replies_until(watched, bool)
    assert reply == PromptEstimate(num_prompt_tokens=9, num_draft_tokens=2, tag=7)


def test_api_lists_the_loaded_adapters(watched: Any, fake: FakeOpenAI) -> None:
    fake.models["data"] += [{"id": "sql", "parent": "m"}]
    assert watched.status.adapters is None
    watched.send(GetStatus(tag=FIRST_TAG))
    wait_for(lambda: watched.status.adapters is not None)
    assert watched.status.adapters == (LoadedAdapter(name="sql", path=""),)


def test_abort_of_a_prompt_closes_the_connection(watched: Any, fake: FakeOpenAI) -> None:
    gone = threading.Event()

    def endless(call: Call) -> None:
        call.stream()
        call.event(**chat_chunk("Hel"))
        call.wait_for_disconnect()
        gone.set()

    fake.script = endless
    watched.send(Submit(request_id="mine", prompt="hello"))
    replies_until(watched, lambda got: any(isinstance(reply, Tokens) for reply in got))
    watched.send(Abort(request_id="mine"))
    done, end = replies_until(watched, lambda got: len(got) == 2)
    assert isinstance(done, Done)
    assert isinstance(end, Finished)
    assert end.finish_reason == "abort"
    assert gone.wait(60)


def test_unreachable_api_refuses_the_prompt_in_one_line(watched: Any, fake: FakeOpenAI) -> None:
    fake.close()
    watched.send(Submit(request_id="mine", prompt="hello"))
    (refused,) = replies_until_end(watched)
    assert isinstance(refused, Refused)
    assert fake.url in refused.reason
    wait_for(lambda: not watched.poll_replies())
