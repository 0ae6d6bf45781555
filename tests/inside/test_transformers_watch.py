"""`watch` publishes a manager of transformers, does not change what it computes, and restores it afterwards."""

from __future__ import annotations

import gc
import logging
import os
import re
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.engines.watching import FrameByFrame, wait_for
from tests.inside.test_transformers import differences, make_manager, tiny_model

import kvscope_inside
from kvscope_inside.transformers import transformers_recorder
from kvscope_inside.transformers.transformers_facts import LedgerRows
from kvscope_telemetry.errors import BadInput, EndpointInUse
from kvscope_telemetry.messages.commands import GetBlockText
from kvscope_telemetry.recordings.reader import Recording

PROMPTS = [[10 + at, *range(20, 36 + at)] for at in range(12)]


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/t"


@pytest.fixture
def manager() -> Iterator[Any]:
    made = make_manager(num_blocks=40)
    yield made
    made.stop()


def generated_tokens(
    manager: Any, prompts: list[list[int]] = PROMPTS, max_new_tokens: int = 16
) -> dict[str, list[int]]:
    """Return what the manager generates, by request."""
    if not manager.is_running():
        manager.start()
    manager.add_requests(prompts, max_new_tokens=max_new_tokens)
    found: dict[str, list[int]] = {}
    while len(found) < len(prompts):
        result = manager.get_result(timeout=30.0)
        assert result is not None, manager.background_thread_status.fatal_error
        found[result.request_id] = result.generated_tokens
    return found


def wait_until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_watching_transformers_does_not_change_its_tokens_and_a_mirror_follows(manager: Any, endpoint: str) -> None:
    plain = make_manager(num_blocks=40)
    expected = generated_tokens(plain)
    plain.stop()
    before = set(vars(manager))
    with kvscope_inside.watch(manager, endpoint) as watch:
        manager.start()
        wait_until(lambda: manager.batch_processor)
        wait_for(Path(endpoint.removeprefix("ipc://")) / "telemetry")
        watcher = FrameByFrame(endpoint)
        try:
            watcher.begin()
            assert generated_tokens(manager) == expected
            frames = list(watcher.frames(seconds=0.5))
            assert {event.kind for frame in frames for event in frame.events} >= {"admitted", "finished"}
            assert sum(frame.batch.num_decode_tokens for frame in frames) > 50
            mirror = watcher.mirror
            assert mirror.hello is not None
            assert mirror.hello.model.architecture == "LlamaForCausalLM"
            assert mirror.hello.capabilities.engine == "transformers"
            assert differences(manager.batch_processor, mirror, LedgerRows.of(manager.batch_processor.cache)) == []
            cached = int((mirror.ledger.hash != 0).argmax())
            (content,) = watcher.ask(GetBlockText(blocks=(cached,))).contents
            assert len(content.token_ids) == 4
            assert watch.endpoint == endpoint
            watch.close()
            assert watcher.goodbye(10.0) == ""
        finally:
            watcher.close()
    assert set(vars(manager)) - before <= {"current_batch"}, "hooks are left"
    assert len(generated_tokens(manager)) == len(PROMPTS)


def test_endpoint_comes_from_the_environment(
    manager: Any, endpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KVSCOPE_INSIDE", endpoint)
    with kvscope_inside.watch(manager) as watch:
        assert watch.endpoint == endpoint
    monkeypatch.delenv("KVSCOPE_INSIDE")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with kvscope_inside.watch(manager) as watch:
        assert watch.endpoint == f"ipc://{tmp_path}/kvscope"
    manager.start()


def test_invalid_endpoint_or_object_is_refused(manager: Any) -> None:
    with pytest.raises(BadInput, match="endpoint 'file:///x' is not accepted"):
        kvscope_inside.watch(manager, "file:///x")
    with pytest.raises(BadInput, match="Thread is not watched: a ContinuousBatchingManager"):
        kvscope_inside.watch(threading.current_thread())
    manager.start()


def test_watching_and_recording_can_begin_while_it_runs(manager: Any, endpoint: str, tmp_path: Path) -> None:
    generated_tokens(manager)
    record = tmp_path / "run.mcap"
    with kvscope_inside.watch(manager, endpoint, record):
        generated_tokens(manager)
    info = Recording.open(record).info
    assert info.hello is not None
    assert info.hello.capabilities.engine == "transformers"
    assert info.num_frames > 10


def test_stopped_manager_is_not_kept_in_memory(endpoint: str) -> None:
    manager = make_manager(num_blocks=40)
    with kvscope_inside.watch(manager, endpoint):
        generated_tokens(manager)
        cache = weakref.ref(manager.batch_processor.cache)
        gc.disable()
        try:
            manager.stop()  # collects garbage itself and frees the memory of the device
            assert cache() is None
        finally:
            gc.enable()
        first = generated_tokens(manager)
        assert len(first) == len(PROMPTS), "it does not go on with a new cache"
        manager.stop(keep_for_next_session=True)
        generated_tokens(manager)
        manager.stop()


@pytest.mark.parametrize(
    "name", ["_before_prepare", "_scheduled", "_record_batch", "_freed", "_ended", "touch", "_record"]
)
def test_failed_hook_ends_watching_and_generation_goes_on(
    name: str, manager: Any, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = make_manager(num_blocks=40)
    expected = generated_tokens(plain)
    plain.stop()
    lines: list[str] = []

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("ours")

    log = logging.getLogger("transformers.kvscope")
    monkeypatch.setattr(log, "error", lambda form, *about, **_: lines.append(form % about))
    watch = kvscope_inside.watch(manager, endpoint)
    monkeypatch.setattr(transformers_recorder.TransformersRecorder, name, broken)
    assert generated_tokens(manager) == expected
    assert len(lines) == 1
    assert re.search("kvscope stopped watching: RuntimeError in .*: ours; generation continues", lines[0])
    assert "stop" not in vars(manager)
    watch.close()


def test_endpoint_in_use_leaves_the_manager_unchanged(endpoint: str) -> None:
    first, second = make_manager(num_blocks=40), make_manager(num_blocks=40)
    with kvscope_inside.watch(first, endpoint):
        expected = generated_tokens(first)
        generated_tokens(second)
        before = set(vars(second))
        with pytest.raises(EndpointInUse):
            kvscope_inside.watch(stopped_with_cache(second), endpoint)
        assert set(vars(second)) == before
        assert not {"update_batch", "prepare_next_batch"} & set(vars(second.batch_processor))
        assert list(generated_tokens(second).values()) == list(expected.values())
        first.stop()
        second.stop()


def stopped_with_cache(manager: Any) -> Any:
    """Return the manager, stopped with its cache kept for a next session."""
    manager.stop(keep_for_next_session=True)
    return manager


def test_import_does_not_import_torch_or_transformers() -> None:
    code = "import kvscope_inside, sys; kvscope_inside.watch; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=True)
    assert done.stdout == "set()\n"


def test_example_of_the_documentation_runs_as_printed(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/guide/inside-transformers.md").read_text()
    (tmp_path / "batches.py").write_text(page.split("```python\n")[1].split("```")[0])
    tiny_model().save_pretrained(tmp_path / "model")
    record = tmp_path / "run.mcap"
    command = [
        sys.executable,
        str(tmp_path / "batches.py"),
        str(tmp_path / "model"),
        f"ipc://{tmp_path}/e",
        str(record),
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 40
    info = Recording.open(record).info
    assert info.hello.cache.block_size == 16
    assert info.hello.model.name == "model"
    assert info.num_frames > 50
