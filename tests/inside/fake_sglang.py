"""The part of SGLang's scheduler that its hooks use: the same names, arguments and order of calls, with a simple
policy.

Whole engines are compared in `tests/engines`; this is for machines without SGLang. Tensors are numpy arrays.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt


class Tensor(np.ndarray):  # type: ignore[type-arg]
    """The part of torch's tensor that is used on a CPU."""

    device = "cpu"

    def numpy(self) -> npt.NDArray[np.int64]:
        return np.asarray(self)


def tensor(values: Any, dtype: Any = np.int64) -> Tensor:
    return np.asarray(values, dtype).view(Tensor)


class FINISH_LENGTH: ...


class FINISH_ABORT: ...


@dataclass
class KV:
    req_pool_idx: int | None = None
    cache_protected_len: int = 0
    kv_committed_len: int = 0
    kv_allocated_len: int = 0


@dataclass(eq=False)
class Request:
    rid: str
    prompt: Sequence[int]
    max_new_tokens: int = 5
    priority: int | None = None
    extra_key: str | None = None
    lora_id: str | None = None
    cache_salt: str | None = None
    multimodal_inputs: Any = None
    spec_verify_ct: int = 0
    spec_num_correct_drafts: int = 0
    kv: KV = field(default_factory=KV)
    output_ids: Any = field(default_factory=lambda: array("q"))
    finished_reason: Any = None
    to_finish: Any = None
    retraction_count: int = 0
    extend_len: int = 0
    lock: list[Node] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.origin_input_ids = array("q", self.prompt)
        self.sampling_params = SimpleNamespace(max_new_tokens=self.max_new_tokens)

    @property
    def tokens(self) -> list[int]:
        return [*self.origin_input_ids, *self.output_ids]


@dataclass(eq=False)
class Node:
    """A page of the tree."""

    key: tuple[int, ...]
    page: int
    used: int = 0
    lock_ref: int = 0


class Allocator:
    dtype = "bfloat16"

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.size, self.page_size, self.num_pages = num_pages * page_size, page_size, num_pages
        self.free_group: list[Any] | None = None
        self.clear()

    def clear(self) -> None:
        self.free_pages = tensor(np.arange(1, self.num_pages + 1))

    def available_size(self) -> int:
        return len(self.free_pages) * self.page_size

    def take(self, count: int) -> list[int]:
        taken, self.free_pages = self.free_pages[:count], self.free_pages[count:]
        assert len(taken) == count
        return taken.tolist()

    def give(self, pages: Sequence[int]) -> None:
        self.free_pages = np.concatenate((self.free_pages, tensor(pages))).view(Tensor)

    def get_kvcache(self) -> Any:
        return SimpleNamespace(get_kv_size_bytes=lambda: (self.size * 8, self.size * 8))


class Table:
    def __init__(self, num_rows: int, num_columns: int) -> None:
        self.req_to_token = tensor(np.zeros((num_rows + 1, num_columns)), np.int32)
        self.free_slots = list(range(1, num_rows + 1))

    def alloc(self, requests: list[Request]) -> list[int] | None:
        for request in requests:
            if request.kv.req_pool_idx is None:
                request.kv.req_pool_idx = self.free_slots.pop()
        return [request.kv.req_pool_idx for request in requests if request.kv.req_pool_idx is not None]

    def free(self, request: Request) -> None:
        assert request.kv.req_pool_idx is not None
        self.free_slots.append(request.kv.req_pool_idx)
        request.kv.req_pool_idx = None


class Tree:
    """A prefix tree by text, with a page each."""

    disable = False

    def __init__(self, allocator: Allocator) -> None:
        self.allocator, self.nodes, self.clock = allocator, dict[tuple[int, ...], Node](), 0

    def reset(self) -> None:
        self.nodes.clear()

    def match(self, tokens: Sequence[int]) -> list[Node]:
        size, found = self.allocator.page_size, []
        self.clock += 1
        for end in range(size, len(tokens) + 1, size):
            node = self.nodes.get(tuple(tokens[:end]))
            if node is None:
                break
            node.used = self.clock
            found.append(node)
        return found

    def insert(self, tokens: Sequence[int], pages: Sequence[int], protected: int) -> list[Node]:
        """Return its nodes; pages for which the tree has others are freed, from page `protected` on."""
        size, nodes, self.clock = self.allocator.page_size, [], self.clock + 1
        for place in range(len(tokens) // size):
            key = tuple(tokens[: (place + 1) * size])
            node = self.nodes.setdefault(key, Node(key, pages[place]))
            node.used = self.clock
            if node.page != pages[place] and place >= protected:
                self.allocator.give([pages[place]])
            nodes.append(node)
        return nodes

    def evict(self, num_tokens: int) -> Any:
        size, num_evicted = self.allocator.page_size, 0
        while num_evicted < num_tokens:
            inner = {key[:-size] for key in self.nodes}
            leaves = [node for key, node in self.nodes.items() if key not in inner and not node.lock_ref]
            if not leaves:
                break
            oldest = min(leaves, key=lambda node: node.used)
            del self.nodes[oldest.key]
            self.allocator.give([oldest.page])
            num_evicted += size
        return SimpleNamespace(num_tokens_evicted=num_evicted)


class Batch:
    """The requests to decode or extend next."""

    def __init__(self, scheduler: Scheduler | None = None, reqs: Sequence[Request] = ()) -> None:
        self.scheduler, self.reqs = scheduler, list(reqs)

    def prepare_for_extend(self) -> bool:
        assert self.scheduler is not None
        return self.scheduler.make_room(self.reqs[0].extend_len // self.scheduler.size)

    def prepare_for_decode(self) -> None: ...

    def check_decode_mem(self, selected_indices: Sequence[int] | None = None) -> bool:
        assert self.scheduler is not None
        chosen = self.reqs if selected_indices is None else [self.reqs[each] for each in selected_indices]
        return self.scheduler.make_room(sum(each.kv.kv_committed_len % self.scheduler.size == 0 for each in chosen))


class Mode:
    def __init__(self, is_prefill: bool) -> None:
        self.is_prefill = is_prefill

    def is_extend(self) -> bool:
        return self.is_prefill


class Scheduler:
    """First come, first served; prompts run in chunks; the request with the fewest output tokens is retracted."""

    device = "cpu"
    max_running_requests, max_prefill_tokens, chunked_prefill_size = 8, 64, 12

    def __init__(self, num_pages: int = 16, page_size: int = 4, num_rows: int = 8) -> None:
        self.token_to_kv_pool_allocator = Allocator(num_pages, page_size)
        self.req_to_token_pool = Table(num_rows, 256)
        self.tree_cache = Tree(self.token_to_kv_pool_allocator)
        self.waiting_queue: list[Request] = []
        self.running: list[Request] = []
        self.running_batch = Batch()
        weight = SimpleNamespace(nbytes=1000, data_ptr=lambda: 1)  # tied weights: the same memory twice
        names = ("model.embed_tokens.weight", "lm_head.weight")
        model = SimpleNamespace(named_parameters=lambda: [(name, weight) for name in names], named_buffers=list)
        self.tp_worker = SimpleNamespace(model_runner=SimpleNamespace(model=model))
        self.chunked_req: Request | None = None
        self.server_args = SimpleNamespace(
            served_model_name="theirs", model_path="/models/theirs", radix_eviction_policy="lru", retraction_policy=""
        )
        self.model_config = SimpleNamespace(
            hf_text_config=SimpleNamespace(num_attention_heads=4, num_hidden_layers=2, num_key_value_heads=2),
            hf_config=SimpleNamespace(architectures=["Theirs"]),
            dtype="torch.bfloat16",
            head_dim=8,
            vocab_size=100,
            context_len=256,
        )

    @property
    def size(self) -> int:
        return self.token_to_kv_pool_allocator.page_size

    def add(self, request: Request) -> Request:
        self._add_request_to_queue(request)
        return request

    def step(self) -> bool:
        """Return whether there was a batch."""
        self.ingest_requests()
        batch = self.get_next_batch_to_run().batch_to_run
        if batch is None:
            self.on_idle()
            return False
        self.process_batch_result(batch, self.run_batch(batch))
        return True

    def run_event_loop(self) -> None:
        while self.step():
            pass

    def collect_inflight_reqs(self) -> set[Request]:
        return set(self.running)

    def ingest_requests(self) -> None: ...

    def on_idle(self) -> None: ...

    def _add_request_to_queue(self, req: Request, is_retracted: bool = False) -> None:
        self.waiting_queue.append(req)

    def send_abort_output(self, abort_req: Any, req: Request) -> None: ...

    def abort_request(self, recv_req: Any) -> None:
        for request in [each for each in self.waiting_queue if each.rid.startswith(recv_req.rid)]:
            self.waiting_queue.remove(request)
            self.send_abort_output(recv_req, request)
        for request in self.running:
            if request.rid.startswith(recv_req.rid):
                request.to_finish = FINISH_ABORT()

    def flush_cache(self) -> bool:
        if self.running or self.waiting_queue or self.chunked_req is not None:
            return False
        self.tree_cache.reset()
        self.token_to_kv_pool_allocator.clear()
        return True

    def get_next_batch_to_run(self) -> Any:
        if self.chunked_req is not None:
            self._checkpoint(self.chunked_req, self.chunked_req.kv.kv_committed_len)
        return SimpleNamespace(batch_to_run=self._prefill() or self._decode())

    def _prefill(self) -> Any:
        request = self.chunked_req
        if request is None:
            if not self.waiting_queue or len(self.running) >= self.max_running_requests:
                return None
            request = self.waiting_queue[0]
        matched = [] if request.kv.req_pool_idx is not None else self.tree_cache.match(request.tokens[:-1])
        prefix = request.kv.kv_committed_len or self.size * len(matched)
        end = min(len(request.tokens), prefix + self.chunked_prefill_size)
        if request.kv.req_pool_idx is None:
            self._lock(request, matched)
        request.extend_len = (-(-end // self.size) - prefix // self.size + len(self.running)) * self.size
        if not Batch(self, [request]).prepare_for_extend():
            if request.kv.req_pool_idx is None:
                self._lock(request, [])
            return None
        if self.chunked_req is None:
            self.waiting_queue.pop(0)
        self.req_to_token_pool.alloc([request])
        if matched:
            request.kv.cache_protected_len = prefix
            self._write(request, 0, [node.page for node in matched])
        self._extend(request, prefix, end)
        self.chunked_req = request if end < len(request.tokens) else None
        return SimpleNamespace(
            reqs=[request], forward_mode=Mode(True), extend_lens=[end - prefix], prefix_lens=[prefix]
        )

    def _decode(self) -> Any:
        if not self.running:
            return None
        while not Batch(self, self.running).check_decode_mem():
            victim = min(self.running, key=lambda each: len(each.output_ids))
            self.running.remove(victim)
            self._release(victim, publish=False)
            victim.retraction_count += 1
            self._add_request_to_queue(victim, is_retracted=True)
        for request in self.running:
            self._extend(request, request.kv.kv_committed_len, request.kv.kv_committed_len + 1)
        return (
            SimpleNamespace(reqs=list(self.running), forward_mode=Mode(False), extend_lens=None, prefix_lens=None)
            if self.running
            else None
        )

    def run_batch(self, batch: Any) -> None: ...

    def process_batch_result(self, batch: Any, result: Any) -> None:
        for request in batch.reqs:
            if request is self.chunked_req:
                continue
            request.output_ids.append(7 * len(request.tokens) % 50)
            ends = len(request.output_ids) >= request.max_new_tokens
            request.finished_reason = request.to_finish or (FINISH_LENGTH() if ends else None)
            if request.finished_reason is not None:
                if request in self.running:
                    self.running.remove(request)
                self._release(request, publish=True)
            elif request not in self.running:
                self._checkpoint(request, request.kv.kv_committed_len)
                self.running.append(request)

    # Pages.

    def table_of(self, request: Request) -> list[int]:
        row = self.req_to_token_pool.req_to_token[request.kv.req_pool_idx]
        return [int(slot) // self.size for slot in row[: request.kv.kv_allocated_len : self.size]]

    def make_room(self, num_pages: int) -> bool:
        lacks = num_pages * self.size - self.token_to_kv_pool_allocator.available_size()
        if lacks > 0:
            self.tree_cache.evict(lacks)
        return num_pages * self.size <= self.token_to_kv_pool_allocator.available_size()

    def _lock(self, request: Request, nodes: list[Node]) -> None:
        for node in nodes:
            node.lock_ref += 1
        for node in request.lock:
            node.lock_ref -= 1
        request.lock = nodes

    def _write(self, request: Request, first: int, pages: Sequence[int]) -> None:
        row = self.req_to_token_pool.req_to_token[request.kv.req_pool_idx]
        for place, page in enumerate(pages, first):
            row[place * self.size : (place + 1) * self.size] = page * self.size + np.arange(self.size)

    def _extend(self, request: Request, start: int, end: int) -> None:
        first = -(-start // self.size)
        self._write(request, first, self.token_to_kv_pool_allocator.take(-(-end // self.size) - first))
        request.kv.kv_committed_len = request.kv.kv_allocated_len = end

    def _checkpoint(self, request: Request, up_to: int) -> None:
        pages, protected = self.table_of(request), request.kv.cache_protected_len // self.size
        nodes = self.tree_cache.insert(request.tokens[:up_to], pages, protected)
        self._write(request, 0, [node.page for node in nodes])
        self._lock(request, nodes)
        request.kv.cache_protected_len = len(nodes) * self.size

    def _release(self, request: Request, publish: bool) -> None:
        if publish:
            self._checkpoint(request, request.kv.kv_committed_len)
        self.token_to_kv_pool_allocator.give(self.table_of(request)[request.kv.cache_protected_len // self.size :])
        self._lock(request, [])
        self.req_to_token_pool.free(request)
        request.kv.kv_allocated_len = 0
        if not publish:
            request.kv.kv_committed_len = request.kv.cache_protected_len = 0
