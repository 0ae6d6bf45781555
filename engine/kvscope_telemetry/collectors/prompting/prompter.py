"""Sends prompts to an external engine and returns its answers as replies, like the command socket of kvscope's engine.

Owns the requests in progress, at most `MAX_CONCURRENT_REQUESTS`, with a thread and a connection each.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import Final

from kvscope_telemetry.collectors.external_address import ExternalAddress
from kvscope_telemetry.collectors.http_client import HttpClient
from kvscope_telemetry.collectors.prompting.completion_query import make_completion_query
from kvscope_telemetry.collectors.prompting.exchange import SILENCE_S, Exchange
from kvscope_telemetry.collectors.prompting.prompt_counter import PromptCounter
from kvscope_telemetry.collectors.prompting.reply_box import ReplyBox
from kvscope_telemetry.collectors.prompting.served_model import ServedModel
from kvscope_telemetry.errors import BadInput, EngineDead
from kvscope_telemetry.messages.command_size import command_bytes
from kvscope_telemetry.messages.commands import (
    MAX_COMMAND_BYTES,
    Abort,
    Command,
    Done,
    EstimatePrompt,
    GetStatus,
    LoadedAdapter,
    Reply,
    Submit,
    refuse,
)

MAX_CONCURRENT_REQUESTS: Final = 576
"""Maximum number of concurrent requests, enough for a load test and the user's own prompts at the same time."""
_END_S: Final = 1.0


class Prompter:
    """Sends prompts to one external engine. Raises BadInput if the certificate file of `address` cannot be used."""

    def __init__(self, address: ExternalAddress, *, silence_s: float = SILENCE_S) -> None:
        self._address = address
        self._http = HttpClient(address)
        self._model = ServedModel(address)
        self._silence_s = silence_s
        self._box = ReplyBox()
        self._counter = PromptCounter(address, self._model, self._box)
        self._lock = threading.Lock()
        self._exchanges: dict[str, tuple[Exchange, threading.Thread]] = {}
        self._is_closed = False
        self._model_thread: threading.Thread | None = None

    @property
    def adapters(self) -> tuple[LoadedAdapter, ...] | None:
        """LoRA adapters among the server's models, as of the last query; None before the server has answered."""
        return self._model.adapters

    def send(self, command: Command) -> None:
        """Execute a command. Thread-safe and non-blocking; `poll_replies` returns the replies.

        Unsupported commands are refused by a reply. GetStatus has no reply, and refreshes `adapters`. Raises BadInput
        for a prompt that is too large, EngineDead after `close`.
        """
        if self._is_closed:
            raise EngineDead(f"the connection to {self._address.name} is closed")
        if isinstance(command, Submit):
            self._submit(command)
        elif isinstance(command, Abort):
            self._abort(command)
        elif isinstance(command, EstimatePrompt):
            _check_size(command)
            self._counter.ask(command)
        elif isinstance(command, GetStatus):
            self._refresh_model()
        else:
            self._box.put([refuse(command, f"{self._address.engine.name} can be watched but not controlled")])

    def has(self, request_id: str) -> bool:
        return request_id in self._exchanges

    def poll_replies(self) -> list[Reply]:
        return self._box.drain()

    def close(self) -> None:
        """Abort all requests. Waits up to `_END_S` each for token counts, the adapter query and the requests.
        Idempotent.
        """
        with self._lock:
            self._is_closed = True
            exchanges = list(self._exchanges.values())
        self._box.close()
        self._model.close()
        self._counter.close()
        if self._model_thread is not None:
            self._model_thread.join(_END_S)
        for exchange, _ in exchanges:
            exchange.disconnect()
        deadline = time.monotonic() + _END_S
        for _, thread in exchanges:
            thread.join(max(deadline - time.monotonic(), 0))

    def _submit(self, submit: Submit) -> None:
        _check_size(submit)
        try:
            query = make_completion_query(submit, self._address.engine)
        except BadInput as error:
            self._box.put([refuse(submit, str(error))])
            return
        exchange = Exchange(query, self._http, self._address, self._model, self._box, self._silence_s)
        thread = threading.Thread(target=exchange.run, args=(self._remove,), name="kvscope-prompt", daemon=True)
        reason = self._start(exchange, thread)
        if reason:
            self._box.put([refuse(submit, reason)])

    def _refresh_model(self) -> None:
        with self._lock:
            if self._is_closed or (self._model_thread is not None and self._model_thread.is_alive()):
                return
            thread = threading.Thread(target=self._model.refresh, name="kvscope-adapters", daemon=True)
            with suppress(RuntimeError):  # no thread can be started: the next call tries again
                thread.start()
                self._model_thread = thread

    def _start(self, exchange: Exchange, thread: threading.Thread) -> str:
        """Start a request. Returns the reason if it cannot be started, otherwise an empty string."""
        key = exchange.request_id
        with self._lock:
            if self._is_closed:
                return f"the connection to {self._address.name} is closed"
            if key in self._exchanges:
                return f"request_id={key!r} is not accepted: it is in use"
            if len(self._exchanges) >= MAX_CONCURRENT_REQUESTS:
                return f"{MAX_CONCURRENT_REQUESTS} requests are already in progress at {self._address.name}"
            try:
                thread.start()
            except RuntimeError as error:
                return f"this machine cannot start more concurrent requests ({error})"
            self._exchanges[key] = (exchange, thread)
        return ""

    def _abort(self, abort: Abort) -> None:
        with self._lock:
            entry = self._exchanges.get(abort.request_id)
        if entry is None or not entry[0].abort():
            self._box.put([Done(request_id=abort.request_id)])

    def _remove(self, exchange: Exchange) -> None:
        with self._lock:
            self._exchanges.pop(exchange.request_id, None)


def _check_size(command: Submit | EstimatePrompt) -> None:
    if command_bytes(command) > MAX_COMMAND_BYTES:
        raise BadInput(f"a request of more than {MAX_COMMAND_BYTES >> 20} MB is not accepted")
