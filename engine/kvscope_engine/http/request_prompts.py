"""Converts the prompts in a request body to token ids, or to text if this process has no tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvscope_engine.http.api_state import Api
from kvscope_engine.http.schemas.api_errors import ApiError, refusal_error
from kvscope_engine.http.schemas.chat_rendering import conversation_text, message_text
from kvscope_engine.http.schemas.request_bodies import ChatBody, MessageBody, Tool
from kvscope_engine.http.tokenizer_threads import SMALL_BYTES, WorkOwner
from kvscope_engine.tokenization.tokenizer import Tokenizer
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.commands import ChatMessage


@dataclass(frozen=True, slots=True)
class Prompt:
    fields: dict[str, Any]


async def text_prompts(
    api: Api, owner: WorkOwner, tokenizer: Tokenizer | None, prompts_in: Sequence[str | list[int]]
) -> list[Prompt]:
    max_len = api.max_model_len
    for prompt in prompts_in:
        if isinstance(prompt, list) and 0 < max_len <= len(prompt):
            raise refusal_error(f"the prompt has {len(prompt)} tokens: send at most {max_len - 1}")
    if tokenizer is None or all(isinstance(prompt, list) for prompt in prompts_in):
        return [_untokenized(prompt) for prompt in prompts_in]
    prompts: list[Prompt] = []
    for batch in _batches(prompts_in):
        num_bytes = sum(map(_text_bytes, batch))
        work = partial(_tokenized_all, batch, tokenizer, max_len)
        prompts += await api.tokenizer_threads.run(owner, num_bytes, work)
    return prompts


async def chat_prompt(
    api: Api, owner: WorkOwner, tokenizer: Tokenizer | None, body: ChatBody, num_bytes: int
) -> Prompt:
    tools = body.tools if body.tools and body.tool_choice != "none" else ()
    if tokenizer is None:
        return _as_messages(api, body, tools)
    max_len = api.max_model_len
    effort = {} if body.reasoning_effort is None else {"reasoning_effort": body.reasoning_effort}
    extra = effort | (body.chat_template_kwargs or {})
    work = partial(chat_ids, tokenizer, body.messages, tools, extra, max_len=max_len)
    return Prompt({"prompt_token_ids": tuple(await api.tokenizer_threads.run(owner, num_bytes, work))})


def chat_ids(
    tokenizer: Tokenizer,
    messages: Sequence[MessageBody],
    tools: Sequence[Tool] = (),
    extra: dict[str, Any] | None = None,
    *,
    max_len: int,
    add_generation_prompt: bool = True,
) -> list[int]:
    """Return the token ids of a conversation. Raises BadInput if the conversation is too long or the chat
    template cannot render it, and ApiError for a message that is not accepted.
    """
    text = conversation_text(tokenizer, messages, tools, extra, add_generation_prompt=add_generation_prompt)
    return text_ids(tokenizer, text, max_len, add_special_tokens=False)


def text_ids(tokenizer: Tokenizer, text: str, max_len: int, *, add_special_tokens: bool = True) -> list[int]:
    tokenizer.refuse_too_long(text, max_len)
    return tokenizer.encode(text, add_special_tokens=add_special_tokens)


def _batches(prompts_in: Sequence[str | list[int]]) -> Iterator[list[str | list[int]]]:
    """Group prompts into batches of at most `SMALL_BYTES` of text. A larger prompt forms a separate batch."""
    batch: list[str | list[int]] = []
    num_bytes = 0
    for prompt in prompts_in:
        if batch and num_bytes + _text_bytes(prompt) > SMALL_BYTES:
            yield batch
            batch, num_bytes = [], 0
        batch.append(prompt)
        num_bytes += _text_bytes(prompt)
    yield batch


def _text_bytes(prompt: str | list[int]) -> int:
    return 4 * len(prompt) if isinstance(prompt, str) and not prompt.isascii() else len(prompt)


def _tokenized_all(prompts_in: Sequence[str | list[int]], tokenizer: Tokenizer, max_len: int) -> list[Prompt]:
    return [_tokenized(prompt, tokenizer, max_len) for prompt in prompts_in]


def _tokenized(prompt: str | list[int], tokenizer: Tokenizer, max_len: int) -> Prompt:
    if not prompt:
        raise BadInput("the prompt is empty: at least one token is accepted")
    ids = prompt if isinstance(prompt, list) else text_ids(tokenizer, prompt, max_len)
    return Prompt({"prompt_token_ids": tuple(ids)})


def _untokenized(prompt: str | list[int]) -> Prompt:
    if isinstance(prompt, list):
        return Prompt({"prompt_token_ids": tuple(prompt)})
    return Prompt({"prompt": prompt})


def _as_messages(api: Api, body: ChatBody, tools: Sequence[Tool]) -> Prompt:
    """Return plain messages for the engine's own tokenizer. Raises ApiError for tools and template options."""
    roles = {message.role for message in body.messages}
    if tools or body.chat_template_kwargs or body.reasoning_effort or roles - {"system", "user", "assistant"}:
        names = "tools, chat_template_kwargs and reasoning_effort"
        raise ApiError(400, f"{names} are not accepted: {api.tokenizer_threads.reason}", param="messages")
    turns = tuple(
        ChatMessage(role=m.role, content=message_text(m))
        for m in body.messages
        if m.role != "developer" and m.role != "tool"
    )
    return Prompt({"messages": turns})
