"""The metrics page over real sockets: its values equal what the engine published, across gaps, restarts and absence."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from contextlib import closing

import pytest
from tests.processes import num_open_files
from tests.telemetry.metrics.scripted import (
    LABELS,
    SECOND,
    STARTED_S,
    ScrapedMetrics,
    ScriptedEngine,
    rows,
    scrape_after,
    wait_for,
    wait_for_subscription,
)

from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.ledger import BlockState
from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.messages.telemetry import Batch, DeviceSample, Event, EventData, RequestInfo
from kvscope_telemetry.metrics.metrics_page import MetricsPage

Start = Callable[..., ScriptedEngine]


def packed_ns(*seconds: float) -> bytes:
    """Return times in seconds as packed nanoseconds, as in frames."""
    return b"".join(round(each * SECOND).to_bytes(8, "little") for each in seconds)


def event(kind: str, seconds: float, number: int = 0, **fields: object) -> Event:
    return Event(kind=kind, time_ns=round(seconds * SECOND), number=number, **fields)  # type: ignore[arg-type]


def publish_request_lifetime(engine: ScriptedEngine) -> None:
    """Publish one request from 0.5 s to 1.3 s with 20 prompt tokens, 4 of them cached, and 3 generated ones."""
    info = RequestInfo(number=1, request_id="a", arrival_ns=SECOND // 2, num_prompt_tokens=20, max_tokens=3)
    running = RequestState.RUNNING
    engine.publish_step(
        1.0,
        counters={"prompt_tokens": 16, "cached_tokens": 4, "generation_tokens": 1, "admitted": 1, "num_running": 1},
        new_requests=(info,),
        requests=rows(number=[1], state=[running], num_output_tokens=[1]),
        batch=Batch(num_prefill_tokens=16),
        events=(event("admitted", 0.9, 1, data=EventData(kind="started", waited_ns=400_000_000)),),
        first_token_ns=packed_ns(0.5),
    )
    engine.publish_step(
        1.1,
        counters={"generation_tokens": 2},
        requests=rows(number=[1], state=[running], num_output_tokens=[2]),
        batch=Batch(num_decode_tokens=1),
        inter_token_ns=packed_ns(0.1),
    )
    engine.publish_step(
        1.3,
        counters={"generation_tokens": 3, "num_running": 0, "finished": 1},
        requests=rows(number=[1], state=[RequestState.FINISHED], num_output_tokens=[3]),
        batch=Batch(num_decode_tokens=1),
        events=(event("finished", 1.3, 1, num_tokens=3, data=EventData(kind="ended", finish_reason="length")),),
        inter_token_ns=packed_ns(0.2),
    )


def test_metrics_page_shows_latencies_and_token_counts_of_a_finished_request(
    page: MetricsPage, start_engine: Start
) -> None:
    engine = start_engine()
    wait_for_subscription(page, engine)
    publish_request_lifetime(engine)
    scraped = scrape_after(page, 3)
    for name, count, total in (
        ("time_to_first_token_seconds", 1, 0.5),
        ("inter_token_latency_seconds", 2, 0.3),
        ("request_time_per_output_token_seconds", 1, 0.15),
        ("e2e_request_latency_seconds", 1, 0.8),
        ("request_queue_time_seconds", 1, 0.4),
        ("request_prefill_time_seconds", 1, 0.1),
        ("request_decode_time_seconds", 1, 0.3),
        ("request_inference_time_seconds", 1, 0.4),
        ("request_prompt_tokens", 1, 20),
        ("request_generation_tokens", 1, 3),
        ("request_params_max_tokens", 1, 3),
        ("iteration_tokens_total", 3, 18),
    ):
        assert scraped.value(f"vllm:{name}_count", **LABELS) == count, name
        assert scraped.value(f"vllm:{name}_sum", **LABELS) == pytest.approx(total), name
    bucket = "vllm:time_to_first_token_seconds_bucket"
    assert scraped.value(bucket, le="0.25") == 0
    assert scraped.value(bucket, le="0.5") == 1  # at most, not below
    assert scraped.value(bucket, le="+Inf") == 1
    for name, value in (
        ("vllm:prompt_tokens", 20),
        ("vllm:prompt_tokens_cached", 4),
        ("vllm:prefix_cache_queries", 20),
        ("vllm:prefix_cache_hits", 4),
        ("vllm:generation_tokens", 3),
        ("kvscope_requests_admitted", 1),
    ):
        assert scraped.value(f"{name}_total", **LABELS) == value, name
        assert scraped.value(f"{name}_created", **LABELS) == STARTED_S
    ends = {s.labels["finished_reason"]: s.value for s in scraped.samples if s.name == "vllm:request_success_total"}
    assert ends == {"stop": 0, "length": 1, "abort": 0, "error": 0, "unknown": 0}


def test_metrics_page_shows_blocks_bytes_and_fragmentation_of_the_engine(
    page: MetricsPage, start_engine: Start
) -> None:
    engine = start_engine()
    wait_for_subscription(page, engine)
    ledger = engine.ledger
    ledger.state[[0, 1, 4]] = BlockState.ACTIVE
    ledger.ref_count[[0, 1, 4]] = [2, 1, 1]
    ledger.filled[[0, 1, 4]] = [16, 16, 6]
    ledger.state[[2, 8]] = BlockState.CACHED  # 8 is in host memory
    ledger.filled[[2, 8]] = 16
    sample = DeviceSample(epoch=1, time_ns=0, memory_total_bytes=10, process_bytes=4, utilization=0.5)
    engine.publish(sample)
    moved = {"evicted_blocks": 5, "copied_blocks": 1, "swapped_blocks": 2, "loaded_blocks": 3, "num_waiting": 6}
    engine.publish_step(1.0, blocks=[0, 1, 2, 4, 8], counters=moved)
    wait_for(lambda: ScrapedMetrics(page).value("kvscope_num_used_blocks", tier="hbm") == 3, "blocks in use")
    scraped = ScrapedMetrics(page)
    of_tiers = {
        name: [scraped.value(f"kvscope_{name}", tier=tier, **LABELS) for tier in ("hbm", "host")]
        for name in ("num_blocks", "num_used_blocks", "num_shared_blocks", "num_cached_blocks", "num_free_blocks")
    }
    assert of_tiers == {
        "num_blocks": [8, 2],
        "num_used_blocks": [3, 0],
        "num_shared_blocks": [1, 0],
        "num_cached_blocks": [1, 1],
        "num_free_blocks": [4, 1],
    }
    assert scraped.value("vllm:kv_cache_usage_perc", **LABELS) == 3 / 8
    assert scraped.value("vllm:num_requests_waiting", **LABELS) == 6
    assert scraped.value("kvscope_num_slots", use="wasted") == 10
    assert scraped.value("kvscope_internal_fragmentation_ratio") == 10 / 48
    assert scraped.value("kvscope_external_fragmentation_ratio") == 1 / 4  # 3, then 5, 6 and 7
    for name, value in (("evicted", 5), ("copied", 1), ("swapped_out", 2), ("swapped_in", 3), ("offloaded", 0)):
        assert scraped.value(f"kvscope_{name}_blocks_total", **LABELS) == value
    kinds = {s.labels["kind"]: s.value for s in scraped.samples if s.name == "kvscope_memory_bytes"}
    assert kinds.items() >= {"weights": 1001, "kv": 800}.items()
    assert not kinds.keys() & {"staging", "workspace"}  # unknown is never a number
    assert scraped.value("kvscope_device_memory_bytes", part="process") == 4
    assert scraped.value("kvscope_device_memory_bytes", part="used") is None
    assert scraped.value("kvscope_device_power_watts") is None


def test_metrics_page_counts_preemptions_by_cause_and_requests_by_finish_reason(
    page: MetricsPage, start_engine: Start
) -> None:
    engine = start_engine()
    wait_for_subscription(page, engine)
    swapped = EventData(kind="preempted", is_swapped=True)
    happened = (
        event("preempted", 1, 1, data=swapped),
        event("preempted", 1, 2, data=EventData(kind="preempted")),
        event("preempted", 1, 3),  # the engine does not report it
        event("aborted", 1, 4),
        event("finished", 1, 5, data=EventData(kind="ended", finish_reason="of_a_later_version")),
    )
    engine.publish_step(1.0, events=happened, counters={"preemptions": 3, "aborted": 1, "finished": 1})
    scraped = scrape_after(page, 1)
    causes = {s.labels["cause"]: s.value for s in scraped.samples if s.name == "kvscope_preemptions_total"}
    assert causes == {"swap": 1, "recompute": 1, "unknown": 1}
    assert scraped.value("vllm:num_preemptions_total") == 3
    assert scraped.value("vllm:request_success_total", finished_reason="abort") == 1
    assert scraped.value("vllm:request_success_total", finished_reason="unknown") == 1
    assert scraped.value("vllm:e2e_request_latency_seconds_count") == 0


def test_totals_stay_correct_across_a_gap(page: MetricsPage, start_engine: Start) -> None:
    engine = start_engine()
    wait_for_subscription(page, engine)
    publish_request_lifetime(engine)
    scrape_after(page, 3)
    engine.lose_step(2.0, counters={"finished": 4, "generation_tokens": 100, "preemptions": 2})
    engine.publish_step(3.0, counters={"generation_tokens": 101})
    scraped = scrape_after(page, 5)
    assert scraped.value("vllm:generation_tokens_total") == 101
    assert scraped.value("vllm:request_success_total", finished_reason="unknown") == 3
    assert scraped.value("vllm:request_success_total", finished_reason="length") == 1
    assert scraped.value("kvscope_preemptions_total", cause="unknown") == 2
    assert scraped.value("kvscope_reader_frames_lost_total")
    assert scraped.value("vllm:time_to_first_token_seconds_count") == 1


def test_engine_restart_resets_counters_and_the_page_stays_up(page: MetricsPage, start_engine: Start) -> None:
    assert ScrapedMetrics(page).value("kvscope_up") == 0
    engine = start_engine()
    wait_for_subscription(page, engine)
    publish_request_lifetime(engine)
    assert scrape_after(page, 3).value("kvscope_up") == 1
    engine.close()
    wait_for(lambda: ScrapedMetrics(page).value("kvscope_up") == 0, "an engine that is away")
    away = ScrapedMetrics(page)
    assert away.value("vllm:generation_tokens_total") == 3
    assert away.value("vllm:num_requests_running") is None
    assert away.value("kvscope_num_free_blocks", tier="hbm") is None
    assert sum(s.value for s in away.samples if s.name == "kvscope_engine_state") == 1
    engine = start_engine(2)
    wait_for_subscription(page, engine)
    again = ScrapedMetrics(page)
    assert again.value("kvscope_up") == 1
    assert again.value("vllm:generation_tokens_total") == 0
    assert again.value("vllm:generation_tokens_created") == STARTED_S + 1000
    assert again.value("vllm:time_to_first_token_seconds_count") == 0
    publish_request_lifetime(engine)
    assert scrape_after(page, 3).value("vllm:generation_tokens_total") == 3


def test_request_from_before_the_attach_counts_only_known_values(endpoint: str, start_engine: Start) -> None:
    engine = start_engine()
    info = RequestInfo(number=1, request_id="a", arrival_ns=0, num_prompt_tokens=2)
    engine.lose_step(1.0, counters={"finished": 7, "generation_tokens": 9}, new_requests=(info,))
    with closing(MetricsPage(endpoint, served_name="other")) as page:
        wait_for_subscription(page, engine)
        ended = event("finished", 2, 1, num_tokens=5, data=EventData(kind="ended", finish_reason="stop"))
        engine.publish_step(2.0, counters={"finished": 8, "generation_tokens": 10}, events=(ended,))
        scraped = scrape_after(page, 2)
    assert scraped.value("vllm:generation_tokens_total", model_name="other") == 10
    assert scraped.value("vllm:request_success_total", finished_reason="unknown") == 7
    assert scraped.value("vllm:request_success_total", finished_reason="stop") == 1
    assert scraped.value("vllm:e2e_request_latency_seconds_sum") == 2
    for unseen in ("request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds"):
        assert scraped.value(f"vllm:{unseen}_count") == 0


def test_thousand_scrapes_leak_no_objects_or_files(page: MetricsPage, start_engine: Start) -> None:
    engine = start_engine()
    wait_for_subscription(page, engine)
    publish_request_lifetime(engine)
    scrape_after(page, 3)
    page.render("")

    def held() -> tuple[int, int, int]:
        gc.collect()
        return len(gc.get_objects()), num_open_files(), threading.active_count()

    before = held()
    for number in range(1000):
        list(page.collect())
        if not number % 10:
            page.render("application/openmetrics-text; version=1.0.0")
    after = held()
    assert after[0] - before[0] < 900, "less than one object per scrape"
    assert after[1:] == before[1:]


def test_metrics_page_for_an_invalid_engine_endpoint_is_refused() -> None:
    with pytest.raises(BadInput):
        MetricsPage("nonsense")
