"""The sheet that changes the limits of the batch while the engine runs, and shows its answer."""

from __future__ import annotations

from PySide6.QtWidgets import QGridLayout, QHBoxLayout, QPushButton, QSpinBox, QWidget
from shiboken6 import isValid

from kvscope_app.debugger.debugger import Debugger
from kvscope_app.look.makers import inset, label, set_look
from kvscope_app.look.number_text import count
from kvscope_app.window.sheets.help_sheets import Sheet
from kvscope_telemetry.messages.commands import SetLimits

_FIELDS = (
    ("max_num_seqs", "Requests in a step, at most"),
    ("max_num_batched_tokens", "Tokens in a step, at most"),
)


class LimitsSheet(Sheet):
    """Not modal: what it does is seen in the views behind it."""

    def __init__(self, parent: QWidget, debugger: Debugger) -> None:
        super().__init__("Limits of the batch", parent)
        self._debugger = debugger
        words = label(
            "They hold from the next step on, until the engine ends. Nobody who runs is sent away: fewer are let in"
            " until fewer run.",
            "muted",
            wraps=True,
        )
        self.fields = {name: QSpinBox() for name, _ in _FIELDS}
        for field in self.fields.values():
            inset(field)
        self.answer = label("", "muted", wraps=True)
        self.column.addWidget(words)
        self.column.addLayout(self._grid())
        self.column.addWidget(self.answer)
        self.column.addLayout(self._buttons())
        self.resize(460, 220)

    def apply(self) -> None:
        """Ask the engine for what is in the fields."""
        num_seqs, num_tokens = (field.value() for field in self.fields.values())
        self._debugger.ask(SetLimits, heard=self._hear, max_num_seqs=num_seqs, max_num_batched_tokens=num_tokens)

    def _hear(self, words: str, was_done: bool) -> None:
        if not isValid(self):  # it was closed meanwhile
            return
        self.answer.setText(words)
        set_look(self.answer, "accent" if was_done else "warning")

    def _grid(self) -> QGridLayout:
        grid = QGridLayout()
        grid.setColumnStretch(0, 1)
        grid.setVerticalSpacing(8)
        mirror = self._debugger.session.live_mirror
        cache = None if mirror.hello is None else mirror.hello.cache
        for row, ((name, text), now) in enumerate(zip(_FIELDS, mirror.limits, strict=True)):
            most = 0 if cache is None else int(getattr(cache, name))
            field = self.fields[name]
            field.setRange(1, max(1, most, now))
            field.setValue(now or most)
            field.setAccessibleName(text)
            field.setMinimumWidth(110)
            named = label(text)
            named.setToolTip(name)
            grid.addWidget(named, row, 0)
            grid.addWidget(field, row, 1)
            grid.addWidget(label(f"of {count(max(most, now))}", "muted"), row, 2)
        return grid

    def _buttons(self) -> QHBoxLayout:
        go, close = QPushButton("Change"), QPushButton("Close")
        go.setProperty("look", "primary")
        go.setDefault(True)
        go.clicked.connect(self.apply)
        close.clicked.connect(self.close)
        row = QHBoxLayout()
        row.addStretch()
        row.addWidget(close)
        row.addWidget(go)
        return row
