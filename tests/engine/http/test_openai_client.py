"""OpenAI's client with the default model on the real engine, over real sockets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.engine.http.served import Served, wait_for

from kvscope_engine import Engine, EngineConfig
from kvscope_telemetry.metrics.metrics_page import MetricsPage

CONFIG = EngineConfig(device="cpu", num_gpu_blocks_override=512, max_num_seqs=32)
HELLO: Any = [{"role": "user", "content": "What is the capital of France?"}]
ENDLESS: Any = {"max_tokens": 4000, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    def build(progress: Any, publish: Any, messages_dropped: Any) -> Engine:
        return Engine(CONFIG, progress=progress, publish=publish, messages_dropped=messages_dropped)

    one = Served(build=build)
    yield one
    one.close()


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    host, port = served.address
    with openai.OpenAI(base_url=f"http://{host}:{port}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["default"]
    assert client.models.retrieve("default").id == "default"


def test_chat_answer_equals_that_of_the_engine(client: openai.OpenAI, served: Served) -> None:
    answer = client.chat.completions.create(model="default", messages=HELLO, temperature=0, max_completion_tokens=16)
    tokenizer = served.engine.tokenizer
    ids = tokenizer.chat(HELLO)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(ids)
    assert answer.choices[0].message.role == "assistant"
    again = client.completions.create(model="default", prompt=ids, temperature=0, max_tokens=16)
    assert again.choices[0].text.strip() == (answer.choices[0].message.content or "").strip()
    assert again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    assert (again.usage.prompt_tokens_details.cached_tokens or 0) >= 16


def test_streamed_answer_equals_the_complete_answer(client: openai.OpenAI) -> None:
    asked: Any = {"model": "default", "messages": HELLO, "temperature": 0, "max_tokens": 16}
    whole = client.chat.completions.create(**asked)
    *chunks, last = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert last.usage is not None
    assert whole.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens


def test_stream_events_have_the_usage_so_far_on_request(client: openai.OpenAI) -> None:
    asked: Any = {"model": "default", "messages": HELLO, "temperature": 0, "max_tokens": 16}
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = client.chat.completions.create(**asked, stream=True, stream_options=options)
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage is not None]
    assert len(counts) == len(chunks)
    assert counts == sorted(counts)
    assert last.usage is not None
    assert counts[-1] == last.usage.completion_tokens
    assert {chunk.usage.prompt_tokens for chunk in chunks if chunk.usage is not None} == {last.usage.prompt_tokens}


def test_stop_string_ends_the_answer(client: openai.OpenAI) -> None:
    asked: Any = {"model": "default", "prompt": "One, two, three, four,", "temperature": 0, "max_tokens": 12}
    whole = client.completions.create(**asked).choices[0]
    assert len(whole.text) > 4
    stop = whole.text[3:5]
    cut = client.completions.create(**asked, stop=stop).choices[0]
    assert cut.finish_reason == "stop"
    assert cut.text == whole.text[: whole.text.index(stop)]


def test_several_choices_are_reproducible_by_seed(client: openai.OpenAI) -> None:
    asked: Any = {"model": "default", "prompt": "Once upon a time", "temperature": 1.0, "max_tokens": 12, "n": 3}
    first, again = (client.completions.create(**asked, seed=7) for _ in range(2))
    texts = [choice.text for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert len(set(texts)) > 1
    assert texts == [choice.text for choice in again.choices]


def test_logprobs_have_the_text_of_their_tokens(client: openai.OpenAI) -> None:
    asked: Any = {"model": "default", "temperature": 0, "max_tokens": 6}
    chat = client.chat.completions.create(**asked, messages=HELLO, logprobs=True, top_logprobs=3).choices[0]
    assert chat.logprobs is not None
    entries = chat.logprobs.content or []
    assert "".join(entry.token for entry in entries) == chat.message.content
    assert all(
        entry.top_logprobs[0].logprob == entry.logprob for entry in entries
    )  # greedy sampling chose the most likely token
    assert all(bytes(entry.bytes or ()) == entry.token.encode() for entry in entries)
    done = client.completions.create(**asked, prompt="The sky is", logprobs=2).choices[0]
    assert done.logprobs is not None
    assert "".join(done.logprobs.tokens or ()) == done.text
    assert (done.logprobs.text_offset or [])[0] == 0
    assert all(len(top) == 2 for top in done.logprobs.top_logprobs or [])


def test_several_prompts_are_answered_in_order(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="default", prompt=["A", "The"], n=2, max_tokens=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]


def test_disconnecting_frees_the_blocks(client: openai.OpenAI, served: Served) -> None:
    stream = client.chat.completions.create(model="default", messages=HELLO, stream=True, **ENDLESS)
    next(iter(stream))
    wait_for(lambda: served.engine.num_unfinished == 1, "a running request")
    stream.close()
    wait_for(lambda: served.engine.num_unfinished == 0, "an end of what nobody wants")


def test_errors_have_openai_types_and_codes(client: openai.OpenAI) -> None:
    ask: Any = client.chat.completions.create
    with pytest.raises(openai.NotFoundError):
        ask(model="other", messages=HELLO)
    with pytest.raises(openai.BadRequestError, match="temperature=-1"):
        ask(model="default", messages=HELLO, temperature=-1)
    content = [{"type": "image_url", "image_url": {"url": "http://localhost/x.png"}}]
    with pytest.raises(openai.BadRequestError, match="image_url"):
        ask(model="default", messages=[{"role": "user", "content": content}])
    with pytest.raises(openai.BadRequestError, match="tool_choice"):
        ask(model="default", messages=HELLO, tool_choice="required")
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(model="default", prompt=[1] * 9000)
    assert error.value.code == "context_length_exceeded"


def test_conversation_with_tools_is_accepted(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    turns: Any = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    answer = client.chat.completions.create(
        model="default", messages=turns, tools=[tool], tool_choice="none", max_tokens=4
    )
    assert answer.choices[0].finish_reason in ("length", "stop")
    with pytest.raises(openai.BadRequestError, match="chat template does not show them") as error:
        client.chat.completions.create(model="default", messages=turns, tools=[tool], max_tokens=4)
    assert error.value.param == "tools"


def test_tokenize_and_detokenize_round_trip(client: openai.OpenAI, served: Served) -> None:
    asked: Any = {"messages": HELLO}
    tokens = served.ask("/tokenize", asked)[1]
    assert tokens["tokens"] == served.engine.tokenizer.chat(HELLO)
    assert tokens["count"] == len(tokens["tokens"])
    answer = served.ask("/tokenize", {"prompt": "Grüße, 世界", "return_token_strs": True})[1]
    assert len(answer["token_strs"]) == answer["count"]
    assert served.ask("/detokenize", {"tokens": answer["tokens"]})[1] == {"prompt": "Grüße, 世界"}


def test_metrics_count_the_requests(client: openai.OpenAI, served: Served) -> None:
    with closing(MetricsPage(f"ipc://{served.folder}")) as page:
        wait_for(lambda: b"kvscope_steps_total" in page.render("")[0], "an engine that is heard")

        def counted() -> bool:  # events before the page subscribed are only in the totals
            client.chat.completions.create(model="default", messages=HELLO, temperature=0, max_tokens=2)
            samples = [s for each in text_string_to_metric_families(page.render("")[0].decode()) for s in each.samples]
            values = {(s.name, s.labels.get("finished_reason", "")): s.value for s in samples}
            return (
                values["vllm:time_to_first_token_seconds_count", ""] >= 1
                and values["vllm:request_decode_time_seconds_count", ""] >= 1
                and values["vllm:request_success_total", "length"] >= 1
                and values["vllm:generation_tokens_total", ""] >= 2
            )

        wait_for(counted, "a request on the page")


def test_neutral_fields_do_not_change_the_answer(client: openai.OpenAI) -> None:
    asked: Any = {"model": "default", "messages": HELLO, "temperature": 0, "max_tokens": 8}
    plain = client.chat.completions.create(**asked)
    same = client.chat.completions.create(
        **asked,
        user="ann",
        safety_identifier="a1",
        metadata={"a": "b"},
        store=True,
        service_tier="auto",
        prompt_cache_key="k",
        prompt_cache_retention="24h",
        prediction={"type": "content", "content": "Paris"},
        verbosity="low",
        reasoning_effort="low",
        parallel_tool_calls=True,
        extra_body={"skip_special_tokens": True, "spaces_between_special_tokens": True, "use_beam_search": False},
    )
    assert same.choices[0].message.content == plain.choices[0].message.content


@pytest.mark.parametrize(
    "field",
    [{"skip_special_tokens": False}, {"use_beam_search": True}, {"web_search_options": {}}, {"functions": []}],
    ids=lambda field: next(iter(field)),
)
def test_fields_that_would_change_an_answer_are_refused_by_name(client: openai.OpenAI, field: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model="default", messages=HELLO, max_tokens=1, extra_body=field)
    assert error.value.param == next(iter(field))


def test_requests_that_can_never_fit_are_refused_with_400(client: openai.OpenAI) -> None:
    long = "\U0001f600" * 600_000
    calls: list[Any] = [
        lambda: client.completions.create(model="default", prompt=long),
        lambda: client.completions.create(model="default", prompt=["a", long]),
        lambda: client.completions.create(model="default", prompt=[[1] * 100_000]),
        lambda: client.chat.completions.create(model="default", messages=[{"role": "user", "content": long}]),
        lambda: client.post("/../tokenize", body={"prompt": long}, cast_to=object),
    ]
    for call in calls:
        with pytest.raises(openai.BadRequestError) as error:
            call()
        assert error.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match=r"16384 choices .* at most 8192"):
        client.completions.create(model="default", prompt=["a"] * 256, n=64)


def test_echoed_prompt_has_the_log_probabilities_of_its_tokens(client: openai.OpenAI, served: Served) -> None:
    text = "The capital of France is Paris."
    ids = served.engine.tokenizer.encode(text)
    asked: Any = {"model": "default", "temperature": 0, "echo": True, "logprobs": 2}
    whole = client.completions.create(**asked, prompt=text, max_tokens=3).choices[0]
    assert whole.text.startswith(text)
    logprobs: Any = whole.logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(ids) + 3
    assert (logprobs.token_logprobs[0], logprobs.top_logprobs[0]) == (None, None)
    assert all(value <= 0 for value in logprobs.token_logprobs[1:])
    assert "".join(logprobs.tokens) == whole.text
    assert [whole.text[at:][: len(token)] for at, token in zip(logprobs.text_offset, logprobs.tokens, strict=True)] == (
        logprobs.tokens
    )
    only_prompt = client.completions.create(**asked, prompt=ids, max_tokens=0)
    choice: Any = only_prompt.choices[0]
    assert (choice.text, choice.finish_reason) == (text, "length")
    assert choice.logprobs.token_logprobs[1:] == pytest.approx(logprobs.token_logprobs[1 : len(ids)], abs=0.02)
    assert only_prompt.usage is not None
    assert only_prompt.usage.completion_tokens == 0
    pieces: Any = list(client.completions.create(**asked, prompt=text, max_tokens=3, stream=True))
    assert "".join(piece.choices[0].text for piece in pieces) == whole.text


def test_each_prompt_of_a_list_is_echoed_with_its_own_scores(client: openai.OpenAI, served: Served) -> None:
    prompts = [served.engine.tokenizer.encode(text) for text in ("One two three four", "Hello")]
    answer: Any = client.completions.create(model="default", prompt=prompts, max_tokens=1, echo=True, logprobs=1, n=2)
    assert [len(choice.logprobs.tokens) for choice in answer.choices] == [len(ids) + 1 for ids in prompts for _ in "ab"]
    firsts = [choice.logprobs.token_logprobs[1:-1] for choice in answer.choices]
    assert (firsts[0], firsts[2]) == (firsts[1], firsts[3])


def test_prompt_logprobs_are_returned_in_the_format_of_vllm(client: openai.OpenAI, served: Served) -> None:
    ids = served.engine.tokenizer.encode("The capital of France")
    asked: Any = {"model": "default", "max_tokens": 1, "extra_body": {"prompt_logprobs": 1}}
    positions: Any = client.completions.create(**asked, prompt=ids).choices[0].model_extra
    first, *others = positions["prompt_logprobs"]
    assert first is None
    for token_id, position in zip(ids[1:], others, strict=True):
        own = position[str(token_id)]
        assert own["decoded_token"] == served.engine.tokenizer.token_text(token_id)
        best = max(position.values(), key=lambda one: one["logprob"])
        assert best["rank"] == 1
        assert (own["rank"] == 1) == (own["logprob"] == best["logprob"])
    chat: Any = client.chat.completions.create(**asked, messages=HELLO).model_extra
    assert len(chat["prompt_logprobs"]) == len(served.engine.tokenizer.chat(HELLO))
    with pytest.raises(openai.BadRequestError, match="not accepted with stream"):
        client.completions.create(**asked, prompt=ids, stream=True)
