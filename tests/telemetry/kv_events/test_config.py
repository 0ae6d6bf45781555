"""`--kv-events-config`: vLLM's fields and meaning, and a one-line error for everything else."""

from __future__ import annotations

import json

import pytest

from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.kv_events.kv_events_config import KvEventsConfig, parse_config

VLLM = {
    "enable_kv_cache_events": True,
    "publisher": "zmq",
    "endpoint": "tcp://*:5557",
    "replay_endpoint": "tcp://*:5558",
    "topic": "kv-events",
    "buffer_steps": 10000,
    "hwm": 100000,
    "max_queue_size": 100000,
}


def test_example_of_the_vllm_documentation_is_accepted() -> None:
    config = parse_config(json.dumps(VLLM))
    assert config == KvEventsConfig(**VLLM)  # type: ignore[arg-type]
    assert config.is_on
    assert config.binds


def test_kv_events_config_defaults_equal_those_of_vllm() -> None:
    config = parse_config("{}")
    assert not config.is_on
    assert (config.endpoint, config.replay_endpoint, config.topic) == ("tcp://*:5557", None, "")
    assert (config.buffer_steps, config.hwm, config.max_queue_size) == (10_000, 100_000, 100_000)
    assert parse_config('{"enable_kv_cache_events": true}').is_on
    assert not parse_config('{"enable_kv_cache_events": true, "publisher": "null"}').is_on


@pytest.mark.parametrize(
    ("endpoint", "bind", "binds"),
    [
        ("tcp://*:5557", None, True),
        ("tcp://0.0.0.0:5557", None, True),
        ("tcp://[::]:5557", None, True),
        ("ipc:///tmp/kv", None, True),
        ("tcp://127.0.0.1:5557", None, False),
        ("tcp://127.0.0.1:5557", True, True),
        ("tcp://[2001:db8::1]:5557", None, False),
    ],
)
def test_kv_events_endpoint_decides_whether_the_publisher_binds_or_connects(
    endpoint: str, bind: bool | None, binds: bool
) -> None:
    config = parse_config(json.dumps({"endpoint": endpoint, "bind": bind}))
    assert config.binds is binds


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "a JSON object is expected"),
        ("[1]", "a JSON object is expected"),
        ("{", "a JSON object is expected"),
        ("[" * 5000, "a JSON object is expected"),
        ('{"endpiont": "tcp://*:1"}', "field 'endpiont' is not known: one of enable_kv_cache_events, publisher,"),
        ('{"publisher": "kafka"}', "publisher='kafka' is not accepted"),
        ('{"enable_kv_cache_events": "yes"}', "enable_kv_cache_events='yes' is not accepted"),
        ('{"buffer_steps": 0}', "buffer_steps='0' is not accepted"),
        ('{"hwm": 1e99}', "hwm='1e+99' is not accepted"),
        ('{"max_queue_size": -1}', "max_queue_size='-1' is not accepted"),
        ('{"topic": null}', "topic='None' is not accepted"),
        ('{"endpoint": "http://h:1"}', "endpoint='http://h:1' is not accepted: tcp://HOST:PORT or ipc://PATH"),
        ('{"endpoint": "tcp://127.0.0.1:0"}', "endpoint='tcp://127.0.0.1:0' is not accepted: the host and port"),
        ('{"replay_endpoint": "inproc://x"}', "replay_endpoint='inproc://x' is not accepted"),
    ],
)
def test_invalid_config_is_refused_in_one_line(text: str, says: str) -> None:
    with pytest.raises(BadInput) as refusal:
        parse_config(text)
    assert says in str(refusal.value)
    assert "--kv-events-config" in str(refusal.value)
    assert "\n" not in str(refusal.value)
