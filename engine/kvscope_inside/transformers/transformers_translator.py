"""Converts the records of the hooks on transformers' continuous batching to frames.

Handles what transformers does differently from vLLM and SGLang: ledger rows of sectors, sliding windows that are ring
buffers of blocks, forks, and requests whose object is replaced after a soft reset. Runs on the publishing thread, so it
reads only transformers objects that are immutable or append-only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvscope_inside.host_request import HostRequest
from kvscope_inside.transformers.transformers_facts import LedgerRows
from kvscope_inside.transformers.transformers_recorder import TransformersRecord
from kvscope_inside.translator import MissedBlock, StepCounts, Translator
from kvscope_telemetry.ledger import BlockState
from kvscope_telemetry.messages.event_kinds import evicted_text
from kvscope_telemetry.messages.telemetry import EventData
from kvscope_telemetry.producer.cache_state import CacheState


@dataclass(slots=True)
class TransformersRequest(HostRequest):
    """A request of transformers' continuous batching.

    `host` is its RequestState, which is replaced after a soft reset; None for a fork before its first step.
    """

    has_started: bool = False
    """Whether the request was scheduled since its arrival or last preemption."""
    num_hit_tokens: int = 0
    """Tokens found in the prefix cache since the request's arrival or last preemption."""
    num_released: int = 0
    """Number of blocks in the tables that the request released most recently."""

    @property
    def num_earlier_tokens(self) -> int:
        """Number of generated tokens that a soft reset moved to the prompt."""
        if self.host is None:
            return 0
        num_prompt_tokens = self.host._true_initial_tokens
        return len(self.host.initial_tokens) - num_prompt_tokens if num_prompt_tokens else 0


class TransformersTranslator(Translator[TransformersRequest]):
    """Translator for one paged cache of transformers.

    `rows` maps blocks to ledger rows. `hash_of` computes a block's hash as transformers does, from the preceding
    block's hash and the block's tokens.
    """

    def __init__(self, state: CacheState, rows: LedgerRows, hash_of: Callable[[int | None, list[int]], int]) -> None:
        super().__init__(state)
        self.handlers = {
            "added": self._added,
            "ran before": self._ran_before,
            "sectors": self._sectors,
            "freed sectors": self._sectors_freed,
            "emptied": self._emptied,
            "had cached": self._had_cached,
            "gave": self._allocated,
            "hit": self._hit,
            "scheduled": self._scheduled,
            "shared": self._fork_table,
            "forked": self._forked,
            "hashed": self._hashed,
            "released": self._released,
            "freed": self._freed,
            "evicted": self._evicted,
            "starved": self._starved_request,
            "preempted": self._preempted,
            "offloaded": self._offloaded,
            "ended": self._ended,
            "forgot requests": self._forgot_requests,
        }
        self._rows, self._hash_of = rows, hash_of
        self._windows = tuple(group.window for group in state.hello.cache.groups)
        # State of the step that is being translated:
        self._began_ns = 0
        self._preemptions: list[tuple[TransformersRequest, int, bool]] = []
        """Preempted requests of the current step, each with its number of tokens and whether its blocks were
        swapped to host memory.
        """
        self._starved = ""
        """Id of the request that could get no block, so that other requests are preempted for it; empty if
        there is none.
        """
        self._ended_numbers: dict[str, int] = {}

    def convert(self, record: TransformersRecord) -> StepCounts:
        self._began_ns, self._preemptions, self._starved, self._ended_numbers = record.began_ns, [], "", {}
        self.dispatch(record.events)
        self.update_progress(self._running(record))
        self._update_rows(record)
        batch: dict[int, int] = {}
        num_decode_tokens = 0
        for entry in record.batch or ():
            request = self.requests.get(entry.request_id)
            number = request.known.number if request is not None else self._ended_numbers.get(entry.request_id)
            if number is not None:
                batch[number] = entry.num_tokens
                num_decode_tokens += entry.num_tokens if entry.is_decode else 0
        return StepCounts(len(record.active), record.num_waiting, batch, num_decode_tokens)

    def request_tokens(self, request: TransformersRequest, start: int, end: int) -> list[int]:
        prompt, generated = request.host.initial_tokens, request.host.generated_tokens
        size = len(prompt)
        return list(prompt[start:end]) + list(generated[max(0, start - size) : max(0, end - size)])

    def request_by_number(self, number: int) -> TransformersRequest | None:
        """Return the request with this number in the ledger; None if it has ended, or is a fork before its
        first step, whose tokens are unknown.
        """
        request = super().request_by_number(number)
        return request if request is not None and request.host is not None else None

    def block_span(self, request: TransformersRequest, group: int, entry: int, row: int) -> tuple[int, int]:
        """Return the token positions at which a block begins and ends (exclusive).

        Returns (0, 0) for a block of a sliding window that is being overwritten, because its tokens come from two
        ranges.
        """
        window, start, num_computed = self._windows[group], entry * self.block_size, request.known.num_computed_tokens
        if not window or num_computed <= window:
            return start, min(start + self.block_size, num_computed)
        lap_start, end = (num_computed - 1) // window * window, min(start + self.block_size, window)
        if lap_start + end <= num_computed:
            return lap_start + start, lap_start + end
        return (lap_start - window + start, lap_start - window + end) if lap_start + start >= num_computed else (0, 0)

    def blocks_written(self, request: TransformersRequest, before: int, after: int) -> Iterator[tuple[int, int]]:
        """Yield the ledger row and the number of tokens of each written block. The table of a window is a ring
        buffer.
        """
        size, (low, high) = self.block_size, sorted((before, after))
        for table, window in zip(request.known.tables, self._windows, strict=True):
            if window:
                entries = sorted({position % window // size for position in range(max(low, high - window), high)})
            else:
                entries = list(range(low // size, -(-high // size)))
            num_tokens = min(after, window or after)
            for entry in entries:
                if entry < len(table):
                    yield table[entry], min(max(num_tokens - entry * size, 0), size)

    def missed_block(self, request: TransformersRequest, token: int) -> MissedBlock | None:
        """Return the block that begins at `token`, with transformers' hash of its tokens and the preceding
        block's hash; None if it is unknown.
        """
        if not self.state.hello.cache.prefix_caching or request.host is None:
            return None
        table, entry = request.known.tables[0], token // self.block_size
        parent = int(self.state.ledger.hash[table[entry - 1]]) if token else None
        if parent == 0:
            return None
        hash_value = self._hash_of(parent, self.request_tokens(request, token, token + self.block_size))
        return MissedBlock((hash_value,), parent or 0)

    # What happened.

    def _added(self, host: Any) -> None:
        request = self.requests.get(host.request_id)
        if request is not None:  # it was preempted, or its id is used twice
            request.host = host
            return
        arrival_ns = self.arrival_ns(time.perf_counter() - float(host.created_time))
        known = self.state.add_request(
            host.request_id,
            num_prompt_tokens=host._true_initial_tokens or len(host.initial_tokens),
            arrival_ns=arrival_ns,
            max_tokens=int(host.max_new_tokens or 0),
        )
        request = self.requests[host.request_id] = TransformersRequest(host, known, arrival_ns)
        num_outputs = request.num_earlier_tokens + len(host.generated_tokens)
        self.state.set_earlier_tokens(known, num_outputs, self.step.time_ns)

    def _ran_before(self, request_id: str) -> None:
        """Mark a request as started, because it was running before the hooks were installed."""
        request = self.requests[request_id]
        request.has_started = request.was_admitted = True

    def _sectors(self, group: int, sectors: list[int]) -> None:
        """Publish that sectors were assigned to a KV group: rows that correspond to no block become UNMAPPED."""
        self.state.set_blocks(self._rows.unused(group, sectors), state=BlockState.UNMAPPED)

    def _sectors_freed(self, sectors: list[int]) -> None:
        size = self._rows.per_sector
        self.state.free_blocks([row for sector in sectors for row in range(sector * size, (sector + 1) * size)])

    def _emptied(self) -> None:
        cache = self.state.hello.cache
        self.texts.clear(cache.num_blocks)
        self.state.free_blocks(np.arange(cache.num_reserved_blocks, cache.num_blocks))

    def _had_cached(self, group: int, blocks: list[int]) -> None:
        rows = self._rows.of_blocks(group, blocks)
        self.state.set_blocks(rows, state=BlockState.CACHED, filled=self.block_size, group=group)

    def _allocated(self, group: int, request_id: str, start: int, blocks: list[int]) -> None:
        rows = self._rows.of_blocks(group, blocks)
        self.blocks.allocate(self.requests.get(request_id), rows, group=group, start=start)

    def _hit(self, group: int, request_id: str, blocks: list[int], num_tokens: int) -> None:
        request, rows = self.requests.get(request_id), self._rows.of_blocks(group, blocks)
        self.blocks.record_hits(rows, state=BlockState.ACTIVE)
        if request is not None:
            request.num_hit_tokens = num_tokens
            self.blocks.set_table(request, rows, group=group)

    def _scheduled(self, hosts: list[Any], offsets: list[int]) -> None:
        for host, num_cached in zip(hosts, offsets, strict=True):
            request = self.requests.get(host.request_id)
            if request is not None and not request.has_started:
                self._started(request, num_cached)

    def _started(self, request: TransformersRequest, num_cached: int) -> None:
        is_hit = bool(request.num_hit_tokens)
        num_loaded = 0 if is_hit else -(-num_cached // self.block_size) * len(request.known.tables)
        self.state.count(loaded_blocks=num_loaded)
        self.start_request(
            request,
            time_ns=self._began_ns,
            num_cached_tokens=num_cached,
            num_blocks=sum(map(len, request.known.tables)),
            num_pool_blocks=num_cached // self.block_size if is_hit else 0,
            num_loaded_blocks=num_loaded,
            num_computed_tokens=request.num_hit_tokens,
        )
        request.has_started = True

    def _fork_table(self, group: int, request_id: str, blocks: list[int], copied: list[int]) -> None:
        """Publish the block table of a fork. The blocks in `copied`, at the end of the table, belong to the
        fork alone.
        """
        request = self._fork(request_id)
        rows, own_rows = self._rows.of_blocks(group, blocks), self._rows.of_blocks(group, copied)
        self.blocks.allocate(request, own_rows, group=group)
        self.blocks.set_table(request, rows, group=group)
        self.step.used.update(rows)
        self.state.add_moves("copied", own_rows)
        self.state.count(copied_blocks=len(own_rows))

    def _fork(self, request_id: str) -> TransformersRequest:
        """Return the fork with this id. The fork is added if it is unknown, because its blocks are recorded
        before the fork itself.
        """
        request = self.requests.get(request_id)
        if request is None:
            parent = self.requests[request_id.rpartition("__child#")[0]].known
            known = self.state.add_request(
                request_id,
                num_prompt_tokens=parent.info.num_prompt_tokens,
                arrival_ns=parent.info.arrival_ns,
                max_tokens=parent.info.max_tokens,
                index=int(request_id.rpartition("#")[2]) + 1,
            )
            request = TransformersRequest(None, known, self._began_ns, was_admitted=True, has_started=True)
            self.requests[request_id] = request
        return request

    def _forked(self, parent: Any, request_id: str, index: int, num_computed: int) -> None:
        request, number = self._fork(request_id), self.requests[parent.request_id].known.number
        request.num_hit_tokens = num_computed
        self.count_admission(request, num_computed)
        owners = [self.state.ledger.owner[row] for table in request.known.tables for row in table]
        self.events.report(
            "admitted",
            number=request.known.number,
            other=number,
            num_blocks=sum(int(owner) != request.known.number for owner in owners),
            num_tokens=num_computed,
            data=EventData(kind="forked"),
        )

    def _hashed(
        self, group: int, request_id: str, first: int, blocks: list[int], hashes: list[int], parent: int
    ) -> None:
        """Publish the entries of a request's table from `first` on, after full blocks got their hashes.

        A block whose contents were cached already was replaced by the cached block. `parent`: hash of the block before
        entry `first`.
        """
        request, rows = self.requests.get(request_id), self._rows.of_blocks(group, blocks)
        for entry, (row, own, parent_hash) in enumerate(zip(rows, hashes, [parent, *hashes][:-1], strict=True), first):
            if request is not None and request.known.tables[group][entry] != row:
                request.known.set_entry(entry, row, group)
                self.state.touch(request.known)
            if own:
                self.blocks.cache(row, hash_value=own, parent=parent_hash, filled=self.block_size, group=group)
                self.step.used.add(row)
                if request is not None and row not in self.texts:
                    self.texts.set(row, self.text_of(request, entry * self.block_size, self.block_size))

    def _released(self, group: int, request_id: str) -> None:
        request = self.requests.get(request_id)
        if request is None:
            return
        table = request.known.tables[group]
        self.step.used.update(table)
        request.num_released += len(table)
        self.blocks.set_table(request, (), group=group)

    def _freed(self, group: int, blocks: list[int]) -> None:
        rows = self._rows.of_blocks(group, blocks)
        self.blocks.discard_prefixes(rows)
        self.state.free_blocks(rows)

    def _evicted(self, group: int, blocks: list[int], is_for_starved: bool) -> None:
        rows = self._rows.of_blocks(group, blocks)
        self.blocks.evict(rows)
        self.state.set_blocks(rows, hash=0, parent=0)
        other = self.requests.get(self._starved) if is_for_starved else None
        reason = "a request could get no block" if is_for_starved else "too little of the pool was free (safety_margin)"
        cause = evicted_text(reason, [(len(rows), "cached block")], order="all that was cached")
        number = other.known.number if other is not None else 0
        self.events.report("evicted", time_ns=self._began_ns, other=number, num_blocks=len(rows), cause=cause)

    def _starved_request(self, request_id: str) -> None:
        self._starved = request_id

    def _preempted(self, host: Any, is_swapped: bool, num_tokens: int) -> None:
        request = self.requests.get(host.request_id)
        if request is None:
            return
        self.preempt_request(request, self.step.time_ns)
        request.has_started, request.num_hit_tokens = False, 0
        self._preemptions.append((request, num_tokens, is_swapped))
        self.state.count(swapped_blocks=request.num_released if is_swapped else 0)

    def _offloaded(self, request_id: str, num_free: int) -> None:
        """Report the preemptions of this step, which were made for `request_id`, the first request that still
        gets no block.
        """
        other = self.requests.get(request_id)
        for request, num_tokens, is_swapped in self._preemptions:
            choice = "itself" if other is None or other is request else "newest"
            self.events.report(
                "preempted",
                time_ns=self._began_ns,
                number=request.known.number,
                num_blocks=request.num_released,
                num_tokens=num_tokens,
                other=(other or request).known.number,
                data=EventData(kind="preempted", num_available=num_free, choice=choice, is_swapped=is_swapped),
            )
            request.num_released = 0
        self._preemptions.clear()

    def _ended(self, request_id: str, status: str, error: str | None, num_generated: int) -> None:
        request = self.requests.pop(request_id, None)
        if request is None:
            return
        self._ended_numbers[request_id] = request.known.number
        self.state.set_num_output_tokens(request.known, num_generated + request.num_earlier_tokens, self.step.time_ns)
        # after an error, the request ends before its blocks are released
        num_blocks = request.num_released + sum(map(len, request.known.tables))
        if status == "FINISHED":
            self.finish_request(request, _finish_reason(request), num_blocks)
        else:
            self.finish_request(request, error or "cancelled", num_blocks, is_aborted=True)

    def _forgot_requests(self) -> None:
        for request_id, request in list(self.requests.items()):
            num_generated = len(request.host.generated_tokens) if request.host is not None else 0
            self._ended(request_id, "", "the generation loop began anew", num_generated)

    # State after the step.

    def _running(self, record: TransformersRecord) -> Iterator[tuple[TransformersRequest, int, int]]:
        for host, num_computed, num_generated in zip(record.active, record.computed, record.num_generated, strict=True):
            request = self.requests.get(host.request_id)
            if request is not None:
                request.host = host
                yield request, num_computed, num_generated + request.num_earlier_tokens

    def _update_rows(self, record: TransformersRecord) -> None:
        """Publish transformers' reference counts and hashes of all touched blocks that are not free."""
        ledger = self.state.ledger
        for group, (blocks, ref_counts, hashes) in enumerate(record.touched):
            rows = np.array(self._rows.of_blocks(group, blocks), np.uint32)
            is_held = (ledger.state[rows] != BlockState.FREE) & (ledger.group[rows] == group)
            refs, hash_values = np.array(ref_counts)[is_held], np.array(hashes, np.uint64)[is_held]
            self.blocks.set_ref_counts(rows[is_held], refs, hash_values)
        self.blocks.mark_used()


def _finish_reason(request: TransformersRequest) -> str:
    generated = request.host.generated_tokens if request.host is not None else []
    is_stop = bool(generated) and generated[-1] in request.host._eos_token_ids
    return "stop" if is_stop else "length"
