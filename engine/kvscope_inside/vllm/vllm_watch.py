"""Watches one vLLM scheduler: connects hooks, publishing thread, sockets, and operators' actions.

`PublishingThread` manages their lifetime.
"""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from typing import Any

from kvscope_inside.detokenizer import DetokenizerProcess
from kvscope_inside.endpoints import endpoint_of_rank, file_of_rank, free_file, keys_for
from kvscope_inside.engine_log import engine_log
from kvscope_inside.metrics_process import MetricsProcess
from kvscope_inside.publisher import Publisher
from kvscope_inside.publishing_thread import PublishingThread
from kvscope_inside.vllm.offloading import offloading_of, unpublished_connectors
from kvscope_inside.vllm.vllm_actions import VllmActions
from kvscope_inside.vllm.vllm_facts import hello_of, kv_bytes, max_adapters, rank_of
from kvscope_inside.vllm.vllm_memory import EngineMemory
from kvscope_inside.vllm.vllm_recorder import VllmRecorder
from kvscope_inside.vllm.vllm_translator import VllmTranslator
from kvscope_telemetry.messages.telemetry import Event
from kvscope_telemetry.producer.cache_state import CacheState


def watch(scheduler: Any, endpoint: str, record: str | None = None) -> PublishingThread:
    """Watch a scheduler, and publish its activity at `endpoint`, or for a data-parallel rank at the endpoint derived
    from it.

    Publishing ends with the process or with the first exception in kvscope's code. If this function raises (the errors
    of `Publisher`), nothing is watched.
    """
    thread = PublishingThread("vLLM", engine_log("vllm"))
    hooks, hello = thread.hooks, hello_of(scheduler, secrets.randbits(48))
    state, memory = CacheState(hello), EngineMemory(hello, kv_bytes(scheduler))
    pool, offloading = scheduler.kv_cache_manager.block_pool, offloading_of(scheduler)
    translator = VllmTranslator(
        state,
        hash_block_size=int(getattr(pool, "hash_block_size", 0) or hello.cache.block_size),
        by_priority=str(getattr(scheduler.policy, "value", scheduler.policy)) == "priority",
        max_adapters=max_adapters(scheduler),
        blocks_per_slot=offloading.blocks_per_slot if offloading is not None else 1,
    )
    model = scheduler.vllm_config.model_config
    detokenizer = DetokenizerProcess(str(model.tokenizer or model.model))
    rank = rank_of(scheduler)
    address = endpoint_of_rank(endpoint, rank)
    with thread.installing_hooks():
        actions = VllmActions(hooks, memory.query)
        recorder = VllmRecorder(scheduler, hooks, actions.before_step)
        actions.bind(recorder, translator)
        hooks.before(scheduler, "shutdown", thread.close)
        publisher = Publisher(
            address,
            state,
            keys=keys_for(address, engine_log("vllm").warning),
            record=free_file(file_of_rank(Path(record), rank)) if record else None,
            actions=actions,
            contents=translator.contents,
            texts=detokenizer.texts,
            memory=memory.breakdown,
            memory_pid=lambda: memory.pid,
            on_problem=engine_log("vllm").warning,
        )
    if line := unpublished_connectors(scheduler):
        state.add_event(Event(kind="note", time_ns=time.monotonic_ns(), cause=line))
        engine_log("vllm").info("kvscope: %s", line)
    metrics = MetricsProcess(address, rank, engine_log("vllm").warning)
    on_close = [metrics.close, detokenizer.close]
    thread.start(publisher, address, recorder, translator.apply, after_poll=actions.poll, on_close=on_close)
    return thread
