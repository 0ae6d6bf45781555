"""Watches one scheduler of vLLM's: hooks, the thread that tells, and the sockets; what its engine core is asked to do.

Owns their life. The thread looks for notes every few milliseconds, so that the engine core wakes nobody; frames, and
what is packed for them, are made there.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from pathlib import Path
from typing import Any, Final

from kvscope_inside.detokenizer import Detokenizer
from kvscope_inside.endpoints import keys_for
from kvscope_inside.hooks import Hooks
from kvscope_inside.publisher import Publisher
from kvscope_inside.vllm.actions import VllmActions
from kvscope_inside.vllm.facts import endpoint_of_rank, file_of_rank, hello_of, kv_bytes, max_adapters
from kvscope_inside.vllm.memory import EngineMemory
from kvscope_inside.vllm.notes import StepNotes
from kvscope_inside.vllm.offloading import offloading_of, untold
from kvscope_inside.vllm.plugin import log
from kvscope_inside.vllm.replay import Replay
from kvscope_telemetry.messages.telemetry import Event
from kvscope_telemetry.state.cache_state import CacheState

NAP_S: Final = 0.004
"""Between two looks for notes."""
MAX_NOTES: Final = 10_000
"""That wait to be told: more, and telling has stopped, so noting ends too."""


def watch(scheduler: Any, endpoint: str, record: str | None = None) -> Watch:
    """From now on all that a scheduler does is told on `endpoint`, or the next of its data-parallel ranks'."""
    return Watch(scheduler, endpoint, record)


class Watch:
    """Runs until `close`, the end of the process, or the first exception of ours."""

    def __init__(self, scheduler: Any, endpoint: str, record: str | None = None) -> None:
        self._closing = threading.Event()
        self._hooks = Hooks(self._fail)
        hello = hello_of(scheduler, secrets.randbits(48))
        state = CacheState(hello)
        memory = EngineMemory(hello, kv_bytes(scheduler))
        self._actions = VllmActions(self._hooks, memory.ask)
        self._notes = StepNotes(scheduler, self._hooks, self._actions.before_step)
        pool, offloading = scheduler.kv_cache_manager.block_pool, offloading_of(scheduler)
        self._replay = Replay(
            state,
            hash_block_size=int(getattr(pool, "hash_block_size", 0) or hello.cache.block_size),
            by_priority=str(getattr(scheduler.policy, "value", scheduler.policy)) == "priority",
            max_adapters=max_adapters(scheduler),
            blocks_per_place=offloading.blocks_per_place if offloading is not None else 1,
        )
        self._actions.bind(self._notes, self._replay)
        model = scheduler.vllm_config.model_config
        self._detokenizer = Detokenizer(str(model.tokenizer or model.model))
        address = endpoint_of_rank(endpoint, scheduler)
        self._publisher = Publisher(
            address,
            state,
            keys=keys_for(address, log().warning),
            record=file_of_rank(Path(record), scheduler) if record else None,
            actions=self._actions,
            contents=self._replay.contents,
            texts=self._detokenizer.texts,
            memory=memory.told,
            memory_pid=lambda: memory.pid,
            tell=log().warning,
        )
        self._hooks.before(scheduler, "shutdown", self.close)
        if self._hooks.missing:
            missing = ", ".join(self._hooks.missing)
            line = f"this version of vLLM does not have {missing}: what they tell is unknown"
            state.add_event(Event(kind="note", time_ns=time.monotonic_ns(), cause=line))
            log().warning("kvscope: %s", line)
        if line := untold(scheduler):
            state.add_event(Event(kind="note", time_ns=time.monotonic_ns(), cause=line))
            log().info("kvscope: %s", line)
        self._thread = threading.Thread(target=self._run, name="kvscope-inside", daemon=True)
        self._thread.start()
        log().info("kvscope: this engine can be seen by kvscope --attach %s", address)

    def close(self, reason: str = "") -> None:
        """vLLM is as it was, and whoever watches is told. Idempotent."""
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
                self._actions.look()
        except Exception as error:
            self._hooks.fail("the thread that tells", error)

    def _tell(self) -> None:
        notes, publisher = self._notes.notes, self._publisher
        if len(notes) > MAX_NOTES:
            raise RuntimeError(f"{len(notes)} steps wait to be told")
        with publisher.telling():
            while notes:
                publisher.publish(self._replay.apply(notes.popleft()))
            self._replay.state.totals["messages_dropped"] = publisher.messages_dropped
        publisher.step_started_ns = self._notes.step_started_ns

    def _fail(self, name: str, error: Exception) -> None:
        """All hooks are gone; on the thread where it happened, which may be the engine core's."""
        reason = f"kvscope stopped watching: {type(error).__name__} in {name}: {error}"
        log().error("kvscope: %s; vLLM goes on", reason, exc_info=bool(os.environ.get("KVSCOPE_DEBUG")))
        ending = threading.Thread(target=self._end, args=(reason,), name="kvscope-inside-end", daemon=True)
        ending.start()

    def _end(self, reason: str) -> None:
        with contextlib.suppress(Exception):
            self.close(reason)
