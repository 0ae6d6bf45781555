"""Tests of a window on `kvscope-engine sample`, which reports devices and has no KV pool."""

from __future__ import annotations

from tests.app import window_driver as driver

from kvscope_app.setting_names import LAYOUT_VERSION, layout_name
from kvscope_app.views.capability_messages import DEVICES_ALONE
from kvscope_app.views.console.sample_prompt_buttons import SamplePromptButton
from kvscope_app.views.prefixes.prefixes_view import NO_POOL
from kvscope_engine.server.device_publisher import DEVICES_ONLY as ALONE


def test_window_without_a_pool_shows_a_message_and_the_devices(make_engine, make_session, make_window, poll):
    session = make_session(make_engine(num_blocks=1, capabilities=ALONE))
    window = make_window(session)
    poll(session)
    assert not window.page_map.isVisible()
    assert window.no_pool_label.isVisible()
    assert window.no_pool_label.text() == DEVICES_ALONE
    assert window.docks["devices"].isVisible()


def test_layout_for_devices_only_does_not_replace_the_saved_layout(make_engine, make_session, make_window, poll):
    session = make_session(make_engine(num_blocks=1, capabilities=ALONE))
    window = make_window(session)
    before = window.saveState(LAYOUT_VERSION)
    window.settings.setValue(layout_name("window"), before)
    poll(session)
    window.close()
    assert window.settings.value(layout_name("window")) == before


def test_roofline_explains_that_there_are_no_steps(make_engine, make_session, poll, qtbot):
    from kvscope_app.views.roofline.roofline_view import NO_STEPS_HERE, RooflineView

    session = make_session(make_engine(num_blocks=1, capabilities=ALONE))
    poll(session)
    view = RooflineView(session)
    qtbot.addWidget(view)
    view.refresh()
    assert NO_STEPS_HERE in driver.visible_texts(view)
    view.shut_down()


def test_prefix_view_and_console_offer_nothing_if_the_engine_has_no_kv_pool(
    make_engine, make_session, make_window, poll
):
    session = make_session(make_engine(num_blocks=1, capabilities=ALONE))
    window = make_window(session, with_views=("console", "prefixes"))
    poll(session)
    prefixes, page = window.views["prefixes"], window.views["console"].page
    prefixes.refresh()
    assert NO_POOL in driver.visible_texts(prefixes)
    page.show_status()
    assert page.sample_buttons.findChildren(SamplePromptButton)
    assert all(button.isHidden() for button in page.sample_buttons.findChildren(SamplePromptButton))


def test_unreported_request_counters_are_dashes(make_engine, make_session, poll, qtbot):
    from kvscope_app.views.requests.numbers import RequestNumbers

    session = make_session(make_engine(num_blocks=1, capabilities=ALONE))
    poll(session)
    numbers = RequestNumbers()
    qtbot.addWidget(numbers)
    numbers.show_numbers(session.mirror)
    assert {numbers.value(name) for name in ("num_running", "finished", "preemptions")} == {"–"}
    assert "This address reports devices only; it has no requests." in driver.visible_texts(numbers)
