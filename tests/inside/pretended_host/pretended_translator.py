"""The translator of the pretended engine: its jobs and blocks become the facts of kvscope."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from tests.inside.pretended_host.pretended_recorder import PretendedRecord

from kvscope_inside.host_request import HostRequest
from kvscope_inside.translator import MissedBlock, StepCounts, Translator
from kvscope_telemetry.messages.telemetry import EventData
from kvscope_telemetry.producer.cache_state import CacheState


class PretendedTranslator(Translator[HostRequest]):
    def __init__(self, state: CacheState) -> None:
        super().__init__(state)
        self.handlers = {
            "submitted": self._submitted,
            "found": self._found,
            "started": self._started,
            "allocated": self._allocated,
            "evicted": self._evicted,
            "cached": self._cached,
            "preempted": self._preempted,
            "ended": self._ended,
        }
        self._evicted_for = 0

    def convert(self, record: PretendedRecord) -> StepCounts:
        self._evicted_for = 0
        self.dispatch(record.events)
        self.update_progress((self.requests[name], done, answered) for name, done, answered in record.running)
        indices, users, digests = zip(*record.blocks, strict=True) if record.blocks else ((), (), ())
        self.blocks.set_ref_counts(np.array(indices, np.uint32), users, list(map(_hash, digests)))
        self.blocks.mark_used()
        if evicted := len(self.step.evicted):
            self.events.report("evicted", other=self._evicted_for, num_blocks=evicted, data=EventData(kind="evicted"))
        batch = {self.requests[name].known.number: n for name, n in record.ran.items() if name in self.requests}
        return StepCounts(len(record.running), record.num_waiting, batch)

    def request_tokens(self, request: HostRequest, start: int, end: int) -> Sequence[int]:
        tokens: list[int] = request.host.text[start:end]
        return tokens

    def missed_block(self, request: HostRequest, token: int) -> MissedBlock | None:
        index = token // self.block_size
        parent = _hash(request.host.digest(index - 1)) if index else 0
        return MissedBlock((_hash(request.host.digest(index)),), parent)

    def _submitted(self, job: Any) -> None:
        arrival_ns = self.arrival_ns(0.0)
        known = self.state.add_request(
            job.name, num_prompt_tokens=len(job.prompt), arrival_ns=arrival_ns, max_tokens=job.max_tokens
        )
        self.requests[job.name] = HostRequest(job, known, arrival_ns)

    def _found(self, job: Any, blocks: list[int]) -> None:
        self.blocks.record_hits(blocks)
        self.blocks.set_table(self.requests[job.name], blocks)

    def _started(self, job: Any, num_found: int) -> None:
        self.start_request(
            self.requests[job.name],
            time_ns=self.step.time_ns,
            num_cached_tokens=num_found * self.block_size,
            num_blocks=-(-len(job.text) // self.block_size),
            num_pool_blocks=num_found,
        )

    def _allocated(self, job: Any, start: int, blocks: list[int]) -> None:
        self.blocks.allocate(self.requests[job.name], blocks, start=start)

    def _evicted(self, block: int, job: Any) -> None:
        self.blocks.evict([block])
        self._evicted_for = self._evicted_for or self.requests[job.name].known.number

    def _cached(self, job: Any, index: int, block: int, digests: list[bytes]) -> None:
        request, size = self.requests[job.name], self.block_size
        parent = _hash(digests[0]) if index else 0
        self.texts.set(block, self.text_of(request, index * size, size), is_first=not index)
        self.blocks.cache(block, hash_value=_hash(digests[-1]), parent=parent, filled=size)

    def _preempted(self, job: Any, needy: Any, num_tokens: int, num_free: int) -> None:
        request = self.requests[job.name]
        num_blocks = self.blocks.release_tables(request)
        self.preempt_request(request, self.step.time_ns)
        choice = "itself" if needy is job else "newest"
        self.events.report(
            "preempted",
            number=request.known.number,
            other=self.requests[needy.name].known.number,
            num_blocks=num_blocks,
            num_tokens=num_tokens,
            data=EventData(kind="preempted", num_available=num_free, choice=choice),
        )

    def _ended(self, job: Any, reason: str, num_done: int, num_outputs: int) -> None:
        request = self.requests.pop(job.name)
        self.update_progress([(request, num_done, num_outputs)])
        self.finish_request(request, reason, self.blocks.release_tables(request))


def _hash(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "little") | bool(digest)
