"""Tests of the memory account: its parts sum to the total, and unknown values are never zero."""

from __future__ import annotations

import random

import pytest
from PySide6.QtWidgets import QLabel

from kvscope_app.ui.number_text import num_bytes
from kvscope_app.ui.theme import THEMES
from kvscope_app.views.memory.memory_breakdown import kv_detail, memory_account
from kvscope_app.views.memory.memory_view import MemoryView
from kvscope_app.views.memory.workspace import allocator_rows
from kvscope_telemetry.ledger import BlockState
from kvscope_telemetry.messages.devices import Devices, Gpu, GpuProcess, Host, HostProcess
from kvscope_telemetry.messages.telemetry import DeviceSample, MemoryBreakdown, ModuleBytes, RankMemory
from kvscope_telemetry.source import Update

MIB = 1 << 20
BLOCK = 368_640


def sample(**fields):
    return DeviceSample(epoch=7, time_ns=1, **fields)


@pytest.fixture
def mirror(engine, session, poll):
    engine.write_blocks([0, 1, 2], owner=1, filled=16)
    engine.write_blocks([3], owner=1, filled=4, ref_count=3)
    engine.write_blocks([4, 5], owner=1, state=BlockState.CACHED, ref_count=0)
    poll(session)
    return session.mirror


def bytes_by_key(result):
    return {part.key: part.num_bytes for part in result.parts}


def test_parts_sum_to_the_device_memory(mirror):
    memory = MemoryBreakdown(epoch=7, time_ns=1, weights_bytes=300 * MIB, kv_bytes=64 * BLOCK)
    whole = memory_account(
        mirror,
        memory,
        sample(memory_total_bytes=4096 * MIB, memory_used_bytes=1000 * MIB, process_bytes=700 * MIB),
    )
    parts = bytes_by_key(whole)
    assert parts["kv_active"] == 4 * BLOCK
    assert parts["kv_cached"] == 2 * BLOCK
    assert parts["kv_free"] == 58 * BLOCK
    assert parts["workspace"] is None
    assert parts["others"] == 300 * MIB
    assert parts["free"] == 3096 * MIB
    assert sum(value for value in parts.values() if value is not None) == 4096 * MIB


def test_unmeasured_parts_of_the_memory_account_are_unknown_instead_of_zero(mirror):
    parts = bytes_by_key(memory_account(mirror, None, None))
    assert [key for key, value in parts.items() if value is None] == ["weights", "workspace", "other", "others", "free"]


def test_gpu_parts_sum_to_the_total_at_every_sample(make_engine, make_session, poll):
    engine = make_engine(device="cuda")
    session = make_session(engine)
    poll(session)
    memory = MemoryBreakdown(
        epoch=7,
        time_ns=1,
        weights_bytes=300 * MIB,
        kv_bytes=64 * BLOCK,
        allocated_bytes=300 * MIB + 64 * BLOCK + 50 * MIB,
        reserved_bytes=300 * MIB + 64 * BLOCK + 90 * MIB,
        split_bytes=3 * MIB,
        peak_bytes=400 * MIB,
        context_bytes=500 * MIB,
        modules=(ModuleBytes(name="Attention", num_bytes=300 * MIB),),
    )
    draw = random.Random(4)
    for _ in range(50):
        total, reserved = 8192 * MIB, draw.randrange(0, 200 * MIB)
        mine, free = draw.randrange(0, 3000 * MIB), draw.randrange(0, 4000 * MIB)
        processes = draw.choice([(GpuProcess(pid=0, used_bytes=mine),), (GpuProcess(pid=9, used_bytes=mine),), None])
        gpu = Gpu(
            index=1,
            memory_total_bytes=total,
            memory_reserved_bytes=reserved,
            memory_used_bytes=total - free - reserved,
            memory_free_bytes=free,
            processes=processes,
        )
        devices = Devices(epoch=7, time_ns=1, gpus=(Gpu(index=0), gpu), used_gpus=(1,))
        whole = memory_account(session.mirror, memory, None, devices)
        parts = bytes_by_key(whole)
        assert sum(value or 0 for value in parts.values()) == whole.total_bytes == total
        assert (parts["workspace"], parts["torch_cache"], parts["context"]) == (50 * MIB, 40 * MIB, 500 * MIB)


def test_cpu_parts_sum_to_the_total_at_every_sample(mirror):
    memory = MemoryBreakdown(epoch=7, time_ns=1, weights_bytes=300 * MIB, kv_bytes=64 * BLOCK)
    draw = random.Random(5)
    for _ in range(50):
        kinds = [draw.randrange(0, 600 * MIB) for _ in range(3)]
        process = HostProcess(pid=0, anonymous_bytes=kinds[0], file_bytes=kinds[1], shared_bytes=kinds[2])
        available = draw.randrange(0, 4096 * MIB)
        host = Host(memory_total_bytes=4096 * MIB, memory_available_bytes=available, processes=(process,))
        whole = memory_account(mirror, memory, None, Devices(epoch=7, time_ns=1, host=host))
        assert sum(value or 0 for value in bytes_by_key(whole).values()) == whole.total_bytes == 4096 * MIB


def test_memory_of_a_lost_gpu_is_unknown(make_engine, make_session, poll):
    session = make_session(make_engine(device="cuda"))
    poll(session)
    memory = MemoryBreakdown(epoch=7, time_ns=1, weights_bytes=300 * MIB, kv_bytes=64 * BLOCK)
    lost = Devices(epoch=7, time_ns=1, gpus=(Gpu(index=0, fault="GPU is lost"),), used_gpus=(0,))
    parts = bytes_by_key(memory_account(session.mirror, memory, None, lost))
    assert (parts["other"], parts["others"], parts["free"]) == (None, None, None)
    assert parts["weights"] == 300 * MIB


def test_allocator_rows_list_modules_and_tensors():
    memory = MemoryBreakdown(
        epoch=7,
        time_ns=1,
        weights_bytes=3 * MIB,
        allocated_bytes=5 * MIB,
        modules=(ModuleBytes(name="Attention", num_bytes=2 * MIB), ModuleBytes(name="MLP", num_bytes=MIB)),
    )
    rows = {name.strip(): value for name, value, _ in allocator_rows(memory)}
    assert rows == {"Weights": "3.00 MiB", "Attention": "2.00 MiB", "MLP": "1.00 MiB", "In tensors": "5.00 MiB"}
    assert allocator_rows(None) == []


def test_weights_on_the_host_are_listed_separately():
    memory = MemoryBreakdown(epoch=7, time_ns=1, weights_bytes=3 * MIB, host_weights_bytes=9 * MIB)
    assert {name: value for name, value, _ in allocator_rows(memory)} == {"Weights on the host": "9.00 MiB"}


def test_each_rank_has_an_allocator_row():
    ranks = [
        RankMemory(rank=rank, device="H100", weights_bytes=3 * MIB, kv_bytes=(4 - rank) * MIB, uuid=f"u{rank}")
        for rank in (0, 1)
    ]
    rows = allocator_rows(MemoryBreakdown(epoch=1, time_ns=0, ranks=tuple(ranks)))
    assert [(name, value) for name, value, _ in rows] == [("Rank 0", "7.00 MiB"), ("Rank 1", "6.00 MiB")]
    assert "H100 (u0)" in rows[0][2]


def test_memory_account_shows_negative_other_memory_if_the_kv_pool_is_not_resident(mirror):
    memory = MemoryBreakdown(epoch=7, time_ns=1, weights_bytes=300 * MIB, kv_bytes=64 * BLOCK)
    whole = memory_account(mirror, memory, sample(process_bytes=100 * MIB))
    assert bytes_by_key(whole)["other"] == 100 * MIB - 300 * MIB - 64 * BLOCK  # negative, and shown as such
    assert whole.total_bytes is None
    assert all(whole.share(part) is None for part in whole.parts)


def test_kv_cache_details_count_used_slots_and_blocks_saved_by_sharing(mirror):
    detail = kv_detail(mirror)
    assert detail.use.num_used == 3 * 16 + 4
    assert detail.use.num_held == 64
    assert detail.use.internal_fragmentation == pytest.approx(12 / 64)
    assert detail.use.num_cached == 32
    assert detail.use.num_free + detail.use.num_cached == 60 * 16
    assert detail.num_saved_blocks == 2
    assert detail.saved_bytes == 2 * BLOCK
    assert detail.token_bytes == BLOCK / 16


def test_memory_view_shows_the_memory_parts_and_a_bar_in_the_colors_of_the_theme(engine, session, poll, qtbot, mirror):
    view = MemoryView(session)
    qtbot.addWidget(view)
    view.resize(420, 300)
    view.show()
    engine.memory(weights_bytes=300 * MIB, kv_bytes=64 * BLOCK)
    engine.source.updates.append(Update(samples=(sample(memory_total_bytes=4096 * MIB),)))
    poll(session)
    view.refresh()
    assert view.heading.text() == "CPU memory · Test CPU"
    assert view.table.value("weights") == "300.0 MiB"
    assert view.table.value("kv_active") == "1.41 MiB"
    assert view.table.value("other") == "unknown"
    assert view.table.value("total") == "4.00 GiB"
    assert view.details.value("Internal fragmentation") == "18.8 %"
    for theme in THEMES.values():
        view.apply_theme(theme)
    view.resize(900, 500)
    image = view.bar.grab().toImage()
    assert image.pixelColor(2, 15).name() == THEMES["light"].series[6]


def test_weights_are_shown_if_paused_before_the_first_memory_breakdown(engine, session, poll, qtbot, mirror):
    view = MemoryView(session)
    qtbot.addWidget(view)
    view.show()
    poll(session)
    session.timeline.pause()
    view.refresh()
    assert view.table.value("weights") == "unknown"
    engine.memory(weights_bytes=300 * MIB, kv_bytes=64 * BLOCK)
    poll(session)
    assert view.table.value("weights") == "300.0 MiB"


def test_memory_view_without_an_engine_shows_no_bar(make_engine, make_session, qtbot):
    engine = make_engine()
    engine.source.updates.clear()
    view = MemoryView(make_session(engine))
    qtbot.addWidget(view)
    view.show()
    view.refresh()
    assert not view.bar.isVisible()


def test_memory_view_shows_each_engine_step_before_the_next_step_arrives(engine, session, poll, make_window, qtbot):
    """The panel must show the same state as the map, however slowly steps arrive."""
    window = make_window(session, with_views=("memory",))
    window.focus_view("memory")
    view = window.views["memory"]
    qtbot.waitUntil(view.isVisible)
    for number in range(1, 6):
        engine.write_blocks([number])
        poll(session)
        held = bytes_by_key(memory_account(session.mirror, session.history.memory, None, None))["kv_active"]
        assert held == number * BLOCK

        def texts():
            return {label.text() for label in view.table.findChildren(QLabel)}

        qtbot.waitUntil(lambda held=held: num_bytes(held) in texts())
