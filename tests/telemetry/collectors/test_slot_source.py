"""llama.cpp's slots as a source: each poll updates the mirror, and the server is polled sparingly."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest

from kvscope_telemetry import connect
from kvscope_telemetry.collectors.external_address import ExternalAddress
from kvscope_telemetry.collectors.llama import LLAMA_CPP
from kvscope_telemetry.collectors.slot_readings import read_slots
from kvscope_telemetry.collectors.slot_source import SlotSource
from kvscope_telemetry.errors import BadInput, ProtocolError
from kvscope_telemetry.ledger import NO_OWNER, BlockState
from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.messages.structured import Structured
from kvscope_telemetry.source import SourceState

METRICS = """# TYPE llamacpp:requests_processing gauge
llamacpp:requests_processing 1
# TYPE llamacpp:requests_deferred gauge
llamacpp:requests_deferred 3
"""


def slot(
    number: int,
    *,
    task: int | None = None,
    holds: int = 0,
    processed: int = 0,
    cached: int = 0,
    decoded: int = 0,
    busy: bool = False,
) -> dict[str, Any]:
    """Return a slot as llama-server writes it."""
    said: dict[str, Any] = {"id": number, "n_ctx": 200, "speculative": False, "is_processing": busy}
    if task is not None:
        said |= {
            "id_task": task,
            "n_prompt_tokens": holds,
            "n_prompt_tokens_processed": processed,
            "n_prompt_tokens_cache": cached,
            "params": {"seed": 4294967295},
            "next_token": [{"has_next_token": busy, "n_remain": 5, "n_decoded": decoded}],
        }
    return said


class LlamaServer(ThreadingHTTPServer):
    """llama-server with configurable answers that counts the requests by path."""

    def __init__(self) -> None:
        self.slots: Any = [slot(0), slot(1)]
        self.props: dict[str, Any] = {"model_path": "/m/tiny.gguf", "build_info": "b7500", "is_sleeping": False}
        self.metrics: str | None = METRICS
        self.slots_status = 200
        self.is_router = False
        """Whether it routes requests to servers, of which there is one, with the model `a/q`."""
        self.asked: Counter[str] = Counter()
        super().__init__(("127.0.0.1", 0), Handler)


class Handler(BaseHTTPRequestHandler):
    server: LlamaServer

    def do_GET(self) -> None:
        server = self.server
        server.asked[self.path] += 1
        status, body = 200, ""
        path, _, query = self.path.partition("?")
        if server.is_router and query != "model=a%2Fq":
            status, body = (200, json.dumps({"role": "router"})) if path == "/props" else (400, "no model")
        elif path == "/slots":
            status, body = server.slots_status, json.dumps(server.slots)
        elif path == "/props":
            body = json.dumps(server.props)
        elif path == "/metrics" and server.metrics is not None:
            body = server.metrics
        else:
            status = 501
        self.send_response(status)
        self.send_header("Content-Type", "text/plain" if self.path == "/metrics" else "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Silent."""


@pytest.fixture
def server() -> Iterator[LlamaServer]:
    served = LlamaServer()
    thread = threading.Thread(target=served.serve_forever)
    thread.start()
    yield served
    served.shutdown()
    served.server_close()
    thread.join()


@pytest.fixture
def source(server: LlamaServer) -> Iterator[SlotSource]:
    with SlotSource(ExternalAddress.parse(f"llama://127.0.0.1:{server.server_port}"), every_s=0.02) as opened:
        yield opened


def wait_for_poll(source: SlotSource, server: LlamaServer) -> None:
    """Wait until the mirror has the current state of the server."""
    asked, end_s = server.asked["/slots"] + 2, time.monotonic() + 10
    while server.asked["/slots"] < asked:
        assert time.monotonic() < end_s, source.status
        source.update_mirror()
        time.sleep(0.005)
    time.sleep(0.05)
    while source.update_mirror() is not None:
        pass


def cells(source: SlotSource, number: int) -> list[tuple[BlockState, int, int]]:
    """Return state, filled tokens and owner of each cell of a slot."""
    size = source.mirror.num_blocks // 2
    ledger, rows = source.mirror.ledger, range(number * size, (number + 1) * size)
    return [(BlockState(ledger.state[row]), int(ledger.filled[row]), int(ledger.owner[row])) for row in rows]


def wait_for(is_so: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 10
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.01)


FREE = (BlockState.FREE, 0, NO_OWNER)


def test_llama_cpp_slots_are_shown_as_blocks_that_fill_and_keep_their_tokens(
    source: SlotSource, server: LlamaServer
) -> None:
    wait_for_poll(source, server)
    hello = source.mirror.hello
    assert hello is not None
    assert (hello.cache.num_blocks, hello.cache.block_size, hello.model.name) == (14, 32, "tiny.gguf")
    assert hello.engine_version == "llama.cpp b7500"
    assert cells(source, 0) == [FREE] * 7

    server.slots = [slot(0, task=5, holds=40, busy=True), slot(1)]
    wait_for_poll(source, server)
    assert cells(source, 0)[:3] == [(BlockState.ACTIVE, 32, NO_OWNER), (BlockState.ACTIVE, 8, NO_OWNER), FREE]
    assert len(source.mirror.requests) == 0, "how long its prompt is is not told yet"

    server.slots = [slot(0, task=5, holds=70, processed=50, cached=16, decoded=4, busy=True), slot(1)]
    wait_for_poll(source, server)
    requests = source.mirror.requests
    assert (requests.request_ids, requests.num_prompt_tokens.tolist()) == (["task 5"], [66])
    assert (requests.num_cached_tokens[0], requests.num_output_tokens[0], requests.num_computed_tokens[0]) == (
        16,
        4,
        70,
    )
    assert requests.table(1).tolist() == [0, 1, 2]
    assert cells(source, 0)[:4] == [
        (BlockState.ACTIVE, 32, 1),
        (BlockState.ACTIVE, 32, 1),
        (BlockState.ACTIVE, 6, 1),
        FREE,
    ]
    assert source.mirror.counters.num_waiting == 3, "from the metrics"

    server.slots = [slot(0, task=5, holds=74, processed=50, cached=16, decoded=9), slot(1)]
    wait_for_poll(source, server)
    assert requests.state[0] == RequestState.FINISHED
    assert requests.num_output_tokens[0] == 9
    assert cells(source, 0)[2] == (BlockState.CACHED, 10, 1), "a slot keeps what it holds"
    assert source.mirror.counters.finished == 1

    server.slots = [slot(0, task=9, holds=20, processed=4, cached=16, decoded=1, busy=True), slot(1)]
    wait_for_poll(source, server)
    assert cells(source, 0)[:2] == [(BlockState.ACTIVE, 20, 2), FREE], "another task took the slot"
    assert source.mirror.counters.cached_tokens == 32
    assert source.mirror.counters.prompt_tokens == 54


def test_short_task_between_two_polls_is_seen_as_finished(source: SlotSource, server: LlamaServer) -> None:
    wait_for_poll(source, server)
    server.slots = [slot(0), slot(1, task=3, holds=33, processed=30, decoded=3)]
    wait_for_poll(source, server)
    assert source.mirror.requests.request_ids == ["task 3"]
    assert source.mirror.requests.state[0] == RequestState.FINISHED
    assert cells(source, 1)[:2] == [(BlockState.CACHED, 32, 1), (BlockState.CACHED, 1, 1)]


def test_end_of_a_task_is_derived_from_its_slot_after_its_figures_are_gone(
    source: SlotSource, server: LlamaServer
) -> None:
    wait_for_poll(source, server)
    server.slots = [slot(0, task=5, holds=70, processed=50, cached=16, decoded=4, busy=True), slot(1)]
    wait_for_poll(source, server)
    server.slots = [slot(0, task=5, holds=78), slot(1, task=6, holds=9)]
    wait_for_poll(source, server)
    requests = source.mirror.requests
    assert requests.request_ids == ["task 5"], "of the other one nothing is known but what it left"
    assert (requests.num_output_tokens[0], requests.num_computed_tokens[0]) == (13, 78), "all but the last"
    assert cells(source, 0)[2] == (BlockState.CACHED, 14, 1)
    assert cells(source, 1)[0] == (BlockState.CACHED, 9, NO_OWNER)


def test_tokens_from_before_the_attach_have_no_owner(server: LlamaServer, source: SlotSource) -> None:
    server.slots = [slot(0, task=3, holds=33, processed=30, decoded=3), slot(1)]
    source.close()
    with connect(f"llama://127.0.0.1:{server.server_port}") as later:
        assert isinstance(later, SlotSource)
        while later.update_mirror() is None:
            time.sleep(0.01)
        assert len(later.mirror.requests) == 0
        assert np.count_nonzero(later.mirror.ledger.state == BlockState.CACHED) == 2


def test_busy_server_is_polled_mostly_for_slots(source: SlotSource, server: LlamaServer) -> None:
    server.slots = [slot(0, task=5, holds=40, busy=True), slot(1)]
    wait_for_poll(source, server)
    before = server.asked.copy()
    wait_for(lambda: server.asked["/slots"] >= before["/slots"] + 12)
    asked = server.asked - before
    assert asked["/props"] == 0
    assert asked["/metrics"] <= asked["/slots"] / 4


def test_idle_server_is_not_kept_awake_and_its_wakeup_is_seen(source: SlotSource, server: LlamaServer) -> None:
    server.metrics = METRICS.replace("processing 1", "processing 0")
    wait_for(lambda: server.asked["/metrics"] >= 5)
    before = server.asked["/slots"]
    wait_for(lambda: server.asked["/metrics"] >= 10)
    assert server.asked["/slots"] == before, "asking for slots would keep the server awake"

    server.slots = [slot(0, task=5, holds=70, processed=50, cached=16, decoded=4, busy=True), slot(1)]
    server.metrics = METRICS
    wait_for_poll(source, server)
    assert source.mirror.requests.request_ids == ["task 5"]


def test_sleeping_server_holds_no_tokens(source: SlotSource, server: LlamaServer) -> None:
    server.slots = [slot(0, task=5, holds=70, processed=50, cached=16, decoded=4), slot(1)]
    wait_for(lambda: source.update_mirror() is None and np.any(source.mirror.ledger.filled))
    server.props["is_sleeping"] = True
    wait_for(lambda: source.update_mirror() is None and not np.any(source.mirror.ledger.filled))
    assert "it sleeps" in source.status.reason
    assert source.mirror.counters.num_running == 0


def test_tasks_missed_by_polls_are_counted_by_the_server_counters(source: SlotSource, server: LlamaServer) -> None:
    counted = "# TYPE llamacpp:prompt_tokens_total counter\nllamacpp:prompt_tokens_total "
    server.metrics = f"{METRICS}{counted}10\n"
    before = server.asked["/metrics"] + 2
    wait_for(lambda: source.update_mirror() is None and server.asked["/metrics"] >= before)
    assert source.mirror.counters.prompt_tokens == 0, "counts from before the attach are ignored"
    server.metrics = f"{METRICS}{counted}52\n"
    wait_for(lambda: source.update_mirror() is None and source.mirror.counters.prompt_tokens == 42)


def test_restarted_server_is_recognized_by_its_media_marker(source: SlotSource, server: LlamaServer) -> None:
    server.props["media_marker"] = "<__media_1__>"
    source.close()
    with SlotSource(ExternalAddress.parse(f"llama://127.0.0.1:{server.server_port}"), every_s=0.02) as source:
        wait_for_poll(source, server)
        before = source.mirror.epoch
        server.props["media_marker"] = "<__media_2__>"
        wait_for(lambda: source.update_mirror() is None and source.mirror.epoch != before)


def test_missing_metrics_are_reported(source: SlotSource, server: LlamaServer) -> None:
    server.metrics = None
    wait_for(lambda: "--metrics" in source.status.reason)
    assert source.status.state is SourceState.LIVE


@pytest.mark.parametrize(
    ("props", "words"),
    [({"is_sleeping": True}, "it sleeps"), ({"role": "router"}, "it routes requests to other servers")],
)
def test_sleeping_or_routing_server_is_not_polled(props: Any, words: str, server: LlamaServer) -> None:
    server.props |= props
    with connect(f"llama://127.0.0.1:{server.server_port}") as source:
        end_s = time.monotonic() + 10
        while words not in source.status.reason and time.monotonic() < end_s:
            time.sleep(0.01)
        assert words in source.status.reason
        time.sleep(0.2)
        assert server.asked["/slots"] == server.asked["/metrics"] == 0
        assert server.asked["/props"] == 1


def test_server_without_slots_is_reported_with_the_option_to_change(server: LlamaServer) -> None:
    server.slots_status = 501
    with connect(f"llama://127.0.0.1:{server.server_port}") as source:
        end_s = time.monotonic() + 10
        while "no-slots" not in source.status.reason and time.monotonic() < end_s:
            time.sleep(0.01)
        assert source.status.reason.endswith("start llama-server without --no-slots")
        assert source.status.state is SourceState.CONNECTING


def test_llama_cpp_server_with_other_slot_sizes_counts_as_a_new_engine_run(
    source: SlotSource, server: LlamaServer
) -> None:
    wait_for_poll(source, server)
    before = source.mirror.epoch
    server.slots = [{**slot(number), "n_ctx": 400} for number in range(2)]
    wait_for_poll(source, server)
    assert source.mirror.epoch != before
    assert source.mirror.num_blocks == 26


@pytest.mark.parametrize(
    "answer",
    [
        {},
        [],
        "slots",
        [3],
        [slot(0) | {"n_ctx": 0}],
        [slot(0) | {"n_ctx": 1 << 40}],
        [slot(0)] * 2000,
        [slot(0) | {"id_task": 3}],
    ],
    ids=repr,
)
def test_invalid_slot_list_is_refused(answer: Any) -> None:
    with pytest.raises(ProtocolError):
        read_slots(answer)


def test_invalid_slot_fields_are_unknown() -> None:
    (read,) = read_slots(
        [slot(0) | {"id_task": True, "n_prompt_tokens": 1 << 50, "next_token": "x", "is_processing": 1}]
    )
    assert (read.task, read.num_tokens, read.num_decoded, read.is_processing) == (-1, 200, 0, False)


def test_structured_output_uses_the_fields_of_llama_cpp() -> None:
    assert LLAMA_CPP.form_fields(Structured(kind="grammar", text='root ::= "a"')) == {"grammar": 'root ::= "a"'}
    with pytest.raises(BadInput, match=r"llama\.cpp"):
        LLAMA_CPP.form_fields(Structured(kind="regex", text="a"))


def test_model_behind_a_router_is_watched_by_its_name(server: LlamaServer) -> None:
    """As llama.cpp 22373."""
    server.is_router = True
    with connect(f"llama://127.0.0.1:{server.server_port}/?model=a/q") as source:
        wait_for(lambda: source.update_mirror() is None and server.asked["/slots?model=a%2Fq"] > 1)
        assert source.status.state is SourceState.LIVE
        assert server.asked["/slots"] == 0
