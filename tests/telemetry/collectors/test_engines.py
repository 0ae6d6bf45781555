"""A new engine is one module and one line: it is watched completely, and only its module names it."""

from __future__ import annotations

import ast
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from tests.telemetry.collectors.conftest import WAIT_S, FakeServer, wait_for_mirror
from tests.telemetry.collectors.made_up_engine import MADE_UP, METRICS

from kvscope_telemetry.addresses import Address, open_source
from kvscope_telemetry.collectors import external_engines
from kvscope_telemetry.collectors.external_source import ExternalSource
from kvscope_telemetry.collectors.prompting.completion_query import make_completion_query
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.fleet.fleet import Fleet
from kvscope_telemetry.fleet.fleet_list import parse_list
from kvscope_telemetry.kv_events.batches import BlockStored
from kvscope_telemetry.kv_events.event_publisher import KvEventPublisher
from kvscope_telemetry.kv_events.kv_events_config import KvEventsConfig
from kvscope_telemetry.ledger import BlockState
from kvscope_telemetry.messages.commands import Control, Submit
from kvscope_telemetry.messages.sampling_params import SamplingParams
from kvscope_telemetry.messages.structured import Structured

ROOT = Path(__file__).parents[3]


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch, server: FakeServer) -> str:
    """Address of a running made-up engine."""
    monkeypatch.setattr(external_engines, "ENGINES", (*external_engines.ENGINES, MADE_UP))
    server.set_answer("/metrics", METRICS)
    return f"madeup://127.0.0.1:{server.port}"


def test_added_engine_is_watched_completely(
    made_up: str, server: FakeServer, make_endpoint: Callable[[str], str]
) -> None:
    endpoint = make_endpoint("ipc")
    server.set_answer("/about", msgspec.json.encode({"release": "2.5", "events": endpoint}))
    config = KvEventsConfig(enable_kv_cache_events=True, publisher="zmq", endpoint=endpoint)
    with KvEventPublisher(config) as publisher, open_source(made_up) as source:
        assert isinstance(source, ExternalSource)
        mirror = source.mirror

        def is_mirrored() -> bool:
            publisher.publish([BlockStored((11,), None, (1, 2), 2)])  # again, for who comes late
            return bool((mirror.ledger.hash[mirror.ledger.state == BlockState.CACHED] == 11).any())

        wait_for_mirror(source, is_mirrored)
        hello = mirror.hello
        assert hello is not None
        assert (hello.engine_version, hello.capabilities.engine) == ("Made-up 2.5", "madeup")
        assert mirror.num_blocks == 32
        wait_for_mirror(source, lambda: mirror.counters.num_running == 3 and mirror.used_share == 0.5)
        source.send(Control(action="pause", tag=1))
        (reply,) = source.poll_replies()
        assert "Made-up can be watched but not controlled" in str(reply)


def test_added_engine_supports_ranks_prompts_and_fleets(made_up: str) -> None:
    with open_source(f"{made_up}/?rank=1") as source:
        wait_for_mirror(source, lambda: source.mirror.counters.num_running == 5)  # type: ignore[arg-type]
    form = SamplingParams(max_tokens=1, structured=Structured(kind="regex", text="a+"))
    asked = make_completion_query(Submit(request_id="a", prompt="x", raw=True, sampling=form), MADE_UP)
    assert asked.fields["pattern"] == "a+"
    fleet = Fleet()
    try:
        fleet.watch(parse_list(f"{made_up}/?ranks=2").entries)
        deadline = time.monotonic() + WAIT_S
        while [row.num_running for row in fleet.rows] != [3, 5]:
            assert time.monotonic() < deadline, fleet.rows
            time.sleep(0.02)
        assert {row.engine for row in fleet.rows} == {"madeup"}
    finally:
        fleet.close()


def test_added_engine_is_named_in_messages_to_the_user(made_up: str, server: FakeServer) -> None:
    with open_source(made_up.replace("madeup", "vllm")) as mistaken:
        wait_for_mirror(mistaken, lambda: f"these are metrics of Made-up: attach {made_up}" in mistaken.status.reason)  # type: ignore[arg-type]
    server.set_answer("/metrics", b"", status=404)
    with open_source(made_up) as source:
        wait_for_mirror(source, lambda: "(HTTP 404): start Made-up with --figures" in source.status.reason)  # type: ignore[arg-type]
    for wrong in ("nowhere", "vllm://box"):
        with pytest.raises(
            BadInput, match=r"vllm://HOST:PORT, sglang://HOST:PORT, llama://HOST:PORT or madeup://HOST:PORT"
        ):
            Address(wrong).check()
    with pytest.raises(BadInput, match=r"say which engine it is, .* or madeup://box"):
        Address("http://box").check()
    with pytest.raises(BadInput, match=r"--tls is for vllm://, sglang://, llama:// and madeup://, "):
        Address("ipc:///tmp/a", tls=True).check()


@pytest.fixture(scope="module")
def nodes_by_path() -> dict[Path, list[ast.Constant | ast.ImportFrom]]:
    """Constants and imports of the code that watches engines, by file. An option of our own engine has a value that is
    named like another engine.
    """
    paths = [path for folder in ("app", "engine/kvscope_telemetry") for path in sorted((ROOT / folder).rglob("*.py"))]
    kinds = (ast.Constant, ast.ImportFrom)
    return {
        path: [node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, kinds)]
        for path in paths
        if path.name != "engine_config.py"
    }


@pytest.mark.parametrize("engine", external_engines.ENGINES, ids=lambda engine: engine.scheme)
def test_external_engine_is_named_in_no_source_file_but_its_own_module(
    engine: external_engines.ExternalEngine, nodes_by_path: dict[Path, list[ast.Constant | ast.ImportFrom]]
) -> None:
    """No comparison, table or list elsewhere contains an engine's name."""
    home = ROOT / f"engine/kvscope_telemetry/collectors/{engine.scheme}.py"
    assert home.is_file()
    found = []
    for path, nodes in nodes_by_path.items():
        if path == home:
            continue
        for node in nodes:
            is_import = (
                isinstance(node, ast.ImportFrom) and node.module == f"kvscope_telemetry.collectors.{engine.scheme}"
            )
            is_name = isinstance(node, ast.Constant) and node.value in (engine.scheme, engine.name)
            if (is_import and path.name != "external_engines.py") or is_name:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not found
