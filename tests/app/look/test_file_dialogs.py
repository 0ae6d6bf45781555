"""File dialogs leave what is typed alone."""

from __future__ import annotations

from PySide6.QtWidgets import QFileDialog, QLineEdit

from kvscope_app.look.file_dialogs import FileDialog


def test_names_are_not_completed_while_they_are_typed(qtbot, tmp_path):
    for number in range(3):
        (tmp_path / f"session-{number}.mcap").write_bytes(b"")
    dialog = FileDialog(None, "Save", str(tmp_path), "Recordings (*.mcap)")
    dialog.setOption(QFileDialog.Option.DontUseNativeDialog)
    dialog.setAcceptMode(QFileDialog.AcceptMode.AcceptSave)
    qtbot.addWidget(dialog)
    dialog.show()
    field = dialog.findChild(QLineEdit, "fileNameEdit")
    field.clear()
    qtbot.keyClicks(field, "session-of-today")
    assert field.completer() is None
    assert field.text() == "session-of-today"
