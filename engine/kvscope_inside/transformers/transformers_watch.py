"""Watches transformers' continuous batching in the user's own process: hooks, publishing thread, and sockets.

    with kvscope_inside.watch(manager):
        manager.start()
        ...

Owns the lifetime of these parts. A manager creates a cache when its loop starts and drops it when stopped. Each cache
is published as a separate engine, from its creation on, or from its current state if it exists when watching begins.
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
from kvscope_inside.publishing_thread import PublishingThread, close_after_error
from kvscope_inside.transformers.transformers_facts import LedgerRows, hello_of, memory_of
from kvscope_inside.transformers.transformers_recorder import TransformersRecorder
from kvscope_inside.transformers.transformers_translator import TransformersTranslator
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.producer.cache_state import CacheState
from kvscope_telemetry.transport.bind_address import default_endpoint, parse_bind_address

_REQUIRED_METHODS: Final = ("_create_batch_processor", "_generation_loop_body", "stop", "join")


def watch(manager: Any, endpoint: str = "", record: str | os.PathLike[str] | None = None) -> TransformersWatch:
    """Publish the telemetry of a transformers `ContinuousBatchingManager` until `close`.

    Args:
        manager: The manager, which may be running already.
        endpoint: Endpoint to serve. Default: the environment variable KVSCOPE_INSIDE or, if it is not set, the endpoint
            to which a desktop attaches by default.
        record: Path of a recording to write in addition.

    Returns:
        The watch, which is also a context manager.

    Raises:
        BadInput: for an object that is no supported manager, or an endpoint that cannot be used.
        EndpointInUse: if the manager has a cache already and the endpoint is in use.
    """
    address = endpoint or os.environ.get(ENDPOINT) or default_endpoint()
    parse_bind_address(address)
    if not all(hasattr(manager, name) for name in _REQUIRED_METHODS):
        raise BadInput(f"{type(manager).__name__} is not watched: a ContinuousBatchingManager of transformers 5.23 is")
    return TransformersWatch(manager, address, Path(record) if record else None)


class TransformersWatch:
    """Watches a manager until `close`, or until the first exception in kvscope's code."""

    def __init__(self, manager: Any, endpoint: str, record: Path | None) -> None:
        self.endpoint = endpoint
        self._manager, self._record = manager, record
        self._hooks = Hooks(self._fail)
        self._cache: _CacheWatcher | None = None
        self._is_cache_reused = self._is_closed = False
        hooks = self._hooks
        hooks.after(manager, "_create_batch_processor", lambda processor: self._created_processor(processor))
        self._stop_signature = inspect.signature(manager.stop)
        hooks.before(manager, "stop", self._before_stop)
        hooks.after(manager, "join", lambda *_, **__: self._release_cache())
        hooks.after(manager, "stop", lambda *_, **__: self._release_cache())
        processor = manager.batch_processor
        if processor is None:
            return
        if manager.is_running():
            hooks.before(
                manager, "_generation_loop_body", lambda processor, *_, **__: self._created_processor(processor)
            )
            return
        try:
            self._start(processor)
        except BaseException:
            hooks.remove()
            raise

    def close(self, reason: str = "") -> None:
        """Remove the hooks and publish a goodbye message. Idempotent."""
        self._is_closed = True
        self._hooks.remove()
        cache, self._cache = self._cache, None
        if cache is not None:
            cache.close(reason)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # Called on the manager's threads.

    def _created_processor(self, processor: Any) -> None:
        """Begin to watch the cache of `processor`, unless it is being watched already."""
        if self._cache is None or not self._cache.watches(processor):
            self._start(processor)

    def _start(self, processor: Any) -> None:
        if self._cache is not None:
            self._cache.close()
        record = None if self._record is None else free_file(self._record)
        self._cache = _CacheWatcher(self._manager, processor, self.endpoint, record, self._fail)

    def _before_stop(self, *args: Any, **kwargs: Any) -> None:
        self._is_cache_reused = bool(self._stop_signature.bind(*args, **kwargs).arguments.get("keep_for_next_session"))

    def _release_cache(self) -> None:
        """Drop references to a stopped manager's cache, so that its memory is freed. A cache that the manager
        keeps for its next session is still watched.
        """
        if self._cache is not None and not self._is_cache_reused and not self._manager.is_running():
            self._cache.close()
            self._cache = None

    def _fail(self, name: str, error: Exception) -> None:
        """Log the error and close. Called on the thread on which a hook failed, which may be the generating thread."""
        if self._is_closed:
            return
        self._is_closed = True
        close_after_error(error, name, engine_log("transformers"), "generation", self.close)


class _CacheWatcher:
    def __init__(self, manager: Any, processor: Any, endpoint: str, record: Path | None, fail: Any) -> None:
        self._processor = processor
        self._thread = PublishingThread("transformers", engine_log("transformers"), on_failure=fail)
        hooks = self._thread.hooks
        hello = hello_of(manager, processor, secrets.randbits(48))
        state = CacheState(hello)
        module = import_module("transformers.generation.continuous_batching.cache_allocators.cache_allocator")
        translator = TransformersTranslator(state, LedgerRows.of(processor.cache), module.compute_block_hash)
        name = str(getattr(manager.model.config, "_name_or_path", "") or "")
        detokenizer = DetokenizerProcess(name)
        with self._thread.installing_hooks():
            recorder = TransformersRecorder(processor, hooks)
            publisher = Publisher(
                endpoint,
                state,
                keys=keys_for(endpoint, engine_log("transformers").warning),
                record=record,
                contents=translator.contents,
                texts=detokenizer.texts if name else None,
                memory=lambda: memory_of(manager.model, processor, hello.epoch),
                on_problem=engine_log("transformers").warning,
            )
        self._thread.start(publisher, endpoint, recorder, translator.apply, on_close=[detokenizer.close])

    def watches(self, processor: Any) -> bool:
        return self._processor is processor

    def close(self, reason: str = "") -> None:
        self._thread.close(reason)
