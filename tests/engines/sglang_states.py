"""Compares what is told of recurrent states with SGLang's own pool and radix tree, without a model: none that has
states runs on a CPU. By a Python that has SGLang: `sglang_states.py STEPS SEED MODEL`. Prints a line of figures."""

from __future__ import annotations

import json
import random
import sys
from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape
from sglang.srt.managers.schedule_batch import ReqKvInfo
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, HybridReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from kvscope_inside.sglang.other_pools import Holder, StateRows
from kvscope_inside.sglang.pages import reader_of
from kvscope_inside.sglang.pools import pools_of
from kvscope_inside.sglang.sglang_facts import kv_bytes
from kvscope_telemetry.ledger import NO_OWNER, BlockState, Tier
from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.messages.telemetry import CacheInfo, DeviceInfo, Hello, KVGroup, ModelInfo
from kvscope_telemetry.producer.cache_state import CacheState

NUM_TOKENS, NUM_STATES, NUM_REQUESTS = 512, 12, 6


def scheduler_of() -> Any:
    """As much of one as has pools, an allocator and a tree."""
    shape = Mamba2StateShape.create(
        tp_world_size=1, intermediate_size=16, n_groups=1, num_heads=2, head_dim=8, state_size=4, conv_kernel=4
    )
    table = HybridReqToTokenPool(
        size=NUM_REQUESTS,
        mamba_size=NUM_STATES,
        mamba_spec_state_size=NUM_REQUESTS,
        max_context_len=128,
        device="cpu",
        enable_memory_saver=False,
        cache_params=Mamba2CacheParams(shape=shape, layers=[0, 2]),
        mamba_layer_ids=[0, 2],
        enable_mamba_extra_buffer=False,
    )
    pool = HybridLinearKVPool(
        size=NUM_TOKENS,
        dtype=torch.bfloat16,
        page_size=1,
        head_num=2,
        head_dim=8,
        full_attention_layer_ids=[1],
        device="cpu",
        mamba_pool=table.mamba_pool,
    )
    allocator = TokenToKVPoolAllocator(NUM_TOKENS, torch.bfloat16, "cpu", pool, False)
    params = CacheInitParams(
        disable=False,
        req_to_token_pool=table,
        token_to_kv_pool_allocator=allocator,
        page_size=1,
        tree_components=(ComponentType.FULL, ComponentType.MAMBA),
        chunked_prefill_size=64,
    )
    tree = UnifiedRadixCache(params)
    return SimpleNamespace(token_to_kv_pool_allocator=allocator, req_to_token_pool=table, tree_cache=tree)


class Driver:
    """Requests that come, and end with their state left to the tree, or given back."""

    def __init__(self, seed: int) -> None:
        self.scheduler, self.chance = scheduler_of(), random.Random(seed)
        pools = pools_of(self.scheduler)
        groups = (
            KVGroup(kind="full", block_size=1),
            KVGroup(kind="state", block_size=128),
        )
        cache = CacheInfo(
            num_blocks=pools.num_blocks, block_size=1, num_reserved_blocks=1, groups=groups, num_states=NUM_STATES
        )
        hello = Hello(
            epoch=1, time_ns=0, wall_time_ns=0, model=ModelInfo(name="none"), cache=cache, device=DeviceInfo(kind="cpu")
        )
        self.state = CacheState(hello)
        self.rows = StateRows(self.state, pools)
        self.reader = reader_of(self.scheduler.req_to_token_pool.req_to_token, pools)
        self.running: list[tuple[Any, Any, list[int], torch.Tensor]] = []
        self.counts = {"moments": 0, "wrong": 0, "cached": 0, "evicted": 0, "kv bytes": kv_bytes(pools)}
        self.wrong: list[str] = []

    def step(self, number: int) -> None:
        """Something happens, and is compared."""
        table, tree = self.scheduler.req_to_token_pool, self.scheduler.tree_cache
        if len(self.running) < NUM_REQUESTS and self.chance.random() < 0.5:
            if table.mamba_allocator.available_size() < 1:
                found = tree.evict(EvictParams(num_tokens=0, mamba_num=1))
                self.counts["evicted"] += found.mamba_num_evicted
            self._start(number)
        elif self.running:
            self._end(self.running.pop(self.chance.randrange(len(self.running))))
        self._compare(number)

    def _start(self, number: int) -> None:
        request = SimpleNamespace(kv=ReqKvInfo(), rid=f"r{number}")
        if self.scheduler.req_to_token_pool.mamba_allocator.available_size() < 1:
            return
        self.scheduler.req_to_token_pool.alloc([request])
        tokens = [self.chance.randrange(50) for _ in range(self.chance.randrange(4, 20))]
        slots = self.scheduler.token_to_kv_pool_allocator.alloc(len(tokens))
        if slots is None:
            self.scheduler.tree_cache.evict(EvictParams(num_tokens=len(tokens)))
            slots = self.scheduler.token_to_kv_pool_allocator.alloc(len(tokens))
        told = self.state.add_request(request.rid, num_prompt_tokens=len(tokens))
        told.state = RequestState.RUNNING
        self.running.append((request, told, tokens, slots))

    def _end(self, ended: tuple[Any, Any, list[int], torch.Tensor]) -> None:
        request, told, tokens, slots = ended
        table, tree = self.scheduler.req_to_token_pool, self.scheduler.tree_cache
        is_kept = False
        if self.chance.random() < 0.7:
            key = RadixKey(array("q", tokens))
            state = request.kv.mamba_pool_idx.unsqueeze(0)
            result = tree.insert(InsertParams(key=key, value=slots, mamba_value=state))
            is_kept = not result.mamba_exist
        else:
            self.scheduler.token_to_kv_pool_allocator.free(slots)
        if is_kept:
            request.kv.mamba_pool_idx = None
        else:
            table.free_mamba_cache(request)
        table.free(request)
        self.state.finish(told)

    def _compare(self, number: int) -> None:
        copy = self.reader.copy()
        states = copy.states()
        assert states is not None, "there are states"
        holders = [
            (Holder(told, np.empty(0, np.int64), 0, len(tokens)), int(request.kv.req_pool_idx))
            for request, told, tokens, _ in self.running
        ]
        self.rows.read(number, *states, holders)
        self.state.frame(number, number)
        ledger, first = self.state.ledger, self.state.hello.cache.first_state
        owned = {int(request.kv.mamba_pool_idx): told for request, told, _, _ in self.running}
        in_tree = set(self.scheduler.tree_cache.all_mamba_values_flatten().tolist())
        for each in range(1, NUM_STATES + 1):
            row, told = first + each - 1, owned.get(each)
            expected = BlockState.ACTIVE if told else BlockState.CACHED if each in in_tree else BlockState.FREE
            figures = ledger.state[row], ledger.ref_count[row], ledger.group[row], ledger.tier[row]
            if figures != (expected, told is not None, 1, Tier.STATES):
                self.wrong.append(f"step {number}, state {each}: {figures}, not {expected.name}")
            if (ledger.owner[row] == NO_OWNER) != (expected is BlockState.FREE):
                self.wrong.append(f"step {number}, owner of {each}: {ledger.owner[row]}")
            if told is not None and (ledger.owner[row] != told.number or told.tables[1] != [row]):
                self.wrong.append(f"step {number}, table of {told.number}: {told.tables[1]}, not {[row]}")
        self.counts["moments"] += 1
        self.counts["cached"] += len(in_tree)
        self.counts["wrong"] = len(self.wrong)


def main() -> None:
    steps, seed, model = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    set_global_server_args_for_scheduler(ServerArgs(model_path=model, device="cpu", attention_backend="torch_native"))
    driver = Driver(seed)
    for number in range(1, steps + 1):
        driver.step(number)
    print(json.dumps(driver.counts))
    print("\n".join(driver.wrong[:10]), file=sys.stderr)


if __name__ == "__main__":
    main()
