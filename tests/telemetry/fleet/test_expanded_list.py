"""Tests of places in a fleet's list: a Prometheus server stands for the engines that it scrapes."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest
from tests.telemetry.collectors.pages import VllmPage, sglang_page
from tests.telemetry.collectors.prometheus.fake_prometheus import FakePrometheus

from kvscope_telemetry.credentials.api_keys import keep_api_key
from kvscope_telemetry.discovery.places import find_in_place, is_place
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.fleet.expanded_list import AddressText, ExpandedText
from kvscope_telemetry.fleet.fleet_list import parse_list
from kvscope_telemetry.fleet.list_reader import ListReader


@pytest.fixture
def fake() -> Iterator[FakePrometheus]:
    """Prometheus that scraped two engines of vLLM in one job, and one of SGLang in another."""
    made = FakePrometheus()
    for instance in ("gpu2:8000", "gpu1:8000"):
        made.scrape(VllmPage().text(), made.now_s - 5, instance=instance)
    made.scrape(sglang_page(), made.now_s - 5, job="sglang", instance="gpu3:30000")
    yield made
    made.close()


def expanded(*addresses: str) -> list[str]:
    return ExpandedText(AddressText(list(addresses))).read(threading.Event()).splitlines()


def test_engines_in_prometheus_are_found_by_job_and_instance(fake: FakePrometheus) -> None:
    found = find_in_place(f"prometheus://127.0.0.1:{fake.port}")
    assert [(each.engine, each.note) for each in found] == [
        ("SGLang", "sglang gpu3:30000"),
        ("vLLM", "vllm gpu1:8000"),
        ("vLLM", "vllm gpu2:8000"),
    ]
    assert found[1].address == f"prometheus://127.0.0.1:{fake.port}/?job=vllm&instance=gpu1:8000"


def test_place_in_a_list_is_replaced_by_its_engines(fake: FakePrometheus) -> None:
    place = f"prometheus://127.0.0.1:{fake.port}/?job=vllm"
    lines = expanded("tcp://127.0.0.1:7710", f"{place} lab")
    assert lines[0] == "tcp://127.0.0.1:7710"
    entries = parse_list("\n".join(lines)).entries[1:]
    assert [(entry.address.text, entry.name) for entry in entries] == [
        (f"{place}&instance=gpu1:8000", "lab vllm gpu1:8000"),
        (f"{place}&instance=gpu2:8000", "lab vllm gpu2:8000"),
    ]


def test_engines_of_a_place_remain_while_it_does_not_answer(fake: FakePrometheus) -> None:
    text = ExpandedText(AddressText([f"prometheus://127.0.0.1:{fake.port}"]))
    lines = text.read(threading.Event())
    fake.is_failing = True
    assert text.read(threading.Event()) == lines
    with pytest.raises(BadInput, match=f"prometheus://127.0.0.1:{fake.port}: .* HTTP 503"):
        expanded(f"prometheus://127.0.0.1:{fake.port}")


def test_label_with_a_line_break_adds_no_line_to_the_list(fake: FakePrometheus) -> None:
    fake.scrape(VllmPage().text(), fake.now_s - 5, job="x\nssh://evil.example/run", instance="a\r\u2028b")
    lines = expanded(f"prometheus://127.0.0.1:{fake.port} lab")
    assert len(lines) == 4
    assert [entry.address.scheme for entry in parse_list("\n".join(lines)).entries] == ["prometheus"] * 4
    assert lines[-1].endswith(" lab x?ssh://evil.example/run a??b")


def test_place_that_does_not_answer_leaves_the_rest_of_the_list_and_is_reported(fake: FakePrometheus) -> None:
    fake.is_failing = True
    place = f"prometheus://127.0.0.1:{fake.port}"
    reader = ListReader(ExpandedText(AddressText(["tcp://127.0.0.1:7710", place])), 3600.0, lambda entries: None)
    deadline_s = time.monotonic() + 60
    while not reader.listed.num_tries:
        assert time.monotonic() < deadline_s
        time.sleep(0.005)
    reader.close()
    assert [entry.address.text for entry in reader.listed.entries] == ["tcp://127.0.0.1:7710"]
    assert reader.listed.trouble.startswith(f"{place}: ")
    assert "HTTP 503" in reader.listed.trouble
    assert not reader.listed.is_old


def test_reader_of_a_place_that_never_answers_can_be_stopped() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        reader = ListReader(ExpandedText(AddressText([f"prometheus://127.0.0.1:{port}"])), 3600.0, lambda entries: None)
        client, _ = listener.accept()
        reader.close()
        client.close()
    assert reader.listed.trouble == "it was stopped"


def test_name_after_a_tab_belongs_to_the_engines_of_the_place(fake: FakePrometheus) -> None:
    (line,) = expanded(f"prometheus://127.0.0.1:{fake.port}/?job=sglang\tlab")
    assert line.endswith(" lab sglang gpu3:30000")


@pytest.mark.parametrize("saved", ["", "/", "/?job=vllm", "/?job=sglang&instance=gpu3:30000"])
def test_key_saved_for_a_prometheus_is_for_its_engines_too(fake: FakePrometheus, saved: str) -> None:
    fake.authorization = "Bearer secret"
    server = f"prometheus://127.0.0.1:{fake.port}"
    keep_api_key(f"{server}{saved}", "secret")
    lines = expanded(f"{server}/?job=sglang", f"{server}/behind/?instance=gpu1:8000")
    keys = [entry.address.api_key for entry in parse_list("\n".join(lines), "other").entries]
    assert keys == ["secret", "other"]


def test_engine_that_is_no_longer_scraped_is_listed_only_if_no_other_is(fake: FakePrometheus) -> None:
    fake.scrape(VllmPage().text(), fake.now_s - 3000, job="old")
    place = f"prometheus://127.0.0.1:{fake.port}/?past=1h"
    assert [each.note for each in find_in_place(place)] == ["sglang gpu3:30000", "vllm gpu1:8000", "vllm gpu2:8000"]
    assert [each.note for each in find_in_place(f"{place}&job=old")] == ["old gpu1:8000"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("prometheus://h:9090/?app_kubernetes_io_instance=x", True),
        ("prometheus://h:9090/?instance=x", False),
        ("k8s://llm/pod=web", True),
        ("k8s://llm/app=web?pod=a", False),
        ("prometheus://[h:9090", False),
        ("vllm://h:8000", False),
    ],
)
def test_place_is_an_address_without_the_option_that_names_one_engine(text: str, expected: bool) -> None:
    assert is_place(text) is expected


def test_address_of_one_engine_in_a_place_stays_as_it_is(fake: FakePrometheus) -> None:
    line = f"prometheus://127.0.0.1:{fake.port}?job=vllm&instance=gpu1:8000"
    assert expanded(line) == [line]
    assert fake.num_queries == 0


def test_other_addresses_are_no_places() -> None:
    with pytest.raises(BadInput, match="'vllm://h:8000' is not accepted: prometheus://"):
        find_in_place("vllm://h:8000")
