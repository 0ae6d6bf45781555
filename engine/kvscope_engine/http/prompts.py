"""Prompts of a request as the engine gets them: token ids made here, or text where there is no tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvscope_engine.http.api import Api
from kvscope_engine.http.shapes.bodies import ChatBody, Message, Tool
from kvscope_engine.http.shapes.conversation import conversation_ids, message_text
from kvscope_engine.http.shapes.errors import ApiError
from kvscope_engine.model.text.tokenizer import Tokenizer
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.commands import ChatMessage


@dataclass(frozen=True, slots=True)
class Prompt:
    """Fields of a `Submit`."""

    fields: dict[str, Any]


async def text_prompts(api: Api, tokenizer: Tokenizer | None, given: Sequence[str | list[int]]) -> list[Prompt]:
    """Of completions. Raises ApiError."""
    max_len = api.hello.model.max_model_len
    if tokenizer is None or all(isinstance(prompt, list) for prompt in given):
        return [_untouched(prompt) for prompt in given]
    return await api.text.run(lambda: [_of(prompt, tokenizer, max_len) for prompt in given])


async def chat_prompt(api: Api, tokenizer: Tokenizer | None, body: ChatBody) -> Prompt:
    """Of a chat. Raises ApiError."""
    tools = body.tools if body.tools and body.tool_choice != "none" else ()
    if tokenizer is None:
        return _as_messages(api, body, tools)
    max_len = api.hello.model.max_model_len
    ids = await api.text.run(
        lambda: chat_ids(tokenizer, body.messages, tools, body.chat_template_kwargs, max_len=max_len)
    )
    return Prompt({"prompt_token_ids": tuple(ids)})


def chat_ids(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    tools: Sequence[Tool] = (),
    extra: dict[str, Any] | None = None,
    *,
    max_len: int,
    add_generation_prompt: bool = True,
) -> list[int]:
    """Token ids of a conversation that is not endless. Raises BadInput, ApiError."""
    _refuse_endless(sum(len(message_text(message)) for message in messages), tokenizer, max_len)
    return conversation_ids(tokenizer, messages, tools, extra, add_generation_prompt=add_generation_prompt)


def text_ids(tokenizer: Tokenizer, text: str, max_len: int, *, add_special_tokens: bool = True) -> list[int]:
    """Token ids of a text that is not endless. Raises BadInput."""
    _refuse_endless(len(text), tokenizer, max_len)
    return tokenizer.encode(text, add_special_tokens=add_special_tokens)


def _of(prompt: str | list[int], tokenizer: Tokenizer, max_len: int) -> Prompt:
    if not prompt:
        raise BadInput("the prompt is empty: at least one token is accepted")
    ids = prompt if isinstance(prompt, list) else text_ids(tokenizer, prompt, max_len)
    return Prompt({"prompt_token_ids": tuple(ids)})


def _untouched(prompt: str | list[int]) -> Prompt:
    if isinstance(prompt, list):
        return Prompt({"prompt_token_ids": tuple(prompt)})
    return Prompt({"prompt": prompt})


def _as_messages(api: Api, body: ChatBody, tools: Sequence[Tool]) -> Prompt:
    """For the engine's own tokenizer, which is asked for plain conversations alone."""
    roles = {message.role for message in body.messages}
    if tools or body.chat_template_kwargs or roles - {"system", "user", "assistant"}:
        raise ApiError(400, f"tools and chat_template_kwargs are not accepted: {api.text.reason}", param="messages")
    turns = tuple(
        ChatMessage(role=m.role, content=message_text(m))
        for m in body.messages
        if m.role != "developer" and m.role != "tool"
    )
    return Prompt({"messages": turns})


def _refuse_endless(num_characters: int, tokenizer: Tokenizer, max_len: int) -> None:
    """Refuse what is too long whatever its tokens are, before any time is spent on finding them."""
    limit = max_len * tokenizer.max_token_characters
    if num_characters > limit:
        raise BadInput(
            f"the prompt has {num_characters} characters: more than {limit} cannot fit in the {max_len} tokens of"
            " this model's limit"
        )
