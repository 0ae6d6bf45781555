"""Options of `simulate`, and their conversion to settings. Names are vLLM's where the meaning is the same.

Defines names and help texts. `SimulatedLimits`, `CostModel` and `GeneratorOptions` check ranges.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvscope_engine.command_parser import number, parse_int, parse_size
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
from kvscope_engine.simulator.simulation_limits import MAX_BLOCKS, SimulatedLimits
from kvscope_engine.simulator.workloads.generators import ARRIVALS, GENERATORS, GeneratorOptions
from kvscope_telemetry.engine_config import PREEMPTIONS
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.telemetry import CacheInfo, Hello
from kvscope_telemetry.messages.what_if import EXPANDED, NOT_FREED

if TYPE_CHECKING:
    from kvscope_engine.simulator.simulation import SimulationSetup
    from kvscope_engine.simulator.workload_recording import WorkloadRecording
    from kvscope_engine.simulator.workloads.workload import Workload

WORKLOADS: Final = (
    "a recording (.mcap, or the word sample or sample-hybrid), a trace (.jsonl: Mooncake, .csv: Azure LLM inference)"
    f" or one of {', '.join(GENERATORS)}"
)
SUFFIXES: Final = (".mcap", ".jsonl", ".csv")
GENERATOR_ONLY: Final = ("rate", "arrivals", "shared_prefix", "num_prefixes", "seed")
DEFAULT_REQUESTS: Final = 1000


def add_simulation_options(parser: argparse.ArgumentParser) -> None:
    add_workload_options(parser.add_argument_group("workload"))
    add_engine_options(parser.add_argument_group("engine"))
    add_model_options(parser.add_argument_group("model"))
    add_tier_options(parser.add_argument_group("lower tiers"))
    add_cost_options(parser.add_argument_group("cost model"))


def add_workload_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--requests",
        type=parse_int,
        metavar="N",
        help=(
            f"number of requests to generate, or to take from a file (default: {DEFAULT_REQUESTS}, or all of the file)"
        ),
    )
    group.add_argument(
        "--rate",
        type=number,
        metavar="REQUESTS/S",
        help=(
            "mean arrival rate of generated requests (default: all arrive together); traces and recordings have "
            "their own arrival times"
        ),
    )
    group.add_argument("--arrivals", choices=ARRIVALS, help="arrival process of generated requests (default: poisson)")
    group.add_argument(
        "--shared-prefix",
        type=parse_int,
        metavar="TOKENS",
        help="length in tokens of a prefix shared by generated prompts (default: 0)",
    )
    group.add_argument(
        "--num-prefixes",
        type=parse_int,
        metavar="N",
        help="number of shared prefixes; prefix n is used 1/n times as often as the first (default: 1)",
    )
    group.add_argument("--seed", type=parse_int, metavar="N", help="seed of the generator (default: 0)")


def add_engine_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--allocator",
        action="append",
        choices=(*ALLOCATORS, "all"),
        help="allocator; repeatable (default: as recorded, else paged)",
    )
    group.add_argument(
        "--num-gpu-blocks-override",
        type=parse_int,
        metavar="BLOCKS",
        help="size of the pool (default: as recorded, else what the preset's device holds)",
    )
    group.add_argument(
        "--blocks-times",
        type=number,
        metavar="FACTOR",
        help="multiply the size of the pool, such as 2 for twice the blocks",
    )
    group.add_argument(
        "--block-size", type=parse_int, metavar="SLOTS", help="tokens per block (default: as recorded, else 16)"
    )
    group.add_argument(
        "--max-num-seqs",
        type=parse_int,
        metavar="REQUESTS",
        help="maximum requests per step (default: as recorded, else 256)",
    )
    group.add_argument(
        "--max-num-batched-tokens",
        type=parse_int,
        metavar="TOKENS",
        help="maximum tokens per step (default: as recorded, else 2048)",
    )
    group.add_argument(
        "--max-model-len",
        type=parse_int,
        metavar="TOKENS",
        help="maximum tokens of prompt and output together (default: as recorded, else the preset's)",
    )
    group.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        help="reuse cached blocks for prompts with the same prefix (paged only; default: as recorded, else yes)",
    )


def add_model_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--model",
        metavar="M",
        help="take KV groups (windows, chunks, latents), their bytes and recurrent states from this"
        " model's config, as `plan` does (default: those of the recording if it has them, else one"
        " group)",
    )
    group.add_argument("--kv-memory", type=parse_size, metavar="SIZE", help="size of the pool in bytes, such as 4GiB")
    group.add_argument(
        "--without-freeing",
        action="store_true",
        help="also simulate paged without freeing the blocks outside of windows and chunks",
    )
    group.add_argument(
        "--mla-expanded",
        action="store_true",
        help="also simulate paged with keys and values per head instead of latents",
    )
    group.add_argument(
        "--state-checkpoints",
        type=parse_int,
        metavar="STATES",
        help="slots for states of recurrent layers at cached prefixes (default: as many as --max-num-seqs)",
    )
    group.add_argument(
        "--state-interval",
        type=parse_int,
        metavar="TOKENS",
        default=512,
        help="tokens between saved states of recurrent layers",
    )


def add_tier_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--kv-host-memory",
        type=parse_size,
        metavar="SIZE",
        help="host memory tier for preempted requests and evicted prefixes, such as 64GiB (paged only; default: as"
        " recorded, else none)",
    )
    group.add_argument(
        "--kv-disk",
        type=parse_size,
        metavar="SIZE",
        help="disk tier below host memory (default: as recorded, else none)",
    )
    group.add_argument(
        "--preemption",
        choices=PREEMPTIONS,
        default="auto",
        help="how a preempted request continues: recompute, swap to host memory and back, or whichever is"
        " cheaper (auto)",
    )


def add_cost_options(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--model-preset",
        choices=tuple(PRESETS),
        help="model and device; the options below override it (default: as recorded, else opt-13b)",
    )
    add(
        "--costs",
        metavar="FILE.json",
        help="costs measured by benchmarks/step_costs.py, instead of the preset's",
    )
    add("--weight-bytes", type=parse_size, metavar="SIZE", help="size of the weights, which are read in each step")
    add("--kv-bytes-per-token", type=parse_size, metavar="SIZE", help="size of a token's keys and values in all layers")
    add(
        "--num-layers",
        type=parse_int,
        metavar="N",
        help="number of layers; the virtual allocator has separate pages for each",
    )
    add("--page-size", type=parse_size, metavar="SIZE", help="page size of the virtual allocator (default: 2MiB)")
    add("--flops-per-token", type=number, metavar="FLOP", help="operations per token in dense layers, such as 25.7e9")
    add(
        "--attention-flops-per-pair",
        type=number,
        metavar="FLOP",
        help="operations per pair of tokens in the attention of all layers",
    )
    add(
        "--memory-bandwidth", type=parse_size, metavar="SIZE", help="device memory bandwidth in bytes/s, such as 1555GB"
    )
    add(
        "--flops-per-second",
        type=number,
        metavar="FLOP/S",
        help="compute rate of the device in operations/s, such as 312e12",
    )
    add("--host-bandwidth", type=parse_size, metavar="SIZE", help="bandwidth between device and host memory in bytes/s")
    add(
        "--disk-bandwidth",
        type=parse_size,
        metavar="SIZE",
        help="read bandwidth of the disk tier in bytes/s, such as 3GB",
    )
    add(
        "--disk-write-bandwidth",
        type=parse_size,
        metavar="SIZE",
        help="write bandwidth of the disk tier in bytes/s, such as 1500MB",
    )
    add("--step-overhead-ms", type=number, metavar="MS", help="fixed time per step in milliseconds")


def chosen_run(args: argparse.Namespace) -> WorkloadRecording | None:
    """Read the recording that is used as the workload; return None for other workloads.

    Raises BadInput for an unknown workload, for a file that is not a recording, and for a recording without requests.
    """
    _check_workload(args)
    if Path(args.workload).suffix.lower() != ".mcap":
        return None
    from kvscope_engine.simulator.workload_recording import read_workload_recording
    from kvscope_telemetry.recordings.sample import named_recording

    return read_workload_recording(named_recording(args.workload), args.requests)


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
            state_interval=args.state_interval,
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


def chosen_workload(args: argparse.Namespace, max_model_len: int, run: WorkloadRecording | None) -> Workload:
    from kvscope_engine.simulator.workloads.azure import read_azure
    from kvscope_engine.simulator.workloads.generators import generate
    from kvscope_engine.simulator.workloads.mooncake import read_mooncake

    if run is not None:
        return run.workload
    if args.workload in GENERATORS:
        return generate(args.workload, _generator_options(args), max_model_len)
    path = Path(args.workload)
    read = read_mooncake if path.suffix.lower() == ".jsonl" else read_azure
    return read(path, args.requests)


def _check_workload(args: argparse.Namespace) -> None:
    if args.workload in GENERATORS:
        return
    if Path(args.workload).suffix.lower() not in SUFFIXES:
        raise BadInput(f"workload {args.workload!r:.200} is not known: {WORKLOADS}")
    for name in GENERATOR_ONLY:
        if getattr(args, name) is not None:
            raise BadInput(
                f"--{name.replace('_', '-')} is not accepted with a trace or a recording:"
                f" it is for {', '.join(GENERATORS)}"
            )


def _generator_options(args: argparse.Namespace) -> GeneratorOptions:
    return GeneratorOptions(
        num_requests=DEFAULT_REQUESTS if args.requests is None else args.requests,
        rate=math.inf if args.rate is None else args.rate,
        arrivals=args.arrivals or "poisson",
        shared_prefix_tokens=args.shared_prefix or 0,
        num_prefixes=1 if args.num_prefixes is None else args.num_prefixes,
        seed=args.seed or 0,
    )


def recording_paths(args: argparse.Namespace, labels: Sequence[str]) -> list[Path]:
    """Return the path of the recording to write for each run, in order; empty without `--record`. Raises BadInput for a
    path that is in use.
    """
    if args.record is None:
        return []
    from kvscope_telemetry.recordings.mcap_file import check_path

    path, names = Path(args.record), [label.replace(", ", "-").replace(" ", "-") for label in labels]
    paths = [path] if len(names) == 1 else [path.with_stem(f"{path.stem}-{name}") for name in names]
    for each in paths:
        check_path(each)
    return paths


def chosen_allocators(args: argparse.Namespace, cache: CacheInfo | None) -> list[str]:
    """Return the allocators of the options, or else that of the recorded engine."""
    recorded = cache.allocator if cache is not None and cache.allocator in ALLOCATORS else "paged"
    names: list[str] = []
    for name in args.allocator or [recorded]:
        names += ALLOCATORS if name == "all" else [name]
    return list(dict.fromkeys(names))
