"""A fake SGLang scheduler is followed over sockets: rows, actions and its end."""

from __future__ import annotations

import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.engines.watching import FrameByFrame
from tests.inside.fake_sglang import Request, Scheduler

from kvscope_inside.endpoints import ENDPOINT, endpoint_of_rank, file_of_rank, keys_for
from kvscope_inside.sglang import plugin, sglang_watch
from kvscope_telemetry.ledger import BlockState
from kvscope_telemetry.messages.commands import (
    Abort,
    BlockText,
    Control,
    Done,
    Failed,
    GetBlockText,
    Reply,
)

ROOT = Path(__file__).parents[2]


@pytest.fixture
def watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Scheduler, FrameByFrame, sglang_watch.SglangWatch]]:
    monkeypatch.setattr("kvscope_inside.sglang.sglang_facts._version", lambda: "0.0")
    texts = SimpleNamespace(texts=lambda ids: [str(list(each)) for each in ids], close=lambda: None)
    monkeypatch.setattr(sglang_watch, "DetokenizerProcess", lambda tokenizer: texts)
    requests = SimpleNamespace(AbortReq=lambda rid: SimpleNamespace(rid=rid))
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.io_struct", requests)
    scheduler = Scheduler(num_pages=40)
    watching = sglang_watch.SglangWatch(scheduler, f"ipc://{tmp_path}/s")
    client = FrameByFrame(f"ipc://{tmp_path}/s")
    yield scheduler, client, watching
    client.close()
    watching.close()


def test_client_of_a_watched_sglang_scheduler_receives_blocks_and_requests(watched: Any) -> None:
    scheduler, client, _ = watched
    client.begin()
    scheduler.add(Request("a", list(range(10)), 4))
    while scheduler.step():
        pass
    list(client.frames(0.5))
    ledger = client.mirror.ledger
    assert (ledger.state == BlockState.CACHED).sum() == len(scheduler.tree_cache.nodes) == 3
    assert client.mirror.hello.capabilities.engine == "sglang"
    assert client.mirror.counters.finished == 1
    reply = client.ask(GetBlockText(blocks=(int(ledger.hash.nonzero()[0][0]),)))
    assert isinstance(reply, BlockText)
    assert reply.contents[0].text in ("[0, 1, 2, 3]", "[4, 5, 6, 7]", "[8, 9, 20, 27]")


def ask_while_running(scheduler: Scheduler, client: FrameByFrame, command: Any) -> Reply:
    """Send a command and run the scheduler until the reply arrives."""
    answers: list[Reply] = []
    asking = threading.Thread(target=lambda: answers.append(client.ask(command)))
    asking.start()
    while asking.is_alive():
        scheduler.ingest_requests()
        asking.join(0.01)
    return answers[0]


def test_operator_may_only_abort_and_flush(watched: Any) -> None:
    scheduler, client, _ = watched
    client.begin()
    scheduler.add(Request("a", list(range(10)), 90))
    scheduler.add(Request("ab", list(range(9)), 90))
    for _ in range(4):
        scheduler.step()
    assert isinstance(ask_while_running(scheduler, client, Control(action="reset_prefix_cache")), Failed)
    assert isinstance(ask_while_running(scheduler, client, Control(action="pause")), Failed)
    assert isinstance(ask_while_running(scheduler, client, Abort(request_id="c")), Failed)
    assert isinstance(ask_while_running(scheduler, client, Abort(request_id="a")), Failed), "it would abort ab as well"
    assert isinstance(ask_while_running(scheduler, client, Abort(request_id="ab")), Done)
    scheduler.step()
    assert isinstance(ask_while_running(scheduler, client, Abort(request_id="a")), Done)
    while scheduler.step():
        pass
    assert isinstance(ask_while_running(scheduler, client, Control(action="reset_prefix_cache")), Done)
    scheduler.step()
    list(client.frames(0.5))
    assert client.mirror.counters.aborted == 2
    assert (client.mirror.ledger.state[1:] == BlockState.FREE).all()


def test_failed_thread_removes_the_hooks_and_reports_why(watched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, client, watching = watched

    def broken(*_: Any) -> None:
        raise RuntimeError("ours")

    client.begin()
    monkeypatch.setattr(watching._translator, "apply", broken)
    scheduler.add(Request("a", list(range(10)), 2))
    scheduler.step()
    assert client.goodbye(5.0) == "kvscope stopped watching: RuntimeError in the publishing thread: ours"
    while scheduler.step():
        pass
    assert not vars(scheduler).keys() & {"run_batch", "process_batch_result"}


def test_scheduler_that_ends_says_goodbye(watched: Any) -> None:
    scheduler, client, _ = watched
    client.begin()
    scheduler.add(Request("a", list(range(10)), 2))
    scheduler.run_event_loop()
    assert client.goodbye(5.0) == ""


def test_ranks_have_consecutive_endpoints() -> None:
    assert [endpoint_of_rank("ipc:///tmp/s", rank) for rank in range(2)] == ["ipc:///tmp/s", "ipc:///tmp/s-1"]
    assert endpoint_of_rank("tcp://10.0.0.1:7000", 2) == "tcp://10.0.0.1:7004"
    assert file_of_rank(Path("a.mcap"), 1) == Path("a-1.mcap")
    assert keys_for("ipc:///tmp/s", print) is None
    assert keys_for("tcp://127.0.0.1:7000", print) is None


def test_duplicate_rank_is_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    parallel = SimpleNamespace(pp_rank=0, attn_tp_rank=1, attn_cp_rank=0, dp_rank=None)
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", SimpleNamespace(get_parallel=lambda: parallel))
    scheduler = SimpleNamespace(server_args=SimpleNamespace(tp_size=2, pp_size=1))
    assert sglang_watch.watch(scheduler, "ipc:///tmp/nowhere") is None


def test_sglang_finds_the_plugin() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["sglang.srt.plugins"]["kvscope"].partition(":")
    assert getattr(import_module(module), name) is plugin.load


def test_plugin_does_nothing_without_an_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENDPOINT, raising=False)
    plugin.load()  # SGLang is not installed here
    assert "sglang" not in sys.modules


def test_plugin_hooks_the_constructor_of_schedulers(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[tuple[str, Callable[..., None], str]] = []
    registry = SimpleNamespace(
        HookRegistry=SimpleNamespace(register=lambda *given: registered.append(given)),
        HookType=SimpleNamespace(AFTER="after"),
    )
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", registry)
    monkeypatch.setenv(ENDPOINT, "ipc:///tmp/nowhere")
    plugin.load()
    ((target, hook, kind),) = registered
    assert (target.rpartition(".")[2], kind) == ("__init__", "after")
    hook(None, object())  # a failure to watch is logged, and SGLang goes on


def test_loading_the_plugin_imports_neither_sockets_nor_numpy() -> None:
    code = (
        "import sys; from kvscope_inside.sglang.plugin import load; load();"
        "print(sorted({'zmq', 'numpy', 'msgspec', 'torch', 'httpx'} & sys.modules.keys()))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"
