"""Continuity of KV events over gaps, restarts, duplicates, late and damaged batches: the cache is right, or reported
as uncertain.
"""

from __future__ import annotations

import random
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.telemetry.kv_events.follower import Follower

from kvscope_telemetry.kv_events.batches import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, KvEvent
from kvscope_telemetry.kv_events.encoding import encode_batch
from kvscope_telemetry.kv_events.event_continuity import EventContinuity
from kvscope_telemetry.kv_events.stream_items import Gap, Received, Reset

SPOILT = b"\x93spoilt"


class Engine:
    """A publisher without sockets: what is cached, what was published, and what its buffer still has."""

    def __init__(self, seed: int = 0, buffer_steps: int = 10_000) -> None:
        self._random = random.Random(seed)
        self._clock = 1000.0
        self.truth = Follower()
        self.buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self._start()

    def restart(self) -> None:
        self.buffer.clear()
        self.truth = Follower()
        self._start()

    def publish(self, *events: KvEvent) -> tuple[int, bytes]:
        self.truth.apply(events)
        self._clock += 1
        payload = encode_batch(EventBatch(self._clock, events, 0))
        self.buffer.append((self.next_seq, payload))
        self.next_seq += 1
        return self.buffer[-1]

    def publish_random_events(self) -> tuple[int, bytes]:
        """Publish a batch that stores blocks and sometimes removes some."""
        draw = self._random.random()
        cached = sorted(self.truth.cached)
        stored = BlockStored(tuple(self._random.getrandbits(64) for _ in range(2)), None, (1, 2), 1, medium="GPU")
        if draw < 0.3 and cached:
            return self.publish(BlockRemoved((self._random.choice(cached),), "GPU"), stored)
        return self.publish(stored)

    def _start(self) -> None:
        self.next_seq = 0


class FollowedEngine:
    """A follower of an engine, with or without a replay endpoint."""

    def __init__(self, engine: Engine, *, can_replay: bool = True) -> None:
        self.engine = engine
        self.follower = Follower()
        self.continuity = EventContinuity(lambda item, num_bytes: self.follower.take([item]), can_replay=can_replay)

    def apply_pending(self, *, answers: float = 1.0, seed: int = 0) -> None:
        """Request all wanted replays. With `answers`, only that share of their batches arrives."""
        chance = random.Random(seed)
        for attempt in range(100):
            if not self.continuity.wants:
                return
            start = self.continuity.begin_replay()
            for seq, payload in list(self.engine.buffer):
                if seq >= start and (attempt > 20 or chance.random() < answers):
                    self.continuity.replayed(seq, payload)
            self.continuity.end_replay()
        raise AssertionError("replays without end")

    def is_right(self) -> bool:
        return self.follower.cached == self.engine.truth.cached

    def count(self, kind: type[Gap] | type[Reset] | type[Received]) -> int:
        return sum(isinstance(item, kind) for item in self.follower.items)


@pytest.fixture
def followed() -> FollowedEngine:
    """Follower from the first batch on, with a replay endpoint."""
    made = FollowedEngine(Engine())
    made.apply_pending()
    for _ in range(5):
        made.continuity.live(*made.engine.publish_random_events())
    assert made.is_right()
    assert not made.continuity.uncertain
    return made


def without_replay() -> FollowedEngine:
    made = FollowedEngine(Engine(), can_replay=False)
    for _ in range(5):
        made.continuity.live(*made.engine.publish_random_events())
    assert made.is_right()
    assert not made.continuity.uncertain
    return made


def test_late_subscriber_gets_earlier_kv_event_batches_by_replay() -> None:
    followed = FollowedEngine(Engine())
    for _ in range(20):
        followed.engine.publish_random_events()
    during = followed.engine.publish_random_events()
    followed.continuity.live(*during)
    followed.apply_pending()
    assert followed.is_right()
    assert (followed.continuity.last, followed.continuity.uncertain) == (20, "")
    assert followed.count(Received) == 21


def test_late_subscriber_is_uncertain_if_the_replay_buffer_lacks_early_batches() -> None:
    followed = FollowedEngine(Engine(buffer_steps=5))
    for _ in range(20):
        followed.engine.publish_random_events()
    followed.apply_pending()
    assert followed.follower.cached <= followed.engine.truth.cached
    assert "before batch 15" in followed.continuity.uncertain


def test_missing_kv_event_batch_is_filled_by_a_replay(followed: FollowedEngine) -> None:
    followed.engine.publish_random_events()
    followed.continuity.live(*followed.engine.publish_random_events())
    assert followed.continuity.wants == "batches 5 to 5 are missing"
    followed.continuity.live(*followed.engine.publish_random_events())
    followed.apply_pending()
    assert followed.is_right()
    assert not followed.continuity.uncertain
    assert followed.count(Gap) == followed.count(Reset) == 0


def test_kv_event_batches_that_arrive_in_the_wrong_order_are_applied_in_order(followed: FollowedEngine) -> None:
    first, second = followed.engine.publish_random_events(), followed.engine.publish_random_events()
    followed.continuity.live(*second)
    followed.continuity.live(*first)
    followed.apply_pending()
    assert followed.is_right()
    assert not followed.continuity.uncertain
    assert followed.count(Received) == 7


def test_duplicate_batch_is_delivered_once(followed: FollowedEngine) -> None:
    batch = followed.engine.publish_random_events()
    for _ in range(3):
        followed.continuity.live(*batch)
    assert followed.continuity.counts.duplicates == 2
    assert followed.count(Received) == 6
    assert followed.is_right()
    assert not followed.continuity.uncertain


def test_damaged_kv_event_batch_is_requested_again(followed: FollowedEngine) -> None:
    seq, _ = followed.engine.publish_random_events()
    followed.continuity.live(seq, SPOILT)
    followed.continuity.live(*followed.engine.publish_random_events())
    followed.apply_pending()
    assert followed.is_right()
    assert not followed.continuity.uncertain


def test_batch_damaged_in_the_replay_too_is_skipped(followed: FollowedEngine) -> None:
    seq, _ = followed.engine.publish_random_events()
    followed.engine.buffer[-1] = (seq, SPOILT)
    followed.continuity.live(seq, SPOILT)
    followed.apply_pending()
    assert f"batch {seq} cannot be read" in followed.continuity.uncertain
    followed.continuity.live(*followed.engine.publish_random_events())
    assert followed.continuity.last == seq + 1
    assert followed.continuity.counts.unreadable == 1


def test_damaged_replay_of_an_intact_batch_is_ignored(followed: FollowedEngine) -> None:
    followed.engine.publish_random_events()
    seq, payload = followed.engine.publish_random_events()
    followed.engine.buffer[-1] = (seq, SPOILT)
    followed.continuity.live(seq, payload)
    followed.apply_pending()
    assert followed.is_right()
    assert not followed.continuity.uncertain


def test_damaged_batch_missing_from_the_buffer_is_skipped() -> None:
    followed = FollowedEngine(Engine(buffer_steps=1))
    followed.apply_pending()
    followed.continuity.live(*followed.engine.publish_random_events())
    followed.engine.publish_random_events()
    followed.engine.buffer[-1] = (1, SPOILT)
    followed.continuity.live(1, SPOILT)
    followed.apply_pending()
    assert followed.continuity.uncertain


@pytest.mark.parametrize("missed", [0, 1, 4, 5, 6, 9])
def test_restart_is_detected_after_any_number_of_missed_batches(followed: FollowedEngine, missed: int) -> None:
    followed.engine.restart()
    for _ in range(missed):
        followed.engine.publish_random_events()
    followed.continuity.reconnected()
    followed.continuity.live(*followed.engine.publish_random_events())
    followed.apply_pending()
    assert followed.is_right()
    assert not followed.continuity.uncertain
    assert followed.continuity.counts.restarts >= 1


def test_publisher_restart_is_detected_by_the_sequence_number(followed: FollowedEngine) -> None:
    followed.engine.restart()
    followed.continuity.live(*followed.engine.publish_random_events())
    followed.apply_pending()
    assert followed.is_right()
    assert not followed.continuity.uncertain
    assert followed.count(Reset) == 1


def test_gap_longer_than_the_replay_buffer_makes_the_cache_content_uncertain() -> None:
    followed = FollowedEngine(Engine(buffer_steps=4))
    followed.apply_pending()
    followed.continuity.live(*followed.engine.publish_random_events())
    for _ in range(9):
        followed.engine.publish_random_events()
    followed.continuity.live(*followed.engine.publish_random_events())
    followed.apply_pending()
    assert followed.follower.cached <= followed.engine.truth.cached
    assert "is unknown" in followed.continuity.uncertain


def test_missed_last_batch_is_found_by_a_check(followed: FollowedEngine) -> None:
    followed.engine.publish_random_events()
    followed.continuity.check()
    assert followed.continuity.is_checking
    followed.apply_pending()
    assert followed.is_right()
    assert not followed.continuity.uncertain


def test_periodic_check_for_missed_batches_does_not_delay_live_batches(followed: FollowedEngine) -> None:
    followed.continuity.check()
    followed.continuity.begin_replay()
    followed.continuity.live(*followed.engine.publish_random_events())
    assert followed.is_right()
    followed.continuity.fail_replay("it does not answer")
    assert not followed.continuity.uncertain


def test_unanswered_replay_is_uncertain_until_a_later_one_succeeds(followed: FollowedEngine) -> None:
    followed.engine.publish_random_events()
    followed.continuity.live(*followed.engine.publish_random_events())
    followed.continuity.begin_replay()
    followed.continuity.fail_replay("it does not answer")
    assert followed.continuity.uncertain
    followed.continuity.live(*followed.engine.publish_random_events())
    assert followed.continuity.failed
    followed.continuity.try_again()
    followed.apply_pending()
    assert followed.is_right()
    assert not followed.continuity.uncertain


def test_interrupted_replay_is_continued() -> None:
    followed = FollowedEngine(Engine())
    for _ in range(9):
        followed.engine.publish_random_events()
    followed.continuity.begin_replay()
    for batch in list(followed.engine.buffer)[:4]:
        followed.continuity.replayed(*batch)
    followed.continuity.fail_replay("it broke off")
    followed.apply_pending()
    assert followed.is_right()
    assert followed.count(Received) == 9
    assert not followed.continuity.uncertain


def test_unanswered_first_replay_lets_live_batches_through() -> None:
    followed = FollowedEngine(Engine())
    followed.engine.publish_random_events()
    followed.continuity.live(*followed.engine.publish_random_events())
    followed.continuity.begin_replay()
    followed.continuity.fail_replay("it does not answer")
    followed.continuity.live(*followed.engine.publish_random_events())
    assert followed.count(Received) == 2
    assert followed.continuity.uncertain == "it does not answer"


def test_gap_without_a_replay_endpoint_is_reported() -> None:
    followed = without_replay()
    late = followed.engine.publish_random_events()
    followed.continuity.live(*followed.engine.publish_random_events())
    assert followed.count(Gap) == 1
    assert followed.continuity.uncertain == "batches 5 to 5 are missing"
    followed.continuity.live(*late)
    assert followed.continuity.counts.duplicates == 1
    assert followed.count(Reset) == 0


def test_uncertainty_ends_when_all_blocks_are_cleared() -> None:
    followed = without_replay()
    followed.engine.publish_random_events()
    followed.continuity.live(*followed.engine.publish_random_events())
    followed.continuity.live(*followed.engine.publish(AllBlocksCleared()))
    followed.continuity.live(*followed.engine.publish_random_events())
    assert followed.is_right()
    assert not followed.continuity.uncertain


def test_restart_without_a_replay_endpoint_resets() -> None:
    followed = without_replay()
    followed.engine.restart()
    followed.continuity.reconnected()
    assert followed.continuity.uncertain
    followed.continuity.live(*followed.engine.publish_random_events())
    assert followed.is_right()
    assert not followed.continuity.uncertain


def test_restart_without_a_replay_endpoint_seen_late_is_uncertain() -> None:
    followed = without_replay()
    followed.engine.restart()
    followed.engine.publish_random_events()
    followed.continuity.live(*followed.engine.publish_random_events())
    assert "before batch 1" in followed.continuity.uncertain


def test_unreadable_events_make_the_cache_uncertain(followed: FollowedEngine) -> None:
    import msgspec

    payload = msgspec.msgpack.encode((1.5, [{"type": "BlockRemoved", "block_hashes": "?", "medium": None}], 0))
    followed.continuity.live(5, payload)
    assert followed.continuity.last == 5
    assert "1 events of batch 5 cannot be read" in followed.continuity.uncertain


ACTIONS = st.lists(
    st.sampled_from(
        ["step", "step", "step", "lose", "spoil", "twice", "swap", "restart", "cut", "settle", "half", "check"]
    )
    | st.just("clear"),
    max_size=40,
)


@given(ACTIONS, st.integers(0, 1 << 16), st.sampled_from([1, 3, 10, 10_000]), st.booleans())
def test_cache_followed_by_kv_events_is_right_or_reported_as_uncertain_for_any_history(
    actions: list[str], seed: int, buffer_steps: int, can_replay: bool
) -> None:
    followed = FollowedEngine(Engine(seed, buffer_steps), can_replay=can_replay)
    followed.apply_pending()
    for number, action in enumerate(actions):
        _act(followed, action, seed + number)
    followed.apply_pending()
    followed.continuity.check()
    followed.apply_pending()
    if can_replay:  # without a replay endpoint, a missed last batch cannot be noticed
        assert followed.is_right() or followed.continuity.uncertain, followed.follower.items
    if can_replay and buffer_steps == 10_000 and "half" not in actions:  # every replay request is answered
        assert followed.is_right()


def _act(followed: FollowedEngine, action: str, seed: int) -> None:
    engine, continuity = followed.engine, followed.continuity
    if action == "step":
        continuity.live(*engine.publish_random_events())
    elif action == "lose":
        engine.publish_random_events()
    elif action == "clear":
        continuity.live(*engine.publish(AllBlocksCleared()))
    elif action == "spoil":
        continuity.live(engine.publish_random_events()[0], SPOILT)
    elif action == "twice":
        batch = engine.publish_random_events()
        continuity.live(*batch)
        continuity.live(*batch)
    elif action == "swap":
        first, second = engine.publish_random_events(), engine.publish_random_events()
        continuity.live(*second)
        continuity.live(*first)
    elif action == "restart":
        engine.restart()
        continuity.reconnected()
    elif action == "cut":
        continuity.reconnected()
    elif action == "settle":
        followed.apply_pending()
    elif action == "half":
        followed.apply_pending(answers=0.5, seed=seed)
    else:
        continuity.check()
