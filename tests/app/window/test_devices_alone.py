"""A window on `kvscope-engine sample`, which has no pool: nothing is shown as if there were one."""

from __future__ import annotations

from kvscope_app.views.told import DEVICES_ALONE
from kvscope_engine.server.device_publisher import DEVICES_ALONE as ALONE


def test_the_middle_says_what_there_is(make_engine, make_session, make_window, poll):
    session = make_session(make_engine(num_blocks=1, capabilities=ALONE))
    window = make_window(session)
    poll(session)
    assert not window.page_map.isVisible()
    assert window._no_pool.isVisible()
    assert window._no_pool.text() == DEVICES_ALONE
    assert window.docks["devices"].isVisible()


def test_numbers_that_nobody_tells_are_dashes(make_engine, make_session, poll, qtbot):
    from kvscope_app.views.requests.numbers import RequestNumbers

    session = make_session(make_engine(num_blocks=1, capabilities=ALONE))
    poll(session)
    numbers = RequestNumbers()
    qtbot.addWidget(numbers)
    numbers.show_numbers(session.mirror)
    assert {numbers.value(name) for name in ("num_running", "finished", "preemptions")} == {"–"}
    assert numbers._why.text() == "This address tells of devices alone, and there are no requests."
