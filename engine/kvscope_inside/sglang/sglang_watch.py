"""Watches one SGLang scheduler: connects hooks, publishing thread and sockets, and limits how often pages are copied.

`PublishingThread` manages their lifetime.
"""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from typing import Any, Final

from kvscope_inside.detokenizer import DetokenizerProcess
from kvscope_inside.endpoints import endpoint_of_rank, file_of_rank, free_file, keys_for
from kvscope_inside.engine_log import engine_log
from kvscope_inside.metrics_process import MetricsProcess
from kvscope_inside.publisher import Publisher
from kvscope_inside.publishing_thread import PublishingThread
from kvscope_inside.sglang.pages import reader_of
from kvscope_inside.sglang.pools import has_free_list, pools_of
from kvscope_inside.sglang.sglang_actions import SglangActions
from kvscope_inside.sglang.sglang_facts import adapter_names, drafts_per_step, hello_of, rank_of
from kvscope_inside.sglang.sglang_memory import SchedulerMemory
from kvscope_inside.sglang.sglang_recorder import SglangRecord, SglangRecorder
from kvscope_inside.sglang.sglang_translator import SglangTranslator
from kvscope_telemetry.messages.telemetry import Frame
from kvscope_telemetry.producer.cache_state import CacheState

MIN_COPY_PAUSE_FACTOR: Final = 9
"""Minimum time between the end of publishing a copy and the next copy, as a multiple of the time that
publishing the copy took.
"""


def watch(scheduler: Any, endpoint: str, record: str | None = None) -> SglangWatch | None:
    """Watch a scheduler, and publish its activity at `endpoint`, or for a data-parallel rank at the endpoint derived
    from it.

    Returns None for a rank that runs the same schedule as the first rank of its model.
    """
    rank = rank_of(scheduler)
    if not rank.is_first:
        return None
    address = endpoint_of_rank(endpoint, rank.data_parallel)
    file = free_file(file_of_rank(Path(record), rank.data_parallel)) if record else None
    return SglangWatch(scheduler, address, file, num_ranks=rank.num_ranks, data_parallel=rank.data_parallel)


class SglangWatch:
    """Watches a scheduler until `close`, the end of the process, or the first exception in kvscope's code."""

    def __init__(
        self, scheduler: Any, address: str, record: Path | None = None, *, num_ranks: int = 1, data_parallel: int = 0
    ) -> None:
        self._thread = PublishingThread("SGLang", engine_log("sglang"))
        hooks = self._thread.hooks
        pools, args = pools_of(scheduler), scheduler.server_args
        state = CacheState(
            hello_of(scheduler, secrets.randbits(48), num_ranks=num_ranks, has_free_list=has_free_list(pools.full))
        )
        table = scheduler.req_to_token_pool.req_to_token
        reader = reader_of(table, pools)
        self._translator = SglangTranslator(
            state,
            pools=pools,
            by_priority=str(getattr(args, "retraction_policy", "")) == "priority",
            policy=str(getattr(args, "radix_eviction_policy", "lru")),
            drafts_per_step=drafts_per_step(scheduler),
            name_of=adapter_names(scheduler),
        )
        actions = SglangActions(scheduler, num_ranks)
        detokenizer = DetokenizerProcess(str(getattr(args, "tokenizer_path", None) or args.model_path))
        with self._thread.installing_hooks():
            self._recorder = SglangRecorder(scheduler, hooks, reader, actions.run)
            hooks.after(scheduler, "run_event_loop", lambda *_: self.close())
            publisher = Publisher(
                address,
                state,
                keys=keys_for(address, engine_log("sglang").warning),
                record=record,
                actions=actions,
                contents=self._translator.contents,
                texts=detokenizer.texts,
                memory=SchedulerMemory(scheduler, state.hello).breakdown,
                on_problem=engine_log("sglang").warning,
            )
        metrics = MetricsProcess(address, data_parallel, engine_log("sglang").warning)
        on_close = [metrics.close, detokenizer.close]
        self._thread.start(
            publisher, address, self._recorder, self._publish, can_publish=_has_arrived, on_close=on_close
        )

    def close(self, reason: str = "") -> None:
        """Remove the hooks and publish a goodbye message. Idempotent."""
        self._thread.close(reason)

    def _publish(self, record: SglangRecord) -> Frame:
        began_ns = time.monotonic_ns()
        frame = self._translator.apply(record)
        if record.pages is not None:
            ended_ns = time.monotonic_ns()
            self._recorder.no_copy_before_ns = ended_ns + MIN_COPY_PAUSE_FACTOR * (ended_ns - began_ns)
        return frame


def _has_arrived(record: SglangRecord) -> bool:
    return record.pages is None or record.pages.copy.has_arrived()
