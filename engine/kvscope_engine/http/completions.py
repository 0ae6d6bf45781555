"""Endpoints `POST /v1/completions` and `POST /v1/chat/completions`: send prompts to the engine and return the
completions, complete or streamed.

Requests of clients that hung up are aborted.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from kvscope_engine.http.api_state import Api
from kvscope_engine.http.engine_client import EngineClient, ReplyInbox
from kvscope_engine.http.http_connection import Events, EventStream, TextEvents, cancel_on_disconnect, encode_events
from kvscope_engine.http.info_endpoints import json_response
from kvscope_engine.http.middleware import owner_of, read_body, slot_of
from kvscope_engine.http.request_prompts import Prompt, chat_prompt, text_prompts
from kvscope_engine.http.schemas.api_errors import ApiError, failure_error, refusal_error
from kvscope_engine.http.schemas.logprobs import chat_logprobs, completion_logprobs, concatenate_logprobs
from kvscope_engine.http.schemas.request_bodies import MAX_PROMPTS, ChatBody, CompletionBody
from kvscope_engine.http.schemas.responses import (
    CachedTokens,
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
    chat_sampling,
    completion_sampling,
    stream_usage,
    submission,
)
from kvscope_engine.http.tool_calling.answer_format import AnswerFormat, answer_format, check_tool_choice
from kvscope_engine.http.tool_calling.answer_reader import AnswerPart
from kvscope_engine.tokenization.tokenizer import Tokenizer
from kvscope_telemetry.errors import BadInput, EngineDead
from kvscope_telemetry.messages.commands import Accepted, Finished, Refused, Submit, Tokens
from kvscope_telemetry.messages.sampling_params import SamplingParams

ChoiceReplies: TypeAlias = list[tuple[int, Tokens | Finished]]
"""Replies of the engine, each with the index of its choice."""
TOO_SLOW_MESSAGE = (
    "too much of the answer is unread: the client reads too slowly, or the answer is too large for one response"
)


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
    slot.release_body()
    return _CompletionAnswer(api, slot.client, body, sampling, prompts, tokenizer, adapter), usage


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


class _CompletionAnswer:
    def __init__(
        self,
        api: Api,
        client: str,
        body: CompletionBody,
        sampling: SamplingParams,
        prompts: Sequence[Prompt],
        tokenizer: Tokenizer | None,
        adapter: str,
    ) -> None:
        self._id = f"cmpl-{secrets.token_hex(16)}"
        self._created = int(time.time())
        self._model = adapter or api.model_name
        self._tokenizer = tokenizer
        self._lengths: dict[int, int] = {}
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
            if isinstance(reply, Finished):
                choices.append(CompletionChoice(number, "", None, reply.finish_reason))
                continue
            offset = self._lengths.get(number, 0)
            self._lengths[number] = offset + len(reply.text)
            logprobs = completion_logprobs(reply, self._tokenizer, offset) if reply.logprobs else None
            if reply.text or logprobs is not None:
                choices.append(CompletionChoice(number, reply.text, logprobs))
        return choices

    def _completion(self, choices: list[CompletionChoice], usage: UsageInfo | UnsetType | None) -> CompletionResponse:
        return CompletionResponse(id=self._id, created=self._created, model=self._model, choices=choices, usage=usage)


def _merged_choice(number: int, parts: Sequence[CompletionChoice]) -> CompletionChoice:
    logprobs: list[CompletionLogprobs] = [part.logprobs for part in parts if part.logprobs is not None]
    text = "".join(part.text for part in parts)
    return CompletionChoice(number, text, concatenate_logprobs(logprobs), parts[-1].finish_reason)


async def chat(request: Request) -> Response:
    """Handle `POST /v1/chat/completions`: a conversation through the model's chat template, with tools."""
    answer, usage = await _read_chat(request)
    return await _response(request, answer, usage)


async def _read_chat(request: Request) -> tuple[_ChatAnswer, StreamUsage]:
    """Parse the request body. Returns the completion to generate, and which stream events report usage."""
    api: Api = request.app.state.api
    body = await read_body(request, ChatBody, api.settings.limits)
    adapter = await api.adapter_of(body.model)
    check_tool_choice(body)
    usage, sampling = stream_usage(body), chat_sampling(body)
    slot, owner = slot_of(request), owner_of(request)
    slot.count_choices(sampling.n)
    tokenizer = await api.tokenizer_threads.tokenizer(api.hello.model)
    use = answer_format(body, tokenizer, api.settings.tool_call_parser, is_structured=sampling.structured is not None)
    sampling = use.sampling(sampling)
    prompt = await cancel_on_disconnect(request, chat_prompt(api, owner, tokenizer, body, slot.body_bytes))
    slot.release_body()
    return _ChatAnswer(api, slot.client, body, sampling, prompt, tokenizer, use, adapter), usage


class _ChatAnswer:
    def __init__(
        self,
        api: Api,
        client: str,
        body: ChatBody,
        sampling: SamplingParams,
        prompt: Prompt,
        tokenizer: Tokenizer | None,
        use: AnswerFormat,
        adapter: str,
    ) -> None:
        self._id = f"chatcmpl-{secrets.token_hex(16)}"
        self._created = int(time.time())
        self._model = adapter or api.model_name
        self._tokenizer = tokenizer
        prompt_ids = prompt.fields.get("prompt_token_ids", ())
        self._readers = [use.reader(tokenizer, prompt_ids) for _ in range(sampling.n)]
        self._texts = [use.marked_text(tokenizer) for _ in range(sampling.n)]
        self._includes_reasoning = body.include_reasoning is not False
        self._num_choices = sampling.n
        owner = {"client": client, "batch": self._id, "adapter": adapter}
        submit = submission(self._id, body, sampling, raw=False, **owner, **prompt.fields)
        self.is_stream = bool(body.stream)
        self.generation = Generation(api.engine_client, [submit], is_stream=self.is_stream)

    async def whole(self) -> ChatCompletion:
        with self.generation as generation:
            await generation.start()
            replies = await generation.collect()
            pieces_by_choice = [
                [piece for number, piece in replies if number == index] for index in range(self._num_choices)
            ]
            choices = [self._choice(index, pieces) for index, pieces in enumerate(pieces_by_choice)]
            usage = generation.usage
        return ChatCompletion(id=self._id, created=self._created, model=self._model, choices=choices, usage=usage)

    async def events(self, usage: StreamUsage) -> Events:
        first_delta = ChatDelta(role="assistant", content="")

        def chunk(choice: ChatChunkChoice) -> ChatChunk:
            if usage is StreamUsage.EACH:
                return self._chunk([choice], self.generation.usage_so_far)
            return self._chunk([choice], UNSET if usage is StreamUsage.NONE else None)

        texts = TextEvents(lambda number, text: chunk(ChatChunkChoice(number, ChatDelta(content=text))))
        with self.generation as generation:
            yield encode_events(chunk(ChatChunkChoice(n, first_delta)) for n in range(self._num_choices))
            while replies := await generation.next():
                yield b"".join(
                    encode_events([chunk(choice)])
                    if (text := _text_only(choice)) is None or usage is StreamUsage.EACH
                    else texts.event(choice.index, text)
                    for choice in self._deltas(replies)
                )
            if usage is not StreamUsage.NONE:
                yield encode_events([self._chunk([], generation.usage)])

    def _choice(self, index: int, pieces: list[Tokens | Finished]) -> ChatChoice:
        replies = [piece for piece in pieces if isinstance(piece, Tokens)]
        part = self._read(index, pieces)
        logprobs = [
            entry for piece in replies if (one := chat_logprobs(piece, self._tokenizer)) for entry in one.content
        ]
        is_empty = (part.calls or part.reasoning) and not part.content.strip()
        message = ChatCompletionMessage(content=None if is_empty else part.content)
        if part.reasoning:
            message = replace(message, reasoning=part.reasoning, reasoning_content=part.reasoning)
        if part.calls:
            message = replace(message, tool_calls=[replace(call, index=UNSET) for call in part.calls])
        return ChatChoice(index, message, ChatLogprobs(logprobs) if logprobs else None, self._reason(index, pieces[-1]))

    def _deltas(self, replies: ChoiceReplies) -> list[ChatChunkChoice]:
        choices = []
        for index, reply in replies:
            part = self._read(index, [reply])
            logprobs = chat_logprobs(reply, self._tokenizer) if isinstance(reply, Tokens) and reply.logprobs else None
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
                choices.append(ChatChunkChoice(index, ChatDelta(), None, self._reason(index, reply)))
        return choices

    def _read(self, index: int, pieces: list[Tokens | Finished]) -> AnswerPart:
        """Read the next pieces of an answer: text that can be shown, and calls that are complete."""
        reader, marked = self._readers[index], self._texts[index]
        if marked is not None:
            text = "".join(map(marked.add, pieces))
        else:
            text = "".join(piece.text for piece in pieces if isinstance(piece, Tokens))
        if reader is None:
            return AnswerPart("", text, [])
        part = reader.read(text, is_last=isinstance(pieces[-1], Finished))
        return part if self._includes_reasoning else part._replace(reasoning="")

    def _reason(self, index: int, last: Tokens | Finished) -> str | None:
        reason = last.finish_reason if isinstance(last, Finished) else None
        reader = self._readers[index]
        return "tool_calls" if reason == "stop" and reader is not None and reader.num_calls else reason

    def _chunk(self, choices: list[ChatChunkChoice], usage: object) -> ChatChunk:
        chunk = ChatChunk(id=self._id, created=self._created, model=self._model, choices=choices)
        return chunk if usage is UNSET else replace(chunk, usage=usage)


def _text_only(choice: ChatChunkChoice) -> str | None:
    """Return the new text of a choice that has only text; None for other choices."""
    delta = choice.delta
    is_plain = choice.finish_reason is None and choice.logprobs is None
    has_others = delta.tool_calls is not UNSET or delta.reasoning is not UNSET
    return delta.content if is_plain and not has_others and isinstance(delta.content, str) else None


class Generation:
    """Engine requests of one HTTP request. A context manager that aborts unfinished requests on exit."""

    def __init__(self, client: EngineClient, submits: Sequence[Submit], *, is_stream: bool) -> None:
        self._client = client
        self._request_ids = [submit.request_id for submit in submits]
        self._submits = list(submits)
        """Submissions not sent yet. Emptied by `start`, so that their prompts are freed."""
        self._inbox = ReplyInbox(is_stream=is_stream)
        self._early_replies: ChoiceReplies = []
        self._choices_per_prompt = submits[0].sampling.n
        self._num_left = len(submits) * self._choices_per_prompt
        self._finished: list[Finished] = []
        self._num_prompt_tokens = self._num_new_tokens = 0

    async def start(self) -> None:
        """Submit all prompts and wait until the engine has accepted them. Raises ApiError if it refuses one of them."""
        try:
            submits, self._submits = self._submits, []
            for number, submit in enumerate(submits):
                self._client.submit(submit, self._inbox, number)
        except BadInput as error:
            raise ApiError(400, str(error)) from error
        except EngineDead as error:
            raise ApiError(503, str(error), code="engine_away") from error
        num_waiting = len(self._request_ids)
        del submits
        while num_waiting:
            for number, reply in await self._inbox.pop_all():
                if isinstance(reply, Refused):
                    raise refusal_error(reply.reason)
                if isinstance(reply, Accepted):
                    num_waiting -= 1
                    self._num_prompt_tokens += reply.num_prompt_tokens
                else:
                    self._early_replies += self._record(number, reply)
            self._check()

    async def start_or_close(self) -> None:
        """Call `start`, and abort all requests if it raises. For callers that enter the context manager only later."""
        try:
            await self.start()
        except BaseException:
            self.close()
            raise

    async def next(self) -> ChoiceReplies:
        """Wait for new replies and return them; empty once all completions have ended. Raises ApiError if the engine
        fails.
        """
        early, self._early_replies = self._early_replies, []
        if early or not self._num_left:
            return early
        replies: ChoiceReplies = []
        for number, reply in await self._inbox.pop_all():
            if isinstance(reply, Tokens | Finished):
                replies += self._record(number, reply)
        self._check()
        return replies

    async def collect(self) -> ChoiceReplies:
        replies: ChoiceReplies = []
        while new_replies := await self.next():
            replies += new_replies
        return replies

    @property
    def usage(self) -> UsageInfo:
        """Usage of the finished completions. A prompt counts once, regardless of its number of completions."""
        firsts = [one.usage for one in self._finished if one.index == 0]
        prompt = sum(usage.prompt_tokens for usage in firsts)
        completion = sum(one.usage.completion_tokens for one in self._finished)
        cached = sum(usage.cached_tokens for usage in firsts)
        return UsageInfo(prompt, completion, prompt + completion, CachedTokens(cached))

    @property
    def usage_so_far(self) -> UsageInfo:
        """Current usage, without cached tokens, whose number is known only at the end."""
        prompt, new = self._num_prompt_tokens, self._num_new_tokens
        return UsageInfo(prompt, new, prompt + new)

    def close(self) -> None:
        for request_id in self._request_ids:
            self._client.abandon(request_id)

    def __enter__(self) -> Generation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _record(self, number: int, reply: Tokens | Finished) -> ChoiceReplies:
        if isinstance(reply, Finished):
            if reply.finish_reason == "error":
                raise failure_error(reply.error)
            self._num_left -= 1
            self._finished.append(reply)
        else:
            self._num_new_tokens += len(reply.token_ids)
        return [(number * self._choices_per_prompt + reply.index, reply)]

    def _check(self) -> None:
        if self._inbox.overflowed:
            raise ApiError(400, TOO_SLOW_MESSAGE)
