"""Tests that an engine added to the registry appears in dialogs, tables, help and messages."""

from __future__ import annotations

import argparse

import pytest
from PySide6.QtWidgets import QAbstractButton, QPushButton, QWidget
from tests.app import window_driver as driver
from tests.telemetry.collectors.conftest import FakeServer
from tests.telemetry.collectors.made_up_engine import MADE_UP, METRICS

from kvscope_app.access_options import add_access_options
from kvscope_app.fleet.fleet_columns import COLUMNS, ENGINE, RUNNING, USAGE
from kvscope_app.views.capability_messages import why_no_commands
from kvscope_app.window.dialogs.attach_dialog import AttachDialog
from kvscope_telemetry.collectors import external_engines
from kvscope_telemetry.fleet.external_member import ExternalMember
from kvscope_telemetry.fleet.fleet_list import FleetEntry
from kvscope_telemetry.transport.connections import read_connections


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(external_engines, "ENGINES", (*external_engines.ENGINES, MADE_UP))
    made = FakeServer()
    made.set_answer("/metrics", METRICS)
    yield made
    made.close()


def test_registered_engine_can_be_attached_and_has_a_row_in_the_fleet(server, qtbot):
    parent, found = QWidget(), []
    qtbot.addWidget(parent)
    dialog = AttachDialog(parent, found.append)
    dialog.show()
    buttons = [button for button in dialog.fields.engine_kinds.findChildren(QAbstractButton) if button.isVisible()]
    assert [button.text() for button in buttons] == ["kvscope", "vLLM", "SGLang", "llama.cpp", "Made-up"]
    buttons[-1].click()
    assert dialog.fields.address_line.placeholderText() == "HOST:4242"
    assert dialog.fields.kv_events.isVisible()
    assert "Where its server listens." in driver.visible_texts(dialog)
    dialog.fields.address_line.setText(f"127.0.0.1:{server.port}")
    next(button for button in dialog.findChildren(QPushButton) if button.text() == "Attach").click()
    (address,) = found
    assert [known.endpoint for known in read_connections()] == [address.text]
    member = ExternalMember(FleetEntry(address), address.open())
    try:
        qtbot.waitUntil(lambda: (member.poll(), member.row().num_running)[1] == 3, timeout=60_000)
        row = member.row()
    finally:
        member.close()
    assert [COLUMNS[place].text(row) for place in (ENGINE, RUNNING, USAGE)] == ["Made-up", "3", "50 %"]


def test_registered_engine_is_named_in_help_and_messages(server):
    parser = argparse.ArgumentParser()
    add_access_options(parser, "--attach")
    help_text = " ".join(parser.format_help().split())
    assert "where vLLM, SGLang or Made-up publishes its KV events" in help_text
    assert why_no_commands(MADE_UP.capabilities) == "Made-up can be watched but not controlled"
