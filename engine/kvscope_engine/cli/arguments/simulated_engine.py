"""The simulated model, device and engine, as chosen by the options of `simulate` or by a recording.

Options take precedence over the recording, and the recording over the preset.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from kvscope_engine.policy.allocation.allocator_names import ALLOCATORS
from kvscope_engine.simulator.costs.cost_model import PRESETS, CostModel, Preset
from kvscope_engine.simulator.kv_layout import (
    KVLayout,
    recorded_layout,
    recorded_pool_bytes,
    recorded_slots,
    recorded_tiers,
    recorded_token_bytes,
)
from kvscope_engine.simulator.simulated_paging import SimulatedPaging
from kvscope_engine.simulator.simulated_tiers import SimulatedTiers
from kvscope_engine.simulator.simulation_limits import DEFAULT_STATE_INTERVAL, MAX_BLOCKS, SimulatedLimits
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.telemetry import CacheInfo, Hello
from kvscope_telemetry.messages.what_if import EXPANDED, NOT_FREED

if TYPE_CHECKING:
    from kvscope_engine.simulator.simulation import SimulationSetup
    from kvscope_engine.simulator.workload_recording import WorkloadRecording
    from kvscope_engine.simulator.workloads.workload import Workload


def chosen_preset(args: argparse.Namespace, run: WorkloadRecording | None) -> tuple[str, Preset, str]:
    """Return the name and preset of the model and device, and a note for the user.

    Model and device are those of the recording unless options override them. The note names what the recording lacks;
    it is "" without a recording. Raises BadInput for an invalid file of costs.
    """
    name = args.model_preset or "opt-13b"
    preset = PRESETS[name]
    if args.costs is not None:
        from kvscope_engine.simulator.costs.cost_file import load_costs

        costs = load_costs(Path(args.costs))
        name, preset = costs.model, costs.preset
    if run is None:
        return name, preset, ""
    hello = run.hello
    if args.model_preset is not None or args.costs is not None:
        return name, _as_recorded(preset, hello, None), _missing_in_recording(args, hello, name, has_speeds=True)
    cost = None if run.costs is None else run.costs.cost
    note = _missing_in_recording(args, hello, name, has_speeds=cost is not None)
    return name if cost is None else hello.model.name, _as_recorded(preset, hello, cost), note


def _as_recorded(preset: Preset, hello: Hello, cost: CostModel | None) -> Preset:
    token_bytes = recorded_token_bytes(hello.cache) or preset.cost.kv_bytes_per_token
    return Preset(
        cost=cost or dataclasses.replace(preset.cost, kv_bytes_per_token=token_bytes),
        num_slots=recorded_slots(hello.cache) or preset.num_slots,
        max_model_len=hello.model.max_model_len or preset.max_model_len,
        num_layers=hello.model.num_layers or preset.num_layers,
    )


def _missing_in_recording(args: argparse.Namespace, hello: Hello, name: str, *, has_speeds: bool) -> str:
    availability = {
        "weights and speeds": has_speeds,
        "bytes a token": recorded_token_bytes(hello.cache) or args.model or args.kv_bytes_per_token is not None,
        "size of the pool": recorded_slots(hello.cache) or args.kv_memory or args.num_gpu_blocks_override,
        "max length": hello.model.max_model_len or args.max_model_len,
    }
    missing = ", ".join(item for item, is_known in availability.items() if not is_known)
    return f"not in the recording, so taken from {name}: {missing} (--model-preset, --costs)" if missing else ""


def chosen_limits(args: argparse.Namespace, preset: Preset, run: WorkloadRecording | None) -> SimulatedLimits:
    """Return the simulated limits. Each limit comes from the options or, if it is not given there, from the
    recording; otherwise it is the default. Raises BadInput for a value outside its range.
    """
    cache = CacheInfo(num_blocks=0, block_size=0) if run is None else run.hello.cache
    has_prefix_cache = run is None or cache.prefix_caching

    def size(option: int | None, recorded: int, default: int) -> int:
        return option if option is not None else recorded or default

    block_size = size(args.block_size, cache.block_size, 16)
    return SimulatedLimits(
        num_blocks=size(args.num_gpu_blocks_override, preset.num_slots // max(1, block_size), 1),
        block_size=block_size,
        max_num_seqs=size(args.max_num_seqs, cache.max_num_seqs, 256),
        max_num_batched_tokens=size(args.max_num_batched_tokens, cache.max_num_batched_tokens, 2048),
        max_model_len=size(args.max_model_len, preset.max_model_len, 1),
        enable_prefix_caching=has_prefix_cache if args.enable_prefix_caching is None else args.enable_prefix_caching,
    )


def chosen_cost(args: argparse.Namespace, preset: Preset) -> CostModel:
    """Return the preset's cost model with the options that override it. Raises BadInput for a value outside its
    range.
    """
    names = [field.name for field in dataclasses.fields(CostModel) if not field.name.endswith("_overhead_s")]
    overrides = {name: float(value) for name in names if (value := getattr(args, name)) is not None}
    if args.step_overhead_ms is not None:
        overrides["step_overhead_s"] = args.step_overhead_ms / 1000
    return dataclasses.replace(preset.cost, **overrides)


def chosen_paging(args: argparse.Namespace, preset: Preset, layout: KVLayout | None) -> SimulatedPaging:
    default_layers = preset.num_layers if layout is None else max(1, layout.num_layers)
    num_layers = default_layers if args.num_layers is None else args.num_layers
    return SimulatedPaging(num_layers) if args.page_size is None else SimulatedPaging(num_layers, args.page_size)


def chosen_tiers(args: argparse.Namespace, cache: CacheInfo | None) -> SimulatedTiers:
    """Return the lower tiers. They are taken from the options, or else from the recording.

    Raises BadInput for sizes out of range, and if no selected allocator supports lower tiers.
    """
    host_bytes, disk_bytes = (0, 0) if cache is None else recorded_tiers(cache)
    kv_host_memory = host_bytes if args.kv_host_memory is None else args.kv_host_memory
    kv_disk = (disk_bytes if kv_host_memory else 0) if args.kv_disk is None else args.kv_disk
    tiers = SimulatedTiers(kv_host_memory=kv_host_memory, kv_disk=kv_disk, preemption=args.preemption)
    allocators = chosen_allocators(args, cache)
    if args.kv_host_memory and "paged" not in allocators:
        raise BadInput(
            f"kv_host_memory={tiers.kv_host_memory} is not accepted with allocator={', '.join(allocators)!r}:"
            " only `paged` has lower tiers"
        )
    return tiers


def chosen_setups(
    args: argparse.Namespace,
    preset: Preset,
    limits: SimulatedLimits,
    cost: CostModel,
    workload: Workload,
    run: WorkloadRecording | None,
) -> list[SimulationSetup]:
    """Return one setup per run: one per allocator, then one per what-if scenario.

    Raises BadInput for scenarios that do not apply to the model.
    """
    from kvscope_engine.simulator.simulation import SimulationSetup

    cache = None if run is None else run.hello.cache
    layout = _chosen_layout(args, limits, cache)
    setups = [
        SimulationSetup(
            workload,
            limits,
            cost,
            allocator,
            chosen_paging(args, preset, layout),
            chosen_tiers(args, cache),
            layout=layout,
            scenario=scenario,
            state_interval=_chosen_state_interval(args, cache),
        )
        for allocator, scenario in [
            *((allocator, "") for allocator in chosen_allocators(args, cache)),
            *(("paged", scenario) for scenario in _scenarios(args, layout)),
        ]
    ]
    if layout is None and args.kv_memory is None:
        return [_with_more_blocks(setup, args.blocks_times) for setup in setups]
    blocks, checkpoints = args.num_gpu_blocks_override, args.state_checkpoints
    if checkpoints is None and args.model is None and cache is not None and cache.num_states:
        checkpoints = max(0, cache.num_states - 1 - cache.max_num_seqs)
    if blocks is not None:
        kv_bytes = float(blocks * SimulationSetup(workload, limits, cost, "paged", layout=layout).block_bytes)
    else:
        preset_bytes = preset.num_slots * preset.cost.kv_bytes_per_token
        kv_bytes = args.kv_memory or (0 if cache is None else recorded_pool_bytes(cache)) or preset_bytes
    sized = [setup.sized(kv_bytes, checkpoints, for_blocks=blocks is not None) for setup in setups]
    return [_with_more_blocks(setup, args.blocks_times) for setup in sized]


def _with_more_blocks(setup: SimulationSetup, factor: float | None) -> SimulationSetup:
    if factor is None:
        return setup
    if not 0 < factor <= MAX_BLOCKS:  # NaN is in no range
        raise BadInput(f"blocks_times={factor:g} is not accepted: must be a number above 0 and up to {MAX_BLOCKS}")
    return dataclasses.replace(
        setup, limits=setup.limits.with_num_blocks(max(1, round(setup.limits.num_blocks * factor)))
    )


def _chosen_state_interval(args: argparse.Namespace, cache: CacheInfo | None) -> int:
    interval: int | None = args.state_interval
    if interval is not None and interval < 1:
        raise BadInput(f"state_interval={interval} is not accepted: must be at least 1")
    recorded = 0 if cache is None else cache.state_interval
    return interval or recorded or DEFAULT_STATE_INTERVAL


def _chosen_layout(args: argparse.Namespace, limits: SimulatedLimits, cache: CacheInfo | None) -> KVLayout | None:
    if args.model is not None:
        from kvscope_engine.cli.lazy_engine import quick_imports

        with quick_imports():
            from kvscope_engine.planning.simulated_layout import model_layout

            return model_layout(args.model, limits.max_model_len, limits.block_size)
    return None if cache is None else recorded_layout(cache)


def _scenarios(args: argparse.Namespace, layout: KVLayout | None) -> list[str]:
    obstacles = {
        "without_freeing": "" if layout is not None and layout.has_windows else "no layer has a window or chunks",
        "mla_expanded": "no layer holds latents" if layout is None else layout.why_not_expanded,
        "state_checkpoints": "" if layout is not None and layout.state_bytes else "no layer keeps a state",
    }
    for name, why in obstacles.items():
        if why and getattr(args, name) not in (None, False):
            hint = "" if layout is not None else ": give --model, or a recording that names its KV groups"
            raise BadInput(f"--{name.replace('_', '-')} is not accepted, as {why}{hint}")
    return [NOT_FREED] * args.without_freeing + [EXPANDED] * args.mla_expanded


def chosen_allocators(args: argparse.Namespace, cache: CacheInfo | None) -> list[str]:
    """Return the allocators of the options, or else that of the recorded engine."""
    recorded = cache.allocator if cache is not None and cache.allocator in ALLOCATORS else "paged"
    names: list[str] = []
    for name in args.allocator or [recorded]:
        names += ALLOCATORS if name == "all" else [name]
    return list(dict.fromkeys(names))
