"""What being watched costs a step of SGLang with a million pages and 256 requests that decode, by a Python that has
torch: `PYTHONPATH=.:engine python tests/engines/sglang_cost.py [--device cuda]`. The pools are torch's tensors as
SGLang has them; no model runs and SGLang is not needed. On a GPU every operation that would wait for it is an error,
and what arrives is compared with what was there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from types import SimpleNamespace
from typing import Any

import torch
from tests.inside.fake_sglang import Batch, Mode, Request, Scheduler

import kvscope_inside.sglang.sglang_facts as facts
from kvscope_inside.hooks import Hooks
from kvscope_inside.sglang.pages import reader_of
from kvscope_inside.sglang.pools import pools_of
from kvscope_inside.sglang.sglang_recorder import SglangRecorder
from kvscope_inside.sglang.sglang_translator import SglangTranslator
from kvscope_telemetry.producer.cache_state import CacheState


class Decode(Batch):
    """All go on."""

    forward_mode, extend_lens, prefix_lens = Mode(False), None, None


class Decoding(Scheduler):
    """Requests that go on for ever, in pools of torch's."""

    max_running_requests = 256

    def __init__(
        self, device: str, num_pages: int, page_size: int, num_requests: int, length: int, step_s: float
    ) -> None:
        super().__init__(16, page_size, 8)
        pool, table = self.token_to_kv_pool_allocator, self.req_to_token_pool
        self._device, self._step_s = device, step_s
        pool.num_pages, pool.size = num_pages, num_pages * page_size
        pages = torch.arange(1, num_pages + 1, dtype=torch.int64, device=device)
        per_request = -(-length // page_size)
        taken, pool.free_pages = pages[: num_requests * per_request], pages[num_requests * per_request :]
        table.req_to_token = torch.zeros((num_requests + 1, 8192), dtype=torch.int32, device=device)
        slots = (taken[:, None] * page_size + torch.arange(page_size, device=device)).reshape(num_requests, -1)
        table.req_to_token[1:, : slots.shape[1]] = slots
        table.free_slots = list(range(1, num_requests + 1))
        self.running_batch = Decode(self)
        self.rows = torch.arange(num_requests, 0, -1, device=device)
        self.joins = [Request(f"r{number}", [number % 90] * length, 1 << 20) for number in range(num_requests)]
        self.length = length

    def get_next_batch_to_run(self) -> Any:
        size, pool = self.size, self.token_to_kv_pool_allocator
        if self.joins:
            requests, self.joins = self.joins, []
            for request in requests:
                self._add_request_to_queue(request)
            self.waiting_queue.clear()
            self.req_to_token_pool.alloc(requests)
            for request in requests:
                request.kv.kv_committed_len = request.kv.kv_allocated_len = self.length
            self.running = requests
            lengths = [self.length] * len(requests)
            return SimpleNamespace(
                batch_to_run=SimpleNamespace(
                    reqs=requests, forward_mode=Mode(True), extend_lens=lengths, prefix_lens=[0] * len(requests)
                )
            )
        at = self.running[0].kv.kv_committed_len
        if at % size == 0:
            new, pool.free_pages = pool.free_pages[: len(self.running)], pool.free_pages[len(self.running) :]
            last = new * size
        else:
            last = self.req_to_token_pool.req_to_token[self.rows, at - 1] + 1
        self.req_to_token_pool.req_to_token[self.rows, at] = last.to(torch.int32)
        for request in self.running:
            request.kv.kv_committed_len = request.kv.kv_allocated_len = at + 1
        batch = Decode(self, self.running)
        batch.prepare_for_decode()
        return SimpleNamespace(batch_to_run=batch)

    def run_batch(self, batch: Any) -> None:
        if self._device == "cuda":
            torch.cuda._sleep(int(self._step_s * 1.7e9))
        time.sleep(self._step_s)

    def process_batch_result(self, batch: Any, result: Any) -> None:
        for request in batch.reqs:
            request.output_ids.append(7)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--num-pages", type=int, default=1_000_000)
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--step-ms", type=float, default=8.0)
    parser.add_argument("--plain", action="store_true", help="without being watched")
    args = parser.parse_args()
    facts._version = lambda: "0.0"
    spent, applied_ms = 0.0, []

    def timed(put: Any) -> Any:
        def with_clock(self: Any, owner: Any, name: str, note: Any) -> Any:
            def note_timed(*given: Any, **named: Any) -> None:
                nonlocal spent
                began = time.perf_counter()
                note(*given, **named)
                spent += time.perf_counter() - began

            return put(self, owner, name, note_timed)

        return with_clock

    Hooks.after, Hooks.before = timed(Hooks.after), timed(Hooks.before)  # type: ignore[method-assign]
    scheduler = Decoding(args.device, args.num_pages, args.page_size, args.requests, args.length, args.step_ms / 1000)
    table, pool = scheduler.req_to_token_pool.req_to_token, scheduler.token_to_kv_pool_allocator
    failures: list[str] = []
    state = CacheState(facts.hello_of(scheduler, 7))
    translator = SglangTranslator(state, pools=pools_of(scheduler))
    reader = reader_of(table, pools_of(scheduler))
    hooks = Hooks(lambda name, error: failures.append(f"{name}: {error!r}"))
    ending = threading.Event()
    notes = None

    def tell() -> None:
        while not ending.wait(0.004) or notes.records:
            while notes.records and (notes.records[0].pages is None or notes.records[0].pages.copy.has_arrived()):
                note = notes.records.popleft()
                began = time.perf_counter()
                translator.apply(note)
                if note.pages is not None:
                    applied_ms.append((time.perf_counter() - began) * 1e3)

    thread = threading.Thread(target=tell, daemon=True)
    if not args.plain:
        notes = SglangRecorder(scheduler, hooks, reader, lambda: None)
        thread.start()
    if args.device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
    hooks_us, steps_us, num_copies = [], [], 0
    while len(hooks_us) < args.steps:
        began, spent = time.perf_counter(), 0.0
        scheduler.step()
        steps_us.append((time.perf_counter() - began) * 1e6)
        hooks_us.append(spent * 1e6)
        num_copies = len(applied_ms)
    torch.cuda.set_sync_debug_mode("default") if args.device == "cuda" else None
    figures: dict[str, Any] = {"device": args.device, "pages": args.num_pages, "page size": args.page_size}
    if notes is not None:
        time.sleep(0.2)
        scheduler.on_idle()  # what moved since the last copy
        ending.set()
        thread.join(20)
        rows = table.cpu().numpy()
        wrong = sum(
            state.requests[number].tables[0]
            != (
                rows[args.requests + 1 - number, : request.kv.kv_allocated_len : args.page_size] // args.page_size
            ).tolist()
            for number, request in enumerate(scheduler.running, 1)
        )
        is_free = torch.zeros(args.num_pages + 1, dtype=torch.bool)
        is_free[pool.free_pages.cpu()] = True
        wrong += int(((state.ledger.state == 0) != is_free.numpy())[1:].sum())
        wrong += int((state.ledger.ref_count.astype(bool) == is_free.numpy())[1:].sum())
        figures |= {"failures": failures, "rows and tables that differ": wrong, "copies": num_copies}
        figures |= {"applying a copy, ms": round(statistics.median(applied_ms[1:] or [0]), 2)}
    ordinary = sorted(hooks_us[5:])
    figures |= {
        "hooks median, µs": round(statistics.median(ordinary), 1),
        "hooks p99, µs": round(ordinary[int(0.99 * len(ordinary))], 1),
        "hooks most, µs": round(ordinary[-1], 1),
        "steps with a copy, µs": round(statistics.median(ordinary[-max(1, num_copies) :]), 1),
        "step median, µs": round(statistics.median(steps_us[5:]), 1),
        "step mean, µs": round(statistics.mean(steps_us[5:]), 1),
    }
    print(json.dumps(figures, ensure_ascii=False))


if __name__ == "__main__":
    main()
