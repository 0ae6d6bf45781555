"""Lists the requests of a recording: arrival time, length, and the prefix that each prompt shares with others."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.messages.telemetry import Frame, RequestInfo, RequestRows, Snapshot
from kvscope_telemetry.mirror.follower import Follower
from kvscope_telemetry.recordings.chunk_decoder import TimedMessage
from kvscope_telemetry.recordings.reader import Recording

_FINISHED = bytes([RequestState.FINISHED])


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    epoch: int
    number: int
    request_id: str
    arrival_ns: int
    """Arrival time on the recording's clock, the same as log times."""
    num_prompt_tokens: int
    num_output_tokens: int
    max_tokens: int
    priority: int
    is_finished: bool
    prefix_hashes: tuple[int, ...] = ()
    """Hashes of the prompt's full blocks, from its start. Within an epoch, equal hashes mean equal text up to that
    block.

    A hash is 0 if it is unknown because another block already held the same text. There are no hashes without prefix
    caching, and for a request that ended with its first token.
    """


def recorded_requests(recording: Recording) -> list[RecordedRequest]:
    """Return all requests in the order they were announced. Reads the whole recording."""
    timed = recording.messages(keyframes=True)
    return _RequestReader().read((recording.start_ns + round(at_s * 1e9), message) for at_s, message in timed)


class _RequestReader:
    def __init__(self) -> None:
        self._follower = Follower()
        self._requests: dict[tuple[int, int], RecordedRequest] = {}
        self._unhashed: set[int] = set()
        """Numbers of the current epoch's requests that have no output token yet."""
        self._epoch: int | None = None
        self._offset_ns = 0

    def read(self, messages: Iterable[TimedMessage]) -> list[RecordedRequest]:
        for log_time_ns, message in messages:
            if isinstance(message, Frame | Snapshot):
                self._read(log_time_ns, message)
        self._end_epoch()
        return list(self._requests.values())

    def _read(self, log_time_ns: int, message: Frame | Snapshot) -> None:
        epoch = message.epoch if isinstance(message, Frame) else message.hello.epoch
        if epoch != self._epoch:
            self._end_epoch()
            self._epoch, self._offset_ns = epoch, log_time_ns - message.time_ns
        self._follower.feed(message)
        self._announce(message.new_requests if isinstance(message, Frame) else message.requests_info)
        if isinstance(message, Frame):
            if message.first_token_ns and self._unhashed:
                self._record_prefixes(message.requests)
            if _FINISHED in message.requests.state:
                self._record_ended(message.requests)

    def _announce(self, infos: Iterable[RequestInfo]) -> None:
        assert self._epoch is not None, "a request without an epoch"
        for info in infos:
            key = (self._epoch, info.number)
            if key not in self._requests:
                self._unhashed.add(info.number)
                self._requests[key] = RecordedRequest(
                    epoch=self._epoch,
                    number=info.number,
                    request_id=info.request_id,
                    arrival_ns=info.arrival_ns + self._offset_ns,
                    num_prompt_tokens=info.num_prompt_tokens,
                    num_output_tokens=0,
                    max_tokens=info.max_tokens,
                    priority=info.priority,
                    is_finished=False,
                )

    def _record_prefixes(self, rows: RequestRows) -> None:
        """Set the prefix hashes of the requests that received their first output token. At that time all full
        blocks of the prompt are computed and hashed, and none has been freed.
        """
        numbers, outputs = np.frombuffer(rows.number, "<u4"), np.frombuffer(rows.num_output_tokens, "<u4")
        started = self._unhashed.intersection(numbers[outputs > 0].tolist())
        self._unhashed -= started
        self._follower.apply_pending()
        for number in started:
            self._update_request(number, prefix_hashes=self._prefix_hashes(number))

    def _prefix_hashes(self, number: int) -> tuple[int, ...]:
        mirror = self._follower.mirror
        row = mirror.requests.row_of(number)
        if self._follower.is_lost or mirror.hello is None or row is None:
            return ()
        cache, requests = mirror.hello.cache, mirror.requests
        num_full = int(requests.num_prompt_tokens[row]) // cache.block_size
        for group, size in enumerate(cache.block_sizes):
            table = requests.table(number, group)[:num_full]
            if size == cache.block_size and (table >= cache.num_reserved_blocks).all():  # no block was freed
                hashes: list[int] = mirror.ledger.hash[table].tolist()
                return tuple(hashes) if any(hashes) else ()
        return ()

    def _record_ended(self, rows: RequestRows) -> None:
        is_end = np.frombuffer(rows.state, "u1") == RequestState.FINISHED
        numbers, outputs = np.frombuffer(rows.number, "<u4"), np.frombuffer(rows.num_output_tokens, "<u4")
        for number, count in zip(numbers[is_end].tolist(), outputs[is_end].tolist(), strict=True):
            self._update_request(number, num_output_tokens=count, is_finished=True)

    def _end_epoch(self) -> None:
        self._follower.apply_pending()
        requests = self._follower.mirror.requests
        for (epoch, number), request in list(self._requests.items()):
            row = requests.row_of(number)
            if epoch == self._epoch and not request.is_finished and row is not None:
                self._update_request(number, num_output_tokens=int(requests.num_output_tokens[row]))
        self._unhashed.clear()

    def _update_request(self, number: int, **values: object) -> None:
        assert self._epoch is not None, "a request without an epoch"
        key = (self._epoch, number)
        if key in self._requests:
            self._requests[key] = replace(self._requests[key], **values)  # type: ignore[arg-type]
