"""Converts a step's plan to the model's input arrays in numpy, with little Python code per request.

Owns one row of block ids per request that persists across steps, so that a step appends new ids instead of rebuilding
tables. Knows no tensors and no policy: a row is correct whatever happened to the request's table in between.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvscope_engine.policy.request import Request
from kvscope_engine.policy.step_plan import Scheduled, StepPlan

Int64 = NDArray[np.int64]
Int32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Flattened batch of a step: T tokens of S sequences in G KV groups, decodes first."""

    input_ids: Int64
    """(T,)."""
    positions: Int64
    """(T,)."""
    slot_mapping: Int64
    """(G, T), one row per KV group; -1 for padding."""
    block_tables: Int32
    """(G, S, max_blocks). Entries after a sequence's last block, or before its window, are never read."""
    seq_lens: Int32
    """(S,), including the step's tokens."""
    query_start: Int32
    """(S + 1,): first row of each sequence in the batch."""
    num_single_token: int
    sample_rows: Int64
    """Rows of the batch whose logits are sampled."""
    awaited: Int64 | None = None
    """(2, n): rows of the batch whose token the step in flight samples, and the rows of these tokens among its samples.

    None if there are none. `input_ids` are 0 in these rows.
    """
    state_slots: Int64 | None = None
    """(S,): state slot of each sequence; None for models without recurrent layers."""

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def is_drafted(self) -> bool:
        """Whether the step consists of decodes only, at least one of them with drafts. A token is sampled in every
        row."""
        return self.num_single_token < self.num_tokens == len(self.sample_rows)


class TableRows:
    """Block ids of recently scheduled requests: one row per request in each KV group."""

    def __init__(self, num_rows: int, max_blocks: int, num_groups: int = 1) -> None:
        self.table: Int32 = np.zeros((num_groups, num_rows, max_blocks), np.int32)
        self._rows: dict[int, int] = {}
        self._known: list[list[list[int]]] = [_nothing(num_groups) for _ in range(num_rows)]
        self._free = list(range(num_rows - 1, -1, -1))

    def rows_of(self, requests: list[Request]) -> Int64:
        """Return the row of each request, after updating it."""
        self._make_room(requests)
        return np.fromiter((self._update(request) for request in requests), np.int64, len(requests))

    def _update(self, request: Request) -> int:
        row = self._rows.get(request.number)
        if row is None:
            row = self._rows[request.number] = self._free.pop()
        for group, (known, table) in enumerate(zip(self._known[row], request.block_tables, strict=True)):
            let_go = request.num_null_blocks[group]
            # elements are the same objects, so comparing 1,000 ids takes microseconds; freed blocks are not read
            if known != table if not let_go else known[let_go:] != table[let_go:]:
                self._write(group, row, known, table, let_go)
        return row

    def _write(self, group: int, row: int, known: list[int], table: list[int], let_go: int) -> None:
        """Append new ids; rewrite the row if the ids written before are not a prefix of the table."""
        kept = len(known)
        if known[let_go:] != table[let_go:kept]:
            kept = min(let_go, kept)
            del known[kept:]
        if len(table) > self.table.shape[2]:
            self._widen(len(table))
        self.table[group, row, kept : len(table)] = table[kept:]
        known += table[kept:]

    def _make_room(self, requests: list[Request]) -> None:
        """Release the rows of requests that do not run in this step if too few rows are free."""
        missing = sum(request.number not in self._rows for request in requests)
        if missing <= len(self._free):
            return
        running = {request.number for request in requests}
        for number in [number for number in self._rows if number not in running]:
            row = self._rows.pop(number)
            self._known[row] = _nothing(len(self.table))
            self._free.append(row)
        self._add_rows(missing - len(self._free))

    def _add_rows(self, count: int) -> None:
        if count <= 0:
            return
        num_groups, start, width = self.table.shape
        self.table = np.concatenate((self.table, np.zeros((num_groups, count, width), np.int32)), axis=1)
        self._known += [_nothing(num_groups) for _ in range(count)]
        self._free += range(start, start + count)

    def _widen(self, width: int) -> None:
        num_groups, num_rows, before = self.table.shape
        wider = np.zeros((num_groups, num_rows, max(width, 2 * before)), np.int32)
        wider[:, :, :before] = self.table
        self.table = wider


def _nothing(num_groups: int) -> list[list[int]]:
    return [[] for _ in range(num_groups)]


def build_inputs(
    plan: StepPlan, rows: TableRows, block_size: int, in_flight: Mapping[int, int] | None = None
) -> StepInputs:
    """Return the arrays of one step.

    `in_flight`: row of each token that the previous step is sampling, by request number.
    """
    scheduled = plan.scheduled
    counts = np.fromiter((item.num_tokens for item in scheduled), np.int64, len(scheduled))
    starts = np.fromiter((item.start for item in scheduled), np.int64, len(scheduled))
    ends = np.cumsum(counts)
    query_start = np.concatenate(([0], ends))
    row_of_sequence = rows.rows_of([item.request for item in scheduled])
    positions = np.arange(ends[-1]) + np.repeat(starts - query_start[:-1], counts)
    row_of_token = np.repeat(row_of_sequence, counts)
    seq_lens = starts + counts
    samples = np.fromiter((item.samples for item in scheduled), np.bool_, len(scheduled))
    awaited: list[tuple[int, int]] = []
    return StepInputs(
        input_ids=_token_ids(scheduled, plan.num_single_token, int(ends[-1]), in_flight or {}, awaited),
        positions=positions,
        slot_mapping=_slots(rows.table, row_of_token, positions, block_size),
        block_tables=rows.table[:, :, : -(-int(seq_lens.max()) // block_size)].take(row_of_sequence, axis=1),
        seq_lens=seq_lens.astype(np.int32),
        query_start=query_start.astype(np.int32),
        num_single_token=plan.num_single_token,
        sample_rows=_sample_rows(scheduled, ends, samples),
        awaited=np.ascontiguousarray(np.array(awaited, np.int64).T) if awaited else None,
        state_slots=_state_slots(scheduled),
    )


def _state_slots(scheduled: tuple[Scheduled, ...]) -> Int64 | None:
    if scheduled[0].request.state_slot < 0:
        return None
    return np.fromiter((item.request.state_slot for item in scheduled), np.int64, len(scheduled))


def _token_ids(
    scheduled: tuple[Scheduled, ...],
    num_single_token: int,
    num_tokens: int,
    in_flight: Mapping[int, int],
    awaited: list[tuple[int, int]],
) -> Int64:
    """Return the token ids of all rows. Adds rows whose token is in flight to `awaited`, with the row of that
    sample."""
    ids: list[int] = []
    for row, item in enumerate(scheduled[:num_single_token]):
        request = item.request
        output = item.start - len(request.prompt_token_ids)
        if output < 0:
            ids.append(request.prompt_token_ids[item.start])
        elif output < len(request.output_token_ids):
            ids.append(request.output_token_ids[output])
        else:
            ids.append(0)
            awaited.append((row, in_flight[request.number]))
    for item in scheduled[num_single_token:]:
        ids += item.request.tokens(item.start, item.start + item.num_tokens)
        ids += item.drafts
    assert len(ids) == num_tokens, f"the plan computes {num_tokens} tokens, the requests know {len(ids)}"
    return np.array(ids, np.int64)


def sampled_places(scheduled: Sequence[Scheduled]) -> tuple[list[Request], list[int]]:
    """Return, per sampled row of logits, its request and the number of output tokens that precede the sampled one."""
    requests: list[Request] = []
    num_output_tokens: list[int] = []
    for item in scheduled:
        if item.samples:
            last = item.start + item.num_tokens - item.request.num_prompt_tokens
            requests += [item.request] * (1 + len(item.drafts))
            num_output_tokens += range(last - len(item.drafts), last + 1)
    return requests, num_output_tokens


def _sample_rows(scheduled: Sequence[Scheduled], ends: Int64, samples: NDArray[np.bool_]) -> Int64:
    """Return the rows of the last known token and of the drafts after it, for all requests that sample."""
    last = ends[samples] - 1
    counts = np.fromiter((1 + len(item.drafts) for item in scheduled if item.samples), np.int64, len(last))
    if not len(last) or counts.max() == 1:
        return last
    firsts = np.repeat(last - (counts - 1), counts)
    within = np.arange(len(firsts)) - np.repeat(np.cumsum(counts) - counts, counts)
    return firsts + within


def _slots(table: Int32, row_of_token: Int64, positions: Int64, block_size: int) -> Int64:
    blocks, offsets = np.divmod(positions, block_size)
    places = np.stack([of_group[row_of_token, blocks] for of_group in table])  # one contiguous row per group
    return places.astype(np.int64) * block_size + offsets
