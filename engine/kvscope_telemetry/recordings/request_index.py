"""Lists the requests of a recording: arrival time, length, and the prefix that each prompt shares with others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final

import msgspec
import numpy as np

from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.messages.telemetry import Frame, RequestInfo, RequestRows, Snapshot
from kvscope_telemetry.mirror.follower import Follower
from kvscope_telemetry.recordings.chunk_decoder import TimedMessage
from kvscope_telemetry.recordings.prompt_hashes import PromptHashes
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.running_time import RunningTime

_FINISHED = bytes([RequestState.FINISHED])
_STOP_EVENTS: Final = frozenset(("engine_paused", "engine_resumed", "single_step", "process_suspended"))
Drafts = tuple[int, int, int]
"""Speculation in one step of a request: number of output tokens before the step, drafts verified, drafts accepted."""


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
    client: int = 0
    """Number of the client that sent the request (`RequestInfo.client`); 0 if unknown."""
    index: int = 0
    """Index among the completions of the same prompt, which have the same `request_id`."""
    first_token_ns: int | None = None
    """Time of the first token on the recording's clock; None if there was none, or if it was not observed."""
    ended_ns: int | None = None
    """Time of the end on the recording's clock; None if the request has not ended, or if the end was not observed."""
    is_aborted: bool = False
    num_preemptions: int = 0
    drafts: tuple[Drafts, ...] = ()


@dataclass(frozen=True, slots=True)
class RequestRecords:
    """Requests of a recording in the order they were announced, and when its engine was stopped."""

    requests: list[RecordedRequest]
    running: RunningTime
    """Stops of the engine on the recording's clock."""


def recorded_requests(recording: Recording) -> list[RecordedRequest]:
    """Return all requests in the order they were announced. Reads the whole recording."""
    return read_requests(recording).requests


def read_requests(recording: Recording, observe: Callable[[Frame | Snapshot], object] | None = None) -> RequestRecords:
    """Read the whole recording once. `observe` is called with each frame and snapshot, after it was read."""
    timed = recording.messages(keyframes=True)
    reader = _RequestReader(observe)
    requests = reader.read((recording.start_ns + round(at_s * 1e9), message) for at_s, message in timed)
    return RequestRecords(requests, reader.running)


class _RequestReader:
    def __init__(self, observe: Callable[[Frame | Snapshot], object] | None) -> None:
        self.running = RunningTime()
        self._observe = observe
        self._follower = Follower()
        self._requests: dict[tuple[int, int], RecordedRequest] = {}
        self._unhashed: set[int] = set()
        """Numbers of the current epoch's requests that have no output token yet."""
        self._drafts: dict[int, list[Drafts]] = {}
        """Speculation of the current epoch's requests that have not ended."""
        self._draft_totals: dict[int, tuple[int, int]] = {}
        """Drafts verified and accepted so far, of the same requests."""
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
                self._record_first_tokens(message.requests, message.time_ns + self._offset_ns)
            if message.requests.num_draft_tokens:
                self._record_drafts(message.requests)
            if _FINISHED in message.requests.state:
                self._record_ended(message.requests, message.time_ns + self._offset_ns)
            self._record_events(message)
        else:
            self._apply_snapshot(message)
        if self._observe is not None:
            self._observe(message)

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
                    client=info.client,
                    index=info.index,
                )

    def _apply_snapshot(self, snapshot: Snapshot) -> None:
        """Apply the stops of a snapshot. The first tokens that its requests have already were not observed."""
        stops = [
            msgspec.structs.replace(
                stop, begin_ns=stop.begin_ns + self._offset_ns, end_ns=stop.end_ns and stop.end_ns + self._offset_ns
            )
            for stop in snapshot.stops
        ]
        self.running.catch_up(stops, snapshot.time_ns + self._offset_ns)
        rows = snapshot.requests
        numbers, outputs = np.frombuffer(rows.number, "<u4"), np.frombuffer(rows.num_output_tokens, "<u4")
        self._unhashed.difference_update(numbers[outputs > 0].tolist())
        if rows.num_draft_tokens:
            self._record_drafts(rows, only_totals=True)

    def _record_events(self, frame: Frame) -> None:
        for event in frame.events:
            if event.kind in _STOP_EVENTS:
                self.running.record(msgspec.structs.replace(event, time_ns=event.time_ns + self._offset_ns))
            elif event.kind == "aborted":
                self._update_request(event.number, is_aborted=True)

    def _record_drafts(self, rows: RequestRows, *, only_totals: bool = False) -> None:
        columns = (rows.number, rows.num_output_tokens, rows.num_draft_tokens, rows.num_accepted_tokens)
        counts = [np.frombuffer(column, "<u4") for column in columns]
        accepted_counts = counts[3] if counts[3].size else np.zeros_like(counts[2])
        has_drafts = np.flatnonzero(counts[2])
        for number, outputs, drafted, accepted in zip(
            *(column[has_drafts].tolist() for column in (*counts[:3], accepted_counts)), strict=True
        ):
            drafted_before, accepted_before = self._draft_totals.get(number, (0, 0))
            if drafted > drafted_before and not only_totals:
                new_accepted = accepted - accepted_before
                drafts = (outputs - 1 - new_accepted, drafted - drafted_before, new_accepted)
                self._drafts.setdefault(number, []).append(drafts)
            self._draft_totals[number] = drafted, accepted

    def _record_first_tokens(self, rows: RequestRows, time_ns: int) -> None:
        """Set the time of the first token and the prefix hashes of the requests that received their first output
        token. At that time all full blocks of the prompt are computed and hashed, and none has been freed.
        """
        numbers, outputs = np.frombuffer(rows.number, "<u4"), np.frombuffer(rows.num_output_tokens, "<u4")
        started = self._unhashed.intersection(numbers[outputs > 0].tolist())
        self._unhashed -= started
        if not started:
            return
        hashes = PromptHashes(self._follower)
        for number in started:
            self._update_request(number, prefix_hashes=self._prefix_hashes(hashes, number), first_token_ns=time_ns)

    def _prefix_hashes(self, hashes: PromptHashes, number: int) -> tuple[int, ...]:
        assert self._epoch is not None, "a request without an epoch"
        request = self._requests.get((self._epoch, number))
        return () if request is None else hashes.of(number, request.num_prompt_tokens)

    def _record_ended(self, rows: RequestRows, time_ns: int) -> None:
        is_end = np.frombuffer(rows.state, "u1") == RequestState.FINISHED
        numbers, outputs = np.frombuffer(rows.number, "<u4"), np.frombuffer(rows.num_output_tokens, "<u4")
        preemptions = np.frombuffer(rows.num_preemptions, "<u2")
        for number, count, num_preemptions in zip(
            numbers[is_end].tolist(), outputs[is_end].tolist(), preemptions[is_end].tolist(), strict=True
        ):
            self._draft_totals.pop(number, None)
            self._update_request(
                number,
                num_output_tokens=count,
                is_finished=True,
                ended_ns=time_ns,
                num_preemptions=num_preemptions,
                drafts=tuple(self._drafts.pop(number, ())),
            )

    def _end_epoch(self) -> None:
        self._follower.apply_pending()
        requests = self._follower.mirror.requests
        for (epoch, number), request in list(self._requests.items()):
            row = requests.row_of(number)
            if epoch == self._epoch and not request.is_finished and row is not None:
                self._update_request(
                    number,
                    num_output_tokens=int(requests.num_output_tokens[row]),
                    num_preemptions=int(requests.num_preemptions[row]),
                    drafts=tuple(self._drafts.pop(number, ())),
                )
        self._unhashed.clear()
        self._drafts.clear()
        self._draft_totals.clear()

    def _update_request(self, number: int, **values: object) -> None:
        assert self._epoch is not None, "a request without an epoch"
        key = (self._epoch, number)
        if key in self._requests:
            self._requests[key] = replace(self._requests[key], **values)  # type: ignore[arg-type]
