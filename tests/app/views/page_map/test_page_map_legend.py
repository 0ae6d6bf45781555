"""Tests of the page map's legend: number of lines, hidden entries, tooltip and owners."""

from __future__ import annotations

import pytest

from kvscope_app.ui.theme import DARK, LIGHT, owner_color
from kvscope_app.views.page_map.color_modes import COLOR_MODES, OWNER, STATE
from kvscope_app.views.page_map.drawing.flash_kinds import MOVES
from kvscope_app.views.page_map.legend_items import MAX_OWNERS, ShownItems, may_flash, owners_in, shown_in
from kvscope_app.views.page_map.page_map_legend import PageMapLegend
from kvscope_telemetry.ledger import Tier

ALL = ShownItems(frozenset({Tier.HOST, Tier.DISK}), has_unmapped=True, flashes=MOVES)


@pytest.fixture
def legend(qtbot, themes):
    legend = PageMapLegend()
    qtbot.addWidget(legend)
    legend.resize(400, 20)
    legend.show()
    return legend


def test_legend_of_a_plain_pool_has_one_line_at_any_width(legend):
    one = legend.sizeHint().height()
    legend.resize(80, 20)
    legend.show_mode(STATE, LIGHT, ShownItems())
    assert legend.sizeHint().height() == one


def test_tiers_and_flashes_take_a_second_line_unless_the_map_is_low(legend):
    one = legend.sizeHint().height()
    legend.show_mode(STATE, DARK, ALL)
    assert legend.sizeHint().height() > one
    legend.set_low(True)
    assert legend.sizeHint().height() == one
    for word in (
        "host: swapped",
        "disk: cached",
        "no memory behind it",
        "evicted: evicted from the prefix cache",
        "loaded: loaded from a lower tier",
    ):
        assert word in legend.toolTip()


@pytest.mark.parametrize("width", [150, 260, 400, 2000])
@pytest.mark.parametrize("tiers", [frozenset(), frozenset({Tier.HOST})])
def test_first_flash_of_a_kind_does_not_change_the_height(legend, width, tiers):
    legend.resize(width, 20)
    legend.show_mode(STATE, DARK, ShownItems(tiers, may_flash=MOVES))
    before = legend.sizeHint().height()
    for num_seen in range(1, len(MOVES) + 1):
        legend.show_mode(STATE, DARK, ShownItems(tiers, may_flash=MOVES, flashes=MOVES[:num_seen]))
        assert legend.sizeHint().height() == before
    assert "loaded" in legend.accessibleName()


def test_legend_offers_no_load_flash_if_the_engine_has_no_lower_tiers(make_engine, make_session):
    kinds = may_flash(make_session(make_engine()).mirror)
    assert MOVES[0] in kinds
    assert MOVES[-1] not in kinds, "without a lower tier nothing can be loaded"


@pytest.mark.parametrize("width", [60, 150, 260, 400, 700, 2000])
@pytest.mark.parametrize("is_low", [False, True])
def test_page_map_legend_counts_entries_that_do_not_fit(legend, width, is_low):
    legend.show_mode(STATE, DARK, ALL)
    legend.set_low(is_low)
    legend.resize(width, 20)
    swatches, shown = STATE.legend(DARK, ALL), [swatch for swatch, *_ in legend.fitting]
    assert shown == swatches[: len(shown)]
    hidden = len(swatches) - len(shown)
    assert legend.more_label == (f"+{hidden} more" if hidden else "")
    assert hidden == 0 or width < 2000
    assert all(swatch.label in legend.toolTip() for swatch in swatches)
    assert legend.grab().toImage().width() > 0


def test_hidden_entries_of_a_plain_pool_are_in_the_tooltip(legend):
    legend.show_mode(STATE, DARK, ShownItems())
    legend.resize(90, 20)
    assert legend.more_label
    assert "free" in legend.toolTip()


def test_second_line_of_the_page_map_legend_is_painted(legend):
    legend.show_mode(STATE, DARK, ALL)
    legend.resize(400, legend.sizeHint().height())
    image = legend.grab().toImage()
    below = {image.pixelColor(x, y).name() for x in range(40) for y in range(image.height() // 2, image.height())}
    assert below & {s.color for s in STATE.legend(DARK, ALL)}


@pytest.mark.parametrize("mode", COLOR_MODES, ids=str)
@pytest.mark.parametrize("theme", [DARK, LIGHT])
def test_legend_of_every_color_mode_explains_flashes_and_blocks_without_memory(legend, mode, theme):
    legend.show_mode(mode, theme, ALL)
    for word in ("free", "no memory behind it", "flash: saved"):
        assert word in legend.accessibleName()
    assert ("host: swapped" in legend.accessibleName()) == (mode is STATE)
    assert legend.grab().toImage().width() > 0


def test_reserved_empty_slots_are_in_the_legend(legend, make_engine, make_session):
    legend.show_mode(STATE, DARK, ShownItems(has_reserved=True))
    assert "held, empty slots" in legend.accessibleName()
    assert "shared" not in legend.accessibleName()
    assert not shown_in(make_session(make_engine()).mirror, ()).has_reserved


@pytest.mark.parametrize("mode", COLOR_MODES, ids=str)
def test_pin_marker_is_in_the_legend_while_blocks_are_pinned(legend, mode):
    legend.show_mode(mode, LIGHT, ShownItems())
    assert "pinned" not in legend.accessibleName()
    legend.resize(700, 20)
    legend.show_mode(mode, LIGHT, ShownItems(has_pins=True))
    assert "pinned" in legend.accessibleName()
    ((_, x, _),) = [placed for placed in legend.fitting if placed[0].is_pin]
    image = legend.grab().toImage()
    darks = [image.pixelColor(x + 5 + at, 4 + at).lightness() for at in range(6)]
    assert min(darks) < 60, "the corner marker is not drawn"


@pytest.mark.parametrize("width", [60, 200, 400, 2000])
def test_legend_shows_request_colors_in_owner_mode_and_counts_requests_that_do_not_fit(legend, width):
    shown = ShownItems(owners=(3, 5, 17), num_more_owners=40)
    legend.show_mode(OWNER, DARK, shown)
    legend.resize(width, 20)
    swatches = [swatch for swatch, *_ in legend.fitting]
    for swatch, number in zip(swatches, shown.owners, strict=False):
        assert (swatch.label, swatch.color) == (f"#{number}", owner_color(number, DARK).name())
    assert legend.more_label == f"+{40 + 4 - len(swatches)} more", "free blocks have an entry as well"
    assert "#17" in legend.toolTip()
    assert legend.sizeHint().height() == PageMapLegend().sizeHint().height(), "the height must not depend on the owners"
    legend.show_mode(STATE, DARK, shown)
    assert not any(swatch.label.startswith("#") for swatch, *_ in legend.fitting)


def test_owners_in_the_legend_hold_the_most_blocks(make_engine, make_session, poll):
    engine = make_engine(num_blocks=400)
    for number in range(1, 41):
        first = (number - 1) * 10
        engine.write_blocks(range(first, first + (9 if number > 20 else 2)), owner=number)
    session = make_session(engine)
    poll(session)
    owners, num_more = owners_in(session.mirror)
    assert len(owners) == MAX_OWNERS
    assert num_more == 40 - MAX_OWNERS
    assert set(range(21, 41)) <= set(owners)
    assert list(owners) == sorted(owners)
