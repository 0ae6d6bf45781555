"""Tests of recurrent states: separate cells and counts, and facts about them."""

from __future__ import annotations

import numpy as np
import pytest

from kvscope_app.debugger.permission import why_not_evict, why_not_pin
from kvscope_app.views.inspector.block_page import block_page
from kvscope_app.views.inspector.findings import findings
from kvscope_app.views.inspector.request_page import request_page
from kvscope_app.views.memory.memory_breakdown import memory_account
from kvscope_app.views.page_map.block_facts import block_facts
from kvscope_app.views.page_map.color_modes import FILL, FILL_FULL
from kvscope_app.views.page_map.drawing.headings import headings
from kvscope_app.views.requests.blocks_text import blocks_sentence
from kvscope_telemetry.ledger import BlockState
from kvscope_telemetry.summaries.session_overview import SessionOverview


@pytest.fixture
def session(make_engine, make_session):
    """Session with blocks 0 to 63 and states 64 to 67; one state belongs to request 7, one is cached."""
    engine = make_engine(num_states=4)
    engine.request(7, blocks=[3, 4, 5])
    engine.request(7, blocks=[65], group=1)
    engine.write_blocks([3, 4], owner=7, filled=16)
    engine.write_blocks([5], owner=7, filled=3)
    engine.write_blocks([65], owner=7, filled=35)
    engine.ledger.hash[66], engine.ledger.prefix_hits[66] = 0xABC, 2
    engine.write_blocks([66], owner=2, filled=4096, ref_count=0, state=BlockState.CACHED)
    return make_session(engine)


def test_page_map_has_a_section_for_recurrent_states(session):
    hello = session.mirror.hello
    pool, states = headings(session.mirror, hello.cache, hello.device)
    assert pool.details == ("64 blocks", "22.5 MiB")
    assert states == ("Recurrent states", ("1 of requests", "1 cached", "4 states", "4.00 MiB"))


def test_facts_about_a_recurrent_state_show_owner_and_tokens(session):
    facts = block_facts(session.mirror, 65, 16)
    assert (facts.title, facts.state, facts.owner) == ("State 1", "active", 7)
    facts_by_name = dict(facts.rows)
    assert facts_by_name["KV group"] == "1: recurrent state, 6 layers"
    assert facts_by_name["After"] == "the first 35 tokens of its text"
    cached_facts = block_facts(session.mirror, 66, 16)
    assert (cached_facts.title, cached_facts.state, cached_facts.color) == ("State 2", "cached", "block_cached")
    assert dict(cached_facts.rows)["Owner"] == "request #2, which released it"
    assert dict(cached_facts.rows)["Prefix hits"] == "2"
    assert block_facts(session.mirror, 64, 16).state == "free"


def test_request_summary_lists_blocks_and_states(session):
    mirror = session.mirror
    words = "Request #7: 3 blocks, 1.05 MiB, 1 recurrent state of 1.00 MiB, 35 of 48 slots filled"
    assert blocks_sentence(mirror, 7) == words
    assert mirror.requests.num_held.tolist() == [3]
    page = request_page(mirror, session.history, 7)
    facts = [fact for group in page.groups for fact in group.facts]
    assert "recurrent state, 6 layers: state 1 of 1.00 MiB" in [fact.value for fact in facts]


def test_pool_counts_exclude_recurrent_states(session):
    mirror = session.mirror
    assert (mirror.num_active, mirror.num_cached, mirror.num_free) == (3, 0, 61)
    parts = {part.key: part.num_bytes for part in memory_account(mirror, None, None).parts}
    assert (parts["kv_active"], parts["kv_cached"]) == (3 * 368_640, 0)
    assert [parts[f"states_{kind}"] for kind in ("active", "kept", "free")] == [1 << 20, 1 << 20, 2 << 20]


def test_recurrent_state_is_found_by_its_number(session):
    (found,) = findings("s2", session.mirror, SessionOverview())
    assert (found.text, found.block) == ("State 2", 66)
    assert findings("hs2", session.mirror, SessionOverview()) == []


def test_states_cannot_be_pinned_or_evicted(session):
    for why_not in (why_not_pin, why_not_evict):
        assert why_not(session.mirror, 66) == "Recurrent states cannot be pinned or evicted"


def test_recurrent_state_counts_as_full_for_any_number_of_tokens(session):
    ledger, rows = session.mirror.ledger, np.array([5, 65, 66])
    assert FILL.keys(ledger, rows, 16, 0).tolist()[1:] == [FILL_FULL, FILL_FULL]
    assert FILL.keys(ledger, rows, 16, 0)[0] > FILL_FULL
    facts = block_page(session.mirror, 65)
    facts_by_name = [fact.value for group in facts.groups for fact in group.facts if fact.name == "Request #7"]
    assert facts_by_name == ["its recurrent state"]
