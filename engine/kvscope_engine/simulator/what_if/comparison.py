"""Simulates each candidate allocator with the memory and requests of one engine (`Shadow`), and combines the
results into one answer.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvscope_engine.simulator.what_if.candidates import VIRTUAL, Candidate, candidates, unanswerable_questions
from kvscope_engine.simulator.what_if.shadow import Shadow
from kvscope_engine.simulator.what_if.slot_map import map_cells, slots_per_cell
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.what_if import MAX_SLOTS, Memory, PolicyUse, Running, WhatIfAnswer


class PolicyComparison:
    """Compares several allocators for the memory of one engine. Raises BadInput for a memory that is too large
    to compare.
    """

    def __init__(self, memory: Memory) -> None:
        if memory.num_slots > MAX_SLOTS:
            raise BadInput(f"a memory of {memory.num_slots} slots is too large to compare: at most {MAX_SLOTS}")
        self._memory = memory
        self._not_asked = unanswerable_questions(memory)
        self._shadows = [(candidate, self._shadow(candidate)) for candidate in candidates(memory)]

    @property
    def shadows(self) -> list[Shadow]:
        return [shadow for _, shadow in self._shadows if isinstance(shadow, Shadow)]

    def update(self, running_requests: Sequence[Running]) -> WhatIfAnswer:
        """Return how each allocator places `running_requests`, which must be ordered by number and distinct."""
        for shadow in self.shadows:
            shadow.update(running_requests)
        return WhatIfAnswer(
            policies=[self._policy_use(candidate, shadow) for candidate, shadow in self._shadows],
            page_bytes=self._memory.page_bytes,
            not_asked=self._not_asked,
        )

    def _shadow(self, candidate: Candidate) -> Shadow | str:
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
                question=candidate.scenario,
                num_slots=self._memory.num_slots,
                refused=shadow,
            )
        return self._use(candidate, shadow)

    def _use(self, candidate: Candidate, shadow: Shadow) -> PolicyUse:
        use, slot_bytes = shadow.use(), candidate.pools[0].slot_bytes
        wasted = use.num_unread + use.num_reserved + use.num_internal + use.num_rounding
        return PolicyUse(
            allocator=candidate.allocator,
            block_size=candidate.block_size,
            is_current=self._is_current(candidate),
            question=candidate.scenario,
            num_slots=use.num_slots,
            slot_bytes=slot_bytes,
            num_used=use.num_used,
            num_unread=use.num_unread,
            num_reserved=use.num_reserved,
            num_internal=use.num_internal,
            num_rounding=use.num_rounding,
            num_external=use.num_external,
            num_outside=use.num_outside,
            external_fragmentation=use.external_fragmentation,
            wasted_bytes=round(wasted * slot_bytes),
            wasted_share=wasted / (use.num_used + wasted) if wasted else 0.0,
            num_placed=shadow.num_placed,
            num_waiting=shadow.num_waiting,
            num_fitting=use.num_fitting,
            num_preempted=shadow.num_preempted,
            cells=map_cells(use.num_slots, shadow.spans()),
            slots_per_cell=slots_per_cell(use.num_slots),
        )

    def _is_current(self, candidate: Candidate) -> bool:
        own = self._memory
        is_same_size = candidate.block_size == own.block_size or candidate.allocator == VIRTUAL
        return candidate.allocator == own.allocator and is_same_size and not candidate.scenario
