"""Builds the requests to the engine for the answers to one prompt. Imports no Qt."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from kvscope_app.ui.model_name import model_name
from kvscope_app.views.console.chat_answer import ChatAnswer
from kvscope_app.views.console.conversation import (
    Conversation,
    Message,
    messages_to_send,
    sampling_to_send,
    tools_to_send,
)
from kvscope_telemetry.messages.commands import Submit
from kvscope_telemetry.messages.sampling_params import ModelSampling, SamplingParams
from kvscope_telemetry.messages.telemetry import Hello


class AnswerRequest(NamedTuple):
    submit: Submit
    answers: list[ChatAnswer]
    """One for each completion of the request, by index."""


def answer_requests(
    conversation: Conversation, messages: Sequence[Message], hello: Hello | None, epoch: int, *, is_own_engine: bool
) -> list[AnswerRequest]:
    """Return the requests whose completions are written into `messages`, versions of the answer to one prompt.

    An engine that can abort a single completion gets one request, whose completions share the blocks of the prompt from
    the beginning. Other engines get a request per answer, so that each can be stopped.

    Args:
        hello: The engine's description, None if it is unknown.
        epoch: Start of the engine at which the prompt is sent.
        is_own_engine: Whether the engine accepts token ids of earlier answers and reports log-probabilities.
    """
    sampling = sampling_to_send(conversation, hello.model.sampling if hello else ModelSampling())
    if not is_own_engine:
        sampling = replace(sampling, logprobs=None)
    submit = Submit(
        request_id="-",
        messages=messages_to_send(conversation, with_token_ids=is_own_engine, last=messages[0].parent),
        sampling=sampling,
        adapter=conversation.adapter,
        tools=tools_to_send(conversation),
    )
    is_one_request = is_own_engine and hello is not None and hello.capabilities.completion_aborts
    batches = [list(messages)] if is_one_request else [[message] for message in messages]
    requests = []
    for offset, batch in enumerate(batches):
        request_id = f"chat-{secrets.token_hex(6)}"
        answers = [
            ChatAnswer(
                request_id,
                conversation,
                message,
                epoch,
                sampling.max_tokens,
                model_name(hello),
                index=index if len(batch) > 1 else None,
            )
            for index, message in enumerate(batch)
        ]
        sent = replace(_with_seed_offset(sampling, offset), n=len(batch))
        requests.append(AnswerRequest(replace(submit, request_id=request_id, sampling=sent), answers))
    return requests


def _with_seed_offset(sampling: SamplingParams, offset: int) -> SamplingParams:
    """Return `sampling` with another seed for each answer, as the engine does for completions of one request."""
    if sampling.seed is None:
        return sampling
    step = -offset if sampling.seed > 0 else offset  # toward 0: the seed stays within 64 bits
    return replace(sampling, seed=sampling.seed + step)
