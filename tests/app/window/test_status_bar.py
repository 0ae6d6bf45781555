"""Tests of the status bar: which texts are shown at which width."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from PySide6.QtCore import QRect, Qt
from PySide6.QtGui import QGuiApplication
from PySide6.QtWidgets import QLabel, QMainWindow
from tests.app import window_driver as driver

from kvscope_app.window.status_bar import StatusBar, quantization_text
from kvscope_telemetry.source import SourceState, Update


@pytest.fixture
def bar(engine, session, poll, qtbot):
    engine.frame()
    poll(session)
    window, made = QMainWindow(), StatusBar(session)
    qtbot.addWidget(window)
    window.setStatusBar(made)
    window.resize(2_000, 100)
    window.show()
    made.refresh()
    yield made
    window.close()


def shown_labels(bar):
    return {label.objectName() for label in bar.findChildren(QLabel) if label.text() and not label.isHidden()}


def test_narrow_status_bar_hides_the_least_important_texts(bar):
    assert {"state", "model", "frames", "rate", "latency", "display"} <= shown_labels(bar)
    wide = sum(driver.child_named(bar, name).sizeHint().width() for name in ("frames", "state"))
    bar.window().resize(wide + 120, 100)
    assert shown_labels(bar) == {"state", "frames"}
    assert bar.width() == bar.window().width() == wide + 120
    bar.window().resize(2_000, 100)
    assert "display" in shown_labels(bar)


def test_long_reason_is_elided_to_the_remaining_width(bar, engine, session, qtbot):
    reason = "seen from outside; for the rest: kvscope --attach ipc:///tmp/kvscope-vllm; no KV events were found there"
    state = driver.child_named(bar, "state")
    engine.set_status(SourceState.LIVE, reason)

    def is_whole():
        session.poll()
        return state.text() == f"Live: {reason}"

    qtbot.waitUntil(is_whole)
    bar.window().resize(900, 100)
    bar.refresh()
    assert state.text().startswith("Live: seen from outside")
    assert state.text().endswith("…")
    assert reason in state.toolTip()
    assert "frames" in shown_labels(bar)


def test_status_bar_message_hides_less_important_texts_until_it_is_cleared(bar):
    bar.window().resize(700, 100)
    bar.showMessage("preempted #18: request 9 needed a block and none could be had, and so on " * 2)
    assert not shown_labels(bar) & {"latency", "display", "rate"}
    assert bar.toolTip() == bar.currentMessage()
    bar.clearMessage()
    assert not bar.toolTip()
    assert "state" in shown_labels(bar)
    bar.window().resize(2_000, 100)
    assert "display" in shown_labels(bar)


def test_message_that_is_too_long_is_elided(bar):
    bar.window().resize(400, 100)
    bar.showMessage("M" * 300)
    above_dots = bar.grab(QRect(bar.width() - 18, 0, 8, bar.height() // 2)).toImage()
    before = bar.grab(QRect(100, 0, 8, bar.height() // 2)).toImage()

    def num_colors(picture):
        return len({picture.pixel(x, y) for x in range(picture.width()) for y in range(6, picture.height())})

    assert num_colors(before) > 1
    assert num_colors(above_dots) == 1


def test_status_bar_shows_the_quantization_of_weights(bar, engine, session, poll):
    assert "weights" not in driver.child_named(bar, "model").text()
    model = replace(engine.hello.model, dtype="bfloat16", quantization="int8")
    engine.hello = replace(engine.hello, model=model)
    engine.source.updates.append(Update(snapshot=engine.snapshot()))
    poll(session)
    bar.refresh()
    assert "bfloat16  ·  8-bit weights" in driver.child_named(bar, "model").text()


def test_quantization_text_names_bits_or_format():
    assert [quantization_text(form) for form in ("int4", "fp8", "")] == ["4-bit weights", "fp8 weights", ""]
    assert quantization_text("int4-a8") == "4-bit weights, 8-bit activations"


def test_click_on_the_engine_address_copies_it(bar, qtbot):
    label = driver.child_named(bar, "address")
    assert label.text() == "ipc:///fake/telemetry"
    qtbot.mouseClick(label, Qt.MouseButton.LeftButton)
    assert QGuiApplication.clipboard().text() == "ipc:///fake/telemetry"
    assert bar.currentMessage() == "Copied ipc:///fake/telemetry"
