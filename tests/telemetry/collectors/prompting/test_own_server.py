"""Our own HTTP API watched as if it were vLLM's: prompts through both our client and our server, without a model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.engine.http.served import Served
from tests.telemetry.collectors.prompting.conftest import replies_until, replies_until_end, wait_for

from kvscope_telemetry.addresses import open_source
from kvscope_telemetry.collectors.external_source import ExternalSource
from kvscope_telemetry.messages.commands import Abort, Accepted, Done, Finished, Refused, Submit, Tokens
from kvscope_telemetry.messages.sampling_params import SamplingParams

KEY = "secret"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    one = Served(step_s=0.002, api_key=KEY)
    yield one
    one.close()


@pytest.fixture
def source(served: Served) -> Iterator[ExternalSource]:
    host, port = served.address
    with open_source(f"vllm://{host}:{port}", api_key=KEY) as source:
        assert isinstance(source, ExternalSource)
        yield source


def submit(prompt: str, **sampling: object) -> Submit:
    return Submit(request_id=f"r-{prompt}", prompt=prompt, raw=True, sampling=SamplingParams(**sampling))  # type: ignore[arg-type]


def test_own_http_server_accepts_all_sampling_options_of_a_prompt(source: ExternalSource) -> None:
    options = {"top_k": 4, "min_p": 0.1, "min_tokens": 1, "seed": 3, "ignore_eos": True, "stop": ("§",)}
    source.send(submit("abc", n=2, max_tokens=3, stop_token_ids=(1 << 20,), logit_bias={5: 1.0}, **options))
    first, *replies = replies_until_end(source, 2)
    assert isinstance(first, Accepted)
    assert {reply.index for reply in replies if isinstance(reply, Tokens)} == {0, 1}
    ends = [reply for reply in replies if isinstance(reply, Finished)]
    assert [(end.index, end.finish_reason) for end in ends] == [(0, "length"), (1, "length")]
    assert {end.usage.prompt_tokens for end in ends} == {3}


def test_completion_returns_text_and_usage(source: ExternalSource) -> None:
    source.send(submit("abcd", max_tokens=5))
    replies = replies_until_end(source)
    assert len("".join(reply.text for reply in replies if isinstance(reply, Tokens)).split()) == 5
    end = replies[-1]
    assert isinstance(end, Finished)
    assert (end.usage.prompt_tokens, end.usage.completion_tokens) == (4, 5)


def test_abort_frees_the_blocks_of_the_request(source: ExternalSource, served: Served) -> None:
    source.send(submit("endless", max_tokens=1_000_000))
    replies_until(source, lambda got: any(isinstance(reply, Tokens) for reply in got))
    assert served.engine.num_unfinished == 1
    source.send(Abort(request_id="r-endless"))
    got = replies_until(source, lambda got: any(isinstance(reply, Finished) for reply in got))
    assert Done(request_id="r-endless") in got
    assert isinstance(got[-1], Finished)
    assert got[-1].finish_reason == "abort"
    wait_for(lambda: served.engine.num_unfinished == 0)


def test_closing_the_source_aborts_its_requests(served: Served) -> None:
    host, port = served.address
    with open_source(f"vllm://{host}:{port}", api_key=KEY) as source:
        assert isinstance(source, ExternalSource)
        source.send(submit("endless", max_tokens=1_000_000))
        wait_for(lambda: served.engine.num_unfinished == 1)
    wait_for(lambda: served.engine.num_unfinished == 0)


def test_refused_prompt_and_wrong_api_key_are_reported(source: ExternalSource, served: Served) -> None:
    source.send(submit("", max_tokens=1))
    (reply,) = replies_until_end(source)
    assert isinstance(reply, Refused)
    assert "HTTP 400: the prompt is empty" in reply.reason
    host, port = served.address
    with open_source(f"vllm://{host}:{port}", api_key="wrong") as stranger:
        assert isinstance(stranger, ExternalSource)
        stranger.send(submit("abc"))
        (reply,) = replies_until_end(stranger)
    assert isinstance(reply, Refused)
    assert "does not accept the API key (HTTP 401)" in reply.reason
