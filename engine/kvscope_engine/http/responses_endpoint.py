"""Endpoint `POST /v1/responses`: a conversation through the model's chat template, without state on the server.

The events of a stream and their order are those that OpenAI documents: the response is created, each output item is
added, its parts grow by deltas, part and item are done, and the response is completed.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from typing import Any, Final, Literal

import msgspec
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from kvscope_engine.http.api_state import Api
from kvscope_engine.http.chat_generation import ChatGeneration, chat_generation
from kvscope_engine.http.generation import ChoiceReplies
from kvscope_engine.http.http_connection import Events, EventStream, cancel_on_disconnect
from kvscope_engine.http.info_endpoints import json_response
from kvscope_engine.http.middleware import read_body
from kvscope_engine.http.schemas.api_errors import ApiError
from kvscope_engine.http.schemas.logprobs import chat_logprobs
from kvscope_engine.http.schemas.responses import CalledTool, TokenLogprob
from kvscope_engine.http.schemas.responses_api import (
    FunctionCallItem,
    IncompleteDetails,
    InputTokensDetails,
    ItemStatus,
    MessageItem,
    OutputItem,
    OutputText,
    OutputTokensDetails,
    ReasoningItem,
    ReasoningText,
    ResponseEvent,
    ResponseObject,
    ResponsesBody,
    ResponseUsage,
    chat_body,
)
from kvscope_telemetry.messages.commands import Tokens

_ENCODER: Final = msgspec.json.Encoder()
_ID_PREFIXES: Final[dict[type, str]] = {ReasoningItem: "rs", MessageItem: "msg", FunctionCallItem: "fc"}


async def responses(request: Request) -> Response:
    """Handle `POST /v1/responses`."""
    api: Api = request.app.state.api
    body = await read_body(request, ResponsesBody, api.settings.limits)
    request_id = f"resp_{secrets.token_hex(24)}"
    chat = await chat_generation(request, chat_body(body), request_id)
    answer = _ResponsesAnswer(request_id, body, chat)
    if not body.stream:
        return json_response(await cancel_on_disconnect(request, answer.whole()))
    await cancel_on_disconnect(request, chat.generation.start_or_close())
    return EventStream(request, answer.events(), chat.generation.close, end=b"", encode_error=answer.encode_error)


class _ResponsesAnswer:
    """The answer to one request, as a list of output items that grows."""

    def __init__(self, response_id: str, body: ResponsesBody, chat: ChatGeneration) -> None:
        self._chat = chat
        self._items: list[OutputItem] = []
        self._open: ReasoningItem | MessageItem | None = None
        """Item that grows now; it is not in `_items` yet."""
        self._text: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._num_events = 0
        self._reason: str | None = None
        self._response = ResponseObject(
            id=response_id,
            created_at=int(time.time()),
            status="in_progress",
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            model=chat.model,
            parallel_tool_calls=body.parallel_tool_calls is not False,
            reasoning=body.reasoning,
            temperature=body.temperature,
            tool_choice=body.tool_choice or "auto",
            tools=body.tools or [],
            top_logprobs=body.top_logprobs or 0,
            top_p=body.top_p,
        )
        if body.text is not None and body.text.format is not None:
            self._response = replace(self._response, text=body.text)

    async def whole(self) -> ResponseObject:
        with self._chat.generation as generation:
            await generation.start()
            for _ in self._read(await generation.collect()):
                pass  # only a stream needs the events
            return self._ended()

    async def events(self) -> Events:
        with self._chat.generation as generation:
            yield _encode(self._event("response.created", response=self._response))
            yield _encode(self._event("response.in_progress", response=self._response))
            while replies := await generation.next():
                yield b"".join(map(_encode, self._read(replies)))
            response = self._ended()
            yield _encode(self._event(f"response.{response.status}", response=response))

    def encode_error(self, error: ApiError) -> bytes:
        """Return the encoded event of an error that ends the stream."""
        detail = error.body.error
        event = self._event("error", code=detail.code or detail.type, message=detail.message, param=detail.param)
        return _encode(event)

    def _read(self, replies: ChoiceReplies) -> Iterator[ResponseEvent]:
        """Add `replies` to the output items. Yields the events of a stream."""
        for index, reply in replies:
            part = self._chat.read(index, reply)
            logprobs: list[TokenLogprob] = []
            if isinstance(reply, Tokens) and (one := chat_logprobs(reply, self._chat.tokenizer)) is not None:
                logprobs = one.content
            if part.reasoning:
                yield from self._grow(ReasoningItem, part.reasoning, [])
            if part.content or (logprobs and not part.reasoning and not part.calls):
                yield from self._grow(MessageItem, part.content, logprobs)
            for call in part.calls:
                yield from self._close("completed")
                yield from self._add_call(call)
            self._reason = self._chat.finish_reason(index, reply) or self._reason
        if self._reason is not None:
            yield from self._close("incomplete" if self._reason == "length" else "completed")

    def _grow(
        self, kind: type[ReasoningItem | MessageItem], delta: str, logprobs: list[TokenLogprob]
    ) -> Iterator[ResponseEvent]:
        """Append text to the open item of this kind. An open item of another kind is closed first."""
        if not isinstance(self._open, kind):
            if kind is MessageItem and not delta.strip() and not logprobs:
                return  # white space between other items
            yield from self._close("completed")
            self._open = kind(id=_new_id(kind), status="in_progress")
            yield self._event("response.output_item.added", output_index=len(self._items), item=self._open)
            yield self._event("response.content_part.added", **self._location, part=self._part)
        self._text.append(delta)
        self._logprobs += logprobs
        if kind is MessageItem:
            yield self._event("response.output_text.delta", **self._location, delta=delta, logprobs=logprobs)
        else:
            yield self._event("response.reasoning_text.delta", **self._location, delta=delta)

    def _close(self, status: ItemStatus) -> Iterator[ResponseEvent]:
        """Complete the open item, if there is one."""
        if self._open is None:
            return
        part, location = self._part, self._location
        if isinstance(part, OutputText):
            yield self._event("response.output_text.done", **location, text=part.text, logprobs=part.logprobs)
        else:
            yield self._event("response.reasoning_text.done", **location, text=part.text)
        yield self._event("response.content_part.done", **location, part=part)
        yield self._done(replace(self._open, status=status, content=[part]))
        self._open, self._text, self._logprobs = None, [], []

    @property
    def _part(self) -> OutputText | ReasoningText:
        """Content of the open item so far."""
        text = "".join(self._text)
        if isinstance(self._open, MessageItem):
            return OutputText(text=text, logprobs=[*self._logprobs])
        return ReasoningText(text=text)

    def _add_call(self, call: CalledTool) -> Iterator[ResponseEvent]:
        name, arguments = call.function.name, call.function.arguments
        item = FunctionCallItem(id=_new_id(FunctionCallItem), call_id=call.id, name=name, arguments=arguments)
        index = len(self._items)
        added = replace(item, arguments="", status="in_progress")
        yield self._event("response.output_item.added", output_index=index, item=added)
        location = {"output_index": index, "item_id": item.id}
        yield self._event("response.function_call_arguments.delta", **location, delta=arguments)
        yield self._event("response.function_call_arguments.done", **location, name=name, arguments=arguments)
        yield self._done(item)

    def _done(self, item: OutputItem) -> ResponseEvent:
        index = len(self._items)
        self._items.append(item)
        return self._event("response.output_item.done", output_index=index, item=item)

    @property
    def _location(self) -> dict[str, Any]:
        assert self._open is not None, "called while an item grows"
        return {"output_index": len(self._items), "item_id": self._open.id, "content_index": 0}

    def _ended(self) -> ResponseObject:
        usage = self._chat.generation.usage
        is_cut = self._reason == "length"
        status: Literal["incomplete", "completed"] = "incomplete" if is_cut else "completed"
        return replace(
            self._response,
            status=status,
            incomplete_details=IncompleteDetails() if is_cut else None,
            output=self._items,
            usage=ResponseUsage(
                input_tokens=usage.prompt_tokens,
                input_tokens_details=InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
                output_tokens=usage.completion_tokens,
                output_tokens_details=OutputTokensDetails(self._chat.num_reasoning_tokens),
                total_tokens=usage.total_tokens,
            ),
        )

    def _event(self, kind: str, **fields: Any) -> ResponseEvent:
        event = ResponseEvent(type=kind, sequence_number=self._num_events, **fields)
        self._num_events += 1
        return event


def _encode(event: ResponseEvent) -> bytes:
    return b"event: " + event.type.encode() + b"\ndata: " + _ENCODER.encode(event) + b"\n\n"


def _new_id(kind: type[OutputItem]) -> str:
    return f"{_ID_PREFIXES[kind]}_{secrets.token_hex(24)}"
