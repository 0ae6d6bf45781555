"""Tests of the devices view."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from PySide6.QtCore import QSize, Qt
from PySide6.QtGui import QGuiApplication, QKeySequence, QResizeEvent
from PySide6.QtTest import QTest

sys.path.insert(0, str(Path(__file__).parents[3] / "telemetry" / "devices"))
from fake_nvml import GIB, LOST, NVMLError, animate, two_gpus

from kvscope_app.ui.theme import THEMES
from kvscope_app.views.chart.time_bar import RANGES_S
from kvscope_app.views.device.device_view import EMPTY_TEXT, DeviceView
from kvscope_app.views.device.memory_users import process_rows
from kvscope_telemetry.devices.gpus import Gpus
from kvscope_telemetry.messages.devices import Devices, Host, HostProcess
from kvscope_telemetry.source import Update

PROCESS = HostProcess(pid=5, name="engine", anonymous_bytes=2 * GIB, file_bytes=GIB, shared_bytes=0, cores=1.5)
HOST = Host(
    name="A Processor",
    memory_total_bytes=16 * GIB,
    memory_available_bytes=10 * GIB,
    cores=(0.25, 0.75),
    swap_total_bytes=0,
    swap_used_bytes=0,
    processes=(PROCESS,),
)


@pytest.fixture
def nvml():
    return two_gpus()


@pytest.fixture
def publish_devices(engine, session, poll, nvml):
    gpus = Gpus(lambda name: nvml)

    def publish_devices(**fields):
        devices = Devices(epoch=7, time_ns=1, gpus=gpus.sample(), host=HOST, **fields)
        engine.source.updates.append(Update(devices=(devices,)))
        poll(session)
        return devices

    return publish_devices


@pytest.fixture
def publish_host(engine, session, poll):
    def publish_host(**fields):
        engine.source.updates.append(Update(devices=(Devices(epoch=7, time_ns=1, host=HOST, **fields),)))
        poll(session)

    return publish_host


@pytest.fixture
def view(session, qtbot):
    view = DeviceView(session)
    qtbot.addWidget(view)
    view.resize(420, 900)
    view.apply_theme(THEMES["dark"])
    view.show()
    return view


def test_devices_view_without_data_shows_an_explanation(view):
    view.refresh()
    assert view.stack.currentIndex() == 0
    assert "kvscope-engine sample" in EMPTY_TEXT


def test_each_gpu_and_the_machine_have_a_card(view, publish_devices):
    publish_devices(used_gpus=(0,))
    view.refresh()
    first, second, machine = view.cards.values()
    assert first.title.text() == "GPU 0 · NVIDIA H100 80GB HBM3 · the engine's"
    assert first.state.text() == "Slowed down: power limit reached"
    assert first.memory.text() == "Memory 31.0 GiB of 80.0 GiB"
    assert (first.value("Power"), first.value("Temperature")) == ("420 W of 700 W", "66 °C, memory 74 °C")
    assert first.value("NVLink") == "unknown"
    assert second.state.text() == "Idle"
    assert machine.title.text() == "Machine · A Processor"
    assert machine.value("CPU utilization") == "50 % of 2 cores"
    assert machine.value("Swap used") == "none"


def test_lost_gpu_is_shown_as_not_answering_until_it_returns(view, publish_devices, nvml):
    publish_devices()
    view.refresh()
    nvml.gpus[0].broken = dict.fromkeys(
        ("nvmlDeviceGetHandleByIndex", "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2"), NVMLError(LOST)
    )
    publish_devices()
    view.refresh()
    card = next(iter(view.cards.values()))
    assert card.state.text() == "Does not answer: GPU is lost"
    assert (card.memory.text(), card.value("Busy")) == ("Memory unknown", "unknown")
    assert card.bar.accessibleDescription() == ""
    nvml.gpus[0].broken = {}
    publish_devices()
    view.refresh()
    assert card.value("Busy") == "75 %"


def test_machine_without_a_gpu_shows_the_reason(view, publish_host):
    publish_host(fault="no library")
    view.refresh()
    assert view.note.isVisible()
    assert view.note.text() == "No NVIDIA GPU detected: no library"
    assert list(view.cards) == ["host"]
    assert [title for title, panel in view.charts.panels.items() if panel.isVisibleTo(view)] == [
        "CPU utilization",
        "Host memory",
    ]


def test_devices_view_without_charts_can_be_resized(view, publish_host):
    """If Qt called the handler, the error would be lost and the next view would crash."""
    publish_host()
    view.charts.resizeEvent(QResizeEvent(QSize(300, 200), QSize(400, 200)))
    assert view.charts.panels == {}


@pytest.mark.parametrize("attempt", range(4))
def test_devices_view_can_be_opened_and_closed_repeatedly(view, publish_host, attempt):
    publish_host()
    view.refresh()
    assert list(view.cards) == ["host"]


def test_devices_view_accepts_a_time_range_before_data_is_received(view, publish_host):
    view.show_range(0, 10**10)
    view.charts.show_last(RANGES_S["10 min"])
    assert view.charts.panels == {}
    publish_host()
    view.charts.show_last(RANGES_S["30 s"])
    view.refresh()
    assert list(view.cards) == ["host"]


def test_device_charts_show_the_reported_gpu_values(view, publish_devices, nvml, session):
    for at_s in range(4):
        animate(nvml, at_s)
        publish_devices()
    view.draw_all()
    shown = [title for title, panel in view.charts.panels.items() if panel.isVisibleTo(view)]
    assert shown[:4] == ["GPU utilization", "GPU memory", "Power", "Temperature"]
    assert "CPU utilization" in shown
    busy = view.charts.panels["GPU utilization"]
    assert [curve.label for curve in busy.curves] == ["GPU 0", "GPU 1"]
    assert busy.legend.values["GPU-aaaa"] == f"{nvml.gpus[0].busy} %"
    view.charts.show_last(RANGES_S["All"])
    (first, last), _ = busy.plot.view_box.viewRange()
    assert last - first >= min(RANGES_S.values())
    QTest.keyClick(busy.plot, Qt.Key.Key_Left)
    assert not view.charts.bar.live.isChecked()


def test_devices_view_can_be_drawn_in_all_themes_and_widths(view, publish_devices):
    publish_devices()
    for theme in THEMES.values():
        view.apply_theme(theme)
        for width in (300, 420, 900, 1600):
            view.resize(width, 700)
            view.draw_all()
            assert not view.grab().isNull()
    assert view.minimumSizeHint().width() < 300


def test_devices_view_is_not_updated_if_device_data_is_unchanged(view, publish_devices, monkeypatch):
    publish_devices()
    view.refresh()
    shown = []
    monkeypatch.setattr(view, "_show", shown.append)
    view.refresh()
    assert shown == [], "the devices are unchanged"
    publish_devices()
    view.refresh()
    assert len(shown) == 1


def test_processes_are_listed_and_can_be_sorted_and_copied(view, publish_devices, nvml):
    devices = publish_devices()
    view.refresh()
    rows = process_rows(devices)
    assert [(row.device, row.pid) for row in rows] == [
        ("GPU 0", 4711),
        ("GPU 0", 4712),
        ("GPU 1", 4713),
        ("Host", 5),
    ]
    table = view.processes
    assert [table.model().index(row, 3).data() for row in range(4)] == ["24.0 GiB", "5.00 GiB", "unknown", "3.00 GiB"]
    table.sortByColumn(3, Qt.SortOrder.AscendingOrder)
    assert table.model().index(3, 1).data() == "4711"
    table.setFocus()
    QTest.keySequence(table, QKeySequence(QKeySequence.StandardKey.Copy))
    assert "worker4711\t24.0 GiB" in QGuiApplication.clipboard().text()
