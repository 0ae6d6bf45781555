"""Watches transformers' continuous batching in one's own Python: hooks, the thread that tells, and the sockets.

    with kvscope_inside.watch(manager):
        manager.start()
        ...

Owns their life. A manager makes a cache when its loop starts, and lets go of it when it is stopped: each cache is told
as an engine of its own, from its making on, or from where it stands when somebody begins to watch.
"""

from __future__ import annotations

import inspect
import os
import secrets
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Self

from kvscope_inside.detokenizer import DetokenizerProcess
from kvscope_inside.endpoints import ENDPOINT, free_file, keys_for
from kvscope_inside.engine_log import engine_log
from kvscope_inside.hooks import Hooks
from kvscope_inside.publisher import Publisher
from kvscope_inside.teller import Teller, end_after
from kvscope_inside.transformers.facts import Rows, hello_of, memory_of
from kvscope_inside.transformers.notes import TransformersStepNotes
from kvscope_inside.transformers.transformers_translator import TransformersTranslator
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.sockets.bind_address import default_endpoint, parse_bind_address
from kvscope_telemetry.state.cache_state import CacheState

_NEEDED: Final = ("_create_batch_processor", "_generation_loop_body", "stop", "join")


def watch(manager: Any, endpoint: str = "", record: str | os.PathLike[str] | None = None) -> TransformersWatch:
    """Tell from now on what a `ContinuousBatchingManager` of transformers does, on `endpoint`, or the one in
    KVSCOPE_INSIDE, or the one that a desktop attaches to by default. With `record` it is in a file as well.

    Ends by `close`, or as a context. Raises BadInput for what is no such manager and for an endpoint that will not do,
    and EndpointInUse where there is a cache already.
    """
    address = endpoint or os.environ.get(ENDPOINT) or default_endpoint()
    parse_bind_address(address)
    if not all(hasattr(manager, name) for name in _NEEDED):
        raise BadInput(f"{type(manager).__name__} is not watched: a ContinuousBatchingManager of transformers 5.23 is")
    return TransformersWatch(manager, address, Path(record) if record else None)


class TransformersWatch:
    """Runs until `close`, or the first exception of ours."""

    def __init__(self, manager: Any, endpoint: str, record: Path | None) -> None:
        self.endpoint = endpoint
        """What a desktop attaches to."""
        self._manager, self._record = manager, record
        self._hooks = Hooks(self._fail)
        self._cache: _CacheWatch | None = None
        self._keeps_cache = self._is_closed = False
        hooks = self._hooks
        hooks.after(manager, "_create_batch_processor", lambda processor: self._made(processor))
        self._stop_form = inspect.signature(manager.stop)
        hooks.before(manager, "stop", self._stops)
        hooks.after(manager, "join", lambda *_, **__: self._let_go())
        hooks.after(manager, "stop", lambda *_, **__: self._let_go())
        processor = manager.batch_processor
        if processor is None:
            return
        if manager.is_running():
            hooks.before(manager, "_generation_loop_body", lambda processor, *_, **__: self._made(processor))
            return
        try:
            self._begin(processor)
        except BaseException:
            hooks.remove()
            raise

    def close(self, reason: str = "") -> None:
        """transformers is as it was, and whoever watches is told. Idempotent."""
        self._is_closed = True
        self._hooks.remove()
        cache, self._cache = self._cache, None
        if cache is not None:
            cache.close(reason)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # On threads of the manager's.

    def _made(self, processor: Any) -> None:
        """It has a cache, an old one or a new one."""
        if self._cache is None or not self._cache.is_of(processor):
            self._begin(processor)

    def _begin(self, processor: Any) -> None:
        if self._cache is not None:
            self._cache.close()
        record = None if self._record is None else free_file(self._record)
        self._cache = _CacheWatch(self._manager, processor, self.endpoint, record, self._fail)

    def _stops(self, *args: Any, **kwargs: Any) -> None:
        self._keeps_cache = bool(self._stop_form.bind(*args, **kwargs).arguments.get("keep_for_next_session"))

    def _let_go(self) -> None:
        """It stops. Unless it keeps its cache for a next session, nothing of ours may keep that in memory."""
        if self._cache is not None and not self._keeps_cache and not self._manager.is_running():
            self._cache.close()
            self._cache = None

    def _fail(self, name: str, error: Exception) -> None:
        """On the thread where it happened, which may be the one that generates."""
        if self._is_closed:
            return
        self._is_closed = True
        end_after(error, name, engine_log("transformers"), "generation", self.close)


class _CacheWatch:
    """Of one batch processor and its cache."""

    def __init__(self, manager: Any, processor: Any, endpoint: str, record: Path | None, fail: Any) -> None:
        self._processor = processor
        self._teller = Teller("transformers", engine_log("transformers"), on_failure=fail)
        hooks = self._teller.hooks
        hello = hello_of(manager, processor, secrets.randbits(48))
        state = CacheState(hello)
        module = import_module("transformers.generation.continuous_batching.cache_allocators.cache_allocator")
        translator = TransformersTranslator(state, Rows.of(processor.cache), module.compute_block_hash)
        name = str(getattr(manager.model.config, "_name_or_path", "") or "")
        detokenizer = DetokenizerProcess(name)
        with self._teller.beginning():
            notes = TransformersStepNotes(processor, hooks)
            publisher = Publisher(
                endpoint,
                state,
                keys=keys_for(endpoint, engine_log("transformers").warning),
                record=record,
                contents=translator.contents,
                texts=detokenizer.texts if name else None,
                memory=lambda: memory_of(manager.model, processor, hello.epoch),
                tell=engine_log("transformers").warning,
            )
        self._teller.start(publisher, endpoint, notes, translator.apply, ends=[detokenizer.close])

    def is_of(self, processor: Any) -> bool:
        """Whether it is this one's."""
        return self._processor is processor

    def close(self, reason: str = "") -> None:
        """What was noted is told before the goodbye. Idempotent."""
        self._teller.close(reason)
