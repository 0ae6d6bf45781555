"""Metrics with the same meaning as in vLLM, under vLLM's names, labels, types and bounds, so that its dashboards can
display them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from prometheus_client.core import Metric

from kvscope_telemetry.messages.telemetry import CacheInfo
from kvscope_telemetry.metrics.families import Maker
from kvscope_telemetry.metrics.pool_figures import PoolFigures
from kvscope_telemetry.metrics.tally import Tally
from kvscope_telemetry.summaries.run_figures import PROMPTS

HISTOGRAMS: Final = {
    "time_to_first_token_seconds": "Time from a request's arrival to its first token.",
    "inter_token_latency_seconds": "Time between two tokens of a request.",
    "request_time_per_output_token_seconds": "Mean time per token after the first, of a request that ended by itself.",
    "e2e_request_latency_seconds": "Time from arrival to end, of a request that ended by itself.",
    "request_queue_time_seconds": "Time from arrival until first scheduled, of a request that ended by itself.",
    "request_inference_time_seconds": "Time from first scheduled to the end.",
    "request_prefill_time_seconds": "Time from first scheduled to the first token.",
    "request_decode_time_seconds": "Time from the first token to the last.",
    "iteration_tokens_total": "Tokens computed in a step, of prompts and of answers.",
    "request_prompt_tokens": "Prompt tokens of a request that ended by itself.",
    "request_generation_tokens": "Generated tokens of a request that ended by itself.",
    "request_params_max_tokens": "Maximum new tokens that a request asked for.",
}
"""Help texts by attribute of `Histograms`."""


def counters_and_histograms(make: Maker, tally: Tally) -> Iterator[Metric]:
    """Yield the metrics that remain available while the engine is unreachable."""
    totals, has_cache = tally.counters, tally.hello.cache.prefix_caching
    num_prompt_tokens = sum(getattr(totals, name) for name in PROMPTS)
    for name, text, value in (
        (
            "prefix_cache_queries",
            "Prompt tokens of new requests, looked up in the prefix cache.",
            num_prompt_tokens if has_cache else 0,
        ),
        ("prefix_cache_hits", "Of these, tokens found in the prefix cache.", totals.cached_tokens if has_cache else 0),
        ("num_preemptions", "Preemptions of running requests.", totals.preemptions),
        ("prompt_tokens", "Prompt tokens of new requests, computed or found in the cache.", num_prompt_tokens),
        ("prompt_tokens_cached", "Prompt tokens of new requests found in the cache.", totals.cached_tokens),
        ("generation_tokens", "Tokens generated.", totals.generation_tokens),
        (
            "spec_decode_num_draft_tokens",
            "Draft tokens checked; 0 without speculation.",
            totals.draft_tokens,
        ),
        ("spec_decode_num_accepted_tokens", "Draft tokens accepted.", totals.accepted_tokens),
    ):
        yield make.counter(f"vllm:{name}", text, ({}, value))
    text = "Finished requests by reason; unknown: before this process was connected."
    ends = [({"finished_reason": reason}, float(count)) for reason, count in tally.ends.counts.items()]
    yield make.counter("vllm:request_success", text, *ends)
    for name, text in HISTOGRAMS.items():
        yield make.histogram(f"vllm:{name}", text, getattr(tally.histograms, name), tally.seen_s)


def gauges(make: Maker, tally: Tally, pool: PoolFigures) -> Iterator[Metric]:
    totals = tally.counters
    yield make.gauge("vllm:num_requests_running", "Requests running.", ({}, totals.num_running))
    yield make.gauge("vllm:num_requests_waiting", "Requests waiting.", ({}, totals.num_waiting))
    yield make.gauge("vllm:kv_cache_usage_perc", "Share of the KV blocks in use, 1 is all of them.", ({}, pool.usage))
    info = Maker({"engine": make.labels["engine"]}, make.created_s)
    labels = _cache_config(tally.hello.cache)
    yield info.gauge("vllm:cache_config_info", "The KV cache's configuration, as labels.", (labels, 1))


def _cache_config(cache: CacheInfo) -> dict[str, str]:
    return {
        "block_size": str(cache.block_size),
        "cache_dtype": cache.dtype,
        "enable_prefix_caching": str(cache.prefix_caching),
        "num_gpu_blocks": str(cache.num_blocks),
        "num_cpu_blocks": str(cache.num_host_blocks),
    }
