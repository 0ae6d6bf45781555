"""Time a decode step of each family of models on a CPU, compared with transformers' `generate`.

The models have random weights in small but realistic shapes, and run on one thread with contexts of equal length. The
engine and transformers decode the same prompts, alternating every few steps. Prints CPU time per step as the median of
these turns, and the median of the ratios within pairs of turns.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from typing import Any, Final

from benchmarks.command_line import run_benchmark
from kvscope_engine.bench.measure import progress_printer
from kvscope_engine.text_table import table
from kvscope_telemetry.engine_config import EngineConfig
from kvscope_telemetry.errors import BadInput, KvscopeError

LOGITS_SCALE: Final = 8.0
"""Factor by which random logits, which differ by only 0.5, are spread. Otherwise the engine would recompute
many of them, because it does so for logits near the largest (`float32_head`).
"""
TURN_STEPS: Final = 8
"""Number of steps per turn. A block of tokens is completed in every second turn."""

# A model of each family of KV, of 40 to 115 million parameters: small enough that the whole table takes minutes, and so
# large that a step is products of weights and not Python alone. Windows and chunks are 256 tokens, so that contexts of
# 512 go beyond them.
_SIZES: Final[dict[str, Any]] = {
    "vocab_size": 16384,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}
_WINDOW: Final = 256
_FULL, _SLIDING, _CHUNKED, _LINEAR = "full_attention", "sliding_attention", "chunked_attention", "linear_attention"
_DELTA: Final[dict[str, Any]] = {
    "head_dim": 64,
    "linear_num_value_heads": 12,
    "linear_num_key_heads": 6,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "layer_types": [_LINEAR, _LINEAR, _LINEAR, _FULL] * 2,
}
_MAMBA2: Final[dict[str, Any]] = {"mamba_n_heads": 24, "mamba_d_head": 64, "mamba_d_state": 64, "mamba_expand": 2}

FAMILIES: Final[dict[str, dict[str, Any]]] = {
    "llama": _SIZES | {"model_type": "llama", "head_dim": 64},
    "qwen3-moe": _SIZES
    | {
        "model_type": "qwen3_moe",
        "head_dim": 64,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 256,
    },
    "gemma-3": _SIZES
    | {
        "model_type": "gemma3_text",
        "head_dim": 64,
        "query_pre_attn_scalar": 64,
        "sliding_window": _WINDOW,
        "layer_types": [_SLIDING] * 5 + [_FULL] + [_SLIDING] * 2,
    },
    "gpt-oss": _SIZES
    | {
        "model_type": "gpt_oss",
        "head_dim": 64,
        "intermediate_size": 512,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": _WINDOW,
        "layer_types": [_SLIDING, _FULL] * 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
        "tie_word_embeddings": False,
    },
    "llama-4": _SIZES
    | {
        "model_type": "llama4_text",
        "head_dim": 64,
        "intermediate_size": 768,
        "intermediate_size_mlp": 2048,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": _WINDOW,
        "layer_types": [_CHUNKED, _CHUNKED, _CHUNKED, _FULL] * 2,
    },
    "deepseek-v3": _SIZES
    | {
        "model_type": "deepseek_v3",
        "num_key_value_heads": 12,
        "q_lora_rank": 384,
        "kv_lora_rank": 256,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 384,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "gemma-3n": _SIZES
    | {
        "model_type": "gemma3n_text",
        "head_dim": 64,
        "num_hidden_layers": 10,
        "layer_types": ([_SLIDING] * 4 + [_FULL]) * 2,
        "num_kv_shared_layers": 4,
        "hidden_size_per_layer_input": 128,
        "vocab_size_per_layer_input": 16384,
        "laurel_rank": 32,
        "sliding_window": _WINDOW,
        "activation_sparsity_pattern": [0.95] * 2 + [0.0] * 8,
    },
    "qwen3.5": _SIZES | _DELTA | {"model_type": "qwen3_5_text"},
    "qwen3-next": _SIZES
    | _DELTA
    | {
        "model_type": "qwen3_next",
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 256,
    },
    "granite-4": _SIZES
    | _MAMBA2
    | {
        "model_type": "granitemoehybrid",
        "mamba_n_groups": 1,
        "layer_types": ["mamba", "mamba", "mamba", "attention"] * 2,
        "num_local_experts": 0,
        "shared_intermediate_size": 2048,
    },
    "nemotron-h": _SIZES
    | {
        "model_type": "nemotron_h",
        "layers_block_type": ["mamba", "mlp", "mamba", "mlp", "attention", "mlp", "mamba", "mlp"],
        "mamba_num_heads": 24,
        "mamba_head_dim": 64,
        "ssm_state_size": 64,
        "n_groups": 2,
        "head_dim": 64,
        "expand": 2,
    },
    "mamba-2": _SIZES
    | {"model_type": "mamba2", "num_heads": 24, "head_dim": 64, "state_size": 64, "n_groups": 1, "expand": 2},
    "jamba": _SIZES | {"model_type": "jamba", "attn_layer_period": 4, "attn_layer_offset": 3, "num_experts": 1},
    "lfm2": _SIZES | {"model_type": "lfm2", "layer_types": ["conv", "conv", _FULL, "conv"] * 2},
    "rwkv": _SIZES | {"model_type": "rwkv", "attention_hidden_size": 768, "context_length": 8192},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--only", action="append", choices=tuple(FAMILIES), metavar="FAMILY",
        help=f"a family of {', '.join(FAMILIES)}; repeatable (default: all)")  # fmt: skip
    add("--requests", type=int, action="append", metavar="N", help="at once; repeatable (default: 1 and 8)")
    add("--context", type=int, default=512, metavar="TOKENS", help="of each prompt (default: 512)")
    add("--repeats", type=int, default=9, metavar="N", help=f"turns of {TURN_STEPS} steps (default: 9)")
    add("--dtype", choices=("auto", "float32", "bfloat16"), default="auto",
        help="of both ours and transformers (auto: what the engine takes on this CPU)")  # fmt: skip
    add("--num-threads", type=int, default=1, metavar="N", help="of both (default: 1)")
    add("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    """Measure all families and print the results. Families that cannot be run are listed with the reason."""
    counts = args.requests or [1, 8]
    if min(*counts, args.context, args.repeats, args.num_threads) < 1:
        raise BadInput("--requests, --context, --repeats and --num-threads are not accepted: each must be 1 or more")
    import torch
    import transformers

    from kvscope_engine.model.platforms.device import choose_dtype, dtype_name

    torch.set_num_threads(args.num_threads)
    show_progress = progress_printer(args.json)
    report: dict[str, Any] = {
        "dtype": dtype_name(choose_dtype(args.dtype, torch.device("cpu"))),
        "context": args.context,
        "num_threads": args.num_threads,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "load_average": os.getloadavg()[0],
        "families": {},
        "left_out": {},
    }
    for family in args.only or FAMILIES:
        show_progress(family)
        try:
            report["families"][family] = _measure(family, counts, args)
        except KvscopeError as error:
            report["left_out"][family] = str(error)
        gc.collect()
    show_progress("")
    print(json.dumps(report) if args.json else _text(report))
    return 0


def _measure(family: str, counts: Sequence[int], args: argparse.Namespace) -> dict[str, Any]:
    import torch

    from kvscope_engine import Engine
    from kvscope_engine.model.platforms.device import choose_dtype

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = _saved_model(family, choose_dtype(args.dtype, torch.device("cpu")), folder)
        config = EngineConfig(
            model=folder,
            device="cpu",
            dtype=args.dtype,
            num_threads=args.num_threads,
            max_num_seqs=max(counts),
            max_model_len=args.context + (args.repeats + 2) * TURN_STEPS + 1,
        )
        with Engine(config) as engine:
            return {str(count): _summary(_turns(engine, module, count, args)) for count in counts}


def _saved_model(family: str, dtype: Any, folder: str) -> Any:
    """Return a random model that is also saved in `folder`. Its logits are spread as widely as those of a
    trained model.
    """
    import torch

    from kvscope_engine.model.loader.model_loader import random_model

    module: Any = random_model(family_config(family), dtype, torch.device("cpu"), 0, lambda _: None)
    module.requires_grad_(False).eval()
    module.get_output_embeddings().weight.mul_(LOGITS_SCALE)
    module.save_pretrained(folder)
    return module


def family_config(family: str) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(**FAMILIES[family])


def _turns(engine: Any, module: Any, count: int, args: argparse.Namespace) -> list[tuple[float, float]]:
    """Measure pairs of turns, and return milliseconds of CPU time per step for (engine, transformers). The
    engine runs while `generate` is paused.
    """
    import torch
    from transformers import StoppingCriteria

    from kvscope_engine import SamplingParams
    from kvscope_telemetry.messages.commands import Submit

    num_steps = (args.repeats + 1) * TURN_STEPS  # the first turn of each warms up
    prompts = _prompts(count, args.context, engine.hello.model.vocab_size)
    sampling = SamplingParams(temperature=0.0, max_tokens=num_steps + TURN_STEPS, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        engine.submit(Submit(request_id=str(number), prompt_token_ids=tuple(prompt), sampling=sampling))
    requests = list(engine.components.scheduler.requests.values())
    while not all(request.output_token_ids for request in requests):
        engine.step()
    turns: list[tuple[float, float]] = []

    class Clock(StoppingCriteria):
        """Criterion that `generate` calls after each step, the first of which computes the prompts."""

        steps, begun = 0, 0.0

        def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            if self.steps and self.steps % TURN_STEPS == 0:
                theirs = time.process_time() - self.begun
                turns.append((_engine_step_ms(engine), theirs * 1e3 / TURN_STEPS))
            self.steps += 1
            if self.steps % TURN_STEPS == 1:
                self.begun = time.process_time()
            return torch.full((len(input_ids),), False)

    ids = torch.tensor(prompts)
    with torch.inference_mode():
        module.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=num_steps + 1,
            min_new_tokens=num_steps + 1,
            pad_token_id=0,
            stopping_criteria=[Clock()],
        )
    for request in requests:
        engine.abort(request.request_id)
    while engine.has_unfinished:
        engine.step()
    engine.reset_prefix_cache()
    return turns[1:]


def _engine_step_ms(engine: Any) -> float:
    began_s = time.process_time()
    for _ in range(TURN_STEPS):
        engine.step()
    return (time.process_time() - began_s) * 1e3 / TURN_STEPS


def _prompts(count: int, length: int, vocab_size: int) -> list[list[int]]:
    """Return prompts that differ in the first token, so that they share no prefix."""
    return [
        [3 + (37 * number + 7 * position) % (vocab_size - 3) for position in range(length)] for number in range(count)
    ]


def _summary(turns: Sequence[tuple[float, float]]) -> dict[str, float]:
    return {
        "ours_ms": statistics.median(ours for ours, _ in turns),
        "transformers_ms": statistics.median(theirs for _, theirs in turns),
        "ours_over_it": statistics.median(ours / theirs for ours, theirs in turns),
    }


def _text(report: dict[str, Any]) -> str:
    counts = list(next(iter(report["families"].values()), ()))
    header = ["family"]
    for count in counts:
        header += [f"{count} at once: ours", "transformers", "ours over it"]
    rows = []
    for family, results in report["families"].items():
        row = [family]
        for result in results.values():
            row += [
                f"{result['ours_ms']:.2f} ms",
                f"{result['transformers_ms']:.2f} ms",
                f"{result['ours_over_it']:.2f} x",
            ]
        rows.append(row)
    threads = "1 thread" if report["num_threads"] == 1 else f"{report['num_threads']} threads"
    return (
        f"CPU time of a decode step behind {report['context']} tokens, {report['dtype']}, {threads}, torch"
        f" {report['torch']}, transformers {report['transformers']}, load average {report['load_average']:.1f}\n\n"
        f"{table(header, rows)}"
    ) + "".join(f"\nleft out: {family}: {reason}" for family, reason in report["left_out"].items())


if __name__ == "__main__":
    sys.exit(run_benchmark(__doc__, add_arguments, run))
