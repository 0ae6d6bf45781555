"""The running requests of the synthetic engine as columns: one slot a request, dense, in no order.

A step changes all of them at once; Python touches only those that need a block or end. Knows no blocks but
the ids in its tables.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.messages.telemetry import RequestInfo, RequestRows

Column = npt.NDArray[np.int64]
_NAMES = ("number", "computed", "cached", "output", "left", "preemptions", "table_start", "last", "filled")


@dataclass(slots=True)
class SyntheticRequest:
    """A request outside its slot: waiting, preempted, or on its way out."""

    info: RequestInfo
    output: int = 0
    left: int = 0
    """Tokens it will still generate."""
    cached: int = 0
    preemptions: int = 0
    computed: int = 0
    table: list[int] = field(default_factory=list)
    watched: bool = False
    """Somebody wants to hear of each token."""

    def row(self, state: RequestState, table_start: int = 0, table: list[int] | None = None) -> RequestRows:
        """Its change on the wire: from `table_start` on the table is `table`."""
        blocks = table or []
        one = np.array([self.info.number, self.computed, self.cached, self.output, self.preemptions])
        number, computed, cached, output, preemptions = one.reshape(5, 1)
        return request_rows(
            number,
            state,
            computed,
            cached,
            output,
            preemptions,
            table_start=np.array([table_start]),
            table_count=np.array([len(blocks)]),
            table_blocks=np.array(blocks, np.int64),
        )


class Slots:
    """Up to `capacity` running requests. Attributes are columns, shape `(len(self),)`, views to write to."""

    number: Column
    computed: Column
    cached: Column
    output: Column
    left: Column
    preemptions: Column
    table_start: Column
    """Length of the block table before this step."""
    last: Column
    """The block that the next token goes to."""
    filled: Column
    """Slots of it that hold a token."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.requests: list[SyntheticRequest] = []
        self._data = np.zeros((len(_NAMES), capacity), np.int64)
        self._expose()

    def __len__(self) -> int:
        return len(self.requests)

    def add(self, request: SyntheticRequest, filled: int) -> None:
        """Put a request with a table in a slot; `filled` slots of its last block hold tokens."""
        self.requests.append(request)
        self._expose()
        values = (request.info.number, request.computed, request.cached, request.output, request.left)
        rest = (request.preemptions, len(request.table), request.table[-1], filled)
        self._data[:, len(self) - 1] = (*values, *rest)

    def remove(self, slot: int) -> SyntheticRequest:
        """Take a request out, brought up to date; the last slot moves into its place."""
        request = self.requests[slot]
        request.computed, request.output = int(self.computed[slot]), int(self.output[slot])
        request.left = int(self.left[slot])
        self._data[:, slot] = self._data[:, len(self) - 1]
        self.requests[slot] = self.requests[-1]
        self.requests.pop()
        self._expose()
        return request

    def rows(self, counts: Column, blocks: Column) -> RequestRows:
        """All slots on the wire; `counts` new blocks each, concatenated in `blocks`."""
        return request_rows(
            self.number,
            RequestState.RUNNING,
            self.computed,
            self.cached,
            self.output,
            self.preemptions,
            self.table_start,
            counts,
            blocks,
        )

    def _expose(self) -> None:
        for index, name in enumerate(_NAMES):
            setattr(self, name, self._data[index, : len(self)])


def request_rows(
    number: Column,
    state: RequestState,
    computed: Column,
    cached: Column,
    output: Column,
    preemptions: Column,
    table_start: Column,
    table_count: Column,
    table_blocks: Column,
) -> RequestRows:
    """Columns of requests in one state, packed."""
    return RequestRows(
        number=number.astype("<u4").tobytes(),
        state=bytes([state]) * len(number),
        num_computed_tokens=computed.astype("<u4").tobytes(),
        num_cached_tokens=cached.astype("<u4").tobytes(),
        num_output_tokens=output.astype("<u4").tobytes(),
        num_preemptions=preemptions.astype("<u2").tobytes(),
        table_start=table_start.astype("<u4").tobytes(),
        table_count=table_count.astype("<u4").tobytes(),
        table_blocks=table_blocks.astype("<u4").tobytes(),
    )
