"""What a page of metrics says of one data-parallel rank, whichever engine and version it is from.

Owns the names: vLLM's, SGLang's, and those of their older versions. What a page does not say is None, never 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

import numpy as np

from kvscope_telemetry.external.page import Page
from kvscope_telemetry.messages.telemetry import Histogram

MAX_BOUNDS: Final = 512
_LONGEST_S: Final = 1e9
GIB: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class EngineReading:
    """At one moment. Counters are totals since the engine started."""

    model: str = ""
    num_running: int | None = None
    num_waiting: int | None = None
    used_share: float | None = None
    """Of the pool's blocks, 0 to 1."""
    num_blocks: int | None = None
    block_size: int | None = None
    cache_dtype: str = ""
    prompt_tokens: int | None = None
    """With those from the prefix cache."""
    cached_tokens: int | None = None
    generation_tokens: int | None = None
    preemptions: int | None = None
    draft_tokens: int | None = None
    """Guessed ahead and checked, and those of them that were right."""
    accepted_tokens: int | None = None
    finished: int | None = None
    aborted: int | None = None
    evicted_tokens: int | None = None
    host_tokens: int | None = None
    """That host memory has room for."""
    weights_bytes: int | None = None
    kv_bytes: int | None = None
    graphs_bytes: int | None = None
    started_s: float | None = None
    """When the server's process began, seconds since 1970."""
    latencies: dict[str, Cumulative] = field(default_factory=dict)
    """By the kind that `Histogram` has."""

    @property
    def totals(self) -> tuple[int | None, ...]:
        """What only ever grows while an engine runs."""
        first_tokens = self.latencies.get("first_token")
        of_times = None if first_tokens is None else first_tokens.total
        return self.prompt_tokens, self.generation_tokens, self.preemptions, self.finished, of_times

    def is_restart_of(self, before: EngineReading) -> bool:
        """Whether the engine started anew since `before`: what only grows is less."""
        if None not in (self.started_s, before.started_s) and self.started_s != before.started_s:
            return True
        pairs = zip(self.totals, before.totals, strict=True)
        return any(now is not None and then is not None and now < then for now, then in pairs)


def read_vllm(page: Page) -> EngineReading:
    """Of vLLM 0.8 and later."""
    config = page.labels_of("vllm:cache_config_info")
    success = "vllm:request_success_total"
    cached = page.total("vllm:prompt_tokens_cached_total")
    if cached is None:
        cached = page.total("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total")
    return EngineReading(
        model=page.label("model_name", "vllm:num_requests_running", success),
        num_running=_count(page.gauge("vllm:num_requests_running")),
        num_waiting=_count(page.gauge("vllm:num_requests_waiting")),
        used_share=_share(page.gauge("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")),
        num_blocks=_number(config.get("num_gpu_blocks", "")),
        block_size=_number(config.get("block_size", "")),
        cache_dtype=config.get("cache_dtype", ""),
        prompt_tokens=page.total("vllm:prompt_tokens_total"),
        cached_tokens=cached,
        generation_tokens=page.total("vllm:generation_tokens_total"),
        preemptions=page.total("vllm:num_preemptions_total"),
        draft_tokens=page.total("vllm:spec_decode_num_draft_tokens_total"),
        accepted_tokens=page.total("vllm:spec_decode_num_accepted_tokens_total"),
        finished=page.total(success),
        aborted=page.total(success, where={"finished_reason": "abort"}),
        started_s=page.gauge("process_start_time_seconds"),
        latencies=_latencies(
            page,
            ("first_token", "vllm:time_to_first_token_seconds"),
            ("inter_token", "vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
            ("queued", "vllm:request_queue_time_seconds"),
        ),
    )


def read_sglang(page: Page) -> EngineReading:
    """Of SGLang 0.4 and later."""
    page_size = _number(page.gauge("sglang:page_size"))
    tokens = _number(page.gauge("sglang:max_total_num_tokens"))
    pages = _number(page.gauge("sglang:num_pages"))
    requests, aborted = page.total("sglang:num_requests_total"), page.total("sglang:num_aborted_requests_total")
    if pages is None and tokens is not None:
        pages = tokens // (page_size or 1)
    return EngineReading(
        model=page.label("model_name", "sglang:num_running_reqs", "sglang:prompt_tokens_total"),
        num_running=_count(page.gauge("sglang:num_running_reqs")),
        num_waiting=_count(page.gauge("sglang:num_queue_reqs")),
        used_share=_share(page.gauge("sglang:token_usage")),
        num_blocks=pages,
        block_size=page_size,
        prompt_tokens=page.total("sglang:prompt_tokens_total"),
        cached_tokens=page.total("sglang:cached_tokens_total"),
        generation_tokens=page.total("sglang:generation_tokens_total"),
        preemptions=page.total("sglang:num_retracted_requests_total"),
        finished=requests,
        aborted=aborted,
        evicted_tokens=page.total("sglang:evicted_tokens_total"),
        host_tokens=_number(page.gauge("sglang:hicache_host_total_tokens")),
        weights_bytes=_gib(page.gauge("sglang:weight_memory_usage_gb")),
        kv_bytes=_gib(page.gauge("sglang:kv_cache_memory_usage_gb")),
        graphs_bytes=_gib(page.sum_of("sglang:graph_memory_usage_gb")),
        started_s=page.gauge("process_start_time_seconds"),
        latencies=_latencies(
            page,
            ("first_token", "sglang:time_to_first_token_seconds"),
            ("inter_token", "sglang:inter_token_latency_seconds", "sglang:time_per_output_token_seconds"),
            ("queued", "sglang:queue_time_seconds"),
        ),
    )


READERS: Final = {"vllm": read_vllm, "sglang": read_sglang}


def _latencies(page: Page, *kinds: tuple[str, ...]) -> dict[str, Cumulative]:
    found: dict[str, Cumulative] = {}
    for kind, *names in kinds:
        for name in names:
            histogram = Cumulative.of_buckets(page.buckets(name))
            if histogram is not None:
                found[kind] = histogram
                break
    return found


def _count(value: float | None) -> int | None:
    return None if value is None or value < 0 else round(value)


def _number(value: float | str | None) -> int | None:
    """A whole number above 0; "None" and the like are none."""
    try:
        number = float(value) if value not in (None, "") else math.nan
    except ValueError:
        return None
    return int(number) if math.isfinite(number) and number >= 1 else None


def _share(value: float | None) -> float | None:
    return None if value is None or value < 0 else min(value, 1.0)


def _gib(value: float | None) -> int | None:
    return None if value is None or value < 0 else round(value * GIB)


def names_of(engine: str, page_names: Iterable[str]) -> bool:
    """Whether any of the names is of this engine's metrics."""
    return any(name.startswith(f"{engine}:") for name in page_names)


@dataclass(frozen=True, slots=True)
class Cumulative:
    """Histograms as a page of metrics has them: how many were at most so long, ever; and what was added between two
    pages.

    A histogram gives bounds, not samples: no sample is ever made up here.

    `counts[i]` were at most `bounds_s[i]`; the last count is of all, and has no bound.
    """

    bounds_s: tuple[float, ...]
    counts: tuple[int, ...]

    @classmethod
    def of_buckets(cls, buckets: dict[float, float]) -> Cumulative | None:
        """Of upper bounds in seconds and how many were at most that; None for what is no histogram."""
        bounds = sorted(buckets)
        if len(bounds) < 2 or len(bounds) > MAX_BOUNDS or bounds[-1] != math.inf or not bounds[0] > 0:
            return None
        counts = [buckets[bound] for bound in bounds]
        if not all(map(math.isfinite, counts)) or any(a > b for a, b in pairwise(counts)) or counts[0] < 0:
            return None
        finite = tuple(bound for bound in bounds[:-1] if bound <= _LONGEST_S)
        return cls(finite, (*map(int, counts[: len(finite)]), int(counts[-1])))

    @property
    def total(self) -> int:
        """How many there were."""
        return self.counts[-1]

    def since(self, before: Cumulative | None, kind: str) -> Histogram | None:
        """What was added since `before`, an interval each; None where nothing was, or they cannot be compared."""
        if before is None or before.bounds_s != self.bounds_s:
            return None
        added = np.diff(np.array(self.counts) - np.array(before.counts), prepend=0)
        if not added.any() or added.min() < 0:
            return None
        bounds = np.rint(np.array(self.bounds_s) * 1e9).astype("<u8")
        return Histogram(kind=kind, bounds_ns=bounds.tobytes(), counts=added.astype("<u8").tobytes())
