"""Tests of engines in pods, with a program in the place of `kubectl`."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.processes import needs_unix
from tests.telemetry.collectors.conftest import FakeServer, server
from tests.telemetry.collectors.kubernetes.fake_kubectl import FakeKubectl, pod
from tests.telemetry.collectors.pages import VllmPage

from kvscope_telemetry.addresses import Address
from kvscope_telemetry.collectors.kubernetes import port_forward
from kvscope_telemetry.collectors.kubernetes.pod_address import PodAddress
from kvscope_telemetry.discovery.places import find_in_place
from kvscope_telemetry.errors import BadInput, KvscopeError
from kvscope_telemetry.fleet.expanded_list import AddressText, ExpandedText
from kvscope_telemetry.fleet.fleet_list import parse_list
from kvscope_telemetry.source import SourceState

__all__ = ["server"]
WAIT_S = 60.0
EXPIRED = "error: You must be logged in to the server (Unauthorized)"
ONE_POD = "k8s://llm/app=vllm?pod=vllm-0&engine=vllm&port=8000"


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeKubectl:
    monkeypatch.setattr(port_forward, "PAUSES_S", (0.02, 0.1))
    return FakeKubectl(tmp_path, monkeypatch)


@pytest.fixture
def watch(kubectl: FakeKubectl, server: FakeServer) -> Iterator[Callable[..., object]]:
    """Function that opens a source for the address of a pod, whose server is `server`."""
    kubectl.set_port(server.port)
    server.set_answer("/metrics", VllmPage().text())
    made = []

    def start(text: str = ONE_POD, **options: str) -> object:
        made.append(Address(text, **options).open())  # type: ignore[arg-type]
        return made[-1]

    yield start
    for each in made:
        each.close()


def wait_for_state(source: object, state: SourceState) -> str:
    deadline_s = time.monotonic() + WAIT_S
    while source.status.state != state:  # type: ignore[attr-defined]
        assert time.monotonic() < deadline_s, source.status  # type: ignore[attr-defined]
        time.sleep(0.005)
    return str(source.status.reason)  # type: ignore[attr-defined]


@needs_unix
def test_selection_without_pods_finds_nothing(kubectl: FakeKubectl) -> None:
    assert find_in_place("k8s://llm/app=vllm") == ()
    assert kubectl.calls[0][:5] == ["--namespace=llm", "get", "pods", "--selector", "app=vllm"]


@needs_unix
def test_three_pods_are_found_by_image_and_command_with_the_port_of_their_server(kubectl: FakeKubectl) -> None:
    kubectl.set_pods(
        [
            pod("web-0", "nginx:1"),
            pod("sglang-0", "lmsysorg/sglang:v0.5", args=["--port", "30000"], phase="Pending"),
            pod("vllm-0", ports=[{"containerPort": 5557}, {"containerPort": 8000}]),
            pod("llama-0", "registry/own:1", command=["/llama-server", "--port=9000"]),
        ]
    )
    found = find_in_place("k8s://llm/tier=gpu")
    assert [(each.address, each.engine, each.note) for each in found] == [
        ("k8s://llm/tier=gpu?pod=llama-0&engine=llama&port=9000", "llama.cpp", "llama-0"),
        ("k8s://llm/tier=gpu?pod=sglang-0&engine=sglang&port=30000", "SGLang", "sglang-0 (pending)"),
        ("k8s://llm/tier=gpu?pod=vllm-0&engine=vllm&port=8000", "vLLM", "vllm-0"),
    ]


@needs_unix
def test_programs_that_only_name_an_engine_are_not_listed(kubectl: FakeKubectl) -> None:
    kubectl.set_pods(
        [
            pod("proxy-0", "nginx:1", args=["--upstream=http://vllm:8000"]),
            pod("wait-0", "vllm/tools:1", command=["sh", "-c", "curl http://vllm:8000/health"]),
            pod("done-0", phase="Succeeded"),
            pod("broken-0", phase="Failed"),
            pod("chat-0", "own:1", command=["python3", "-m", "sglang.launch_server", "--served-model-name", "my-vllm"]),
            pod("shell-0", "own:1", command=["sh", "-c", "exec /opt/bin/vllm serve m --port 9000"]),
        ]
    )
    found = [(each.engine, each.address.partition("?")[2]) for each in find_in_place("k8s://llm/")]
    assert found == [
        ("SGLang", "pod=chat-0&engine=sglang&port=30000"),
        ("vLLM", "pod=shell-0&engine=vllm&port=9000"),
    ]


@needs_unix
@pytest.mark.parametrize("port", ["0", "99999", "80001x"])
def test_invalid_port_of_a_pod_is_ignored(kubectl: FakeKubectl, port: str) -> None:
    kubectl.set_pods([pod("vllm-0", args=["--port", port])])
    (found,) = find_in_place("k8s://llm/")
    assert found.address == "k8s://llm/?pod=vllm-0&engine=vllm&port=8000"


@needs_unix
def test_expired_token_is_reported_in_the_words_of_kubectl(kubectl: FakeKubectl) -> None:
    kubectl.set_failure(f"E1201 memcache.go:265\n{EXPIRED}")
    with pytest.raises(KvscopeError) as raised:
        find_in_place("k8s://llm/app=vllm")
    assert str(raised.value) == f"kubectl: {EXPIRED}"


@needs_unix
def test_missing_kubectl_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BadInput, match="k8s://llm/app=vllm needs kubectl, which is not on PATH"):
        find_in_place("k8s://llm/app=vllm")


@needs_unix
def test_pods_in_a_list_remain_after_the_token_has_expired(kubectl: FakeKubectl) -> None:
    kubectl.set_pods([pod(f"vllm-{number}") for number in range(3)])
    addresses = AddressText(["k8s://llm/app=vllm"])
    text = ExpandedText(addresses)
    lines = text.read(threading.Event())
    assert [entry.name for entry in parse_list(lines).entries] == ["vllm-0", "vllm-1", "vllm-2"]
    kubectl.set_failure(EXPIRED)
    assert text.read(threading.Event()) == lines
    with pytest.raises(BadInput) as raised:
        ExpandedText(addresses).read(threading.Event())
    assert str(raised.value) == f"k8s://llm/app=vllm: kubectl: {EXPIRED}"


@needs_unix
def test_engine_in_a_pod_is_watched_through_a_forwarded_port_with_its_key(
    watch: Callable[..., object], server: FakeServer, kubectl: FakeKubectl
) -> None:
    source = watch(api_key="secret")
    wait_for_state(source, SourceState.LIVE)
    assert source.name == "k8s://llm/vllm-0"  # type: ignore[attr-defined]
    assert ("/metrics", "Bearer secret") in server.asked
    (call,) = kubectl.calls
    assert call[:4] == ["--namespace=llm", "port-forward", "--address=127.0.0.1", "pod/vllm-0"]
    assert call[4].endswith(":8000")


@needs_unix
def test_port_forwarding_that_dies_is_started_again(watch: Callable[..., object], kubectl: FakeKubectl) -> None:
    source = watch()
    wait_for_state(source, SourceState.LIVE)
    kubectl.set_failure('Error from server (NotFound): pods "vllm-0" not found')
    os.kill(kubectl.forwarding_pid, signal.SIGKILL)
    reason = wait_for_state(source, SourceState.STALE)
    deadline_s = time.monotonic() + WAIT_S
    while "NotFound" not in reason:
        assert time.monotonic() < deadline_s, reason
        time.sleep(0.005)
        reason = str(source.status.reason)  # type: ignore[attr-defined]
    assert reason == 'kubectl: Error from server (NotFound): pods "vllm-0" not found'
    kubectl.set_failure("")
    wait_for_state(source, SourceState.LIVE)


@needs_unix
def test_port_forwarding_ends_with_its_source(watch: Callable[..., object], kubectl: FakeKubectl) -> None:
    source = watch()
    wait_for_state(source, SourceState.LIVE)
    source.close()  # type: ignore[attr-defined]
    with pytest.raises(ProcessLookupError):
        os.kill(kubectl.forwarding_pid, 0)


@needs_unix
def test_closing_ends_the_programs_that_kubectl_started(watch: Callable[..., object], kubectl: FakeKubectl) -> None:
    kubectl.set_plugin()
    source = watch()
    wait_for_state(source, SourceState.LIVE)
    source.close()  # type: ignore[attr-defined]  # waits for the end of the output that both have open
    assert "kvscope-forward" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.parametrize(
    "text", ["k8s://llm/", ONE_POD, "k8s://llm/app%20in%20(a,b)?pod=a&engine=sglang&port=1&context=me@cluster"]
)
def test_address_parsed_from_its_own_text_is_equal(text: str) -> None:
    address = PodAddress.parse(text)
    assert str(address) == text
    assert PodAddress.parse(str(address)) == address


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("k8s://", "'k8s://'"),
        ("k8s://Upper/app=a", "'k8s://Upper/app=a'"),
        ("k8s://llm/--all", "selector '--all'"),
        ("k8s://llm/a;b", "selector 'a;b'"),
        ("k8s://llm/app=vllm?pod=-x", "pod='-x'"),
        ("k8s://llm/app=vllm?engine=ollama", "engine='ollama'"),
        ("k8s://llm/app=vllm?port=0", "port='0'"),
        ("k8s://llm/app=vllm?context=--x", "context='--x'"),
        ("k8s://llm/app=vllm?x=1", "option 'x'"),
    ],
)
def test_invalid_part_of_an_address_is_named(text: str, what: str) -> None:
    with pytest.raises(BadInput) as raised:
        Address(text).check()
    assert what in str(raised.value)


@pytest.mark.parametrize("option", [{"tls": True}, {"ca_file": Path("ca.pem")}, {"api_key_over_http": True}])
def test_options_of_a_connection_do_not_go_with_a_forwarded_port(option: dict[str, bool]) -> None:
    with pytest.raises(BadInput, match=r"^--[a-z-]+ does not go with k8s://llm/.*: kubectl forwards the port"):
        Address(ONE_POD, **option).check()  # type: ignore[arg-type]


def test_address_without_a_pod_cannot_be_opened() -> None:
    with pytest.raises(BadInput, match="must name one pod; `kvscope find 'k8s://llm/app=vllm'` lists them"):
        Address("k8s://llm/app=vllm").open()
