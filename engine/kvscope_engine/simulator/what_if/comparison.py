"""Runs all shadows of one engine, and makes their common answer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvscope_engine.simulator.what_if.candidates import VIRTUAL, Candidate, candidates
from kvscope_engine.simulator.what_if.shadow import Shadow
from kvscope_engine.simulator.what_if.slot_map import Spans, map_cells, slots_per_cell
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.what_if import MAX_SLOTS, MapKind, Memory, PolicyUse, Running, WhatIfAnswer


class Comparison:
    """One memory under several policies. Raises BadInput for a memory that is too large to be shadowed."""

    def __init__(self, memory: Memory) -> None:
        if memory.num_slots > MAX_SLOTS:
            raise BadInput(f"a memory of {memory.num_slots} slots is too large to compare: at most {MAX_SLOTS}")
        self._memory = memory
        self._slot_bytes = memory.block_bytes / memory.block_size
        self._shadows = [(candidate, self._shadow(candidate)) for candidate in candidates(memory)]

    @property
    def shadows(self) -> list[Shadow]:
        """Those of policies that can run in this memory."""
        return [shadow for _, shadow in self._shadows if isinstance(shadow, Shadow)]

    def follow(self, now: Sequence[Running]) -> WhatIfAnswer:
        """What each policy makes of `now`: requests in order of number, each once."""
        for shadow in self.shadows:
            shadow.follow(now)
        return WhatIfAnswer(
            policies=[self._policy_use(candidate, shadow) for candidate, shadow in self._shadows],
            slot_bytes=self._slot_bytes,
            slots_per_cell=slots_per_cell(self._memory.num_slots),
            page_bytes=self._memory.page_bytes,
        )

    def _shadow(self, candidate: Candidate) -> Shadow | str:
        """The shadow, or why there is none."""
        try:
            return Shadow(candidate, max_model_len=self._memory.max_model_len or self._memory.num_slots)
        except BadInput as refusal:
            return str(refusal)

    def _policy_use(self, candidate: Candidate, shadow: Shadow | str) -> PolicyUse:
        if isinstance(shadow, str):
            return PolicyUse(
                allocator=candidate.allocator,
                block_size=candidate.block_size,
                is_current=self._is_current(candidate),
                num_slots=self._memory.num_slots,
                refused=shadow,
            )
        return self._use(candidate, shadow)

    def _use(self, candidate: Candidate, shadow: Shadow) -> PolicyUse:
        use = shadow.use()
        wasted = use.num_reserved + use.num_internal + use.num_rounding
        return PolicyUse(
            allocator=candidate.allocator,
            block_size=candidate.block_size,
            is_current=self._is_current(candidate),
            num_slots=self._memory.num_slots,
            num_used=use.num_used,
            num_reserved=use.num_reserved,
            num_internal=use.num_internal,
            num_rounding=use.num_rounding,
            num_external=use.num_external,
            num_outside=self._memory.num_slots - use.num_slots,
            external_fragmentation=use.external_fragmentation,
            wasted_bytes=round(wasted * self._slot_bytes),
            wasted_share=wasted / (use.num_used + wasted) if wasted else 0.0,
            num_placed=shadow.num_placed,
            num_waiting=shadow.num_waiting,
            cells=self._cells(shadow, use.num_slots),
        )

    def _cells(self, shadow: Shadow, num_slots: int) -> bytes:
        """The map; what is left at the end of the memory goes with what rounding costs."""
        spans, whole = shadow.spans(), self._memory.num_slots
        if whole == num_slots:
            return map_cells(whole, spans)
        starts, lengths = spans.get(MapKind.ROUNDING, ((), ()))
        end = Spans(_longer(starts, num_slots), _longer(lengths, whole - num_slots))
        return map_cells(whole, spans | {MapKind.ROUNDING: end})

    def _is_current(self, candidate: Candidate) -> bool:
        own = self._memory
        is_same_size = candidate.block_size == own.block_size or candidate.allocator == VIRTUAL
        return candidate.allocator == own.allocator and is_same_size


def _longer(values: npt.ArrayLike, last: int) -> npt.NDArray[np.int64]:
    return np.append(np.asarray(values, np.int64), last)
