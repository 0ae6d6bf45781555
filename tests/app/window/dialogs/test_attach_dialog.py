"""Tests of the attach dialog: validation of addresses and key files, and remembered connections."""

from __future__ import annotations

import pytest
from PySide6.QtCore import Qt
from PySide6.QtWidgets import QFileDialog, QLineEdit, QListWidget, QWidget
from tests.app import window_driver as driver

from kvscope_app.window.dialogs import found_engines
from kvscope_app.window.dialogs.attach_address import TypedAddress
from kvscope_app.window.dialogs.attach_dialog import AttachDialog
from kvscope_telemetry import addresses
from kvscope_telemetry.addresses import Address
from kvscope_telemetry.credentials.api_keys import api_keys_path, read_api_keys
from kvscope_telemetry.credentials.key_ring import KeyRing
from kvscope_telemetry.discovery.found_engine import FoundEngine
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.roles import Role
from kvscope_telemetry.transport.connections import Connection, connections_path, read_connections, remember


@pytest.fixture
def opened_addresses():
    return []


@pytest.fixture
def open_dialog(qtbot, opened_addresses):
    parent = QWidget()
    qtbot.addWidget(parent)

    def make():
        dialog = AttachDialog(parent, lambda address: opened_addresses.append((address.text, address.key)))
        dialog.show()
        return dialog

    return make


@pytest.fixture
def key_file(tmp_path):
    KeyRing(tmp_path / "elsewhere").new("laptop", Role.OPERATOR, tmp_path / "laptop.key")
    return tmp_path / "laptop.key"


def test_chosen_key_file_is_remembered_with_the_address(open_dialog, opened_addresses, key_file, monkeypatch):
    dialog = open_dialog()
    monkeypatch.setattr(QFileDialog, "getOpenFileName", lambda *_: (str(key_file), ""))
    dialog.fields.pick_key.click()
    dialog.fields.address_line.setText("tcp://192.0.2.1:7710")
    driver.click_button(dialog, "Attach")
    assert opened_addresses == [("tcp://192.0.2.1:7710", key_file)]
    assert read_connections() == [Connection("tcp://192.0.2.1:7710", str(key_file))]
    again = open_dialog()
    driver.choose_row(again.fields.saved_engines, 1)
    assert (again.fields.address_line.text(), again.fields.key.text()) == ("tcp://192.0.2.1:7710", str(key_file))
    driver.click_button(again, "Attach")
    assert len(opened_addresses) == 2


def test_labels_of_connections_are_shown_and_saved(open_dialog, key_file):
    remember(Connection("tcp://192.0.2.1:7710", str(key_file), "GPU box"))
    dialog = open_dialog()
    assert dialog.fields.saved_engines.itemText(1).startswith("GPU box")
    driver.choose_row(dialog.fields.saved_engines, 1)
    driver.click_button(dialog, "Attach")
    assert read_connections()[0].label == "GPU box"


def test_remembered_engine_can_be_named_and_forgotten(open_dialog, opened_addresses):
    for number in (1, 2):
        remember(Connection(f"tcp://127.0.0.1:{number}", label=""))
    dialog = open_dialog()
    assert not dialog.fields.forget_button.isEnabled()
    driver.choose_row(dialog.fields.saved_engines, 2)
    dialog.fields.name.setText("old box")
    dialog.fields.name.editingFinished.emit()
    assert dialog.fields.saved_engines.currentText().startswith("old box")
    assert [known.label for known in read_connections()] == ["", "old box"]
    dialog.fields.forget_button.click()
    assert [known.endpoint for known in read_connections()] == ["tcp://127.0.0.1:2"]
    assert (dialog.fields.address_line.text(), dialog.fields.name.text(), dialog.fields.saved_engines.count()) == (
        "",
        "",
        2,
    )
    assert not dialog.fields.forget_button.isEnabled()
    assert opened_addresses == []


def test_name_of_a_new_engine_is_saved(open_dialog):
    dialog = open_dialog()
    dialog.fields.address_line.setText("ipc:///tmp/a")
    dialog.fields.name.setText(" mine ")
    driver.click_button(dialog, "Attach")
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
def test_invalid_address_or_key_is_reported_and_opens_nothing(open_dialog, opened_addresses, endpoint, text, words):
    dialog = open_dialog()
    dialog.fields.address_line.setText(endpoint)
    dialog.fields.key.setText(text)
    driver.click_button(dialog, "Attach")
    assert words in driver.visible_text(dialog)
    assert dialog.isVisible()
    assert dialog.height() >= dialog.layout().totalHeightForWidth(dialog.width())
    assert opened_addresses == []


def test_damaged_connections_file_is_reported_and_not_overwritten(open_dialog, opened_addresses):
    connections_path().parent.mkdir(parents=True)
    connections_path().write_text("[[nonsense")
    dialog = open_dialog()
    assert "connections.toml is not accepted" in driver.visible_text(dialog)
    dialog.fields.address_line.setText("ipc:///tmp/a")
    driver.click_button(dialog, "Attach")
    assert connections_path().read_text() == "[[nonsense"


@pytest.fixture
def without_address_checks(monkeypatch):
    """Accept addresses of other engines without checking them."""
    monkeypatch.setattr(addresses, "external_address", lambda address: None)


@pytest.fixture
def dialog_and_addresses(qtbot):
    """Open attach dialog, and the list of addresses that it passed on."""
    parent, found = QWidget(), []
    qtbot.addWidget(parent)
    dialog = AttachDialog(parent, found.append)
    dialog.show()
    yield dialog, found
    parent.close()


def test_attach_dialog_shows_the_fields_that_the_chosen_kind_of_engine_needs(dialog_and_addresses):
    fields = dialog_and_addresses[0].fields
    assert (fields.key.isVisible(), fields.api_key.isVisible(), fields.kv_events.isVisible()) == (True, False, False)
    fields.engine_kinds.chosen.emit(1)
    assert (fields.key.isVisible(), fields.api_key.isVisible(), fields.kv_events.isVisible()) == (False, True, True)
    assert fields.api_key.echoMode() is QLineEdit.EchoMode.Password
    assert not fields.ca.isEnabled()
    fields.tls.setChecked(True)
    assert fields.ca.isEnabled()


def test_api_key_is_not_saved_by_default(dialog_and_addresses, without_address_checks):
    dialog, found = dialog_and_addresses
    dialog.fields.engine_kinds.chosen.emit(1)
    dialog.fields.address_line.setText("gpu-box:8000")
    dialog.fields.api_key.setText("sk-secret")
    dialog.fields.kv_events.setText("tcp://gpu-box:5557")
    dialog.fields.tls.setChecked(True)
    driver.click_button(dialog, "Attach")
    expected = Address("vllm://gpu-box:8000", kv_events="tcp://gpu-box:5557", api_key="sk-secret", tls=True)
    assert found == [expected]
    kept = Connection("vllm://gpu-box:8000", kv_events="tcp://gpu-box:5557", tls=True)
    assert read_connections() == [kept]
    assert "sk-secret" not in connections_path().read_text()
    assert not api_keys_path().exists()


def test_saved_api_key_is_private_restored_and_forgotten_with_its_engine(
    dialog_and_addresses, without_address_checks, qtbot
):
    dialog, _ = dialog_and_addresses
    dialog.fields.engine_kinds.chosen.emit(2)
    dialog.fields.address_line.setText("box:30000")
    dialog.fields.api_key.setText("sk-secret")
    dialog.fields.keeps_key.setChecked(True)
    driver.click_button(dialog, "Attach")
    assert api_keys_path().stat().st_mode & 0o777 == 0o600
    parent = QWidget()
    qtbot.addWidget(parent)
    again = AttachDialog(parent, lambda address: None)
    driver.choose_row(again.fields.saved_engines, 1)
    assert again.fields.kind == "sglang"
    assert (again.fields.address_line.text(), again.fields.api_key.text()) == ("box:30000", "sk-secret")
    assert again.fields.keeps_key.isChecked()
    again.fields.forget_button.click()
    assert read_api_keys() == {}


def test_address_with_a_scheme_selects_the_kind_of_engine(dialog_and_addresses):
    dialog, _ = dialog_and_addresses
    dialog.fields.address_line.setText("sglang://box:30000")
    dialog.fields.address_line.textEdited.emit("sglang://box:30000")
    assert dialog.fields.kind == "sglang"


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
def test_text_typed_into_the_attach_dialog_becomes_an_engine_address(typed, address):
    assert typed.address == address


@pytest.mark.parametrize(
    ("typed", "words"),
    [(TypedAddress("vllm", ""), "HOST:PORT"), (TypedAddress("vllm", "tcp://box:1"), "not accepted for vLLM")],
)
def test_invalid_typed_text_raises_bad_input(typed, words):
    with pytest.raises(BadInput, match=words):
        assert typed.address


FOUND = (
    FoundEngine("ipc:///tmp/a/telemetry", "kvscope", "org/SmolLM2"),
    FoundEngine("vllm://127.0.0.1:8000", "vLLM"),
    FoundEngine("http://127.0.0.1:11434", "Ollama", note="cannot be watched", can_attach=False),
)


@pytest.fixture
def dialog_with_found_engines(open_dialog, qtbot, monkeypatch):
    """Dialog whose search has found `FOUND`, and the list of the engines."""
    monkeypatch.setattr(found_engines, "find_local_engines", lambda: FOUND)
    dialog = open_dialog()
    rows = driver.only_child(dialog, QListWidget)
    qtbot.waitUntil(rows.isVisible, timeout=60_000)
    return dialog, rows


def test_selected_engine_of_those_found_fills_in_the_address(
    dialog_with_found_engines, opened_addresses, without_address_checks
):
    dialog, rows = dialog_with_found_engines
    assert driver.list_texts(rows)[0] == "kvscope  –  SmolLM2  –  ipc:///tmp/a/telemetry"
    rows.setCurrentRow(1)
    assert (dialog.fields.kind, dialog.fields.address_line.text()) == ("vllm", "127.0.0.1:8000")
    rows.setCurrentRow(0)
    driver.click_button(dialog, "Attach")
    assert opened_addresses == [("ipc:///tmp/a/telemetry", None)]


def test_double_click_on_a_found_engine_attaches_with_its_saved_name(
    dialog_with_found_engines, opened_addresses, qtbot
):
    _, rows = dialog_with_found_engines
    remember(Connection("ipc:///tmp/a/telemetry", label="mine"))
    place = rows.visualItemRect(rows.item(0)).center()
    qtbot.mouseClick(rows.viewport(), Qt.MouseButton.LeftButton, pos=place)
    qtbot.mouseDClick(rows.viewport(), Qt.MouseButton.LeftButton, pos=place)
    assert opened_addresses == [("ipc:///tmp/a/telemetry", None)]


def test_engine_that_cannot_be_watched_is_listed_and_not_selectable(dialog_with_found_engines, opened_addresses, qtbot):
    dialog, rows = dialog_with_found_engines
    place = rows.visualItemRect(rows.item(2)).center()
    qtbot.mouseClick(rows.viewport(), Qt.MouseButton.LeftButton, pos=place)
    qtbot.mouseDClick(rows.viewport(), Qt.MouseButton.LeftButton, pos=place)
    assert "cannot be watched" in driver.list_texts(rows)[2]
    assert (dialog.fields.address_line.text(), opened_addresses) == ("", [])


def test_search_that_finds_nothing_says_so_and_can_be_repeated(open_dialog, qtbot, monkeypatch):
    dialog = open_dialog()
    qtbot.waitUntil(lambda: "No engine found" in driver.visible_text(dialog), timeout=60_000)
    monkeypatch.setattr(found_engines, "find_local_engines", lambda: FOUND)
    driver.click_button(dialog, "Search Again")
    qtbot.waitUntil(driver.only_child(dialog, QListWidget).isVisible, timeout=60_000)


def test_engine_in_prometheus_can_be_attached(open_dialog, opened_addresses):
    dialog = open_dialog()
    dialog.fields.address_line.setText("prometheus://box:9090?job=vllm")
    driver.click_button(dialog, "Attach")
    assert opened_addresses == [("prometheus://box:9090?job=vllm", None)]
    assert read_connections() == [Connection("prometheus://box:9090?job=vllm")]
