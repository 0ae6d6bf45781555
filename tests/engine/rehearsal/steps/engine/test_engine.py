"""A whole engine on an emulated GPU: from weight files to tokens, with graphs, swaps and tiers."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.rehearsal.steps.engine.conftest import GIB, SIZES, UnusedGpuMemory, storage_of
from torch.utils._python_dispatch import TorchDispatchMode

from kvscope_engine import Engine, EngineConfig, components, memory_guard
from kvscope_engine.components import NO_MEMORY_FOR_PIECEWISE_GRAPHS
from kvscope_engine.model.batch_invariance.fixed_tiles import GPU_TILE_TOKENS
from kvscope_engine.model.cpu_offload import streaming
from kvscope_engine.model.cuda_graphs import capture_failures
from kvscope_engine.model.device_memory import gpu_register, memory_watch
from kvscope_engine.model.device_memory.gpu_register import GpuRegister, promised_bytes
from kvscope_engine.model.layers.lora import lora_adapters
from kvscope_engine.model.layers.lora.peft_folder import AdapterWeights, Delta
from kvscope_engine.model.loader.model_loader import load_model
from kvscope_engine.policy.step_plan import StepPlan
from kvscope_telemetry.engine_config import LoraModule
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.commands import Submit
from kvscope_telemetry.messages.sampling_params import SamplingParams

Start = Callable[..., Engine]
SWAPPING = {"num_gpu_blocks_override": 8, "preemption": "swap", "host_kv_memory_bytes": 1 << 20}
"""A pool in which three requests of 37 + 40 tokens (15 blocks of 16) need swaps."""

PREFILL = "paged_prefill_attention"


@dataclass
class StepTransfers:
    """Transfers of one step between host and device."""

    up: int
    down: int
    replays: int
    tier_up: int
    tier_down: int
    num_waited: int
    waits: int


def serve(
    engine: Engine,
    lanes: Any,
    fake_gpu: Any,
    rounds: int = 1,
    num_tokens: int = 40,
    *,
    first: int = 0,
    adapters: tuple[str, ...] = ("", "", ""),
) -> Iterator[StepTransfers]:
    """Run three requests step by step, then again with other prompts.

    With async scheduling, the first call launches two steps and the last none.
    """
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    for number in range(first, first + 3 * rounds):
        prompt = tuple(range(3 + 40 * number, 40 + 40 * number))
        adapter = adapters[number % 3]
        engine.submit(Submit(request_id=f"r{number}", prompt_token_ids=prompt, sampling=sampling, adapter=adapter))
        if number % 3 < 2:
            continue
        while engine.has_unfinished:
            lanes.clear()
            fake_gpu.seen.clear()
            engine.step()
            tier_up, tier_down = (lanes.copied.count(("copy", way)) for way in ("up", "down"))
            seen = fake_gpu.seen
            yield StepTransfers(
                lanes.copied.count(("compute", "up")),
                seen.read_backs - tier_down,
                seen.replays,
                tier_up,
                tier_down,
                lanes.num_waited,
                seen.waits,
            )


def check_that_graphs_read_nothing_that_moves(engine: Engine, lanes: Any) -> None:
    """Check that whatever a graph reads, except its own tensors, stays at its address as long as the graph exists."""
    parts: Any = engine.components
    runner, module = parts.runner, parts.loaded.module
    kept = [*held(module), *module.parameters(), *module.buffers()]
    kept += [*parts.storage.block_tensors, *parts.storage.rows[1:3]]
    kept += [runner._buffer._on_device, runner._graphs._logits, *runner._graphs._tables]
    known = set(map(storage_of, kept))
    assert lanes.read_by_graphs, "something was captured"
    assert lanes.read_by_graphs <= known, len(lanes.read_by_graphs - known)
    for tensor in parts.storage.block_tensors:
        assert storage_of(tensor) in lanes.read_by_graphs, "scales too"


@pytest.mark.parametrize("kv_cache_dtype", ["auto", pytest.param("int8", marks=pytest.mark.storm)])
def test_engine_on_an_emulated_gpu_serves_with_graphs_and_overlapping_steps(
    start_engine: Start, lanes: Any, fake_gpu: Any, kv_cache_dtype: str
) -> None:
    engine = start_engine(kv_cache_dtype=kv_cache_dtype)
    assert engine.notes == (), "graphs were captured"
    assert engine.memory_plan == "", "the pool size was given explicitly"
    assert engine.memory().step_bytes == -1
    check_that_graphs_read_nothing_that_moves(engine, lanes)
    known = set(fake_gpu.seen.compiled)
    steps = list(serve(engine, lanes, fake_gpu))
    assert fake_gpu.seen.compiled == known, "nothing is compiled in service"
    assert [(step.up, step.down) for step in steps] == [(2, 2), *[(1, 1)] * (len(steps) - 2), (0, 0)]
    assert [(step.num_waited, step.waits) for step in steps] == [(0, 1)] * len(steps), "one result per step"
    assert sum(step.replays for step in steps) == 3 + len(steps) - 1, (
        "the prefill has one graph more than there are layers"
    )
    assert (engine.overlaps.steps, engine.overlaps.overlapped) == (len(steps), len(steps) - 1)


def test_engine_with_mla_latents_starts_and_serves(start_engine: Any, lanes: Any, fake_gpu: Any) -> None:
    """It also swaps latents, like keys and values."""
    sizes = {"q_lora_rank": 64, "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64}
    folder = start_engine.checkpoint("youtu", num_key_value_heads=4, head_dim=32, **sizes)
    engine = start_engine(model=str(folder), dtype="bfloat16", **SWAPPING)
    assert engine.hello.cache.block_bytes == 2 * 16 * (128 + 32) * 2
    assert [group.kind for group in engine.hello.cache.groups] == ["latent"]
    check_that_graphs_read_nothing_that_moves(engine, lanes)
    known = set(fake_gpu.seen.compiled)
    steps = list(serve(engine, lanes, fake_gpu))
    assert fake_gpu.seen.compiled == known, "nothing is compiled in service"
    assert sum(step.tier_down for step in steps) > 0
    assert sum(step.tier_up for step in steps) > 0
    assert sum(step.replays for step in steps) > len(steps) // 2


@pytest.mark.parametrize(
    "names", [pytest.param(("sql", "sql", "sql"), marks=pytest.mark.storm), ("sql", "", "python")], ids=str
)
def test_steps_with_adapters_run_without_graphs(
    start_engine: Start, lanes: Any, fake_gpu: Any, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]
) -> None:
    """There is one upload and one read-back as always, and nothing is compiled. A step without adapters replays its
    graph.
    """
    size = SIZES["hidden_size"]
    deltas = {"model.layers.0.self_attn.o_proj": Delta(torch.zeros(2, size), torch.zeros(size, 2))}
    monkeypatch.setattr(lora_adapters, "read_adapter", lambda name, *_: AdapterWeights(deltas, 2, name.encode()))
    modules = tuple(LoraModule(name=name, path="there") for name in ("sql", "python"))
    engine = start_engine(lora_modules=modules)
    assert engine.notes == (), "graphs were captured"
    known = set(fake_gpu.seen.compiled)
    steps = list(serve(engine, lanes, fake_gpu, adapters=names))
    assert fake_gpu.seen.compiled == known, "nothing is compiled in service"
    assert sum(step.replays for step in steps) == 0
    assert [(step.down, step.waits) for step in steps[1:-1]] == [(1, 1)] * (len(steps) - 2), "one result per step"
    assert sum(step.replays for step in serve(engine, lanes, fake_gpu, first=3)) > 0


def test_failed_capture_in_service_is_an_event_and_an_immediate_notice(
    start_engine: Any, lanes: Any, fake_gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    published: list[Any] = []
    config = EngineConfig(model=str(start_engine.folder), device="cuda", num_gpu_blocks_override=64, max_num_seqs=8)
    engine = Engine(config, on_note=notes.append, publish=published.append)

    def capture(graph: Any, **options: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(capture_failures, "FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    assert engine.components.runner.release_graphs()
    assert sum(step.replays for step in serve(engine, lanes, fake_gpu)) == 0
    given_back, *failed = notes
    assert given_back.startswith("a step failed twice")
    assert all(note.startswith("no CUDA graph for batches of ") for note in failed)
    assert failed
    assert engine.notes == tuple(notes)
    events = [event for message in published for event in getattr(message, "events", ())]
    assert [event.cause for event in events if event.kind == "note"] == notes
    engine.close()


def test_steps_do_not_overlap_without_async_scheduling(start_engine: Start, lanes: Any, fake_gpu: Any) -> None:
    engine = start_engine(async_scheduling=False)
    steps = list(serve(engine, lanes, fake_gpu))
    assert [(step.up, step.down, step.num_waited, step.waits) for step in steps] == [(1, 1, 0, 1)] * len(steps)
    assert engine.overlaps.overlapped == 0


@pytest.mark.parametrize(
    ("share", "asked", "are_there"), [(0.08, None, False), (0.08, True, True), (0.2, None, True), (0.2, False, False)]
)
@pytest.mark.storm({"share": 0.2})
def test_prefill_graphs_are_left_out_if_blocks_need_the_memory(
    start_engine: Start, lanes: Any, fake_gpu: Any, share: float, asked: bool | None, are_there: bool
) -> None:
    """1.9 GiB are too little and 4.8 are not. If the user asks for the graphs they are captured; if the user disables
    them there is no notice.
    """
    engine = start_engine(num_gpu_blocks_override=None, gpu_memory_utilization=share, piecewise_graphs=asked)
    left_out = [note for note in engine.notes if note == NO_MEMORY_FOR_PIECEWISE_GRAPHS]
    assert len(left_out) == (asked is None and not are_there)
    plan = engine.components.plan
    assert plan is not None
    assert bool(plan.reserves.piecewise_graphs) == are_there
    steps = list(serve(engine, lanes, fake_gpu))
    assert (sum(step.replays for step in steps) > len(steps) - 1) == are_there


def test_memory_plan_text_of_an_engine_names_all_its_parts(start_engine: Start) -> None:
    engine = start_engine(num_gpu_blocks_override=None, gpu_memory_utilization=0.08)
    said, memory = engine.memory_plan, engine.memory()
    assert said.startswith("memory of cuda:0: 1.9 GiB of 24.0 GiB may be used (--gpu-memory-utilization 0.08): ")
    assert all(part in said for part in ("activations 1.0 MiB", "graphs ", "KV cache ", "others 1.0 GiB"))
    assert memory.step_bytes > 1 << 20
    assert memory.graphs_bytes > 256 << 20
    assert memory.staging_bytes == 0
    assert memory.kv_bytes > 1 << 28


def test_loading_holds_each_weight_once(start_engine: Any, ledger: Any) -> None:
    """From float32 in the files to bfloat16 on the GPU, without a second copy or a copy in float32."""
    with ledger:
        loaded = load_model(
            EngineConfig(model=str(start_engine.folder), device="cuda", dtype="bfloat16"), lambda _: None
        )
        weights = sum(tensor.nbytes for tensor in loaded.module.parameters())
        largest = max(tensor.nbytes for tensor in loaded.module.parameters())
        assert {tensor.dtype for tensor in loaded.module.parameters()} == {torch.bfloat16}
        assert weights <= ledger.held <= 1.02 * weights
        assert ledger.peak <= ledger.held + largest


def held(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield tensors that modules hold as plain attributes, directly or in fused parts."""
    for part in module.modules():
        for value in vars(part).values():
            inner = vars(value).values() if hasattr(value, "__dict__") else ()
            yield from (tensor for tensor in (value, *inner) if isinstance(tensor, torch.Tensor))


@pytest.fixture
def compared_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of elements in bitwise comparisons, which find no difference."""
    compared: list[int] = []
    monkeypatch.setattr(torch, "equal", lambda found, expected: compared.append(found.numel()) or True)  # type: ignore[func-returns-value]
    return compared


@pytest.mark.parametrize(
    "options",
    [
        SWAPPING,
        *(
            pytest.param(options, marks=pytest.mark.storm)
            for options in ({}, {"dtype": "float16", "max_num_batched_tokens": 512})
        ),
    ],
    ids=str,
)
def test_deterministic_engine_runs_tiles_of_one_shape(
    start_engine: Start, lanes: Any, fake_gpu: Any, compared_sizes: list[int], options: dict[str, Any]
) -> None:
    """Decodes run like prompts, whose attention has a single launch shape; each product has as many rows as a tile."""
    engine = start_engine(deterministic=True, **options)
    layers, rows = SIZES["num_hidden_layers"], GPU_TILE_TOKENS
    assert len(compared_sizes) == 3 * (2 * layers + 1), "keys and values of each layer, and logits"
    assert engine.hello.capabilities.deterministic
    assert engine.notes == ()
    known, launches = set(fake_gpu.seen.compiled), Counter[str]()
    products = ProductRows()
    with products:
        for step in serve(engine, lanes, fake_gpu):
            launches += fake_gpu.seen.launches
            assert step.replays == 0
    assert fake_gpu.seen.compiled == known, "nothing is compiled in service"
    assert engine.overlaps.overlapped == 0
    assert products.rows == {rows}
    assert {name for name in launches if name.startswith(("paged", "merge", "plan", "skinny"))} == {PREFILL}


class ProductRows(TorchDispatchMode):
    """Records the number of rows of products on the GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("mm", "addmm", "linear"):
            left = args[1] if func.overloadpacket.__name__ == "addmm" else args[0]
            self.rows.add(left.shape[:-1].numel())
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("compared_sizes")
def test_deterministic_engine_reserves_no_memory_for_graphs(start_engine: Start) -> None:
    engine = start_engine(deterministic=True, num_gpu_blocks_override=None, gpu_memory_utilization=0.08)
    assert engine.memory().graphs_bytes < 16 << 20, "with graphs it would be at least 256 MiB"
    assert engine.memory().kv_bytes > 1 << 28


def test_deterministic_engine_is_refused_if_results_depend_on_the_row(
    start_engine: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "equal", lambda *_: False)
    with pytest.raises(BadInput, match="the results of layer 0 for a token depend on the other tokens in the tile"):
        start_engine(deterministic=True)


def test_deterministic_engine_is_refused_with_tunable_ops(start_engine: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_TUNABLEOP_ENABLED", "1")
    with pytest.raises(BadInput, match="PYTORCH_TUNABLEOP_ENABLED"):
        start_engine(deterministic=True)


def test_swaps_run_concurrently_with_steps(start_engine: Start, lanes: Any, fake_gpu: Any) -> None:
    """They use their own stream and pinned memory: the host never waits, and only block numbers are uploaded. The test
    uses an 8-bit cache, whose scales are swapped as well; `test_only_the_disk_tier_waits_for_copies` uses an
    unquantized one.
    """
    engine = start_engine(kv_cache_dtype="fp8", **SWAPPING)
    known = set(fake_gpu.seen.compiled)
    steps = list(serve(engine, lanes, fake_gpu))
    stats = engine.components.mover.stats
    assert stats is not None
    assert stats.saved_bytes > 0
    assert stats.loaded_bytes > 0
    assert fake_gpu.seen.compiled == known, "nothing is compiled in service"
    assert sum(step.down for step in steps) == engine.step_count
    assert engine.overlaps.overlapped > 0
    for step in steps:
        assert step.down <= 2
        assert step.num_waited == 0
        assert step.waits <= 1, "for a result, unless the tiers have seen that it is there"
        assert step.up <= step.down + step.tier_up + step.tier_down, "the steps' own, and the numbers of the blocks"
    assert sum(step.tier_up for step in steps) > 0
    assert sum(step.tier_down for step in steps) > 0
    assert (lanes.copy.waits, lanes.compute.waits) == (0, 0)


def test_only_the_disk_tier_waits_for_copies(start_engine: Start, lanes: Any, fake_gpu: Any) -> None:
    """Data must have arrived before it is written to the file: at most one wait per step, and never for the compute
    stream.
    """
    engine = start_engine(**SWAPPING | {"host_kv_memory_bytes": 6 * 16384, "disk_kv_memory_bytes": 1 << 20})
    waits = []
    for step in serve(engine, lanes, fake_gpu, rounds=2):
        assert step.down <= 2
        assert step.num_waited == 0
        waits.append(lanes.copy.waits)
        assert lanes.compute.waits == 0
    stats = engine.components.mover.stats
    assert stats is not None
    assert stats.disk_written_bytes > 0
    assert sum(waits) > 0
    assert max(waits) <= 1


def test_streamed_weights_are_uploaded_concurrently_with_steps(
    start_engine: Start, lanes: Any, fake_gpu: Any, tmp_path: Path
) -> None:
    """They use the copy stream and pinned memory, each layer once per step; the host never waits, and nothing else is
    uploaded.
    """
    from transformers import AutoConfig

    sizes = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 5}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "eos_token_id": 2}
    AutoConfig.for_model("llama", **sizes, **heads).to_json_file(tmp_path / "config.json", use_diff=False)
    layer_bytes = 2 * (2 * 256 * 256 + 2 * 128 * 256 + 3 * 256 * 512)
    engine = start_engine(model=f"dummy:{tmp_path}/config.json", cpu_offload_gb=3.5 * layer_bytes / (1 << 30))
    assert [note for note in engine.notes if "CUDA graphs" in note] == [streaming.EAGER_NOTE]
    assert engine.memory().host_weights_bytes == 4 * layer_bytes
    known = set(fake_gpu.seen.compiled)
    steps = list(serve(engine, lanes, fake_gpu, num_tokens=6))
    assert fake_gpu.seen.compiled == known, "nothing is compiled in service"
    assert [(step.up, step.down) for step in steps] == [(2, 2), *[(1, 1)] * (len(steps) - 2), (0, 0)]
    assert [step.tier_up for step in steps] == [8, *[4] * (len(steps) - 2), 0]
    assert [(step.num_waited, step.waits) for step in steps] == [(0, 1)] * len(steps), "one result per step"
    assert sum(step.replays for step in steps) == 0


def test_start_on_an_unmeasured_gpu_reports_the_chosen_kernels(
    start_engine: Start, lanes: Any, fake_gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU of another generation; nothing is compared here, so that no kernel is chosen."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 9))
    engine = start_engine()
    (note,) = engine.notes
    assert note.startswith("products of one row and of 2 to 16, our kernels' time over cuBLAS's: ")
    assert note.count("not run and not run") == note.count(" x ") > 3
    known = set(fake_gpu.seen.compiled)
    assert list(serve(engine, lanes, fake_gpu, num_tokens=4))
    assert fake_gpu.seen.compiled == known, "nothing is compiled in service"


def test_memory_taken_by_other_programs_reduces_steps_and_graphs_but_loses_no_request(
    start_engine: Any, lanes: Any, fake_gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything is restored afterwards, with a notice for each change."""
    monkeypatch.setattr(memory_guard, "POLL_INTERVAL_S", 0.0)
    monkeypatch.setattr(memory_watch, "RAISE_AFTER_S", 0.0)
    monkeypatch.setattr(memory_guard, "_run_in_thread", lambda work: work())
    monkeypatch.setattr(capture_failures, "FIRST_PAUSE_S", 0.0)
    engine = start_engine(
        num_gpu_blocks_override=None, max_num_seqs=8, max_num_batched_tokens=64, gpu_memory_utilization=0.2
    )
    parts, others = engine.components, 1 * GIB
    plan = parts.plan
    assert plan is not None
    ours = plan.weights + plan.kv
    released: list[Any] = []
    monkeypatch.setattr(UnusedGpuMemory, "reserved_bytes", lambda card: ours)
    monkeypatch.setattr(UnusedGpuMemory, "free_bytes", lambda card: card.total_bytes - ours - others)
    monkeypatch.setattr(UnusedGpuMemory, "empty_cache", lambda card: released.append(card))
    sampling = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    number, sizes, launch = 0, list[int](), parts.runner.launch

    def watched(plan: StepPlan, after: Any = None) -> Any:
        sizes.append(plan.num_tokens)
        return launch(plan, after)

    monkeypatch.setattr(parts.runner, "launch", watched)

    def largest_step_and_replays() -> tuple[int, int]:
        nonlocal number
        number += 1
        prompt = tuple(range(3 + number, 103 + number))
        engine.submit(Submit(request_id=f"p{number}", prompt_token_ids=prompt, sampling=sampling))
        reason = ""
        sizes.clear()
        fake_gpu.seen.clear()
        while engine.has_unfinished:
            for said in engine.step():
                reason = getattr(said, "finish_reason", reason)
        assert reason == "length"
        return max(sizes), fake_gpu.seen.replays

    most, replays = largest_step_and_replays()
    assert most == 64
    others = UnusedGpuMemory.total_bytes - ours
    assert largest_step_and_replays() == (16, 0), "all that can be given up"
    assert released
    assert len(engine.notes) == 1
    assert "now hold" in engine.notes[0] or "or the driver hold" in engine.notes[0]
    assert "all steps without CUDA graphs" in engine.notes[0]
    assert engine.while_idle(), "it looks whether they still have it"
    assert largest_step_and_replays() == (16, 0)
    others = 1 * GIB
    while engine.while_idle():
        pass
    assert largest_step_and_replays() == (most, replays)
    assert engine.notes[-1] == "the GPU's memory is free again: steps compute up to 64 tokens, as planned"
    assert parts.storage.num_blocks == plan.kv // parts.storage.block_bytes, "the pool must not change"


def test_engines_on_one_gpu_start_one_after_another(
    start_engine: Any, lanes: Any, fake_gpu: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An engine holds its turn from the first look at free memory until it has allocated all but the memory of the
    largest step, which it promises to others.
    """
    monkeypatch.setattr(gpu_register, "default_folder", lambda: tmp_path)
    monkeypatch.setattr(components, "gpu_uuids", lambda count: ("aaaa",) * count)
    has_turn: list[bool] = []

    def look(name: str) -> None:
        original = getattr(components, name)

        def evaluated(*args: Any, **options: Any) -> Any:
            other = GpuRegister(tmp_path)
            has_turn.append(other.await_turn(("aaaa",), lambda whom: None, 0.0))
            other.close()
            return original(*args, **options)

        monkeypatch.setattr(components, name, evaluated)

    look("load_model")
    for name in ("pool_size", "storage_for_model", "ModelRunner"):
        look(name)
    engine = start_engine(num_gpu_blocks_override=None, gpu_memory_utilization=0.2)
    assert has_turn == [True, False, False, False]
    other = GpuRegister(tmp_path)
    assert other.await_turn(("aaaa",), lambda whom: None, 0.0)
    other.close()
    monkeypatch.setattr(os, "getpid", lambda: 1)  # as seen by another process
    plan = engine.components.plan
    assert plan is not None
    taken = engine.components.storage.num_bytes
    assert promised_bytes("aaaa") == plan.needed + taken, "torch allocates nothing in this emulation"
    engine.close()
    assert promised_bytes("aaaa") == 0


def test_failed_start_releases_the_turn_of_the_gpu(
    start_engine: Any, lanes: Any, fake_gpu: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu_register, "default_folder", lambda: tmp_path)
    monkeypatch.setattr(components, "gpu_uuids", lambda count: ("aaaa",) * count)
    with pytest.raises(BadInput, match="--num-gpu-blocks-override asks for"):
        start_engine(num_gpu_blocks_override=1 << 30)
    assert GpuRegister(tmp_path).await_turn(("aaaa",), lambda whom: None, 0.0)
