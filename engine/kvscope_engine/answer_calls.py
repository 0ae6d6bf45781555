"""Reads the calls of functions in the answers to a request with `Submit.tools`, once each answer has ended.

Uses the readers of the HTTP API, so that both find the same calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from kvscope_engine.http.schemas.api_errors import ApiError
from kvscope_engine.http.schemas.request_bodies import ChatBody, MessageBody, Tool
from kvscope_engine.http.tool_calling.answer_format import answer_format
from kvscope_engine.tokenization.tokenizer import Tokenizer
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.commands import Finished, RequestTiming, Submit, Tokens, ToolCall, Usage


class AnswerCalls(NamedTuple):
    content: str
    """Text of the answer without the calls; reasoning is between `<think>` tags."""
    calls: tuple[ToolCall, ...]


class AnswerCallReader:
    """Reads the calls in the answers to one request. Raises BadInput for tools that are no functions in OpenAI's
    format, or that the model's chat template does not show to the model.
    """

    def __init__(self, submit: Submit, tokenizer: Tokenizer) -> None:
        try:
            tools = msgspec.json.decode(submit.tools, type=list[Tool])
            body = ChatBody(messages=[MessageBody(role="user", content="")], tools=tools)
            if submit.sampling.stop:
                body = msgspec.structs.replace(body, stop=list(submit.sampling.stop))
            is_structured = submit.sampling.structured is not None
            self._format = answer_format(body, tokenizer, "", is_structured=is_structured)
        except msgspec.MsgspecError as error:
            raise BadInput(
                f"tools={submit.tools!r:.60} is not accepted: functions in OpenAI's format ({error})"
            ) from None
        except ApiError as error:
            raise BadInput(str(error)) from None
        self._tokenizer = tokenizer

    def read(self, prompt_token_ids: Sequence[int], token_ids: Sequence[int], text: str) -> AnswerCalls:
        """Return the calls and the other text in an answer with these tokens and this text."""
        reader = self._format.reader(self._tokenizer, prompt_token_ids)
        if reader is None:
            return AnswerCalls(text, ())
        marked = self._format.marked_text(self._tokenizer)
        if marked is not None:
            text = marked.add(Tokens(request_id="", token_ids=tuple(token_ids), text=""))
            end = Finished(request_id="", finish_reason="stop", usage=Usage(), timing=RequestTiming())
            text += marked.add(end)
        part = reader.read(text, is_last=True)
        calls = tuple(
            ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments) for call in part.calls
        )
        reasoning = f"<think>\n{part.reasoning.strip()}\n</think>\n\n" if part.reasoning.strip() else ""
        return AnswerCalls(reasoning + part.content, calls)
