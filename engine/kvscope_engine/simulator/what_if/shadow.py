"""A shadow: the requests of the running engine in a pool of their own, placed by another policy.

Owns the pool, the policy over it and which requests it placed. No scheduler and no clock: requests come, grow and
go as the engine's do, so what is free is scattered by the same coming and going. Prefixes are not shared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from kvscope_engine.policy.allocation.allocators import make_allocation, make_pool
from kvscope_engine.policy.allocation.fragmentation import KVUse, kv_use
from kvscope_engine.policy.fit import num_blocks_for
from kvscope_engine.policy.request import Request
from kvscope_engine.simulator.what_if.candidates import Candidate, check
from kvscope_engine.simulator.what_if.slot_map import Spans
from kvscope_telemetry.ledger import BlockState
from kvscope_telemetry.messages.sampling_params import ResolvedSampling
from kvscope_telemetry.messages.what_if import MapKind, Running

_SAMPLING: Final = ResolvedSampling()


class Shadow:
    """Raises BadInput for a policy that could not run in such a memory."""

    def __init__(self, candidate: Candidate, *, max_model_len: int) -> None:
        check(candidate)
        self.candidate = candidate
        self.num_waiting = 0
        """Requests of the last `follow` that did not fit."""
        self._pool = make_pool(candidate.made_as, candidate.num_blocks, candidate.block_size, prefix_caching=False)
        self._allocation = make_allocation(candidate.made_as, self._pool, max_model_len=max_model_len)
        self._placed: dict[int, Request] = {}
        self._limits: dict[int, int] = {}
        self._step = 0

    @property
    def num_placed(self) -> int:
        """Requests that have blocks here."""
        return len(self._placed)

    def follow(self, now: Sequence[Running]) -> None:
        """Become what the policy makes of `now`: requests in order of number, each once.

        What does not fit waits, and is tried again each time. One that was placed and cannot grow takes blocks
        from those after it, as a scheduler preempts the newest.
        """
        self._step += 1
        self._limits = {running.number: running.max_tokens for running in now}
        for number in [number for number in self._placed if number not in self._limits]:
            self._release(number)
        newest_last = [running.number for running in now]
        for running in now:
            self._hold(running, newest_last)
        self.num_waiting = len(now) - len(self._placed)

    def use(self) -> KVUse:
        """What the slots are used for. What lies beyond a request's limit is never to be used."""
        return kv_use(self._pool, self._with_ends() if self._allocation.reserves else self._placed.values())

    def spans(self) -> dict[MapKind, Spans]:
        """Which slots are what; those in no span are free. O(blocks)."""
        size, ledger = self._pool.block_size, self._pool.ledger
        active = np.flatnonzero(ledger.state[: self._pool.num_blocks] == BlockState.ACTIVE)
        starts, filled = active * size, ledger.filled[active].astype(np.int64)
        used = {MapKind.USED: Spans(starts, filled)}
        if not self._allocation.reserves:
            return used | {MapKind.INTERNAL: Spans(starts + filled, size - filled)}
        return used | self._spans_of_runs()

    def check_integrity(self) -> None:
        """Raise AssertionError unless pool, policy and requests agree."""
        self._pool.check_integrity(self._allocation.holders(self._placed.values()))

    def _hold(self, running: Running, newest_last: list[int]) -> None:
        request = self._placed.get(running.number)
        had_place = request is not None
        if request is not None:
            if running.num_tokens >= request.num_computed_tokens and self._lengthen(request, running):
                return
            self._release(running.number)
        request = twin(running)
        while not self._lengthen(request, running):
            if not (had_place and self._take_from_newest(newest_last, running.number)):
                return
        self._placed[running.number] = request

    def _lengthen(self, request: Request, running: Running) -> bool:
        """Give the request blocks for its tokens; False when there are too few."""
        tell_output(request, running)
        needed = num_blocks_for(running.num_tokens, self._pool.block_size) - len(request.block_table)
        if needed > 0:
            if needed > self._allocation.num_available(request):
                return False
            self._move(request, needed)
            request.block_table.extend(self._allocation.allocate(request, needed))
            request.num_reserved_tokens = self._allocation.num_reserved_tokens(request)
        self._write(request, running.num_tokens)
        return True

    def _move(self, request: Request, count: int) -> None:
        targets = self._allocation.move(request, count)
        if targets is None:
            return
        sources, owners = request.block_table, [request.number] * len(targets)
        filled = self._pool.ledger.filled[sources].tolist()
        self._pool.write(sources, [0] * len(sources), owners, self._step)
        self._pool.write(targets, filled, owners, self._step)
        request.block_table[:] = targets
        self._allocation.settle(self._step)  # nothing is copied here: the old run is free at once

    def _write(self, request: Request, num_tokens: int) -> None:
        size, before = self._pool.block_size, request.num_computed_tokens
        if num_tokens == before:
            return
        first, end = before // size, num_blocks_for(num_tokens, size)
        filled = [size] * (end - first)
        filled[-1] = num_tokens - (end - 1) * size
        self._pool.write(request.block_table[first:end], filled, [request.number] * len(filled), self._step)
        request.num_computed_tokens = num_tokens

    def _take_from_newest(self, newest_last: list[int], number: int) -> bool:
        """Let the newest placed request after `number` wait; False when there is none. `newest_last` gets shorter."""
        while newest_last and newest_last[-1] > number:
            newest = newest_last.pop()
            if newest in self._placed:
                self._release(newest)
                return True
        return False

    def _release(self, number: int) -> None:
        request = self._placed.pop(number)
        if request.block_table:
            self._allocation.release(request, self._step)

    def _with_ends(self) -> Iterator[Request]:
        for number, request in self._placed.items():
            yield replace(request, expected_tokens=self._limits[number] or None)

    def _spans_of_runs(self) -> dict[MapKind, Spans]:
        """The empty part of each run: to be used, beyond the request's limit, beyond what was reserved."""
        rows = sorted(self._run_marks(request) for request in self._placed.values() if request.block_table)
        marks = np.array(rows, np.int64).reshape(-1, 4)
        kinds = (MapKind.RESERVED, MapKind.INTERNAL, MapKind.ROUNDING)
        return {
            kind: Spans(marks[:, column], marks[:, column + 1] - marks[:, column]) for column, kind in enumerate(kinds)
        }

    def _run_marks(self, request: Request) -> tuple[int, int, int, int]:
        """Slots of the pool where the run's tokens, its limit, its reservation and itself end."""
        size, computed = self._pool.block_size, request.num_computed_tokens
        first = request.block_table[0] * size
        reserved = max(request.num_reserved_tokens, computed)
        limit = self._limits[request.number] or reserved
        end = self._allocation.num_held(request) * size
        return first + computed, first + max(computed, min(limit, reserved)), first + reserved, first + end


class NumTokens(list[int]):
    """A request as allocation policies see it: how many tokens it has, and none of them.

    A list of which only the length is there, so that a long request costs no more than a short one.
    """

    __slots__ = ("count_",)

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count_ = count

    def __len__(self) -> int:
        return self.count_


def twin(running: Running) -> Request:
    """A request of which nothing is computed yet."""
    prompt = running.num_prompt_tokens
    request = Request(
        number=running.number,
        request_id=str(running.number),
        prompt_token_ids=NumTokens(prompt),
        sampling=_SAMPLING,
        max_tokens=max(0, running.max_tokens - prompt),
        arrival_ns=0,
    )
    tell_output(request, running)
    return request


def tell_output(request: Request, running: Running) -> None:
    """The output so far: once the prompt is computed there is one token more than are computed."""
    num_output = running.num_tokens + 1 - running.num_prompt_tokens
    request.output_token_ids = NumTokens(max(0, num_output))
