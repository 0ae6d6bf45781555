"""Tests of lower tiers on the page map: sections, headings, colours and cards."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace
from PySide6.QtCore import QPoint, QRect, Qt
from PySide6.QtGui import QImage, QRegion
from tests.app import window_driver as driver

from kvscope_app.ui.theme import DARK, LIGHT
from kvscope_app.views.block_locations import map_sections
from kvscope_app.views.page_map.block_facts import block_facts
from kvscope_app.views.page_map.color_modes import STATE, lower_cached
from kvscope_app.views.page_map.drawing.grid import Grid
from kvscope_app.views.page_map.drawing.headings import Heading, headings
from kvscope_app.views.page_map.drawing.pixel_tables import PixelTables, pixel
from kvscope_app.views.page_map.drawing.scene import Scene, fit
from kvscope_app.views.page_map.page_map_view import PageMapView
from kvscope_telemetry.ledger import BlockState, Ledger, Tier
from kvscope_telemetry.messages.capabilities import Capabilities
from kvscope_telemetry.source import Update

PREEMPTED = 2
S = 1_000_000_000
SIZES = [(1456, 512, 900), (64, 7), (1, 1, 1), (300_000, 40_000, 900), (40_000, 3, 80_000)]


@pytest.fixture
def tiered_engine(make_engine):
    """Engine with 64 GPU blocks (ids 0 to 63), 20 host blocks (64 to 83) and 10 disk blocks (84 to 93)."""
    return make_engine(num_host=20, num_disk=10)


@pytest.fixture
def show_page_map(qtbot, themes):
    def make(session, size=(720, 620), theme=DARK):
        view = PageMapView(session)
        qtbot.addWidget(view)
        view.apply_theme(theme)
        view.resize(*size)
        view.set_flashing(False)
        view.show()
        view.refresh()
        qtbot.mouseMove(view, QPoint(0, 0))  # the mouse may be where another test left it, without a move event
        return view

    return make


def tiered_scene(sizes, size=(640, 400), mode=STATE):
    scene = Scene()
    scene.is_flashing = False
    scene.set_mode(mode)
    scene.resize(*size, 20)
    ledger = Ledger(sum(sizes))
    for tier, start in zip(Tier, np.cumsum((0, *sizes)).tolist()[: len(sizes)], strict=False):
        ledger.tier[start:] = tier
    scene.set_ledger(ledger, 16, 1, sizes)
    return scene, ledger


def pixel_at(scene, block):
    x, y = scene.camera.corner_of(*scene.grid.position_of(block))
    middle = scene.camera.pitch / 2
    return scene.pixels[min(int(y + middle), scene.height - 1), min(int(x + middle), scene.width - 1)]


def color_at(view, block):
    image = view.canvas.grab().toImage().convertToFormat(QImage.Format.Format_RGB32)
    cell = view.canvas.cell_rect(block)
    point = cell.topLeft() + QPoint(cell.width() // 4, cell.height() // 5)
    return image.pixelColor(point * image.devicePixelRatio()).name()


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("window", [(1000, 700), (330, 170), (180, 60)])
def test_every_block_of_each_tier_has_its_own_page_map_cell_inside_the_window(sizes, window):
    grid, camera = fit(sum(sizes), *window, sizes, 20)
    ids = np.arange(sum(sizes), dtype=np.uint32)
    cells = grid.cells_of(ids)
    assert (np.diff(cells) > 0).all()
    np.testing.assert_array_equal(grid.blocks_of(cells), ids)
    assert cells[-1] < grid.num_cells
    right, bottom = camera.corner_of(grid.rows, grid.columns)
    assert camera.x >= -1
    assert camera.y >= -1
    assert right <= window[0] + 1
    assert bottom <= window[1] + 1


def test_page_map_sections_of_tiers_begin_in_new_rows_below_a_heading_gap():
    grid = Grid(13, 4, (6, 5, 2), gap_rows=2)
    assert [s.first_row for s in grid.sections] == [2, 6, 10]
    assert grid.position_of(6) == (6, 0)
    assert grid.block_at(6, 0) == 6
    assert grid.block_at(3, 2) is None  # after the last block of the first section
    assert grid.block_at(5, 0) is None  # a heading
    assert grid.block_at(10, 1) == 12
    assert grid.rows == 11
    assert grid.blocks_of(np.array([0, 8, 24, 28, 40])).tolist() == [-1, 0, 6, 10, 11]


def test_arrow_keys_skip_headings():
    grid = Grid(13, 4, (6, 5, 2), gap_rows=2)
    assert grid.step_from(4, 0, 1) == 6
    assert grid.step_from(6, 0, -1) == 4
    assert grid.step_from(5, 1, 0) == 6
    assert grid.step_from(12, 0, 1) == 12
    assert grid.step_from(1, 0, -1) == 0


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("zoom", [1.0, 2.3, 9.0])
def test_incremental_drawing_of_tiers_equals_a_full_redraw(sizes, zoom):
    rng = np.random.default_rng(sum(sizes))
    scene, ledger = tiered_scene(sizes, size=(331, 257))
    if zoom != 1.0:
        scene.zoom(zoom, 100, 190)
    for step in range(3):
        ids = np.unique(rng.integers(0, sum(sizes), max(1, sum(sizes) // 40))).astype(np.uint32)
        ledger.state[ids], ledger.ref_count[ids] = rng.integers(0, 4, ids.size), rng.integers(0, 3, ids.size)
        ledger.filled[ids] = rng.integers(0, 17, ids.size)
        scene.change(ids, step + 2, S)
    incremental = scene.pixels.copy()
    scene.pan(0, 0)
    np.testing.assert_array_equal(incremental, scene.pixels)


@pytest.mark.parametrize("theme", [DARK, LIGHT])
def test_page_map_shows_blocks_of_each_tier_in_the_colors_of_the_tier(
    tiered_engine, make_session, show_page_map, theme
):
    tiered_engine.write_blocks([0])
    tiered_engine.write_blocks([64, 65], owner=3)
    tiered_engine.write_blocks([66], state=BlockState.CACHED, ref_count=0)
    tiered_engine.write_blocks([84])
    tiered_engine.write_blocks([85], state=BlockState.CACHED, ref_count=0)
    view = show_page_map(make_session(tiered_engine), theme=theme)
    assert color_at(view, 0) == theme.block_active
    assert color_at(view, 64) == color_at(view, 65) == theme.block_host
    assert color_at(view, 66) == lower_cached(theme.block_host, theme)
    assert color_at(view, 84) == theme.block_disk
    assert color_at(view, 85) == lower_cached(theme.block_disk, theme)
    assert color_at(view, 67) == color_at(view, 93) == color_at(view, 1) == theme.block_free
    assert view.canvas.cell_rect(64).top() >= view.canvas.cell_rect(63).bottom() + 15


@pytest.mark.parametrize("theme", [DARK, LIGHT])
def test_colors_of_a_tier_differ_in_lightness(theme):
    def light(color):
        red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    for color in (theme.block_host, theme.block_disk):
        held, cached, free = light(color), light(lower_cached(color, theme)), light(theme.block_free)
        assert abs(held - cached) > 40
        assert abs(cached - free) > 25


def test_unmapped_block_is_drawn_as_an_outline(tiered_engine):
    scene, ledger = tiered_scene((64,))
    ledger.state[:] = BlockState.UNMAPPED
    scene.change(np.arange(64, dtype=np.uint32), 2, S)
    tables = PixelTables(STATE, DARK)
    assert pixel_at(scene, 9) == pixel(DARK.block_unmapped)
    x, y = (int(v) for v in scene.camera.corner_of(*scene.grid.position_of(9)))
    cell = scene.pixels[y : y + int(scene.camera.pitch), x : x + int(scene.camera.pitch)]
    assert (cell == tables.empty_outline).sum() > scene.camera.pitch


def test_page_map_headings_show_tier_names_and_how_many_blocks_are_used(
    tiered_engine, make_engine, make_session, show_page_map
):
    tiered_engine.write_blocks([64, 65])
    tiered_engine.write_blocks([66], state=BlockState.CACHED, ref_count=0)
    view = show_page_map(make_session(tiered_engine))
    titles = [heading.title for heading in view.canvas.headings]
    assert titles == ["Memory", "Host memory", "Disk"]
    assert view.canvas.headings[1].details == ("2 swapped out", "1 cached", "20 blocks", "7.03 MiB")
    on_gpu = show_page_map(make_session(make_engine(num_host=4, device="cuda")))
    assert [heading.title for heading in on_gpu.canvas.headings] == ["GPU memory", "Host memory"]


def test_headings_are_painted_and_stay_slim_when_zoomed(make_engine, make_session, show_page_map):
    view = show_page_map(make_session(make_engine(num_blocks=200_000, num_host=50_000)))
    first = view.canvas.cell_rect(200_000)
    band = view.canvas.grab().toImage()
    colors = {band.pixelColor(x, y).name() for y in range(first.top() - 18, first.top() - 2) for x in range(40, 300)}
    assert DARK.text in colors
    for _ in range(30):
        view.canvas.zoom(1.3, view.canvas.cell_rect(200_000).topLeft().toPointF())
    gap = view.scene.grid.gap_rows * view.scene.camera.pitch
    assert gap < 2 * view.scene.camera.pitch
    assert view.scene.block_at(*view.canvas.to_scene(view.canvas.cell_rect(200_001).center().toPointF())) == 200_001


def test_map_without_lower_tiers_has_no_headings(session, show_page_map):
    view = show_page_map(session)
    assert view.canvas.headings == ()
    assert view.scene.grid.gap_rows == 0
    assert view.legend.accessibleName() == "Colours show state: active, shared, cached, free"
    assert view.legend.toolTip() == ""


def test_card_of_a_host_block_names_the_swapped_request(tiered_engine, make_session, show_page_map, qtbot):
    tiered_engine.request(7, blocks=[84, 70, 71, 76], state=PREEMPTED)
    tiered_engine.write_blocks([84, 70, 71, 76], owner=7)
    session = make_session(tiered_engine)
    view = show_page_map(session)
    facts = block_facts(session.mirror, 76, 16)
    assert facts.sentence.startswith("Host block 12: swapped out, holds block 3 of request #7 (swapped out)")
    qtbot.mouseMove(view.canvas, view.canvas.cell_rect(76).center())
    assert "Host block 12" in driver.visible_texts(view.card)
    assert "block 3 of request #7 (swapped out)" in driver.visible_text(view.card)
    assert block_facts(session.mirror, 84, 16).title == "Disk block 0"
    qtbot.mouseMove(view.canvas, view.canvas.cell_rect(90).center())
    assert "Empty" in driver.visible_text(view.card)


def test_click_on_a_host_block_selects_its_swapped_request(tiered_engine, make_session, show_page_map, qtbot):
    tiered_engine.request(7, blocks=[84, 70], state=PREEMPTED)
    tiered_engine.write_blocks([84, 70], owner=7)
    tiered_engine.write_blocks([72], owner=8)
    session = make_session(tiered_engine)
    view = show_page_map(session)
    qtbot.mouseClick(view.canvas, Qt.MouseButton.LeftButton, pos=view.canvas.cell_rect(70).center())
    assert session.selection.request == 7
    assert color_at(view, 84) == DARK.block_disk
    assert color_at(view, 72) != DARK.block_host


def test_unmapped_block_is_described_as_having_no_memory(engine, make_session, show_page_map):
    engine.write_blocks([3], state=BlockState.UNMAPPED, ref_count=0, owner=-1, filled=0)
    session = make_session(engine)
    facts = block_facts(session.mirror, 3, 16)
    assert (facts.state, facts.color, facts.rows, facts.text_lookup) == ("unmapped", "block_unmapped", (), None)
    assert "without memory" in facts.empty_text
    view = show_page_map(session)
    assert "1 without memory" in view.summary.longest
    assert "no memory behind it" in view.legend.accessibleName()
    assert view.usage.toolTip() == "0.0 % active, 0.0 % cached, 100.0 % free"


def test_headings_disappear_with_an_engine_without_tiers(tiered_engine, make_engine, make_session, show_page_map, poll):
    session = make_session(tiered_engine)
    view = show_page_map(session)
    plain = make_engine(num_blocks=94, epoch=9)  # the same number of rows, in one section
    plain.write_blocks([93])
    tiered_engine.source.updates.extend(plain.source.updates)
    poll(session)
    view.refresh()
    view.draw_all()
    assert view.scene.grid.sections[-1].size == 94
    assert view.canvas.headings == ()
    assert color_at(view, 93) == DARK.block_active


@pytest.mark.parametrize("size", [(720, 620), (1200, 260), (500, 400)])
def test_block_numbers_stay_when_rows_of_the_grid_are_repainted(make_engine, show_page_map, make_session, size):
    view = show_page_map(make_session(make_engine(num_host=900)), size, LIGHT)
    canvas = view.canvas
    painted = canvas.grab()
    whole = painted.toImage()
    left = max(0, int(canvas.scene.camera.x))
    beside = QRect(0, 0, left + canvas.gutter, canvas.height())
    assert len({whole.pixel(x, y) for x in range(beside.width() - 4) for y in range(whole.height())}) > 2, (
        "numbers should be drawn"
    )
    for top in (0, canvas.height() // 3, canvas.height() // 2):
        rows = QRect(canvas.gutter, top, canvas.width() - canvas.gutter, 18)
        canvas.render(painted, rows.topLeft(), QRegion(rows))
        assert painted.toImage().copy(beside) == whole.copy(beside)


def test_llama_slots_are_sections_with_their_use(make_engine, make_session, show_page_map, poll):
    engine = make_engine(capabilities=Capabilities(engine="llama", physical_rows=False))
    cache = replace(engine.hello.cache, slot_blocks=32)
    model = replace(engine.hello.model, max_model_len=500)
    engine.hello = replace(engine.hello, cache=cache, model=model)
    engine.request(1, blocks=range(32, 34))
    engine.write_blocks([32], owner=1, filled=16)
    engine.write_blocks([33], owner=1, filled=5)
    engine.source.updates.clear()
    engine.source.updates.append(Update(snapshot=engine.snapshot()))
    session = make_session(engine)
    poll(session)
    view = show_page_map(session)
    mirror = session.mirror
    assert [section.size for section in view.scene.grid.sections] == [32, 32]
    assert headings(mirror, cache, engine.hello.device) == (
        Heading("Slot 0", ("0 of 500 tokens",)),
        Heading("Slot 1", ("21 of 500 tokens", "#1")),
    )
    assert block_facts(mirror, 33, 16).title == "Slot 1, tokens 16 to 31"
    many = replace(cache, slot_blocks=2)
    assert map_sections(many) == (), "slots that do not fit are one section"
