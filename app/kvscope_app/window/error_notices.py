"""Shows kvscope's internal errors in the window: exceptions not caught in a slot, event handler, timer or thread.

Owns the exception hooks of Python and Qt while the desktop runs, the errors received (each once, with a count), and the
strip that shows them and copies a report. Everything is still printed to standard error. A report contains versions,
tracebacks and Qt's messages but never prompt text: an exception's message is included only if Python itself wrote it,
and without its quoted parts.
"""

from __future__ import annotations

import platform
import re
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import PurePath
from types import TracebackType
from typing import Any, Final

from PySide6.QtCore import QMessageLogContext, QObject, Qt, QTimer, QtMsgType, Signal, qInstallMessageHandler
from PySide6.QtGui import QGuiApplication
from PySide6.QtWidgets import QApplication, QMainWindow

from kvscope_app.actions.action_registry import ACTION_NOTE_PREFIX
from kvscope_app.command_line import PROGRAM
from kvscope_app.ui.banner import Banner
from kvscope_app.ui.number_text import count, plural
from kvscope_app.ui.passing_strip import FloatingStrips
from kvscope_app.ui.theming.theme_manager import ThemeManager
from kvscope_app.views.docks import DOCKS
from kvscope_app.window.dialogs.help_dialogs import versions_text
from kvscope_app.window.override_errors import remove_placeholder
from kvscope_app.window.window_body import WindowBody
from kvscope_telemetry.printable import print_line, print_text

MAX_ERRORS: Final = 20
"""Maximum number of distinct errors stored. Further distinct errors are only counted."""
_MAX_MESSAGE: Final = 200
_MAX_QT_MESSAGES: Final = 20
_RETRY_MS: Final = 1_000
"""Milliseconds between attempts to show an error while no window is open."""
_VIEW_TITLES: Final = {"page_map": "Page map", "chart": "a chart"}
_FEATURES: Final = {
    "recording": "Recording",
    "media_export": "the export of pictures and videos",
    "playback": "Playback",
    "compare": "the comparison",
    "fleet": "the fleet",
    "recent_recordings": "the list of recordings",
    "alarms": "bookmarks and alarms",
    "planning": "the memory plan",
    "load_generator": "the load generator",
    "debugger": "the step debugger",
    "engine_launcher": "the start of the engine",
}
"""Packages other than views that can raise errors, with the names shown for them in the error strip."""
_QUOTED_PATTERN: Final = re.compile(r"""['"](?:.*['"]|.*$)""")
"""Matches the quoted part of an error message: from the first quote character to the last, because quoted text may
contain quotes or be truncated.
"""
_BUILTIN_EXCEPTIONS: Final = (
    *(AttributeError, IndexError, KeyError, NameError, OverflowError, RecursionError, RuntimeError, TypeError),
    *(UnboundLocalError, ValueError, ZeroDivisionError),
)
"""Exceptions that Python and extensions raise themselves, with messages that quote values."""
_RAISE_PATTERN: Final = re.compile(r"\braise\b")
_OUR_PACKAGES: Final = ("kvscope_app", "kvscope_telemetry", "site-packages")
_SEVERE: Final = (QtMsgType.QtCriticalMsg, QtMsgType.QtFatalMsg)


@dataclass(slots=True)
class InternalError:
    kind: str
    """Name of the exception class, or "Qt"."""
    feature: str
    """Title of the view or feature that raised the error; empty if unknown."""
    trace: str
    action: str = ""
    """Text of the action that the user chose; "" if the error was raised outside an action."""
    count: int = 0

    @property
    def summary(self) -> str:
        """Kind, location and, if Python wrote it, message of the error: `TypeError in open (app/files.py:27):
        message`.
        """
        *frames, last = self.trace.splitlines()
        kind, _, message = last.partition(": ")
        location = re.match(r"  (.+:\d+) in ([^:]+): ", frames[-1]) if frames else None
        location_text = f" in {location[2]} ({location[1]})" if location else ""
        return f"{kind}{location_text}: {message}" if message else f"{kind}{location_text}"


class InternalErrors(QObject):
    """Collects errors from all threads, and reports them on the GUI thread."""

    reported = Signal()
    _received = Signal()

    def __init__(self, *, debug: bool = False, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.num_more = 0
        """Number of errors not stored because `MAX_ERRORS` distinct errors had already occurred."""
        self.newest: InternalError | None = None
        self._debug = debug
        self._errors: dict[str, InternalError] = {}
        self._qt_messages: deque[str] = deque(maxlen=_MAX_QT_MESSAGES)
        self._lock = threading.RLock()  # reentrant: the garbage collector may raise while it is held
        self._is_due = False
        self._qt_before: Any = None
        self._received.connect(self._show_strip, Qt.ConnectionType.QueuedConnection)

    @property
    def errors(self) -> list[InternalError]:
        with self._lock:
            return list(self._errors.values())

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Install the exception hooks within the context.

        Previous hooks are also called, except Python's default ones.
        """
        previous = sys.excepthook, threading.excepthook, sys.unraisablehook
        sys.excepthook = self._exception_hook(previous[0], sys.__excepthook__)

        def thread_hook(args: threading.ExceptHookArgs) -> None:
            if args.exc_type is not SystemExit:
                self.record(args.exc_type, args.exc_value, args.exc_traceback)
            if previous[1] is not threading.__excepthook__:
                previous[1](args)

        def unraisable_hook(args: Any) -> None:
            self.record(args.exc_type, args.exc_value, args.exc_traceback)
            if previous[2] is not sys.__unraisablehook__:
                previous[2](args)

        threading.excepthook, sys.unraisablehook = thread_hook, unraisable_hook
        self._qt_before = qInstallMessageHandler(self._on_qt_message)
        try:
            yield
        finally:
            sys.excepthook, threading.excepthook, sys.unraisablehook = previous
            qInstallMessageHandler(self._qt_before)

    def record(self, kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
        """Record an uncaught error. Thread-safe; never raises."""
        if issubclass(kind, KeyboardInterrupt):
            return
        try:
            remove_placeholder(error)
            exception = traceback.TracebackException(kind, error or kind(), trace)
            text = "\n".join(_traceback_lines(exception))
            num_occurrences = self._count(kind.__name__, _feature_of(exception), text, _action_of(error))
            self._print(kind, error, trace, num_occurrences)
        except Exception:  # reporting itself failed
            traceback.print_exc()

    @property
    def report(self) -> str:
        parts = [
            f"kvscope {version('kvscope')}, {versions_text()}",
            f"Display: {QGuiApplication.platformName()}, machine: {platform.machine()}",
        ]
        for error in self.errors:
            location = f" in {error.feature}" if error.feature else ""
            location += f" during “{error.action}”" if error.action else ""
            parts.append(f"{error.kind}{location}, {plural(error.count, 'time')}\n{error.trace}")
        if self.num_more:
            parts.append(f"and {plural(self.num_more, 'other error')}")
        if self._qt_messages:
            parts.append("Qt said:\n" + "\n".join(self._qt_messages))
        return "\n\n".join(parts) + "\n"

    def _exception_hook(self, previous: Callable[..., Any], default: Callable[..., Any]) -> Callable[..., Any]:
        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            self.record(kind, error, trace)
            if previous is not default:
                previous(kind, error, trace)

        return hook

    def _on_qt_message(self, kind: QtMsgType, context: QMessageLogContext, text: str) -> None:
        print_text(text, file=sys.stderr)
        self._qt_messages.append(_masked(text))
        if kind in _SEVERE:
            self._count("Qt", "", _masked(text))
        if callable(self._qt_before):
            self._qt_before(kind, context, text)

    def _count(self, kind: str, feature: str, trace: str, action: str = "") -> int:
        """Count an occurrence of an error. Returns its number of occurrences, or 0 if it is not stored because of
        `MAX_ERRORS`.
        """
        with self._lock:
            error = self._errors.get(trace)
            if error is None and len(self._errors) >= MAX_ERRORS:
                self.num_more += 1
                num_occurrences = 0
            else:
                if error is None:
                    error = self._errors[trace] = InternalError(kind, feature, trace, action)
                error.count += 1
                self.newest, num_occurrences = error, error.count
            is_due, self._is_due = self._is_due, True
        if not is_due:
            self._received.emit()
        return num_occurrences

    def _show_strip(self) -> None:
        with self._lock:
            self._is_due = False
        self.reported.emit()

    def _print(
        self, kind: type[BaseException], error: BaseException | None, trace: TracebackType | None, num_occurrences: int
    ) -> None:
        """Print the error. A repeated error is printed only the 1st, 10th, 100th time, and so on."""
        if num_occurrences and str(num_occurrences).strip("0") != "1":
            return
        if self._debug:
            traceback.print_exception(kind, error, trace)
        else:
            occurrences = f" ({count(num_occurrences)} times)" if num_occurrences > 1 else ""
            print_line(
                f"{PROGRAM}: internal error, {kind.__name__}: {error}{occurrences} (run with --debug for a traceback)",
                file=sys.stderr,
            )


class ErrorNotices(QObject):
    """Shows `errors` in a strip in the active window. A dismissed strip reappears for a different error."""

    def __init__(self, errors: InternalErrors, themes: ThemeManager, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.errors = errors
        self.strip: Banner | None = None
        """Banner that shows the errors; None before the first error, and after the banner's window was closed."""
        self._themes = themes
        self._reported_errors: set[str] = set()
        self._retry_timer = QTimer(self, singleShot=True, interval=_RETRY_MS)
        self._retry_timer.timeout.connect(self._show)
        errors.reported.connect(self._show)
        themes.changed.connect(self._apply_theme)

    def copy_report(self) -> None:
        QGuiApplication.clipboard().setText(self.errors.report)
        if self.strip is not None:
            self._show_strip(self.strip, "Report copied.")

    def _show(self) -> None:
        newest = self.errors.newest
        if newest is None:
            return
        is_available = self.strip is not None and bool(self.strip.text)
        if not is_available and newest.trace in self._reported_errors:
            return
        if self.strip is None:
            window = _window_in_front()
            if window is None:
                self._retry_timer.start()
                return
            self.strip = self._create_strip(window)
        self._reported_errors.add(newest.trace)
        self._show_strip(self.strip)

    def _show_strip(self, strip: Banner, note: str = "") -> None:
        newest, num_others = self.errors.newest, len(self.errors.errors) - 1 + self.errors.num_more
        assert newest is not None, "there is something to tell"
        occurrences = f", {plural(newest.count, 'time')}" if newest.count > 1 else ""
        others = f", and {plural(num_others, 'other error')} earlier" if num_others else ""
        subject = newest.feature or "What is shown"
        detail = note or f"{newest.summary}{occurrences}{others}. kvscope keeps running. {subject} may be out of date."
        location = f" in {newest.feature}" if newest.feature else ""
        title = f"“{newest.action}” failed{location}" if newest.action else f"Something went wrong{location}"
        strip.show_message(title, detail, (("Copy report", self.copy_report),))

    def _create_strip(self, window: QMainWindow) -> Banner:
        strip = Banner(window)
        strip.apply_theme(self._themes.theme)
        strip.destroyed.connect(self._forget_strip)
        if isinstance(window, WindowBody):
            strip.focus_heir = window.page_map.canvas
            window.strips.add(strip)
        else:
            parent_widget = window.centralWidget() or window
            strips = FloatingStrips(parent_widget, parent_widget)
            strips.add(strip)
            strips.show()
        return strip

    def _forget_strip(self) -> None:
        self.strip = None

    def _apply_theme(self) -> None:
        if self.strip is not None:
            self.strip.apply_theme(self._themes.theme)


def _window_in_front() -> QMainWindow | None:
    front = QApplication.activeWindow()
    windows = [front, *QApplication.topLevelWidgets()]
    return next((each for each in windows if isinstance(each, QMainWindow) and each.isVisible()), None)


def _action_of(error: BaseException | None) -> str:
    notes = [note for note in getattr(error, "__notes__", ()) if note.startswith(ACTION_NOTE_PREFIX)]
    return notes[0].removeprefix(ACTION_NOTE_PREFIX) if notes else ""


def _feature_of(exception: traceback.TracebackException) -> str:
    """Return the title of the view or feature that made the innermost call in the traceback, or "" if unknown."""
    titles = {spec.folder: spec.title for spec in DOCKS} | _VIEW_TITLES
    for frame in reversed(exception.stack):
        parts = PurePath(frame.filename).parts
        if "kvscope_app" not in parts:
            continue
        package, *subpackages = parts[parts.index("kvscope_app") + 1 :]
        if package in _FEATURES:
            return _FEATURES[package]
        if package == "views" and (view := subpackages[0].removesuffix(".py")) in titles:
            return titles[view]
    return ""


def _traceback_lines(exception: traceback.TracebackException) -> Iterator[str]:
    """Yield the lines of the traceback, starting with those of the exception's causes. File paths are relative to the
    package.
    """
    cause = exception.__cause__ or (None if exception.__suppress_context__ else exception.__context__)
    if cause is not None:
        yield from _traceback_lines(cause)
        yield "which led to"
    for frame in exception.stack:
        yield f"  {_short_path(frame.filename)}:{frame.lineno} in {frame.name}: {frame.line or ''}"
    kind = exception.exc_type.__name__ if exception.exc_type is not None else "error"
    message = "".join(exception.format_exception_only()).strip().partition(": ")[2]
    yield f"{kind}: {_masked(message)}" if message and _is_message_by_python(exception) else kind


def _is_message_by_python(exception: traceback.TracebackException) -> bool:
    """Whether Python rather than a `raise` statement wrote the message. A message of a `raise` may have any text."""
    line = exception.stack[-1].line if exception.stack else ""
    return exception.exc_type in _BUILTIN_EXCEPTIONS and bool(line) and not _RAISE_PATTERN.search(line or "")


def _short_path(path: str) -> str:
    parts = PurePath(path).parts
    start = next((parts.index(name) for name in _OUR_PACKAGES if name in parts), len(parts) - 1)
    return "/".join(parts[start:])


def _masked(message: str) -> str:
    """Return the first line of `message` without its quoted parts, which may be user text."""
    return _QUOTED_PATTERN.sub("'…'", message.partition("\n")[0])[:_MAX_MESSAGE]
