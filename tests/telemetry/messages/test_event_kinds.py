"""Texts of events, from their data or as an older engine wrote them."""

from __future__ import annotations

import msgspec
import pytest

from kvscope_telemetry.errors import ProtocolError
from kvscope_telemetry.messages import wire
from kvscope_telemetry.messages.event_kinds import (
    aborted_text,
    cause_text,
    displaced_text,
    emptied_text,
    evicted_text,
    finished_text,
    retracted_text,
)
from kvscope_telemetry.messages.telemetry import Event, EventData, Frame

STARTED = EventData(
    kind="started",
    waited_ns=3_100_000,
    num_known_tokens=140,
    num_pool_blocks=4,
    num_loaded_blocks=2,
    missed="evicted",
    missed_token=96,
    missed_step=31,
)


def event(data: EventData | None, kind: str = "preempted", num_tokens: int = 96) -> Event:
    return Event(
        kind=kind,
        time_ns=9,
        cause="as it was said",
        data=data,
        number=2,
        other=1,
        num_blocks=3,
        num_tokens=num_tokens,
    )


@pytest.mark.parametrize(
    ("noted", "words"),
    [
        (
            event(STARTED, "admitted"),
            "waited 3.1 ms; 3 blocks needed; 96 of 140 tokens were there already, 4 blocks in the pool;"
            " 2 blocks loaded from lower tiers; not more, since the block from token 96 was evicted at step 31",
        ),
        (
            event(EventData(kind="started", waited_ns=2_000_000_000, num_known_tokens=7), "resumed", num_tokens=0),
            "resumed 2.0 s after its preemption; 3 blocks needed; all 7 tokens to compute",
        ),
        (
            event(EventData(kind="preempted", num_needed=1, choice="spared", choice_number=1, recompute_ns=12_000_000)),
            "request #1 needed 1 block and none was available; request #2 was chosen: it was preempted only once;"
            " 96 tokens in 3 blocks to recompute (about 12.0 ms)",
        ),
        (
            event(EventData(kind="started", num_known_tokens=40, num_set_aside=512), "admitted", num_tokens=0),
            "waited 0.0 ms; a run of 512 blocks reserved for it, 3 of them filled; all 40 tokens to compute",
        ),
        (
            event(EventData(kind="asked", by="you", recompute_ns=6_167_600_000)),
            "requested by you; 96 tokens in 3 blocks to recompute (about 6.2 s)",
        ),
        (
            event(EventData(kind="evicted", num_offloaded=2), "evicted"),
            "no block was free; the 3 least recently used cached blocks were evicted, first for request #1;"
            " 2 moved to host memory",
        ),
        (event(EventData(kind="of_a_later_version")), "as it was said"),
        (event(None), "as it was said"),
    ],
)
def test_event_cause_text_is_built_from_event_data_or_taken_from_an_older_engine(noted: Event, words: str) -> None:
    assert cause_text(noted) == words


def test_unknown_choice_of_a_later_version_is_ignored() -> None:
    assert "chosen, being the newest" not in cause_text(event(EventData(kind="preempted", choice="by_lot")))
    assert "request #2 was chosen" in cause_text(event(EventData(kind="preempted", choice="by_lot")))


def test_events_are_readable_between_old_and_new_versions() -> None:
    """The text is sent for readers without the data; an event without data keeps its text."""
    frame = Frame(epoch=1, seq=1, step=1, time_ns=1, events=(event(STARTED, "admitted"),))
    plain = msgspec.msgpack.decode(wire.encode(frame))
    assert plain["events"][0]["cause"] == "as it was said"
    assert wire.decode_telemetry(wire.encode(frame)) == frame
    del plain["events"][0]["data"]
    older = wire.decode_telemetry(msgspec.msgpack.encode(plain))
    assert isinstance(older, Frame)
    assert older.events[0].data is None


def test_absurd_numbers_in_event_data_are_refused() -> None:
    absurd = EventData(kind="started", waited_ns=(1 << 64) - 1)
    with pytest.raises(ProtocolError, match="Event: the number"):
        wire.decode_telemetry(wire.encode(Frame(epoch=1, seq=1, step=1, time_ns=1, events=(event(absurd),))))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (finished_text("stop", 1, 2), "stopped after 1 token; 2 blocks released"),
        (finished_text("length", 5, 1), "reached its limit of new tokens after 5 tokens; 1 block released"),
        (
            finished_text("length", 5, 0, max_tokens=5),
            "reached its limit of 5 new tokens after 5 tokens; 0 blocks released",
        ),
        (
            finished_text("error", 4, 1, num_draft_tokens=6, num_accepted_tokens=3),
            "ended by an error after 4 tokens, 3 of 6 draft tokens accepted; 1 block released",
        ),
        (finished_text("unheard_of", 4, 1), "unheard_of after 4 tokens; 1 block released"),
        (aborted_text("cancelled", 1, 2), "cancelled; 1 token was generated, 2 blocks released"),
        (evicted_text("requested", [(1, "cached block")]), "requested; 1 cached block was evicted"),
        (
            evicted_text(
                "too little was free",
                [(2, "cached block"), (0, "page"), (1, "cached state")],
                number=3,
                order="oldest first",
            ),
            "too little was free; 2 cached blocks and 1 cached state were evicted for request #3, oldest first",
        ),
        (displaced_text(2, 7), "2 blocks were evicted from host memory, where blocks of request #7 are kept now"),
        (emptied_text("the prefix cache", 2, 1), "the prefix cache was emptied: 2 cached blocks and 1 cached state"),
        (
            retracted_text(4, "fewest", 2, other=5, num_tokens=9, num_blocks=3, num_free_tokens=1),
            "the running requests needed more blocks than were free or could be evicted, request #5 first; request #4 "
            "was chosen, having generated the fewest tokens (2); 9 tokens in 3 blocks released; 1 token free now",
        ),
    ],
)
def test_cause_texts_use_singular_and_plural(text: str, expected: str) -> None:
    assert text == expected
