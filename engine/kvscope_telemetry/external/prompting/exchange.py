"""One request on its way to a server and back, on a thread of its own: asked, told as it comes, or cut.

Owns the connection and what was told of the request. Whatever goes wrong is one sentence, and the last of it.
"""

from __future__ import annotations

import http.client
import ssl
import threading
from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from kvscope_telemetry.errors import ProtocolError
from kvscope_telemetry.external.address import ExternalAddress
from kvscope_telemetry.external.http.line import HttpConnection
from kvscope_telemetry.external.http.reasons import REFUSALS, why_broken, why_late, why_no_stream
from kvscope_telemetry.external.http_get import NoAnswer
from kvscope_telemetry.external.prompting.error_text import error_text
from kvscope_telemetry.external.prompting.event_lines import EventLines
from kvscope_telemetry.external.prompting.question import FORMS, FORMS_SINCE, Question, in_older_words
from kvscope_telemetry.external.prompting.reply_box import ReplyBox
from kvscope_telemetry.external.prompting.served_model import ServedModel
from kvscope_telemetry.external.prompting.streamed_answer import DONE, AnswerError, StreamedAnswer
from kvscope_telemetry.messages.commands import Accepted, Done, Failed, Refused, Reply

CONNECT_S: Final = 10.0
SILENCE_S: Final = 600.0
"""Between two pieces of an answer; before the first the server may have it wait in its queue."""
MAX_ANSWER_BYTES: Final = 256 << 20
MAX_ERROR_BYTES: Final = 64 << 10
_PIECE_BYTES: Final = 1 << 16
_EVENTS: Final = "text/event-stream"
_RANK: Final = "X-data-parallel-rank"


class Exchange:
    """`run` is its thread's; `abort` and `cut` are anybody's."""

    def __init__(
        self,
        question: Question,
        address: ExternalAddress,
        tls: ssl.SSLContext | None,
        model: ServedModel,
        box: ReplyBox,
        silence_s: float = SILENCE_S,
    ) -> None:
        self.request_id = question.request_id
        self._question, self._address, self._model, self._box = question, address, model, box
        self._silence_s = silence_s
        self._url = address.url(question.path)
        self._line = HttpConnection(address, tls, CONNECT_S)
        self._telling = StreamedAnswer(question.request_id, question.num_completions)
        self._lock = threading.Lock()
        self._is_over = False
        self._is_accepted = False

    def run(self, ended: Callable[[Exchange], None]) -> None:
        """Ask and tell until the end; then `ended`."""
        try:
            self._go()
        except NoAnswer as error:
            self._fail(str(error))
        except AnswerError as error:
            self._fail(f"{self._url} ended its answer: {error}")
        except ProtocolError as error:
            self._fail(f"{self._url}: {error}")
        except TimeoutError:
            self._fail(why_late(self._url, self._silence_s if self._line.is_connected else CONNECT_S))
        except (OSError, http.client.HTTPException, ValueError) as error:
            self._fail(why_broken(self._url, error))
        finally:
            self._line.close()
            ended(self)

    def abort(self) -> bool:
        """Hang up, which is how these servers are told; the completions end here and now. Never waits.

        Whether there was anything to end: then it was answered.
        """
        is_ended = self._end([Done(request_id=self.request_id)], lambda: self._telling.ends("abort"))
        self._line.cut()
        return is_ended

    def cut(self) -> None:
        """Hang up and say nothing."""
        with self._lock:
            self._is_over = True
        self._line.cut()

    def _go(self) -> None:
        body = self._body()
        head = {_RANK: str(self._address.rank)} if self._address.rank else {}
        with self._line.ask(self._question.path, body, _EVENTS, head, wait_s=self._silence_s) as answer:
            self._check(answer)
            self._is_accepted = True
            self._tell([Accepted(request_id=self.request_id, numbers=(), num_prompt_tokens=0)])
            self._read(answer)
        if not self._telling.is_whole:
            raise ConnectionResetError("the rest is missing")
        self._end([], self._telling.ends)

    def _body(self) -> bytes:
        model = self._model.get()
        fields = {"model": model.name, **self._question.fields}
        if FORMS in fields and self._model.is_before(*FORMS_SINCE):
            fields = in_older_words(fields)
        if model.tells_token_ids:
            fields["return_token_ids"] = True
        return msgspec.json.encode(fields)

    def _check(self, answer: http.client.HTTPResponse) -> None:
        """Raise NoAnswer unless it is what was asked for."""
        status, kind = answer.status, answer.headers.get_content_type()
        if status == http.client.OK and kind == _EVENTS:
            return
        if status == http.client.NOT_FOUND:
            self._model.forget()
        words = "" if status in (http.client.OK, *REFUSALS) else error_text(answer.read(MAX_ERROR_BYTES))
        has_key = bool(self._address.api_key)
        raise NoAnswer(why_no_stream(self._url, status, kind, words, has_key=has_key), status)

    def _read(self, answer: http.client.HTTPResponse) -> None:
        """Until the server says that it is done, or hangs up."""
        lines, num_bytes = EventLines(), 0
        while not self._is_over and (piece := answer.read1(_PIECE_BYTES)):
            num_bytes += len(piece)
            if num_bytes > MAX_ANSWER_BYTES:
                raise ProtocolError(f"its answer has more than {MAX_ANSWER_BYTES >> 20} MB: that is not read")
            for event in lines.feed(piece):
                if event == DONE:
                    return
                with self._lock:
                    if not self._is_over:
                        self._box.put(self._telling.take(event))
            self._box.wait_for_room()

    def _fail(self, why: str) -> None:
        kind = Failed if self._is_accepted else Refused
        self._end([kind(request_id=self.request_id, reason=why)])

    def _tell(self, replies: Iterable[Reply]) -> None:
        with self._lock:
            if not self._is_over:
                self._box.put(replies)

    def _end(self, replies: Iterable[Reply], last: Callable[[], Iterable[Reply]] = tuple) -> bool:
        """The last words, unless they were said before; whether they were not."""
        with self._lock:
            if self._is_over:
                return False
            self._is_over = True
            self._box.put([*replies, *last()])
            return True
