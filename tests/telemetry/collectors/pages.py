"""Metrics pages with the names, labels and buckets of vLLM 0.33 and SGLang 0.5.23."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0)
INTER_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)


class VllmPage:
    """The /metrics page of a vLLM with `num_ranks` engines; its attributes can be changed."""

    def __init__(
        self,
        num_ranks: int = 1,
        *,
        num_blocks: int = 64,
        block_size: int = 2,
        model: str = "m",
        pool_tokens: str = "None",
    ) -> None:
        self.registry = registry = CollectorRegistry()
        names = ["model_name", "engine"]
        self._labels = [(model, str(rank)) for rank in range(num_ranks)]
        self._gauges = {
            name: Gauge(f"vllm:{name}", name, names, registry=registry)
            for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        }
        counters = ("num_preemptions", "prompt_tokens", "generation_tokens", "prefix_cache_queries")
        counters += ("prefix_cache_hits", "prompt_tokens_cached")
        counters += ("spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens")
        self._counters = {name: Counter(f"vllm:{name}", name, names, registry=registry) for name in counters}
        self._success = Counter("vllm:request_success", "ended", [*names, "finished_reason"], registry=registry)
        times = (("time_to_first_token_seconds", FIRST_TOKEN_S), ("inter_token_latency_seconds", INTER_TOKEN_S))
        self._times = {n: Histogram(f"vllm:{n}", n, names, buckets=b, registry=registry) for n, b in times}
        config = {"block_size": str(block_size), "num_gpu_blocks": str(num_blocks), "cache_dtype": "auto"}
        config["kv_cache_size_tokens"] = pool_tokens
        info = Gauge("vllm:cache_config_info", "config", [*config, "engine"], registry=registry)
        for rank, labels in enumerate(self._labels):
            info.labels(*config.values(), str(rank)).set(1)
            for metric in (*self._gauges.values(), *self._counters.values(), *self._times.values()):
                metric.labels(*labels)
            for reason in ("stop", "length", "abort"):
                self._success.labels(*labels, reason)

    def gauge(self, name: str, value: float, rank: int = 0) -> None:
        self._gauges[name].labels(*self._labels[rank]).set(value)

    def count(self, name: str, amount: float, rank: int = 0) -> None:
        self._counters[name].labels(*self._labels[rank]).inc(amount)

    def finish(self, reason: str, rank: int = 0) -> None:
        self._success.labels(*self._labels[rank], reason).inc()

    def observe(self, name: str, seconds: Sequence[float], rank: int = 0) -> None:
        for each in seconds:
            self._times[name].labels(*self._labels[rank]).observe(each)

    def text(self) -> bytes:
        return generate_latest(self.registry)


def sglang_page(num_ranks: int = 1, *, page_size: int = 2, num_tokens: int = 128, running: int = 0) -> bytes:
    """Return SGLang's /metrics page: gauges per rank's scheduler, counters and times over all ranks."""
    registry = CollectorRegistry()
    common = {"model_name": "m", "engine_type": "unified"}
    scheduler = {**common, "tp_rank": "0", "pp_rank": "0", "moe_ep_rank": "0"}
    gauges = {
        "num_running_reqs": running,
        "num_queue_reqs": 2,
        "token_usage": 0.25,
        "page_size": page_size,
        "max_total_num_tokens": num_tokens,
        "weight_memory_usage_gb": 1.5,
        "kv_cache_memory_usage_gb": 0.5,
        "hicache_host_total_tokens": 32,
    }
    for name, value in gauges.items():
        gauge = Gauge(f"sglang:{name}", name, [*scheduler, "dp_rank"], registry=registry)
        for rank in range(num_ranks):
            for tp_rank in ("0", "1"):
                gauge.labels(*{**scheduler, "tp_rank": tp_rank}.values(), str(rank)).set(value + (rank == 1))
    Gauge("sglang:graph_memory_usage_gb", "g", [*scheduler, "phase"], registry=registry).labels(
        *scheduler.values(), "decode"
    ).set(0.25)
    tokens = Counter("sglang:prompt_tokens_total", "p", [*common, "is_streaming"], registry=registry)
    tokens.labels(*common.values(), "true").inc(70)
    tokens.labels(*common.values(), "false").inc(30)
    Counter("sglang:generation_tokens_total", "g", list(common), registry=registry).labels(*common.values()).inc(50)
    cached = Counter("sglang:cached_tokens_total", "c", [*common, "cache_source"], registry=registry)
    cached.labels(*common.values(), "device").inc(30)
    cached.labels(*common.values(), "host").inc(10)
    Counter("sglang:num_requests_total", "r", list(common), registry=registry).labels(*common.values()).inc(5)
    Counter("sglang:num_aborted_requests_total", "a", list(common), registry=registry).labels(*common.values()).inc(1)
    retracted = Counter("sglang:num_retracted_requests_total", "x", list(scheduler), registry=registry)
    retracted.labels(*scheduler.values()).inc(3)
    first = Histogram(
        "sglang:time_to_first_token_seconds", "t", [*common, "is_streaming"], buckets=FIRST_TOKEN_S, registry=registry
    )
    first.labels(*common.values(), "true").observe(0.3)
    first.labels(*common.values(), "false").observe(30)
    return generate_latest(registry)
