"""Slots for the states of recurrent layers: each running request has one, and the others keep checkpoints of prefixes.

A state stands for all tokens before it and cannot be taken apart, so a cached prefix is of use only up to a place
where a state was kept: a *checkpoint*, found by the digest of the prefix's last block. It is copied to a request that
goes on from there. Owns who has which slot, which checkpoints there are, and the order in which they are evicted (the
least recently used first). Knows no tensors: copies are asked for in the step's plan.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from kvscope_engine.policy.plan import Scheduled, StateSave
from kvscope_engine.policy.request import Request


class StatePool:
    """`num_slots` slots. With `keeps` states are kept at block boundaries, for prefixes to be found again:

    - before the last block of a prompt that is full and is not its end, where the same prompt and the next turn of a
      conversation go on;
    - where the text of a prompt parted from one that was seen before, since a third is likely to part there, too;
    - every `interval` tokens, rounded up to whole blocks.

    Each costs a copy of one state, and its slot until it is evicted.
    """

    def __init__(self, num_slots: int, block_size: int, interval: int, *, keeps: bool) -> None:
        self.num_slots = num_slots
        self.block_size = block_size
        self.interval = -(-interval // block_size) * block_size
        self._keeps = keeps
        self._free = list(range(num_slots - 1, -1, -1))
        self._checkpoints: OrderedDict[bytes, int] = OrderedDict()
        self._copies: list[tuple[Request, int, int]] = []
        self._waiting: set[int] = set()
        """Slots that nobody has and that are still to be copied from."""
        self._saving: dict[int, StateSave] = {}
        self.num_kept = 0
        self.num_restored = 0
        self.num_evicted = 0
        """Of checkpoints, since the start."""

    @property
    def num_checkpoints(self) -> int:
        """Prefixes whose state is kept."""
        return len(self._checkpoints)

    @property
    def num_free(self) -> int:
        """Slots that hold nothing of use."""
        return len(self._free)

    @property
    def num_available(self) -> int:
        """Slots that a request could be given now."""
        return len(self._free) + sum(slot not in self._sources for slot in self._checkpoints.values())

    def checkpoints(self, digests: Sequence[bytes]) -> Iterator[int]:
        """How many of the first blocks of a text can be gone on from, most first."""
        return (count for count in range(len(digests), 0, -1) if digests[count - 1] in self._checkpoints)

    def begin(self, request: Request, digest: bytes | None) -> None:
        """A slot for a request that starts to run: from nothing, or from the checkpoint of `digest`.

        There must be one (`num_available`); the checkpoint itself becomes the request's where there is no other.
        """
        assert request.state_slot < 0, f"request {request.number} has a state"
        if digest is None:
            request.state_slot = self._take()
            return
        source = self._checkpoints[digest]
        self._checkpoints.move_to_end(digest)
        self.num_restored += 1
        if not self._free and self.num_available == 1 and source not in self._sources:
            del self._checkpoints[digest]
            request.state_slot = source
            return
        self._copies.append((request, source, -1))
        request.state_slot = self._take()
        self._copies[-1] = (request, source, request.state_slot)

    def fork(self, parent: Request, child: Request) -> None:
        """The child goes on from where the parent is."""
        assert child.state_slot < 0, f"request {child.number} has a state"
        self._copies.append((child, parent.state_slot, -1))
        child.state_slot = self._take()
        self._copies[-1] = (child, parent.state_slot, child.state_slot)

    def release(self, request: Request) -> None:
        """Its state is of no use any more."""
        if request.state_slot < 0:
            return
        self._copies = [copy for copy in self._copies if copy[0] is not request]
        self._give_back(request.state_slot)
        request.state_slot = -1
        for slot in self._waiting - self._sources:
            self._waiting.remove(slot)
            self._free.append(slot)

    def plan(self, scheduled: Iterable[Scheduled]) -> tuple[tuple[tuple[int, int], ...], tuple[StateSave, ...]]:
        """Of the step that is being planned: copies (from, to) before it, and states to be kept amid it."""
        copies = tuple((source, target) for _, source, target in self._copies)
        sources = self._sources
        saves = tuple(self._saves(scheduled, sources)) if self._keeps else ()
        self._copies.clear()
        self._free += self._waiting
        self._waiting.clear()
        return copies, saves

    def commit(self, saves: Iterable[StateSave]) -> None:
        """The step was run, and its blocks are sealed: what it kept can be found from now on."""
        for save in saves:
            digest = self._digest(save.request, save.num_tokens)
            del self._saving[save.slot]
            if digest is None or digest in self._checkpoints:
                self._free.append(save.slot)
            else:
                self._checkpoints[digest] = save.slot
                self.num_kept += 1

    def drop_uncommitted(self) -> None:
        """Whatever was to be kept by a step that never came back."""
        self._free += self._saving
        self._saving.clear()

    def reset(self) -> int:
        """Forget all checkpoints; returns how many there were."""
        kept = {digest: slot for digest, slot in self._checkpoints.items() if slot in self._sources}
        count = len(self._checkpoints) - len(kept)
        self._free += [slot for digest, slot in self._checkpoints.items() if digest not in kept]
        self._checkpoints = OrderedDict(kept)
        return count

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Raise AssertionError unless each slot is exactly one of: free, a request's, a checkpoint, waiting, saving."""
        running = [request for request in requests if request.state_slot >= 0]
        held = [request.state_slot for request in running]
        slots = [*self._free, *held, *self._checkpoints.values(), *self._waiting, *self._saving]
        assert sorted(slots) == list(range(self.num_slots)), f"slots of states do not add up: {sorted(slots)}"
        for request, _, target in self._copies:
            assert request.state_slot == target, f"a state is copied to {target} for request {request.number}"

    @property
    def _sources(self) -> set[int]:
        return {source for _, source, _ in self._copies}

    def _saves(self, scheduled: Iterable[Scheduled], sources: set[int]) -> Iterator[StateSave]:
        places = [(item.request, place) for item in scheduled for place in self._places(item)]
        for request, place in places:
            is_known = self._digest(request, place) in self._checkpoints
            if is_known or not (self._free or self._evictable(sources)):
                continue
            save = StateSave(request, place, self._take(of_last=True))
            self._saving[save.slot] = save
            yield save

    def _places(self, item: Scheduled) -> list[int]:
        """Tokens after which the state is kept, those of most use first."""
        request, size, start = item.request, self.block_size, item.start
        end = start + item.num_tokens
        turn = (request.num_prompt_tokens - 1) // size * size
        every = range(start // self.interval * self.interval + self.interval, end + 1, self.interval)
        wanted = dict.fromkeys((turn, request.parted_at, *reversed(every)))
        return [place for place in wanted if start < place <= end and place % size == 0]

    def _digest(self, request: Request, place: int) -> bytes | None:
        number = place // self.block_size - 1
        return request.block_digests[number] if number < len(request.block_digests) else None

    def _evictable(self, sources: set[int]) -> bool:
        return any(slot not in sources for slot in self._checkpoints.values())

    def _take(self, *, of_last: bool = False) -> int:
        """The first that is free, or the last: those who run lie side by side, apart from checkpoints, as far as can
        be, and decode in place then."""
        if self._free:
            slot = max(self._free) if of_last else min(self._free)
            self._free.remove(slot)
            return slot
        sources = self._sources
        digest = next(digest for digest, slot in self._checkpoints.items() if slot not in sources)
        self.num_evicted += 1
        return self._checkpoints.pop(digest)

    def _give_back(self, slot: int) -> None:
        if slot in self._sources:
            self._waiting.add(slot)
        else:
            self._free.append(slot)
