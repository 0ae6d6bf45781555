"""The running desktop: the application, its windows, and their orderly shutdown."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import time
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from PySide6.QtCore import QEvent, QObject, QSettings, QTimer
from PySide6.QtGui import QPixmapCache
from PySide6.QtWidgets import QApplication, QWidget

from kvscope_app.application import make_application
from kvscope_app.command_line import PROGRAM, Options
from kvscope_app.engine_launcher.engine_process import EngineProcess
from kvscope_app.engine_launcher.engine_supervisor import EngineSupervisor
from kvscope_app.linked_times import LinkedTimes
from kvscope_app.recent_recordings.recent_files import add_recent
from kvscope_app.recording.crashed_histories import CrashedHistories
from kvscope_app.session.group import SessionGroup
from kvscope_app.session.recording.rings import make_ring
from kvscope_app.session.session import Session
from kvscope_app.session_window import Openers, SessionWindow
from kvscope_app.setting_names import window_group
from kvscope_app.settings.layout_value import WindowLayout, read_layout
from kvscope_app.ui.theming.apply_theme import clear_style_cache
from kvscope_app.ui.theming.theme_manager import ThemeManager
from kvscope_app.window import dock_state
from kvscope_app.window.dock_layouts.arrangement import KNOWN_NAMES
from kvscope_app.window.error_notices import ErrorNotices, InternalErrors
from kvscope_app.window.main_window import MainWindow, window_kind
from kvscope_app.window.override_errors import call_with_exception_objects
from kvscope_app.window.window_slots import WindowSlots
from kvscope_telemetry.addresses import Address, WatchedSource
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.commands import Control
from kvscope_telemetry.printable import print_line
from kvscope_telemetry.recordings.sample import is_sample
from kvscope_telemetry.source import PastSource, Source
from kvscope_telemetry.termination import handling_signals

if TYPE_CHECKING:
    from kvscope_app.compare.compare_window import CompareWindow
    from kvscope_app.fleet.fleet_manager import FleetManager
    from kvscope_app.playback.recording_opening import RecordingOpening
    from kvscope_telemetry.playback.playback_source import PlaybackSource
    from kvscope_telemetry.recordings.reader import Recording

STARTUP_PROBE: Final = "KVSCOPE_STARTUP_PROBE"
"""Environment variable with a monotonic time in ns, for measuring the startup.

The seconds from that time until the first window is exposed are printed as JSON.
"""

_HISTORY_DELAY_MS: Final = 150
_PAST_S: Final = 3600
"""Seconds of the past to read of an engine whose past is known (`Address.open`), unless its address says how many."""
_CLOSE_SESSION_DELAY_MS: Final = 500
"""Delay from closing a window to closing its session, so that the session's last command to the engine is sent."""
_CLEANUP_DELAY_MS: Final = 200
"""Delay after closing a window until its widgets are deleted and caches can be cleared."""


class Desktop(QObject):
    """Opens a window for each engine or recording. The application ends when the last window closes."""

    def __init__(
        self, app: QApplication, options: Options, settings: QSettings, errors: InternalErrors | None = None
    ) -> None:
        """Create a desktop without windows. Errors collected by `errors` are shown in the active window."""
        super().__init__(app)
        self._settings, self._options = settings, options
        self._slots = WindowSlots(Path(settings.fileName()))
        self.themes = ThemeManager(app, settings, options.theme)
        self._has_reported_unsaved = False
        self.themes.settings.write_failed.connect(self._report_unsaved)
        self.error_notices = None if errors is None else ErrorNotices(errors, self.themes, self)
        self.windows: list[MainWindow] = []
        self.comparisons: list[CompareWindow] = []
        self.failures: list[str] = []
        """Error messages of recordings on the command line that could not be opened."""
        self.initial_layout: WindowLayout | None = None
        """Layout for new windows, or None for the saved layout of each window."""
        self.sessions = SessionGroup(self)
        self.linked_times = LinkedTimes(self)
        self._crashed_histories: CrashedHistories | None = None
        self._fleets: FleetManager | None = None
        self._addresses: weakref.WeakKeyDictionary[Source, Address] = weakref.WeakKeyDictionary()
        """Addresses of watched sources. An address includes the key file and the access options, which a
        source's name lacks.
        """
        self._cleanup_timer = QTimer(self, singleShot=True, interval=_CLEANUP_DELAY_MS)
        self._cleanup_timer.timeout.connect(partial(release_caches, app))

    def open_window(
        self, address: Address | str, engine: EngineProcess | None = None, key: Path | None = None
    ) -> MainWindow:
        """Open a window on the engine at `address`. `key` is the key file of a kvscope engine.

        `engine` is the engine's process if kvscope started it.
        """
        address = address if isinstance(address, Address) else Address(address, key)
        source = address.open(past_s=_PAST_S)
        self._addresses[source] = address
        window = self.watch(source, None if engine is None else EngineSupervisor(engine, self))
        # After the first paint, so that the window does not wait for the disk.
        QTimer.singleShot(_HISTORY_DELAY_MS, self, partial(self._start_disk_history, source))
        return window

    def _start_disk_history(self, source: WatchedSource) -> None:
        session = self.sessions.find_by_source(source)
        if session is not None:
            from kvscope_app.session.recording.disk_history import DiskHistory

            past_s = source.past_s if isinstance(source, PastSource) else 0
            session.set_disk_history(DiskHistory(make_ring(self._settings, past_s), source.set_sink))

    def offer_crashed_histories(self) -> CrashedHistories:
        """Offer once to open the histories of crashed sessions, in the first window that shows data."""
        self._crashed_histories = CrashedHistories(self, lambda: self.windows, self.open_recording)
        return self._crashed_histories

    def open_recording(
        self, recording: Recording, at_s: float | None = None, selects: Sequence[tuple[str, int]] = ()
    ) -> MainWindow:
        """Play `recording`. With `at_s`, pause at that second. `selects` are pairs (kind, number) to select."""
        from kvscope_telemetry.playback.playback_source import PlaybackSource  # imported late: rarely needed

        if recording.path.is_file() and not is_sample(recording.path):
            add_recent(self.themes.settings, recording.path)
        source = PlaybackSource(recording)
        window = self.watch(source)
        if at_s is not None:
            timeline = window.session.timeline
            timeline.pause()
            timeline.go_to(recording.start_ns + round(at_s * 1e9))
        if selects:
            _select_once_shown(window, source, selects)
        return window

    def open_when_ready(
        self, opening: RecordingOpening, at_s: float | None = None, selects: Sequence[tuple[str, int]] = ()
    ) -> QWidget:
        """Play a recording as soon as it is loaded. A small window shows the progress, unless it is loaded already."""
        if opening.recording is not None:
            return self.open_recording(opening.recording, at_s, selects)
        from kvscope_app.playback.opening_window import OpeningWindow

        window = OpeningWindow(opening)
        window.opened.connect(partial(self.open_recording, at_s=at_s, selects=selects))
        window.failed.connect(self._report_failure)
        window.show()
        return window

    def compare(self, a: Recording, b: Recording, comparing_window: SessionWindow | None = None) -> CompareWindow:
        """Open a window that compares recordings `a` and `b`. `comparing_window` is the window that shows `a`, if any.

        If that window is live, the comparison closes with it.
        """
        from kvscope_app.compare.compare_window import CompareWindow  # imported late: loads plots
        from kvscope_app.compare.saved_geometry import COMPARISON_WINDOW, restore_geometry, save_geometry

        is_live = comparing_window is not None and not comparing_window.session.timeline.is_file
        names = ("live" if is_live else a.path.name, b.path.name)
        slot = self._slots.acquire(COMPARISON_WINDOW)
        window = CompareWindow(a, b, names, self.themes)
        group = window_group(COMPARISON_WINDOW, slot)
        restore_geometry(window, self._settings, group)
        window.closing.connect(partial(save_geometry, settings=self._settings, group=group))
        window.closing.connect(lambda _: self._slots.release(COMPARISON_WINDOW, slot))
        self.comparisons.append(window)
        window.closing.connect(self._on_comparison_closed)
        if comparing_window is not None and is_live:
            comparing_window.closing.connect(window.close)
        window.show()
        return window

    def compare_when_ready(self, openings: Sequence[RecordingOpening]) -> None:
        from kvscope_app.playback.opening_window import OpeningWindow

        ready: dict[int, Recording] = {}

        def add(index: int, recording: Recording) -> None:
            ready[index] = recording
            if len(ready) == len(openings):
                self.compare(ready[0], ready[1])

        for index, opening in enumerate(openings):
            if opening.recording is not None:
                add(index, opening.recording)
                continue
            window = OpeningWindow(opening)
            window.opened.connect(partial(add, index))
            window.failed.connect(self._report_failure)
            window.show()

    def _on_comparison_closed(self, window: CompareWindow) -> None:
        if window in self.comparisons:
            self.comparisons.remove(window)
            window.deleteLater()
            self._cleanup_timer.start()

    def _report_unsaved(self, reason: str) -> None:
        if self._has_reported_unsaved:
            return
        self._has_reported_unsaved = True
        detail = f"{Path(self._settings.fileName()).parent}: {reason}. Changes are kept until kvscope quits."
        print(f"{PROGRAM}: settings cannot be saved in {detail}", file=sys.stderr)
        if self.windows:
            self.windows[-1].banner.show_message("Settings cannot be saved", detail, is_temporary=True)

    def _report_failure(self, reason: str) -> None:
        self.failures.append(reason)
        print_line(f"{PROGRAM}: {reason}", file=sys.stderr)

    def attach(self, address: Address | str) -> None:
        self.open_window(address)

    @property
    def fleets(self) -> FleetManager:
        if self._fleets is None:
            from kvscope_app.fleet.fleet_manager import FleetManager  # imported late: fleets are rare

            self._fleets = FleetManager(self.themes, self._settings, self._slots, self.show_engine, self)
        return self._fleets

    def open_fleet(self) -> None:
        watched = (self._addresses.get(session.source) for session in self.sessions)
        self.fleets.open_known(tuple(address for address in watched if address is not None))

    def show_engine(self, address: Address) -> None:
        """Raise the window for `address`, or open one. Raises BadInput for an invalid address."""
        for window in self.windows:
            if self._addresses.get(window.session.source) == address:
                window.show()
                window.raise_()
                window.activateWindow()
                return
        self.attach(address)

    def close(self) -> None:
        if self._fleets is not None:
            self._fleets.close()
        if self._crashed_histories is not None:
            self._crashed_histories.stop()
        for comparison in list(self.comparisons):
            comparison.close()
        self._settings.sync()
        if self._settings.status() is not QSettings.Status.NoError:
            self._report_unsaved("the file cannot be written")
        self.sessions.close()
        self._slots.close()

    def watch(self, source: Source, supervisor: EngineSupervisor | None = None) -> MainWindow:
        session = self.sessions.open(source)
        kind = window_kind(session)
        slot = self._slots.acquire(kind)
        failed_before = self._slots.start_opening(kind, slot)
        kept_layout = dock_state.back_up_layout(self._settings, window_group(kind, slot)) if failed_before else None
        openers = Openers(self.attach, self.open_recording, self.compare, self.open_fleet)
        window = MainWindow(session, self.themes, self._settings, supervisor, openers, slot)
        window.alarms.set_run_rules(self._options.alarms, self._options.alarm_webhook)
        dock_state.cascade(window, self.windows, window.has_saved_geometry)
        window.closing.connect(self._on_window_closed)
        window.views_loaded.connect(exclude_from_collection)
        if self.initial_layout is not None:
            window.views_loaded.connect(partial(window.layouts.apply, self.initial_layout, "opening the layout"))
        window.views_loaded.connect(partial(self._slots.finish_opening, kind, slot))
        self.windows.append(window)
        self.linked_times.add(window)
        session.start()
        window.show()
        if failed_before:
            location = f" The saved layout is kept in {kept_layout}." if kept_layout is not None else ""
            detail = f"The last start of kvscope ended before the window was open.{location}"
            window.banner.show_message("The window uses the default layout", detail)
        return window

    def _on_window_closed(self, window: MainWindow) -> None:
        if window not in self.windows:
            return
        self.windows.remove(window)
        self._slots.release(window_kind(window.session), window.slot)
        self._show_closing_message(window.closing_message)
        window.deleteLater()
        if window.supervisor is None:
            self._close_session(window.session)
        else:
            self._release_engine(window.supervisor, window.session)
        self._cleanup_timer.start()

    def _show_closing_message(self, closing_message: str) -> None:
        if closing_message:
            print_line(f"{PROGRAM}: {closing_message}", file=sys.stderr)
            if self.windows:
                self.windows[-1].banner.show_message("A closed window could not save everything", closing_message)

    def _release_engine(self, supervisor: EngineSupervisor, session: Session) -> None:
        """Shut down kvscope's own engine unless it is set to keep running, and close its session once the shutdown
        command was sent.
        """
        supervisor.deleteLater()
        if not supervisor.engine.keeps_running:
            session.send(Control(action="shutdown"))
        QTimer.singleShot(_CLOSE_SESSION_DELAY_MS, self, partial(self._close_session, session))

    def _close_session(self, session: Session) -> None:
        self.sessions.close_session(session)


def _select_once_shown(window: MainWindow, source: PlaybackSource, selects: Sequence[tuple[str, int]]) -> None:
    """Select requests and blocks once the window shows a state. Without a state, it is unknown which of them exist."""
    session = window.session

    def select(_: object) -> None:
        mirror = session.mirror
        if source.is_seeking or mirror.hello is None:
            return
        session.timeline.shown.disconnect(select)
        unknown = []
        for kind, number in selects:
            is_request = kind == "request"
            if mirror.requests.row_of(number) is None if is_request else number >= mirror.num_rows:
                unknown.append(f"{kind} {number}")
            elif is_request:
                session.selection.select_request(number)
            else:
                session.selection.select_block(number)
        if unknown:
            text = f"There is no {' and no '.join(unknown)} at this moment of the recording"
            window.banner.show_message("Not everything could be selected", text, is_temporary=True)

    session.timeline.shown.connect(select)


def run_desktop(options: Options, engine: EngineProcess | None, openings: Sequence[RecordingOpening] = ()) -> int:
    """Open a window for each engine or recording and run until the last is closed.

    Then stops `engine`, unless it is set to keep running. Returns the exit code: 2 if a recording could not be opened.
    """
    app = make_application()
    errors = InternalErrors(debug=options.debug, parent=app)
    with errors.listening():
        return call_with_exception_objects(partial(_run, app, options, engine, openings, errors))


def _run(
    app: QApplication,
    options: Options,
    engine: EngineProcess | None,
    openings: Sequence[RecordingOpening],
    errors: InternalErrors,
) -> int:
    layout = read_layout(options.layout, KNOWN_NAMES) if options.layout else None
    desktop = Desktop(app, options, QSettings(), errors)
    desktop.initial_layout = layout
    for address in options.attach or ((engine.endpoint,) if engine is not None else ()):
        desktop.open_window(address, engine)
    if options.fleet is not None:
        desktop.fleets.open_list(options.fleet.text, options.fleet.every_s, options.fleet.api_key)
    if options.is_comparison:
        desktop.compare_when_ready(openings)
    else:
        for opening in openings:
            desktop.open_when_ready(opening, options.at_s, options.selects)
    desktop.offer_crashed_histories()
    if desktop.windows:
        probe_startup(app, desktop.windows[0])
    with closing_on_signals(app):
        code = app.exec() or (BadInput.exit_code if desktop.failures else 0)
        if engine is not None:
            engine.close(was_shutdown_requested=True)  # while the session is open: its thread still sends the request
        desktop.close()
    return code


def closing_on_signals(app: QApplication) -> AbstractContextManager[None]:
    """Return a context in which a termination signal closes all windows, from the event loop.

    Python runs signal handlers only while it executes Python code; the timers of each session ensure that it does.
    """
    return handling_signals(lambda *_: QTimer.singleShot(0, app, app.closeAllWindows))


def probe_startup(app: QApplication, window: MainWindow) -> None:
    since = os.environ.get(STARTUP_PROBE)
    if since:
        window.windowHandle().installEventFilter(_ExposeProbe(int(since), app))


class _ExposeProbe(QObject):
    def __init__(self, since_ns: int, app: QApplication) -> None:
        super().__init__(app)
        self._since_ns = since_ns
        self._app = app

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if event.type() == QEvent.Type.Expose:
            watched.removeEventFilter(self)
            QTimer.singleShot(0, self, self._print_exposed)
        return False

    def _print_exposed(self) -> None:
        heavy = [name for name in ("torch", "triton", "transformers", "kvscope_engine") if name in sys.modules]
        seconds = (time.monotonic_ns() - self._since_ns) / 1e9
        print(json.dumps({"first_expose_s": round(seconds, 3), "heavy_modules": heavy}), flush=True)
        self._app.closeAllWindows()


# Functions that free what a closed window leaves in Qt's caches, in the garbage collector and in malloc. They are
# called on the GUI thread, between two turns of the event loop.
def release_caches(app: QApplication) -> None:
    clear_style_cache(app)
    QPixmapCache.clear()  # icon pixmaps, up to 10 MiB, whether they are still in use or not
    exclude_from_collection()
    _trim_malloc()


def exclude_from_collection() -> None:
    """Exclude all existing objects from full garbage collections, which would block the GUI thread.

    First collects the garbage of closed windows, including objects that were excluded before.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def _trim_malloc() -> None:
    """Return free heap memory, about 20 MiB, to the system. malloc retains free pages that are not at the end of its
    heap.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only in glibc
    if trim is not None:
        trim(ctypes.c_size_t(0))
