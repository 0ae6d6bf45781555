"""The thread that publishes: notes become frames in order; it ends by itself if a hook fails, and removes
everything.
"""

from __future__ import annotations

import logging
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.engines.watching import FrameByFrame
from tests.inside.conftest import hello_of

from kvscope_inside import CacheState, Publisher
from kvscope_inside.publishing_thread import PublishingThread
from kvscope_telemetry.errors import EndpointInUse
from kvscope_telemetry.messages.telemetry import Frame


class Engine:
    def step(self, number: int) -> int:
        return 2 * number


class Watched:
    """An engine whose steps are noted and published."""

    def __init__(self, endpoint: str, *, waits_for: int = 1000) -> None:
        self.engine, self.state = Engine(), CacheState(hello_of())
        self.told = SimpleNamespace(records=deque[int](), step_started_ns=0)
        self.thread = PublishingThread("Mine", logging.getLogger("mine"))
        with self.thread.installing_hooks():
            self.thread.hooks.after(self.engine, "step", self.note)
            self.publisher = Publisher(endpoint, self.state)
        self.watcher = FrameByFrame(endpoint)
        self.watcher.begin()
        self.ended: list[str] = []
        self.thread.start(
            self.publisher,
            endpoint,
            self.told,
            self.apply,
            can_publish=lambda number: number < waits_for,
            on_close=[lambda: self.ended.append("ended")],
        )

    def note(self, result: int, number: int) -> None:
        if number == 13:
            raise RuntimeError("ours")
        self.told.records.append(number)

    def apply(self, number: int) -> Frame:
        return self.state.frame(number, number)


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/t"


def test_steps_after_a_delayed_step_are_not_published_before_it(endpoint: str) -> None:
    watched = Watched(endpoint, waits_for=5)
    for number in range(1, 8):
        assert watched.engine.step(number) == 2 * number
    assert [frame.step for frame in watched.watcher.frames(0.3)] == [1, 2, 3, 4]
    watched.thread.close()
    watched.thread.close()
    assert watched.ended == ["ended"]
    assert "step" not in vars(watched.engine), "a hook is left on the engine"
    watched.watcher.close()


def test_last_step_is_published_when_the_publishing_thread_closes(endpoint: str) -> None:
    watched = Watched(endpoint)
    watched.engine.step(1)
    watched.thread.close("the end")
    assert [frame.step for frame in watched.watcher.frames(0.3)] == [1]
    watched.watcher.close()


def test_failed_hook_ends_publishing_and_the_engine_goes_on(endpoint: str, caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched(endpoint)
    assert watched.engine.step(13) == 26
    assert watched.watcher.goodbye(5).endswith("RuntimeError in step: ours")
    assert watched.engine.step(14) == 28
    assert not watched.told.records
    assert [record.message for record in caplog.records if record.levelno == logging.ERROR] == [
        "kvscope stopped watching: RuntimeError in step: ours; Mine continues"
    ]
    watched.watcher.close()


def test_failed_start_leaves_no_hook(endpoint: str) -> None:
    first = Watched(endpoint)
    engine, thread = Engine(), PublishingThread("Mine", logging.getLogger("mine"))

    def begin() -> None:
        with thread.installing_hooks():
            thread.hooks.after(engine, "step", lambda *_: None)
            Publisher(endpoint, CacheState(hello_of()))

    with pytest.raises(EndpointInUse):
        begin()
    assert "step" not in vars(engine)
    first.thread.close()
    first.watcher.close()


def test_engine_method_missing_for_a_hook_is_published_by_name(endpoint: str) -> None:
    thread, state = PublishingThread("Mine", logging.getLogger("mine")), CacheState(hello_of())
    thread.hooks.before(Engine(), "swap", lambda *_: None)
    publisher = Publisher(endpoint, state)
    watcher = FrameByFrame(endpoint)
    watcher.begin()
    told = SimpleNamespace(records=deque([1]), step_started_ns=0)
    thread.start(publisher, endpoint, told, lambda number: state.frame(number, number))
    (frame,) = watcher.frames(0.3)
    assert [event.cause for event in frame.events] == [
        "this version of Mine does not have swap: what they report is unknown"
    ]
    thread.close()
    watcher.close()
