"""Tests of the texts and colours about blocks of requests in lower tiers."""

from __future__ import annotations

import numpy as np
import pytest

from kvscope_app.ui.theme import THEMES, mix
from kvscope_app.views.block_locations import BlockLocation, locate_block, section_sizes, tier_counts_text
from kvscope_app.views.requests.block_strip import BlockStrip
from kvscope_app.views.requests.requests_view import RequestsView
from kvscope_app.views.tier_style import TIER_STYLES
from kvscope_telemetry.ledger import LOWER_TIERS, Tier
from kvscope_telemetry.messages.telemetry import CacheInfo

RUNNING, PREEMPTED = 1, 2
CACHE = CacheInfo(num_blocks=64, block_size=16, num_host_blocks=20, num_disk_blocks=10)


@pytest.fixture
def tiered_engine(make_engine):
    """Engine with GPU blocks 0 to 63, host blocks 64 to 83 and disk blocks 84 to 93."""
    return make_engine(num_host=20, num_disk=10)


@pytest.fixture
def show_detail(qtbot):
    def make(session, number):
        view = RequestsView(session)
        qtbot.addWidget(view)
        view.resize(900, 500)
        view.apply_theme(THEMES["dark"])
        view.show()
        session.selection.select_request(number)
        view.refresh()
        return view.detail

    return make


def test_summary_of_a_swapped_request_names_its_tiers(tiered_engine, make_session, show_detail):
    tiered_engine.request(7, blocks=[70, 71, 84], state=PREEMPTED)
    tiered_engine.write_blocks([70, 71], owner=7, filled=16)
    tiered_engine.write_blocks([84], owner=7, filled=2)
    detail = show_detail(make_session(tiered_engine), 7)
    assert detail.summary.text() == (
        "Request #7 is swapped out: 2 blocks in host memory, 1 on disk, 1.05 MiB, 34 of 48 slots filled"
    )
    assert detail.strip.tip(0).startswith("Host block 6\nindex 0 of the table")
    assert detail.strip.tip(2).startswith("Disk block 0\n")


def test_block_strip_paints_host_and_disk_blocks_in_the_colors_of_their_tiers(tiered_engine, make_session, show_detail):
    tiered_engine.request(7, blocks=[5, 70, 84], state=PREEMPTED)
    tiered_engine.write_blocks([5, 70, 84], owner=7)
    strip = show_detail(make_session(tiered_engine), 7).strip
    strip.resize(400, 60)
    image = strip.grab().toImage()
    dark = THEMES["dark"]
    for index, color in enumerate((dark.block_active, dark.block_host, dark.block_disk)):
        box = strip.cell_rect(index)
        assert image.pixelColor(box.left() + 2, box.bottom() - 2).name() == mix(color, dark.base, 0.45)


def test_summary_of_a_partly_offloaded_request_names_the_tier(tiered_engine, make_session, show_detail):
    tiered_engine.request(7, blocks=[5, 70], state=RUNNING)
    tiered_engine.write_blocks([5, 70], owner=7)
    text = show_detail(make_session(tiered_engine), 7).summary.text()
    assert text.startswith("Request #7: 2 blocks (1 block in host memory), ")


def test_summary_of_a_request_in_the_pool_names_no_tier(tiered_engine, make_session, show_detail):
    tiered_engine.request(7, blocks=[5, 6], state=RUNNING)
    tiered_engine.write_blocks([5, 6], owner=7)
    assert (
        show_detail(make_session(tiered_engine), 7).summary.text()
        == "Request #7: 2 blocks, 720.0 KiB, 32 of 32 slots filled"
    )


@pytest.mark.parametrize(
    ("row", "place"),
    [
        (0, BlockLocation(Tier.HBM, 0)),
        (63, BlockLocation(Tier.HBM, 63)),
        (64, BlockLocation(Tier.HOST, 0)),
        (83, BlockLocation(Tier.HOST, 19)),
        (84, BlockLocation(Tier.DISK, 0)),
        (93, BlockLocation(Tier.DISK, 9)),
    ],
)
def test_block_locations_count_from_zero_in_each_tier(row, place):
    assert locate_block(CACHE, row) == place


def test_disk_block_ids_start_right_after_the_gpu_pool_if_there_is_no_host_tier():
    cache = CacheInfo(num_blocks=64, block_size=16, num_disk_blocks=10)
    assert list(section_sizes(cache)) == [Tier.HBM, Tier.DISK]
    assert locate_block(cache, 64) == BlockLocation(Tier.DISK, 0)
    assert locate_block(cache, 64).short == "D0"


def test_tier_texts_count_blocks_per_tier():
    assert tier_counts_text({Tier.HBM: 4}) == ""
    assert tier_counts_text({Tier.HBM: 4, Tier.HOST: 62, Tier.DISK: 3}) == "62 blocks in host memory, 3 on disk"
    assert tier_counts_text({Tier.HOST: 0, Tier.DISK: 1}) == "1 block on disk"


def test_cached_blocks_of_a_finished_request_are_counted_in_all_tiers(tiered_engine, make_session, show_detail):
    tiered_engine.request(7, blocks=[], state=3)
    tiered_engine.write_blocks(np.array([5, 70]), owner=7, state=2, ref_count=0)
    assert "2 blocks are still cached" in show_detail(make_session(tiered_engine), 7).summary.text()


@pytest.mark.parametrize("num_blocks", [3, 200])
def test_strip_paints_recurrent_states_like_the_page_map(qtbot, num_blocks):
    cache = CacheInfo(num_blocks=300, block_size=16, num_host_blocks=20, num_states=5, num_host_states=5)
    ids = np.array([*range(num_blocks - 2), 320, 325])  # the first state on the device, and the first in host memory
    strip = BlockStrip()
    qtbot.addWidget(strip)
    strip.show_blocks(ids, np.full(ids.size, 16), np.ones(ids.size, np.int64), 16, cache)
    strip.resize(400, strip.heightForWidth(400))
    image, dark = strip.grab().toImage(), THEMES["dark"]
    for index, color in ((num_blocks - 2, dark.block_active), (num_blocks - 1, dark.block_host)):
        box = strip.cell_rect(index)
        painted = mix(color, dark.base, 0.45) if num_blocks == 3 else color
        assert image.pixelColor(box.left() + 2, box.bottom() - 2).name() == painted


def test_every_tier_has_its_own_name_and_search_words():
    assert set(TIER_STYLES) == set(Tier)
    words = [word for style in TIER_STYLES.values() for word in style.search_words]
    assert len(set(words)) == len(words)
    assert len({style.noun for style in TIER_STYLES.values()}) == len(Tier)
    assert all(TIER_STYLES[tier].color for tier in LOWER_TIERS)
