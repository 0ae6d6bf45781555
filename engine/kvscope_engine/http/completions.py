"""Endpoints `POST /v1/completions` and `POST /v1/chat/completions`: send prompts to the engine and return the
completions, complete or streamed.

Requests of clients that hung up are aborted.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from functools import partial
from typing import Protocol

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from kvscope_engine.http.api_state import Api
from kvscope_engine.http.chat_generation import ChatGeneration, chat_generation
from kvscope_engine.http.generation import ChoiceReplies, Generation
from kvscope_engine.http.http_connection import Events, EventStream, TextEvents, cancel_on_disconnect, encode_events
from kvscope_engine.http.info_endpoints import json_response
from kvscope_engine.http.middleware import owner_of, read_body, slot_of
from kvscope_engine.http.prompt_echo import PromptEcho, PromptScores
from kvscope_engine.http.request_prompts import Prompt, text_prompts
from kvscope_engine.http.schemas.api_errors import ApiError
from kvscope_engine.http.schemas.logprobs import chat_logprobs, completion_logprobs, concatenate_logprobs
from kvscope_engine.http.schemas.request_bodies import MAX_PROMPTS, ChatBody, CompletionBody
from kvscope_engine.http.schemas.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionMessage,
    ChatDelta,
    ChatLogprobs,
    CompletionChoice,
    CompletionLogprobs,
    CompletionResponse,
    UsageInfo,
)
from kvscope_engine.http.schemas.sampling_mapping import (
    StreamUsage,
    completion_sampling,
    stream_usage,
    submission,
)
from kvscope_engine.tokenization.tokenizer import Tokenizer
from kvscope_telemetry.messages.commands import Finished, Tokens
from kvscope_telemetry.messages.sampling_params import SamplingParams


class _Answer(Protocol):
    is_stream: bool
    generation: Generation

    async def whole(self) -> msgspec.Struct: ...

    def events(self, usage: StreamUsage) -> Events: ...


async def _response(request: Request, answer: _Answer, usage: StreamUsage) -> Response:
    """Return `answer` complete or as a stream. Generation is aborted if the client hangs up."""
    if answer.is_stream:
        await cancel_on_disconnect(request, answer.generation.start_or_close())
        return EventStream(request, answer.events(usage), answer.generation.close)
    return json_response(await cancel_on_disconnect(request, answer.whole()))


async def completions(request: Request) -> Response:
    """Handle `POST /v1/completions`: prompts as text or token ids, without a chat template."""
    answer, usage = await _read_completion(request)
    return await _response(request, answer, usage)


async def _read_completion(request: Request) -> tuple[_CompletionAnswer, StreamUsage]:
    """Parse the request body. Returns the completion to generate, and which stream events report usage."""
    api: Api = request.app.state.api
    body = await read_body(request, CompletionBody, api.settings.limits)
    adapter = await api.adapter_of(body.model)
    usage, sampling = stream_usage(body), completion_sampling(body)
    slot, given_prompts = slot_of(request), _prompts_of(body)
    slot.count_choices(len(given_prompts) * sampling.n)
    tokenizer = await api.tokenizer_threads.tokenizer(api.hello.model)
    prompts = await cancel_on_disconnect(request, text_prompts(api, owner_of(request), tokenizer, given_prompts))
    echoes: list[PromptEcho] = []
    if body.echo:
        if tokenizer is None:
            raise ApiError(400, f"echo=true is not accepted: {api.tokenizer_threads.reason}", param="echo")
        work = partial(_echoes, given_prompts, prompts, tokenizer, body.logprobs)
        echoes = await api.tokenizer_threads.run(owner_of(request), slot.body_bytes, work)
    slot.release_body()
    return _CompletionAnswer(api, slot.client, body, sampling, prompts, echoes, tokenizer, adapter), usage


def _prompts_of(body: CompletionBody) -> Sequence[str | list[int]]:
    value = body.prompt
    if isinstance(value, str):
        return [value]
    if value and all(isinstance(token, int) for token in value):
        return [[token for token in value if isinstance(token, int)]]
    prompts = [prompt for prompt in value if isinstance(prompt, str | list)]
    if not prompts or len(prompts) != len(value) or len({type(prompt) for prompt in prompts}) > 1:
        message = "prompt is not accepted: must be a string, token ids, or a list of one of them"
        raise ApiError(400, message, param="prompt")
    if len(prompts) > MAX_PROMPTS:
        message = f"{len(prompts)} prompts are not accepted: at most {MAX_PROMPTS} in a request"
        raise ApiError(400, message, param="prompt")
    return prompts


def _echoes(
    given: Sequence[str | list[int]], prompts: Sequence[Prompt], tokenizer: Tokenizer, num_top: int | None
) -> list[PromptEcho]:
    echoes = []
    for one, prompt in zip(given, prompts, strict=True):
        token_ids = prompt.fields["prompt_token_ids"]
        echoes.append(PromptEcho(one if isinstance(one, str) else tokenizer.decode(one), token_ids, num_top))
    return echoes


class _CompletionAnswer:
    def __init__(
        self,
        api: Api,
        client: str,
        body: CompletionBody,
        sampling: SamplingParams,
        prompts: Sequence[Prompt],
        echoes: Sequence[PromptEcho],
        tokenizer: Tokenizer | None,
        adapter: str,
    ) -> None:
        self._id = f"cmpl-{secrets.token_hex(16)}"
        self._created = int(time.time())
        self._model = adapter or api.model_name
        self._tokenizer = tokenizer
        self._lengths: dict[int, int] = {}
        self._echoes = echoes
        are_returned = body.prompt_logprobs is not None
        self._scores = [PromptScores(tokenizer, are_returned=are_returned) for _ in prompts]
        self._drops_output = body.max_tokens == 0
        self._num_completions = sampling.n
        owner = {"client": client, "batch": self._id, "adapter": adapter}
        submits = [
            submission(f"{self._id}-{number}", body, sampling, raw=True, **owner, **prompt.fields)
            for number, prompt in enumerate(prompts)
        ]
        self._num_choices = len(prompts) * sampling.n
        self.is_stream = bool(body.stream)
        self.generation = Generation(api.engine_client, submits, is_stream=self.is_stream)

    async def whole(self) -> CompletionResponse:
        with self.generation as generation:
            await generation.start()
            choices = self._choices(await generation.collect())
            parts: dict[int, list[CompletionChoice]] = {number: [] for number in range(self._num_choices)}
            for choice in choices:
                parts[choice.index].append(choice)
            return self._completion([_merged_choice(number, part) for number, part in parts.items()], generation.usage)

    async def events(self, usage: StreamUsage) -> Events:
        def chunk(choice: CompletionChoice) -> CompletionResponse:
            if usage is StreamUsage.EACH:
                return self._completion([choice], self.generation.usage_so_far)
            return self._completion([choice], UNSET if usage is StreamUsage.NONE else None)

        texts = TextEvents(lambda number, text: chunk(CompletionChoice(number, text)))
        with self.generation as generation:
            while replies := await generation.next():
                yield b"".join(
                    encode_events([chunk(choice)])
                    if choice.finish_reason or choice.logprobs or usage is StreamUsage.EACH
                    else texts.event(choice.index, choice.text)
                    for choice in self._choices(replies)
                )
            if usage is not StreamUsage.NONE:
                yield encode_events([self._completion([], generation.usage)])

    def _choices(self, replies: ChoiceReplies) -> list[CompletionChoice]:
        choices = []
        for number, reply in replies:
            scores = self._scores[number // self._num_completions]
            if isinstance(reply, Tokens) and reply.prompt_logprobs:
                scores.add(reply)
                continue
            if number not in self._lengths and self._echoes and self._tokenizer is not None:
                echo = self._echoes[number // self._num_completions]
                self._lengths[number] = len(echo.text)
                choices.append(CompletionChoice(number, echo.text, echo.logprobs(scores, self._tokenizer)))
            if isinstance(reply, Finished):
                choices.append(CompletionChoice(number, "", None, reply.finish_reason, scores.as_vllm))
                continue
            if self._drops_output:
                continue
            offset = self._lengths.get(number, 0)
            self._lengths[number] = offset + len(reply.text)
            logprobs = completion_logprobs(reply, self._tokenizer, offset) if reply.logprobs else None
            if reply.text or logprobs is not None:
                choices.append(CompletionChoice(number, reply.text, logprobs))
        return choices

    def _completion(self, choices: list[CompletionChoice], usage: UsageInfo | UnsetType | None) -> CompletionResponse:
        if self._drops_output and isinstance(usage, UsageInfo):
            usage = replace(usage, completion_tokens=0, total_tokens=usage.prompt_tokens)
        return CompletionResponse(id=self._id, created=self._created, model=self._model, choices=choices, usage=usage)


def _merged_choice(number: int, parts: Sequence[CompletionChoice]) -> CompletionChoice:
    logprobs: list[CompletionLogprobs] = [part.logprobs for part in parts if part.logprobs is not None]
    text = "".join(part.text for part in parts)
    last = parts[-1]
    return CompletionChoice(number, text, concatenate_logprobs(logprobs), last.finish_reason, last.prompt_logprobs)


async def chat(request: Request) -> Response:
    """Handle `POST /v1/chat/completions`: a conversation through the model's chat template, with tools."""
    api: Api = request.app.state.api
    body = await read_body(request, ChatBody, api.settings.limits)
    usage = stream_usage(body)
    request_id = f"chatcmpl-{secrets.token_hex(16)}"
    answer = _ChatAnswer(request_id, await chat_generation(request, body, request_id), is_stream=bool(body.stream))
    return await _response(request, answer, usage)


class _ChatAnswer:
    def __init__(self, request_id: str, chat: ChatGeneration, *, is_stream: bool) -> None:
        self._id = request_id
        self._created = int(time.time())
        self._chat = chat
        self.generation = chat.generation
        self.is_stream = is_stream

    async def whole(self) -> ChatCompletion:
        with self.generation as generation:
            await generation.start()
            replies = await generation.collect()
            replies_by_choice = [
                [reply for number, reply in replies if number == index] for index in range(self._chat.num_choices)
            ]
            choices = [self._choice(index, pieces) for index, pieces in enumerate(replies_by_choice)]
            usage = generation.usage
        return ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._chat.model,
            choices=choices,
            usage=usage,
            prompt_logprobs=self._chat.scores.as_vllm,
        )

    async def events(self, usage: StreamUsage) -> Events:
        first_delta = ChatDelta(role="assistant", content="")

        def chunk(choice: ChatChunkChoice) -> ChatChunk:
            if usage is StreamUsage.EACH:
                return self._chunk([choice], self.generation.usage_so_far)
            return self._chunk([choice], UNSET if usage is StreamUsage.NONE else None)

        texts = TextEvents(lambda number, text: chunk(ChatChunkChoice(number, ChatDelta(content=text))))
        with self.generation as generation:
            yield encode_events(chunk(ChatChunkChoice(n, first_delta)) for n in range(self._chat.num_choices))
            while replies := await generation.next():
                yield b"".join(
                    encode_events([chunk(choice)])
                    if (text := _text_only(choice)) is None or usage is StreamUsage.EACH
                    else texts.event(choice.index, text)
                    for choice in self._deltas(replies)
                )
            if usage is not StreamUsage.NONE:
                yield encode_events([self._chunk([], generation.usage)])

    def _choice(self, index: int, replies: list[Tokens | Finished]) -> ChatChoice:
        parts = [self._chat.read(index, reply) for reply in replies]
        reasoning, content = "".join(part.reasoning for part in parts), "".join(part.content for part in parts)
        calls = [replace(call, index=UNSET) for part in parts for call in part.calls]
        logprobs = [
            entry
            for reply in replies
            if isinstance(reply, Tokens) and (one := chat_logprobs(reply, self._chat.tokenizer))
            for entry in one.content
        ]
        message = ChatCompletionMessage(content=None if (calls or reasoning) and not content.strip() else content)
        if reasoning:
            message = replace(message, reasoning=reasoning, reasoning_content=reasoning)
        if calls:
            message = replace(message, tool_calls=calls)
        reason = self._chat.finish_reason(index, replies[-1])
        return ChatChoice(index, message, ChatLogprobs(logprobs) if logprobs else None, reason)

    def _deltas(self, replies: ChoiceReplies) -> list[ChatChunkChoice]:
        choices = []
        for index, reply in replies:
            part = self._chat.read(index, reply)
            logprobs = None
            if isinstance(reply, Tokens) and reply.logprobs:
                logprobs = chat_logprobs(reply, self._chat.tokenizer)
            if any(part) or logprobs is not None:
                reasoning = part.reasoning or UNSET
                delta = ChatDelta(
                    content=part.content or UNSET,
                    reasoning=reasoning,
                    reasoning_content=reasoning,
                    tool_calls=part.calls or UNSET,
                )
                choices.append(ChatChunkChoice(index, delta, logprobs))
            if isinstance(reply, Finished):
                choices.append(ChatChunkChoice(index, ChatDelta(), None, self._chat.finish_reason(index, reply)))
        return choices

    def _chunk(self, choices: list[ChatChunkChoice], usage: object) -> ChatChunk:
        chunk = ChatChunk(id=self._id, created=self._created, model=self._chat.model, choices=choices)
        return chunk if usage is UNSET else replace(chunk, usage=usage)


def _text_only(choice: ChatChunkChoice) -> str | None:
    """Return the new text of a choice that has only text; None for other choices."""
    delta = choice.delta
    is_plain = choice.finish_reason is None and choice.logprobs is None
    has_others = delta.tool_calls is not UNSET or delta.reasoning is not UNSET
    return delta.content if is_plain and not has_others and isinstance(delta.content, str) else None
