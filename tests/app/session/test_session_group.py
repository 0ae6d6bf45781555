"""Tests of a group of sessions: opening, finding by source or name, and closing."""

from __future__ import annotations

import pytest

from kvscope_app.session.group import SessionGroup
from kvscope_telemetry.addresses import Address
from kvscope_telemetry.errors import BadInput


@pytest.fixture
def group(qapp):
    made = SessionGroup()
    yield made
    made.close()
    made.deleteLater()


def test_sessions_are_opened_found_and_closed(group, make_engine):
    received = []
    group.added.connect(lambda session: received.append(("added", session)))
    group.removed.connect(lambda session: received.append(("removed", session)))
    one, two = make_engine(), make_engine()
    two.source.name = "vllm://box:8000"
    first, second = group.open(one.source), group.open(two.source)
    assert list(group) == [first, second]
    assert group.find_by_source(two.source) is second
    assert group.find_by_name("vllm://box:8000") is second
    assert group.find_by_name("nowhere") is None
    group.close_session(first)
    group.close_session(first)
    assert one.source.is_closed
    assert not two.source.is_closed
    assert list(group) == [second]
    group.close()
    assert two.source.is_closed
    assert len(group) == 0
    assert [what for what, _ in received] == ["added", "added", "removed", "removed"]


def test_no_session_is_opened_if_one_address_is_invalid(group, tmp_path):
    with pytest.raises(BadInput, match="nonsense"):
        group.open_addresses((Address(f"ipc://{tmp_path}/telemetry"), Address("nonsense")))
    assert len(group) == 0


def test_each_address_gets_its_own_session(group, tmp_path):
    addresses = tuple(Address(f"ipc://{tmp_path}/{name}/telemetry") for name in "ab")
    sessions = group.open_addresses(addresses)
    assert [session.source.name for session in group] == [address.text for address in addresses]
    assert list(group) == sessions
