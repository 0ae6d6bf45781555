"""The published state of transformers' continuous batching equals its objects at each step of a real model on a CPU.

Two features need a GPU: asynchronous batching (streams) and offloading (pinned memory). The first is tested here with
plain pairs of inputs instead of streams, the second with memory that is not pinned.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvscope_inside import CacheState
from kvscope_inside.hooks import Hooks
from kvscope_inside.transformers.transformers_facts import LedgerRows, hello_of
from kvscope_inside.transformers.transformers_recorder import TransformersRecorder
from kvscope_inside.transformers.transformers_translator import TransformersTranslator
from kvscope_telemetry.ledger import NO_OWNER, BlockState
from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.messages.telemetry import Event, Frame
from kvscope_telemetry.mirror.coalesce import coalesce
from kvscope_telemetry.mirror.mirror import Mirror

SIZE = 4


def tiny_model(kind: str = "full") -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    sizes = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
    }
    if kind == "full":
        return LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **sizes)).eval()
    layers = ["sliding_attention"] * 3 + ["full_attention"] * 2
    config = Qwen3Config(
        num_hidden_layers=5,
        layer_types=layers,
        use_sliding_window=True,
        sliding_window=10,
        max_window_layers=5,
        **sizes,
    )
    return Qwen3ForCausalLM(config).eval()


def make_manager(kind: str = "full", num_blocks: int = 40, num_return_sequences: int = 1, **options: Any) -> Any:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model = tiny_model(kind)
    model.set_attn_implementation("sdpa")
    config = ContinuousBatchingConfig(page_size=SIZE, num_blocks=num_blocks, max_batch_tokens=24, **options)
    generation = GenerationConfig(
        max_new_tokens=8,
        do_sample=num_return_sequences > 1,
        eos_token_id=7,
        num_return_sequences=num_return_sequences,
    )
    return model.init_continuous_batching(generation, config)


class PublishedManager:
    """A manager whose loop is run by the test, and what is published of it."""

    def __init__(self, kind: str = "full", **options: Any) -> None:
        from transformers.generation.continuous_batching.cache_allocators.cache_allocator import compute_block_hash

        self.manager = make_manager(kind, **options)
        self.processor = self.manager.batch_processor = self.manager._create_batch_processor()
        self.manager.current_batch = 0
        self.failures: list[str] = []
        self.hooks = Hooks(lambda name, error: self.failures.append(f"{name}: {error!r}"))
        self.hello = hello_of(self.manager, self.processor, 1)
        self.rows = LedgerRows.of(self.processor.cache)
        self.hash_of = compute_block_hash
        self.begin(CacheState(self.hello))
        self.frames: list[Frame] = []
        self.is_first = self.processor.use_async_batching

    def begin(self, state: CacheState) -> None:
        """Watch from now on."""
        self.state, self.mirror = state, Mirror()
        self.mirror.apply(coalesce([], snapshot=state.snapshot()))
        self.recorder = TransformersRecorder(self.processor, self.hooks)
        self.translator = TransformersTranslator(self.state, self.rows, self.hash_of)

    def step(self) -> list[Event]:
        """Run the loop once, and return its events."""
        if self.is_first:  # a batch is ahead from then on, and steps are published as they end
            self.is_first = self.manager._generation_loop_body(self.processor, True)
            return []
        self.manager._generation_loop_body(self.processor, False)
        return self.publish_notes()

    def publish_notes(self) -> list[Event]:
        told = []
        while self.recorder.records:
            self.frames.append(self.translator.apply(self.recorder.records.popleft()))
            self.mirror.apply(coalesce([self.frames[-1]]))
            told += self.frames[-1].events
        assert self.failures == []
        assert differences(self.processor, self.mirror, self.rows) == []
        return told


def differences(processor: Any, mirror: Mirror, rows: LedgerRows) -> list[str]:
    """Yield differences between transformers' objects and a mirror for every block, table and request."""
    found = [*differing_blocks(processor.cache, mirror, rows), *differing_requests(processor.scheduler, mirror, rows)]
    counts = mirror.counters.num_running, mirror.counters.num_waiting
    if counts != (len(processor.scheduler.active_requests), len(processor.scheduler.waiting_requests)):
        found.append(f"{counts} run and wait")
    return found


def differing_blocks(cache: Any, mirror: Mirror, rows: LedgerRows) -> Iterator[str]:
    ledger, reserved = mirror.ledger, (rows.num_sectors - cache.num_sectors) * rows.per_sector
    expected = dict.fromkeys(range(reserved), (BlockState.UNMAPPED, 0, 0, 0))
    expected |= dict.fromkeys(range(reserved, ledger.num_blocks), (BlockState.FREE, 0, 0, 0))
    for group, allocator in enumerate(cache.cache_allocators.values()):
        refs = Counter(block for table in allocator.block_table.values() for block in table)
        refs.update(dict.fromkeys(allocator.ledger.cached_blocks, 0))
        free = {block for tree in cache.pool._free_blocks[group].trees.values() for block in tree}
        sectors = {block // allocator.blocks_per_sector for block in free | set(refs)}
        assert not free & set(refs), "transformers has a block that is free and held"
        expected |= dict.fromkeys(rows.unused(group, sorted(sectors)), (BlockState.UNMAPPED, 0, 0, 0))
        for block, count in refs.items():
            assert count == (allocator.ledger.shared_ref_counts.get(block, 1) if count else 0), "counted as there"
            kind = BlockState.ACTIVE if count else BlockState.CACHED
            (row,) = rows.of_blocks(group, [block])
            expected[row] = (kind, count, allocator.ledger.block_to_hash.get(block, 0), group)
    for row, truth in expected.items():
        told = (ledger.state[row], ledger.ref_count[row], int(ledger.hash[row]), ledger.group[row])
        if told != truth:
            yield f"row {row} is told as {told}, not {truth}"
        if (ledger.owner[row] == NO_OWNER) != (truth[0] not in (BlockState.ACTIVE, BlockState.CACHED)):
            yield f"row {row} has the owner {ledger.owner[row]}"


def differing_requests(scheduler: Any, mirror: Mirror, rows: LedgerRows) -> Iterator[str]:
    requests, ledger = mirror.requests, mirror.ledger
    theirs = scheduler.active_requests | scheduler.waiting_requests
    unfinished = np.flatnonzero(requests.state != RequestState.FINISHED).tolist()
    told = {requests.request_ids[row]: row for row in unfinished}
    if set(told) != set(theirs):
        yield f"requests {sorted(told)}, not {sorted(theirs)}"
    for request_id in set(told) & set(theirs):
        row, their, is_active = told[request_id], theirs[request_id], request_id in scheduler.active_requests
        number, output = int(requests.number[row]), their.to_generation_output()
        computed = their.position_offset if is_active else 0
        truth = (len(output.prompt_ids), len(output.generated_tokens), computed, is_active)
        figures = (
            requests.num_prompt_tokens[row],
            requests.num_output_tokens[row],
            requests.num_computed_tokens[row],
            requests.state[row] == RequestState.RUNNING,
        )
        if figures != truth:
            yield f"{request_id}: {figures}, not {truth}"
        for group, allocator in enumerate(scheduler.cache.cache_allocators.values()):
            blocks = allocator.block_table.get(request_id, [])
            table = rows.of_blocks(group, blocks)
            if requests.table(number, group).tolist() != table:
                yield f"table of {request_id}: {requests.table(number, group)}, not {table}"
            held = min(computed, getattr(allocator, "sliding_window", computed))
            filled = [min(max(held - place * SIZE, 0), SIZE) for place in range(len(table))]
            if ledger.filled[table].tolist() != filled:
                yield f"{request_id} has {ledger.filled[table]} of {filled} slots"
            for at, block in enumerate(blocks):
                parent = allocator.ledger.block_to_hash.get(blocks[at - 1], 0) if at else 0
                if block in allocator.ledger.block_to_hash:
                    if ledger.parent[table[at]] != parent:
                        yield f"parent of row {table[at]}"
                elif "#" not in request_id and ledger.ref_count[table[at]] == 1 and ledger.owner[table[at]] != number:
                    yield f"row {table[at]} is of {number} alone, not of {ledger.owner[table[at]]}"


def run_random_requests(told: PublishedManager, seed: int, num_requests: int, *, cancels: bool = True) -> set[str]:
    """Run random requests with shared prefixes and cancellations, and return the kinds of their events."""
    chance, kinds, count = random.Random(seed), set[str](), 0
    prefixes = [[chance.randrange(8, 96) for _ in range(40)] for _ in range(3)]
    scheduler = told.processor.scheduler
    while count < num_requests or scheduler.has_pending_requests():
        if count < num_requests and chance.random() < 0.6:
            prompt = chance.choice(prefixes)[: chance.randrange(40)] + [chance.randrange(8, 96) for _ in range(6)]
            told.manager.add_request(prompt, request_id=f"r{count}", max_new_tokens=chance.randrange(1, 24))
            count += 1
        if cancels and chance.random() < 0.03 and scheduler.has_pending_requests():
            told.manager.cancel_request(chance.choice([*scheduler.active_requests, *scheduler.waiting_requests]))
        kinds |= {event.kind for event in told.step()}
    return kinds


@pytest.mark.parametrize("seed", range(3))
def test_transformers_full_attention_cache_is_published_correctly(seed: int) -> None:
    told = PublishedManager(num_blocks=24)
    kinds = run_random_requests(told, seed, 40)
    totals, events = told.state.totals, [event for frame in told.frames for event in frame.events]
    admitted = [event.number for event in events if event.kind == "admitted"]
    assert len(admitted) == len(set(admitted)) == totals["admitted"]
    assert 30 < totals["finished"] <= totals["admitted"] <= 40 == totals["finished"] + totals["aborted"]
    assert kinds == {"admitted", "resumed", "preempted", "evicted", "finished", "aborted"}


class PlainPairs:
    """Replaces transformers' ContinuousBatchingAsyncIOs, which needs streams of a device: batches are prepared one
    ahead, and tokens are random.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self.pairs, self.current = (make(), make()), 0
        self.compute_stream, self.random = None, random.Random(5)

    def prepare_batch_tensors(self, **options: Any) -> None:
        self.pairs[self.current].prepare_batch_tensors(**options)

    def run(self, model: Any) -> None:
        self.current = 1 - self.current

    def prepare_batch_update(self) -> tuple[list[Any], list[int], None]:
        batch = self.pairs[self.current].requests_in_batch
        return batch, [self.random.randrange(7, 96) for each in batch if each.has_new_token], None


@pytest.mark.parametrize("kind", ["full", "window"])
def test_batches_prepared_ahead_are_published_correctly(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.generation.continuous_batching import continuous_api

    plain = continuous_api.ContinuousBatchingIOs
    monkeypatch.setattr(
        continuous_api, "ContinuousBatchingAsyncIOs", lambda **options: PlainPairs(lambda: plain(**options))
    )
    told = PublishedManager(kind, num_blocks=24, use_async_batching=True)
    monkeypatch.setattr(told.processor, "_generation_step", told.processor.inputs_and_outputs.run)
    # cancelling a request of a batch that is ahead ends transformers' loop with a KeyError in mark_complete_blocks
    assert run_random_requests(told, 3, 40, cancels=False) >= {"admitted", "resumed", "preempted", "finished"}


def test_offloaded_blocks_are_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *sizes, pin_memory=False, **options: empty(*sizes, **options))
    told = PublishedManager(num_blocks=24, cpu_offload_space=0.001)
    run_random_requests(told, 4, 40)
    events = [event for frame in told.frames for event in frame.events]
    preempted = next(event for event in events if event.kind == "preempted")
    assert "swapped to a lower tier" in preempted.cause
    resumed = next(event for event in events if event.kind == "resumed")
    assert "loaded from lower tiers" in resumed.cause
    assert told.state.totals["swapped_blocks"] >= told.state.totals["loaded_blocks"] > 0


def test_forks_share_the_blocks_of_their_parent() -> None:
    told = PublishedManager(num_blocks=60, num_return_sequences=3)
    told.manager.add_request(list(range(10, 31)), "a", max_new_tokens=6)
    while told.state.totals["finished"] < 3:
        told.step()
    forks = [event for frame in told.frames for event in frame.events if event.number > 1 and event.kind == "admitted"]
    assert [(event.number, event.other, event.num_blocks) for event in forks] == [(2, 1, 5), (3, 1, 5)]
    assert "forked from request #1" in forks[0].cause


@pytest.mark.parametrize("seed", range(3))
def test_transformers_sliding_window_cache_is_published_correctly(seed: int) -> None:
    told = PublishedManager("window", num_blocks=24)
    assert [(each.kind, each.window, each.num_layers) for each in told.hello.cache.groups] == [
        ("window", 10, 3),
        ("full", 0, 2),
    ]
    kinds = run_random_requests(told, seed, 40)
    assert kinds >= {"admitted", "resumed", "preempted", "finished"}


def test_rows_of_transformers_window_blocks_are_in_the_order_of_memory() -> None:
    told = PublishedManager("window", num_blocks=24)
    cache = told.processor.cache
    assert (told.rows.blocks_per_sector, told.rows.per_sector) == ((2, 3), 3)
    for group, allocator in enumerate(cache.cache_allocators.values()):
        for block in range(allocator.num_blocks):
            (row,) = told.rows.of_blocks(group, [block])
            sector, offset = divmod(block * allocator.bytes_per_block, cache.bytes_per_sector)
            assert divmod(row, 3) == (sector, offset // allocator.bytes_per_block)


@pytest.mark.parametrize("kind", ["full", "window"])
def test_tokens_of_transformers_blocks_are_known_while_running_and_cached(kind: str) -> None:
    told, chance, num_known = PublishedManager(kind, num_blocks=60), random.Random(2), 0
    for count in range(6):
        told.manager.add_request([chance.randrange(8, 96) for _ in range(11)], f"r{count}", max_new_tokens=14)
    told.step()
    while told.processor.has_pending_requests():
        for request_id, theirs in told.processor.scheduler.active_requests.items():
            text, computed = theirs.initial_tokens + theirs.generated_tokens, theirs.position_offset
            for group, allocator in enumerate(told.processor.cache.cache_allocators.values()):
                window = getattr(allocator, "sliding_window", 10**6)
                table = told.rows.of_blocks(group, allocator.block_table[request_id])
                for place, content in enumerate(told.translator.contents(table)):
                    slots = [(content.start + at) % window for at in range(len(content.token_ids))]
                    assert slots == list(range(place * SIZE, place * SIZE + len(slots)))
                    assert list(content.token_ids) == text[content.start : content.start + len(slots)]
                    assert not slots or max(0, computed - window) <= content.start <= computed - len(slots)
                    num_known += len(slots)
        told.step()
    assert num_known > 500
    if kind == "full":
        (cached, *_) = np.flatnonzero(told.mirror.ledger.state == BlockState.CACHED).tolist()
        assert len(told.translator.contents([cached])[0].token_ids) == SIZE


def test_watching_transformers_can_begin_while_requests_run() -> None:
    for kind in ("full", "window"):
        told = PublishedManager(kind, num_blocks=24)
        chance = random.Random(1)
        told.hooks.remove()
        for count in range(12):
            told.manager.add_request([chance.randrange(8, 96) for _ in range(20)], f"first{count}", max_new_tokens=9)
        for _ in range(20):
            told.manager._generation_loop_body(told.processor, False)
        assert told.processor.has_pending_requests()
        told.hooks.is_enabled = True
        told.begin(CacheState(told.hello))
        told.publish_notes()
        run_random_requests(told, 2, 20)
        assert told.state.totals["finished"] > 20


def test_reset_for_a_next_session_ends_requests_and_keeps_prefixes() -> None:
    told = PublishedManager(num_blocks=60)
    prompt = list(range(10, 40))
    told.manager.add_request(prompt, "a", max_new_tokens=20)
    told.manager.add_request(prompt[::-1], "b", max_new_tokens=2)
    while not told.state.totals["finished"]:
        told.step()
    assert told.manager._create_batch_processor() is told.processor
    (aborted,) = told.publish_notes()
    assert "the generation loop began anew; " in aborted.cause
    assert aborted.num_blocks == 8
    told.manager.add_request(prompt, "c", max_new_tokens=2)
    (admitted,) = told.step()
    assert admitted.num_tokens == 28
    told.processor.cache.reset()
    told.recorder.flush()
