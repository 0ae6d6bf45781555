"""Answers `EstimatePrompt` with the token counts of an external engine's server.

Owns the questions that wait, and the thread that asks them one after another.
"""

from __future__ import annotations

import queue
import threading
from typing import Any, Final

import msgspec

from kvscope_telemetry.collectors.external_address import ExternalAddress
from kvscope_telemetry.collectors.http_client import HttpClient, NoAnswer
from kvscope_telemetry.collectors.prompting.completion_query import message_fields, parse_json
from kvscope_telemetry.collectors.prompting.reply_box import ReplyBox
from kvscope_telemetry.collectors.prompting.served_model import ServedModel
from kvscope_telemetry.errors import BadInput, ProtocolError
from kvscope_telemetry.messages.commands import EstimatePrompt, Failed, PromptEstimate, Reply, refuse

MAX_WAITING: Final = 64
_END_S: Final = 1.0


class PromptCounter:
    """Counts prompts at one server. Raises BadInput if the certificate file of `address` cannot be used.

    Only the tokens are known: not how many of them are cached, nor how long the prompt would wait.
    """

    def __init__(self, address: ExternalAddress, model: ServedModel, box: ReplyBox) -> None:
        self._engine, self._model, self._box = address.engine, model, box
        self._http = HttpClient(address)
        self._questions: queue.Queue[EstimatePrompt | None] = queue.Queue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def ask(self, question: EstimatePrompt) -> None:
        """Enqueue a question. Thread-safe and non-blocking; the answer is put into the reply box."""
        if self._engine.count_tokens is None:
            self._box.put([_unanswered(question, f"{self._engine.name} does not count tokens")])
        elif self._questions.qsize() >= MAX_WAITING:
            self._box.put([_unanswered(question, f"{MAX_WAITING} prompts are already waiting to be counted")])
        else:
            self._questions.put(question)
            self._start()

    def close(self) -> None:
        """Cancel all questions without an answer. Waits up to `_END_S`. Idempotent."""
        self._http.cancel()
        self._questions.put(None)
        with self._lock:
            if self._thread is not None:
                self._thread.join(_END_S)

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="kvscope-token-counts", daemon=True)
                thread.start()
                self._thread = thread

    def _run(self) -> None:
        while (question := self._questions.get()) is not None:
            self._box.put([self._answer(question)])

    def _answer(self, question: EstimatePrompt) -> Reply:
        assert self._engine.count_tokens is not None, "`ask` enqueues no question otherwise"
        try:
            fields: dict[str, Any] = {"model": self._model.get().name}
            fields["messages"] = [message_fields(message) for message in question.messages]
            if question.tools:
                fields["tools"] = parse_json(question.tools, "tools")
            if question.adapter:
                fields |= self._engine.adapter_fields(question.adapter)
            counts = self._engine.count_tokens(self._post, fields)
        except BadInput as error:
            return refuse(question, str(error))
        except (NoAnswer, ProtocolError) as error:  # also HTTP 400: older versions of SGLang accept no messages
            return _unanswered(question, str(error))
        return PromptEstimate(
            num_prompt_tokens=counts.num_prompt_tokens, num_draft_tokens=counts.num_draft_tokens, tag=question.tag
        )

    def _post(self, path: str, fields: dict[str, Any]) -> Any:
        _, body = self._http.get(path, msgspec.json.encode(fields))
        try:
            return msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            raise ProtocolError(f"{path} does not answer with JSON") from None


def _unanswered(question: EstimatePrompt, reason: str) -> Failed:
    return Failed(reason=reason, tag=question.tag, is_unanswered=True)
