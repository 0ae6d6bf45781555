"""vLLM's own scheduler and block pool, driven without a model: `vllm_scheduler.py drive|cost …`, by the Python of an
environment that has vLLM. All decisions are vLLM's; tokens are random.

`drive` writes the state after each step to a file, and `test_vllm.py` compares it with what was published; `cost`
prints what being watched costs a step.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import random
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

from pretended_worker import PretendedPoolWorker, worker_for

KINDS = (
    "full",
    "window",
    "state",
    "cached-state",
    "long-state",
    "long-state-window",
    "drafts",
    "loads",
    "offload",
    "offload-chunks",
    "offload-window",
    "offload-window-chunks",
    "second-pool",
)
BLOCK_SIZE = 16
HOST_BYTES = 24 * 4096
"""Small enough that offloaded blocks are evicted."""


def blocks_per_place(kind: str) -> int:
    """Return how many blocks are offloaded together."""
    return 2 if kind.endswith("chunks") else 1


def kv_groups(kind: str) -> list[Any]:
    """Return the KV groups that vLLM makes for such a model."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, MambaSpec, SlidingWindowSpec

    attention = {"block_size": BLOCK_SIZE, "num_kv_heads": 2, "head_size": 16, "dtype": torch.bfloat16}
    full = KVCacheGroupSpec(["full.0"], FullAttentionSpec(**attention))
    if kind in ("full", "drafts", "loads", "offload", "offload-chunks", "second-pool"):
        return [full]
    if "window" in kind and "state" not in kind:
        return [full, KVCacheGroupSpec(["window.0"], SlidingWindowSpec(**attention, sliding_window=40))]
    page = full.kv_cache_spec.page_size_bytes
    size = {"state": 512, "cached-state": BLOCK_SIZE}.get(kind, 4 * BLOCK_SIZE)
    mode = {} if kind == "state" else {"mamba_cache_mode": "align"}
    spec = MambaSpec(block_size=size, shapes=((8,),), dtypes=(torch.float32,), page_size_padded=page, **mode)
    groups = [full, KVCacheGroupSpec(["state.0"], spec)]
    if kind.endswith("window"):  # whose manager only finds whole blocks
        window = SlidingWindowSpec(**attention | {"block_size": 2 * BLOCK_SIZE}, sliding_window=40)
        groups.append(KVCacheGroupSpec(["window.0"], window))
    return groups


def may_offload_groups() -> bool:
    """Return whether groups can be offloaded: vLLM 0.20 offloads only with one KV group."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import SupportsHMA
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

    return issubclass(OffloadingConnector, SupportsHMA)


def kv_tensors(groups: list[Any], num_blocks: int) -> list[Any]:
    """Return the tensors from which versions before 0.32, and a second pool, take the bytes of a block."""
    from dataclasses import fields

    from vllm.v1.kv_cache_interface import KVCacheTensor

    layers, page = [name for group in groups for name in group.layer_names], groups[0].kv_cache_spec.page_size_bytes
    if "shared_by" not in {field.name for field in fields(KVCacheTensor)}:
        return [KVCacheTensor(size=num_blocks * page, layers=layers, layer_stride=page * num_blocks, block_stride=page)]
    return [KVCacheTensor(size=num_blocks * page, shared_by=layers)]


def options_of(kind: str) -> dict[str, Any]:
    """Return the options for speculative decoding, loading KV from a connector, or offloading to host memory."""
    if kind == "drafts":
        return {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}}
    if kind == "loads":
        from vllm.config import KVTransferConfig

        connector = {"kv_connector": "SlowConnector", "kv_connector_module_path": "slow_connector"}
        return {"kv_transfer_config": KVTransferConfig(**connector, kv_role="kv_both")}
    if kind == "second-pool":
        from vllm.config import KVTransferConfig

        second = {"kv_connector": "SimpleCPUOffloadConnector", "kv_role": "kv_both"}
        return {
            "kv_transfer_config": KVTransferConfig(**second, kv_connector_extra_config={"cpu_bytes_to_use": HOST_BYTES})
        }
    if kind.startswith("offload"):
        from vllm.config import KVTransferConfig

        more = {
            "cpu_bytes_to_use": HOST_BYTES,
            "block_size": BLOCK_SIZE * blocks_per_place(kind),
        }
        return {
            "kv_transfer_config": KVTransferConfig(
                kv_connector="OffloadingConnector", kv_role="kv_both", kv_connector_extra_config=more
            )
        }
    return {}


def make_scheduler(model: str, kind: str, num_blocks: int, max_num_seqs: int, budget: int, **more: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.structured_output import StructuredOutputManager

    load_general_plugins()
    arguments = EngineArgs(
        model=model,
        max_model_len=512,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        enable_prefix_caching=kind != "state",
        block_size=32,
        dtype="bfloat16",
        **options_of(kind),
        **more,
    )
    config = arguments.create_engine_config()
    config.cache_config.num_gpu_blocks = num_blocks
    config.cache_config.block_size = BLOCK_SIZE
    if "state" in kind and kind != "state":
        config.cache_config.mamba_cache_mode = "align"
    if kind.startswith("offload-window") and not may_offload_groups():
        print("impossible", flush=True)
        sys.exit()
    groups = kv_groups(kind)
    size = math.lcm(*(group.kv_cache_spec.block_size for group in groups))
    tensors = kv_tensors(groups, num_blocks) if kind.startswith(("offload", "second")) else []
    cache = KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=tensors, kv_cache_groups=groups)
    return Scheduler(
        vllm_config=config,
        kv_cache_config=cache,
        structured_output_manager=StructuredOutputManager(config),
        block_size=size,
        hash_block_size=BLOCK_SIZE,
        log_stats=True,
    )


class Driver:
    """Random requests, tokens, aborts and resets, always the same for a seed."""

    def __init__(self, scheduler: Any, seed: int, kind: str = "full") -> None:
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

        init_none_hash(sha256)
        self.scheduler, self.kind = scheduler, kind
        self.random = random.Random(seed)
        self.hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
        self.prefixes = [[self.random.randrange(3, 400) for _ in range(96)] for _ in range(4)]
        self.count = 0
        self.num_drafts = self.num_right = 0
        self.has_loaded: set[str] = set()
        self.loading: dict[str, int] = getattr(scheduler.connector, "loading", {})
        self.worker: Any = worker_for(self.random, blocks_per_place(kind)) if is_offloading(scheduler) else None
        if kind == "second-pool":
            self.worker = PretendedPoolWorker(self.random)
        if self.worker is not None:
            self.watch_loads(scheduler.connector)

    def watch_loads(self, connector: Any) -> None:
        """Record how many tokens of each request are loaded."""
        original = connector.update_state_after_alloc

        def update_state_after_alloc(request: Any, blocks: Any, num_tokens: int) -> Any:
            self.loading[request.request_id] = num_tokens
            return original(request, blocks, num_tokens)

        connector.update_state_after_alloc = update_state_after_alloc

    def add(self, num_prompt: int | None = None, max_tokens: int | None = None) -> None:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        self.count += 1
        shared = self.random.choice(self.prefixes)[: self.random.randrange(0, 97)]
        length = num_prompt or self.random.randrange(4, 120)
        prompt = (shared + [self.random.randrange(3, 400) for _ in range(length)])[: num_prompt or None]
        params = SamplingParams(max_tokens=max_tokens or self.random.randrange(1, 90), ignore_eos=True)
        if hasattr(params, "update_from_generation_config"):
            params.update_from_generation_config({}, 2)
        self.scheduler.add_request(
            Request(
                request_id=f"r{self.count}",
                prompt_token_ids=prompt,
                sampling_params=params,
                pooling_params=None,
                block_hasher=self.hasher,
            )
        )

    def step(self) -> bool:
        """Schedule, pretend to run, and update; return whether there was anything to do."""
        from vllm.v1.outputs import ModelRunnerOutput

        scheduler = self.scheduler
        if not scheduler.has_requests():
            return False
        output = scheduler.schedule()
        if self.worker is not None:
            self.worker.begin(output)
        ids = list(output.num_scheduled_tokens)
        tokens = [self.sampled(each, output.scheduled_spec_decode_tokens.get(each, ())) for each in ids]
        outcome = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={each: place for place, each in enumerate(ids)},
            sampled_token_ids=tokens,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
            kv_connector_output=self.loaded() if self.worker is None else self.worker.ended(),
        )
        scheduler.update_from_output(output, outcome)
        if scheduler.num_spec_tokens:
            self.guess()
        return True

    def sampled(self, request_id: str, drafts: Any) -> list[int]:
        """Return one token and the accepted drafts before it; none if the prompt is not computed yet."""
        request = self.scheduler.requests[request_id]
        if request.num_computed_tokens < request.num_tokens + len(drafts):
            return []
        num_right = self.random.randrange(len(drafts) + 1) if drafts else 0
        self.num_drafts += len(drafts)
        self.num_right += num_right
        return [*drafts[:num_right], self.random.randrange(3, 400)]

    def guess(self) -> None:
        from vllm.v1.outputs import DraftTokenIds

        running = [each.request_id for each in self.scheduler.running if each.num_output_tokens]
        guessed = [[self.random.randrange(3, 400) for _ in range(self.random.randrange(4))] for _ in running]
        self.scheduler.update_draft_token_ids(DraftTokenIds(running, guessed))

    def loaded(self) -> Any:
        """Return some of the waiting requests as loaded."""
        from vllm.v1.outputs import KVConnectorOutput

        waiting = [
            each.request_id
            for each in self.scheduler.requests.values()
            if each.status.name == "WAITING_FOR_REMOTE_KVS" and self.random.random() < 0.3
        ]
        if self.scheduler.connector is None:
            return None
        fresh = set(waiting) - self.has_loaded
        self.has_loaded |= fresh
        return KVConnectorOutput(finished_recving=fresh or None)

    def disturb(self) -> None:
        """Do something random at times: abort, reset or pause."""
        from vllm.v1.request import RequestStatus

        chance = self.random.random()
        if chance < 0.3 and len(self.scheduler.requests) < 12:
            self.add()
        elif chance < 0.33 and (victims := self.may_be_aborted()):
            self.scheduler.finish_requests(self.random.choice(victims), RequestStatus.FINISHED_ABORTED)
        elif chance < 0.331:
            self.scheduler.reset_prefix_cache()
        elif chance < 0.343 and self.worker is None and not self.is_loading():
            self.scheduler.reset_prefix_cache(reset_running_requests=True)
        elif chance < 0.359 and self.worker is not None and not self.is_loading():
            self.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)

    def may_be_aborted(self) -> list[str]:
        """Return requests that can be aborted. Older versions of vLLM fail if one is aborted while blocks are
        offloaded: 0.26 would offload the whole prompt, computed or not; 0.20 frees a request twice that is loaded
        after a preemption.
        """
        import vllm

        requests = self.scheduler.requests.values()
        if self.worker is not None and vllm.__version__.startswith("0.26"):
            requests = [r for r in requests if r.status.name == "RUNNING" and r.num_computed_tokens >= r.num_tokens - 1]
        if self.worker is not None and vllm.__version__.startswith("0.20"):
            requests = [r for r in requests if r.status.name != "WAITING_FOR_REMOTE_KVS"]
        return sorted(each.request_id for each in requests)

    def is_loading(self) -> bool:
        """Return whether blocks are held by requests that do not run, so that vLLM refuses a reset."""
        running = {each.request_id for each in self.scheduler.running}
        groups = self.scheduler.kv_cache_manager.coordinator.single_type_managers
        blocks = self.scheduler.kv_cache_manager.block_pool.blocks
        num_held = sum(
            block.block_id > 0 for group in groups for table in group.req_to_blocks.values() for block in table
        )
        is_copying = self.kind == "second-pool" and sum(block.ref_cnt for block in blocks[1:]) > num_held
        return is_copying or any(set(group.req_to_blocks) - running for group in groups)


def truth_of(scheduler: Any, step: int, driver: Driver) -> dict[str, Any]:
    """Return the whole state, read from vLLM's own objects."""
    manager = scheduler.kv_cache_manager
    pool, groups = manager.block_pool, manager.coordinator.single_type_managers
    blocks = pool.blocks
    free, block = [], pool.free_block_queue.fake_free_list_head.next_free_block
    while block is not None and block.block_id >= 0:
        free.append(block.block_id)
        block = block.next_free_block
    requests = [each for each in scheduler.requests.values() if not each.is_finished()]

    leaving = [  # of requests that ended while a connector writes or reads their blocks
        block.block_id
        for request in scheduler.requests.values()
        if request.is_finished()
        for group in groups
        for block in group.req_to_blocks.get(request.request_id, ())
    ]

    def loading_of(request: Any) -> int:
        is_loading = request.status.name == "WAITING_FOR_REMOTE_KVS"
        return int(driver.loading[request.request_id]) if is_loading else 0

    return {
        "step": step,
        "ref_counts": [block.ref_cnt for block in blocks],
        "hashes": [None if block.block_hash is None else bytes(block.block_hash).hex() for block in blocks],
        "tables": {
            request_id: [[block.block_id for block in group.req_to_blocks.get(request_id, ())] for group in groups]
            for request_id in (each.request_id for each in requests)
        },
        "leaving": leaving,
        "host": host_truth(scheduler),
        "below": below_truth(scheduler),
        "blocks_per_place": blocks_per_place(driver.kind),
        "skipped": getattr(driver.worker, "skipped", {}),
        "computed": {each.request_id: each.num_computed_tokens - loading_of(each) for each in requests},
        "outputs": {each.request_id: each.num_output_tokens for each in requests},
        "preemptions": {each.request_id: each.num_preemptions for each in requests},
        "running": [each.request_id for each in scheduler.running],
        "waiting": scheduler.get_request_counts()[1],
        "free": free,
        "drafts": [driver.num_drafts, driver.num_right],
        "statuses": {each.request_id: each.status.name for each in requests},
    }


def is_offloading(scheduler: Any) -> bool:
    return getattr(scheduler.connector, "connector_scheduler", None) is not None


def host_truth(scheduler: Any) -> list[tuple[str, int, int]]:
    """Return for each offloaded block its key, slot and number of readers, -1 while it is written."""
    if not is_offloading(scheduler):
        return []
    policy = scheduler.connector.connector_scheduler.manager._policy
    chunks = getattr(policy, "chunks", None)
    if chunks is None:
        chunks = policy.blocks
    return [
        (key.hex(), getattr(each, "chunk_id", None) or getattr(each, "block_id", 0), each.ref_cnt)
        for key, each in chunks.items()
    ]


def below_truth(scheduler: Any) -> list[tuple[int, str | None]]:
    """Return for each block of a second pool its number of users and its hash."""
    pool = getattr(getattr(scheduler.connector, "scheduler_manager", None), "cpu_block_pool", None)
    blocks = [] if pool is None else pool.blocks
    return [(each.ref_cnt, None if each.block_hash is None else bytes(each.block_hash).hex()) for each in blocks]


def break_hook(name: str) -> None:
    """Let a hook of kvscope raise when it is called for the fifth time."""
    from kvscope_inside.vllm.vllm_recorder import VllmRecorder

    hook, calls = getattr(VllmRecorder, name), 0

    def broken(*given: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise RuntimeError("broken by a test")
        return hook(*given, **named)

    setattr(VllmRecorder, name, broken)


def publish_late(seconds: float) -> None:
    """Let the plugin's thread translate what the hooks recorded only every `seconds`, as on a busy machine."""
    from kvscope_inside import publishing_thread

    publishing_thread.POLL_INTERVAL_S = seconds  # type: ignore[misc]


def follow(watched: list[int]) -> None:
    """Read from standard input, line by line, which step the watcher has seen."""
    for line in sys.stdin:
        watched[0] = int(line)


def drive(args: argparse.Namespace) -> None:
    """Drive a scheduler. Without `--max-ahead` it starts after one line of standard input; otherwise each line names a
    step that the watcher has seen, and the scheduler is at most so many steps ahead. Then no frame is lost because a
    watcher is slow.
    """
    if args.breaking:
        break_hook(args.breaking)
    if args.publish_every_s:
        publish_late(args.publish_every_s)
    scheduler = make_scheduler(args.model, args.kind, args.num_blocks, 8, 48)
    driver = Driver(scheduler, args.seed, args.kind)
    original, steps = scheduler.update_from_output, 0
    with args.truth.open("w", buffering=1) as file:

        def update_from_output(*given: Any, **named: Any) -> Any:
            nonlocal steps
            result = original(*given, **named)
            steps += 1
            file.write(json.dumps(truth_of(scheduler, steps, driver)) + "\n")
            return result

        scheduler.update_from_output = update_from_output
        print("ready", flush=True)
        sys.stdin.readline()  # until a client watches
        watched = [0]
        if args.max_ahead:
            threading.Thread(target=follow, args=(watched,), daemon=True).start()
        while steps < args.steps:
            while args.max_ahead and steps - watched[0] > args.max_ahead:
                time.sleep(0.001)
            driver.disturb()
            if not driver.step():
                driver.add()
    print("done", flush=True)
    if args.max_ahead:
        threading.Event().wait()  # until it is killed: its telemetry is still read
    sys.stdin.readline()


def cost(args: argparse.Namespace) -> None:
    """Measure what the hooks take of each step of the scheduler with 256 running requests, and the step itself."""
    from kvscope_inside.hooks import Hooks
    from kvscope_inside.vllm.plugin import load

    spent = 0.0

    def timed(put: Any) -> Any:
        def with_clock(self: Any, owner: Any, name: str, note: Any) -> Any:
            def note_timed(*given: Any, **named: Any) -> None:
                nonlocal spent
                began = time.perf_counter()
                note(*given, **named)
                spent += time.perf_counter() - began

            return put(self, owner, name, note_timed)

        return with_clock

    Hooks.after, Hooks.before = timed(Hooks.after), timed(Hooks.before)
    os.environ["KVSCOPE_INSIDE"] = args.endpoint
    load()
    scheduler = make_scheduler(args.model, args.kind, args.num_blocks, 256, 8192)
    driver = Driver(scheduler, 1, args.kind)
    gc.collect()
    gc.freeze()  # as the engine core does
    for _ in range(256):
        driver.add(num_prompt=128, max_tokens=380)
    hooks_us, steps_us = [], []
    while len(hooks_us) < args.steps and scheduler.has_requests():
        began, spent = time.perf_counter(), 0.0
        driver.step()
        steps_us.append((time.perf_counter() - began) * 1e6)
        hooks_us.append(spent * 1e6)
        time.sleep(0.005)  # a model would run: the publishing thread has its turn
    decodes = sorted(hooks_us[10:])
    figures = {
        "step_median_us": round(statistics.median(steps_us[10:]), 1),
        "hooks_median_us": round(statistics.median(decodes), 1),
        "hooks_p99_us": round(decodes[int(0.99 * len(decodes))], 1),
        "hooks_most_us": round(decodes[-1], 1),
        "hooks_of_prefills_us": [round(each, 1) for each in hooks_us[:4]],
    }
    print(json.dumps(figures))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("drive", "cost"))
    parser.add_argument("--model", required=True)
    parser.add_argument("--kind", choices=KINDS, default="full")
    parser.add_argument("--num-blocks", type=int, default=64)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--max-ahead", type=int, default=0)
    parser.add_argument("--publish-every-s", type=float, default=0.0)
    parser.add_argument("--truth", type=Path)
    parser.add_argument("--breaking", default="")
    parser.add_argument("--endpoint", default="ipc:///tmp/kvscope-cost")
    args = parser.parse_args()
    {"drive": drive, "cost": cost}[args.what](args)


if __name__ == "__main__":
    main()
