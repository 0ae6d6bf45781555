"""Holes, restarts, duplicates, late and spoilt batches: what was given is what is, or it is said to be uncertain."""

from __future__ import annotations

import random
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.telemetry.kv_events.follower import Follower

from kvscope_telemetry.kv_events.batches import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, KvEvent
from kvscope_telemetry.kv_events.continuity import EventContinuity
from kvscope_telemetry.kv_events.encoding import encode_batch
from kvscope_telemetry.kv_events.stream_items import Gap, Received, Reset

SPOILT = b"\x93spoilt"


class Engine:
    """A publisher without sockets: what is cached, what was published, and what it still has."""

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

    def step(self) -> tuple[int, bytes]:
        """Something is stored, and now and then something goes."""
        draw = self._random.random()
        cached = sorted(self.truth.cached)
        stored = BlockStored(tuple(self._random.getrandbits(64) for _ in range(2)), None, (1, 2), 1, medium="GPU")
        if draw < 0.3 and cached:
            return self.publish(BlockRemoved((self._random.choice(cached),), "GPU"), stored)
        return self.publish(stored)

    def _start(self) -> None:
        self.next_seq = 0


class Followed:
    """A follower of an engine, with or without a replay endpoint."""

    def __init__(self, engine: Engine, *, can_replay: bool = True) -> None:
        self.engine = engine
        self.follower = Follower()
        self.continuity = EventContinuity(lambda item, num_bytes: self.follower.take([item]), can_replay=can_replay)

    def settle(self, *, answers: float = 1.0, seed: int = 0) -> None:
        """All replays that are wanted; of their answers so many arrive."""
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
def followed() -> Followed:
    """From the first batch on, with replays."""
    made = Followed(Engine())
    made.settle()
    for _ in range(5):
        made.continuity.live(*made.engine.step())
    assert made.is_right()
    assert not made.continuity.uncertain
    return made


def without_replay() -> Followed:
    made = Followed(Engine(), can_replay=False)
    for _ in range(5):
        made.continuity.live(*made.engine.step())
    assert made.is_right()
    assert not made.continuity.uncertain
    return made


def test_who_comes_late_is_told_what_was_before() -> None:
    followed = Followed(Engine())
    for _ in range(20):
        followed.engine.step()
    during = followed.engine.step()
    followed.continuity.live(*during)
    followed.settle()
    assert followed.is_right()
    assert (followed.continuity.last, followed.continuity.uncertain) == (20, "")
    assert followed.count(Received) == 21


def test_who_comes_later_than_the_buffer_reaches_says_so() -> None:
    followed = Followed(Engine(buffer_steps=5))
    for _ in range(20):
        followed.engine.step()
    followed.settle()
    assert followed.follower.cached <= followed.engine.truth.cached
    assert "before batch 15" in followed.continuity.uncertain


def test_a_hole_is_filled(followed: Followed) -> None:
    followed.engine.step()
    followed.continuity.live(*followed.engine.step())
    assert followed.continuity.wants == "batches 5 to 5 are missing"
    followed.continuity.live(*followed.engine.step())
    followed.settle()
    assert followed.is_right()
    assert not followed.continuity.uncertain
    assert followed.count(Gap) == followed.count(Reset) == 0


def test_batches_out_of_order_are_put_in_order(followed: Followed) -> None:
    first, second = followed.engine.step(), followed.engine.step()
    followed.continuity.live(*second)
    followed.continuity.live(*first)
    followed.settle()
    assert followed.is_right()
    assert not followed.continuity.uncertain
    assert followed.count(Received) == 7


def test_a_batch_that_comes_twice_is_given_once(followed: Followed) -> None:
    batch = followed.engine.step()
    for _ in range(3):
        followed.continuity.live(*batch)
    assert followed.continuity.counts.duplicates == 2
    assert followed.count(Received) == 6
    assert followed.is_right()
    assert not followed.continuity.uncertain


def test_a_spoilt_batch_is_asked_for_again(followed: Followed) -> None:
    seq, _ = followed.engine.step()
    followed.continuity.live(seq, SPOILT)
    followed.continuity.live(*followed.engine.step())
    followed.settle()
    assert followed.is_right()
    assert not followed.continuity.uncertain


def test_a_batch_that_the_engine_itself_has_spoilt_is_given_up(followed: Followed) -> None:
    seq, _ = followed.engine.step()
    followed.engine.buffer[-1] = (seq, SPOILT)
    followed.continuity.live(seq, SPOILT)
    followed.settle()
    assert f"batch {seq} cannot be read" in followed.continuity.uncertain
    followed.continuity.live(*followed.engine.step())
    assert followed.continuity.last == seq + 1
    assert followed.continuity.counts.unreadable == 1


def test_a_spoilt_copy_in_the_buffer_does_no_harm_where_the_published_one_is_whole(followed: Followed) -> None:
    followed.engine.step()
    seq, payload = followed.engine.step()
    followed.engine.buffer[-1] = (seq, SPOILT)
    followed.continuity.live(seq, payload)
    followed.settle()
    assert followed.is_right()
    assert not followed.continuity.uncertain


def test_a_spoilt_batch_that_nobody_has_any_more_is_given_up_at_once() -> None:
    followed = Followed(Engine(buffer_steps=1))
    followed.settle()
    followed.continuity.live(*followed.engine.step())
    followed.engine.step()
    followed.engine.buffer[-1] = (1, SPOILT)
    followed.continuity.live(1, SPOILT)
    followed.settle()
    assert followed.continuity.uncertain


@pytest.mark.parametrize("missed", [0, 1, 4, 5, 6, 9])
def test_a_restart_is_noticed_however_many_batches_were_missed(followed: Followed, missed: int) -> None:
    followed.engine.restart()
    for _ in range(missed):
        followed.engine.step()
    followed.continuity.connected_anew()
    followed.continuity.live(*followed.engine.step())
    followed.settle()
    assert followed.is_right()
    assert not followed.continuity.uncertain
    assert followed.continuity.counts.restarts >= 1


def test_a_restart_is_noticed_by_the_number_alone(followed: Followed) -> None:
    followed.engine.restart()
    followed.continuity.live(*followed.engine.step())
    followed.settle()
    assert followed.is_right()
    assert not followed.continuity.uncertain
    assert followed.count(Reset) == 1


def test_a_hole_that_outgrew_the_buffer_begins_anew_and_says_so() -> None:
    followed = Followed(Engine(buffer_steps=4))
    followed.settle()
    followed.continuity.live(*followed.engine.step())
    for _ in range(9):
        followed.engine.step()
    followed.continuity.live(*followed.engine.step())
    followed.settle()
    assert followed.follower.cached <= followed.engine.truth.cached
    assert "is unknown" in followed.continuity.uncertain


def test_what_was_missed_last_is_found_by_a_check(followed: Followed) -> None:
    followed.engine.step()
    followed.continuity.check()
    assert followed.continuity.is_checking
    followed.settle()
    assert followed.is_right()
    assert not followed.continuity.uncertain


def test_a_check_holds_up_nobody(followed: Followed) -> None:
    followed.continuity.check()
    followed.continuity.begin_replay()
    followed.continuity.live(*followed.engine.step())
    assert followed.is_right()
    followed.continuity.fail_replay("it does not answer")
    assert not followed.continuity.uncertain


def test_a_replay_that_is_not_answered_leaves_it_uncertain_until_one_is(followed: Followed) -> None:
    followed.engine.step()
    followed.continuity.live(*followed.engine.step())
    followed.continuity.begin_replay()
    followed.continuity.fail_replay("it does not answer")
    assert followed.continuity.uncertain
    followed.continuity.live(*followed.engine.step())
    assert followed.continuity.failed
    followed.continuity.try_again()
    followed.settle()
    assert followed.is_right()
    assert not followed.continuity.uncertain


def test_a_replay_that_breaks_off_is_gone_on_with() -> None:
    followed = Followed(Engine())
    for _ in range(9):
        followed.engine.step()
    followed.continuity.begin_replay()
    for batch in list(followed.engine.buffer)[:4]:
        followed.continuity.replayed(*batch)
    followed.continuity.fail_replay("it broke off")
    followed.settle()
    assert followed.is_right()
    assert followed.count(Received) == 9
    assert not followed.continuity.uncertain


def test_an_unanswered_replay_at_the_beginning_lets_live_batches_through() -> None:
    followed = Followed(Engine())
    followed.engine.step()
    followed.continuity.live(*followed.engine.step())
    followed.continuity.begin_replay()
    followed.continuity.fail_replay("it does not answer")
    followed.continuity.live(*followed.engine.step())
    assert followed.count(Received) == 2
    assert followed.continuity.uncertain == "it does not answer"


def test_without_a_replay_endpoint_a_hole_is_said() -> None:
    followed = without_replay()
    late = followed.engine.step()
    followed.continuity.live(*followed.engine.step())
    assert followed.count(Gap) == 1
    assert followed.continuity.uncertain == "batches 5 to 5 are missing"
    followed.continuity.live(*late)
    assert followed.continuity.counts.duplicates == 1
    assert followed.count(Reset) == 0


def test_without_a_replay_endpoint_all_is_known_again_once_all_is_cleared() -> None:
    followed = without_replay()
    followed.engine.step()
    followed.continuity.live(*followed.engine.step())
    followed.continuity.live(*followed.engine.publish(AllBlocksCleared()))
    followed.continuity.live(*followed.engine.step())
    assert followed.is_right()
    assert not followed.continuity.uncertain


def test_without_a_replay_endpoint_a_restart_begins_anew() -> None:
    followed = without_replay()
    followed.engine.restart()
    followed.continuity.connected_anew()
    assert followed.continuity.uncertain
    followed.continuity.live(*followed.engine.step())
    assert followed.is_right()
    assert not followed.continuity.uncertain


def test_without_a_replay_endpoint_a_restart_that_was_seen_late_says_so() -> None:
    followed = without_replay()
    followed.engine.restart()
    followed.engine.step()
    followed.continuity.live(*followed.engine.step())
    assert "before batch 1" in followed.continuity.uncertain


def test_events_that_cannot_be_read_make_it_uncertain(followed: Followed) -> None:
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
def test_whatever_happens_it_is_right_or_uncertain(
    actions: list[str], seed: int, buffer_steps: int, can_replay: bool
) -> None:
    followed = Followed(Engine(seed, buffer_steps), can_replay=can_replay)
    followed.settle()
    for number, action in enumerate(actions):
        _act(followed, action, seed + number)
    followed.settle()
    followed.continuity.check()
    followed.settle()
    if can_replay:  # without, nobody can tell that the last batch was missed
        assert followed.is_right() or followed.continuity.uncertain, followed.follower.items
    if can_replay and buffer_steps == 10_000 and "half" not in actions:  # all that is asked for is told
        assert followed.is_right()


def _act(followed: Followed, action: str, seed: int) -> None:
    engine, continuity = followed.engine, followed.continuity
    if action == "step":
        continuity.live(*engine.step())
    elif action == "lose":
        engine.step()
    elif action == "clear":
        continuity.live(*engine.publish(AllBlocksCleared()))
    elif action == "spoil":
        continuity.live(engine.step()[0], SPOILT)
    elif action == "twice":
        batch = engine.step()
        continuity.live(*batch)
        continuity.live(*batch)
    elif action == "swap":
        first, second = engine.step(), engine.step()
        continuity.live(*second)
        continuity.live(*first)
    elif action == "restart":
        engine.restart()
        continuity.connected_anew()
    elif action == "cut":
        continuity.connected_anew()
    elif action == "settle":
        followed.settle()
    elif action == "half":
        followed.settle(answers=0.5, seed=seed)
    else:
        continuity.check()
