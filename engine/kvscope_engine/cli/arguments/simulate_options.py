"""Options of `simulate`, grouped as in its help. Names are vLLM's where the meaning is the same.

`simulated_workload.py` and `simulated_engine.py` convert the options to settings, which check the ranges.
"""

from __future__ import annotations

import argparse
from typing import Final

from kvscope_engine.command_parser import number, parse_int, parse_size
from kvscope_engine.policy.allocation.allocator_names import ALLOCATORS
from kvscope_engine.simulator.costs.cost_model import PRESETS
from kvscope_engine.simulator.workloads.generators import ARRIVALS, GENERATORS
from kvscope_telemetry.engine_config import PREEMPTIONS

WORKLOADS: Final = (
    "a recording (.mcap, or the word sample or sample-hybrid), a trace (.jsonl: Mooncake, .csv: Azure LLM inference)"
    f" or one of {', '.join(GENERATORS)}"
)
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
        help="tokens between saved states of recurrent layers (default: as recorded, else 512)",
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
