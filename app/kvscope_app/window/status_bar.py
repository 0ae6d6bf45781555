"""Status bar: connection, model, step rate, latency and lost data. Every colour is accompanied by text."""

from __future__ import annotations

import time
from typing import Final

from PySide6.QtCore import QEvent, QObject, QRectF, QSize, Qt, Signal
from PySide6.QtGui import QColor, QGuiApplication, QPainter, QPaintEvent, QResizeEvent
from PySide6.QtWidgets import QHBoxLayout, QLabel, QStatusBar, QStyle, QStyleOption, QWidget

from kvscope_app.session.session import Session
from kvscope_app.session.state_text import STATE_COLORS, STATE_TEXTS
from kvscope_app.ui.model_name import model_name
from kvscope_app.ui.number_text import count, percent, plural, seconds
from kvscope_app.ui.plain_text import PlainLabel, plain_tip
from kvscope_app.ui.steady_label import SteadyLabel
from kvscope_app.ui.theme import DARK, Theme
from kvscope_app.ui.zoom import scaled
from kvscope_telemetry.devices.device_reader import is_engine_share
from kvscope_telemetry.messages.telemetry import DeviceSample, Hello
from kvscope_telemetry.source import SourceState, SourceStatus

_MAX_STATE: Final = 80
"""Maximum number of characters of the connection state with its reason, unless there is more space. The tooltip has the
full text.
"""
_CHANGING_LABELS: Final = ("recording", "device", "rate", "frames", "latency", "display")
_TIPS: Final = {
    "recording": "Click for the file and to stop recording",
    "linked": "Cursor, playback, speed, visible range and selection follow the active window (Time ▸ Link times)",
    "overview": "Computing the charts: this recording has no summaries",
    "state": "Connection to the engine",
    "role": "Viewer: only operators can send prompts, control the engine and read block text",
    "address": "Address of the engine, for `kvscope --attach`. Click to copy it",
    "model": "Model, data type and device",
    "device": "GPU utilization, or the engine's share of the CPUs; power and temperature if reported",
    "rate": "Engine steps in the last second",
    "frames": "Frames received; lost ones are repaired by a snapshot",
    "latency": "Time from the end of a step until its frame arrives here",
    "display": "Window updates in the last second",
}
_PRIORITY: Final = (
    *(
        "state",
        "role",
        "recording",
        "linked",
        "overview",
        "frames",
        "model",
        "device",
        "rate",
        "address",
        "latency",
        "display",
    ),
)
"""Names of the labels by importance. If space is short, labels at the end of this list are hidden first."""
_LABELS_UNDER_MESSAGES: Final = ("state", "role", "model")
"""Labels that Qt hides while a message is shown."""
_CLICKABLE_LABELS: Final = ("recording", "address")
_MAX_NAME: Final = 24
"""Maximum characters of a file name or address. The tooltip and the clipboard have the full text."""
_NOTICE_MS: Final = 6000
_SPACING: Final = 10
_DOT_AND_MARGINS: Final = 40
"""Width in pixels of the status dot and the margins at both ends of the bar."""
_MIN_WIDTH: Final = 240
_MESSAGE_MARGIN: Final = 6
_MAX_MESSAGE_SHARE: Final = 0.8
"""Maximum share of the bar's width that a message may use."""


class StateDot(QWidget):
    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._color = QColor()
        self.setFixedSize(QSize(scaled(10), scaled(10)))

    def set_color(self, color: QColor) -> None:
        if color != self._color:
            self._color = color
            self.update()

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(self._color)
        painter.drawEllipse(QRectF(self.rect()).adjusted(1, 1, -1, -1))
        painter.end()


class StatusBar(QStatusBar):
    """Shows the status of a session, updated up to four times per second."""

    recording_clicked = Signal()

    def __init__(self, session: Session, parent: QWidget | None = None, *, is_own: bool = False) -> None:
        """Create the bar. `is_own`: whether kvscope started the engine, so that waiting for a connection is expected at
        first.
        """
        super().__init__(parent)
        self._session, self._is_own = session, is_own
        self._theme = DARK
        self._dot = StateDot()
        self._frames_color = ""
        self._labels = {name: _make_label(name) for name in _TIPS}
        self._steps: list[tuple[int, int]] = []  # (monotonic time in ns, step) of the last second
        self._update_times_ns: list[int] = []
        self._build()
        for name in _CLICKABLE_LABELS:
            self._labels[name].setCursor(Qt.CursorShape.PointingHandCursor)
            self._labels[name].installEventFilter(self)
        session.status_changed.connect(self.refresh)
        session.timeline.updated.connect(self._count_update)
        self.messageChanged.connect(self._on_message)

    def apply_theme(self, theme: Theme) -> None:
        self._theme = theme
        self.refresh()

    def minimumSizeHint(self) -> QSize:
        """Return a fixed width, so that changing texts do not widen the window."""
        return QSize(_MIN_WIDTH, super().minimumSizeHint().height())

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._show_labels_that_fit()

    def paintEvent(self, event: QPaintEvent) -> None:
        """Elide a message that is too long, which Qt would clip. The tooltip has the full message."""
        message = self.currentMessage()
        if not message:
            super().paintEvent(event)
            return
        painter, option = QPainter(self), QStyleOption()
        option.initFrom(self)
        self.style().drawPrimitive(QStyle.PrimitiveElement.PE_PanelStatusBar, option, painter, self)
        label_edges = [
            label.x() - _MESSAGE_MARGIN
            for name, label in self._labels.items()
            if name not in _LABELS_UNDER_MESSAGES and label.isVisible()
        ]
        message_rect = self.rect().adjusted(_MESSAGE_MARGIN, 0, 0, 0)
        message_rect.setRight(min([self.width() - _SPACING, *label_edges]))
        elided = self.fontMetrics().elidedText(message, Qt.TextElideMode.ElideRight, message_rect.width())
        painter.setPen(self.palette().color(self.foregroundRole()))
        painter.drawText(message_rect, Qt.AlignmentFlag.AlignVCenter | Qt.TextFlag.TextSingleLine, elided)
        painter.end()

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if event.type() == QEvent.Type.MouseButtonRelease and isinstance(watched, QLabel):
            if watched.objectName() == "recording":
                self.recording_clicked.emit()
            elif watched.objectName() == "address":
                self._copy_address()
        return False

    def refresh(self) -> None:
        self._update_labels()
        self._show_labels_that_fit()

    def show_link_text(self, text: str) -> None:
        if self._labels["linked"].text() != text:
            self._set_text("linked", text)
            self._show_labels_that_fit()

    def _copy_address(self) -> None:
        address = self._session.source.name
        QGuiApplication.clipboard().setText(address)
        self.showMessage(f"Copied {address}", _NOTICE_MS)

    def _on_message(self, message: str) -> None:
        self.setToolTip(plain_tip(message))
        self._show_labels_that_fit()

    def _show_labels_that_fit(self) -> None:
        """Show as many labels as fit, the most important first. A temporary message takes precedence over labels."""
        message = self.currentMessage()
        message_width = self.fontMetrics().horizontalAdvance(message) + 2 * _SPACING if message else _DOT_AND_MARGINS
        free_width = self.width() - min(message_width, round(self.width() * _MAX_MESSAGE_SHARE))
        for name in _PRIORITY:
            label = self._labels[name]
            if message and name in _LABELS_UNDER_MESSAGES:
                continue
            if not label.text():
                label.hide()
                continue
            free_width -= label.sizeHint().width() + _SPACING
            if label.isHidden() is (free_width >= 0):
                label.setVisible(free_width >= 0)

    def _update_labels(self) -> None:
        status, mirror = self._session.status, self._session.live_mirror
        self._show_recording()
        share = self._session.overview_share
        self._set_text("overview", "" if share is None else f"Reading its overview {percent(share, 0)}")
        is_starting = self._is_own and status.state is SourceState.CONNECTING
        reason = "" if is_starting else _reason_suffix(status, self._session.timeline.end.failure)
        is_doubtful = status.state is SourceState.LIVE and reason
        self._dot.set_color(self._theme.color("warn" if is_doubtful else STATE_COLORS[status.state]))
        is_ready = status.state is SourceState.LOADING and status.reason == "ready"
        text = STATE_TEXTS[status.state] + reason
        shown = "Ready" if is_ready else self._shortened(text)
        self._set_text("state", shown)
        tip = f"{text}\n{_TIPS['state']}" if shown != text else _TIPS["state"]
        if tip != self._labels["state"].toolTip():
            self._labels["state"].setToolTip(tip)
        self._set_text("role", "viewer" if self._session.is_viewer else "")
        self._set_text("model", _model_text(mirror.hello))
        if not self._session.timeline.is_file:
            self._set_text("address", _shortened_name(self._session.source.name))
            self._labels["address"].setToolTip(plain_tip(f"{self._session.source.name}\n{_TIPS['address']}"))
        is_available = status.state in (SourceState.LIVE, SourceState.PLAYBACK)
        self._set_text("device", self._device_status() if is_available else "")
        self._set_text(
            "rate", self._step_rate() if status.state is SourceState.LIVE and mirror.capabilities.steps else ""
        )
        player = self._session.timeline.player if self._session.timeline.is_file else None
        if player is not None:
            note = player.damage_summary
            self._set_frames_tip(player.damage_details or "Frames of the recording")
            self._set_text(
                "frames", f"{plural(status.frames_received, 'frame')} recorded" + (f", {note}" if note else "")
            )
            self._color_frames("warn" if note else "muted")
            return
        lost = f"{count(status.frames_dropped)} lost" if status.frames_dropped else "none lost"
        rejected = f", {count(status.messages_rejected)} unreadable" if status.messages_rejected else ""
        self._set_text("frames", f"{plural(status.frames_received, 'frame')}, {lost}{rejected}")
        self._set_frames_tip(frames_tip(status))
        self._color_frames("warn" if status.frames_dropped or status.messages_rejected else "muted")
        is_latency_known = status.latency_ns >= 0 and status.state is SourceState.LIVE
        self._set_text("latency", f"{seconds(status.latency_ns / 1e9)} behind the engine" if is_latency_known else "")
        self._set_text("display", f"{self._display_rate()} updates/s")

    def _shortened(self, text: str) -> str:
        if len(text) <= _MAX_STATE:
            return text
        others = [label for name, label in self._labels.items() if name != "state" and label.text()]
        free_width = self.width() - _DOT_AND_MARGINS - sum(label.sizeHint().width() + _SPACING for label in others)
        metrics = self._labels["state"].fontMetrics()
        min_width = metrics.horizontalAdvance(text[: _MAX_STATE - 1] + "…")
        return metrics.elidedText(text, Qt.TextElideMode.ElideRight, max(free_width, min_width))

    def _show_recording(self) -> None:
        recorder = self._session.recorder
        self._set_text(
            "recording", "" if recorder is None else f"● {recorder.text}  {_shortened_name(recorder.path.name)}"
        )
        if recorder is not None:
            self._labels["recording"].setToolTip(plain_tip(f"Recording to {recorder.path}\n{_TIPS['recording']}"))
            self._labels["recording"].setStyleSheet(f"color: {self._theme.bad}; font-weight: 600;")

    def _build(self) -> None:
        self.setSizeGripEnabled(False)
        left = QWidget()
        row = QHBoxLayout(left)
        row.setContentsMargins(10, 0, 0, 0)
        row.setSpacing(7)
        row.addWidget(self._dot)
        row.addWidget(self._labels["state"])
        self.addWidget(left)
        self.addWidget(self._labels["role"])
        self.addWidget(self._labels["model"])
        for name in ("address", "linked", "recording", "overview", "device", "rate", "frames", "latency", "display"):
            self.addPermanentWidget(self._labels[name])

    def _set_frames_tip(self, tip: str) -> None:
        if tip != self._labels["frames"].toolTip():
            self._labels["frames"].setToolTip(tip)

    def _color_frames(self, name: str) -> None:
        color = str(getattr(self._theme, name))
        if color != self._frames_color:
            self._frames_color = color
            self._labels["frames"].setStyleSheet(f"color: {color};")

    def _set_text(self, name: str, text: str) -> None:
        label = self._labels[name]
        if label.text() != text:
            label.setText(text)
            if not text:
                label.hide()

    def _count_update(self) -> None:
        now_ns = time.monotonic_ns()
        self._update_times_ns.append(now_ns)
        self._steps.append((now_ns, self._session.live_mirror.step))
        while self._steps[0][0] < now_ns - 1_000_000_000:
            del self._steps[0], self._update_times_ns[0]

    def _step_rate(self) -> str:
        now_ns = time.monotonic_ns()
        recent = [(t, step) for t, step in self._steps if t >= now_ns - 1_500_000_000]
        steps = max(0, recent[-1][1] - recent[0][1]) if recent else 0
        span_s = (now_ns - recent[0][0]) / 1e9 if recent else 1.0
        rate = steps / max(span_s, 0.25)
        return f"{rate:,.0f} steps/s" if rate >= 10 or rate == 0 else f"{rate:.1f} steps/s"

    def _device_status(self) -> str:
        samples, hello = self._session.timeline.end.history.samples, self._session.live_mirror.hello
        return device_text(samples[-1], hello) if samples and hello is not None else ""

    def _display_rate(self) -> int:
        return sum(t >= time.monotonic_ns() - 1_000_000_000 for t in self._update_times_ns)


def frames_tip(status: SourceStatus) -> str:
    """Return the tooltip of the frame count. If the engine is newer than this program, the tooltip also has the
    numbers of skipped messages and unknown states.
    """
    lines = [_TIPS["frames"]]
    if status.num_skipped:
        lines.append(
            f"Skipped events and messages, of kinds that only a newer kvscope knows: {count(status.num_skipped)}"
        )
    if status.num_unknown:
        lines.append(
            f"States and tiers shown as unknown, because only a newer kvscope knows them: {count(status.num_unknown)}"
        )
    return "\n".join(lines)


def _reason_suffix(status: SourceStatus, failure: str) -> str:
    """Return a suffix with the reason for the connection state. `failure` is why the last update could not be applied,
    or "".
    """
    if status.state is SourceState.PAUSED:
        return f" {status.reason}"
    reason = status.reason or failure
    return f": {reason}" if reason else ""


def _shortened_name(name: str) -> str:
    half = (_MAX_NAME - 1) // 2
    return name if len(name) <= _MAX_NAME else f"{name[:half]}…{name[-half:]}"


def _make_label(name: str) -> QLabel:
    label = SteadyLabel() if name in _CHANGING_LABELS else PlainLabel()
    label.setObjectName(name)
    label.setToolTip(_TIPS[name])
    label.setContentsMargins(7, 0, 7, 0)
    if name in _CHANGING_LABELS:
        label.setAlignment(Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter)
    if name != "state":
        label.setProperty("look", "muted")  # before it is shown: the stylesheet reads it only once
    return label


def _model_text(hello: Hello | None) -> str:
    if hello is None:
        return ""
    quantization = quantization_text(hello.model.quantization)
    parts = (model_name(hello), hello.model.dtype, quantization, hello.device.name)
    return "  ·  ".join(part for part in parts if part)


def quantization_text(quantization: str) -> str:
    """Return a text such as `4-bit weights` for `int4`, or `4-bit weights, 8-bit activations` for `int4-a8`; "" without
    quantization.

    If the name of the quantization has no number of bits, the text is the name followed by `weights`.
    """
    weights, _, activations = quantization.partition("-a")
    bits = weights.removeprefix("int")
    if not bits.isdigit():
        return f"{quantization} weights" if quantization else ""
    return f"{bits}-bit weights" + (f", {activations}-bit activations" if activations else "")


def device_text(sample: DeviceSample, hello: Hello) -> str:
    """Return the known device values, for example `GPU 87 %  ·  212 W  ·  64 °C`, or for an engine on a CPU `Engine 87
    % of the CPUs`.
    """
    name = {"cuda": "GPU", "cpu": "CPU"}.get(hello.device.kind, "Device")
    busy = percent(sample.utilization, 0)
    parts = (
        (f"Engine {busy} of the CPUs" if is_engine_share(hello) else f"{name} {busy}")
        if sample.utilization >= 0
        else "",
        f"{sample.power_watts:.0f} W" if sample.power_watts >= 0 else "",
        f"{sample.temperature_celsius:.0f} °C" if sample.temperature_celsius >= 0 else "",
    )
    return "  ·  ".join(part for part in parts if part)
