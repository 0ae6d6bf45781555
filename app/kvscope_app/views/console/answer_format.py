"""Field for the format that an answer must have: any text, JSON, a JSON schema, a regular expression, or a choice."""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec
from PySide6.QtCore import Signal
from PySide6.QtWidgets import QComboBox, QPlainTextEdit, QVBoxLayout, QWidget

from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.structured import Structured, StructuredKind

_TIP: Final = "The engine generates only tokens that fit this format"
_MAX_LINES_SHOWN: Final = 4


class FormatChoice(NamedTuple):
    """An entry of the list. `hint` is the placeholder of the text field; "" for formats without a text."""

    kind: StructuredKind | None
    name: str
    hint: str = ""


FORMATS: Final = (
    FormatChoice(None, "Any text"),
    FormatChoice("json_object", "JSON"),
    FormatChoice("json_schema", "JSON schema", '{"type": "object", "properties": {"city": {"type": "string"}}}'),
    FormatChoice("regex", "Regular expression", r"The whole answer, such as (yes|no) or \d{4}-\d\d"),
    FormatChoice("choice", "One of", "One possible answer per line"),
    FormatChoice("grammar", "Grammar (GBNF)", 'root ::= "yes" | "no"'),
)


class AnswerFormatField(QWidget):
    """List of formats, and a field for the text of those that need one."""

    edited = Signal()
    """Emitted when the user has changed the format."""

    def __init__(self) -> None:
        super().__init__()
        self.kind = QComboBox()
        self.kind.setAccessibleName("Answer format")
        self.kind.setToolTip(_TIP)
        for each in FORMATS:
            self.kind.addItem(each.name)
        self.text = QPlainTextEdit()
        self.text.setAccessibleName("Text of the answer format")
        self.text.setTabChangesFocus(True)
        self.text.setFixedHeight(_MAX_LINES_SHOWN * self.text.fontMetrics().lineSpacing() + 18)
        self._is_filling = False
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(6)
        column.addWidget(self.kind)
        column.addWidget(self.text)
        self.kind.currentIndexChanged.connect(self._on_kind)
        self.text.textChanged.connect(self._emit_edited)
        self._on_kind()

    def fill(self, structured: Structured | None) -> None:
        """Show a format. One that the list lacks (a structural tag) is shown as any text."""
        kind = None if structured is None else structured.kind
        index = next((index for index, each in enumerate(FORMATS) if each.kind == kind), 0)
        self._is_filling = True
        self.kind.setCurrentIndex(index)
        text = "" if structured is None else structured.text
        if structured is not None and structured.kind == "choice":
            text = "\n".join(structured.choices())
        if FORMATS[index].hint and self.text.toPlainText() != text:
            self.text.setPlainText(text)
        self._is_filling = False

    def read(self) -> Structured | None:
        """Return the format; None for any text. Raises BadInput for a text that is not of its kind."""
        chosen = FORMATS[self.kind.currentIndex()]
        if chosen.kind is None:
            return None
        text = self.text.toPlainText() if chosen.hint else ""
        if chosen.kind == "choice":
            lines = [line.strip() for line in text.splitlines() if line.strip()]
            text = msgspec.json.encode(lines).decode() if lines else ""
        if chosen.hint and not text.strip():
            raise BadInput(f"Answer format: {chosen.name} is empty: {chosen.hint}")
        if chosen.kind == "json_schema":
            _require_schema(text)
        return Structured(kind=chosen.kind, text=text)

    def _on_kind(self) -> None:
        chosen = FORMATS[self.kind.currentIndex()]
        self.text.setVisible(bool(chosen.hint))
        self.text.setPlaceholderText(chosen.hint)
        self._emit_edited()

    def _emit_edited(self) -> None:
        if not self._is_filling:
            self.edited.emit()


def _require_schema(text: str) -> None:
    try:
        schema = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise BadInput(f"Answer format: the JSON schema must be JSON ({error})") from None
    if not isinstance(schema, dict | bool):
        raise BadInput("Answer format: the JSON schema must be an object, such as {'type': 'object'}")
