"""Tokenizes prompts on threads of its own, so that a chat template or a long text never delays a step.

Owns six threads and the queue of submissions. Submissions of one client (or of one on whose behalf a client asks) are
prepared in order, one at a time, and clients are served round-robin. One thread takes only small prompts, which
therefore never wait behind a very long one. Submissions whose grammar is not compiled yet wait in a separate line per
grammar, with four threads for all of these: a client uses at most two of them, and the client that was served least
recently is next.

Tokenizers of Hugging Face release the interpreter's lock, templates do not: after a long one, its thread sleeps.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, Literal, TypeAlias

from kvscope_engine.server.service_limits import Allowance, ServiceLimits
from kvscope_telemetry.messages.command_size import command_bytes
from kvscope_telemetry.messages.commands import Finished, RequestTiming, Submit, Usage
from kvscope_telemetry.messages.structured import Structured

_Line: TypeAlias = tuple[bytes, str, Structured | None]
"""A client, on whose behalf it asks, and the grammar of the answers."""
TokenIdsOf: TypeAlias = Callable[[Submit, Callable[[], bool]], list[int]]
"""Function of a submission and a predicate that returns whether its result is still wanted."""
_Client: TypeAlias = tuple[bytes, str]
_Kind: TypeAlias = Literal["any", "small", "formed"]
"""Kind of submissions that a thread takes."""
_THREADS: Final[tuple[_Kind, ...]] = ("any", "small", "formed", "formed", "formed", "formed")
MAX_COMPILING_EACH: Final = 2
"""Maximum number of grammars compiled concurrently for one client, which leaves threads for others."""
SMALL_BYTES: Final = 64 << 10
MAX_REMEMBERED: Final = 4096
"""Maximum number of clients whose last turn is remembered."""
LONG_S: Final = 0.01
"""Seconds of work from which a thread sleeps afterwards for as long as it worked, up to `MAX_REST_S`."""
MAX_REST_S: Final = 1.0


class Prepared:
    """A submission with the future token ids of its prompt, or the error."""

    def __init__(self, client: bytes, submit: Submit) -> None:
        self.client = client
        self.submit = submit
        self.num_bytes = command_bytes(submit)
        self.token_ids: Future[list[int]] = Future()
        self._arrival_s = time.monotonic()
        self.is_wanted = True
        """False once it is cancelled."""

    @property
    def is_small(self) -> bool:
        """Whether tokenizing takes only milliseconds."""
        return self.num_bytes <= SMALL_BYTES

    @property
    def line(self) -> _Line:
        """Key of the queue in which it waits."""
        return *self.holder, self.submit.sampling.structured

    @property
    def holder(self) -> tuple[bytes, str]:
        """Key against whose limits it counts: the client, and on whose behalf it asks."""
        return self.client, self.submit.client

    @property
    def num_tokens(self) -> int:
        """Number of prompt tokens, once it is done; 0 on errors."""
        return 0 if self.token_ids.exception() else len(self.token_ids.result())

    def abort_messages(self) -> list[Finished]:
        """Return the last messages of its completions for an abort before the engine received it."""
        request_id, count = self.submit.request_id, self.submit.sampling.n
        total_s = time.monotonic() - self._arrival_s
        return [
            Finished(
                request_id=request_id,
                index=index,
                finish_reason="abort",
                usage=Usage(),
                timing=RequestTiming(total_s=total_s),
            )
            for index in range(count)
        ]


class Preparation:
    """Threads that tokenize submissions.

    `token_ids_of`, `has_grammar` and `on_done` (once per finished submission) are called on these threads.
    """

    def __init__(
        self,
        token_ids_of: TokenIdsOf,
        has_grammar: Callable[[Submit], bool],
        on_done: Callable[[Prepared], None],
        limits: ServiceLimits,
    ) -> None:
        self._token_ids_of = token_ids_of
        self._has_grammar = has_grammar
        self._on_done = on_done
        self._allowance = Allowance("prompts are being prepared", limits.client_prompts, limits.all_prompts)
        self._waiting: OrderedDict[_Line, deque[Prepared]] = OrderedDict()
        self._busy: set[Prepared] = set()
        self._compiling: dict[Prepared, _Client] = {}
        """Busy submissions whose grammars are being compiled, with their clients."""
        self._compiled: OrderedDict[_Client, None] = OrderedDict()
        """Clients whose grammars were compiled, least recent first."""
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(kind,), name="kvscope-prompts", daemon=True) for kind in _THREADS
        ]
        for thread in self._threads:
            thread.start()

    def enqueue(self, prepared: Prepared) -> str:
        """Queue a submission. Returns the reason if a limit is exceeded."""
        with self._changed:
            reason = self._allowance.acquire(prepared.holder, prepared.num_bytes)
            if not reason:
                self._waiting.setdefault(prepared.line, deque()).append(prepared)
                self._changed.notify_all()
            return reason

    def cancel(self, prepared: Prepared) -> None:
        """Cancel a submission: remove it from the queue, or abandon it if it is in progress."""
        prepared.is_wanted = False
        prepared.token_ids.cancel()
        with self._changed:
            waiting = self._waiting.get(prepared.line, deque())
            if prepared not in waiting:
                return
            waiting.remove(prepared)
            self._allowance.release(prepared.holder, prepared.num_bytes)
            if not waiting:
                del self._waiting[prepared.line]

    def move(self, before: bytes, client: bytes) -> None:
        """Move the submissions of `before`, queued or in progress, to `client`, ahead of its queued ones."""
        with self._changed:
            asked_for = {prepared.submit.client for prepared in self._busy if prepared.client == before}
            for line in [line for line in self._waiting if line[0] == before]:
                asked_for.add(line[1])
                waiting = self._waiting.pop(line)
                for prepared in waiting:
                    prepared.client = client
                after = (client, *line[1:])
                self._waiting[after] = waiting + self._waiting.pop(after, deque())
            for prepared in self._busy:
                if prepared.client == before:
                    prepared.client = client
            for on_behalf_of in asked_for:
                self._allowance.move((before, on_behalf_of), (client, on_behalf_of))

    def close(self) -> None:
        """End the threads. A thread in the middle of a long text is abandoned."""
        self._closing.set()
        with self._changed:
            self._waiting.clear()
            self._changed.notify_all()

    def _run(self, kind: _Kind) -> None:
        while (prepared := self._next(kind)) is not None:
            started = time.monotonic()
            self._prepare(prepared)
            worked_s = time.monotonic() - started
            if worked_s > LONG_S and kind != "formed":  # grammars are compiled in other processes
                self._closing.wait(min(worked_s, MAX_REST_S))

    def _next(self, kind: _Kind) -> Prepared | None:
        """Wait for and start the first submission of the next line that a thread of `kind` serves; None at the end."""
        with self._changed:
            while not self._closing.is_set():
                busy = {prepared.line for prepared in self._busy}
                free = [(line, waiting[0]) for line, waiting in self._waiting.items() if line not in busy]
                line = self._next_new_form(free) if kind == "formed" else self._next_known(free, kind)
                if line is not None:
                    return self._start(line, compiles=kind == "formed")
                self._changed.wait()
            return None

    def _next_known(self, free: list[tuple[_Line, Prepared]], kind: _Kind) -> _Line | None:
        for line, prepared in free:
            if (kind == "any" or prepared.is_small) and self._has_grammar(prepared.submit):
                return line
        return None

    def _next_new_form(self, free: list[tuple[_Line, Prepared]]) -> _Line | None:
        num_compiling = Counter(self._compiling.values())
        turns = {client: turn for turn, client in enumerate(self._compiled)}
        lines = [
            line
            for line, prepared in free
            if num_compiling[line[:2]] < MAX_COMPILING_EACH and not self._has_grammar(prepared.submit)
        ]
        return min(lines, key=lambda line: turns.get(line[:2], -1), default=None)

    def _start(self, line: _Line, *, compiles: bool) -> Prepared:
        waiting = self._waiting[line]
        prepared = waiting.popleft()
        self._busy.add(prepared)
        if compiles:
            self._compiling[prepared] = line[:2]
            self._compiled[line[:2]] = None
            self._compiled.move_to_end(line[:2])
            if len(self._compiled) > MAX_REMEMBERED:
                self._compiled.popitem(last=False)
        if waiting:
            self._waiting.move_to_end(line)
        else:
            del self._waiting[line]
        return prepared

    def _prepare(self, prepared: Prepared) -> None:
        future = prepared.token_ids
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(
                    self._token_ids_of(prepared.submit, lambda: prepared.is_wanted and not self._closing.is_set())
                )
            except Exception as error:  # reported to the client when the submission reaches the engine
                future.set_exception(error)
            if not self._closing.is_set():
                self._on_done(prepared)
        with self._changed:
            self._allowance.release(prepared.holder, prepared.num_bytes)
            self._busy.discard(prepared)
            self._compiling.pop(prepared, None)
            self._changed.notify_all()
