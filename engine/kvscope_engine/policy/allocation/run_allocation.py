"""Policies that predate PagedAttention: each request's blocks are reserved as one contiguous run when it starts.

These are the three baselines of PagedAttention (Kwon et al. 2023, arXiv 2309.06180, section 6.1), which differ only in
how many tokens they reserve (`reservations`). As in the paper, a buddy allocator chooses the runs: their length is a
power of two. The kernels read an ordinary block table whose blocks happen to be contiguous.

Owns the run of each request. Independent of the scheduling order; does not modify requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvscope_engine.policy.allocation.reservations import ReservationRule
from kvscope_engine.policy.allocation.run_pool import RunPool
from kvscope_engine.policy.block_needs import describe_length, num_blocks_for
from kvscope_engine.policy.request import Request
from kvscope_telemetry.errors import PromptTooLong


@dataclass(slots=True)
class Reservation:
    """Contiguous run of blocks of a request, and the number of tokens for which it was reserved, at most the
    run's capacity.
    """

    run: list[int]
    num_tokens: int


class RunAllocation:
    """Reserves a run for each request, with the length that `rule` returns, and a longer one when the run becomes too
    short.

    `pool` must be unused. A run that is too short is doubled in place if the adjacent buddy is free (so a request alone
    in the pool can always grow). Otherwise the request moves to another run. The old run stays allocated until the step
    is committed, because the step copies from its blocks and must not copy to them.
    """

    def __init__(self, rule: ReservationRule, pool: RunPool, *, max_model_len: int) -> None:
        self._rule = rule
        self._pool = pool
        self._max_model_len = max_model_len
        self._max_run = pool.longest_run
        self._reservations: dict[int, Reservation] = {}
        self._vacated: dict[int, list[int]] = {}

    @property
    def name(self) -> str:
        return self._rule.name

    @property
    def reserves(self) -> bool:
        return True

    @property
    def max_request_tokens(self) -> int:
        """Number of tokens that fit in the longest run of the empty pool."""
        return self._max_run * self._pool.block_size

    def check_fits(self, request: Request) -> None:
        """Raise BadInput if the request could not run even alone, or lacks a value that the rule needs."""
        self._rule.check(request)
        length = request.num_prompt_tokens + request.max_tokens
        if length > self.max_request_tokens:
            raise PromptTooLong(
                f"{describe_length(request)} make {length} tokens:"
                f" at most {self.max_request_tokens} are accepted, in the longest run of {self._max_run} blocks that"
                f" allocator={self.name!r} has in a pool of {self._pool.num_blocks}"
            )

    def num_available(self, request: Request) -> int:
        """Return the number of blocks that the request can get in its run, or in a longer run to which it can extend or
        move.

        For a request without a run, this is the length of its first run, or 0 if no run of that length is free.
        """
        reservation = self._reservations.get(request.number)
        length, table = self._run_length(request), len(request.block_table)
        if reservation is None:
            return length if length <= self._pool.longest_run else 0
        return (length if self._can_lengthen(reservation.run, length) else len(reservation.run)) - table

    def num_held(self, request: Request) -> int:
        reservation = self._reservations.get(request.number)
        return (len(reservation.run) if reservation else 0) + len(self._vacated.get(request.number, ()))

    def num_reserved_tokens(self, request: Request) -> int:
        reservation = self._reservations.get(request.number)
        return reservation.num_tokens if reservation else 0

    def num_reserved_blocks(self, request: Request) -> int:
        return self._run_length(request)

    def move(self, request: Request, count: int) -> list[int] | None:
        """Ensure that the request's run has `count` more blocks than its table.

        Returns the new block ids of the request's table if the run had to move, else None.
        """
        reservation = self._reservations.get(request.number)
        if reservation is None or len(request.block_table) + count <= len(reservation.run):
            return None
        self._lengthen(reservation, self._run_length(request), request.number)
        blocks = reservation.run[: len(request.block_table)]
        return blocks if blocks != request.block_table else None

    def allocate(self, request: Request, count: int, group: int = 0) -> list[int]:
        """Return the next `count` blocks of the request's run, which is reserved first if it has none."""
        reservation = self._reservations.get(request.number)
        if reservation is None:
            reservation = Reservation(self._pool.allocate_run(self._run_length(request), request.number), 0)
            self._reservations[request.number] = reservation
        num_slots = len(reservation.run) * self._pool.block_size
        reservation.num_tokens = min(max(reservation.num_tokens, self._num_tokens(request)), num_slots)
        first = len(request.block_table)
        return reservation.run[first : first + count]

    def release(self, request: Request, step: int) -> None:
        """Release the request's run, and its old run if the request moved in this step."""
        self._pool.release(self._reservations.pop(request.number).run, step)
        if request.number in self._vacated:
            self._pool.release(self._vacated.pop(request.number), step)

    def commit(self, step: int) -> None:
        for run in self._vacated.values():
            self._pool.release(run, step)
        self._vacated.clear()

    def holders(self, requests: Iterable[Request]) -> list[Sequence[int]]:
        """Return every run. Raises AssertionError unless each table is the beginning of its request's run."""
        without_run = set(self._reservations)
        for request in requests:
            reservation, table = self._reservations.get(request.number), request.block_table
            run = reservation.run if reservation else []
            assert table == run[: len(table)], f"request {request.number} has blocks outside its run"
            assert bool(run) == bool(table), f"request {request.number} has a run and no table, or a table and no run"
            assert request.num_reserved_tokens == self.num_reserved_tokens(request) <= len(run) * self._pool.block_size
            without_run.discard(request.number)
        assert not without_run, f"requests {sorted(without_run)} ended and have a run"
        return [*(reservation.run for reservation in self._reservations.values()), *self._vacated.values()]

    def _can_lengthen(self, run: list[int], length: int) -> bool:
        if length <= len(run):
            return False
        return length <= self._pool.longest_run or (length == 2 * len(run) and self._pool.can_extend_run(run))

    def _lengthen(self, reservation: Reservation, length: int, number: int) -> None:
        if length == 2 * len(reservation.run) and self._pool.can_extend_run(reservation.run):
            reservation.run = self._pool.extend_run(reservation.run, number)
            return
        assert number not in self._vacated, f"request {number} moves twice in a step"
        self._vacated[number] = reservation.run
        reservation.run = self._pool.allocate_run(length, number)

    def _num_tokens(self, request: Request) -> int:
        """Return the number of tokens to reserve, according to the rule.

        The result is at least the request's current tokens and at most the longest possible request.
        """
        reserved = min(self._rule.num_tokens(request), self._max_model_len, self.max_request_tokens)
        return max(request.num_tokens, reserved)

    def _run_length(self, request: Request) -> int:
        blocks = num_blocks_for(self._num_tokens(request), self._pool.block_size)
        return 1 << (blocks - 1).bit_length()
