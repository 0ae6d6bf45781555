"""As much of vLLM's V1 scheduler as its hooks see: the same names, arguments and order of calls, and a greedy policy.

Whole engines are compared in `tests/engines`; this is for machines without vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

SIZE = 4


class Status(IntEnum):
    WAITING = 1
    RUNNING = 2
    PREEMPTED = 3
    FINISHED_STOPPED = 4
    FINISHED_LENGTH_CAPPED = 5
    FINISHED_ABORTED = 6
    WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR = 7
    WAITING_FOR_REMOTE_KVS = 8


@dataclass(eq=False)
class Block:
    block_id: int
    ref_cnt: int = 0
    _block_hash: bytes | None = None
    is_null: bool = False

    @property
    def block_hash(self) -> bytes | None:
        return self._block_hash


@dataclass(eq=False)
class Request:
    request_id: str
    all_token_ids: list[int]
    max_tokens: int = 5
    priority: int = 0
    arrival_time: float = 0.0
    status: Status = Status.WAITING
    num_computed_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    block_hashes: list[bytes] = field(default_factory=list)
    drop_stale_output: bool = False
    cache_salt: str | None = None
    lora_request: Any = None
    mm_features: Sequence[Any] = ()
    num_loaded: int = 0

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.all_token_ids)
        self.hash_full_blocks()

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    def hash_full_blocks(self) -> None:
        for end in range(SIZE * (len(self.block_hashes) + 1), self.num_tokens + 1, SIZE):
            text = ",".join(map(str, [*self.all_token_ids[:end], self.cache_salt, self.lora_request]))
            self.block_hashes.append(hash_of(text))


def hash_of(text: str) -> bytes:
    import hashlib

    return hashlib.sha256(text.encode()).digest()


class FreeQueue(list[Block]):
    """In the order in which they are given out."""

    def append_n(self, blocks: list[Block]) -> None:
        self += blocks

    def prepend_n(self, blocks: list[Block]) -> None:
        self[:0] = blocks


class Waiting(list[Request]):
    def peek_request(self) -> Request:
        return self[0]


class Pool:
    hash_block_size = SIZE

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [Block(number) for number in range(num_blocks)]
        self.blocks[0].is_null = True
        self.free_block_queue = FreeQueue(self.blocks[1:])
        self.cached: dict[bytes, Block] = {}

    def get_num_free_blocks(self) -> int:
        return len(self.free_block_queue)

    def get_new_blocks(self, num_blocks: int) -> list[Block]:
        taken = self.free_block_queue[:num_blocks]
        del self.free_block_queue[:num_blocks]
        for block in taken:
            self._forget(block)
            block.ref_cnt += 1
        return taken

    def touch(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            if not block.ref_cnt:
                self.free_block_queue.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Iterable[Block]) -> None:
        free: dict[bool, list[Block]] = {True: [], False: []}
        for block in ordered_blocks:
            block.ref_cnt -= 1
            if not block.ref_cnt:
                free[block.block_hash is not None].append(block)
        self.free_block_queue.prepend_n(free[False])
        self.free_block_queue.append_n(free[True])

    def cache_full_blocks(
        self,
        request: Request,
        blocks: list[Block],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
    ) -> None:
        for place in range(num_cached_blocks, num_full_blocks):
            key = request.block_hashes[place] + kv_cache_group_id.to_bytes(4, "big")
            if key not in self.cached:
                blocks[place]._block_hash = key
                self.cached[key] = blocks[place]

    def evict_blocks(self, block_ids: set[int]) -> None:
        for block in block_ids:
            self._forget(self.blocks[block])

    def reset_prefix_cache(self) -> bool:
        if len(self.free_block_queue) < len(self.blocks) - 1:
            return False
        for block in self.blocks:
            self._forget(block)
        return True

    def _forget(self, block: Block) -> None:
        if block._block_hash is not None:
            del self.cached[block._block_hash]
            block._block_hash = None


class OffloadingManager:
    """Of places in host memory, each for `blocks_per_slot` blocks; the oldest that nobody reads make way."""

    def __init__(self, num_slots: int) -> None:
        self._num_chunks = num_slots
        self.places: dict[bytes, int] = {}
        self.refs: dict[bytes, int] = {}
        """-1: it is being written."""

    def prepare_store(self, keys: Iterable[bytes], req_context: Any) -> Any:
        fresh = [key for key in keys if key not in self.places]
        free = [place for place in range(self._num_chunks) if place not in self.places.values()]
        idle = [key for key in self.places if not self.refs[key]]
        evicted = idle[: max(0, len(fresh) - len(free))]
        if len(free) + len(evicted) < len(fresh):
            return None
        free += [self.places.pop(key) for key in evicted]
        for key, place in zip(fresh, free, strict=False):
            self.places[key], self.refs[key] = place, -1
        spec = SimpleNamespace(block_ids=[self.places[key] for key in fresh])
        return SimpleNamespace(keys_to_store=fresh, store_spec=spec, evicted_keys=evicted)

    def complete_store(self, keys: Iterable[bytes], req_context: Any, success: bool = True) -> None:
        for key in keys:
            self.refs[key] = 0
            if not success:
                del self.places[key]

    def prepare_load(self, keys: Sequence[bytes], req_context: Any) -> Any:
        for key in keys:
            self.refs[key] += 1
        return SimpleNamespace(block_ids=[self.places[key] for key in keys])

    def complete_load(self, keys: Sequence[bytes], req_context: Any) -> None:
        for key in keys:
            self.refs[key] -= 1

    def reset_cache(self) -> None:
        self.places.clear()


class OffloadingConnector:
    def __init__(self, num_slots: int, blocks_per_slot: int) -> None:
        config = SimpleNamespace(blocks_per_chunk=blocks_per_slot)
        self.connector_scheduler = SimpleNamespace(manager=OffloadingManager(num_slots), config=config)

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        """Tests load by hand."""


class Connector:
    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        """There is nothing behind it."""


class Manager:
    def __init__(self) -> None:
        self.req_to_blocks: dict[str, list[Block]] = {}
        self.kv_cache_spec = type("FullAttentionSpec", (), {})()


class Scheduler:
    """First come, first served; the newest is preempted."""

    def __init__(
        self,
        num_blocks: int = 16,
        budget: int = 12,
        max_running: int = 100,
        num_slots: int = 0,
        blocks_per_slot: int = 1,
    ) -> None:
        self.pool, self.manager, self.budget, self.max_running = Pool(num_blocks), Manager(), budget, max_running
        self.connector = OffloadingConnector(num_slots, blocks_per_slot) if num_slots else Connector()
        self.skipped_waiting: list[Request] = []
        self.kv_cache_manager = SimpleNamespace(
            block_pool=self.pool, coordinator=SimpleNamespace(single_type_managers=[self.manager])
        )
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self.waiting = Waiting()
        self.policy = SimpleNamespace(value="fcfs")
        self.pause_state: Any = None

    def get_request_counts(self) -> tuple[int, int]:
        return len(self.running), len(self.waiting)

    def add_request(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def set_pause_state(self, state: Any) -> None:
        self.pause_state = state

    def schedule(self) -> Any:
        scheduled: dict[str, int] = {}
        new_blocks: dict[str, list[Block]] = {}
        began: list[Request] = []
        left, preempted = self.budget, False
        for request in list(self.running):
            if request in self.running and left:
                count = min(request.num_tokens - request.num_computed_tokens, left)
                while (blocks := self._allocate(request, count)) is None:
                    victim = self.running.pop()
                    self._preempt_request(victim, 0.0)
                    preempted = True
                    scheduled.pop(victim.request_id, None)
                    if victim is request:
                        break
                if blocks is not None:
                    scheduled[request.request_id], new_blocks[request.request_id] = count, blocks
                    left -= count
        while self.waiting and left and not preempted and len(self.running) < self.max_running:
            request = self.waiting[0]
            hits = self._hits(request) if not request.num_loaded else []
            count = min(request.num_tokens - SIZE * len(hits), left)
            if len(hits) + -(-count // SIZE) > self.pool.get_num_free_blocks():
                break
            self.waiting.pop(0)
            self.pool.touch(hits)
            if not request.num_loaded:
                self.manager.req_to_blocks[request.request_id] = list(hits)
            request.num_computed_tokens = request.num_loaded or SIZE * len(hits)
            count = min(request.num_tokens - request.num_computed_tokens, left)
            assert self._allocate(request, count) is not None
            self.running.append(request)
            began.append(request)
            scheduled[request.request_id] = count
            left -= count
        output = self._output(scheduled, new_blocks, began)
        for request in self.running:
            request.num_computed_tokens += scheduled.get(request.request_id, 0)
            request.status = Status.RUNNING
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> None:
        for request_id in scheduler_output.num_scheduled_tokens:
            request = self.requests.get(request_id)
            if request is None or request.num_computed_tokens < request.num_tokens:
                continue
            request.all_token_ids.append(7 * request.num_tokens % 50)
            request.num_output_tokens += 1
            request.hash_full_blocks()
            if request.num_output_tokens >= request.max_tokens:
                request.status = Status.FINISHED_LENGTH_CAPPED
                self.running.remove(request)
                self._free_request(request)

    def finish_requests(self, request_ids: str, finished_status: Status) -> list[Request]:
        request = self.requests.get(request_ids)
        if request is None:
            return []
        (self.running if request in self.running else self.waiting).remove(request)
        request.status = finished_status
        self._free_request(request)
        return [request]

    def start_loading(self, request: Request, num_tokens: int) -> None:
        """Of whole blocks, into new ones."""
        self.waiting.remove(request)
        table = self.pool.get_new_blocks(num_tokens // SIZE)
        self.manager.req_to_blocks[request.request_id] = table
        ids = ([block.block_id for block in table],)
        self.connector.update_state_after_alloc(request, SimpleNamespace(get_block_ids=lambda: ids), num_tokens)
        request.status, request.num_loaded = Status.WAITING_FOR_REMOTE_KVS, num_tokens
        self.skipped_waiting.append(request)

    def end_loading(self, request: Request) -> None:
        self.skipped_waiting.remove(request)
        request.status = Status.WAITING
        self.waiting.append(request)

    def reset_prefix_cache(self) -> bool:
        return self.pool.reset_prefix_cache()

    def _preempt_request(self, request: Request, timestamp: float, drop_stale_output: bool = False) -> None:
        self._release(request)
        request.status, request.num_computed_tokens = Status.PREEMPTED, 0
        request.num_preemptions += 1
        self.waiting.insert(0, request)

    def _free_request(self, request: Request) -> None:
        self._release(request)
        del self.requests[request.request_id]

    def _release(self, request: Request) -> None:
        self.pool.free_blocks(reversed(self.manager.req_to_blocks.pop(request.request_id, [])))

    def _hits(self, request: Request) -> list[Block]:
        found: list[Block] = []
        for value in request.block_hashes[: (request.num_tokens - 1) // SIZE]:
            block = self.pool.cached.get(value + bytes(4))
            if block is None:
                break
            found.append(block)
        return found

    def _allocate(self, request: Request, count: int) -> list[Block] | None:
        table = self.manager.req_to_blocks.setdefault(request.request_id, [])
        end = request.num_computed_tokens + count
        needed = -(-end // SIZE) - len(table)
        if needed > self.pool.get_num_free_blocks():
            return None
        blocks = self.pool.get_new_blocks(needed) if needed > 0 else []
        table += blocks
        self.pool.cache_full_blocks(
            request=request,
            blocks=table,
            num_cached_blocks=request.num_computed_tokens // SIZE,
            num_full_blocks=end // SIZE,
            block_size=SIZE,
            kv_cache_group_id=0,
        )
        return blocks

    def _output(self, scheduled: dict[str, int], new_blocks: dict[str, list[Block]], began: list[Request]) -> Any:
        def ids(request: Request) -> tuple[list[int], ...]:
            return ([block.block_id for block in self.manager.req_to_blocks[request.request_id]],)

        fresh = [request for request in began if not request.num_preemptions]
        resumed = [request for request in began if request.num_preemptions]
        going_on = [self.requests[each] for each in new_blocks if each in scheduled]
        blocks = [([block.block_id for block in new_blocks[each.request_id]],) for each in going_on]
        return SimpleNamespace(
            num_scheduled_tokens=scheduled,
            scheduled_spec_decode_tokens={},
            scheduled_new_reqs=[
                SimpleNamespace(
                    req_id=each.request_id, block_ids=ids(each), num_computed_tokens=each.num_computed_tokens
                )
                for each in fresh
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[each.request_id for each in (*going_on, *resumed)],
                resumed_req_ids={each.request_id for each in resumed},
                new_block_ids=[*blocks, *map(ids, resumed)],
                num_computed_tokens=[each.num_computed_tokens for each in (*going_on, *resumed)],
            ),
        )
