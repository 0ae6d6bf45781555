"""The writer's queue: bounded, in order, drained in batches."""

from __future__ import annotations

import threading

from kvscope_telemetry.messages.telemetry import Heartbeat
from kvscope_telemetry.recordings.write_queue import Mark, Queued, RecordingQueue

BEAT = Heartbeat(epoch=1, time_ns=1, seq=1, step=1)


def _sizes(queue: RecordingQueue) -> list[int]:
    taken = queue.drain(0.0)
    assert taken is not None
    return [each.num_bytes for each in taken if isinstance(each, Queued)]


def test_queue_is_bounded_by_bytes() -> None:
    queue = RecordingQueue(1000)
    assert [queue.put(BEAT, bytes(300), wait=False) for _ in range(4)] == [True, True, True, False]
    assert queue.num_refused == 1
    assert _sizes(queue) == [300] * 3


def test_oversized_message_is_accepted_if_the_queue_is_nearly_empty() -> None:
    queue = RecordingQueue(1000)
    assert queue.put(BEAT, bytes(400), wait=False)
    assert queue.put(BEAT, bytes(5000), wait=False)
    assert not queue.put(BEAT, bytes(5000), wait=False)
    assert not queue.put(BEAT, bytes(1), wait=False)
    assert _sizes(queue) == [400, 5000]
    assert queue.put(BEAT, bytes(600), wait=False)
    assert not queue.put(BEAT, bytes(5000), wait=False)


def test_waiting_put_into_a_full_recording_queue_succeeds_once_there_is_space() -> None:
    queue = RecordingQueue(1000)
    queue.put(BEAT, bytes(900), wait=False)
    waiting = threading.Thread(target=queue.put, args=(BEAT, bytes(900)), kwargs={"wait": True})
    waiting.start()
    assert _sizes(queue) == [900]
    waiting.join()
    assert _sizes(queue) == [900]


def test_mark_put_into_the_recording_queue_comes_after_earlier_messages() -> None:
    queue, mark = RecordingQueue(1000), Mark()
    queue.put(BEAT, bytes(10), wait=False)
    queue.put_mark(mark)
    taken = queue.drain(1.0)
    assert taken is not None
    assert taken[1] is mark
    assert not mark.is_set()


def test_marks_in_the_recording_queue_are_released_when_it_is_closed() -> None:
    queue, before, after = RecordingQueue(1000), Mark(), Mark()
    queue.put(BEAT, bytes(10), wait=False)
    queue.put_mark(before)
    queue.close(discard=True)
    queue.put_mark(after)
    assert before.is_set()
    assert after.is_set()
    assert queue.num_refused == 1
    assert queue.drain(0.0) is None
