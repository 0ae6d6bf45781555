"""Estimates of prompts by the tokenizers of other engines' servers, over real sockets."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from tests.telemetry.collectors.prompting.conftest import Call, FakeOpenAI, replies_until

from kvscope_telemetry.collectors.prompting.prompter import Prompter
from kvscope_telemetry.messages.commands import ChatMessage, EstimatePrompt, Failed, PromptEstimate, Reply

Prompt = Callable[..., Prompter]
MESSAGES = (ChatMessage(role="system", content="be brief"), ChatMessage(role="user", content="hello world"))
QUESTION = EstimatePrompt(messages=MESSAGES, tag=7)
MESSAGE_FIELDS = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello world"}]


def answer_as_vllm(call: Call) -> None:
    """Answer with one token per word, and five of the chat template for each message, as vLLM 0.33 does."""
    if call.path != "/tokenize":
        return call.answer(404, {"detail": "Not Found"})
    texts = [call.body["prompt"]] if "prompt" in call.body else [each["content"] for each in call.body["messages"]]
    template = 0 if "prompt" in call.body else 5 * len(texts)
    tokens = list(range(template + sum(len(text.split()) for text in texts)))
    return call.answer(200, {"count": len(tokens), "max_model_len": 2048, "tokens": tokens, "token_strs": None})


def answer_as_llama_cpp(call: Call) -> None:
    """Answer with one token per word, and one at the beginning of a prompt, as llama-server b9000 does."""
    if call.path == "/apply-template":
        return call.answer(200, {"prompt": " ".join(f"<|{m['role']}|> {m['content']}" for m in call.body["messages"])})
    words = call.body["content"].split()
    return call.answer(200, {"tokens": list(range(len(words) + call.body["add_special"]))})


def reply_to(prompter: Prompter, question: EstimatePrompt) -> Reply:
    prompter.send(question)
    return replies_until(prompter, bool)[0]


@pytest.mark.parametrize(
    ("scheme", "script", "num_prompt_tokens"),
    [("vllm", answer_as_vllm, 14), ("sglang", answer_as_vllm, 14), ("llama", answer_as_llama_cpp, 7)],
)
def test_prompt_and_draft_are_counted_by_the_servers_tokenizer(
    fake: FakeOpenAI, prompt: Prompt, scheme: str, script: Any, num_prompt_tokens: int
) -> None:
    fake.script = script
    prompter = prompt(fake.address.replace("vllm", scheme), api_key="secret")
    reply = reply_to(prompter, QUESTION)
    assert reply == PromptEstimate(num_prompt_tokens=num_prompt_tokens, num_draft_tokens=2, tag=7)
    assert fake.calls[0].body == {"model": "m", "messages": MESSAGE_FIELDS}
    assert {call.headers["Authorization"] for call in fake.calls} == {"Bearer secret"}
    assert {call.body["model"] for call in fake.calls} == {"m"}


def test_adapter_and_tools_are_counted_with_the_prompt(fake: FakeOpenAI, prompt: Prompt) -> None:
    fake.script = answer_as_vllm
    tools = [{"type": "function", "function": {"name": "time"}}]
    question = EstimatePrompt(messages=MESSAGES, adapter="pirate", tools=json.dumps(tools))
    reply_to(prompt(fake.address), question)
    assert (fake.calls[0].body["model"], fake.calls[0].body["tools"]) == ("pirate", tools)


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        (404, {"detail": "Not Found"}, "/tokenize not found (HTTP 404)"),
        (401, {"error": "Unauthorized"}, "/tokenize needs an API key"),
        (400, {"message": "[{'loc': ('body', 'prompt'), 'msg': 'Field required'}]"}, "answers with HTTP 400"),
        (200, {"tokens": []}, "its answer has no 'count'"),
        (200, b"<html>", "/tokenize does not answer with JSON"),
    ],
)
def test_server_that_counts_no_tokens_leaves_the_question_unanswered(
    fake: FakeOpenAI, prompt: Prompt, status: int, body: Any, reason: str
) -> None:
    fake.script = lambda call: call.answer(status, body)
    reply = reply_to(prompt(fake.address), QUESTION)
    assert isinstance(reply, Failed)
    assert reason in reply.reason
    assert (reply.is_unanswered, reply.tag) == (True, 7)


def test_closing_does_not_wait_for_a_server_that_does_not_answer(fake: FakeOpenAI, prompt: Prompt) -> None:
    fake.script = lambda call: call.wait_for_disconnect()
    prompter = prompt(fake.address)
    prompter.send(QUESTION)
    prompter.send(QUESTION)
    while not fake.calls:
        assert not prompter.poll_replies()
    prompter.close()
    assert not prompter.poll_replies()
