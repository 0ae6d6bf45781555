"""Tests of lower tiers in the Memory view."""

from __future__ import annotations

import pytest

from kvscope_app.ui.theme import THEMES
from kvscope_app.views.memory.memory_breakdown import kv_detail, memory_account
from kvscope_app.views.memory.memory_view import MemoryView
from kvscope_app.views.memory.tiers import moved_text, tier_uses
from kvscope_app.views.page_map.color_modes import lower_cached
from kvscope_telemetry.ledger import BlockState, Tier
from kvscope_telemetry.messages.telemetry import Counters

BLOCK = 368_640


def fill_tiers(engine):
    """Use three GPU blocks, two swapped and one cached block in host memory, and one swapped block on disk."""
    engine.write_blocks([0, 1, 2], filled=16)
    engine.write_blocks([64, 65], owner=2, filled=16)
    engine.write_blocks([66], owner=2, filled=16, state=BlockState.CACHED, ref_count=0)
    counters = Counters(swapped_blocks=3, offloaded_blocks=1, loaded_blocks=1200)
    engine.write_blocks([84], owner=2, filled=3, ref_count=2, counters=counters)
    return engine


@pytest.fixture
def tiered_engine(make_engine):
    return fill_tiers(make_engine(num_host=20, num_disk=10))


@pytest.fixture
def show_memory_view(qtbot):
    def make(session):
        view = MemoryView(session)
        qtbot.addWidget(view)
        view.resize(420, 800)
        view.apply_theme(THEMES["dark"])
        view.show()
        view.refresh()
        return view

    return make


def test_swapped_cached_and_free_blocks_are_counted_for_host_memory_and_disk(tiered_engine, make_session):
    host, disk = tier_uses(make_session(tiered_engine).mirror)
    assert (host.title, host.size, host.swapped, host.cached, host.free) == ("Host memory", 20, 2, 1, 17)
    assert (disk.title, disk.size, disk.swapped, disk.cached, disk.free) == ("Disk", 10, 1, 0, 9)
    assert host.num_bytes(host.size) == 20 * BLOCK


def test_kv_cache_details_exclude_blocks_in_host_memory_and_on_disk(tiered_engine, make_session):
    detail = kv_detail(make_session(tiered_engine).mirror)
    assert detail.use.num_used == detail.use.num_held == 48
    assert detail.use.internal_fragmentation == 0.0
    assert detail.use.num_free == 61 * 16
    assert detail.num_saved_blocks == 0


def test_unmapped_blocks_count_as_no_memory(engine, make_session):
    engine.write_blocks(range(40), state=BlockState.UNMAPPED, ref_count=0, owner=-1, filled=0)
    engine.write_blocks([50])
    session = make_session(engine)
    parts = {part.key: part.num_bytes for part in memory_account(session.mirror, None, None).parts}
    assert parts["kv_active"] == BLOCK
    assert parts["kv_free"] == 23 * BLOCK
    assert kv_detail(session.mirror).use.num_free == 23 * 16


def test_host_tier_is_part_of_a_cpu_account_but_not_of_a_gpu_account(tiered_engine, make_engine, make_session):
    parts = {part.key: part.num_bytes for part in memory_account(make_session(tiered_engine).mirror, None, None).parts}
    assert parts["kv_host"] == 20 * BLOCK
    on_gpu = make_session(make_engine(num_host=20, device="cuda"))
    assert "kv_host" not in {part.key for part in memory_account(on_gpu.mirror, None, None).parts}


def test_memory_view_shows_bars_and_bytes_of_host_and_disk_tiers(tiered_engine, make_session, show_memory_view):
    view = show_memory_view(make_session(tiered_engine))
    assert view.tiers.isVisible()
    assert view.tiers.value(Tier.HOST, "swapped") == "720.0 KiB"
    assert view.tiers.value(Tier.HOST, "cached") == "360.0 KiB"
    assert view.tiers.value(Tier.DISK, "free") == "3.16 MiB"
    assert view.tiers.moved == "3 blocks swapped out, 1 moved down, 1\u202f200 loaded back"
    for theme in THEMES.values():
        view.apply_theme(theme)
        bar = view.tiers.parts[Tier.HOST].bar
        image = bar.grab().toImage()
        assert image.pixelColor(8, 7).name() == theme.block_host
        at = round(bar.width() * 2.5 / 20)
        assert image.pixelColor(at, 7).name() == lower_cached(theme.block_host, theme)
        assert image.pixelColor(bar.width() // 2, 7).name() == theme.raised


def test_memory_view_hides_the_tiers_section_if_the_engine_has_no_lower_tiers(session, show_memory_view):
    view = show_memory_view(session)
    assert not view.tiers.isVisible()
    assert "kv_host" not in view.table.rows


def test_memory_view_shows_or_hides_tiers_when_an_engine_with_or_without_tiers_starts(
    tiered_engine, make_engine, make_session, show_memory_view, poll
):
    session = make_session(tiered_engine)
    view = show_memory_view(session)
    plain = make_engine(epoch=9)
    tiered_engine.source.updates.extend(plain.source.updates)
    poll(session)
    view.refresh()
    assert not view.tiers.isVisible()
    assert list(view.table.rows)[-1] == "total"
    again = fill_tiers(make_engine(num_host=20, num_disk=10, epoch=11))
    tiered_engine.source.updates.extend(again.source.updates)
    poll(session)
    view.refresh()
    assert view.tiers.isVisible()
    assert view.table.value("kv_host") == "7.03 MiB"
    assert list(view.table.rows)[-1] == "total"


def test_text_about_moved_blocks_mentions_lost_blocks_only_if_blocks_were_lost():
    assert "lost" not in moved_text(Counters())
    assert moved_text(Counters(lost_blocks=2)).endswith("2 lost and recomputed")
    moved = moved_text(Counters(swapped_states=2, loaded_states=1))
    assert moved.endswith("; recurrent states: 2 swapped out, 1 loaded back")
