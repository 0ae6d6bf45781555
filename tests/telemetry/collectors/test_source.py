"""An external source on real sockets: our KV event publisher and an HTTP server with an engine's pages."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from tests.telemetry.collectors.conftest import FakeServer, wait_for_mirror
from tests.telemetry.collectors.pages import VllmPage, sglang_page

from kvscope_inside.announcement import announce
from kvscope_telemetry.collectors.external_address import ExternalAddress
from kvscope_telemetry.collectors.external_source import (
    AttachedParts,
    ExternalSource,
    MissingEventsDetector,
    status_of_parts,
)
from kvscope_telemetry.collectors.readings import EngineReading
from kvscope_telemetry.collectors.vllm import VLLM
from kvscope_telemetry.kv_events.batches import AllBlocksCleared, BlockRemoved, BlockStored
from kvscope_telemetry.kv_events.event_publisher import KvEventPublisher
from kvscope_telemetry.kv_events.kv_events_config import KvEventsConfig
from kvscope_telemetry.kv_events.stream_items import StreamState, StreamStatus
from kvscope_telemetry.ledger import BlockState, Tier
from kvscope_telemetry.prefixes.cached_blocks import blocks_of
from kvscope_telemetry.prefixes.tree import build
from kvscope_telemetry.source import SourceState

Attach = Callable[..., ExternalSource]


@pytest.fixture
def publisher(make_endpoint: Callable[[str], str]) -> Iterator[KvEventPublisher]:
    endpoint = make_endpoint("ipc")
    config = KvEventsConfig(
        enable_kv_cache_events=True, publisher="zmq", endpoint=endpoint, replay_endpoint=f"{endpoint}-replay"
    )
    with KvEventPublisher(config) as made:
        yield made


def cached(source: ExternalSource, tier: Tier = Tier.HBM) -> dict[int, int]:
    """Return the parent of each cached hash, as the mirror has it."""
    ledger = source.mirror.ledger
    rows = np.flatnonzero((ledger.state == BlockState.CACHED) & (ledger.tier == tier))
    return dict(zip(ledger.hash[rows].tolist(), ledger.parent[rows].tolist(), strict=True))


def events_of(publisher: KvEventPublisher) -> dict[str, str]:
    return {"kv_events": publisher.endpoint, "replay": publisher.replay_endpoint}


def test_vllm_cache_and_counters_are_mirrored(server: FakeServer, publisher: KvEventPublisher, attach: Attach) -> None:
    page = VllmPage(num_blocks=64, block_size=2)
    page.gauge("num_requests_running", 3)
    page.gauge("kv_cache_usage_perc", 0.5)
    server.set_answer("/metrics", page.text())
    server.set_answer("/version", b'{"version": "0.33.0"}')
    server.set_answer("/v1/models", b'{"data": [{"id": "org/model", "max_model_len": 4096}]}')
    publisher.publish([BlockStored((11, 12, 13), None, (1, 2, 3, 4, 5, 6), 2, medium="GPU", group_idx=0)])
    publisher.publish([BlockStored((14,), 12, (7, 8), 2, medium="GPU", group_idx=0)])
    publisher.publish([BlockStored((12,), 11, (3, 4), 2, medium="CPU", group_idx=0)])
    source = attach(f"vllm://127.0.0.1:{server.port}", **events_of(publisher))
    wait_for_mirror(
        source, lambda: len(cached(source)) == 4 and cached(source, Tier.HOST) and source.mirror.num_blocks == 64
    )
    assert cached(source) == {11: 0, 12: 11, 13: 12, 14: 12}
    assert cached(source, Tier.HOST) == {12: 11}
    mirror = source.mirror
    hello = mirror.hello
    assert hello is not None
    assert (hello.cache.num_blocks, hello.cache.block_size) == (64, 2)
    assert (hello.model.name, hello.engine_version) == ("org/model", "vLLM 0.33.0")
    assert hello.capabilities.engine == "vllm"
    assert not hello.capabilities.physical_rows
    wait_for_mirror(source, lambda: mirror.counters.num_running == 3 and mirror.used_share == 0.5)
    assert source.status.state is SourceState.LIVE
    assert source.status.reason == ""
    tree = build(blocks_of(mirror.ledger))
    assert tree.num_texts == 2
    publisher.publish([BlockRemoved((14, 999), "GPU", 0)])
    wait_for_mirror(source, lambda: set(cached(source)) == {11, 12, 13})
    publisher.publish([AllBlocksCleared()])
    wait_for_mirror(source, lambda: not cached(source))
    assert cached(source, Tier.HOST) == {12: 11}  # offloaded blocks survive a reset of vLLM's prefix cache
    publisher.publish([BlockRemoved((12,), "CPU", 0)])
    wait_for_mirror(source, lambda: not cached(source, Tier.HOST))


@pytest.mark.parametrize("endpoint", ["ipc:///tmp/kvscope-vllm", "$(rm -rf ~)"])
def test_endpoint_of_the_inside_plugin_is_suggested(endpoint: str, server: FakeServer, attach: Attach) -> None:
    page = VllmPage()
    announce(endpoint, page.registry)
    server.set_answer("/metrics", page.text())
    source = attach(f"vllm://127.0.0.1:{server.port}")
    wait_for_mirror(source, lambda: source.status.state is SourceState.LIVE)
    words = f"seen from outside; for the rest: kvscope --attach {endpoint};"
    assert (words in source.status.reason) == endpoint.startswith("ipc")


def test_tokens_and_text_of_a_watched_block_are_found_by_block_number(
    server: FakeServer, publisher: KvEventPublisher, attach: Attach
) -> None:
    server.set_answer("/metrics", VllmPage().text())
    publisher.publish([BlockStored((11, 12), None, (5, 6, 7, 8), 2, medium="GPU")])
    source = attach(f"vllm://127.0.0.1:{server.port}", **events_of(publisher))
    wait_for_mirror(source, lambda: len(cached(source)) == 2)
    row = int(np.flatnonzero(source.mirror.ledger.hash == 12)[0])
    content, nothing = source.contents([row, 63])
    assert (content.block, content.start, content.token_ids, content.text) == (row, 2, (7, 8), "7 8")
    assert nothing.token_ids == ()


def test_counters_and_latencies_are_differences_of_two_readings(server: FakeServer, attach: Attach) -> None:
    page = VllmPage()
    page.count("prompt_tokens", 100)
    page.count("prompt_tokens_cached", 40)
    server.set_answer("/metrics", page.text())
    source = attach(f"vllm://127.0.0.1:{server.port}")
    wait_for_mirror(source, lambda: source.mirror.counters.prompt_tokens == 60)
    assert source.mirror.counters.cached_tokens == 40
    page.count("prompt_tokens", 20)
    page.count("generation_tokens", 7)
    page.finish("abort")
    page.finish("stop")
    page.observe("time_to_first_token_seconds", (0.003, 0.3, 900.0))
    server.set_answer("/metrics", page.text())
    readings, decoded = [], 0
    while not readings or source.mirror.counters.generation_tokens != 7:
        update = source.update_mirror()
        if update is not None:
            readings += [reading for reading in update.readings if reading.latencies]
            decoded += int(update.series["decode_tokens"].sum()) if update.series else 0
    assert decoded == 7
    counters = source.mirror.counters
    assert (counters.prompt_tokens, counters.finished, counters.aborted) == (80, 1, 1)
    (histogram,) = readings[0].latencies
    bounds, counts = np.frombuffer(histogram.bounds_ns, "<u8"), np.frombuffer(histogram.counts, "<u8")
    assert histogram.kind == "first_token"
    assert counts.sum() == 3
    assert counts[-1] == 1
    assert counts[int(np.searchsorted(bounds, 3_000_000))] == 1
    assert "no KV events" in source.status.reason


def test_sglang_reports_its_own_event_endpoint(
    server: FakeServer, attach: Attach, make_endpoint: Callable[[str], str]
) -> None:
    endpoint = make_endpoint("tcp")
    port = endpoint.rpartition(":")[2]
    config = KvEventsConfig(enable_kv_cache_events=True, endpoint=endpoint, publisher="zmq", bind=True)
    server.set_answer("/metrics", sglang_page(running=4))
    server_info = {
        "version": "0.5.23",
        "page_size": 2,
        "kv_events": {"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": int(port), "topic": ""},
    }
    server.set_answer("/server_info", msgspec.json.encode(server_info), "application/json")
    with KvEventPublisher(config) as publisher:
        source = attach(f"sglang://127.0.0.1:{server.port}")
        wait_for_mirror(source, lambda: source.mirror.hello is not None and "nothing" not in source.status.reason)
        hello = source.mirror.hello
        assert hello is not None
        assert (hello.cache.num_blocks, hello.cache.block_size, hello.cache.num_host_blocks) == (64, 2, 16)
        assert hello.engine_version == "SGLang 0.5.23"
        number = 0

        def published() -> bool:
            nonlocal number
            number += 1
            publisher.publish([BlockStored((number,), None, (1, 2), 2, medium="GPU")])
            return bool(cached(source))

        wait_for_mirror(source, published)
    counters = source.mirror.counters
    assert (counters.num_running, counters.num_waiting, counters.preemptions) == (4, 2, 3)
    assert (counters.prompt_tokens, counters.cached_tokens, counters.finished) == (60, 40, 4)


def test_engine_restart_resets_the_counters(server: FakeServer, publisher: KvEventPublisher, attach: Attach) -> None:
    page = VllmPage()
    page.count("generation_tokens", 500)
    server.set_answer("/metrics", page.text())
    source = attach(f"vllm://127.0.0.1:{server.port}", **events_of(publisher))
    wait_for_mirror(source, lambda: source.mirror.counters.generation_tokens == 500)
    epoch = source.mirror.epoch
    server.set_answer("/metrics", VllmPage().text())
    wait_for_mirror(source, lambda: source.mirror.epoch != epoch)
    assert source.mirror.counters.generation_tokens == 0
    assert source.status.resyncs == 1


def test_pool_grows_if_events_report_more_blocks_than_the_server(
    server: FakeServer, publisher: KvEventPublisher, attach: Attach
) -> None:
    server.set_answer("/metrics", VllmPage(num_blocks=8).text())
    source = attach(f"vllm://127.0.0.1:{server.port}", **events_of(publisher))
    wait_for_mirror(source, lambda: source.mirror.num_blocks == 8)
    publisher.publish([BlockStored(tuple(range(1, 21)), None, tuple(range(40)), 2, medium="GPU")])
    wait_for_mirror(source, lambda: len(cached(source)) == 20)
    assert cached(source) == {number: number - 1 for number in range(1, 21)}


def test_each_data_parallel_rank_of_a_server_is_a_separate_source(server: FakeServer, attach: Attach) -> None:
    page = VllmPage(2)
    page.gauge("num_requests_running", 5, rank=0)
    page.gauge("num_requests_running", 9, rank=1)
    server.set_answer("/metrics", page.text())
    first, second = (attach(f"vllm://127.0.0.1:{server.port}/?rank={rank}") for rank in (0, 1))
    wait_for_mirror(first, lambda: first.mirror.counters.num_running == 5)
    wait_for_mirror(second, lambda: second.mirror.counters.num_running == 9)
    assert second.name.endswith("rank 1")


def test_source_becomes_stale_and_live_again_with_its_server(server: FakeServer, attach: Attach) -> None:
    server.set_answer("/metrics", VllmPage().text())
    source = attach(f"vllm://127.0.0.1:{server.port}")
    wait_for_mirror(source, lambda: source.status.state is SourceState.LIVE)
    server.set_answer("/metrics", b"", status=500)
    wait_for_mirror(source, lambda: source.status.state is SourceState.STALE)
    assert "HTTP 500" in source.status.reason
    server.set_answer("/metrics", VllmPage().text())
    wait_for_mirror(source, lambda: source.status.state is SourceState.LIVE)


def _at(seconds: float) -> int:
    return int(seconds * 1e9)


def test_missing_events_are_reported_while_tokens_are_processed() -> None:
    silence = MissingEventsDetector()
    for second in range(0, 60, 5):
        silence.update(EngineReading(prompt_tokens=100 * second, generation_tokens=0), 0, _at(second))
        assert not silence.is_reported
    silence.update(EngineReading(prompt_tokens=6_000, generation_tokens=0), 0, _at(61))
    assert silence.is_reported
    silence.update(EngineReading(prompt_tokens=6_100, generation_tokens=0), 1, _at(62))
    assert not silence.is_reported, "an event arrived"


@pytest.mark.parametrize("tokens", [999, None])
def test_missing_events_are_not_reported_for_a_nearly_idle_server(tokens: int | None) -> None:
    silence = MissingEventsDetector()
    silence.update(EngineReading(prompt_tokens=0 if tokens else None), 0, 0)
    silence.update(EngineReading(prompt_tokens=tokens), 0, _at(600))
    assert not silence.is_reported


def test_missing_events_message_names_the_server_option() -> None:
    parts = AttachedParts(
        product="vLLM",
        metrics_why="",
        is_refused=False,
        events=StreamStatus(state=StreamState.LIVE),
        events_failure="",
        has_started=True,
        events_option=VLLM.events_option,
        are_events_missing=True,
    )
    state, why = status_of_parts(parts)
    assert state is SourceState.LIVE
    assert why.startswith(
        "tokens are generated, but no KV event arrived for 60 s: start the server with --kv-events-config '{"
    )
    assert '"enable_kv_cache_events": true' in status_of_parts(replace(parts, events=None))[1]


def test_one_rank_of_several_suggests_the_address_of_all(server: FakeServer, attach: Attach) -> None:
    page = VllmPage(num_ranks=2)
    server.set_answer("/metrics", page.text())
    address = f"vllm://127.0.0.1:{server.port}"
    source, named = attach(address), attach(f"{address}/?rank=1")
    for one in (source, named):
        wait_for_mirror(one, lambda one=one: one.status.state is SourceState.LIVE)
    assert f"one of several ranks; for all: kvscope --attach '{address}/?ranks=2'" in source.status.reason
    assert "ranks" not in named.status.reason


def test_one_of_several_publishers_suggests_the_address_of_another(server: FakeServer, attach: Attach) -> None:
    server.set_answer("/metrics", VllmPage().text())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    address = f"vllm://127.0.0.1:{server.port}/?kv_events=tcp://*:{endpoint.rpartition(':')[2]}"
    source, publishers = attach(address), []
    try:
        for topic in ("kv@a@m", "kv@b@m"):
            config = KvEventsConfig(endpoint=endpoint, bind=False, topic=topic, enable_kv_cache_events=True)
            publishers.append(KvEventPublisher(config))

        def are_topics_reported() -> bool:
            for publisher in publishers:
                publisher.publish([AllBlocksCleared()])
            return "several engines publish KV events here" in source.status.reason

        wait_for_mirror(source, are_topics_reported)
        reason = source.status.reason
    finally:
        for publisher in publishers:
            publisher.close()
    shown, other = ("kv@a@m", "kv@b@m") if "kv@a@m is shown" in reason else ("kv@b@m", "kv@a@m")
    assert f"{shown} is shown, and not {other}; for one of these: " in reason
    assert f"kvscope --attach '{address}&topic={other}'" in reason
    assert ExternalAddress.parse(f"{address}&topic={other}").topic == other


def test_only_rank_of_a_server_is_shown_whatever_its_number(server: FakeServer, attach: Attach) -> None:
    page = VllmPage().text().replace(b'engine="0"', b'engine="2"')
    server.set_answer("/metrics", page)
    source = attach(f"vllm://127.0.0.1:{server.port}")
    wait_for_mirror(source, lambda: source.status.state is SourceState.LIVE)
    assert "ranks" not in source.status.reason
