"""Fixtures of the desktop tests: offscreen Qt, leak checks, and a scripted engine.

A test that leaves a window, a thread, a running timer or a child process fails, because it would disturb the next one.
"""

from __future__ import annotations

import gc
import os
import subprocess
import threading
import weakref
from collections import deque
from types import SimpleNamespace

os.environ["QT_QPA_PLATFORM"] = "offscreen"

import numpy as np
import pytest
from PySide6.QtCore import QCoreApplication, QEvent, QSettings, Qt, QTimer
from PySide6.QtGui import QGuiApplication
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QApplication, QWidget
from pytestqt.qtbot import QtBot
from tests.app.window_driver import load_only_views
from tests.warm_python import PipedProcess, WarmPython
from zmq.utils.garbage import GarbageCollectorThread

from kvscope_app.window.dialogs import found_engines
from kvscope_telemetry.ledger import COLUMNS, BlockState, Ledger, Tier
from kvscope_telemetry.messages.capabilities import OWN_ENGINE
from kvscope_telemetry.messages.telemetry import (
    CacheInfo,
    Counters,
    DeviceInfo,
    Event,
    Heartbeat,
    Hello,
    KVGroup,
    MemoryBreakdown,
    ModelInfo,
    Progress,
    Reading,
    RequestInfo,
    RequestRows,
    Snapshot,
)
from kvscope_telemetry.source import SERIES_FIELDS, SourceState, SourceStatus, Update


class FakeSource:
    """Source whose updates are set by a test; it stores the commands it was sent."""

    name = "ipc:///fake/telemetry"

    def __init__(self):
        self.updates = deque()
        self.replies = deque()
        self.sent = []
        self.is_closed = False
        self.num_resyncs = 0
        self.status = SourceStatus(SourceState.CONNECTING)

    def poll_update(self):
        return self.updates.popleft() if self.updates else None

    def send(self, command):
        self.sent.append(command)

    def poll_replies(self):
        replies, self.replies = list(self.replies), deque()
        return replies

    def resync(self):
        self.num_resyncs += 1

    def close(self):
        self.is_closed = True


FULL = KVGroup(kind="full", num_layers=2, block_bytes=368_640)
STATE = KVGroup(kind="state", num_layers=6, block_size=4096, block_bytes=1 << 20)


class FakeEngine:
    """Ledger and requests that a test changes, published through `source`, with or without lower tiers."""

    def __init__(
        self,
        num_blocks=64,
        block_size=16,
        epoch=7,
        num_host=0,
        num_disk=0,
        device="cpu",
        capabilities=OWN_ENGINE,
        num_states=0,
    ):
        self.capabilities = capabilities
        self.source = FakeSource()
        self.num_blocks, self.num_host, self.num_disk, self.device = num_blocks, num_host, num_disk, device
        self.num_states = num_states
        self.ledger = Ledger(num_blocks + num_host + num_disk + num_states)
        self.ledger.tier[num_blocks:] = Tier.HOST
        self.ledger.tier[num_blocks + num_host :] = Tier.DISK
        self.ledger.tier[num_blocks + num_host + num_disk :] = Tier.STATES
        self.ledger.group[num_blocks + num_host + num_disk :] = 1
        self.block_size = block_size
        self.step = 0
        self.requests = {}
        self.tables = {}
        self.restart(epoch)

    def restart(self, epoch):
        """Start a new engine run, with a snapshot of the current state."""
        self.epoch, self.seq = epoch, 0
        self.hello = Hello(
            epoch=epoch,
            time_ns=1,
            wall_time_ns=1,
            model=ModelInfo(name="fake-135M", dtype="float32"),
            cache=CacheInfo(
                num_blocks=self.num_blocks,
                block_size=self.block_size,
                block_bytes=368_640,
                num_host_blocks=self.num_host,
                num_disk_blocks=self.num_disk,
                num_states=self.num_states,
                groups=(FULL, STATE) if self.num_states else (),
                prefix_caching=True,
                has_parents=True,
            ),
            device=DeviceInfo(kind=self.device, name="Test CPU"),
            capabilities=self.capabilities,
        )
        self.source.updates.append(Update(snapshot=self.snapshot()))
        self.set_live()

    def set_live(self):
        """Set the source's state to live."""
        self.source.status = SourceStatus(SourceState.LIVE, frames_received=self.seq, latency_ns=400_000)

    def set_status(self, state, reason=""):
        """Set the source's state."""
        self.source.status = SourceStatus(state, reason)

    def write_blocks(self, ids, owner=1, filled=16, state=BlockState.ACTIVE, ref_count=1, step=None, **more):
        """Write the blocks `ids` and publish a frame; `more` are further fields of the update."""
        ids = np.asarray(ids, np.uint32)
        for name, value in (("state", state), ("owner", owner), ("filled", filled), ("ref_count", ref_count)):
            getattr(self.ledger, name)[ids] = value
        self.ledger.last_used_step[ids] = self.step + 1 if step is None else step
        self.frame(ids, **more)

    def request(
        self,
        number,
        blocks=(),
        state=1,
        num_prompt_tokens=20,
        num_output_tokens=4,
        max_tokens=64,
        adapter="",
        group=0,
        client=0,
        num_cached_tokens=0,
    ):
        """Add or change a request; `blocks` are its table of one KV group."""
        is_new = number not in self.requests
        self.requests[number] = RequestInfo(
            number=number,
            request_id=f"chat-{number}",
            arrival_ns=1,
            num_prompt_tokens=num_prompt_tokens,
            max_tokens=max_tokens,
            adapter=adapter,
            client=client,
        )
        self.tables[number] = tuple(blocks)
        rows = RequestRows(
            number=np.array([number], "<u4").tobytes(),
            state=np.array([state], "u1").tobytes(),
            num_computed_tokens=np.array([num_prompt_tokens + num_output_tokens], "<u4").tobytes(),
            num_cached_tokens=np.array([num_cached_tokens], "<u4").tobytes(),
            num_output_tokens=np.array([num_output_tokens], "<u4").tobytes(),
            num_preemptions=np.array([0], "<u2").tobytes(),
            table_start=np.array([0], "<u4").tobytes(),
            table_count=np.array([len(blocks)], "<u4").tobytes(),
            table_blocks=np.array(blocks, "<u4").tobytes(),
            table_group=np.array([group], "<u4").tobytes() if group else b"",
        )
        self.frame((), new_requests=(self.requests[number],) if is_new else (), requests=(rows,))

    def frame(self, ids=(), counters=None, **more):
        """Publish one frame with the rows `ids` of the ledger."""
        self.step += 1
        self.seq += 1
        ids = np.asarray(ids, np.uint32)
        series = {name: np.zeros(1, np.int64) for name in SERIES_FIELDS}
        for name, value in (("seq", self.seq), ("step", self.step), ("time_ns", self.step * 1_000_000)):
            series[name][0] = value
        columns = {name: getattr(self.ledger, name)[ids].copy() for name in COLUMNS}
        self.source.updates.append(
            Update(block_ids=ids, block_columns=columns, series=series, counters=counters or Counters(), **more)
        )
        self.set_live()

    def progress(self, stage, done=0, total=0, unit="", detail=""):
        """Publish the progress of loading."""
        self.source.updates.append(
            Update(progress=Progress(stage=stage, done=done, total=total, unit=unit, detail=detail))
        )

    def event(self, **fields):
        """Publish an event in its own frame."""
        self.frame((), events=(Event(time_ns=self.step * 1_000_000, **fields),))

    def memory(self, **fields):
        """Publish a memory breakdown."""
        message = MemoryBreakdown(epoch=self.epoch, time_ns=1, **fields)
        self.source.updates.append(Update(memory=message))

    def reading(self, used_share=-1.0, latencies=(), figures=()):
        """Publish a reading of the engine's metrics."""
        reading = Reading(epoch=self.epoch, time_ns=1, used_share=used_share, latencies=latencies, figures=figures)
        self.source.updates.append(Update(readings=(reading,)))

    def heartbeat(self):
        """Publish a heartbeat."""
        beat = Heartbeat(epoch=self.epoch, time_ns=1, seq=self.seq, step=self.step)
        self.source.updates.append(Update(heartbeat=beat))

    def snapshot(self):
        return Snapshot(
            hello=self.hello, seq=self.seq, step=self.step, time_ns=1, blocks=self.ledger.pack_all(), requests_info=()
        )


ENDING_S = 60.0
WAIT_MS = 120_000


@pytest.fixture(autouse=True)
def _finds_no_local_engines(monkeypatch):
    """The attach dialog must not find what else runs on this machine."""
    monkeypatch.setattr(found_engines, "find_local_engines", tuple)


@pytest.fixture(scope="session")
def qapp_args():
    return ["kvscope-tests"]


@pytest.fixture(scope="session", autouse=True)
def _long_qtbot_timeouts():
    """Raise pytest-qt's timeouts of five seconds, which a slow machine exceeds."""
    for wait in (QtBot.waitUntil, QtBot.waitSignal, QtBot.waitSignals, QtBot.waitActive, QtBot.waitExposed):
        wait.__kwdefaults__["timeout"] = WAIT_MS


@pytest.fixture(autouse=True)
def _separate_user_folders(tmp_path, monkeypatch):
    """Keep the user's own files out of the tests and of the processes they start."""
    for name in ("CONFIG", "DATA", "CACHE", "STATE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / "home" / name.lower()))


RING = "import os; os.setpgid(0, 0); from kvscope_telemetry.recordings.ring_process import main; main()"


@pytest.fixture(scope="session")
def _warm_history_process():
    """Function that returns a warm Python process for history writers, started at the first call."""
    started = []

    def warm():
        started.extend([] if started else [WarmPython("kvscope_telemetry.recordings.ring_process")])
        return started[0]

    yield warm
    for each in started:
        each.close()


@pytest.fixture(autouse=True)
def _start_history_processes_warm(_warm_history_process, monkeypatch):
    """Start history processes from a warm interpreter, because their imports take longer than most tests.

    `tests/telemetry/recordings` tests the cold start.
    """
    popen = SimpleNamespace(
        Popen=lambda *_, **__: PipedProcess(_warm_history_process(), ["-c", RING]), PIPE=subprocess.PIPE
    )
    monkeypatch.setattr("kvscope_telemetry.recordings.ring_client.subprocess", popen)


@pytest.fixture(autouse=True)
def _check_for_leaks(qapp, monkeypatch):
    """Fail a test that leaves windows, timers or threads behind.

    Cyclic garbage is collected between tests, never in the middle of a paint. Objects that remain were loaded by a test
    and stay (torch and transformers among them); they are frozen, so that the next collection need not traverse them.
    """
    started = _record_started_timers(monkeypatch)
    threads_before = set(threading.enumerate())
    gc.disable()
    yield
    if (
        QGuiApplication.keyboardModifiers() != Qt.KeyboardModifier.NoModifier
    ):  # Qt remembers the modifiers of the last key
        QTest.keyClick(QWidget(), Qt.Key.Key_unknown)
    for widget in QApplication.topLevelWidgets():
        widget.close()
        widget.deleteLater()
    # processEvents does not deliver deferred deletes.
    QCoreApplication.sendPostedEvents(None, QEvent.Type.DeferredDelete)
    QCoreApplication.processEvents()
    gc.enable()
    gc.collect()
    gc.freeze()
    assert not [w for w in QApplication.topLevelWidgets() if w.isVisible()], "a window was left open"
    assert not _running_timers(started), "a timer was left running"
    others = [t for t in threading.enumerate() if t not in threads_before and "pytest" not in t.name]
    others = [t for t in others if not isinstance(t, GarbageCollectorThread)]  # one per process, pyzmq's own
    for thread in others:
        thread.join(ENDING_S)  # a cancelled thread ends when it polls next
    left = [thread for thread in others if thread.is_alive()]
    assert not left, f"threads were left running: {left}"


def _record_started_timers(monkeypatch):
    """Record started timers by weak references, so that a timer without a parent can still be deleted."""
    started = []
    start = QTimer.start

    def noted(timer, *arguments):
        if isinstance(timer, QTimer):
            started.append(weakref.ref(timer))
        return start(timer, *arguments)

    monkeypatch.setattr(QTimer, "start", noted)
    return started


def _running_timers(started):
    import shiboken6

    timers = [timer for reference in started if (timer := reference()) is not None]
    return [t for t in timers if shiboken6.isValid(t) and t.isActive() and not t.isSingleShot() and t.parent() is None]


@pytest.fixture
def make_engine():
    """Class of scripted engines."""
    return FakeEngine


@pytest.fixture
def engine():
    """Scripted engine with 64 blocks of 16 slots."""
    return FakeEngine()


@pytest.fixture
def make_session():
    """Function that returns a session of a scripted engine that has applied all its updates; driven by `poll()`."""
    from kvscope_app.session.session import Session

    sessions = []

    def make(engine):
        session = Session(engine.source)
        sessions.append(session)
        poll_all(session)
        return session

    yield make
    for session in sessions:
        session.close()
        session.deleteLater()


@pytest.fixture
def session(engine, make_session):
    """Session of `engine` that has applied its snapshot."""
    return make_session(engine)


@pytest.fixture
def poll():
    """Function `poll(session)` that applies all updates of an engine."""
    return poll_all


def poll_all(session):
    session.poll()
    while session.source.updates:
        session.poll()


@pytest.fixture
def settings(tmp_path):
    """Settings of this test."""
    return QSettings(str(tmp_path / "settings.ini"), QSettings.Format.IniFormat)


@pytest.fixture
def themes(qapp, settings):
    """Theme manager with the dark theme applied."""
    from kvscope_app.ui.theming.theme_manager import ThemeManager

    theme_manager = ThemeManager(qapp, settings, "dark")
    yield theme_manager
    theme_manager.deleteLater()


@pytest.fixture
def make_window(qtbot, themes, settings):
    """Function that opens a main window.

    Loading all docked views takes a second: `with_views` is True or their names.
    """
    from kvscope_app.session_window import Openers
    from kvscope_app.window.main_window import MainWindow

    def make(session, with_views=False, supervisor=None, size=(1200, 800), **openers):
        window = MainWindow(session, themes, settings, supervisor, Openers(**openers))
        if with_views is not True:
            load_only_views(window, with_views or ())
        window.resize(*size)
        if with_views:
            with qtbot.waitSignal(window.views_loaded, timeout=120_000):
                window.show()
        else:
            window.show()
        qtbot.addWidget(window)
        return window

    return make
