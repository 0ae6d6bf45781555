"""For tests of the desktop: offscreen Qt, nothing left behind by any test, and a scripted engine to show.

A test that leaves a window, a thread, a running timer or a child process fails: the next one would suffer from it.
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
from tests.app.window_driver import load_only
from tests.warm_python import Piped, WarmPython
from zmq.utils.garbage import GarbageCollectorThread

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
    """A source whose updates a test pushes; it notes the commands it was sent."""

    name = "ipc:///fake/telemetry"

    def __init__(self):
        self.updates = deque()
        self.replies = deque()
        self.sent = []
        self.is_closed = False
        self.num_resyncs = 0
        self.status = SourceStatus(SourceState.CONNECTING)

    def take_update(self):
        return self.updates.popleft() if self.updates else None

    def send(self, command):
        self.sent.append(command)

    def take_replies(self):
        replies, self.replies = list(self.replies), deque()
        return replies

    def resync(self):
        self.num_resyncs += 1

    def close(self):
        self.is_closed = True


FULL = KVGroup(kind="full", num_layers=2, block_bytes=368_640)
STATE = KVGroup(kind="state", num_layers=6, block_size=4096, block_bytes=1 << 20)


class FakeEngine:
    """A ledger and requests that a test changes, and `source` tells of, with lower tiers or without."""

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
        self.begin(epoch)

    def begin(self, epoch):
        """A new engine start, with a snapshot of all there is."""
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
        self.live()

    def live(self):
        """The source says it is live."""
        self.source.status = SourceStatus(SourceState.LIVE, frames_received=self.seq, latency_ns=400_000)

    def say(self, state, reason=""):
        """The source is in another state."""
        self.source.status = SourceStatus(state, reason)

    def hold(self, ids, owner=1, filled=16, state=BlockState.ACTIVE, ref_count=1, step=None, **more):
        """Blocks `ids` are written like this; a frame tells, with what `more` the update has."""
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
    ):
        """A request appears, or changes; `blocks` are its table of a KV group."""
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
            num_cached_tokens=np.array([0], "<u4").tobytes(),
            num_output_tokens=np.array([num_output_tokens], "<u4").tobytes(),
            num_preemptions=np.array([0], "<u2").tobytes(),
            table_start=np.array([0], "<u4").tobytes(),
            table_count=np.array([len(blocks)], "<u4").tobytes(),
            table_blocks=np.array(blocks, "<u4").tobytes(),
            table_group=np.array([group], "<u4").tobytes() if group else b"",
        )
        self.frame((), new_requests=(self.requests[number],) if is_new else (), requests=(rows,))

    def frame(self, ids=(), counters=None, **more):
        """One frame with the rows `ids` of the ledger."""
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
        self.live()

    def progress(self, stage, done=0, total=0, unit="", detail=""):
        """The engine loads."""
        self.source.updates.append(
            Update(progress=Progress(stage=stage, done=done, total=total, unit=unit, detail=detail))
        )

    def event(self, **fields):
        """An event in a frame of its own."""
        self.frame((), events=(Event(time_ns=self.step * 1_000_000, **fields),))

    def memory(self, **fields):
        """A memory breakdown."""
        message = MemoryBreakdown(epoch=self.epoch, time_ns=1, **fields)
        self.source.updates.append(Update(memory=message))

    def reading(self, used_share=-1.0, latencies=(), figures=()):
        """The engine's metrics were read."""
        reading = Reading(epoch=self.epoch, time_ns=1, used_share=used_share, latencies=latencies, figures=figures)
        self.source.updates.append(Update(readings=(reading,)))

    def heartbeat(self):
        """Half a second went by."""
        beat = Heartbeat(epoch=self.epoch, time_ns=1, seq=self.seq, step=self.step)
        self.source.updates.append(Update(heartbeat=beat))

    def snapshot(self):
        return Snapshot(
            hello=self.hello, seq=self.seq, step=self.step, time_ns=1, blocks=self.ledger.pack_all(), requests_info=()
        )


ENDING_S = 60.0
WAIT_MS = 120_000


@pytest.fixture(scope="session")
def qapp_args():
    return ["kvscope-tests"]


@pytest.fixture(scope="session", autouse=True)
def _waits_are_long():
    """pytest-qt gives up after five seconds unless it is told otherwise; nothing waits this long when all is well."""
    for wait in (QtBot.waitUntil, QtBot.waitSignal, QtBot.waitSignals, QtBot.waitActive, QtBot.waitExposed):
        wait.__kwdefaults__["timeout"] = WAIT_MS


@pytest.fixture(autouse=True)
def _nobodys_own_files(tmp_path, monkeypatch):
    """What the person who runs the tests keeps is neither read nor written, by us or by processes we start."""
    for name in ("CONFIG", "DATA", "CACHE", "STATE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / "home" / name.lower()))


RING = "import os; os.setpgid(0, 0); from kvscope_telemetry.recordings.ring_process import main; main()"


@pytest.fixture(scope="session")
def _warm_rings():
    """Started with the first ring."""
    started = []

    def warm():
        started.extend([] if started else [WarmPython("kvscope_telemetry.recordings.ring_process")])
        return started[0]

    yield warm
    for each in started:
        each.close()


@pytest.fixture(autouse=True)
def _rings_start_warm(_warm_rings, monkeypatch):
    """Its process imports for longer than most tests last. tests/telemetry/recordings starts it cold."""
    popen = SimpleNamespace(Popen=lambda *_, **__: Piped(_warm_rings(), ["-c", RING]), PIPE=subprocess.PIPE)
    monkeypatch.setattr("kvscope_telemetry.recordings.ring_client.subprocess", popen)


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(qapp, monkeypatch):
    """Cyclic garbage is collected between tests, never in the middle of a paint; then all must be gone.

    What is there after that was loaded, by this test or one of another folder, and stays: the next need not look
    through it again, torch and transformers among it.
    """
    started = _note_started_timers(monkeypatch)
    threads_before = set(threading.enumerate())
    gc.disable()
    yield
    if QGuiApplication.keyboardModifiers() != Qt.KeyboardModifier.NoModifier:  # Qt remembers those of the last key
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
    assert not _running(started), "a timer was left running"
    others = [t for t in threading.enumerate() if t not in threads_before and "pytest" not in t.name]
    others = [t for t in others if not isinstance(t, GarbageCollectorThread)]  # one a process, pyzmq's own
    for thread in others:
        thread.join(ENDING_S)  # one that was given up ends when it next looks
    left = [thread for thread in others if thread.is_alive()]
    assert not left, f"threads were left running: {left}"


def _note_started_timers(monkeypatch):
    """Weak references: one without a parent goes with the last who holds it, and what holds it here would be a leak."""
    started = []
    start = QTimer.start

    def noted(timer, *arguments):
        if isinstance(timer, QTimer):
            started.append(weakref.ref(timer))
        return start(timer, *arguments)

    monkeypatch.setattr(QTimer, "start", noted)
    return started


def _running(started):
    import shiboken6

    timers = [timer for reference in started if (timer := reference()) is not None]
    return [t for t in timers if shiboken6.isValid(t) and t.isActive() and not t.isSingleShot() and t.parent() is None]


@pytest.fixture
def make_engine():
    """Scripted engines."""
    return FakeEngine


@pytest.fixture
def engine():
    """A scripted engine with 64 blocks of 16 slots."""
    return FakeEngine()


@pytest.fixture
def make_session():
    """Sessions of scripted engines that have taken what there is; driven by `poll()`, closed at the end."""
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
    """A session of `engine` that has taken its snapshot."""
    return make_session(engine)


@pytest.fixture
def poll():
    """Take everything an engine told: `poll(session)`."""
    return poll_all


def poll_all(session):
    session.poll()
    while session.source.updates:
        session.poll()


@pytest.fixture
def settings(tmp_path):
    """Settings of this test alone."""
    return QSettings(str(tmp_path / "settings.ini"), QSettings.Format.IniFormat)


@pytest.fixture
def themes(qapp, settings):
    """The dark theme, applied."""
    from kvscope_app.ui.theming.theme_manager import ThemeManager

    keeper = ThemeManager(qapp, settings, "dark")
    yield keeper
    keeper.deleteLater()


@pytest.fixture
def make_window(qtbot, themes, settings):
    """Main windows, shown. Docked views take a second to load: all are `with_views=True`, some `with_views=NAMES`."""
    from kvscope_app.session_window import Openers
    from kvscope_app.window.main_window import MainWindow

    def make(session, with_views=False, keeper=None, size=(1200, 800), **openers):
        window = MainWindow(session, themes, settings, keeper, Openers(**openers))
        if with_views is not True:
            load_only(window, with_views or ())
        window.resize(*size)
        if with_views:
            with qtbot.waitSignal(window.views_loaded, timeout=120_000):
                window.show()
        else:
            window.show()
        qtbot.addWidget(window)
        return window

    return make
