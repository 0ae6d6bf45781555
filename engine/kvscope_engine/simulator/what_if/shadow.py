"""Simulates how another allocator would place an engine's requests in the same memory (*What if*).

Owns the requests that have memory. It has no scheduler and no clock: requests arrive, grow and end as in the engine, so
free slots are fragmented in the same way. Prefixes are not shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvscope_engine.policy.request import Request
from kvscope_engine.simulator.what_if.candidates import Candidate, check_candidate
from kvscope_engine.simulator.what_if.placed_pool import LayoutUse, PlacedPool
from kvscope_engine.simulator.what_if.slot_map import Spans
from kvscope_telemetry.messages.sampling_params import ResolvedSampling
from kvscope_telemetry.messages.what_if import MapKind, Running

_SAMPLING: Final = ResolvedSampling()


@dataclass(frozen=True, slots=True)
class ShadowUse:
    """Use of the slots of all pools, converted to slots of the first pool. The seven counts from `num_used` to
    `num_outside` add up to `num_slots`.
    """

    num_slots: int
    num_used: int
    num_unread: int
    num_reserved: int
    num_internal: int
    num_rounding: int
    num_external: int
    num_outside: int
    external_fragmentation: float
    num_fitting: int
    """Number of requests that would fill the memory if each had the mean size of the placed requests; 0 if no
    request is placed.
    """


class Shadow:
    """Places the engine's requests in simulated memory with one allocator. Raises BadInput if the allocator
    cannot manage the memory of `candidate`.
    """

    def __init__(self, candidate: Candidate, *, max_model_len: int) -> None:
        check_candidate(candidate)
        self.candidate = candidate
        self.num_waiting = 0
        """Number of requests in the last `update` that did not fit."""
        self.num_preempted = 0
        """Number of times that a request lost its blocks, either to an older request that grew or because the
        request itself could not grow.
        """
        first, *others = candidate.pools
        self._pools = [PlacedPool(candidate.allocator_name, first, max_model_len=max_model_len)]
        self._pools += [PlacedPool("paged", pool, max_model_len=max_model_len) for pool in others]
        self._placed: dict[int, list[Request]] = {}
        self._limits: dict[int, int] = {}
        self._step = 0

    @property
    def num_placed(self) -> int:
        return len(self._placed)

    @property
    def num_slots(self) -> int:
        """Number of slots of all pools, converted by their bytes to slots of the first pool."""
        return sum(self._to_first_pool(index, pool.layout.num_slots) for index, pool in enumerate(self._pools))

    def update(self, running_requests: Sequence[Running]) -> None:
        """Place the engine's running requests, which must be ordered by number and distinct.

        Requests that do not fit wait, and are tried again in each call. If a placed request cannot grow, the newest
        placed requests lose their blocks until it can.
        """
        self._step += 1
        self._limits = {running.number: running.max_tokens for running in running_requests}
        for number in [number for number in self._placed if number not in self._limits]:
            self._release(number)
        newest_last = [running.number for running in running_requests]
        for running in running_requests:
            self._place_request(running, newest_last)
        self.num_waiting = len(running_requests) - len(self._placed)

    def use(self) -> ShadowUse:
        uses = list(enumerate(self._uses()))
        used, unread, reserved, internal, rounding, external, largest = (
            sum(self._to_first_pool(index, getattr(use, name)) for index, use in uses) for name in _COUNTS
        )
        return ShadowUse(
            num_slots=self.num_slots,
            num_used=used,
            num_unread=unread,
            num_reserved=reserved,
            num_internal=internal,
            num_rounding=rounding,
            num_external=external,
            num_outside=self.num_slots - used - unread - reserved - internal - rounding - external,
            external_fragmentation=1 - largest / external if external else 0.0,
            num_fitting=min(
                (one.num_slots * self.num_placed // one.num_held for _, one in uses if one.num_held), default=0
            ),
        )

    def spans(self) -> dict[MapKind, Spans]:
        """Return the slots of each kind, one pool after another. Slots that are in none of the returned ranges
        are free. Takes O(blocks).
        """
        spans_by_kind: dict[MapKind, list[Spans]] = {}
        start = 0
        for index, pool in enumerate(self._pools):
            for kind, spans in pool.spans(self._parts_in_pool(index), self._limits).items():
                spans_by_kind.setdefault(kind, []).append(self._spans_in_first_pool(spans, index, start))
            end = start + self._to_first_pool(index, pool.layout.num_slots)
            end_of_blocks = self._to_first_pool(index, pool.layout.num_blocks * pool.layout.block_size)
            spans_by_kind.setdefault(MapKind.ROUNDING, []).append(
                Spans(np.array([start + end_of_blocks]), np.array([end - start - end_of_blocks]))
            )
            start = end
        return {kind: Spans(*map(np.concatenate, zip(*spans, strict=True))) for kind, spans in spans_by_kind.items()}

    def check_integrity(self) -> None:
        for index, pool in enumerate(self._pools):
            pool.check_integrity(self._parts_in_pool(index).values())

    def _place_request(self, running: Running, newest_last: list[int]) -> None:
        parts_before = self._placed.get(running.number)
        if parts_before is not None:
            if running.num_tokens >= parts_before[0].num_computed_tokens and self._grow(parts_before, running):
                return
            self._release(running.number)
        while not self._grow(parts := [placed_request(running) for _ in self._pools], running):
            for pool, part in zip(self._pools, parts, strict=True):
                pool.release(part, self._step)
            if parts_before is None:
                return
            if not self._preempt_newest(newest_last, running.number):
                self.num_preempted += 1
                return
        self._placed[running.number] = parts

    def _grow(self, parts: Sequence[Request], running: Running) -> bool:
        for part in parts:
            set_output_length(part, running)
        return all(
            pool.grow(part, running.num_tokens, self._step) for pool, part in zip(self._pools, parts, strict=True)
        )

    def _preempt_newest(self, newest_last: list[int], number: int) -> bool:
        """Preempt the newest placed request whose number exceeds `number`. Returns False if there is none.
        Removes the tried numbers from `newest_last`.
        """
        while newest_last and newest_last[-1] > number:
            newest = newest_last.pop()
            if newest in self._placed:
                self._release(newest)
                self.num_preempted += 1
                return True
        return False

    def _release(self, number: int) -> None:
        for pool, part in zip(self._pools, self._placed.pop(number), strict=True):
            pool.release(part, self._step)

    def _parts_in_pool(self, index: int) -> dict[int, Request]:
        return {number: parts[index] for number, parts in self._placed.items()}

    def _uses(self) -> list[LayoutUse]:
        return [pool.use(self._parts_in_pool(index), self._limits) for index, pool in enumerate(self._pools)]

    def _to_first_pool(self, index: int, num_slots: int) -> int:
        """Convert a number of slots of pool `index` to slots of the first pool, by their bytes."""
        first, own = self._pools[0].layout.slot_bytes, self._pools[index].layout.slot_bytes
        return int(num_slots * own // first) if index and first and own else num_slots

    def _spans_in_first_pool(self, spans: Spans, index: int, start: int) -> Spans:
        if not index:
            return spans
        first, own = self._pools[0].layout.slot_bytes, self._pools[index].layout.slot_bytes
        scale = own / first if first and own else 1.0
        starts = np.floor(np.asarray(spans.starts) * scale).astype(np.int64)
        ends = np.floor((np.asarray(spans.starts) + np.asarray(spans.lengths)) * scale).astype(np.int64)
        return Spans(start + starts, ends - starts)


_COUNTS: Final = (
    *("num_used", "num_unread", "num_reserved", "num_internal", "num_rounding", "num_external"),
    "largest_free_run",
)


class NumTokens(list[int]):
    """A list that has a length but no items. Allocators need only the number of a request's tokens, so a long
    request costs no more than a short one.
    """

    __slots__ = ("count_",)

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count_ = count

    def __len__(self) -> int:
        return self.count_


def placed_request(running: Running) -> Request:
    """Return a request without computed tokens that corresponds to a running request of the engine."""
    prompt = running.num_prompt_tokens
    request = Request(
        number=running.number,
        request_id=str(running.number),
        prompt_token_ids=NumTokens(prompt),
        sampling=_SAMPLING,
        max_tokens=max(0, running.max_tokens - prompt),
        arrival_ns=0,
    )
    set_output_length(request, running)
    return request


def set_output_length(request: Request, running: Running) -> None:
    """Set the number of output tokens of `request` so that it matches `running`: the output tokens whose KV is
    computed, plus the newest sampled token, whose KV is not computed yet.
    """
    num_output = running.num_tokens + 1 - running.num_prompt_tokens
    request.output_token_ids = NumTokens(max(0, num_output))
