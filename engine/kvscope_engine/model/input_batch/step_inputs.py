"""Converts a step's plan to the model's input arrays in numpy, with little Python code per request.

Owns one row of block ids per request that persists across steps, so that a step appends new ids instead of rebuilding
tables. A row is corrected if the request's block table changed in between. Must not depend on torch.
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
    """Token ids, shape (T,)."""
    positions: Int64
    """Position of each token in its sequence, shape (T,)."""
    slot_mapping: Int64
    """Slot to which each token's KV is written, shape (G, T), one row per KV group; -1 for padding."""
    block_tables: Int32
    """Block ids of each sequence, shape (G, S, max_blocks). Entries after a sequence's last block or before its
    window are never read.
    """
    seq_lens: Int32
    """Shape (S,): length of each sequence, including the step's tokens."""
    query_start: Int32
    """Shape (S + 1,): first row of each sequence in the batch, and the number of rows."""
    num_single_token: int
    """Number of sequences with exactly one token in the step. They come first in the batch."""
    sample_rows: Int64
    """Rows of the batch whose logits are sampled."""
    awaited: Int64 | None = None
    """Shape (2, n): batch rows whose token the step in flight samples, and the indices of these tokens among its
    samples.

    None if no row awaits a token. `input_ids` are 0 in these rows.
    """
    state_slots: Int64 | None = None
    """Shape (S,): state slot of each sequence; None for models without recurrent layers."""

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def is_drafted(self) -> bool:
        """Whether the step consists of decodes, at least one of them with drafts. A token is then sampled in every
        row."""
        return self.num_single_token < self.num_tokens == len(self.sample_rows)


class TableRows:
    """Tables of the block ids of recently scheduled requests: one row per request in each KV group."""

    def __init__(self, num_rows: int, max_blocks: int, num_groups: int = 1) -> None:
        self.table: Int32 = np.zeros((num_groups, num_rows, max_blocks), np.int32)
        self._rows: dict[int, int] = {}
        self._written_ids: list[list[list[int]]] = [_empty_rows(num_groups) for _ in range(num_rows)]
        self._free = list(range(num_rows - 1, -1, -1))

    def rows_of(self, requests: list[Request]) -> Int64:
        """Update the table row of each request and return the row indices."""
        self._free_idle_rows(requests)
        return np.fromiter((self._update(request) for request in requests), np.int64, len(requests))

    def _update(self, request: Request) -> int:
        row = self._rows.get(request.number)
        if row is None:
            row = self._rows[request.number] = self._free.pop()
        for group, (written, table) in enumerate(zip(self._written_ids[row], request.block_tables, strict=True)):
            num_null = request.num_null_blocks[group]
            # elements are the same objects, so comparing 1,000 ids takes microseconds; freed blocks are not read
            if written != table if not num_null else written[num_null:] != table[num_null:]:
                self._write(group, row, written, table, num_null)
        return row

    def _write(self, group: int, row: int, written: list[int], table: list[int], num_null: int) -> None:
        """Append new block ids to a table row. Rewrite the row if the ids written before are not a prefix of the
        request's block table.
        """
        num_kept = len(written)
        if written[num_null:] != table[num_null:num_kept]:
            num_kept = min(num_null, num_kept)
            del written[num_kept:]
        if len(table) > self.table.shape[2]:
            self._widen(len(table))
        self.table[group, row, num_kept : len(table)] = table[num_kept:]
        written += table[num_kept:]

    def _free_idle_rows(self, requests: list[Request]) -> None:
        """If too few table rows are free, release those of requests that do not run in this step."""
        missing = sum(request.number not in self._rows for request in requests)
        if missing <= len(self._free):
            return
        running = {request.number for request in requests}
        for number in [number for number in self._rows if number not in running]:
            row = self._rows.pop(number)
            self._written_ids[row] = _empty_rows(len(self.table))
            self._free.append(row)
        self._add_rows(missing - len(self._free))

    def _add_rows(self, count: int) -> None:
        if count <= 0:
            return
        num_groups, start, width = self.table.shape
        self.table = np.concatenate((self.table, np.zeros((num_groups, count, width), np.int32)), axis=1)
        self._written_ids += [_empty_rows(num_groups) for _ in range(count)]
        self._free += range(start, start + count)

    def _widen(self, width: int) -> None:
        num_groups, num_rows, old_width = self.table.shape
        wider = np.zeros((num_groups, num_rows, max(width, 2 * old_width)), np.int32)
        wider[:, :, :old_width] = self.table
        self.table = wider


def _empty_rows(num_groups: int) -> list[list[int]]:
    return [[] for _ in range(num_groups)]


def build_inputs(
    plan: StepPlan, rows: TableRows, block_size: int, in_flight: Mapping[int, int] | None = None
) -> StepInputs:
    """Return the arrays of one step.

    `in_flight`: sample row of each token that the previous step is still sampling, by request number.
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
    is_sampling = np.fromiter((item.samples for item in scheduled), np.bool_, len(scheduled))
    awaited: list[tuple[int, int]] = []
    return StepInputs(
        input_ids=_token_ids(scheduled, plan.num_single_token, int(ends[-1]), in_flight or {}, awaited),
        positions=positions,
        slot_mapping=_slots(rows.table, row_of_token, positions, block_size),
        block_tables=rows.table[:, :, : -(-int(seq_lens.max()) // block_size)].take(row_of_sequence, axis=1),
        seq_lens=seq_lens.astype(np.int32),
        query_start=query_start.astype(np.int32),
        num_single_token=plan.num_single_token,
        sample_rows=_sample_rows(scheduled, ends, is_sampling),
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
    """Return the token ids of all batch rows. Appends (row, sample row) to `awaited` for each row whose token is still
    in flight.
    """
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


def sampled_positions(scheduled: Sequence[Scheduled]) -> tuple[list[Request], list[int]]:
    """Return, for each sampled row, its request and the number of output tokens before the sampled token."""
    requests: list[Request] = []
    num_output_tokens: list[int] = []
    for item in scheduled:
        if item.samples:
            last = item.start + item.num_tokens - item.request.num_prompt_tokens
            requests += [item.request] * (1 + len(item.drafts))
            num_output_tokens += range(last - len(item.drafts), last + 1)
    return requests, num_output_tokens


def _sample_rows(scheduled: Sequence[Scheduled], ends: Int64, is_sampling: NDArray[np.bool_]) -> Int64:
    """Return the batch rows of the last known token and of the drafts after it, for all requests that sample."""
    last_rows = ends[is_sampling] - 1
    counts = np.fromiter((1 + len(item.drafts) for item in scheduled if item.samples), np.int64, len(last_rows))
    if not len(last_rows) or counts.max() == 1:
        return last_rows
    first_rows = np.repeat(last_rows - (counts - 1), counts)
    offsets = np.arange(len(first_rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    return first_rows + offsets


def _slots(table: Int32, row_of_token: Int64, positions: Int64, block_size: int) -> Int64:
    blocks, offsets = np.divmod(positions, block_size)
    block_ids = np.stack([group_table[row_of_token, blocks] for group_table in table])  # one contiguous row per group
    return block_ids.astype(np.int64) * block_size + offsets
