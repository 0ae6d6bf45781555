"""Tests of file dialogs: completion and default suffix."""

from __future__ import annotations

from PySide6.QtWidgets import QFileDialog, QLineEdit, QWidget

from kvscope_app.ui.file_dialogs import FileDialog, ask_save


def test_file_dialog_does_not_complete_typed_names(qtbot, tmp_path):
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


def test_default_suffix_follows_the_chosen_file_type(qtbot, tmp_path):
    parent, saved = QWidget(), []
    qtbot.addWidget(parent)
    ask_save(parent, "Save", tmp_path / "model-3.2-map", "PNG picture (*.png);;SVG drawing (*.svg)", saved.append)
    (dialog,) = parent.findChildren(QFileDialog)
    assert dialog.acceptMode() is QFileDialog.AcceptMode.AcceptSave
    assert (dialog.defaultSuffix(), dialog.directory().path()) == ("png", str(tmp_path))
    dialog.filterSelected.emit("SVG drawing (*.svg)")
    assert dialog.defaultSuffix() == "svg"
    dialog.fileSelected.emit(str(tmp_path / "x.svg"))
    assert saved == [str(tmp_path / "x.svg")]
    dialog.reject()
