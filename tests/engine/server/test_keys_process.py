"""`kvscope-engine serve` on TCP in its own process, and `kvscope-engine keys`."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvscope_engine.cli import main as command
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.commands import Accepted, Control, Done, Failed, Refused, Reply, Submit
from kvscope_telemetry.source import SourceState
from kvscope_telemetry.sources.live_source import LiveSource
from kvscope_telemetry.transport.connections import NO_KEY

WAIT_S = 60.0
SCRIPT = Path(__file__).with_name("fake_engine.py")


@pytest.fixture(autouse=True)
def _own_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@pytest.fixture
def endpoint() -> Iterator[str]:
    """A fake engine served on TCP loopback by our command line."""
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), f"tcp://127.0.0.1:{_free_port_pair()}"],
        stdout=subprocess.PIPE,
        text=True,
        env=dict(os.environ),
    )
    assert process.stdout is not None
    yield process.stdout.readline().removeprefix("listening on ").split(",")[0]
    process.kill()
    process.communicate()


def ask(source: LiveSource, wanted: Submit | Control) -> Reply:
    source.send(wanted)
    replies: list[Reply] = []

    def has_answer() -> bool:
        replies.extend(r for r in source.poll_replies() if isinstance(r, Accepted | Refused | Done | Failed))
        return bool(replies)

    assert source.wait(has_answer, WAIT_S), source.status
    return replies[0]


def is_live(source: LiveSource) -> bool:
    return source.wait(lambda: source.status.state is SourceState.LIVE, WAIT_S)


def keys(*arguments: str) -> int:
    return command.main(["keys", *arguments])


def test_same_user_attaches_without_configuration_and_a_keyless_client_is_refused(endpoint: str) -> None:
    with LiveSource(endpoint) as source:
        assert is_live(source)
        assert isinstance(ask(source, Submit(request_id="r", prompt="hello")), Accepted)
    with LiveSource(endpoint, key=NO_KEY) as source:
        assert source.wait(lambda: source.status.state is SourceState.REFUSED, WAIT_S)


def test_key_is_created_used_and_removed_while_the_engine_runs(
    endpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "guest.key"
    assert keys("new", "guest", "--out", str(path)) == 0
    assert str(path) in capsys.readouterr().out
    with LiveSource(endpoint, key=path) as source:
        assert is_live(source)
        assert source.wait(lambda: source.status.role == "viewer", WAIT_S)
        assert isinstance(ask(source, Control(action="shutdown")), Failed)
        assert keys("remove", "guest") == 0
    with LiveSource(endpoint, key=path) as source:
        assert source.wait(lambda: source.status.state is SourceState.REFUSED, WAIT_S)
    with LiveSource(endpoint) as source:
        assert isinstance(ask(source, Control(action="shutdown")), Done)


def test_keys_list_shows_names_and_roles(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "keys"
    made = ("new", "laptop", "--role", "operator", "--out", str(tmp_path / "l.key"), "--keys", str(folder), "--json")
    assert keys(*made) == 0
    rows = json.loads(capsys.readouterr().out)
    assert (rows["name"], rows["role"], rows["file"]) == ("laptop", "operator", str(tmp_path / "l.key"))
    assert keys("list", "--keys", str(folder), "--json") == 0
    assert [(e["name"], e["role"]) for e in json.loads(capsys.readouterr().out)] == [
        ("local", "operator"),
        ("laptop", "operator"),
    ]
    assert keys("list", "--keys", str(folder)) == 0
    assert rows["public"] in capsys.readouterr().out
    assert keys("server", "--keys", str(folder)) == 0
    assert len(capsys.readouterr().out.strip()) == 40


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "one of new, list, remove, server"),
        (("new", "a b"), "letters, digits"),
        (("new", "local", "--out", "x.key"), "name 'local' is in use"),
        (("remove", "nobody"), "'nobody' is not on the allow-list"),
        (("new", "x", "--out", "/nowhere/x.key"), "/nowhere/x.key cannot be written"),
        (("new", "x", "--role", "root"), "invalid choice: 'root'"),
        (("list", "--keys", "/dev/null"), "is a file: give a folder"),
    ],
)
def test_invalid_keys_command_is_refused_in_one_line(
    arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert keys(*arguments) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_keyless_is_accepted_on_loopback_only(fake_serve: Callable[[str, str], None]) -> None:
    with pytest.raises(BadInput, match="not accepted without keys"):
        fake_serve("tcp://0.0.0.0:0", "operator")


@pytest.fixture
def fake_serve() -> Callable[[str, str], None]:
    from kvscope_engine.cli.serve import serve

    def run(endpoint: str, role: str) -> None:
        def build(*_: object) -> None:
            raise AssertionError("nothing is loaded")

        serve(endpoint, build, keyless=role)  # type: ignore[arg-type]

    return run


def _free_port_pair() -> int:
    """Return a port pair outside of the range that the system assigns, so that it stays free until the engine
    starts.
    """
    choose = random.SystemRandom()  # tests that run in parallel share the seed of `random`
    while True:
        with socket.socket() as first, socket.socket() as second:
            port = choose.randrange(20_000, 32_000, 2)
            try:
                first.bind(("127.0.0.1", port))
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port
