"""Tokenizes prompts on separate threads, so that a chat template or a long text never delays a step.

Owns six threads and the queues of submissions. Submissions of one client (or of one for whom a client acts) are
prepared in order, one at a time, and clients are served round-robin. One thread serves only small prompts, which
therefore never wait behind a very long one. Submissions whose grammar is not compiled yet wait in a queue per grammar,
served by four threads: a client uses at most two of them, and the client that was served least recently is next.

Hugging Face's tokenizers release the GIL, but chat templates do not. A thread therefore sleeps after it has prepared a
prompt that took long, so that the engine's thread can run.
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

_QueueKey: TypeAlias = tuple[bytes, str, Structured | None]
"""Key of a queue of submissions: (client, client for which it acts, grammar).

The second is "" if the client acts for itself; the third is None without structured output.
"""
TokenIdsOf: TypeAlias = Callable[[Submit, Callable[[], bool]], list[int]]
"""Function that tokenizes the prompt of a submission. Its second argument returns whether the result is still
wanted.
"""
_Client: TypeAlias = tuple[bytes, str]
_Kind: TypeAlias = Literal["any", "small", "grammar"]
"""Kind of submissions that a thread serves. "grammar" stands for those whose grammar must be compiled."""
_THREADS: Final[tuple[_Kind, ...]] = ("any", "small", "grammar", "grammar", "grammar", "grammar")
MAX_COMPILING_PER_CLIENT: Final = 2
"""Maximum number of grammars compiled concurrently for one client, which leaves threads for other clients."""
SMALL_BYTES: Final = 64 << 10
MAX_REMEMBERED_CLIENTS: Final = 4096
LONG_WORK_S: Final = 0.01
"""Seconds of work after which a thread sleeps for as long as the work took, up to `MAX_SLEEP_S`."""
MAX_SLEEP_S: Final = 1.0


class Prepared:
    """A submission with a future for the token ids of its prompt, or for the error."""

    def __init__(self, client: bytes, submit: Submit) -> None:
        self.client = client
        self.submit = submit
        self.num_bytes = command_bytes(submit)
        self.token_ids: Future[list[int]] = Future()
        self._arrival_s = time.monotonic()
        self.is_wanted = True
        self.aborted_indexes: set[int] = set()
        """Indexes of the completions that were aborted before the engine received the request."""

    @property
    def is_small(self) -> bool:
        """Whether the prompt is so short that tokenizing takes only milliseconds."""
        return self.num_bytes <= SMALL_BYTES

    @property
    def queue_key(self) -> _QueueKey:
        return *self.limit_key, self.submit.sampling.structured

    @property
    def limit_key(self) -> tuple[bytes, str]:
        """Key of the limits that apply to the submission: the client, and the client for which it acts."""
        return self.client, self.submit.client

    def tokenize(self, token_ids_of: TokenIdsOf, is_wanted: Callable[[], bool]) -> list[int]:
        """Return the prompt's token ids. Called on a thread of `Preparation`; raises BadInput."""
        return token_ids_of(self.submit, is_wanted)

    @property
    def num_tokens(self) -> int:
        """Number of prompt tokens once they are known; 0 if tokenizing failed."""
        return 0 if self.token_ids.exception() else len(self.token_ids.result())

    def abort_messages(self) -> list[Finished]:
        """Return the last message of each completion, for an abort before the engine received the request."""
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

    `token_ids_of`, `has_grammar` and `on_done` (called once per finished submission) run on these threads.
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
        self._waiting: OrderedDict[_QueueKey, deque[Prepared]] = OrderedDict()
        self._busy: set[Prepared] = set()
        self._compiling: dict[Prepared, _Client] = {}
        self._recent_compilers: OrderedDict[_Client, None] = OrderedDict()
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(kind,), name="kvscope-prompts", daemon=True) for kind in _THREADS
        ]
        for thread in self._threads:
            thread.start()

    def enqueue(self, prepared: Prepared) -> str:
        """Queue a submission. Returns the reason if a limit would be exceeded, else ""."""
        with self._changed:
            reason = self._allowance.acquire(prepared.limit_key, prepared.num_bytes)
            if not reason:
                self._waiting.setdefault(prepared.queue_key, deque()).append(prepared)
                self._changed.notify_all()
            return reason

    def cancel(self, prepared: Prepared) -> None:
        prepared.is_wanted = False
        prepared.token_ids.cancel()
        with self._changed:
            waiting = self._waiting.get(prepared.queue_key, deque())
            if prepared not in waiting:
                return
            waiting.remove(prepared)
            self._allowance.release(prepared.limit_key, prepared.num_bytes)
            if not waiting:
                del self._waiting[prepared.queue_key]

    def move(self, previous: bytes, client: bytes) -> None:
        """Move the submissions of the connection `previous`, queued or in progress, to `client`, ahead of the
        submissions that `client` has queued already.
        """
        with self._changed:
            origins = {prepared.submit.client for prepared in self._busy if prepared.client == previous}
            for queue_key in [queue_key for queue_key in self._waiting if queue_key[0] == previous]:
                origins.add(queue_key[1])
                waiting = self._waiting.pop(queue_key)
                for prepared in waiting:
                    prepared.client = client
                new_key = (client, *queue_key[1:])
                self._waiting[new_key] = waiting + self._waiting.pop(new_key, deque())
            for prepared in self._busy:
                if prepared.client == previous:
                    prepared.client = client
            for on_behalf_of in origins:
                self._allowance.move((previous, on_behalf_of), (client, on_behalf_of))

    def close(self) -> None:
        """End the threads. A thread that is tokenizing a long text is abandoned."""
        self._closing.set()
        with self._changed:
            self._waiting.clear()
            self._changed.notify_all()

    def _run(self, kind: _Kind) -> None:
        while (prepared := self._next(kind)) is not None:
            started = time.monotonic()
            self._tokenize(prepared)
            worked_s = time.monotonic() - started
            if worked_s > LONG_WORK_S and kind != "grammar":  # grammars are compiled in other processes
                self._closing.wait(min(worked_s, MAX_SLEEP_S))

    def _next(self, kind: _Kind) -> Prepared | None:
        """Wait for the first submission of the next queue that a thread of `kind` serves, and start it. Returns
        None after `close`.
        """
        with self._changed:
            while not self._closing.is_set():
                busy = {prepared.queue_key for prepared in self._busy}
                available = [
                    (queue_key, waiting[0]) for queue_key, waiting in self._waiting.items() if queue_key not in busy
                ]
                queue_key = (
                    self._next_to_compile(available) if kind == "grammar" else self._next_compiled(available, kind)
                )
                if queue_key is not None:
                    return self._start(queue_key, compiles=kind == "grammar")
                self._changed.wait()
            return None

    def _next_compiled(self, available: list[tuple[_QueueKey, Prepared]], kind: _Kind) -> _QueueKey | None:
        for queue_key, prepared in available:
            if (kind == "any" or prepared.is_small) and self._has_grammar(prepared.submit):
                return queue_key
        return None

    def _next_to_compile(self, available: list[tuple[_QueueKey, Prepared]]) -> _QueueKey | None:
        num_compiling = Counter(self._compiling.values())
        turns = {client: turn for turn, client in enumerate(self._recent_compilers)}
        keys = [
            queue_key
            for queue_key, prepared in available
            if num_compiling[queue_key[:2]] < MAX_COMPILING_PER_CLIENT and not self._has_grammar(prepared.submit)
        ]
        return min(keys, key=lambda queue_key: turns.get(queue_key[:2], -1), default=None)

    def _start(self, queue_key: _QueueKey, *, compiles: bool) -> Prepared:
        waiting = self._waiting[queue_key]
        prepared = waiting.popleft()
        self._busy.add(prepared)
        if compiles:
            self._compiling[prepared] = queue_key[:2]
            self._recent_compilers[queue_key[:2]] = None
            self._recent_compilers.move_to_end(queue_key[:2])
            if len(self._recent_compilers) > MAX_REMEMBERED_CLIENTS:
                self._recent_compilers.popitem(last=False)
        if waiting:
            self._waiting.move_to_end(queue_key)
        else:
            del self._waiting[queue_key]
        return prepared

    def _tokenize(self, prepared: Prepared) -> None:
        future = prepared.token_ids
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(
                    prepared.tokenize(self._token_ids_of, lambda: prepared.is_wanted and not self._closing.is_set())
                )
            except Exception as error:  # reported to the client when the submission reaches the engine
                future.set_exception(error)
            if not self._closing.is_set():
                self._on_done(prepared)
        with self._changed:
            self._allowance.release(prepared.limit_key, prepared.num_bytes)
            self._busy.discard(prepared)
            self._compiling.pop(prepared, None)
            self._changed.notify_all()
