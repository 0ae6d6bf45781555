"""Addresses of other engines: parsing, refused addresses, and that an API key is never shown."""

from __future__ import annotations

import pytest

from kvscope_telemetry.collectors.external_address import ExternalAddress, each_rank, waits_for_publisher
from kvscope_telemetry.errors import BadInput

parse = ExternalAddress.parse


def test_all_parts_of_an_external_engine_address_are_parsed() -> None:
    text = "vllm://host:8000/?kv_events=tcp://host:5557&replay=tcp://host:5558&rank=2&tls=1&topic=kv"
    address = parse(text)
    assert (address.engine.scheme, address.host, address.port, address.rank, address.tls) == (
        "vllm",
        "host",
        8000,
        2,
        True,
    )
    assert address.endpoint(address.kv_events) == "tcp://host:5559"
    assert address.url("/metrics") == "https://host:8000/metrics"
    assert address.name == "vllm://host:8000 rank 2"


@pytest.mark.parametrize(
    "text",
    [
        "vllm://host:8000",
        "sglang://[::1]:30000",
        "vllm://host:443/engine1/?tls=1",
        "vllm://host:8000/?api_key_over_http=1",
        "vllm://host:8000/?kv_events=tcp://*:5557&rank=3",
        "vllm://host:8000/?kv_events=ipc:///tmp/kv&replay=ipc:///tmp/kv-replay&model=org/m&tokenizer=/a/b",
    ],
)
def test_external_engine_address_parsed_from_its_own_text_is_equal(text: str) -> None:
    assert parse(str(parse(text))) == parse(text)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("vllm://host", "HOST:PORT"),
        ("vllm://:8000", "HOST:PORT"),
        ("vllm://host:0", "HOST:PORT"),
        ("vllm://host:99999", "HOST:PORT"),
        ("trt://host:8000", "HOST:PORT"),
        ("vllm://ho st:8000", "HOST:PORT"),
        ("vllm://host:8000#x", "HOST:PORT"),
        ("vllm://user:secret@host:8000", "--api-key-file"),
        ("vllm://host:8000/?api_key=secret", "--api-key-file"),
        ("vllm://host:8000/?rank=-1", "rank"),
        ("vllm://host:8000/?rank=x", "rank"),
        ("vllm://host:8000/?rank=1&rank=2", "once each"),
        ("vllm://host:8000/?ranks=2", "one address is"),
        ("vllm://host:8000/?tls=yes", "0 or 1"),
        ("vllm://host:8000/?api_key_over_http=yes", "0 or 1"),
        ("vllm://host:8000/?speed=1", "speed"),
        ("vllm://host:8000/?kv_events=http://host:1", "tcp://HOST:PORT"),
        ("vllm://host:8000/?replay=tcp://host:1", "without kv_events"),
        ("vllm://host:8000/?kv_events=tcp://host:65535&rank=1", "rank 1"),
        ("vllm://host:8000/?kv_events=ipc:///tmp/kv&rank=1", "rank 1"),
    ],
)
def test_invalid_part_of_an_address_is_named(text: str, what: str) -> None:
    with pytest.raises(BadInput, match=what) as caught:
        parse(text)
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_api_key_is_never_shown() -> None:
    address = parse("vllm://host:8000/?tls=1", api_key="sk-secret")
    assert address.api_key == "sk-secret"
    assert "secret" not in f"{address!r} {address} {address.name}"
    with pytest.raises(BadInput) as caught:
        parse("vllm://host:8000", api_key="two words\r\nX: y")
    assert "words" not in str(caught.value)


def test_wildcard_host_is_replaced_by_the_host_of_the_server() -> None:
    address = parse("sglang://[fd00::1]:30000")
    assert address.on_this_host("tcp://*:5557") == "tcp://[fd00::1]:5557"
    assert address.on_this_host("tcp://10.0.0.1:5557") == "tcp://10.0.0.1:5557"
    assert waits_for_publisher("tcp://*:5557")
    assert not waits_for_publisher("ipc:///tmp/kv")


def test_address_with_ranks_expands_to_one_per_rank() -> None:
    assert each_rank("vllm://host:8000/?ranks=2&tls=1") == [f"vllm://host:8000/?tls=1&rank={rank}" for rank in (0, 1)]
    assert [parse(text).rank for text in each_rank("sglang://host:30000/?ranks=3")] == [0, 1, 2]
    for alone in ("vllm://host:8000", "vllm://host:8000/?rank=1", "ipc:///tmp/ranks=2"):
        assert each_rank(alone) == [alone]
    for wrong in ("ranks=0", "ranks=65", "ranks=", "ranks=x", "ranks=2&ranks=2", "ranks=2&rank=1"):
        with pytest.raises(BadInput, match="rank"):
            each_rank(f"vllm://host:8000/?{wrong}")
