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

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.all_token_ids)
        self.hash_full_blocks()

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    def hash_full_blocks(self) -> None:
        for end in range(SIZE * (len(self.block_hashes) + 1), self.num_tokens + 1, SIZE):
            text = ",".join(map(str, self.all_token_ids[:end]))
            self.block_hashes.append(hash_of(text))


def hash_of(text: str) -> bytes:
    import hashlib

    return hashlib.sha256(text.encode()).digest()


class Pool:
    hash_block_size = SIZE

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [Block(number) for number in range(num_blocks)]
        self.blocks[0].is_null = True
        self.free = list(self.blocks[1:])
        self.cached: dict[bytes, Block] = {}

    def get_num_free_blocks(self) -> int:
        return len(self.free)

    def get_new_blocks(self, num_blocks: int) -> list[Block]:
        taken, self.free = self.free[:num_blocks], self.free[num_blocks:]
        for block in taken:
            self._forget(block)
            block.ref_cnt += 1
        return taken

    def touch(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            if not block.ref_cnt:
                self.free.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Iterable[Block]) -> None:
        for block in ordered_blocks:
            block.ref_cnt -= 1
            if not block.ref_cnt:
                self.free.append(block)

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
        if len(self.free) < len(self.blocks) - 1:
            return False
        for block in self.blocks:
            self._forget(block)
        return True

    def _forget(self, block: Block) -> None:
        if block._block_hash is not None:
            del self.cached[block._block_hash]
            block._block_hash = None


class Manager:
    def __init__(self) -> None:
        self.req_to_blocks: dict[str, list[Block]] = {}
        self.kv_cache_spec = type("FullAttentionSpec", (), {})()


class Scheduler:
    """First come, first served; the newest is preempted."""

    def __init__(self, num_blocks: int = 16, budget: int = 12) -> None:
        self.pool, self.manager, self.budget = Pool(num_blocks), Manager(), budget
        self.kv_cache_manager = SimpleNamespace(
            block_pool=self.pool, coordinator=SimpleNamespace(single_type_managers=[self.manager])
        )
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self.waiting: list[Request] = []
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
        while self.waiting and left and not preempted:
            request = self.waiting[0]
            hits = self._hits(request)
            count = min(request.num_tokens - SIZE * len(hits), left)
            if len(hits) + -(-count // SIZE) > self.pool.get_num_free_blocks():
                break
            self.waiting.pop(0)
            self.pool.touch(hits)
            self.manager.req_to_blocks[request.request_id] = list(hits)
            request.num_computed_tokens = SIZE * len(hits)
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
