"""The attach sheet: endpoints and key files are checked before anything is opened, and remembered."""

from __future__ import annotations

import pytest
from PySide6.QtWidgets import QFileDialog, QLineEdit, QWidget
from tests.app import window_driver as driver

from kvscope_app.window.dialogs.attach_address import TypedAddress
from kvscope_app.window.dialogs.attach_dialog import AttachDialog
from kvscope_telemetry import addresses
from kvscope_telemetry.addresses import Address
from kvscope_telemetry.credentials.api_keys import api_keys_path, read_api_keys
from kvscope_telemetry.credentials.key_ring import KeyRing
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.roles import Role
from kvscope_telemetry.transport.connections import Connection, connections_path, read_connections, remember


@pytest.fixture
def opened():
    return []


@pytest.fixture
def open_sheet(qtbot, opened):
    parent = QWidget()
    qtbot.addWidget(parent)

    def make():
        sheet = AttachDialog(parent, lambda address: opened.append((address.text, address.key)))
        sheet.show()
        return sheet

    return make


@pytest.fixture
def key(tmp_path):
    KeyRing(tmp_path / "elsewhere").new("laptop", Role.OPERATOR, tmp_path / "laptop.key")
    return tmp_path / "laptop.key"


def test_a_key_is_chosen_and_remembered(open_sheet, opened, key, monkeypatch):
    sheet = open_sheet()
    monkeypatch.setattr(QFileDialog, "getOpenFileName", lambda *_: (str(key), ""))
    sheet.fields.pick_key.click()
    sheet.fields.where.setText("tcp://192.0.2.1:7710")
    driver.press(sheet, "Attach")
    assert opened == [("tcp://192.0.2.1:7710", key)]
    assert read_connections() == [Connection("tcp://192.0.2.1:7710", str(key))]
    again = open_sheet()
    driver.choose(again.fields.known, 1)
    assert (again.fields.where.text(), again.fields.key.text()) == ("tcp://192.0.2.1:7710", str(key))
    driver.press(again, "Attach")
    assert len(opened) == 2


def test_labels_are_shown_and_kept(open_sheet, key):
    remember(Connection("tcp://192.0.2.1:7710", str(key), "GPU box"))
    sheet = open_sheet()
    assert sheet.fields.known.itemText(1).startswith("GPU box")
    driver.choose(sheet.fields.known, 1)
    driver.press(sheet, "Attach")
    assert read_connections()[0].label == "GPU box"


def test_a_remembered_engine_is_named_and_forgotten(open_sheet, opened):
    for number in (1, 2):
        remember(Connection(f"tcp://127.0.0.1:{number}", label=""))
    sheet = open_sheet()
    assert not sheet.fields.forget.isEnabled()
    driver.choose(sheet.fields.known, 2)
    sheet.fields.name.setText("old box")
    sheet.fields.name.editingFinished.emit()
    assert sheet.fields.known.currentText().startswith("old box")
    assert [known.label for known in read_connections()] == ["", "old box"]
    sheet.fields.forget.click()
    assert [known.endpoint for known in read_connections()] == ["tcp://127.0.0.1:2"]
    assert (sheet.fields.where.text(), sheet.fields.name.text(), sheet.fields.known.count()) == ("", "", 2)
    assert not sheet.fields.forget.isEnabled()
    assert opened == []


def test_a_name_goes_with_a_new_engine(open_sheet):
    sheet = open_sheet()
    sheet.fields.where.setText("ipc:///tmp/a")
    sheet.fields.name.setText(" mine ")
    driver.press(sheet, "Attach")
    assert read_connections() == [Connection("ipc:///tmp/a", "", "mine")]


@pytest.mark.parametrize(
    ("endpoint", "text", "words"),
    [
        ("tcp://192.0.2.1:7710", "", "without a key file"),
        ("tcp://192.0.2.1:7710", "/nowhere/x.key", "/nowhere/x.key cannot be read"),
        ("tcp://192.0.2.1:7710", "none", "without a key file"),
        ("http://x", "", "http://x"),
    ],
)
def test_what_cannot_work_is_told_and_opens_nothing(open_sheet, opened, endpoint, text, words):
    sheet = open_sheet()
    sheet.fields.where.setText(endpoint)
    sheet.fields.key.setText(text)
    driver.press(sheet, "Attach")
    assert words in driver.text(sheet)
    assert sheet.isVisible()
    assert sheet.height() >= sheet.layout().totalHeightForWidth(sheet.width())
    assert opened == []


def test_a_damaged_connections_file_is_told_and_not_overwritten(open_sheet, opened):
    connections_path().parent.mkdir(parents=True)
    connections_path().write_text("[[nonsense")
    sheet = open_sheet()
    assert "connections.toml is not accepted" in driver.text(sheet)
    sheet.fields.where.setText("ipc:///tmp/a")
    driver.press(sheet, "Attach")
    assert connections_path().read_text() == "[[nonsense"


@pytest.fixture
def external(monkeypatch):
    """Addresses of other engines are taken as they are."""
    monkeypatch.setattr(addresses, "external_address", lambda address: None)


@pytest.fixture
def given(qtbot):
    """A sheet, and the addresses that it gave."""
    parent, found = QWidget(), []
    qtbot.addWidget(parent)
    sheet = AttachDialog(parent, found.append)
    sheet.show()
    yield sheet, found
    parent.close()


def test_the_fields_are_those_of_the_kind(given):
    fields = given[0].fields
    assert (fields.key.isVisible(), fields.api_key.isVisible(), fields.kv_events.isVisible()) == (True, False, False)
    fields.kinds.chosen.emit(1)
    assert (fields.key.isVisible(), fields.api_key.isVisible(), fields.kv_events.isVisible()) == (False, True, True)
    assert fields.api_key.echoMode() is QLineEdit.EchoMode.Password
    assert not fields.ca.isEnabled()
    fields.tls.setChecked(True)
    assert fields.ca.isEnabled()


def test_another_engine_is_attached_and_its_key_is_not_kept_unless_asked(given, external):
    sheet, found = given
    sheet.fields.kinds.chosen.emit(1)
    sheet.fields.where.setText("gpu-box:8000")
    sheet.fields.api_key.setText("sk-secret")
    sheet.fields.kv_events.setText("tcp://gpu-box:5557")
    sheet.fields.tls.setChecked(True)
    driver.press(sheet, "Attach")
    expected = Address("vllm://gpu-box:8000", kv_events="tcp://gpu-box:5557", api_key="sk-secret", tls=True)
    assert found == [expected]
    kept = Connection("vllm://gpu-box:8000", kv_events="tcp://gpu-box:5557", tls=True)
    assert read_connections() == [kept]
    assert "sk-secret" not in connections_path().read_text()
    assert not api_keys_path().exists()


def test_a_key_that_is_kept_is_private_comes_back_and_is_forgotten_with_its_engine(given, external, qtbot):
    sheet, _ = given
    sheet.fields.kinds.chosen.emit(2)
    sheet.fields.where.setText("box:30000")
    sheet.fields.api_key.setText("sk-secret")
    sheet.fields.keeps_key.setChecked(True)
    driver.press(sheet, "Attach")
    assert api_keys_path().stat().st_mode & 0o777 == 0o600
    parent = QWidget()
    qtbot.addWidget(parent)
    again = AttachDialog(parent, lambda address: None)
    driver.choose(again.fields.known, 1)
    assert again.fields.kind == "sglang"
    assert (again.fields.where.text(), again.fields.api_key.text()) == ("box:30000", "sk-secret")
    assert again.fields.keeps_key.isChecked()
    again.fields.forget.click()
    assert read_api_keys() == {}


def test_a_whole_address_says_its_kind(given):
    sheet, _ = given
    sheet.fields.where.setText("sglang://box:30000")
    sheet.fields.where.textEdited.emit("sglang://box:30000")
    assert sheet.fields.kind == "sglang"


@pytest.mark.parametrize(
    ("typed", "address"),
    [
        (TypedAddress("vllm", "box:8000"), Address("vllm://box:8000")),
        (TypedAddress("vllm", "vllm://box:8000"), Address("vllm://box:8000")),
        (TypedAddress("sglang", "http://box:30000/"), Address("sglang://box:30000")),
        (TypedAddress("vllm", "https://box"), Address("vllm://box", tls=True)),
        (TypedAddress("kvscope", "ipc:///tmp/a"), Address("ipc:///tmp/a")),
    ],
)
def test_what_is_typed_becomes_an_address(typed, address):
    assert typed.address == address


@pytest.mark.parametrize(
    ("typed", "words"),
    [(TypedAddress("vllm", ""), "HOST:PORT"), (TypedAddress("vllm", "tcp://box:1"), "not accepted for vLLM")],
)
def test_what_is_typed_may_make_no_sense(typed, words):
    with pytest.raises(BadInput, match=words):
        assert typed.address
