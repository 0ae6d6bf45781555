"""Converts the records of vLLM's hooks to frames.

When vLLM preempts or evicts, it does not say which request needed the memory; this is inferred from later allocations.
Runs on the publishing thread, so it reads only vLLM objects that are immutable or append-only.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from kvscope_inside.cached_texts import BlockNotes
from kvscope_inside.reuse_order import FreeBlockQueue
from kvscope_inside.translator import MissedBlock, StepCounts, Translator
from kvscope_inside.vllm.block_texts import hash_of_row, key_of, low_bits, notes_of
from kvscope_inside.vllm.offloaded_blocks import MAX_TEXTS, OffloadedBlocks, VllmRequest
from kvscope_inside.vllm.second_pool import SecondPoolRows
from kvscope_inside.vllm.vllm_recorder import VllmRecord
from kvscope_telemetry.ledger import NO_OWNER
from kvscope_telemetry.messages.event_kinds import evicted_text
from kvscope_telemetry.messages.request_state import WaitsFor
from kvscope_telemetry.messages.telemetry import EventData
from kvscope_telemetry.producer.cache_state import CacheState

_ABORTED: Final = "FINISHED_ABORTED"
_REASONS: Final = {
    _ABORTED: "aborted",
    "FINISHED_STOPPED": "stop",
    "FINISHED_LENGTH_CAPPED": "length",
    "FINISHED_IGNORED": "too_long",
    "FINISHED_ERROR": "error",
    "FINISHED_REPETITION": "repetition",
}
"""Map from vLLM's finish status to a finish reason of `finished_text`."""
_NOT_READY: Final = {
    "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR": WaitsFor.GRAMMAR,
    "WAITING_FOR_REMOTE_KVS": WaitsFor.REMOTE_KV,
    "WAITING_FOR_STREAMING_REQ": WaitsFor.INPUT,
}


@dataclass(frozen=True, slots=True)
class _Preemption:
    victim: VllmRequest
    num_tokens: int
    num_blocks: int
    num_free: int
    """Number of free blocks before the preemption."""
    num_allocated: int
    """Number of blocks that the step had allocated before the preemption. The next allocated block belongs to
    the request that caused the preemption.
    """
    asked_by: str
    time_ns: int


class VllmTranslator(Translator[VllmRequest]):
    """Translator for one vLLM scheduler.

    Args:
        hash_block_size: Number of tokens per block hash of a request.
        by_priority: Whether the scheduler preempts by priority; otherwise by arrival.
        max_adapters: Maximum number of adapters in a batch; 0 without LoRA.
        blocks_per_slot: Number of blocks that are offloaded to host memory together.
    """

    def __init__(
        self,
        state: CacheState,
        *,
        hash_block_size: int,
        by_priority: bool = False,
        max_adapters: int = 0,
        blocks_per_slot: int = 1,
    ) -> None:
        super().__init__(state)
        self._hash_block_size = hash_block_size
        self._by_priority, self._max_adapters = by_priority, max_adapters
        self._offloaded = OffloadedBlocks(self, hash_block_size=hash_block_size, blocks_per_slot=blocks_per_slot)
        self._order = FreeBlockQueue(state)
        self.handlers = {
            "added": self._added,
            "scheduled": self._scheduled,
            "new": self._allocated,
            "hit": self._hit,
            "loads": self._load_started,
            "guessed": self._count_drafts,
            "evicted": self.blocks.evict,
            "reset": self._reset,
            "preempted": self._preempted,
            "finished": self._finished,
            "cached": self._cached,
            "let go": self._left_window,
            "below": self._update_second_pool,
            "paused": self.events.report_pause,
            "resumed": self.events.report_resume,
            "last": self._order.append,
            "first": self._order.prepend,
            **self._offloaded.handlers,
        }
        self._second: SecondPoolRows | None = None
        # State of the step that is being translated:
        self._allocated_blocks: list[int] = []
        self._allocated_owners: dict[int, int] = {}
        """Map from a block allocated in this step to the number of its request, even if the block was freed
        within the step.
        """
        self._preemptions: list[_Preemption] = []
        self._ended: list[VllmRequest] = []

    def convert(self, record: VllmRecord) -> StepCounts:
        self._allocated_blocks, self._allocated_owners, self._preemptions, self._ended = [], {}, [], []
        decoding = set(self._decoding_numbers(record))
        self.dispatch(record.events)
        for (request_id, group), ids in record.state_tables.items():
            request = self.requests.get(request_id)
            if request is not None and request.known.tables[group] != ids:
                self._assign_blocks(request, group, ids, 0)
        self.update_progress(self._running(record))
        self._update_rows(record)
        self._report_causes()
        self._set_wait_reasons(record)
        batch = {
            request.known.number: num_tokens
            for request_id, num_tokens in (record.step.num_scheduled_tokens.items() if record.step is not None else ())
            if (request := self.requests.get(request_id)) is not None
        }
        self._offloaded.end_step(self._ended)
        for request in self._ended:
            if self.requests.get(request.host.request_id) is request:
                del self.requests[request.host.request_id]
        num_decode_tokens = sum(num_tokens for number, num_tokens in batch.items() if number in decoding)
        return StepCounts(len(record.running), record.num_waiting, batch, num_decode_tokens)

    def request_tokens(self, request: VllmRequest, start: int, end: int) -> Sequence[int]:
        tokens: Sequence[int] = request.host.all_token_ids[start:end]
        return tokens

    def request_key(self, request: VllmRequest) -> tuple[str, str]:
        return key_of(request.host)

    def request_notes(self, request: VllmRequest, start: int, count: int) -> BlockNotes:
        return notes_of(request.host, start, count)

    def missed_block(self, request: VllmRequest, token: int) -> MissedBlock | None:
        """Return the block that begins at `token`, with the hash that vLLM gives it in the first KV group."""
        hashes, per_block = request.host.block_hashes, max(1, self.block_size // self._hash_block_size)
        index = token // self._hash_block_size + per_block - 1
        if index >= len(hashes):
            return None
        return MissedBlock((low_bits(hashes[index], 0),), low_bits(hashes[index - per_block], 0) if token else 0)

    # What happened.

    def _added(self, host: Any) -> None:
        arrival_ns = self.arrival_ns(time.time() - float(host.arrival_time))
        known = self.state.add_request(
            host.request_id,
            num_prompt_tokens=host.num_prompt_tokens,
            arrival_ns=arrival_ns,
            max_tokens=int(host.max_tokens or 0),
            priority=int(host.priority),
            adapter=key_of(host)[0],
        )
        self.requests[host.request_id] = VllmRequest(host, known, arrival_ns)

    def _scheduled(self, output: Any, time_ns: int) -> None:
        for new in output.scheduled_new_reqs:
            self._started(time_ns, new.req_id, new.block_ids, int(new.num_computed_tokens))
        cached = output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            blocks = cached.new_block_ids[index]
            if request_id in cached.resumed_req_ids:
                self._started(time_ns, request_id, blocks, int(cached.num_computed_tokens[index]))
            elif blocks is not None and (request := self.requests.get(request_id)) is not None:
                for group, ids in enumerate(blocks):
                    if ids:
                        self._assign_blocks(request, group, ids, len(request.known.tables[group]))

    def _started(self, time_ns: int, request_id: str, blocks: Sequence[Sequence[int]] | None, num_cached: int) -> None:
        request = self.requests.get(request_id)
        if request is None:
            return
        for group, ids in enumerate(blocks or ()):
            self._assign_blocks(request, group, ids, 0)
        num_loaded = -(-request.num_loaded_tokens // self.block_size)
        if request.num_loaded_tokens:
            before = request.known.num_computed_tokens
            self.blocks.fill(dict(self.blocks_written(request, 0, num_cached)))
            self._report_loaded(request, max(before, num_cached - request.num_loaded_tokens), num_cached)
            request.num_loaded_tokens = 0
        self.start_request(
            request,
            time_ns=time_ns,
            num_cached_tokens=num_cached,
            num_blocks=self.blocks.num_blocks_of(request),
            num_pool_blocks=num_cached // self.block_size - num_loaded,
            num_loaded_blocks=num_loaded,
        )

    def _assign_blocks(self, request: VllmRequest, group: int, ids: Sequence[int], start: int) -> None:
        """Set the table entries of a request from `start` on. The request becomes the owner of the blocks that
        were just allocated and have no owner.
        """
        self.blocks.set_table(request, list(ids), group=group, start=start)
        rows = np.array(ids, np.uint32)
        rows = rows[rows >= self.num_reserved]
        newly_owned = rows[self.state.ledger.owner[rows] == NO_OWNER]
        self.state.set_blocks(newly_owned, owner=request.known.number, group=group)
        self._allocated_owners |= dict.fromkeys(newly_owned.tolist(), request.known.number)

    def _allocated(self, ids: list[int]) -> None:
        """Publish allocated blocks. Their owner is unknown until the step is scheduled."""
        self.blocks.evict(ids)
        self._allocated_blocks += ids
        self.step.used.update(ids)
        self.state.set_blocks(ids, filled=0, owner=NO_OWNER, prefix_hits=0, hash=0, parent=0, eviction_order=0)

    def _hit(self, ids: list[int]) -> None:
        self.blocks.record_hits([block for block in ids if block >= self.num_reserved], eviction_order=0)

    def _load_started(self, host: Any, blocks: Sequence[Sequence[int]], num_tokens: int) -> None:
        """Publish the block table of a request that waits while KV is loaded into its blocks."""
        request = self.requests.get(host.request_id)
        if request is None:
            return
        for group, ids in enumerate(blocks):
            self._assign_blocks(request, group, ids, 0)
        request.num_loaded_tokens = num_tokens
        self.state.count(loaded_blocks=-(-num_tokens // self.block_size))

    def _count_drafts(self, draft_counts: list[tuple[str, int, int]]) -> None:
        """Count draft tokens, given (request id, drafts, sampled tokens). The number of accepted drafts is one
        less than that of sampled tokens.
        """
        for request_id, num_drafts, num_sampled in draft_counts:
            request = self.requests.get(request_id)
            if request is not None and num_drafts:
                known, num_accepted = request.known, max(0, num_sampled - 1)
                self.count_drafts(
                    request, known.num_draft_tokens + num_drafts, known.num_accepted_tokens + num_accepted
                )

    def _reset(self) -> None:
        ledger, num_blocks = self.state.ledger, self.state.hello.cache.num_blocks
        hashed = np.flatnonzero(ledger.hash[:num_blocks])
        idle = hashed[ledger.ref_count[hashed] == 0]
        self.texts.clear(num_blocks)
        self.evicted_hashes.clear()
        self.state.set_blocks(hashed, hash=0, parent=0)
        self.state.free_blocks(idle)
        self.events.report_emptied(int(idle.size))

    def _preempted(self, host: Any, num_tokens: int, num_free: int, asked_by: str, time_ns: int) -> None:
        request = self.requests.get(host.request_id)
        if request is None:
            return
        num_blocks, num_allocated = self.blocks.release_tables(request), len(self._allocated_blocks)
        self.preempt_request(request, time_ns)
        self._preemptions.append(
            _Preemption(request, num_tokens, num_blocks, num_free, num_allocated, asked_by, time_ns)
        )

    def _finished(self, host: Any, status: Any, num_outputs: int) -> None:
        request = self.requests.get(host.request_id)
        if request is None or request.host is not host:
            return
        self.state.set_num_output_tokens(request.known, num_outputs, self.step.time_ns)
        reason = _REASONS.get(status.name, status.name.lower())
        self.finish_request(request, reason, self.blocks.release_tables(request), is_aborted=status.name == _ABORTED)
        self._ended.append(request)

    def _cached(self, host: Any, group: int, first: int, ids: list[int], block_size: int) -> None:
        hashes, request = host.block_hashes, self.requests.get(host.request_id)
        per_block = block_size // self._hash_block_size
        for entry, block in enumerate(ids, first):
            if block < self.num_reserved:
                continue
            parent_index, start = entry * per_block - 1, entry * block_size
            parent = low_bits(hashes[parent_index], group) if 0 <= parent_index < len(hashes) else 0
            own = low_bits(hashes[parent_index + per_block], group) if parent_index + per_block < len(hashes) else 0
            if request is not None:
                is_first = not start and group == 0
                self.texts.set(block, self.text_of(request, start, block_size), is_first=is_first)
            num_filled = min(block_size, self.block_sizes[group])
            self.blocks.cache(block, hash_value=own, parent=parent, filled=num_filled, group=group)

    def _left_window(self, request_id: str, group: int, ids: list[int]) -> None:
        """Replace the table entries of blocks that left a request's attention window by the null block."""
        request = self.requests.get(request_id)
        if request is None:
            return
        table = request.known.tables[group]
        for block in ids:
            if block in table:
                request.known.set_entry(table.index(block), 0, group)
        self.step.used.update(ids)
        self.state.touch(request.known)

    def _update_second_pool(self, ids: list[int], ref_counts: list[int], hashes: list[Any]) -> None:
        self._second = self._second or SecondPoolRows(self.state, self.texts, MAX_TEXTS)
        self.evicted_hashes.record(self._second.update(self.step.number, ids, ref_counts, hashes), self.step.number)

    # State after the step.

    def _running(self, record: VllmRecord) -> Iterator[tuple[VllmRequest, int, int]]:
        for host, num_computed, num_outputs in zip(record.running, record.computed, record.num_outputs, strict=True):
            request = self.requests.get(host.request_id)
            if request is not None:
                yield request, num_computed, num_outputs

    def _update_rows(self, record: VllmRecord) -> None:
        last = {block: index for index, block in enumerate(record.blocks) if block >= self.num_reserved}
        if last:
            refs = [record.ref_counts[index] for index in last.values()]
            hashes = [hash_of_row(record.hashes[index]) for index in last.values()]
            self.blocks.set_ref_counts(np.array(list(last), np.uint32), refs, hashes)
        self.blocks.mark_used()

    def _report_causes(self) -> None:
        """Report the step's preemptions and evictions, when the requests that needed the memory are known."""
        for preemption in self._preemptions:
            victim, index = preemption.victim.known, preemption.num_allocated
            other = (
                self._allocated_owners.get(self._allocated_blocks[index], 0)
                if index < len(self._allocated_blocks)
                else victim.number
            )
            choice = "itself" if other == victim.number else "priority" if self._by_priority else "newest"
            data: EventData | None = EventData(
                kind="preempted",
                num_available=preemption.num_free,
                choice=choice,
                choice_number=victim.info.priority if choice == "priority" else 0,
            )
            if preemption.asked_by:
                data, other = EventData(kind="asked", by=preemption.asked_by), 0
            self.events.report(
                "preempted",
                time_ns=preemption.time_ns,
                number=victim.number,
                other=other,
                num_blocks=preemption.num_blocks,
                num_tokens=preemption.num_tokens,
                data=data,
            )
        if evicted := self.step.evicted:
            other = self._allocated_owners.get(evicted[0], 0)
            cause = evicted_text("requested", [(len(evicted), "cached block")])
            data = EventData(kind="evicted") if other else None
            self.events.report("evicted", other=other, num_blocks=len(evicted), cause=cause, data=data)

    def _set_wait_reasons(self, record: VllmRecord) -> None:
        """Publish the wait reasons of the first waiting request, and of waiting requests that could not run
        even with free capacity.
        """
        reasons = []
        if (
            record.first_waiting is not None
            and (request := self.requests.get(record.first_waiting.request_id)) is not None
        ):
            reasons.append((request, self._first_wait_reason(record.first_waiting, record)))
        for request_id, status, num_computed in record.not_ready:
            if status in _NOT_READY and (request := self.requests.get(request_id)) is not None:
                if _NOT_READY[status] is WaitsFor.REMOTE_KV:
                    request.known.num_computed_tokens = max(0, num_computed - request.num_loaded_tokens)
                reasons.append((request, _NOT_READY[status]))
        for request, reason in self.set_wait_reasons(reasons):
            if reason is WaitsFor.REMOTE_KV and not request.is_running:
                self._loaded(request)

    def _loaded(self, request: VllmRequest) -> None:
        """Publish that the KV of a waiting request has been loaded. The request remains in the queue until it
        can run.
        """
        before = request.known.num_computed_tokens
        after = before + request.num_loaded_tokens
        self.blocks.fill(dict(self.blocks_written(request, before, after)))
        self._report_loaded(request, before, after)
        request.known.num_computed_tokens = after

    def _report_loaded(self, request: VllmRequest, start: int, end: int) -> None:
        if start < end:
            self.state.add_moves("loaded", [block for block, _ in self.blocks_written(request, start, end)])

    def _first_wait_reason(self, host: Any, record: VllmRecord) -> WaitsFor:
        """Return the reason why `host`, the first request in the queue after a step, was not scheduled."""
        if record.step is None:
            return WaitsFor.UNKNOWN
        limits = self.state.hello.cache
        if len(record.running) >= limits.max_num_seqs:
            return WaitsFor.SEQUENCE_LIMIT
        if sum(record.step.num_scheduled_tokens.values()) >= limits.max_num_batched_tokens:
            return WaitsFor.BUDGET
        adapter = key_of(host)[0]
        others = {key_of(each)[0] for each in record.running} - {""}
        if adapter and adapter not in others and len(others) >= self._max_adapters > 0:
            return WaitsFor.ADAPTER
        num_needed = sum(-(-host.num_tokens // size) for size in self.block_sizes)
        return WaitsFor.BLOCKS if record.num_free < num_needed else WaitsFor.UNKNOWN

    def _decoding_numbers(self, record: VllmRecord) -> Iterator[int]:
        """Yield the numbers of requests that decode in the step. Call it before the record's changes are applied."""
        if record.step is None:
            return
        drafts = record.step.scheduled_spec_decode_tokens
        for request_id, num_tokens in record.step.num_scheduled_tokens.items():
            request = self.requests.get(request_id)
            if request is None or not request.known.num_output_tokens:
                continue
            if num_tokens <= 1 + len(drafts.get(request_id, ())):
                yield request.known.number
