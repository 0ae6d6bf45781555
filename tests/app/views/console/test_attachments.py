"""Tests of text files attached to prompts."""

from __future__ import annotations

import pytest
from PySide6.QtCore import QMimeData, QUrl

from kvscope_app.views.console.attachments import MAX_ATTACHMENT_BYTES, Attachment, read_attachment
from kvscope_telemetry.errors import BadInput


def mime_data(*paths):
    data = QMimeData()
    data.setUrls([QUrl.fromLocalFile(str(path)) for path in paths])
    return data


@pytest.fixture
def notes(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("first\nsecond\n")
    return path


def test_pasted_file_is_sent_before_the_prompt_and_folded_on_its_card(console, notes):
    console.page.composer.edit.insertFromMimeData(mime_data(notes))
    assert [chip.accessibleName() for chip in console.page.attachments.row.chips] == ["Remove notes.txt"]
    console.ask("Summarize", "short")
    sent = "notes.txt:\n```\nfirst\nsecond\n```\n\nSummarize"
    assert console.submits[-1].messages[-1].content == sent
    assert not console.page.attachments.row.isVisible()
    card = console.page.transcript.cards[0]
    assert card.body.toPlainText() == "Summarize"
    (toggle,) = card.files.toggles
    assert "notes.txt" in toggle.text()
    toggle.click()
    assert card.files.bodies[0].toPlainText() + "\n\nSummarize" == sent


def test_removed_chip_is_not_sent(console, notes):
    console.page.attachments.add_files([str(notes)])
    console.page.attachments.row.chips[0].click()
    console.ask("Hello")
    assert console.submits[-1].messages[-1].content == "Hello"


def test_attached_files_are_kept_with_the_draft_and_with_an_edited_prompt(console, make_console, notes):
    console.page.attachments.add_files([str(notes)])
    console.view.shut_down()
    again = make_console()
    assert len(again.page.attachments.row.chips) == 1
    again.ask("Summarize", "short")
    again.page.transcript.cards[0].redo.click()
    assert len(again.page.attachments.row.chips) == 1
    again.ask("Shorten", "s")
    assert again.submits[-1].messages[-1].content.startswith("notes.txt:\n```")


def test_recordings_are_left_to_the_window(console, notes, tmp_path):
    edit = console.page.composer.edit
    assert edit.canInsertFromMimeData(mime_data(notes))
    assert not edit.canInsertFromMimeData(mime_data(notes, tmp_path / "run.mcap"))


def test_refused_file_is_reported_and_the_others_are_attached(console, notes, tmp_path):
    binary = tmp_path / "b.bin"
    binary.write_bytes(b"\0\1")
    console.page.attachments.add_files([str(binary), str(notes)])
    assert "b.bin was not attached: it is a binary file" in console.page.notice.text()
    assert len(console.page.attachments.row.chips) == 1


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\xef\xbb\xbfh\xc3\xa9", "hé"),
        ("hé".encode("utf-16"), "hé"),
        (b"a\r\nb", "a\nb"),
    ],
)
def test_text_encodings_are_read(tmp_path, data, text):
    path = tmp_path / "t.txt"
    path.write_bytes(data)
    assert read_attachment(path) == Attachment(name="t.txt", text=text)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\x89PNG\r\n", "only text in UTF-8"),
        (b"ab\0", "binary"),
        (b" \n", "empty"),
        (b"x" * (MAX_ATTACHMENT_BYTES + 1), "larger than 512.0 KiB"),
    ],
)
def test_file_that_is_no_text_is_refused_with_its_name(tmp_path, data, reason):
    path = tmp_path / "t.txt"
    path.write_bytes(data)
    with pytest.raises(BadInput, match=rf"t\.txt was not attached: .*{reason}"):
        read_attachment(path)


def test_folder_and_missing_file_are_refused(tmp_path):
    with pytest.raises(BadInput, match="a folder"):
        read_attachment(tmp_path)
    with pytest.raises(BadInput, match="No such file"):
        read_attachment(tmp_path / "missing")


def test_fence_is_longer_than_any_fence_in_the_file():
    assert Attachment(name="a.md", text="````\nx\n````").fenced == "a.md:\n`````\n````\nx\n````\n`````"
