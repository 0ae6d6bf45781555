"""Tests of the addresses of engines in Prometheus."""

from __future__ import annotations

import pytest

from kvscope_telemetry.addresses import Address
from kvscope_telemetry.collectors.prometheus.prometheus_address import PrometheusAddress
from kvscope_telemetry.errors import BadInput


@pytest.mark.parametrize(
    "text",
    [
        "prometheus://h:9090",
        "prometheus://h:9090/prom/?job=vllm&instance=gpu1:8000&rank=1&past=3600s&tls=1",
        "prometheus://[::1]:9090/?namespace=a+b&ca=/x.pem&api_key_over_http=1",
    ],
)
def test_address_parsed_from_its_own_text_is_equal(text: str) -> None:
    address = PrometheusAddress.parse(text)
    assert str(address) == text
    assert PrometheusAddress.parse(str(address)) == address


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("prometheus://h", "'prometheus://h'"),
        ("prometheus://h:9090/?a-b=1", "'a-b'"),
        ("prometheus://h:9090/?job=a&job=b", "'job'"),
        ("prometheus://h:9090/?__name__=up", "'__name__'"),
        ("prometheus://h:9090/?past=2d", "past='2d'"),
        ("prometheus://h:9090/?past=25h", "past='25h'"),
        ("prometheus://h:9090/?rank=x", "rank='x'"),
        ("prometheus://h:9090/?api_key=k", "api_key in an address"),
        ("prometheus://me@h:9090", "a user name"),
    ],
)
def test_invalid_part_of_an_address_is_named(text: str, what: str) -> None:
    with pytest.raises(BadInput) as raised:
        Address(text).check()
    assert what in str(raised.value)


def test_labels_are_quoted_in_queries() -> None:
    address = PrometheusAddress.parse("prometheus://h:9090/?job=a%22%7D%5C&x=%0A")
    assert address.matchers == r'job="a\"}\\",x="\n"'


def test_key_is_not_sent_to_another_machine_without_tls_and_never_shown() -> None:
    with pytest.raises(BadInput, match="not sent to h:9090 unencrypted"):
        Address("prometheus://h:9090", api_key="secret").check()
    address = PrometheusAddress.parse("prometheus://h:9090", api_key="secret", tls=True)
    assert "secret" not in f"{address!r} {address} {address.name}"
    assert address.authorization == {"Authorization": "Bearer secret"}


def test_kv_events_do_not_go_with_prometheus() -> None:
    with pytest.raises(BadInput, match="--kv-events is for"):
        Address("prometheus://h:9090", kv_events="tcp://h:1").check()
