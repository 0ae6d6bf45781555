"""Watches one scheduler of SGLang's: hooks, the thread that tells, and the sockets.

Owns their life. The thread looks for notes every few milliseconds, so that the scheduler wakes nobody; frames, and what
is packed for them, are made there.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from kvscope_inside.detokenizer import Detokenizer
from kvscope_inside.endpoints import endpoint_of_rank, file_of_rank, keys_for
from kvscope_inside.hooks import Hooks
from kvscope_inside.publisher import Publisher
from kvscope_inside.sglang.actions import SglangActions
from kvscope_inside.sglang.facts import (
    full_allocator,
    hello_of,
    kv_bytes,
    num_pages_of,
    rank_of,
    weights_bytes,
)
from kvscope_inside.sglang.notes import StepNotes
from kvscope_inside.sglang.pages import knows_free, reader_of
from kvscope_inside.sglang.plugin import log
from kvscope_inside.sglang.replay import Replay
from kvscope_telemetry.messages.telemetry import Event, Hello, MemoryBreakdown
from kvscope_telemetry.state.cache_state import CacheState

NAP_S: Final = 0.004
"""Between two looks for notes."""
REST: Final = 9
"""After telling of a copy none is made for so many times as long as that took."""
MAX_NOTES: Final = 10_000
"""That wait to be told: more, and telling has stopped, so noting ends too."""


def watch(scheduler: Any, endpoint: str, record: str | None = None) -> Watch | None:
    """From now on all that a scheduler does is told on `endpoint`, or the next of its data-parallel ranks'; None for
    one that only does what another does."""
    rank = rank_of(scheduler)
    if not rank.is_first:
        return None
    address = endpoint_of_rank(endpoint, rank.data_parallel)
    file = file_of_rank(Path(record), rank.data_parallel) if record else None
    return Watch(scheduler, address, file, num_ranks=rank.num_ranks)


class Watch:
    """Runs until `close`, the end of the process, or the first exception of ours."""

    def __init__(self, scheduler: Any, address: str, record: Path | None = None, *, num_ranks: int = 1) -> None:
        self._closing = threading.Event()
        self._hooks = Hooks(self._fail)
        allocator, args = full_allocator(scheduler), scheduler.server_args
        state = CacheState(
            hello_of(scheduler, secrets.randbits(48), num_ranks=num_ranks, knows_free=knows_free(allocator))
        )
        table = scheduler.req_to_token_pool.req_to_token
        reader = reader_of(table, allocator, num_pages_of(scheduler))
        self._replay = Replay(
            state,
            by_priority=str(getattr(args, "retraction_policy", "")) == "priority",
            policy=str(getattr(args, "radix_eviction_policy", "lru")),
        )
        self._actions = SglangActions(scheduler, num_ranks)
        self._detokenizer = Detokenizer(str(getattr(args, "tokenizer_path", None) or args.model_path))
        self._publisher = Publisher(
            address,
            state,
            keys=keys_for(address, log().warning),
            record=record,
            actions=self._actions,
            contents=self._replay.contents,
            texts=self._detokenizer.texts,
            memory=self._memory_of(scheduler, state.hello),
            tell=log().warning,
        )
        self._notes = StepNotes(scheduler, self._hooks, reader, self._actions.run)
        self._hooks.after(scheduler, "run_event_loop", lambda *_: self.close())
        if self._hooks.missing:
            missing = ", ".join(self._hooks.missing)
            line = f"this version of SGLang does not have {missing}: what they tell is unknown"
            state.add_event(Event(kind="note", time_ns=time.monotonic_ns(), cause=line))
            log().warning("kvscope: %s", line)
        self._thread = threading.Thread(target=self._run, name="kvscope-inside", daemon=True)
        self._thread.start()
        log().info("kvscope: this engine can be seen by kvscope --attach %s", address)

    @staticmethod
    def _memory_of(scheduler: Any, hello: Hello) -> Callable[[], MemoryBreakdown | None]:
        """Where the memory went, as far as SGLang shows it: weights and pool stay as they are."""
        try:
            weights = weights_bytes(scheduler)
        except Exception as error:
            log().warning("kvscope: where the memory went is unknown: %s", error)
            return lambda: None
        kv = kv_bytes(scheduler)
        return lambda: MemoryBreakdown(
            epoch=hello.epoch, time_ns=time.monotonic_ns(), weights_bytes=weights, kv_bytes=kv
        )

    def close(self, reason: str = "") -> None:
        """SGLang is as it was, and whoever watches is told. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._hooks.remove()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=1.0)
        self._publisher.close(reason)
        self._detokenizer.close()

    def _run(self) -> None:
        try:
            while not self._closing.wait(NAP_S):
                if self._notes.notes:
                    self._tell()
        except Exception as error:
            self._hooks.fail("the thread that tells", error)

    def _tell(self) -> None:
        """All up to the first whose pages have not arrived."""
        notes, publisher = self._notes.notes, self._publisher
        if len(notes) > MAX_NOTES:
            raise RuntimeError(f"{len(notes)} steps wait to be told")
        with publisher.telling():
            while notes and (notes[0].pages is None or notes[0].pages.copy.has_arrived()):
                note, began_ns = notes.popleft(), time.monotonic_ns()
                publisher.publish(self._replay.apply(note))
                if note.pages is not None:
                    ended_ns = time.monotonic_ns()
                    self._notes.no_copy_before_ns = ended_ns + REST * (ended_ns - began_ns)
            self._replay.state.totals["messages_dropped"] = publisher.messages_dropped
        publisher.step_started_ns = self._notes.step_started_ns

    def _fail(self, name: str, error: Exception) -> None:
        """All hooks are gone; on the thread where it happened, which may be the scheduler's."""
        reason = f"kvscope stopped watching: {type(error).__name__} in {name}: {error}"
        log().error("kvscope: %s; SGLang goes on", reason, exc_info=bool(os.environ.get("KVSCOPE_DEBUG")))
        ending = threading.Thread(target=self._end, args=(reason,), name="kvscope-inside-end", daemon=True)
        ending.start()

    def _end(self, reason: str) -> None:
        with contextlib.suppress(Exception):
            self.close(reason)
