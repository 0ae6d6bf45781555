"""A sender of thousands of messages per second waits briefly so that several are sent together."""

from __future__ import annotations

import pytest

from kvscope_telemetry.transport.server_sockets import CROWDED_HZ, NAP_S, Crowding


def naps(crowding, hz, begin_s, seconds=1.0):
    """Return the naps of turns with one message each, at `hz` turns per second."""
    return [crowding.nap_s(1, begin_s + turn / hz) for turn in range(int(seconds * hz))]


@pytest.mark.parametrize("hz", [1, 30, 200, CROWDED_HZ // 2])
def test_sender_does_not_pause_at_the_message_rates_of_a_real_engine(hz):
    assert not any(naps(Crowding(), hz, 100.0, seconds=3.0))


def test_sender_pauses_to_batch_messages_only_while_the_rate_is_high():
    crowding = Crowding()
    assert set(naps(crowding, 2 * CROWDED_HZ, 100.0)[100:]) == {NAP_S}
    together = [crowding.nap_s(6, 101.0 + turn * 0.0012) for turn in range(100)]
    assert set(together) == {NAP_S}, "the rate is as high when messages come together"
    assert not any(naps(crowding, 200, 102.0))


def test_sender_does_not_pause_in_a_turn_without_a_message():
    crowding = Crowding()
    naps(crowding, 2 * CROWDED_HZ, 100.0)
    assert crowding.nap_s(0, 101.0) == 0.0
