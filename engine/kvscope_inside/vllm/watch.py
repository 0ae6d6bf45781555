"""Watches one vLLM scheduler: composes hooks, publishing thread, sockets, and operators' actions.

Their lifetime is managed by `Teller`.
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
from kvscope_inside.teller import Teller
from kvscope_inside.vllm.actions import VllmActions
from kvscope_inside.vllm.facts import hello_of, kv_bytes, max_adapters, rank_of
from kvscope_inside.vllm.memory import EngineMemory
from kvscope_inside.vllm.notes import VllmStepNotes
from kvscope_inside.vllm.offloading import offloading_of, untold
from kvscope_inside.vllm.vllm_translator import VllmTranslator
from kvscope_telemetry.messages.telemetry import Event
from kvscope_telemetry.producer.cache_state import CacheState


def watch(scheduler: Any, endpoint: str, record: str | None = None) -> Teller:
    """Publish what a scheduler does on `endpoint`, or the corresponding endpoint of its data-parallel rank.

    Ends with the process or with the first exception in kvscope's code. Raises what `Publisher` raises; nothing is
    watched then.
    """
    teller = Teller("vLLM", engine_log("vllm"))
    hooks, hello = teller.hooks, hello_of(scheduler, secrets.randbits(48))
    state, memory = CacheState(hello), EngineMemory(hello, kv_bytes(scheduler))
    pool, offloading = scheduler.kv_cache_manager.block_pool, offloading_of(scheduler)
    translator = VllmTranslator(
        state,
        hash_block_size=int(getattr(pool, "hash_block_size", 0) or hello.cache.block_size),
        by_priority=str(getattr(scheduler.policy, "value", scheduler.policy)) == "priority",
        max_adapters=max_adapters(scheduler),
        blocks_per_place=offloading.blocks_per_place if offloading is not None else 1,
    )
    model = scheduler.vllm_config.model_config
    detokenizer = DetokenizerProcess(str(model.tokenizer or model.model))
    rank = rank_of(scheduler)
    address = endpoint_of_rank(endpoint, rank)
    with teller.beginning():
        actions = VllmActions(hooks, memory.ask)
        notes = VllmStepNotes(scheduler, hooks, actions.before_step)
        actions.bind(notes, translator)
        hooks.before(scheduler, "shutdown", teller.close)
        publisher = Publisher(
            address,
            state,
            keys=keys_for(address, engine_log("vllm").warning),
            record=free_file(file_of_rank(Path(record), rank)) if record else None,
            actions=actions,
            contents=translator.contents,
            texts=detokenizer.texts,
            memory=memory.told,
            memory_pid=lambda: memory.pid,
            tell=engine_log("vllm").warning,
        )
    if line := untold(scheduler):
        state.add_event(Event(kind="note", time_ns=time.monotonic_ns(), cause=line))
        engine_log("vllm").info("kvscope: %s", line)
    metrics = MetricsProcess(address, rank, engine_log("vllm").warning)
    ends = [metrics.close, detokenizer.close]
    teller.start(publisher, address, notes, translator.apply, look=actions.look, ends=ends)
    return teller
