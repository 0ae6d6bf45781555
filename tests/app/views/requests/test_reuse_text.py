"""Tests of the text about the reuse of cached prefixes."""

from __future__ import annotations

import pytest

from kvscope_app.ui.theme import THEMES
from kvscope_app.views.requests.requests_view import RequestsView
from kvscope_app.views.requests.reuse_text import PromptReuse, reuse_text
from kvscope_telemetry.messages.telemetry import Event, EventData

PROMPT = PromptReuse(num_tokens=140, num_reused=96, has_cache=True)
HIT = EventData(
    kind="started", num_known_tokens=140, num_pool_blocks=4, num_loaded_blocks=2, missed="differs", missed_token=96
)
MISS = EventData(kind="started", num_known_tokens=140, missed="new")


def admitted(data, num_tokens=0, **fields):
    return Event(kind="admitted", time_ns=1, number=7, data=data, num_tokens=num_tokens, **fields)


@pytest.mark.parametrize(
    ("event", "sentence"),
    [
        (
            admitted(HIT, 96),
            "Reused 96 of 140 prompt tokens; 2 blocks loaded from lower tiers;"
            " not more, since it first differs from what is cached at token 96.",
        ),
        (admitted(MISS), "Reused none of its 140 prompt tokens: no cached prefix matches."),
        (
            admitted(EventData(kind="forked"), 139, other=3, num_blocks=9),
            "Forked from request #3; shares its 9 blocks until one of them writes.",
        ),
        (
            admitted(EventData(kind="started", num_known_tokens=140, num_lost_tokens=16)),
            "Reused none of its 140 prompt tokens: 16 tokens could not be read back completely and are recomputed.",
        ),
        (admitted(None, 96, cause="waited 3 ms; of an older engine"), "Reused 96 of 140 prompt tokens."),
        (admitted(None, 139, other=3, cause="forked from request 3; so"), "Forked from request 3; so."),
        (admitted(EventData(kind="of_a_later_version"), 96), "Reused 96 of 140 prompt tokens."),
        (admitted(None), "Reused none of its 140 prompt tokens."),
    ],
)
def test_prefix_reuse_text_states_how_many_prompt_tokens_were_reused_at_admission(event, sentence):
    assert reuse_text([event], 7, PROMPT) == sentence


def test_reuse_text_states_that_prefix_caching_is_off():
    sentence = reuse_text(
        [admitted(EventData(kind="started", num_known_tokens=140))], 7, PromptReuse(140, 0, has_cache=False)
    )
    assert sentence == "Reused nothing: prefix caching is off. All 140 prompt tokens computed."


def test_prefix_reuse_text_states_how_many_tokens_were_cached_at_resumption():
    data = EventData(kind="started", waited_ns=5_000_000, num_known_tokens=366, num_loaded_blocks=23)
    back = Event(kind="resumed", time_ns=2, number=7, data=data, num_tokens=365)
    lines = reuse_text([admitted(MISS), back], 7, PROMPT).splitlines()
    assert lines[1] == "Came back with 365 tokens already cached; 23 blocks loaded from lower tiers."


def test_prefix_reuse_text_ignores_events_of_other_requests():
    other = Event(kind="admitted", time_ns=1, number=8, other=7, cause="forked from request 7", num_tokens=5)
    assert reuse_text([other], 7, PROMPT) == "Reused 96 of 140 prompt tokens."
    assert reuse_text([], 7, PromptReuse(140, 0, has_cache=True)) == ""


def test_reuse_text_is_shown_in_the_detail(engine, session, poll, qtbot):
    view = RequestsView(session)
    qtbot.addWidget(view)
    view.resize(500, 500)
    view.apply_theme(THEMES["dark"])
    view.show()
    engine.request(7, blocks=(1,), num_prompt_tokens=140)
    engine.event(kind="admitted", number=7, data=HIT, num_tokens=96)
    poll(session)
    session.selection.select_request(7)
    view.refresh()
    assert view.detail.reuse.isVisible()
    assert view.detail.reuse.text().startswith("Reused 96 of 140 prompt tokens")
    session.selection.select_request(None)
    view.refresh()
    assert not view.detail.reuse.isVisible()
