"""Sends prompts to another engine and returns its answers as replies, like the command socket of kvscope's engine.

Owns the requests in progress, with a thread and a connection each, at most `MAX_ON_THEIR_WAY`.
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
from kvscope_telemetry.collectors.prompting.reply_box import ReplyBox
from kvscope_telemetry.collectors.prompting.served_model import ServedModel
from kvscope_telemetry.errors import BadInput, EngineDead
from kvscope_telemetry.messages.command_size import command_bytes
from kvscope_telemetry.messages.commands import (
    MAX_COMMAND_BYTES,
    Abort,
    Command,
    Done,
    GetStatus,
    LoadedAdapter,
    Reply,
    Submit,
    refuse,
)

MAX_ON_THEIR_WAY: Final = 576
"""Maximum number of concurrent requests: those of a load test and the user's own."""
_END_S: Final = 1.0


class Prompter:
    """Sends prompts to one engine. Raises BadInput if the certificate file of `address` cannot be used."""

    def __init__(self, address: ExternalAddress, *, silence_s: float = SILENCE_S) -> None:
        self._address = address
        self._http = HttpClient(address)
        self._model = ServedModel(address)
        self._silence_s = silence_s
        self._box = ReplyBox()
        self._lock = threading.Lock()
        self._open: dict[str, tuple[Exchange, threading.Thread]] = {}
        self._is_closed = False
        self._looking: threading.Thread | None = None

    @property
    def adapters(self) -> tuple[LoadedAdapter, ...] | None:
        """LoRA adapters among the server's models, as of the last query; None before it has answered."""
        return self._model.adapters

    def send(self, command: Command) -> None:
        """Execute a command; replies are returned by `poll_replies`. Thread-safe and non-blocking.

        Unsupported commands get a refusal as a reply. GetStatus has no reply, and queries `adapters` again. Raises
        BadInput for a prompt that is too large, EngineDead after `close`.
        """
        if self._is_closed:
            raise EngineDead(f"the connection to {self._address.name} is closed")
        if isinstance(command, Submit):
            self._submit(command)
        elif isinstance(command, Abort):
            self._abort(command)
        elif isinstance(command, GetStatus):
            self._refresh_model()
        else:
            self._box.put([refuse(command, f"{self._address.engine.name} can be watched but not controlled")])

    def has(self, request_id: str) -> bool:
        return request_id in self._open

    def poll_replies(self) -> list[Reply]:
        """Return and clear the replies since the last call, oldest first."""
        return self._box.drain()

    def close(self) -> None:
        """Abort all requests; takes up to `_END_S` for the adapter query and again for all requests. Idempotent."""
        with self._lock:
            self._is_closed = True
            still = list(self._open.values())
        self._box.close()
        self._model.close()
        if self._looking is not None:
            self._looking.join(_END_S)
        for exchange, _ in still:
            exchange.cut()
        deadline = time.monotonic() + _END_S
        for _, thread in still:
            thread.join(max(deadline - time.monotonic(), 0))

    def _submit(self, submit: Submit) -> None:
        if command_bytes(submit) > MAX_COMMAND_BYTES:
            raise BadInput(f"a request of more than {MAX_COMMAND_BYTES >> 20} MB is not accepted")
        try:
            question = make_completion_query(submit, self._address.engine)
        except BadInput as error:
            self._box.put([refuse(submit, str(error))])
            return
        exchange = Exchange(question, self._http, self._model, self._box, self._silence_s)
        thread = threading.Thread(target=exchange.run, args=(self._ended,), name="kvscope-prompt", daemon=True)
        why = self._begin(exchange, thread)
        if why:
            self._box.put([refuse(submit, why)])

    def _refresh_model(self) -> None:
        with self._lock:
            if self._is_closed or (self._looking is not None and self._looking.is_alive()):
                return
            looking = threading.Thread(target=self._model.refresh, name="kvscope-adapters", daemon=True)
            with suppress(RuntimeError):  # no thread can be started: the next call tries again
                looking.start()
                self._looking = looking

    def _begin(self, exchange: Exchange, thread: threading.Thread) -> str:
        """Start a request. Returns why it cannot be started, or an empty string."""
        key = exchange.request_id
        with self._lock:
            if self._is_closed:
                return f"the connection to {self._address.name} is closed"
            if key in self._open:
                return f"request_id={key!r} is not accepted: it is in use"
            if len(self._open) >= MAX_ON_THEIR_WAY:
                return f"{MAX_ON_THEIR_WAY} requests are already in progress at {self._address.name}"
            try:
                thread.start()
            except RuntimeError as error:
                return f"this machine cannot start more concurrent requests ({error})"
            self._open[key] = (exchange, thread)
        return ""

    def _abort(self, abort: Abort) -> None:
        with self._lock:
            found = self._open.get(abort.request_id)
        if found is None or not found[0].abort():
            self._box.put([Done(request_id=abort.request_id)])

    def _ended(self, exchange: Exchange) -> None:
        with self._lock:
            self._open.pop(exchange.request_id, None)
