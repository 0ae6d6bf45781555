"""Builds an engine's components from its configuration: model, block pool, scheduler, KV storage, runner.

This is the only module that imports all of them. The import contracts in `pyproject.toml` limit what each component may
import.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec
import torch
from msgspec.structs import replace as replace_fields

from kvscope_engine.cache_events import shared_salt
from kvscope_engine.memory_guard import MemoryBudget, MemoryGuard
from kvscope_engine.model.batch_invariance.tile_check import proven_tiles
from kvscope_engine.model.cpu_offload.streaming import close_streaming, streamed_weights
from kvscope_engine.model.device_memory.gpu_register import GpuRegister
from kvscope_engine.model.device_memory.memory_plan import MemoryPlan
from kvscope_engine.model.device_memory.memory_watch import step_costs
from kvscope_engine.model.device_memory.paging import NOTE as PAGING_NOTE
from kvscope_engine.model.device_memory.paging import PagingWatch, is_wsl
from kvscope_engine.model.device_memory.shortage_report import Shortage, shortage_report
from kvscope_engine.model.device_memory.torch_allocator import AllocatorUse, allocator_use
from kvscope_engine.model.distributed.shard import check_fused
from kvscope_engine.model.executor.leader import Leader, config_of_rank, lead_ranks, rank_of
from kvscope_engine.model.executor.rank_messages import RankJoined
from kvscope_engine.model.kv_cache.kv_offload.block_mover import BlockMover
from kvscope_engine.model.kv_cache.kv_offload.tier_builder import make_tier_mover
from kvscope_engine.model.kv_cache.kv_storage import MIB, KVStorage, LayerShape, block_bytes
from kvscope_engine.model.kv_cache.layer_groups import LayerGroup
from kvscope_engine.model.kv_cache.state_storage import StateStorage
from kvscope_engine.model.layers.fused.round_linears import watch_fp8_failures
from kvscope_engine.model.layers.lora.lora_adapters import LoraAdapters, adapted_layers, read_configured_adapters
from kvscope_engine.model.layers.lora.lora_slots import all_slots_used
from kvscope_engine.model.layers.own_forward import own_forward, states_of
from kvscope_engine.model.layers.recurrent.recurrent_layers import recurrent_layers
from kvscope_engine.model.layers.weight_bytes import weights_by_part
from kvscope_engine.model.loaded_model import LoadedModel
from kvscope_engine.model.loader.download.progress import WAIT
from kvscope_engine.model.loader.model_loader import load_model
from kvscope_engine.model.loader.supported_models import Blueprint, check_options_with_states, refuse_options
from kvscope_engine.model.platforms.cpu_threads import CpuThreads, default_num_threads
from kvscope_engine.model.platforms.device import free_bytes, gpu_uuids
from kvscope_engine.model.runner.attention_backend import attention_choice
from kvscope_engine.model.runner.kv_cache_spec import expanded_layers, groups_of_model, storage_for_model
from kvscope_engine.model.runner.model_runner import ModelRunner
from kvscope_engine.model.runner.pool_size import PoolSize, pool_size
from kvscope_engine.model.runner.product_choice import choose_matmul_kernels
from kvscope_engine.model.runner.runner_config import RunnerConfig
from kvscope_engine.model.runner.step_memory import logits_width, max_batched_tokens
from kvscope_engine.model.runner.virtual_cache import VirtualCache, virtual_cache
from kvscope_engine.model.verification.fuse import FusedCounts
from kvscope_engine.model.verification.hook_check import check_hook
from kvscope_engine.model.verification.passed_checks import PassedChecks
from kvscope_engine.model.verification.ready_to_run import make_ready_to_run
from kvscope_engine.policy.allocation.allocators import fitting_model_len, make_allocation, make_pool
from kvscope_engine.policy.kv_cache.block_pool import BlockPool
from kvscope_engine.policy.kv_cache.cache_log import CacheLog
from kvscope_engine.policy.scheduling.scheduler import Scheduler, SchedulerConfig
from kvscope_engine.policy.spec_decode.drafter import Drafter
from kvscope_engine.policy.state_pool import StatePool, max_recorded_tokens
from kvscope_engine.policy.step_plan import StepPlan, StepResult
from kvscope_engine.roofline.device_limits import device_limits
from kvscope_engine.roofline.model_costs import model_work
from kvscope_engine.roofline.step_costs import ModelWork
from kvscope_engine.structured_output.structured_output_manager import StructuredOutputManager
from kvscope_engine.submission import SubmissionLimits
from kvscope_kernels.third_party_attention.library_choice import LibraryChoice
from kvscope_kernels.tuning.tile_table import describe_user_table
from kvscope_telemetry.engine_config import EngineConfig
from kvscope_telemetry.ledger import Tier
from kvscope_telemetry.messages.capabilities import Capabilities
from kvscope_telemetry.messages.telemetry import (
    CacheInfo,
    DeviceInfo,
    Hello,
    KVGroup,
    MemoryBreakdown,
    ModuleBytes,
    Progress,
    RankMemory,
    Work,
)
from kvscope_telemetry.program_version import program_version
from kvscope_telemetry.transport.host_id import host_id

SAVE_PREFIXES_TIMEOUT_S = 5.0
"""Maximum seconds that closing an engine spends writing cached blocks to the disk tier's file, if that file is
kept for the next start.
"""


NO_MEMORY_FOR_PIECEWISE_GRAPHS: Final = (
    "no CUDA graphs for steps with prefills, which run slower: they would leave too little of the GPU's memory for the"
    " KV cache"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineComponents:
    """Components of one engine, created by `build_components`."""

    epoch: int
    loaded: LoadedModel
    storage: KVStorage
    states: StateStorage | None
    """Storage of recurrent states; None for a model without recurrent layers."""
    pool: BlockPool
    scheduler: Scheduler
    runner: ModelRunner
    hello: Hello
    mover: BlockMover | None
    """Copies blocks between the tiers; None without lower tiers."""
    notes: list[str]
    """Deviations from the configuration, one line each. If the runner disables a feature later, it appends a line."""
    threads: CpuThreads | None
    """CPU threads that compute a step; None on a GPU."""
    plan: MemoryPlan | None
    """Plan of the GPU's memory; None on a CPU, and if the pool's size was configured."""
    structured_output: StructuredOutputManager | None
    """Compiler and cache of grammars for structured output; None for a model without a tokenizer."""
    leader: Leader | None
    """Connection to the other tensor-parallel ranks; None if there is a single rank."""
    overlaps: bool
    """Whether async scheduling is enabled: a step is launched while the previous one runs."""
    utilization: float
    work: ModelWork | None
    """Cost model for the FLOPs and bytes of a step; None if this engine does not report them."""
    modules: tuple[ModuleBytes, ...]
    lora: LoraAdapters | None
    register: GpuRegister
    """Register of this user's engines on the same GPUs, with the memory that each has planned but not allocated yet."""
    guard: MemoryGuard | None
    """Limits steps while other programs hold too much of the GPU's memory; None on a CPU."""

    @property
    def limits(self) -> SubmissionLimits:
        return SubmissionLimits(self.loaded.max_model_len, self.scheduler.max_request_tokens)

    def memory_breakdown(self) -> MemoryBreakdown:
        """Return the bytes in use by purpose. A value is -1 if it is unknown."""
        resident_bytes = self.storage.resident_bytes()
        states_bytes = self.states.num_bytes if self.states is not None else 0
        torch_kv_bytes = self.storage.num_bytes if resident_bytes < 0 else 0  # pages are not allocated by torch
        use = allocator_use(self.loaded.device)
        return MemoryBreakdown(
            epoch=self.epoch,
            time_ns=time.monotonic_ns(),
            weights_bytes=self.runner.weights_bytes,
            kv_bytes=self.storage.num_bytes + states_bytes,
            kv_resident_bytes=resident_bytes,
            workspace_bytes=_workspace_bytes(use, self.runner.weights_bytes, torch_kv_bytes + states_bytes),
            step_bytes=self.plan.step if self.plan is not None else -1,
            graphs_bytes=self.plan.graphs if self.plan is not None else -1,
            staging_bytes=self.plan.staging if self.plan is not None else -1,
            modules=self.modules,
            allocated_bytes=use.allocated,
            reserved_bytes=use.reserved,
            split_bytes=use.split,
            peak_bytes=use.peak,
            ranks=self._ranks(),
            host_weights_bytes=self._host_weights_bytes(),
        )

    @property
    def copied_seconds(self) -> float:
        if self.mover is None:
            return 0.0
        stats = self.mover.stats
        return stats.saved_seconds + stats.loaded_seconds + stats.disk_read_seconds

    def work_of(self, plan: StepPlan, result: StepResult, copied_s: float) -> Work:
        """Return the work of a completed step: FLOPs, bytes, CUDA graph and times.

        `copied_s`: seconds of copying between tiers since the previous step.
        """
        work = self.work.work_of_plan(plan) if self.work is not None else Work()
        return replace_fields(
            work,
            graph_size=result.graph_size,
            graph_tokens=result.graph_tokens,
            wait_ns=result.wait_ns,
            launches=result.launches,
            copy_ns=max(round(copied_s * 1e9), 0),
        )

    def explain_shortage(self, plan: StepPlan) -> str:
        """Describe why a step ran out of memory, and name the option that would have prevented it."""
        device, is_gpu = self.loaded.device, self.loaded.device.type == "cuda"
        free, total = torch.cuda.mem_get_info(device) if is_gpu else (free_bytes(device), -1)
        return shortage_report(
            Shortage(
                memory=self.memory_breakdown(),
                total=total,
                free=free,
                others_planned=self.plan.others if self.plan is not None else -1,
                num_tokens=plan.num_tokens,
                num_requests=len(plan.scheduled),
                utilization=self.utilization if is_gpu else 0.0,
                grown_holders=self.guard.grown_holders_text() if self.guard is not None else "",
            )
        )

    def _host_weights_bytes(self) -> int:
        streamed = streamed_weights(self.loaded.module)
        return streamed.num_bytes if streamed is not None else 0

    def _ranks(self) -> tuple[RankMemory, ...]:
        if self.leader is None:
            return ()
        device = self.hello.device
        first = RankJoined(weights_bytes=self.runner.weights_bytes, kv_bytes=self.storage.num_bytes, device=device.name)
        return self.leader.rank_memory(first, device.uuids)

    def close(self) -> EngineComponents:
        """Close all components. Returns a copy without tensors, from which counters can still be read."""
        self.register.close()
        self.runner.close()
        if self.structured_output is not None:
            self.structured_output.close()
        if self.leader is not None:
            self.leader.close()
        if self.threads is not None:
            self.threads.close()
        if self.mover is not None:
            if self.mover.is_persistent:
                deadline_s = time.monotonic() + SAVE_PREFIXES_TIMEOUT_S
                self.scheduler.save_prefixes_to_disk(lambda: time.monotonic() < deadline_s)
            failure = f"the disk tier was given up: {self.mover.failure}" if self.mover.failure else ""
            self.notes.extend(filter(None, (failure, self.mover.close())))
        self.storage.close()
        if self.states is not None:
            self.states.close()
        close_streaming(self.loaded.module)
        return replace(self, loaded=replace(self.loaded, module=torch.nn.Module()))


def build_components(
    config: EngineConfig, epoch: int, progress: Callable[[Progress], None], cache_log: CacheLog | None = None
) -> EngineComponents:
    """Load the model and build all components around it. Changes of the prefix cache are logged in `cache_log`.

    The order matters for memory: fusing frees the separate weights before a step is profiled; the pool gets the memory
    that the profiled step leaves; CUDA graphs are captured last, over allocated blocks, in the memory reserved for
    them.

    Raises:
        BadInput: for an unsupported model, option or adapter; nothing stays allocated.
        KvscopeError: when loading fails; nothing stays allocated.
    """
    with ExitStack() as undo:  # pages, pinned memory, files and processes are not garbage-collected as tensors are
        leader = lead_ranks(config)
        if leader is not None:
            undo.callback(leader.close)
        config = _disable_graphs_for_options(config_of_rank(config, leader))
        threads = CpuThreads(config.num_threads or (default_num_threads() if config.deterministic else None))
        register = GpuRegister()
        undo.callback(register.close)
        model = _load_ready_model(config, leader, progress, undo, register, threads)
        requested = config
        config = _disable_graphs_for_model(config, model.loaded.module)
        size = _agree_on_pool_size(config, model, leader, progress)
        if size.plan is not None:
            register.publish(size.plan.needed - size.plan.weights + max(size.plan.kv, 0))
        loaded, allocator_notes = adapt_to_allocator(config, model.loaded, size.num_blocks)
        states = _build_states(config, loaded, size, undo)
        cache = _build_cache(config, loaded, size, states, model.fingerprint, cache_log, undo, leader)
        scheduler = _build_scheduler(config, loaded, cache, states)
        # the same list object: libraries that fail later, and features that the runner disables, are appended to it
        notes = model.attention.failures
        has_pieces = config.wants_piecewise_graphs
        if has_pieces and size.plan is not None and not size.plan.reserves.piecewise_graphs:
            has_pieces = False
            notes.append(NO_MEMORY_FOR_PIECEWISE_GRAPHS)
        notes += _notes_at_start(requested, model, loaded, cache, states, allocator_notes)
        watch_fp8_failures(loaded.module, notes.append)
        runner = _build_runner(config, loaded, cache.storage, model, leader, notes, has_pieces, states)
        if loaded.device.type == "cpu":
            threads.refresh()
        runner.warm_up(progress)
        if leader is not None:
            leader.connect_ranks(loaded.module, captures=runner.captures_shared_graphs)
            if runner.captures_shared_graphs:
                progress(Progress(stage="warm up", detail="CUDA graphs of all ranks"))
                runner.capture_shared_graphs(leader)
        guard = _build_guard(config, loaded, size, cache.storage, states, scheduler, runner, register)
        register.end_turn()
        for note in notes:
            scheduler.changes.record_notice(note, time.monotonic_ns())
        tokenizer = loaded.tokenizer
        if tokenizer is not None:
            tokenizer.warm_up()
        components = EngineComponents(
            epoch=epoch,
            loaded=loaded,
            storage=cache.storage,
            states=states,
            pool=cache.pool,
            scheduler=scheduler,
            runner=runner,
            hello=_build_hello(config, epoch, loaded, cache, states, scheduler, model.attention),
            mover=cache.mover,
            notes=notes,
            threads=threads if loaded.device.type == "cpu" else None,
            plan=size.plan,
            structured_output=None
            if tokenizer is None
            else StructuredOutputManager(tokenizer, logits_width(loaded), loaded.eos_token_ids),
            leader=leader,
            overlaps=states is None and overlaps_steps(config, loaded.device),
            utilization=config.gpu_memory_utilization,
            work=model_work(loaded, cache.storage.dtype, runner.choice),
            modules=weights_by_part(loaded.module),
            lora=model.lora,
            register=register,
            guard=guard,
        )
        undo.pop_all()
    progress(Progress(stage="ready"))
    return components


@dataclass(frozen=True, slots=True)
class _ReadyModel:
    loaded: LoadedModel
    fused: FusedCounts
    attention: LibraryChoice
    products: str
    """Description of the kernels chosen for matmuls with few rows; empty if there was no choice."""
    fingerprint: str
    lora: LoraAdapters | None
    tiles: tuple[int, ...]
    """Tile sizes in tokens into which a deterministic engine divides steps; empty for other engines."""


@dataclass(frozen=True, slots=True)
class _Cache:
    storage: KVStorage
    pool: BlockPool
    mover: BlockMover | None
    virtual: VirtualCache | None
    groups: tuple[LayerGroup, ...]
    expanded: Sequence[LayerShape]
    """Shape of each layer's keys and values if MLA layers stored them instead of latents; empty if unknown."""

    def published_groups(self, states: tuple[KVGroup, ...]) -> tuple[KVGroup, ...]:
        """Return the KV groups for telemetry, followed by `states`, or () if the only group is one with full attention,
        which needs no description.
        """
        groups = (*map(self._published_group, self.groups), *states)
        return () if len(groups) == 1 and groups[0].kind == "full" else groups

    def _published_group(self, group: LayerGroup) -> KVGroup:
        layers, rule = [self.storage.layers[number] for number in group.layers], group.rule
        is_latent = bool(layers) and all(layer.latent_dim for layer in layers)
        kind, block_size, dtype = "latent" if is_latent else "full", self.pool.block_size, self.storage.dtype
        expanded = [self.expanded[number] for number in group.layers] if is_latent and self.expanded else []
        index_bytes = block_size * sum(layer.index_bytes(dtype) for layer in layers)
        kind = "indexed" if index_bytes else kind if layers else "prefixes"
        return KVGroup(
            kind="chunked" if rule.is_chunked else "window" if rule.window else kind,
            num_layers=len(layers),
            block_bytes=block_bytes(layers, block_size, dtype),
            window=rule.window,
            expanded_bytes=block_bytes(expanded, block_size, dtype),
            index_bytes=index_bytes,
        )

    def notes(self, config: EngineConfig) -> list[str]:
        if self.mover is None:
            return []
        notes = [self.mover.note] if self.mover.note else []
        if self.mover.salt is not None and config.publishes_kv_events:
            notes.append(
                "KV events use the hashes of the kept disk file, so engines with the same --seed publish different "
                "hashes"
            )
        return notes


def _notes_at_start(
    config: EngineConfig,
    model: _ReadyModel,
    loaded: LoadedModel,
    cache: _Cache,
    states: StateStorage | None,
    allocator_notes: list[str],
) -> list[str]:
    streamed = streamed_weights(loaded.module)
    return [
        *loaded.notes,
        *filter(None, (model.products, describe_user_table(loaded.device))),
        *mla_expansion_notes(loaded.module),
        *_notes_on_bias(loaded.module),
        *allocator_notes,
        *(streamed.notes if streamed is not None else ()),
        *cache.notes(config),
        *_notes_on_own_forward(config, loaded),
        *_notes_on_states(config, states, together=recurrent_layers(loaded.module).batches_decodes),
        *([PAGING_NOTE] if loaded.device.type == "cuda" and is_wsl() else []),
    ]


def _disable_graphs_for_options(config: EngineConfig) -> EngineConfig:
    """Disable CUDA graphs for streamed weights and deterministic engines, which do not support them.

    Must run before memory is planned, because the plan reserves memory for graphs.
    """
    return replace(config, enforce_eager=True) if config.cpu_offload_gb or config.deterministic else config


def _disable_graphs_for_model(config: EngineConfig, module: torch.nn.Module) -> EngineConfig:
    """Disable CUDA graphs that the model does not support.

    All graphs are disabled if transformers' own forward runs the model, if a layer adds a bias to attention scores
    (requests then run one after another), or if recurrent layers cannot decode as a batch. Other recurrent models keep
    the graphs of decode-only steps.
    """
    recurrent = recurrent_layers(module)
    has_bias = any(call.options.bias is not None for call in check_hook(module))
    if own_forward(module) is not None or has_bias or not recurrent.batches_decodes:
        return replace(config, enforce_eager=True)
    return replace(config, piecewise_graphs=False) if recurrent.layers else config


def _load_ready_model(
    config: EngineConfig,
    leader: Leader | None,
    progress: Callable[[Progress], None],
    undo: ExitStack,
    register: GpuRegister,
    threads: CpuThreads,
) -> _ReadyModel:
    adapters = read_configured_adapters(config)  # before loading the model, so that a bad adapter fails fast

    def await_turn(device: torch.device) -> None:
        if device.type == "cuda":
            uuids = gpu_uuids(config.tensor_parallel_size)
            if not register.await_turn(uuids, lambda holder: progress(Progress(stage=WAIT, detail=holder))):
                progress(Progress(stage=WAIT, detail="time limit reached, planning with the memory that is free now"))

    loaded = load_model(config, progress, rank_of(leader), await_turn)
    undo.callback(close_streaming, loaded.module)
    if leader is not None:
        leader.load_model(config, adapted_layers(adapters))
    _device_info(loaded.device, loaded.dtype)  # measures and caches the device's limits while memory is free
    fingerprint = _fingerprint(config, loaded)  # before fusing, which removes the weights' names
    progress(Progress(stage="warm up"))
    if loaded.device.type == "cpu":
        threads.refresh()  # most of the start's parallel computation follows, very slow with too many threads
    damaged: list[str] = []
    passed = PassedChecks(loaded.identity, damaged.append, may_store=not threads.is_reduced)
    fused = make_ready_to_run(loaded.module, loaded.quantization, passed)
    loaded = replace(loaded, notes=(*loaded.notes, *damaged))
    check_options_with_own_forward(config, loaded)
    tiles = proven_tiles(loaded) if config.deterministic else ()
    lora = LoraAdapters(config, loaded, adapters, leader) if config.has_lora else None  # before memory is measured

    def report(detail: str) -> None:
        progress(Progress(stage="warm up", detail=detail))

    attention = attention_choice(config, loaded, report)
    is_chosen = not (config.cpu_offload_gb or config.deterministic)
    products = choose_matmul_kernels(loaded.module, report) if is_chosen else ""
    check_fused(fused.layers, loaded.num_layers, loaded.rank, loaded.info.name)
    return _ReadyModel(loaded, fused, attention, products, fingerprint, lora, tiles)


def check_options_with_own_forward(config: EngineConfig, loaded: LoadedModel) -> None:
    """Raise BadInput, naming the option, for options that are not supported for models run by transformers' own
    code.
    """
    own = own_forward(loaded.module)
    if own is None:
        return
    if own.states:
        check_options_with_states(config, Blueprint(loaded.info.architecture, 0, has_states=True), loaded.info.name)
    lora = "lora_modules" if config.lora_modules else "allow_runtime_lora_updating"
    refused = (
        ("tensor_parallel_size", config.tensor_parallel_size, 1, "its layers cannot be split among ranks"),
        ("cpu_offload_gb", config.cpu_offload_gb, 0, "its weights cannot be copied to the GPU in each step"),
        ("kv_cache_dtype", config.kv_cache_dtype, "auto", "its cache is stored in the model's own data type"),
        ("sparse_decode", config.sparse_decode, None, "its attention cannot be replaced"),
        ("page_heat", config.page_heat, 0, "its attention cannot be measured"),
        (lora, config.has_lora, False, "adapters are not supported there"),
    )
    why = f"{loaded.info.architecture} is run by transformers' own code ({own.reason:.120})"
    refuse_options(refused, loaded.info.name, why)


def _agree_on_pool_size(
    config: EngineConfig, model: _ReadyModel, leader: Leader | None, progress: Callable[[Progress], None]
) -> PoolSize:
    """Return this rank's pool size, with the number of blocks reduced to that of the rank with the fewest blocks."""
    with all_slots_used(None if model.lora is None else model.lora.slots):
        size = pool_size(config, model.loaded)
    if leader is not None:
        size = size._replace(num_blocks=leader.agree_on_blocks(size.num_blocks, model.fused))
    if size.plan is not None:
        progress(Progress(stage="warm up", detail=size.plan.summary(str(model.loaded.device))))
    return size


def _build_cache(
    config: EngineConfig,
    loaded: LoadedModel,
    size: PoolSize,
    states: StateStorage | None,
    fingerprint: str,
    cache_log: CacheLog | None,
    undo: ExitStack,
    leader: Leader | None,
) -> _Cache:
    virtual = virtual_cache(config, loaded, size.num_blocks)
    if virtual is not None:
        undo.callback(virtual.memory.close)
    num_rows = virtual.space.num_rows if virtual is not None else size.num_blocks
    groups = groups_of_model(config, loaded)
    storage = storage_for_model(
        loaded,
        num_rows,
        config.block_size,
        config.kv_cache_dtype,
        memory=virtual.memory if virtual is not None else None,
        sparse_decode=config.sparse_decode,
        groups=groups,
    )
    state_bytes = states.host_bytes if states is not None else 0
    mover = make_tier_mover(config, storage, fingerprint, state_bytes=state_bytes, others=leader)
    if mover is not None:
        undo.callback(mover.close)
    pool = make_pool(
        config.allocator,
        num_rows,
        config.block_size,
        prefix_caching=config.prefix_caching,
        salt=mover.salt if mover is not None and mover.salt is not None else shared_salt(config),
        other_tiers={
            Tier.HOST: mover.num_host_slots if mover is not None else 0,
            Tier.DISK: mover.num_disk_slots if mover is not None else 0,
            Tier.STATES: states.num_slots if states is not None else 0,
            Tier.HOST_STATES: size.num_host_states,
        },
        space=virtual.space if virtual is not None else None,
        groups=tuple(group.rule for group in groups),
    )
    if cache_log is not None:
        cache_log.has_groups = len(groups) > 1
    pool.cache_log = cache_log  # before the tiers, which log the blocks of a kept file
    has_own_forward = own_forward(loaded.module) is not None
    expanded = () if has_own_forward else expanded_layers(check_hook(loaded.module))
    return _Cache(storage, pool, mover, virtual, groups, expanded)


def _state_groups(loaded: LoadedModel, states: StateStorage | None) -> tuple[KVGroup, ...]:
    if states is None:
        return ()
    layers, size = len(states.layers), max_recorded_tokens(loaded.max_model_len)
    return (KVGroup(kind="state", num_layers=layers, block_size=size, block_bytes=states.slot_bytes),)


def _build_states(config: EngineConfig, loaded: LoadedModel, size: PoolSize, undo: ExitStack) -> StateStorage | None:
    if not size.num_states:
        return None
    layers = states_of(loaded.module)
    states = StateStorage(size.num_states, layers, loaded.device, size.num_host_states, has_pad=size.has_pad_state)
    undo.callback(states.close)
    return states


def mla_expansion_notes(module: torch.nn.Module) -> list[str]:
    """Return a line for the user if an MLA model caches keys and values instead of latents. It has the elements
    per token and the reason. Returns an empty list for other models.
    """
    config: Any = module.config
    config = config.get_text_config(decoder=True)
    calls = check_hook(module)
    if own_forward(module) is not None:
        return []
    sizes: list[Any] = [getattr(config, name, None) for name in ("kv_lora_rank", "qk_rope_head_dim")]
    if any(call.shape.latent_dim for call in calls) or not all(isinstance(size, int) for size in sizes):
        return []
    why = getattr(module, "kvscope_why_expanded", None) or "the structure of its attention is unknown"
    return [
        f"the cache holds keys and values instead of latents, {calls[0].shape.num_elements:,} numbers per token and "
        f"layer instead of {sum(sizes):,}: {why:.200}"
    ]


def _notes_on_bias(module: torch.nn.Module) -> list[str]:
    calls = check_hook(module)
    count = sum(call.options.bias is not None for call in calls)
    if not count:
        return []
    return [
        f"{count} of {len(calls)} attention layers add a value for each distance between tokens to their scores: "
        "their attention runs with torch's operations, one request after the other, which is slower; --page-heat "
        "does not measure these layers"
    ]


def _notes_on_own_forward(config: EngineConfig, loaded: LoadedModel) -> list[str]:
    own = own_forward(loaded.module)
    if own is None:
        return []
    graphs = "; no CUDA graphs" if loaded.device.type == "cuda" and not config.enforce_eager else ""
    return [
        f"{loaded.info.architecture} is run by transformers' own code, {own.batching_description} in each step,"
        f" which is slower{graphs}: {own.reason:.200}"
    ]


def _notes_on_states(config: EngineConfig, states: StateStorage | None, *, together: bool) -> list[str]:
    """Return lines for the user about the memory of recurrent states, and about features and limits that depend on it.

    `together`: whether the recurrent layers decode as a batch.
    """
    if states is None:
        return []
    running = min(config.max_num_seqs, states.num_slots - 1)
    notes = [
        f"recurrent layers: {states.num_slots} states of {states.slot_bytes / MIB:.2f} MiB,"
        f" {states.num_slots * states.slot_bytes / MIB:.0f} MiB; one each for up to {running} requests that run, the"
        " others for prefixes"
    ]
    if running < config.max_num_seqs:
        notes.append(
            f"at most {running} requests run at the same time instead of {config.max_num_seqs}, because there is no "
            "memory for more states of recurrent layers (--kv-memory, --gpu-memory-utilization)"
        )
    notes += _notes_on_host_states(config, states)
    if states.device.type == "cuda":
        graphs = "" if together or config.enforce_eager else "no CUDA graphs, and "
        notes.append(f"{graphs}no async scheduling: the model has recurrent layers")
    return notes


def _notes_on_host_states(config: EngineConfig, states: StateStorage) -> list[str]:
    if not config.host_kv_memory_bytes:
        return []
    if not states.num_host_slots:
        return [
            f"--kv-host-memory is too small for a state of {states.slot_bytes / MIB:.2f} MiB: preempted requests are "
            f"computed again, and prefixes in lower tiers can be used only while their states are on {states.device}"
        ]
    notes = [
        f"in host memory {states.num_host_slots} states, {states.host_bytes / MIB:.0f} MiB of --kv-host-memory, for"
        " preempted requests and prefixes"
    ]
    notes += [states.note] if states.note else []
    if config.disk_kv_memory_bytes:
        limitation = ", so a later start cannot use the kept file" if config.keep_disk_kv else ""
        notes.append(f"the disk stores only blocks, and states stay in memory{limitation}")
    return notes


def _build_scheduler(
    config: EngineConfig, loaded: LoadedModel, cache: _Cache, storage: StateStorage | None
) -> Scheduler:
    states, max_num_seqs, pool = None, config.max_num_seqs, cache.pool
    if storage is not None:
        keeps_checkpoints, copy_seconds = pool.index is not None, storage.copy_seconds
        max_tokens = max_recorded_tokens(loaded.max_model_len)
        states = StatePool(
            pool, config.state_interval, max_tokens, keeps_checkpoints=keeps_checkpoints, copy_seconds=copy_seconds
        )
        max_num_seqs = min(max_num_seqs, pool.num_states - 1)
    mapper = cache.virtual.memory if cache.virtual is not None else None
    return Scheduler(
        cache.pool,
        make_allocation(config.allocator, cache.pool, max_model_len=loaded.max_model_len, mapper=mapper),
        SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_batched_tokens(config, loaded.device.type),
            max_model_len=loaded.max_model_len,
            max_adapters=config.num_lora_slots,
            preemption=config.preemption,
        ),
        mover=cache.mover,
        drafter=Drafter(config.speculative_config) if config.speculative_config is not None else None,
        states=states,
    )


def _build_runner(
    config: EngineConfig,
    loaded: LoadedModel,
    storage: KVStorage,
    model: _ReadyModel,
    leader: Leader | None,
    notes: list[str],
    has_pieces: bool,
    states: StateStorage | None,
) -> ModelRunner:
    return ModelRunner(
        loaded,
        storage,
        RunnerConfig(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=max_batched_tokens(config, loaded.device.type),
            max_drafts=config.max_drafts,
            enforce_eager=config.enforce_eager,
            piecewise_graphs=has_pieces,
            shares_graphs=leader is not None,
            page_heat=config.page_heat,
            sparse_decode=config.sparse_decode,
            tile_sizes=model.tiles,
            fingerprints=config.fingerprints,
        ),
        states=states,
        lora=model.lora,
        ops=model.attention.ops,
        others=leader,
        notes=notes,
    )


def _build_guard(
    config: EngineConfig,
    loaded: LoadedModel,
    size: PoolSize,
    storage: KVStorage,
    states: StateStorage | None,
    scheduler: Scheduler,
    runner: ModelRunner,
    register: GpuRegister,
) -> MemoryGuard | None:
    if size.memory is None:
        return None
    allocated_bytes = storage.num_bytes + (states.num_bytes if states is not None else 0)
    limits, plan = (max_batched_tokens(config, loaded.device.type), config.max_num_seqs), size.plan
    budget = MemoryBudget(
        0 if plan is None else plan.needed + min(max(plan.kv, 0), allocated_bytes),  # other ranks may have fewer blocks
        step_costs(plan, *limits, has_graphs=runner.has_graphs),
        None if plan is None else plan.others,
    )
    return MemoryGuard(
        size.memory,
        budget,
        scheduler.limits,
        runner,
        runner.notes.append,
        pages=storage.resident_bytes,
        promise=register.publish,
        paging=PagingWatch() if is_wsl() else None,
    )


def overlaps_steps(config: EngineConfig, device: torch.device) -> bool:
    """Whether steps overlap (async scheduling).

    Off by default on a CPU, where host and device are the same processor, and in deterministic mode, where the host
    must know the sampled tokens before it divides the next step into tiles.
    """
    is_default = device.type == "cuda" and not config.deterministic
    return is_default if config.async_scheduling is None else config.async_scheduling


def _fingerprint(config: EngineConfig, loaded: LoadedModel) -> str:
    """Return a text that identifies everything that determines the KV values of a prompt: model, quantization, weights
    and sparse attention.

    The text is stored in a disk tier file that outlives the engine. Returns "" if there is no such file.
    """
    if not config.keep_disk_kv:
        return ""
    sparse = f";sparse {config.sparse_decode}" if config.sparse_decode is not None else ""
    return f"{loaded.info.name};{loaded.quantization};{loaded.fingerprint}{sparse}"


def _build_hello(
    config: EngineConfig,
    epoch: int,
    loaded: LoadedModel,
    cache: _Cache,
    states: StateStorage | None,
    scheduler: Scheduler,
    attention: LibraryChoice,
) -> Hello:
    storage, pool, virtual = cache.storage, cache.pool, cache.virtual
    groups = cache.published_groups(_state_groups(loaded, states))
    return Hello(
        epoch=epoch,
        time_ns=time.monotonic_ns(),
        wall_time_ns=time.time_ns(),
        model=loaded.info,
        cache=CacheInfo(
            num_blocks=storage.num_blocks,
            num_physical_blocks=virtual.space.num_physical_blocks if virtual is not None else 0,
            num_host_blocks=pool.num_host,
            num_disk_blocks=pool.num_disk,
            block_size=config.block_size,
            block_bytes=storage.block_bytes,
            dtype=str(storage.dtype).removeprefix("torch."),
            allocator=config.allocator,
            prefix_caching=config.prefix_caching,
            has_parents=True,
            max_num_seqs=scheduler.limits.max_num_seqs,
            max_num_batched_tokens=max_batched_tokens(config, loaded.device.type),
            max_request_tokens=scheduler.max_request_tokens,
            groups=groups,
            num_states=pool.num_states,
            num_host_states=pool.num_host_states,
            state_interval=config.state_interval if states is not None else 0,
            num_reserved_blocks=pool.num_blocks - pool.num_usable,
        ),
        device=_device_info(loaded.device, loaded.dtype, attention.description, loaded.rank.count),
        engine_version=program_version(),
        pid=os.getpid(),
        host=host_id(),
        capabilities=Capabilities(
            attention=config.page_heat > 0,
            allocator_map=True,
            sparse_decode=config.sparse_decode is not None,
            groups=len(groups) > 1,
            deterministic=config.deterministic,
            fingerprints=config.fingerprints,
            eviction_order=True,
            prompt_estimates=loaded.tokenizer is not None,
            completion_aborts=True,
        ),
        num_ranks=loaded.rank.count,
    )


def _device_info(device: torch.device, dtype: torch.dtype, attention: str = "", num_ranks: int = 1) -> DeviceInfo:
    uuids: tuple[str, ...] = ()
    if device.type == "cuda":
        uuids = gpu_uuids(num_ranks)
        properties = torch.cuda.get_device_properties(device)
        name, total, threads = properties.name, properties.total_memory, 0
    else:
        name, threads = _cpu_name(), torch.get_num_threads()
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = device_limits(device, name, dtype)  # measured before the pool took the memory, now only looked up
    return DeviceInfo(
        kind=device.type,
        name=name,
        total_bytes=total,
        num_threads=threads,
        read_bytes_per_s=limits.read_bytes_per_s,
        flops_per_s=limits.flops_per_s,
        attention=attention,
        uuids=uuids,
        software=f"torch {torch.__version__}",
    )


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
            return next(names, platform.machine())
    except OSError:
        return platform.machine()


def _workspace_bytes(use: AllocatorUse, weights_bytes: int, kv_bytes: int) -> int:
    """Return the bytes that torch's allocator holds in addition to weights and KV, or -1 if unknown (on a CPU)."""
    return max(0, use.reserved - weights_bytes - kv_bytes) if use.reserved >= 0 else -1


def adapt_to_allocator(config: EngineConfig, loaded: LoadedModel, num_blocks: int) -> tuple[LoadedModel, list[str]]:
    """Adapt defaults to an allocator other than `paged`. Explicitly set options are not changed; unsuitable ones are
    refused elsewhere.

    Returns the model, with `max_model_len` lowered to what the pool can reserve contiguously, and a note for each
    change.
    """
    notes = []
    if config.allocator != "paged" and config.enable_prefix_caching is None:
        notes.append(f"prefix caching is off: allocator={config.allocator!r} cannot share blocks")
    length = fitting_model_len(config.allocator, num_blocks, config.block_size, loaded.max_model_len)
    if config.max_model_len is not None or length == loaded.max_model_len:
        return loaded, notes
    notes.append(
        f"max_model_len is {length} instead of the model's {loaded.max_model_len}: allocator={config.allocator!r} "
        f"reserves one run of this length for each request, and the longest run in a pool of {num_blocks} blocks has "
        "this length (with a smaller --max-model-len, more requests run at the same time)"
    )
    info = msgspec.structs.replace(loaded.info, max_model_len=length)
    return replace(loaded, info=info, max_model_len=length), notes
