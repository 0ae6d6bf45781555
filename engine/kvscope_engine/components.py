"""Building an engine's parts from its configuration: model, pool, scheduler, storage, runner.

The one place that knows all of them; each of them knows at most what `architecture` allows.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import msgspec
import torch
from msgspec.structs import replace as replace_fields

from kvscope_engine.cache_events import shared_salt
from kvscope_engine.model.cpu_offload.streaming import close_streaming, streamed_weights
from kvscope_engine.model.loading.device import free_bytes, gpu_uuids
from kvscope_engine.model.loading.loader import LoadedModel, load_model
from kvscope_engine.model.loading.ready_to_run import make_ready_to_run
from kvscope_engine.model.memory.allocator import AllocatorUse, allocator_use
from kvscope_engine.model.memory.memory_plan import MemoryPlan
from kvscope_engine.model.memory.shortage_report import Shortage, shortage_report
from kvscope_engine.model.memory.step_memory import logits_width, max_batched_tokens
from kvscope_engine.model.memory.weights_by_part import weights_by_part
from kvscope_engine.model.ranks.leader import Leader, config_of_rank, lead_ranks, rank_of
from kvscope_engine.model.ranks.shard import check_fused
from kvscope_engine.model.roofline.device_limits import device_limits
from kvscope_engine.model.roofline.model_costs import model_work
from kvscope_engine.model.roofline.step_costs import ModelWork
from kvscope_engine.model.running.attention_choice import attention_choice
from kvscope_engine.model.running.cpu_threads import CpuThreads
from kvscope_engine.model.running.kv_storage import KVStorage
from kvscope_engine.model.running.memory import num_blocks_for
from kvscope_engine.model.running.runner import ModelRunner
from kvscope_engine.model.running.storage_for_model import storage_for_model
from kvscope_engine.model.structured.forms import Forms
from kvscope_engine.model.tiers.block_mover import BlockMover
from kvscope_engine.model.tiers.build import make_tier_mover
from kvscope_engine.model.virtual_memory.build import virtual_cache
from kvscope_engine.policy.allocation.address_space import AddressSpace
from kvscope_engine.policy.allocation.allocators import fitting_model_len, make_allocation, make_pool
from kvscope_engine.policy.blocks.block_pool import BlockPool
from kvscope_engine.policy.blocks.cache_log import CacheLog
from kvscope_engine.policy.drafting.drafter import Drafter
from kvscope_engine.policy.plan import StepPlan, StepResult
from kvscope_engine.policy.scheduling.scheduler import Scheduler
from kvscope_engine.submission import SubmissionLimits
from kvscope_kernels.libraries.choice import Choice
from kvscope_telemetry.about import program_version
from kvscope_telemetry.engine_config import EngineConfig
from kvscope_telemetry.messages.capabilities import Capabilities
from kvscope_telemetry.messages.telemetry import (
    CacheInfo,
    DeviceInfo,
    Hello,
    MemoryBreakdown,
    ModuleBytes,
    Progress,
    RankMemory,
    Work,
)
from kvscope_telemetry.sockets.host_id import host_id

PUT_AWAY_S = 5.0
"""For what is cached to reach a file that is kept: nobody waits for an engine's end for longer."""


@dataclass(slots=True)
class EngineComponents:
    """What an engine is made of."""

    epoch: int
    loaded: LoadedModel
    storage: KVStorage
    pool: BlockPool
    scheduler: Scheduler
    runner: ModelRunner
    hello: Hello
    mover: BlockMover | None = None
    """Of the bytes between the tiers; None without lower ones."""
    notes: list[str] = field(default_factory=list)
    """What is not as it was asked for, a line each."""
    threads: CpuThreads | None = None
    """Those that a CPU computes a step with."""
    plan: MemoryPlan | None = None
    """Of a GPU's memory, where the size of the pool was left to it."""
    forms: Forms | None = None
    """That answers can be asked for in; None for a model without text."""
    leader: Leader | None = None
    """Of the other ranks; None where this is the only one."""
    overlaps: bool = False
    """Whether a step is launched while the one before runs."""
    utilization: float = 0.0
    """`--gpu-memory-utilization`."""
    work: ModelWork | None = None
    """What the work of a step is reckoned from."""
    _num_noted: int = 0
    _modules: tuple[ModuleBytes, ...] = ()
    _copied_s: float = 0.0

    @property
    def limits(self) -> SubmissionLimits:
        """How long a request may be."""
        return SubmissionLimits(self.loaded.max_model_len, self.scheduler.max_request_tokens)

    def new_notes(self) -> list[str]:
        """What the runner gave up in service since the last call; it is in `notes` too."""
        new = self.runner.notes[self._num_noted :]
        self._num_noted += len(new)
        self.notes += new
        return new

    def memory_breakdown(self) -> MemoryBreakdown:
        """Where the memory went, in bytes."""
        resident_bytes = self.storage.resident_bytes()
        torch_kv_bytes = self.storage.num_bytes if resident_bytes < 0 else 0  # pages are not of torch's allocator
        use = allocator_use(self.loaded.device)
        return MemoryBreakdown(
            epoch=self.epoch,
            time_ns=time.monotonic_ns(),
            weights_bytes=self.runner.weights_bytes,
            kv_bytes=self.storage.num_bytes,
            kv_resident_bytes=resident_bytes,
            workspace_bytes=_workspace_bytes(use, self.runner.weights_bytes, torch_kv_bytes),
            step_bytes=self.plan.step if self.plan is not None else -1,
            graphs_bytes=self.plan.reserves.graphs if self.plan is not None else -1,
            staging_bytes=self.plan.staging if self.plan is not None else -1,
            modules=self._weights_by_part(),
            allocated_bytes=use.allocated,
            reserved_bytes=use.reserved,
            split_bytes=use.split,
            peak_bytes=use.peak,
            ranks=self._ranks(),
            host_weights_bytes=self._host_weights_bytes(),
        )

    def work_of(self, plan: StepPlan, result: StepResult) -> Work:
        """What a step had to do, as what it ran, and what was waited for."""
        told = self.work.of(plan) if self.work is not None else Work()
        copied_s, before_s = self._tiers_seconds(), self._copied_s
        self._copied_s = copied_s
        return replace_fields(
            told,
            graph_size=result.graph_size,
            graph_tokens=result.graph_tokens,
            wait_ns=result.wait_ns,
            launches=result.launches,
            copy_ns=max(round((copied_s - before_s) * 1e9), 0),
        )

    def _tiers_seconds(self) -> float:
        if self.mover is None:
            return 0.0
        stats = self.mover.stats
        return stats.saved_seconds + stats.loaded_seconds + stats.risen_seconds

    def explain_shortage(self, plan: StepPlan) -> str:
        """Why there was no memory for a step, and the option that would have prevented it."""
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
            )
        )

    def _host_weights_bytes(self) -> int:
        streamed = streamed_weights(self.loaded.module)
        return streamed.num_bytes if streamed is not None else 0

    def _ranks(self) -> tuple[RankMemory, ...]:
        if self.leader is None:
            return ()
        return self.leader.memory(self.runner.weights_bytes, self.storage.num_bytes, self.hello.device.name)

    def _weights_by_part(self) -> tuple[ModuleBytes, ...]:
        if not self._modules:  # weights stay what they are
            self._modules = weights_by_part(self.loaded.module)
        return self._modules

    def close(self) -> None:
        """Drop every tensor."""
        self.runner.close()
        if self.forms is not None:
            self.forms.close()
        if self.leader is not None:
            self.leader.close()
        if self.threads is not None:
            self.threads.close()
        if self.mover is not None:
            if self.mover.keeps:
                deadline_s = time.monotonic() + PUT_AWAY_S
                self.scheduler.put_away(lambda: time.monotonic() < deadline_s)
            failure = f"the disk tier was given up: {self.mover.failure}" if self.mover.failure else ""
            self.notes += filter(None, (failure, self.mover.close()))
        self.storage.close()
        close_streaming(self.loaded.module)
        self.loaded = replace(self.loaded, module=torch.nn.Module())


def build_components(
    config: EngineConfig, epoch: int, progress: Callable[[Progress], None], cache_log: CacheLog | None = None
) -> EngineComponents:
    """Load the model and make everything around it; `cache_log` is told what is cached.

    In this order, for memory's sake: what joining gives up is gone when a step is profiled, and blocks get what the
    profile leaves. What is captured comes last, over blocks that are there, out of what was set aside for it.
    Raises BadInput or KvscopeError, with nothing left allocated.
    """
    leader = lead_ranks(config)
    with ExitStack() as undo:
        if leader is not None:
            undo.callback(leader.close)
        parts = _build_parts(config_of_rank(config, leader), epoch, progress, cache_log, leader, undo)
        undo.pop_all()
    return parts


def _build_parts(
    config: EngineConfig,
    epoch: int,
    progress: Callable[[Progress], None],
    cache_log: CacheLog | None,
    leader: Leader | None,
    undo: ExitStack,
) -> EngineComponents:
    threads = CpuThreads(config.num_threads)
    if config.cpu_offload_gb:
        config = replace(config, enforce_eager=True)  # what is reserved for graphs hangs on it too
    loaded = load_model(config, progress, rank_of(leader))
    undo.callback(close_streaming, loaded.module)
    if leader is not None:
        leader.load(config)
    _device_info(loaded.device, loaded.dtype)  # measures it, while there is memory for that
    fingerprint = _fingerprint(config, loaded)  # of the weights by their names, which joining gives up
    progress(Progress(stage="warm up"))
    fused = make_ready_to_run(loaded.module, loaded.quantization)
    attention = attention_choice(config, loaded, lambda tried: progress(Progress(stage="warm up", detail=tried)))
    check_fused(fused.layers, loaded.num_layers, loaded.rank, loaded.info.name)
    plans: list[MemoryPlan] = []
    num_blocks = num_blocks_for(config, loaded, planned=plans.append)
    if leader is not None:
        num_blocks = leader.agree(num_blocks, fused)
    plan = plans[0] if plans else None
    if plan is not None:
        progress(Progress(stage="warm up", detail=plan.summary(str(loaded.device))))
    with ExitStack() as later:  # a driver's pages, pinned memory and files are not collected like tensors
        parts = _assemble(config, epoch, loaded, num_blocks, fingerprint, later, progress, cache_log, leader, attention)
        if leader is not None:
            leader.join(loaded.module)
        later.pop_all()
    parts.threads = threads if loaded.device.type == "cpu" else None
    parts.plan = plan
    if loaded.tokenizer is not None:
        parts.forms = Forms(loaded.tokenizer, logits_width(loaded), loaded.eos_token_ids)
    parts.overlaps = overlaps_steps(config, loaded.device)
    parts.work = model_work(loaded, parts.storage.dtype, parts.runner.choice)
    parts.utilization = config.gpu_memory_utilization
    return parts


def _assemble(
    config: EngineConfig,
    epoch: int,
    loaded: LoadedModel,
    num_blocks: int,
    fingerprint: str,
    undo: ExitStack,
    progress: Callable[[Progress], None],
    cache_log: CacheLog | None,
    leader: Leader | None,
    attention: Choice,
) -> EngineComponents:
    loaded, bent = bent_to_allocator(config, loaded, num_blocks)
    virtual = virtual_cache(config, loaded, num_blocks)
    space, memory = (virtual.space, virtual.memory) if virtual is not None else (None, None)
    if memory is not None:
        undo.callback(memory.close)
    num_rows = space.num_rows if space is not None else num_blocks
    storage = storage_for_model(
        *(loaded, num_rows, config.block_size, config.kv_cache_dtype),
        memory=memory,
        sparse_decode=config.sparse_decode,
    )
    mover = make_tier_mover(config, storage, fingerprint)
    if mover is not None:
        undo.callback(mover.close)
    pool = make_pool(
        config.allocator,
        num_rows,
        config.block_size,
        prefix_caching=config.prefix_caching,
        salt=mover.salt if mover is not None and mover.salt is not None else shared_salt(config),
        num_host=mover.num_host_places if mover is not None else 0,
        num_disk=mover.num_disk_places if mover is not None else 0,
        space=space,
    )
    pool.cache_log = cache_log  # before the tiers: they tell what a kept file holds
    max_batched = max_batched_tokens(config, loaded.device.type)
    scheduler = Scheduler(
        pool,
        make_allocation(config.allocator, pool, max_model_len=loaded.max_model_len, mapper=memory),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=max_batched,
        max_model_len=loaded.max_model_len,
        mover=mover,
        preemption=config.preemption,
        drafter=Drafter(config.speculative_config) if config.speculative_config is not None else None,
    )
    runner = ModelRunner(
        loaded,
        storage,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=max_batched,
        enforce_eager=config.enforce_eager,
        piecewise_graphs=config.piecewise_graphs,
        page_heat=config.page_heat,
        sparse_decode=config.sparse_decode,
        others=leader,
        ops=attention.ops,
        notes=attention.failures,
    )
    runner.warm_up(progress)
    hello = _hello(config, epoch, loaded, storage, scheduler, space, pool, attention)
    progress(Progress(stage="ready"))
    streamed = streamed_weights(loaded.module)
    notes = [
        *loaded.notes,
        *bent,
        *(streamed.notes if streamed is not None else []),
        *([mover.note] if mover is not None and mover.note else []),
    ]
    if mover is not None and mover.salt is not None and config.publishes_kv_events:
        notes.append("KV events have the hashes of the kept file: other engines with this seed have others")
    parts = EngineComponents(epoch, loaded, storage, pool, scheduler, runner, hello, mover, notes, leader=leader)
    parts.new_notes()  # of the warm-up, which come first
    for note in parts.notes:
        scheduler.note(note, time.monotonic_ns())
    return parts


def overlaps_steps(config: EngineConfig, device: torch.device) -> bool:
    """Where the host does the computing there is nobody to do it beside."""
    return device.type == "cuda" if config.async_scheduling is None else config.async_scheduling


def _fingerprint(config: EngineConfig, loaded: LoadedModel) -> str:
    """Only a file that is kept is ever read by another engine. Rounded weights compute other KV, and so does attention
    to a part of it."""
    if not config.keep_disk_kv:
        return ""
    sparse = f";sparse {config.sparse_decode}" if config.sparse_decode is not None else ""
    return f"{loaded.info.name};{loaded.quantization};{loaded.fingerprint}{sparse}"


def _hello(
    config: EngineConfig,
    epoch: int,
    loaded: LoadedModel,
    storage: KVStorage,
    scheduler: Scheduler,
    space: AddressSpace | None,
    pool: BlockPool,
    attention: Choice,
) -> Hello:
    return Hello(
        epoch=epoch,
        time_ns=time.monotonic_ns(),
        wall_time_ns=time.time_ns(),
        model=loaded.info,
        cache=CacheInfo(
            num_blocks=storage.num_blocks,
            num_physical_blocks=space.num_physical_blocks if space is not None else 0,
            num_host_blocks=pool.num_host,
            num_disk_blocks=pool.num_disk,
            block_size=config.block_size,
            block_bytes=storage.block_bytes,
            dtype=str(storage.dtype).removeprefix("torch."),
            allocator=config.allocator,
            prefix_caching=config.prefix_caching,
            has_parents=True,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=max_batched_tokens(config, loaded.device.type),
            max_request_tokens=scheduler.max_request_tokens,
        ),
        device=_device_info(loaded.device, loaded.dtype, attention.words, loaded.rank.count),
        engine_version=program_version(),
        pid=os.getpid(),
        host=host_id(),
        capabilities=Capabilities(
            attention=config.page_heat > 0,
            allocator_map=True,
            sparse_decode=config.sparse_decode is not None,
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
    )


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
            return next(names, platform.machine())
    except OSError:
        return platform.machine()


def _workspace_bytes(use: AllocatorUse, weights_bytes: int, kv_bytes: int) -> int:
    """What torch's allocator holds beyond weights and KV; a CPU's allocator cannot tell: -1."""
    return max(0, use.reserved - weights_bytes - kv_bytes) if use.reserved >= 0 else -1


def bent_to_allocator(config: EngineConfig, loaded: LoadedModel, num_blocks: int) -> tuple[LoadedModel, list[str]]:
    """What an allocator other than `paged` changes of options that were left to the engine. Asked for, they are
    refused.

    The model with a length that the pool can reserve, and a line for each thing that is not as without the
    allocator.
    """
    notes = []
    if config.allocator != "paged" and config.enable_prefix_caching is None:
        notes.append(f"prefix caching is off: allocator={config.allocator!r} cannot share blocks")
    length = fitting_model_len(config.allocator, num_blocks, config.block_size, loaded.max_model_len)
    if config.max_model_len is not None or length == loaded.max_model_len:
        return loaded, notes
    notes.append(
        f"max_model_len is {length} and not the model's {loaded.max_model_len}: allocator={config.allocator!r} reserves"
        f" that much in a row for each request, and a pool of {num_blocks} blocks has no longer run"
        " (a smaller --max-model-len lets more requests run at once)"
    )
    info = msgspec.structs.replace(loaded.info, max_model_len=length)
    return replace(loaded, info=info, max_model_len=length), notes
