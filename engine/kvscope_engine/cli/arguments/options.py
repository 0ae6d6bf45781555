"""The options of an engine, shared by every command that starts one; vLLM's names where they mean the same.

Owns their names and help; what they mean is `EngineConfig`'s, and so are the defaults and the checks.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Final

from kvscope_engine.cli.parser import number, parse_size, whole_number
from kvscope_engine.config import (
    ATTENTION_BACKENDS,
    DEVICES,
    DTYPES,
    GENERATION_CONFIGS,
    KV_DTYPES,
    PREEMPTIONS,
    QUANTIZATIONS,
    EngineConfig,
)
from kvscope_engine.policy.allocation.names import ENGINE_ALLOCATORS
from kvscope_engine.policy.drafting.config import parse_speculative_config
from kvscope_telemetry.kv_events.config import parse_config

DEFAULTS: Final = EngineConfig()
_VLLM_BACKENDS: Final = {"FLASHINFER": "flashinfer", "FLASH_ATTN": "flash-attn", "TRITON_ATTN": "kvscope"}


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add them in groups of their own."""
    _add_model_options(parser.add_argument_group("model"))
    _add_cache_options(parser.add_argument_group("KV cache"))
    _add_tier_options(parser.add_argument_group("lower tiers of the KV cache"))
    _add_scheduler_options(parser.add_argument_group("scheduler"))


def backend_name(text: str) -> str:
    """Ours for vLLM's names of attention backends; others stay as they are."""
    return _VLLM_BACKENDS.get(text, text)


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The configuration that the options ask for; raises BadInput for a value outside its range."""
    names = [field.name for field in dataclasses.fields(EngineConfig)]
    given = {name: value for name in names if (value := getattr(args, name)) is not None}
    if "kv_events_config" in given:
        given["kv_events_config"] = parse_config(given["kv_events_config"])
    if "speculative_config" in given:
        given["speculative_config"] = parse_speculative_config(given["speculative_config"])
    return EngineConfig(**given)


def _add_model_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--model",
        metavar="M",
        default=DEFAULTS.model,
        help="`default` (SmolLM2-135M-Instruct), a Hugging Face id, a folder with safetensors,"
        " a .gguf file, or dummy:CONFIG.json for random weights",
    )
    group.add_argument("--device", choices=DEVICES, default="auto", help="device of the model")
    group.add_argument("--dtype", choices=DTYPES, default="auto", help="data type of weights and activations")
    group.add_argument(
        "--quantization",
        choices=QUANTIZATIONS,
        default="auto",
        help="auto: 4 and 8 bits are read as a GGUF, GPTQ or AWQ file holds them (a GPU: GPTQ's and AWQ's of 4) and"
        " activations are left as they are, so the tokens are those of widened weights; none: widen, the same tokens,"
        " more memory and less speed. On a CPU the others are faster, batches most of all, and give other tokens: a8 is"
        " auto with activations rounded to 8 bits, as llama.cpp does; int8 and int4 round the weights of any model too"
        " (8 bits with a scale for each 64 inputs, 4 for each 32; on a GPU weights alone)",
    )
    group.add_argument(
        "--generation-config",
        choices=GENERATION_CONFIGS,
        default="auto",
        help="auto: temperature, top-p, top-k, min-p, repetition penalty and the limit of new tokens of the model's"
        " generation_config.json (or GGUF keys) hold for requests that do not say; none (vLLM: vllm): they do not",
    )
    group.add_argument(
        "--max-model-len",
        type=whole_number,
        metavar="TOKENS",
        help="maximum tokens of prompt and output together (default: the model's limit)",
    )
    group.add_argument(
        "--seed",
        type=whole_number,
        metavar="N",
        help=f"seed for requests without one (default: {DEFAULTS.seed})",
    )
    group.add_argument(
        "--tensor-parallel-size",
        "-tp",
        type=whole_number,
        metavar="N",
        default=DEFAULTS.tensor_parallel_size,
        help="split the model across N GPUs of this machine, or N CPU processes, which are started "
        "automatically (or by torchrun)",
    )
    group.add_argument(
        "--cpu-offload-gb",
        type=number,
        metavar="GIB",
        default=DEFAULTS.cpu_offload_gb,
        help="on a GPU: GiB of weights to keep in host memory (whole layers, from the last), copied to the GPU "
        "in each step, so that larger models fit; disables CUDA graphs (0: none)",
    )
    group.add_argument(
        "--enforce-eager",
        action="store_true",
        default=None,
        help="on a GPU: run every step without CUDA graphs (slower; starts sooner and takes less memory)",
    )
    group.add_argument(
        "--piecewise-graphs",
        action="store_true",
        default=None,
        help="on a GPU: also run steps with prefills as CUDA graphs (all but attention), up to 512 tokens per step",
    )
    group.add_argument(
        "--attention-backend",
        type=backend_name,
        choices=ATTENTION_BACKENDS,
        default=DEFAULTS.attention_backend,
        help="on a GPU: attention library for prompts; auto takes FlashInfer or flash-attn if installed, "
        "suitable for the model, equal in results and measured faster at the start; kvscope's own kernels "
        "otherwise",
    )
    group.add_argument(
        "--async-scheduling",
        action=argparse.BooleanOptionalAction,
        help="schedule and launch a step while the previous one runs; the tokens are the same (default: on a GPU)",
    )
    group.add_argument(
        "--num-threads",
        type=whole_number,
        metavar="N",
        help="fixed number of CPU threads (default: OMP_NUM_THREADS, or one per physical core available to this "
        "process; fewer while other programs compete for cores)",
    )


def _add_cache_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--block-size",
        type=whole_number,
        metavar="SLOTS",
        default=DEFAULTS.block_size,
        help="tokens per block",
    )
    group.add_argument(
        "--kv-memory",
        dest="kv_memory_bytes",
        type=parse_size,
        metavar="SIZE",
        help="memory for the block pool, such as 512MiB (default: by device)",
    )
    group.add_argument(
        "--num-gpu-blocks-override",
        type=whole_number,
        metavar="BLOCKS",
        help="exact number of blocks, on a CPU too (default: as many as fit in memory)",
    )
    group.add_argument(
        "--gpu-memory-utilization",
        type=number,
        metavar="SHARE",
        default=DEFAULTS.gpu_memory_utilization,
        help="fraction of the GPU's memory the engine may use, above 0 and at most 1",
    )
    group.add_argument(
        "--kv-cache-dtype",
        choices=KV_DTYPES,
        default="auto",
        help="data type of the KV cache: that of the activations (auto), or 8 bits with a scale per token and "
        "KV head: e4m3 (fp8, also called fp8_e4m3) or int8",
    )
    group.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        help=(
            "reuse cached blocks for prompts with the same prefix (default: yes, where the allocator can share blocks)"
        ),
    )
    group.add_argument(
        "--kv-events-config",
        metavar="JSON",
        help="publish KV cache events as vLLM does, with vLLM's fields, such as '{\"enable_kv_cache_events\": "
        'true, "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}\'; anyone who reaches '
        "these endpoints can read prompt tokens; engines with the same --seed give the same text the same "
        "hash (default: off)",
    )
    group.add_argument(
        "--page-heat",
        type=whole_number,
        metavar="STEPS",
        default=DEFAULTS.page_heat,
        help="in every so many decode steps measure which share of each request's attention falls on each of its blocks"
        " (the page map's Attention colours): one more pass over the keys in that step; 16 is a good number; of layers"
        " that choose their blocks nothing falls on those passed over (0: never)",
    )
    group.add_argument(
        "--sparse-decode",
        type=number,
        metavar="FRACTION",
        help="each new token attends to this fraction of its request's blocks, above 0 and at most 1: those on which,"
        " as far as bounds of their keys tell, most of its attention falls, by layer and KV head (after Quest);"
        " prompts, the first two layers, layers with a sliding window and requests of up to 256 tokens are attended to"
        " in full; answers change a little, and the bounds of the keys take a sixteenth of the KV's memory beside it in"
        " blocks of 16, an eighth with an 8-bit KV cache (without it: all blocks)",
    )
    group.add_argument(
        "--allocator",
        choices=ENGINE_ALLOCATORS,
        default="paged",
        help="allocator; all but paged place a request's blocks in a row and have no prefix cache",
    )


def _add_tier_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--kv-host-memory",
        dest="host_kv_memory_bytes",
        type=parse_size,
        metavar="SIZE",
        help="host memory tier for preempted requests and evicted prefixes, such as 4GiB (default: none)",
    )
    group.add_argument(
        "--kv-disk",
        dest="disk_kv_memory_bytes",
        type=parse_size,
        metavar="SIZE",
        help="disk tier below host memory, such as 32GiB (default: none)",
    )
    group.add_argument(
        "--kv-disk-path",
        dest="disk_kv_path",
        metavar="FILE",
        help="file of the disk tier, on a fast drive (default: a temporary one)",
    )
    group.add_argument(
        "--kv-disk-keep",
        dest="keep_disk_kv",
        action="store_true",
        default=None,
        help="keep the disk tier's file at exit and reuse it at the next start with the same model",
    )
    group.add_argument(
        "--preemption",
        choices=PREEMPTIONS,
        default=DEFAULTS.preemption,
        help="what happens to a preempted request's tokens: recompute them, swap their blocks to host memory "
        "and back, or whichever was measured to be cheaper",
    )


def _add_scheduler_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--max-num-seqs",
        type=whole_number,
        metavar="REQUESTS",
        default=DEFAULTS.max_num_seqs,
        help="maximum requests per step",
    )
    group.add_argument(
        "--max-num-batched-tokens",
        type=whole_number,
        metavar="TOKENS",
        help="maximum tokens computed per step; prefills are chunked to fit (default: by device)",
    )
    group.add_argument(
        "--speculative-config",
        metavar="JSON",
        help="guess tokens ahead from what followed the same ones earlier in the prompt or output, and check several in"
        " one step, with vLLM's fields, such as"
        ' \'{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2}\';'
        " the tokens are the same; fast where an answer repeats its prompt (without it: no guesses)",
    )
