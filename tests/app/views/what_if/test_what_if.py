"""Tests of the What-if view: questions to its child process, the answers shown, and the end of the child."""

from __future__ import annotations

import os
import sys

import msgspec
import pytest

from kvscope_app.ui.theme import DARK, LIGHT
from kvscope_app.views.what_if import policy_text
from kvscope_app.views.what_if.simulator_process import NOT_INSTALLED
from kvscope_app.views.what_if.what_if_view import (
    NO_ENGINE,
    NOTHING,
    NOTHING_RAN,
    SmallMap,
    WhatIfView,
    memory_of,
    num_columns_of,
    running_rows,
)
from kvscope_telemetry.messages.telemetry import KVGroup, ModelInfo
from kvscope_telemetry.messages.what_if import (
    HOST_PAGE_BYTES,
    PAGE_BYTES,
    MapKind,
    PolicyUse,
    WhatIfAnswer,
)
from kvscope_telemetry.source import Update

ANSWER = WhatIfAnswer(
    policies=[
        PolicyUse(
            allocator="contiguous",
            block_size=16,
            is_current=False,
            num_slots=1024,
            slot_bytes=1024,
            num_used=24,
            num_internal=488,
            num_external=512,
            wasted_share=488 / 512,
            num_placed=1,
            num_waiting=3,
            cells=bytes([1, 3, 0, 0]),
        ),
        PolicyUse(
            allocator="paged",
            block_size=16,
            is_current=True,
            num_slots=1024,
            slot_bytes=1024,
            num_used=24,
            num_internal=8,
            num_external=992,
            wasted_share=0.25,
            num_placed=4,
            cells=bytes([1, 0, 0, 0]),
        ),
        PolicyUse(
            allocator="paged", block_size=4096, is_current=False, num_slots=1024, refused="the memory is smaller"
        ),
    ],
)
SCRIPTED = f"""
import sys
for line in sys.stdin:
    sys.stderr.write(line)
    sys.stderr.flush()
    if '"now"' in line:
        print({msgspec.json.encode(ANSWER).decode()!r}, flush=True)
"""


def python_command(code):
    return [sys.executable, "-c", code]


@pytest.fixture
def make_view(session, qtbot):
    """Function that creates a view with a scripted child process; children are ended afterwards."""
    views = []

    def make(code=SCRIPTED, command=None):
        view = WhatIfView(session, command=command or python_command(code))
        views.append(view)
        qtbot.addWidget(view)
        view.resize(700, 500)
        view.show()
        return view

    yield make
    for view in views:
        view.shut_down()
        assert not view.process.is_running


@pytest.fixture
def busy_mirror(engine, session, poll):
    """Mirror in which two requests run, one waits and one has finished."""
    engine.request(1, blocks=[3, 4])
    engine.request(2, blocks=[5, 6], num_prompt_tokens=28, max_tokens=0)
    engine.request(3, state=0, num_output_tokens=0)
    engine.request(4, state=3)
    poll(session)
    return session.mirror


def wait_for_answer(view, qtbot):
    with qtbot.waitSignal(view.process.answered, timeout=120_000):
        view.refresh()


def lines_sent(view):
    """Return the lines that the scripted child has read so far, which it repeats on its standard error."""
    return bytes(view.process.child.process.readAllStandardError().data()).splitlines()


def test_what_if_query_contains_the_cache_memory_and_running_requests(busy_mirror):
    memory = memory_of(busy_mirror)
    assert (memory.num_blocks, memory.block_size, memory.block_bytes, memory.allocator) == (64, 16, 368_640, "paged")
    assert running_rows(busy_mirror) == [[1, 24, 84, 20], [2, 32, 0, 28]]


def test_what_if_memory_of_the_virtual_allocator_is_its_physical_blocks_and_page_size(
    engine, session, busy_mirror, poll
):
    cache = msgspec.structs.replace(engine.hello.cache, num_physical_blocks=10, allocator="virtual")
    engine.hello = msgspec.structs.replace(engine.hello, cache=cache)
    engine.source.updates.append(Update(snapshot=engine.snapshot()))
    poll(session)
    memory = memory_of(session.mirror)
    assert (memory.num_blocks, memory.page_bytes) == (10, HOST_PAGE_BYTES)
    assert policy_text.page_note(memory.page_bytes) == "virtual: pages of 4 KiB"
    assert policy_text.page_note(PAGE_BYTES) == "virtual: pages of 2 MiB"


def test_what_if_process_is_not_started_while_no_request_runs(make_view, session, monkeypatch):
    view = make_view()
    view.refresh()
    assert not view.process.is_running
    assert view.empty.text() == NOTHING
    assert view.empty.isVisible()
    monkeypatch.setattr(session.timeline, "is_file", True)
    view.refresh()
    assert view.empty.text() == NOTHING_RAN


def test_what_if_view_without_an_engine_shows_a_message(make_engine, make_session, qtbot):
    engine = make_engine()
    engine.source.updates.clear()
    view = WhatIfView(make_session(engine), command=python_command(SCRIPTED))
    qtbot.addWidget(view)
    view.show()
    view.refresh()
    assert view.empty.text() == NO_ENGINE
    assert not view.process.is_running


def test_what_if_cards_show_the_current_allocator_first(make_view, busy_mirror, qtbot):
    view = make_view()
    wait_for_answer(view, qtbot)
    assert view.grid.isVisible()
    first, second, third = view.grid.cards
    assert (first.name.text(), first.summary) == (
        "Paged, 16 per block",
        "8.00 KiB, wasted, 25.0 %, all 4 running, in use now",
    )
    assert first.property("look") == "current"
    assert (second.name.text(), second.summary) == (
        "Contiguous",
        "488.0 KiB, wasted, 95.3 %, 1 running, 3 waiting, 480.0 KiB more",
    )
    assert second.placed.property("look") == "warning"
    assert third.summary == "Does not fit, not enough memory"
    assert "the memory is smaller" in third.toolTip()


def test_what_if_view_sends_no_second_query_while_the_requests_are_unchanged(
    make_view, busy_mirror, engine, session, poll, qtbot
):
    view = make_view()
    wait_for_answer(view, qtbot)
    view.refresh()
    assert not view.process.is_busy
    engine.request(1, blocks=[3, 4], num_output_tokens=5)
    poll(session)
    wait_for_answer(view, qtbot)
    setup, *asked = lines_sent(view)
    assert setup.startswith(b'{"setup":')
    assert asked == [b'{"now":[[1,24,84,20],[2,32,0,28]]}', b'{"now":[[1,25,84,20],[2,32,0,28]]}']


def test_what_if_view_sends_no_query_while_another_is_being_answered(
    make_view, busy_mirror, engine, session, poll, qtbot
):
    view = make_view()
    view.refresh()
    engine.request(1, blocks=[3, 4], num_output_tokens=5)
    poll(session)
    view.refresh()
    qtbot.waitUntil(lambda: not view.process.is_busy, timeout=120_000)
    assert len(lines_sent(view)) == 2


def test_what_if_process_gets_a_new_setup_when_the_engine_restarts(
    make_view, busy_mirror, engine, session, poll, qtbot
):
    view = make_view()
    wait_for_answer(view, qtbot)
    engine.requests.clear()
    engine.restart(epoch=8)
    engine.request(1, blocks=[0, 1])
    poll(session)
    wait_for_answer(view, qtbot)
    assert [b"setup" in line for line in lines_sent(view)] == [True, False, True, False]


def test_what_if_process_gets_an_empty_list_once_no_request_runs_and_the_view_says_so(
    make_view, busy_mirror, engine, session, poll, qtbot
):
    view = make_view()
    wait_for_answer(view, qtbot)
    for number in (1, 2):
        engine.request(number, state=3)
    poll(session)
    wait_for_answer(view, qtbot)
    assert view.empty.isVisible()
    assert view.empty.text() == NOTHING
    assert lines_sent(view)[-1] == b'{"now":[]}'


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import sys; sys.stderr.write('x\\nkvscope-engine: no memory\\n'); sys.exit(1)", "stopped: no memory."),
        ("import sys; sys.stdin.readline(); sys.exit(3)", "stopped: it ended with exit code 3."),
        ("print('nonsense', flush=True); input(); input(); input()", "cannot be read"),
        ('print(\'{"error": "line 2: bad"}\', flush=True); input(); input(); input()', "stopped: line 2: bad."),
    ],
)
def test_what_if_process_that_failed_is_reported_and_restarted_when_the_view_is_shown_again(
    make_view, busy_mirror, qtbot, code, message
):
    view = make_view(code)
    with qtbot.waitSignal(view.process.failed, timeout=120_000):
        view.refresh()
    assert message in view.empty.text()
    assert view.empty.isVisible()
    view.refresh()
    assert not view.process.is_running
    view.process.child.command = python_command(SCRIPTED)
    view.hide()
    view.show()
    wait_for_answer(view, qtbot)
    assert view.grid.isVisible()
    assert lines_sent(view)[0].startswith(b'{"setup":'), "the new child needs the setup"


def test_what_if_program_that_cannot_be_started_is_reported(make_view, busy_mirror, qtbot):
    view = make_view(command=["/no/such/program"])
    with qtbot.waitSignal(view.process.failed, timeout=120_000):
        view.refresh()
    assert "cannot be started" in view.empty.text()
    assert not view.process.is_busy


def test_what_if_view_says_that_the_engine_package_is_missing(session, busy_mirror, qtbot, monkeypatch):
    monkeypatch.setattr("kvscope_app.engine_launcher.line_process.find_spec", lambda name: None)
    view = WhatIfView(session)
    qtbot.addWidget(view)
    view.show()
    view.refresh()
    assert view.empty.text() == NOT_INSTALLED


def test_closing_the_what_if_view_ends_even_an_unresponsive_process(make_view, busy_mirror, qtbot):
    view = make_view("import time\nprint(input())\ntime.sleep(600)")
    view.refresh()
    qtbot.waitUntil(lambda: view.process.is_running and view.process.child.process.processId() > 0, timeout=120_000)
    pid = view.process.child.process.processId()
    view.shut_down()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    view.shut_down()


def test_what_if_process_runs_only_while_the_view_is_visible_and_the_window_is_open(
    session, busy_mirror, make_window, qtbot
):
    window = make_window(session, with_views=("what_if",), size=(1500, 900))
    view = window.views["what_if"]
    view.refresh()
    assert not view.process.is_running
    with qtbot.waitSignal(view.process.answered, timeout=120_000) as signal:
        window.focus_view("what_if")
    assert [use.block_size for use in signal.args[0].policies if use.allocator == "paged"] == [8, 16, 32, 64, 128]
    window.close()
    assert not view.process.is_running


def test_real_what_if_process_computes_used_and_wasted_slots_of_each_allocator(
    session, engine, busy_mirror, poll, qtbot
):
    model = ModelInfo(name="fake", num_layers=1, max_model_len=256)
    engine.hello = msgspec.structs.replace(engine.hello, model=model)
    engine.source.updates.append(Update(snapshot=engine.snapshot()))
    engine.requests.clear()
    engine.request(1, blocks=[3, 4])
    engine.request(2, blocks=[5, 6], num_prompt_tokens=28)
    poll(session)
    view = WhatIfView(session)
    qtbot.addWidget(view)
    view.show()
    with qtbot.waitSignal(view.process.answered, timeout=120_000) as signal:
        view.refresh()
    uses = {(use.allocator, use.block_size): use for use in signal.args[0].policies}
    current = uses["paged", 16]
    assert (current.is_current, current.num_used, current.num_internal) == (True, 56, 8)
    assert uses["contiguous", 16].num_waiting == 0
    assert uses["contiguous", 16].num_used + uses["contiguous", 16].num_wasted == 512
    assert uses["paged", 8].num_wasted == 0
    assert view.grid.cards[0].summary == "180.0 KiB, wasted, 12.5 %, 2 running, 32 fit, in use now"
    assert {"virtual", "buddy"} < {use.allocator for use in signal.args[0].policies}
    view.shut_down()


WINDOWS = (
    KVGroup(kind="full", num_layers=10, block_bytes=184_320),
    KVGroup(kind="window", num_layers=20, block_bytes=368_640, window=8),
)


@pytest.fixture
def ask_about_groups(session, engine, busy_mirror, poll, qtbot):
    """Function that asks the real child process about requests of 100 and 32 tokens, for an engine with the given
    groups.
    """
    views = []

    def ask(*groups):
        cache = msgspec.structs.replace(engine.hello.cache, groups=groups)
        engine.hello = msgspec.structs.replace(engine.hello, cache=cache)
        engine.source.updates.append(Update(snapshot=engine.snapshot()))
        engine.requests.clear()
        engine.request(1, blocks=range(3, 10), num_prompt_tokens=96)
        engine.request(2, blocks=[10, 11], num_prompt_tokens=28)
        poll(session)
        view = WhatIfView(session)
        views.append(view)
        qtbot.addWidget(view)
        view.resize(900, 700)
        view.show()
        wait_for_answer(view, qtbot)
        return view

    yield ask
    for view in views:
        view.shut_down()


def test_what_if_shows_sliding_window_models_with_and_without_freeing_of_blocks(ask_about_groups):
    view = ask_about_groups(*WINDOWS)
    now, kept = view.grid.cards[:2]
    assert (now.name.text(), kept.name.text()) == ("Paged, 16 per block", "Without freeing")
    # full attention holds 7 and 2 blocks; a window of 8 reads from tokens 93 and 25 on, in 2 blocks and 1
    assert now.summary == "1.01 MiB, wasted, 24.0 %, 2 running, 10 fit, in use now"
    assert kept.summary == "2.97 MiB, wasted, 62.5 %, 2 running, 9 fit, holds 540.0 KiB more"
    assert "all layers hold all tokens" in kept.toolTip()
    assert "No longer read" in kept.toolTip()
    assert "no longer read" in view.legend.accessibleName()
    assert not view.missing.isVisible()


def test_what_if_shows_latent_attention_models_also_with_mla_expanded(ask_about_groups):
    latent = KVGroup(kind="latent", num_layers=30, block_bytes=368_640, expanded_bytes=3_686_400)
    view = ask_about_groups(latent)
    now, wide = view.grid.cards[:2]
    assert (now.placed.text(), wide.name.text()) == ("2 running, 14 fit", "With MLA expanded")
    assert wide.placed.text() == "1 running, 1 waiting"
    assert wide.difference.text() == "holds 3.87 MiB more"
    assert "one latent per token" in wide.toolTip()
    assert "no longer read" not in view.legend.accessibleName()


def test_missing_data_of_an_older_recording_is_explained(ask_about_groups):
    view = ask_about_groups(KVGroup(kind="latent", num_layers=30, block_bytes=368_640))
    assert "With MLA expanded" not in [card.name.text() for card in view.grid.cards]
    assert view.missing.isVisible()
    assert view.missing.text() == "Not known: with MLA expanded"
    assert "does not report how large the keys and values" in view.missing.toolTip()


def test_reserved_blocks_are_excluded_from_the_memory_of_what_if(engine, session, busy_mirror, poll):
    cache = msgspec.structs.replace(engine.hello.cache, num_reserved_blocks=1, groups=WINDOWS)
    engine.hello = msgspec.structs.replace(engine.hello, cache=cache)
    engine.source.updates.append(Update(snapshot=engine.snapshot()))
    poll(session)
    assert memory_of(session.mirror).num_blocks == 63
    assert memory_of(session.mirror).groups == WINDOWS


@pytest.mark.parametrize("theme", [DARK, LIGHT])
def test_cells_of_the_small_what_if_maps_have_the_color_of_their_kind(qtbot, theme):
    small = SmallMap()
    qtbot.addWidget(small)
    small.apply_theme(theme)
    small.setFixedSize(100, 20)
    small.show_cells(bytes([1, 2, 3, 4, 5, 9]))
    image = small.grab().toImage()
    colors = policy_text.map_colors(theme)
    shown = [image.pixelColor(int(100 * (i + 0.5) / small.pixels().shape[1]), 2).name() for i in range(5)]
    kinds = (MapKind.USED, MapKind.RESERVED, MapKind.INTERNAL, MapKind.ROUNDING, MapKind.UNREAD)
    assert shown == [colors[kind] for kind in kinds]


@pytest.mark.parametrize(("width", "num_columns"), [(200, 1), (420, 2), (700, 3)])
def test_what_if_cards_wrap_to_the_width_of_the_view(make_view, busy_mirror, qtbot, width, num_columns):
    view = make_view()
    wait_for_answer(view, qtbot)
    view.resize(width, 600)
    qtbot.waitUntil(lambda: len({card.x() for card in view.grid.cards}) == num_columns, timeout=120_000)
    assert max(card.geometry().right() for card in view.grid.cards) <= view.width()
    first = view.grid.cards[0]
    assert (first.map.geometry().right() < first.waste.x()) == (num_columns == 1), (
        "with one column, the text is beside the map"
    )
    assert len({card.width() for card in view.grid.cards}) <= 2, "all cards have the same width within a pixel"


def test_what_if_cards_are_distributed_evenly_over_rows():
    assert [num_columns_of(8, fitting) for fitting in (1, 2, 3, 4, 5, 7, 8, 20)] == [1, 2, 3, 4, 4, 4, 8, 8]
    assert num_columns_of(0, 3) == 1


def test_what_if_amounts_are_in_slots_if_bytes_are_unknown():
    uses = [msgspec.structs.replace(use, slot_bytes=0.0) for use in ANSWER.policies]
    use, blind = uses[0], msgspec.structs.replace(ANSWER, policies=uses)
    assert policy_text.waste(use) == "488 slots"
    assert policy_text.difference(use, blind) == "480 slots more"
    assert "Wasted: 488 slots" in policy_text.tip(use, blind)
