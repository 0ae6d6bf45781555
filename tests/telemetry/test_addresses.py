"""Addresses: the source for each kind, one-line errors, and secrets that are never shown."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from kvscope_telemetry import connect
from kvscope_telemetry.addresses import API_KEY_VARIABLE, Address, accepted_addresses, read_api_key
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.sources.live_source import LiveSource


@dataclass(frozen=True)
class FakeExternalAddress:
    """Stand-in with the fields that the factory sets."""

    text: str
    kv_events: str = ""
    api_key: str = ""
    tls: bool = False
    ca: str = ""
    api_key_over_http: bool = False

    @classmethod
    def parse(cls, text, **options):
        return cls(text, **options)


class FakeExternalSource:
    """Stand-in that keeps its arguments."""

    def __init__(self, address, *, sink=None):
        self.address, self.sink = address, sink


@pytest.fixture
def external(monkeypatch):
    for name, things in (
        ("external_source", {"ExternalSource": FakeExternalSource}),
        ("external_address", {"ExternalAddress": FakeExternalAddress}),
    ):
        module = ModuleType(name)
        vars(module).update(things)
        monkeypatch.setitem(sys.modules, f"kvscope_telemetry.collectors.{name}", module)


def test_ipc_address_opens_a_live_source(tmp_path):
    with connect(f"ipc://{tmp_path}/telemetry") as source:
        assert isinstance(source, LiveSource)
        assert source.name == f"ipc://{tmp_path}/telemetry"


def test_vllm_address_opens_an_external_source_with_all_options(external):
    sink = object()
    source = connect("vllm://box:8000", kv_events="tcp://box:5557", api_key="secret", tls=True, sink=sink)
    assert source.address == FakeExternalAddress("vllm://box:8000", "tcp://box:5557", "secret", True)
    assert source.sink is sink
    plain = connect("sglang://box:30000/?rank=2")
    assert plain.address == FakeExternalAddress("sglang://box:30000/?rank=2")


@pytest.mark.parametrize(
    ("address", "words"),
    [
        (Address("nowhere"), f"address 'nowhere' is not accepted: {accepted_addresses()}"),
        (Address("http://box:8000/"), "vllm://box:8000, sglang://box:8000 or llama://box:8000"),
        (Address("https://box"), "vllm://box, sglang://box or llama://box with --tls"),
        (Address("ipc://relative"), "an absolute directory"),
        (Address("tcp://192.0.2.1:7710"), "not accepted without a key file"),
        (Address("tcp://127.0.0.1:7710", kv_events="tcp://127.0.0.1:1"), "--kv-events is for vllm:// and sglang://"),
        (Address("llama://box", kv_events="tcp://box:1"), "--kv-events is for vllm:// and sglang://"),
        (Address("ipc:///a", tls=True), "--tls is for vllm://, sglang:// and llama://"),
        (Address("ipc:///a", api_key="secret"), "--api-key-file is for vllm://, sglang:// and llama://"),
        (Address("tcp://127.0.0.1:7710", api_key_over_http=True), "--api-key-over-http is for vllm://"),
        (Address("ipc:///a", ca_file=Path("/nowhere/ca.pem")), "--tls-ca '/nowhere/ca.pem'"),
        (Address("vllm://box:8000", tls=True, ca_file=Path("/nowhere/ca.pem")), "--tls-ca '/nowhere/ca.pem'"),
    ],
)
def test_invalid_address_is_refused_in_one_line(external, address, words):
    with pytest.raises(BadInput) as raised:
        address.check()
    assert words in str(raised.value)
    assert "secret" not in str(raised.value)
    assert "\n" not in str(raised.value)


def test_key_file_is_refused_for_other_engines(external, tmp_path):
    with pytest.raises(BadInput, match="--key is for engines of kvscope's own"):
        Address("vllm://box:8000", key=tmp_path).check()


@pytest.mark.parametrize(
    ("address", "is_accepted"),
    [
        (Address("vllm://127.0.0.1:8000", api_key="secret"), True),
        (Address("vllm://127.9.9.9:8000", api_key="secret"), True),
        (Address("vllm://[::1]:8000", api_key="secret"), True),
        (Address("vllm://localhost:8000", api_key="secret"), True),
        (Address("vllm://gpu-box:8000", api_key="secret", tls=True), True),
        (Address("vllm://gpu-box:8000/?tls=1", api_key="secret"), True),
        (Address("vllm://gpu-box:8000", api_key="secret", api_key_over_http=True), True),
        (Address("vllm://gpu-box:8000/?api_key_over_http=1", api_key="secret"), True),
        (Address("vllm://gpu-box:8000"), True),
        (Address("vllm://gpu-box:8000", api_key="secret"), False),
        (Address("llama://10.0.0.5:8080/?tls=0", api_key="secret"), False),
        (Address("vllm://localhost.example:8000", api_key="secret"), False),
        (Address("vllm://127.0.0.1.example:8000", api_key="secret"), False),
        (Address("vllm://[::ffff:10.0.0.5]:8000", api_key="secret"), False),
    ],
)
def test_api_key_without_tls_is_accepted_for_loopback_or_with_the_option(address, is_accepted):
    if is_accepted:
        address.check()
        return
    with pytest.raises(BadInput) as raised:
        address.check()
    assert "--api-key-over-http" in str(raised.value)
    assert "secret" not in str(raised.value)
    assert "\n" not in str(raised.value)


def test_api_key_is_not_in_the_repr():
    assert "secret" not in repr(Address("vllm://box:8000", api_key="secret"))


def test_api_key_is_read_from_a_file_or_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv(API_KEY_VARIABLE, raising=False)
    assert read_api_key(None) == ""
    monkeypatch.setenv(API_KEY_VARIABLE, " sk-1 ")
    assert read_api_key(None) == "sk-1"
    file = tmp_path / "key"
    file.write_text("sk-2\n")
    assert read_api_key(file) == "sk-2"
    for content in ("", "two words", "two\nlines", "späh"):
        file.write_text(content)
        with pytest.raises(BadInput, match="is not accepted: one line"):
            read_api_key(file)
    with pytest.raises(BadInput, match="cannot be read"):
        read_api_key(tmp_path / "missing")
