"""An engine without a model: its state goes on like a real one's, its telemetry is the real thing.

`advance()` makes one step and gives its frame, `snapshot()` the whole state. Drives tests and the desktop's
benchmark with pools of millions of blocks. The same seed gives the same states. Knows no sockets.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.ledger import BlockState
from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.messages.telemetry import (
    Batch,
    Counters,
    Event,
    Frame,
    Heartbeat,
    RequestInfo,
    RequestRows,
    Snapshot,
    Timings,
    Work,
)
from kvscope_telemetry.state.coalesce import join_request_rows
from kvscope_telemetry.synthetic.hello import BLOCK_BYTES, BLOCK_TOKENS, FLOPS_PER_S, READ_BYTES_PER_S, synthetic_hello
from kvscope_telemetry.synthetic.pool import Ids, SyntheticPool
from kvscope_telemetry.synthetic.slots import Slots, SyntheticRequest
from kvscope_telemetry.synthetic.tiers import SyntheticTiers

_NUM_WEIGHTS: Final = 135_000_000
_WEIGHT_BYTES: Final = 4
_ATTENTION_FLOPS: Final = 4 * 30 * 576
"""A token of a step and one that it looks back at."""
_OTHER_BYTES: Final = 30 * 576 * 4 * 16
_LOWEST_SHARE: Final = 0.35
_SHARES: Final = 0.5
"""Of what the device can do, a step reaches so much at least, and up to so much more."""
_SCATTER: Final = 0.618_034
MAX_WATCHED = 64
NUM_WAITING = 4
PREEMPT_EVERY = 211
SWAP_EVERY = 19
"""With lower tiers, where it costs little."""
MAX_SWAPPED = 8
"""Of more requests that are swapped out the oldest comes back."""


@dataclass(slots=True)
class _Step:
    """What the step in progress will say in its frame."""

    new: list[RequestInfo] = field(default_factory=list)
    rows: list[RequestRows] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    prefilled: list[tuple[int, int]] = field(default_factory=list)
    first_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Output:
    """A watched request got a token, or ended (`reason` not empty)."""

    number: int
    num_output: int
    reason: str = ""


class SyntheticEngine:
    """`num_running` requests decode at all times; a pool of `num_blocks`, most of it cached or parked."""

    def __init__(
        self,
        *,
        num_blocks: int = 4096,
        num_running: int = 32,
        block_size: int = 16,
        seed: int = 0,
        epoch: int = 1,
        cached_share: float = 0.3,
        parked_share: float = 0.2,
        num_host_blocks: int = 0,
        num_disk_blocks: int = 0,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.hello = synthetic_hello(epoch, num_blocks, block_size, clock(), num_host_blocks, num_disk_blocks)
        self.seq = 0
        self.step = 0
        self.outputs: list[Output] = []
        """Of watched requests, oldest first; whoever reads takes them away."""
        self._rng = np.random.default_rng(seed)
        self._clock = clock
        self._num_running = num_running
        num_lower = num_host_blocks + num_disk_blocks
        self._pool = SyntheticPool(num_blocks, block_size, self._rng, cached_share, num_lower)
        self._tiers = SyntheticTiers(self._pool, num_host_blocks, num_disk_blocks)
        if self._tiers.exist:
            self._pool.on_evict = self._tiers.offload
        self.ledger = self._pool.ledger
        self._slots = Slots(num_running + MAX_WATCHED)
        self._waiting: deque[SyntheticRequest] = deque()
        self._swapped: deque[SyntheticRequest] = deque()
        self._parked: list[SyntheticRequest] = []
        self._next_number = 1
        self._totals = dict.fromkeys(
            ("prompt_tokens", "cached_tokens", "generation_tokens", "preemptions", "admitted"), 0
        )
        self._totals |= dict.fromkeys(("finished", "aborted", "restored_tokens", "recomputed_tokens"), 0)
        self._now = _Step()
        self._park(int(num_blocks * parked_share))

    def submit(self, request_id: str, num_prompt_tokens: int, max_tokens: int) -> int:
        """Queue a watched request; its number."""
        request = self._new_request(request_id, num_prompt_tokens, max_tokens)
        request.watched = True
        self._waiting.appendleft(request)
        return request.info.number

    def abort(self, number: int) -> bool:
        """End a request wherever it is; whether there was one."""
        for queue in (self._waiting, self._swapped):
            for request in queue:
                if request.info.number == number:
                    queue.remove(request)
                    self._end(request, "aborted")
                    return True
        for slot, request in enumerate(self._slots.requests):
            if request.info.number == number:
                self._end(self._slots.remove(slot), "aborted")
                return True
        return False

    def preempt(self, number: int, how: str, by: str) -> str:
        """Send a running request back; what was done, in one line. Raises BadInput where it cannot be."""
        running = [request.info.number for request in self._slots.requests]
        if number not in running:
            raise BadInput(f"request {number} does not run here: it has ended, waits, or only holds its blocks")
        if how == "swap" and not self._tiers.exist:
            raise BadInput(f"request {number} cannot be swapped out: this engine has no lower tier to swap to")
        request = self._slots.requests[running.index(number)]
        num_tokens, num_blocks = int(self._slots.computed[running.index(number)]), len(request.table)
        places = self._send_back(running.index(number), f"requested by {by}", swaps=how != "recompute")
        went = "to be computed again" if places is None else "moved to a lower tier"
        return f"request {number} was preempted: {num_tokens} tokens in {num_blocks} blocks {went}"

    @property
    def pinned(self) -> set[int]:
        """Blocks that are not evicted."""
        return self._pool.pinned

    def pin(self, blocks: Iterable[int]) -> list[int]:
        """Keep those of `blocks` that are hashed; which they are. Raises BadInput where none is."""
        hashed = [b for b in blocks if b < self._pool.num_blocks and self.ledger.hash[b]]
        if not hashed:
            raise BadInput("none of these is in the prefix cache: only full blocks that it can find are pinned")
        if len(self.pinned | set(hashed)) > self._pool.num_blocks // 8:
            raise BadInput(f"at most {self._pool.num_blocks // 8} blocks of this engine can be pinned")
        self.pinned.update(hashed)
        return hashed

    def evict(self, blocks: Iterable[int]) -> str:
        """Cached blocks that are not pinned lose their prefix; what was done. Raises BadInput where none is."""
        pool = self._pool
        idle = [b for b in dict.fromkeys(blocks) if b < pool.num_blocks and self.ledger.state[b] == BlockState.CACHED]
        evictable = [b for b in idle if b not in self.pinned]
        if not evictable:
            raise BadInput("these are pinned: unpin first" if idle else "none of these is cached and idle")
        pool.evict_these(evictable, self.step)
        return f"{len(evictable)} block{' was' if len(evictable) == 1 else 's were'} evicted"

    def advance(self) -> Frame:
        """One step."""
        started_ns = self._clock()
        self.step += 1
        self._fill_queue()
        self._decode()
        self._admit()
        if self.step % (SWAP_EVERY if self._tiers.exist else PREEMPT_EVERY) == 0:
            self._preempt()
        while len(self._swapped) > MAX_SWAPPED:
            self._waiting.appendleft(self._swapped.popleft())
        return self._frame(started_ns)

    def snapshot(self, tag: int = 0) -> Snapshot:
        """The whole state after the newest frame; not to be asked for between `submit` and `advance`."""
        slots = [(r, int(c), int(o)) for r, c, o in self._running()]
        for request, computed, output in slots:
            request.computed, request.output = computed, output
        running = [request for request, *_ in slots] + self._parked
        requests = [r for r in (*self._waiting, *self._swapped) if r.info not in self._now.new]
        rows = [r.row(RequestState.RUNNING, 0, r.table) for r in running]
        rows += [r.row(_waiting_state(r), 0, r.table) for r in requests]
        return Snapshot(
            hello=self.hello,
            seq=self.seq,
            step=self.step,
            time_ns=self._clock(),
            blocks=self.ledger.pack_all(),
            requests_info=tuple(r.info for r in running + requests),
            requests=join_request_rows(rows) if rows else RequestRows(),
            counters=self._counters(),
            tag=tag,
        )

    def heartbeat(self) -> Heartbeat:
        """A sign of life."""
        return Heartbeat(
            epoch=self.hello.epoch,
            time_ns=self._clock(),
            seq=self.seq,
            step=self.step,
            num_unfinished=len(self._slots) + len(self._parked) + len(self._waiting) + len(self._swapped),
        )

    # One step.

    def _fill_queue(self) -> None:
        while len(self._waiting) < NUM_WAITING:
            prompt, output = int(self._rng.integers(8, 129)), int(self._rng.integers(16, 257))
            self._waiting.append(self._new_request("", prompt, output))

    def _decode(self) -> None:
        slots, size = self._slots, self._pool.block_size
        for slot in (slots.left == 0).nonzero()[0][::-1].tolist():
            self._end(slots.remove(slot), "finished")
        counts = np.zeros(len(slots), np.int64)
        blocks: list[int] = []
        for slot in (slots.filled == size).nonzero()[0].tolist():
            taken = self._pool.take(1, int(slots.number[slot]), self.step, int(slots.last[slot]))
            if taken is None:  # the pool ran dry: this request waits a step, its row says nothing new
                slots.left[slot] += 1
                continue
            slots.last[slot], slots.filled[slot], counts[slot] = taken[0], 0, 1
            slots.requests[slot].table.append(int(taken[0]))
            blocks.append(int(taken[0]))
        runs = slots.filled < size
        num_run = int(np.count_nonzero(runs))
        for column in (slots.filled, slots.computed, slots.output):
            column += runs
        np.subtract(slots.left, 1, out=slots.left)
        written = (slots.last, slots.filled) if num_run == len(slots) else (slots.last[runs], slots.filled[runs])
        self._pool.write(*written, self.step)
        self._now.rows.append(slots.rows(counts, np.array(blocks, np.int64)))
        np.add(slots.table_start, counts, out=slots.table_start)
        self._totals["generation_tokens"] += num_run
        self._tell_watchers()

    def _tell_watchers(self) -> None:
        for slot, request in enumerate(self._slots.requests):
            if request.watched:
                self.outputs.append(Output(request.info.number, int(self._slots.output[slot])))

    def _admit(self) -> None:
        while self._waiting and len(self._slots) < self._slots.capacity:
            if len(self._slots) >= self._num_running and not self._waiting[0].watched:
                return
            if not self._start(self._waiting[0]):
                return
            self._waiting.popleft()

    def _start(self, request: SyntheticRequest) -> bool:
        """Give a request its blocks and a slot: prefill in one step. False when the pool has too few."""
        if request.table:
            return self._swap_in(request)
        size, number = self._pool.block_size, request.info.number
        num_tokens = request.info.num_prompt_tokens + request.output
        num_needed = -(-num_tokens // size)
        shared = self._shared_prefix((num_tokens - 1) // size)
        after = int(shared[-1]) if len(shared) else -1
        taken = self._pool.take(num_needed - len(shared), number, self.step, after)
        if taken is None:
            self._pool.release(shared, self.step)
            return False
        filled = np.full(len(taken), size)
        filled[-1] = num_tokens - (num_needed - 1) * size
        self._pool.write(taken, filled, self.step)
        request.table = [*shared.tolist(), *taken.tolist()]
        request.computed, request.cached = num_tokens, len(shared) * size
        self._slots.add(request, int(filled[-1]))
        self._now.rows.append(request.row(RequestState.RUNNING, 0, request.table))
        self._say("resumed" if request.preemptions else "admitted", request, num_blocks=num_needed)
        self._now.prefilled.append((number, num_tokens - request.cached))
        self._now.first_tokens += not request.output
        computed, found = num_tokens - request.cached, request.cached
        data = (
            {"restored_tokens": found, "recomputed_tokens": computed}
            if request.preemptions
            else {"admitted": 1, "prompt_tokens": computed, "cached_tokens": found}
        )
        for name, count in data.items():
            self._totals[name] += count
        return True

    def _swap_in(self, request: SyntheticRequest) -> bool:
        """Give a swapped request its blocks back, with what they held. False when the pool has too few."""
        places = np.array(request.table, np.int64)
        taken = self._pool.take(len(places), request.info.number, self.step)
        if taken is None:
            return False
        self._tiers.load(places, taken, request.info.number, self.step)
        request.table = taken.tolist()
        self._slots.add(request, int(self.ledger.filled[taken[-1]]))
        self._now.rows.append(request.row(RequestState.RUNNING, 0, request.table))
        self._say("resumed", request, num_blocks=len(taken))
        self._totals["restored_tokens"] += request.computed
        return True

    def _shared_prefix(self, max_blocks: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
        """Blocks to begin with that others wrote: cached ones, or the prefix of a running request."""
        count = int(self._rng.integers(0, max_blocks + 1)) if max_blocks else 0
        if count and len(self._slots) and self._rng.random() < 0.3:
            other = self._slots.requests[int(self._rng.integers(len(self._slots)))]
            ids = np.array(other.table[: min(count, len(other.table) - 1)], np.int64)
            self._pool.share(ids, self.step)
            self._tiers.copied(ids[-1:])
            return ids
        if count and self._tiers.exist and self._rng.random() < 0.5:
            return self._loaded_prefix(count)
        return self._pool.hit(count, self.step)

    def _loaded_prefix(self, count: int) -> Ids:
        """Blocks of the pool with up to `count` cached ones of the lower tiers, which leave those."""
        places = self._tiers.newest_cached(count)
        if not len(places) or self._pool.num_free < len(places):
            return np.empty(0, np.int64)
        blocks = self._pool.take(len(places), 0, self.step)
        assert blocks is not None, "so many are free"
        self._tiers.load(places, blocks, 0, self.step)
        return blocks

    def _preempt(self) -> None:
        slots = [slot for slot, request in enumerate(self._slots.requests) if not request.watched]
        if not slots:
            return
        self._send_back(slots[int(self._rng.integers(len(slots)))])

    def _send_back(self, slot: int, cause: str = "", *, swaps: bool = True) -> list[int] | None:
        """The request of a slot waits again; the places that keep what it had, None: it is to be computed again."""
        request = self._slots.remove(slot)
        num_blocks = len(request.table)
        blocks = np.array(request.table, np.int64)
        places = self._tiers.swap_out(blocks, request.info.number, self.step) if swaps else None
        computed = request.computed
        self._give_back(request)
        request.preemptions += 1
        if places is None:
            self._waiting.appendleft(request)
        else:
            request.table, request.computed = places, computed
            self._swapped.append(request)
        self._now.rows.append(request.row(RequestState.PREEMPTED, 0, request.table))
        self._totals["preemptions"] += 1
        other = self._slots.requests[0].info.number if len(self._slots) and not cause else 0
        self._say("preempted", request, num_blocks=num_blocks, other=other, cause=cause)
        return places

    def _end(self, request: SyntheticRequest, kind: str) -> None:
        num_blocks = len(request.table)
        self._give_back(request)
        self._now.rows.append(request.row(RequestState.FINISHED))
        self._totals[kind] += 1
        self._say(kind, request, num_blocks=num_blocks)
        if request.watched:
            reason = "length" if kind == "finished" else "abort"
            self.outputs.append(Output(request.info.number, request.output, reason))

    def _give_back(self, request: SyntheticRequest) -> None:
        if request.table:
            ids = np.array(request.table, np.int64)
            lower = ids >= self._pool.num_blocks
            self._pool.release(ids[~lower], self.step)
            if self._tiers.exist:
                self._tiers.give_up(ids[lower], self.step)
        request.table, request.computed = [], 0

    def _frame(self, started_ns: int) -> Frame:
        self.seq += 1
        now, self._now = self._now, _Step()
        prefilled, numbers = now.prefilled, self._slots.number
        times = dict(prefilled)
        tokens = np.ones(numbers.size, "<u4")
        for number, count in prefilled:
            tokens[numbers == number] = count
        ended_ns = self._clock()
        work = self._work(times)
        forward_ns = synthetic_forward_ns(work, self.step) if numbers.size else 0
        return Frame(
            epoch=self.hello.epoch,
            seq=self.seq,
            step=self.step,
            time_ns=ended_ns,
            blocks=self.ledger.pack(self._pool.take_changed()),
            new_requests=tuple(now.new),
            requests=join_request_rows(now.rows),
            batch=Batch(
                number=numbers.astype("<u4").tobytes(),
                num_tokens=tokens.tobytes(),
                num_prefill_tokens=sum(count for _, count in prefilled),
                num_decode_tokens=numbers.size - len(prefilled),
            ),
            timings=Timings(run_ns=max(0, ended_ns - started_ns, forward_ns), forward_ns=forward_ns),
            counters=self._counters(),
            events=tuple(now.events),
            moves=self._tiers.take_moves(),
            first_token_ns=np.full(now.first_tokens, 1_000_000, "<u8").tobytes(),
            inter_token_ns=np.full(numbers.size - len(prefilled), 200_000, "<u8").tobytes(),
            work=work,
        )

    def _work(self, prefilled: dict[int, int]) -> Work:
        """A decoded token looks back at all its request has, one of a prompt at half of that."""
        slots = self._slots
        if not len(slots):
            return Work()
        num_context = int(slots.computed.sum())
        more = sum(
            int(slots.computed[at]) * (prefilled[number] // 2 - 1)
            for at, number in enumerate(slots.number.tolist() if prefilled else ())
            if prefilled.get(number, 0) > 2
        )
        num_tokens = len(slots) + sum(max(0, count - 1) for count in prefilled.values())
        return synthetic_work(num_tokens, num_context, num_context + more)

    # Helpers.

    def _new_request(self, request_id: str, num_prompt_tokens: int, max_tokens: int) -> SyntheticRequest:
        number = self._next_number
        self._next_number += 1
        info = RequestInfo(
            number=number,
            request_id=request_id or f"synthetic-{number}",
            arrival_ns=self._clock(),
            num_prompt_tokens=num_prompt_tokens,
            max_tokens=max_tokens,
        )
        self._now.new.append(info)
        return SyntheticRequest(info, left=max_tokens)

    def _park(self, num_blocks: int) -> None:
        """Long requests that only hold their blocks, known from the first snapshot on."""
        size = self._pool.block_size
        for count in filter(None, (num_blocks // 16 for _ in range(16))):
            request = self._new_request("", count * size, 1)
            blocks = self._pool.take(count, request.info.number, 0)
            assert blocks is not None, "the pool is free but for its cached share"
            self._pool.write(blocks, np.full(count, size), 0)
            request.table, request.computed = blocks.tolist(), count * size
            self._parked.append(request)
        self._now = _Step()
        self._pool.take_changed()

    def _running(self) -> list[tuple[SyntheticRequest, int, int]]:
        slots = self._slots
        return list(zip(slots.requests, slots.computed.tolist(), slots.output.tolist(), strict=True))

    def _say(self, kind: str, request: SyntheticRequest, *, num_blocks: int, other: int = 0, cause: str = "") -> None:
        cause = cause or (f"blocks for request {other}" if kind == "preempted" else "")
        self._now.events.append(
            Event(
                kind=kind,
                time_ns=self._clock(),
                number=request.info.number,
                num_blocks=num_blocks,
                other=other,
                cause=cause,
            )
        )

    def _counters(self) -> Counters:
        return Counters(
            **self._totals,
            evicted_blocks=self._pool.num_evicted,
            num_running=len(self._slots) + len(self._parked),
            num_waiting=len(self._waiting) + len(self._swapped),
            **self._tiers.totals,
        )


def _waiting_state(request: SyntheticRequest) -> RequestState:
    return RequestState.PREEMPTED if request.preemptions else RequestState.WAITING


# What a step of a model would have to do, and how long a device would take: made up, as of a small model on a big GPU.
#
# Steps lie below the roof at different heights, as those of a real engine do.
def synthetic_work(num_tokens: int, num_context: int, num_attended: int) -> Work:
    """Of a step of `num_tokens` whose requests have `num_context` tokens in the cache together; `num_attended` is that
    sum over tokens rather than requests."""
    token_bytes = BLOCK_BYTES // BLOCK_TOKENS
    attention = _ATTENTION_FLOPS * num_attended
    return Work(
        flops=2 * _NUM_WEIGHTS * num_tokens + attention,
        attention_flops=attention,
        weights_bytes=_NUM_WEIGHTS * _WEIGHT_BYTES,
        kv_read_bytes=token_bytes * num_context,
        kv_written_bytes=token_bytes * num_tokens,
        other_bytes=_OTHER_BYTES * num_tokens,
    )


def synthetic_forward_ns(work: Work, step: int) -> int:
    """How long it takes where the device reaches a share of its limits that differs from step to step."""
    at_least_s = max(work.num_bytes / READ_BYTES_PER_S, work.flops / FLOPS_PER_S)
    return round(at_least_s / (_LOWEST_SHARE + _SHARES * (step * _SCATTER % 1.0)) * 1e9)
