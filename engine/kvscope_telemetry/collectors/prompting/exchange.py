"""One request to a server, from sending it until its answer ends, on a separate thread.

Owns the connection and the state of the answer. A failure is reported in one sentence, as the request's last reply.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

import msgspec

from kvscope_telemetry.collectors.external_address import ExternalAddress
from kvscope_telemetry.collectors.http_client import (
    NOT_FOUND,
    OK,
    REFUSALS,
    HttpClient,
    HttpExchange,
    NoAnswer,
    content_type,
    why_no_stream,
)
from kvscope_telemetry.collectors.prompting.completion_query import CompletionQuery
from kvscope_telemetry.collectors.prompting.error_text import error_text_of_body
from kvscope_telemetry.collectors.prompting.reply_box import ReplyBox
from kvscope_telemetry.collectors.prompting.served_model import ServedModel
from kvscope_telemetry.collectors.prompting.streamed_answer import DONE, AnswerError, EventLines, StreamedAnswer
from kvscope_telemetry.errors import ProtocolError
from kvscope_telemetry.messages.commands import Accepted, Done, Failed, Refused, Reply

if TYPE_CHECKING:
    import httpx

SILENCE_S: Final = 600.0
"""Maximum seconds between two pieces of an answer, and before the first piece, because requests may queue in
the server.
"""
MAX_ANSWER_BYTES: Final = 256 << 20
MAX_ERROR_BYTES: Final = 64 << 10
_CONTEXT_NOUNS: Final = ("context length", "context size", "context window")
"""Words in the error messages of vLLM, SGLang and llama.cpp by which a prompt that is too long is recognized, because
these servers have no common error code for it.
"""
_EVENT_STREAM: Final = "text/event-stream"
_RANK_HEADER: Final = "X-data-parallel-rank"
_ID_HEADER: Final = "X-Request-Id"
"""HTTP header with the request id. vLLM makes it part of its own id, by which kvscope's plugin in vLLM
identifies the request.
"""


class Exchange:
    """One request and its answer. A separate thread calls `run`; `abort` and `disconnect` are thread-safe."""

    def __init__(
        self,
        query: CompletionQuery,
        http: HttpClient,
        address: ExternalAddress,
        model: ServedModel,
        box: ReplyBox,
        silence_s: float = SILENCE_S,
    ) -> None:
        self.request_id = query.request_id
        self._query, self._address, self._model, self._box = query, address, model, box
        self._silence_s = silence_s
        self._url = http.address.url(query.path)
        self._http = HttpExchange(http)
        self._answer = StreamedAnswer(query.request_id, query.num_completions)
        self._lock = threading.Lock()
        self._is_over = False
        self._is_accepted = False

    def run(self, on_end: Callable[[Exchange], None]) -> None:
        """Send the request and enqueue replies until the answer ends, then call `on_end`."""
        try:
            self._exchange()
        except NoAnswer as error:
            self._fail(str(error))
        except AnswerError as error:
            self._fail(f"{self._url} ended its answer: {error}")
        except ProtocolError as error:
            self._fail(f"{self._url}: {error}")
        finally:
            on_end(self)

    def abort(self) -> bool:
        """Close the connection, which makes the server abort the request, and finish its completions. Never blocks.

        Returns False, without sending a reply, if the request had already ended.
        """
        is_ended = self._end([Done(request_id=self.request_id)], lambda: self._answer.ends("abort"))
        self._http.abort()
        return is_ended

    def disconnect(self) -> None:
        """Close the connection without a reply, unlike `abort`, because nothing reads replies any more."""
        with self._lock:
            self._is_over = True
        self._http.abort()

    def _exchange(self) -> None:
        body = self._body()
        headers = {_RANK_HEADER: str(self._address.rank)} if self._address.rank else {}
        if self.request_id.isascii() and self.request_id.isprintable():
            headers[_ID_HEADER] = self.request_id
        with self._http.send(
            self._query.path, body, accept=_EVENT_STREAM, head=headers, wait_s=self._silence_s
        ) as answer:
            self._check(answer)
            self._is_accepted = True
            self._reply([Accepted(request_id=self.request_id, numbers=(), num_prompt_tokens=0)])
            self._read(answer)
            if not self._answer.is_whole:
                raise ConnectionResetError("the rest is missing")  # `send` turns it into a NoAnswer with the address
        self._end([], self._answer.ends)

    def _body(self) -> bytes:
        model = self._model.get()
        fields = {"model": model.name, **self._query.fields}
        fields = self._address.engine.fit_version(fields, self._model.version)
        if model.returns_token_ids:
            fields["return_token_ids"] = True
        return msgspec.json.encode(fields)

    def _check(self, answer: httpx.Response) -> None:
        """Raise NoAnswer unless the answer is an event stream."""
        status, kind = answer.status_code, content_type(answer)
        if status == OK and kind == _EVENT_STREAM:
            return
        if status == NOT_FOUND:
            self._model.invalidate()
        message = "" if status in (OK, *REFUSALS) else error_text_of_body(_read_start(answer))
        raise NoAnswer(why_no_stream(self._url, status, kind, message, self._address.refusal), status)

    def _read(self, answer: httpx.Response) -> None:
        lines, num_bytes = EventLines(), 0
        for piece in answer.iter_raw():
            if self._is_over:
                return
            num_bytes += len(piece)
            if num_bytes > MAX_ANSWER_BYTES:
                raise ProtocolError(f"its answer has more than {MAX_ANSWER_BYTES >> 20} MB: that is not read")
            for event in lines.feed(piece):
                if event == DONE:
                    return
                with self._lock:
                    if not self._is_over:
                        self._box.put(self._answer.feed(event))
            self._box.wait_for_capacity()

    def _fail(self, why: str) -> None:
        if self._is_accepted:
            self._end([Failed(request_id=self.request_id, reason=why)])
            return
        is_too_long = any(noun in why.lower() for noun in _CONTEXT_NOUNS)
        self._end([Refused(request_id=self.request_id, reason=why, is_too_long=is_too_long)])

    def _reply(self, replies: Iterable[Reply]) -> None:
        with self._lock:
            if not self._is_over:
                self._box.put(replies)

    def _end(self, replies: Iterable[Reply], more_replies: Callable[[], Iterable[Reply]] = tuple) -> bool:
        """Enqueue the final replies: `replies`, then those of `more_replies`, which is called while no other thread can
        change the state of the answer. Returns False, without enqueuing any, if the request had already ended.
        """
        with self._lock:
            if self._is_over:
                return False
            self._is_over = True
            self._box.put([*replies, *more_replies()])
            return True


def _read_start(answer: httpx.Response) -> bytes:
    body = b""
    for piece in answer.iter_raw():
        body += piece
        if len(body) >= MAX_ERROR_BYTES:
            break
    return body[:MAX_ERROR_BYTES]
