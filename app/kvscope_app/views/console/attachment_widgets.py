"""Widgets for attached text files: chips below which the prompt is typed, and folded files on a sent prompt's card."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from PySide6.QtCore import QMargins, QObject, Qt, Signal
from PySide6.QtWidgets import QToolButton, QVBoxLayout, QWidget

from kvscope_app.ui.file_dialogs import ask_open_several
from kvscope_app.ui.flow_layout import FlowLayout
from kvscope_app.ui.number_text import num_bytes
from kvscope_app.ui.plain_text import plain_tip
from kvscope_app.ui.theme import DARK, Theme
from kvscope_app.ui.widget_factories import label, tool_button
from kvscope_app.views.console.attachments import MAX_ATTACHMENTS, Attachment, read_attachment
from kvscope_app.views.console.composer import Composer
from kvscope_app.views.console.conversation import Draft
from kvscope_app.views.console.text_body import TextBody
from kvscope_telemetry.errors import BadInput

_MAX_NAME_CHARS: Final = 32


class AttachmentRow(QWidget):
    """One chip per file that will be sent with the prompt; hidden if there is none. A click on a chip removes it."""

    removed = Signal(int)
    """Emitted with the index of the file."""

    def __init__(self) -> None:
        super().__init__()
        self.chips: list[QToolButton] = []
        self._row = FlowLayout(margins=QMargins(12, 0, 12, 0), spacing=4)
        self.setLayout(self._row)
        self._hint = label("sent before the prompt", "muted", elastic=True)
        self.hide()

    def show_attachments(self, attachments: Sequence[Attachment]) -> None:
        for chip in self.chips:
            self._row.removeWidget(chip)
            chip.hide()
            chip.deleteLater()
        self._row.removeWidget(self._hint)
        self.chips = [self._chip(index, attachment) for index, attachment in enumerate(attachments)]
        for widget in (*self.chips, self._hint):
            self._row.addWidget(widget)
            widget.show()
        self.setVisible(bool(attachments))
        self.updateGeometry()

    def _chip(self, index: int, attachment: Attachment) -> QToolButton:
        chip = tool_button(f"{_short_name(attachment)}  ×", plain_tip(f"{_size_text(attachment)}\nClick to remove"))
        chip.setAccessibleName(f"Remove {attachment.name}")
        chip.clicked.connect(partial(self.removed.emit, index))
        return chip


class PromptAttachments(QObject):
    """Attaches files to the prompt that is being typed, and shows them in `row`.

    `draft()` returns the current conversation's draft, `on_changed` is called after a change to it, and `report` shows
    a sentence to the user.
    """

    def __init__(
        self,
        composer: Composer,
        draft: Callable[[], Draft],
        on_changed: Callable[[], None],
        report: Callable[[str], None],
    ) -> None:
        super().__init__(composer)
        self.row = AttachmentRow()
        self._composer, self._draft, self._on_changed, self._report = composer, draft, on_changed, report
        self.row.removed.connect(self._remove)
        composer.attach.clicked.connect(self.ask_files)
        composer.edit.files_inserted.connect(self.add_files)

    def show_draft(self) -> None:
        self.row.show_attachments(self._draft().shown_attachments)

    def ask_files(self) -> None:
        ask_open_several(self._composer, "Attach text files", "", "All files (*)", self.add_files)

    def add_files(self, paths: Iterable[str]) -> None:
        """Attach text files. Files that cannot be attached are reported, and the others are attached."""
        problems = []
        attachments = self._draft().shown_attachments
        for path in paths:
            try:
                if len(attachments) >= MAX_ATTACHMENTS:
                    raise BadInput(f"{Path(path).name} was not attached: a prompt has at most {MAX_ATTACHMENTS} files")
                attachments.append(read_attachment(Path(path)))
            except BadInput as error:
                problems.append(str(error))
        self._on_changed()
        self.show_draft()
        self._report("\n".join(problems))
        self._composer.edit.setFocus()

    def _remove(self, index: int) -> None:
        del self._draft().shown_attachments[index]
        self._on_changed()
        self.show_draft()
        self._composer.edit.setFocus()


class AttachedFiles(QWidget):
    """Files of a sent prompt. Each is folded to its name; unfolded, it shows exactly the text that was sent."""

    def __init__(self, attachments: Sequence[Attachment]) -> None:
        super().__init__()
        self.toggles: list[QToolButton] = []
        self.bodies: dict[int, TextBody] = {}
        """Unfolded texts by index of the file, also those that were folded again."""
        self._attachments = attachments
        self._theme: Theme = DARK
        self._column = QVBoxLayout(self)
        self._column.setContentsMargins(0, 0, 0, 0)
        self._column.setSpacing(2)
        for index, attachment in enumerate(attachments):
            toggle = tool_button(
                "", plain_tip(f"{attachment.name}\nShow or hide the text as it was sent"), checkable=True
            )
            toggle.setAccessibleName(attachment.name)
            toggle.toggled.connect(partial(self._unfold, index))
            self.toggles.append(toggle)
            self._column.addWidget(toggle, 0, Qt.AlignmentFlag.AlignLeft)
            self._show_toggle(index, is_open=False)
        self.setVisible(bool(attachments))

    def apply_theme(self, theme: Theme) -> None:
        self._theme = theme
        for body in self.bodies.values():
            body.apply_theme(theme)

    def _unfold(self, index: int, is_open: bool) -> None:
        if is_open and index not in self.bodies:
            attachment = self._attachments[index]
            body = self.bodies[index] = TextBody(attachment.name)
            body.apply_theme(self._theme)
            body.show_plain(attachment.fenced)
            self._column.insertWidget(self._column.indexOf(self.toggles[index]) + 1, body)
        self.bodies[index].setVisible(is_open)
        self._show_toggle(index, is_open)

    def _show_toggle(self, index: int, is_open: bool) -> None:
        attachment = self._attachments[index]
        self.toggles[index].setText(f"{'▾' if is_open else '▸'} {_short_name(attachment)}  ·  {_size_text(attachment)}")


def _short_name(attachment: Attachment) -> str:
    name = attachment.name
    return name if len(name) <= _MAX_NAME_CHARS else f"{name[: _MAX_NAME_CHARS - 12]}…{name[-11:]}"


def _size_text(attachment: Attachment) -> str:
    return num_bytes(len(attachment.text.encode(errors="replace")))
