"""Metrics pages of vLLM and SGLang: current and older names, ranks, restarts, histograms, and invalid pages."""

from __future__ import annotations

import numpy as np
import pytest
from tests.telemetry.collectors.pages import VllmPage, sglang_page

from kvscope_telemetry.collectors.external_engine import ExternalEngine
from kvscope_telemetry.collectors.readings import Cumulative, EngineReading
from kvscope_telemetry.collectors.scraped_page import ScrapedPage
from kvscope_telemetry.collectors.sglang import SGLANG
from kvscope_telemetry.collectors.vllm import VLLM
from kvscope_telemetry.errors import ProtocolError

PREFIXES = ("vllm:", "sglang:", "process_start_time_seconds")


def read(engine: ExternalEngine, text: str, rank: int = 0) -> EngineReading:
    return engine.read_metrics(
        ScrapedPage.parse(
            text, (*PREFIXES, *engine.other_prefixes), rank=(engine.rank_label, rank), replicas=engine.replica_labels
        )
    )


def read_vllm(text: str, rank: int = 0) -> EngineReading:
    return read(VLLM, text, rank)


def test_vllm_page_is_read_per_rank() -> None:
    page = VllmPage(2)
    page.count("prompt_tokens", 30, rank=1)
    page.count("num_preemptions", 2, rank=1)
    page.count("spec_decode_num_draft_tokens", 9, rank=1)
    page.count("spec_decode_num_accepted_tokens", 6, rank=1)
    page.gauge("kv_cache_usage_perc", 0.75, rank=1)
    page.observe("time_to_first_token_seconds", (0.3,), rank=1)
    first, second = (read_vllm(page.text().decode(), rank) for rank in (0, 1))
    assert (first.prompt_tokens, first.preemptions, first.used_share) == (0, 0, 0.0)
    assert (second.prompt_tokens, second.preemptions, second.used_share) == (30, 2, 0.75)
    assert (second.draft_tokens, second.accepted_tokens) == (9, 6)
    assert (second.num_blocks, second.block_size, second.model) == (64, 2, "m")
    assert second.latencies["first_token"].total == 1
    assert "queued" not in second.latencies


def test_vllm_pool_capacity_in_tokens_is_read() -> None:
    assert read_vllm(VllmPage(pool_tokens="99").text().decode()).pool_tokens == 99
    assert read_vllm(VllmPage().text().decode()).pool_tokens is None


def figures(reading: EngineReading) -> dict[str, float]:
    return {figure.name: figure.value for figure in reading.figures}


def test_vllm_tiers_and_waiting_reasons_become_figures() -> None:
    page = (
        'vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 3\n'
        'vllm:num_requests_waiting_by_reason{engine="0",reason="deferred"} 0\n'
        'vllm:prompt_tokens_cached_by_source_total{engine="0",source="host"} 64\n'
        'vllm:prompt_tokens_cached_by_source_total{engine="0",source="disk"} 0\n'
        'vllm:external_prefix_cache_queries_total{engine="0"} 0\n'
        'vllm:external_prefix_cache_hits_total{engine="0"} 0\n'
        'vllm:kv_offload_cpu_cache_usage_perc{engine="0"} 0.5\n'
        'vllm:kv_offload_store_bytes_total{engine="0"} 4096\n'
        'vllm:kv_block_lifetime_seconds_sum{engine="0"} 30\n'
        'vllm:kv_block_lifetime_seconds_count{engine="0"} 4\n'
        'vllm:kv_block_reuse_gap_seconds_sum{engine="0"} 0\n'
        'vllm:kv_block_reuse_gap_seconds_count{engine="0"} 0\n'
        'lmcache:num_hit_tokens_total{worker_id="0"} 5\n'
    )
    assert figures(read_vllm(page)) == {
        "Waiting: capacity": 3,
        "Prompt tokens from: host": 64,
        "Host cache in use": 0.5,
        "Copied to lower tiers": 4096,
        "Mean life of a block": 7.5,
        "LMCache: tokens found": 5,
    }
    assert figures(read_vllm("vllm:num_requests_running 1\n")) == {}


def test_sglang_pools_become_figures_and_missing_pools_none() -> None:
    page = "".join(
        f"sglang:{name} {value}\n"
        for name, value in (
            *(("token_usage", 0.9), ("full_token_usage", 0.25), ("swa_token_usage", 0.9), ("mamba_usage", 0)),
            *(("kv_used_tokens", 10), ("kv_evictable_tokens", 20), ("kv_available_tokens", 30)),
            *(("swa_used_tokens", 9), ("swa_evictable_tokens", 0), ("swa_available_tokens", 1)),
            *(("mamba_used_tokens", 0), ("mamba_evictable_tokens", 0), ("mamba_available_tokens", 0)),
            ('cached_tokens_total{cache_source="host"}', 7),
        )
    )
    reading = read(SGLANG, page)
    assert reading.used_share == 0.25
    assert figures(reading) == {
        "Pool of full attention in use": 0.25,
        "Pool of full attention: used": 10,
        "Pool of full attention: cached, can be evicted": 20,
        "Pool of full attention: free": 30,
        "Pool of sliding windows in use": 0.9,
        "Pool of sliding windows: used": 9,
        "Pool of sliding windows: cached, can be evicted": 0,
        "Pool of sliding windows: free": 1,
        "Prompt tokens from: host": 7,
    }


def test_older_vllm_names_are_read_and_missing_values_are_unknown() -> None:
    old = read_vllm(
        'vllm:gpu_cache_usage_perc{model_name="m"} 0.5\nvllm:gpu_prefix_cache_hits_total{model_name="m"} 12.0\n'
    )
    assert (old.used_share, old.cached_tokens) == (0.5, 12)
    assert (old.num_running, old.prompt_tokens, old.num_blocks, old.latencies) == (None, None, None, {})


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "-1"])
def test_invalid_metric_value_of_a_server_is_read_as_unknown(value: str) -> None:
    page = f"vllm:num_requests_running {value}\nvllm:kv_cache_usage_perc {value}\nvllm:prompt_tokens_total {value}\n"
    page += 'vllm:cache_config_info{num_gpu_blocks="None",block_size="x"} 1\n'
    reading = read_vllm(page)
    assert (reading.num_running, reading.used_share, reading.prompt_tokens) == (None, None, None)
    assert (reading.num_blocks, reading.block_size) == (None, None)


def test_sglang_page_is_read_per_rank() -> None:
    page = sglang_page(2).decode()
    first, second = (read(SGLANG, page, rank) for rank in (0, 1))
    assert (first.num_waiting, second.num_waiting) == (2, 3)
    assert (first.num_blocks, first.block_size, first.host_tokens) == (64, 2, 32)
    assert (first.prompt_tokens, first.cached_tokens, first.finished, first.aborted) == (100, 40, 5, 1)
    assert (first.weights_bytes, first.kv_bytes, first.graphs_bytes) == (3 << 29, 1 << 29, 1 << 28)
    assert first.latencies["first_token"].total == 2


def test_lower_counter_or_later_start_is_a_restart() -> None:
    before = read_vllm("vllm:generation_tokens_total 5\nvllm:prompt_tokens_total 7\n")
    assert not read_vllm("vllm:generation_tokens_total 6\nvllm:prompt_tokens_total 7\n").is_restart_of(before)
    assert read_vllm("vllm:generation_tokens_total 4\nvllm:prompt_tokens_total 7\n").is_restart_of(before)
    assert not read_vllm("vllm:num_requests_running 1\n").is_restart_of(before)
    started = read_vllm("process_start_time_seconds 1.5e9\nvllm:prompt_tokens_total 7\n")
    assert read_vllm("process_start_time_seconds 1.6e9\nvllm:prompt_tokens_total 9\n").is_restart_of(started)


def test_histogram_difference_gives_the_observations_of_an_interval() -> None:
    before = Cumulative.of_buckets({0.1: 1, 0.5: 3, float("inf"): 4})
    after = Cumulative.of_buckets({0.1: 1, 0.5: 5, float("inf"): 7})
    assert before is not None
    assert after is not None
    latency = after.since(before, "queued")
    assert latency is not None
    assert np.frombuffer(latency.bounds_ns, "<u8").tolist() == [100_000_000, 500_000_000]
    assert np.frombuffer(latency.counts, "<u8").tolist() == [0, 2, 1]
    assert after.since(after, "queued") is None
    assert before.since(after, "queued") is None
    assert after.since(Cumulative.of_buckets({0.2: 1, float("inf"): 1}), "queued") is None


@pytest.mark.parametrize(
    "buckets",
    [{}, {float("inf"): 1.0}, {0.1: 3.0, float("inf"): 1.0}, {0.1: 1.0, 0.2: 2.0}, {-1.0: 0.0, float("inf"): 1.0}],
)
def test_invalid_histogram_buckets_of_a_server_are_ignored(buckets: dict[float, float]) -> None:
    assert Cumulative.of_buckets(buckets) is None


@pytest.mark.parametrize(
    "text",
    ["<!DOCTYPE html><html></html>", ' {"error": 1}', "vllm:a b c\n", 'vllm:a{x="', "vllm:a{x=1} 2\n", "vllm:\n"],
)
def test_invalid_metrics_page_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        read_vllm(text)
    assert "\n" not in str(caught.value)


def test_lines_of_other_prefixes_are_not_parsed() -> None:
    assert read_vllm('python_gc{x="broken\nvllm:num_requests_running 2\n\0\0\n').num_running == 2


@pytest.mark.parametrize("prefix", ["ray_vllm_", "ray_vllm:"])
def test_page_of_ray_serve_is_read_as_the_page_of_its_engine(prefix: str) -> None:
    """Ray 59071: newer versions of Ray replace the colon."""
    page = VllmPage()
    page.gauge("num_requests_running", 7)
    text = page.text().decode()
    ray = text.replace("vllm:", prefix)
    assert read_vllm(ray) == read_vllm(text)
    assert read_vllm(ray).num_running == 7


def test_label_with_a_unicode_line_separator_is_read() -> None:
    page = VllmPage().text().decode().replace('model_name="', 'model_name="a\u2028')
    assert "\u2028" in read_vllm(page).model
