"""Tests that text from engines and models is never rendered as markup."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
from PySide6.QtCore import Qt
from PySide6.QtGui import Qt as QtGuiTexts
from PySide6.QtWidgets import QLabel, QWidget

import kvscope_app
from kvscope_app.ui.plain_text import PlainLabel, plain_tip
from kvscope_app.ui.widgets import ElidedLabel
from kvscope_telemetry.source import SourceState

EVIL = "<img src='file:///etc/passwd'><b>evil</b>"
MAY_BE_RICH = {"welcome.py", "block_card.py", "plain_text.py"}
"""Files with rich-text labels, which contain our own texts or escape what they are given."""


def test_rich_labels_are_created_only_in_listed_files():
    root = Path(kvscope_app.__file__).parent
    made = {path.name for path in root.rglob("*.py") if re.search(r"\bQLabel\(", path.read_text("utf-8"))}
    assert made <= MAY_BE_RICH


def test_tooltip_shows_angle_brackets_literally():
    assert plain_tip("request 3 < request 4") == "request 3 < request 4"
    assert "<b>" not in plain_tip("<b>evil</b>\nsecond line")
    assert "pre-wrap" in plain_tip("<b>evil</b>\nsecond line")


def test_elided_label_and_its_tooltip_escape_markup(qtbot):
    label = ElidedLabel(EVIL)
    qtbot.addWidget(label)
    label.resize(30, 20)
    label.grab()
    assert "<img" not in label.toolTip()
    assert "&lt;img" in label.toolTip()


def test_markup_sent_by_an_engine_is_shown_as_plain_text(make_engine, make_session, make_window, poll):
    engine = make_engine()
    first = engine.source.updates.popleft()
    hello = msgspec.structs.replace(
        first.snapshot.hello,
        model=msgspec.structs.replace(first.snapshot.hello.model, name=EVIL, dtype=EVIL),
        device=msgspec.structs.replace(first.snapshot.hello.device, name=EVIL),
    )
    snapshot = msgspec.structs.replace(first.snapshot, hello=hello)
    engine.source.updates.append(type(first)(snapshot=snapshot))
    session = make_session(engine)
    engine.request(1, blocks=[3])
    engine.event(kind="preempted", number=1, cause=EVIL)
    engine.progress(EVIL, done=1, total=2, detail=EVIL, unit=EVIL)
    poll(session)
    window = make_window(session, with_views=True, size=(1500, 900))
    engine.set_status(SourceState.ENDED, EVIL)
    poll(session)
    session.status_changed.emit()
    for view in window.views.values():
        view.refresh()
    window.grab()
    labels = [label for label in window.findChildren(QLabel) if "evil" in label.text()]
    assert len(labels) >= 4
    for label in labels:
        assert isinstance(label, PlainLabel)
        assert label.textFormat() is Qt.TextFormat.PlainText
    tips = [widget.toolTip() for widget in window.findChildren(QWidget) if "evil" in widget.toolTip()]
    assert not [tip for tip in tips if QtGuiTexts.mightBeRichText(tip) and "<b>" in tip]
