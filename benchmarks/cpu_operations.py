"""Measure the CPU's operations separately, in CPU time of one thread, so that other load on the machine matters little.

products: matmuls with the default model's shapes, by number of rows, compared with oneDNN's bfloat16
layers: steps of a model with Qwen3-0.6B's shapes, alternating between fused layers and their single operations
heat: steps that measure page heat, compared with steps that do not
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.command_line import run_benchmark
from kvscope_engine import Engine, EngineConfig, SamplingParams
from kvscope_engine.bench.laboratory.heat_cost import NewestStep
from kvscope_engine.bench.workloads import sample_text
from kvscope_engine.model.layers.fused.fused_layer import FusedLayer
from kvscope_engine.model.layers.fused.packed_linear import PackedLinear
from kvscope_kernels.cpu.grouped import NativeGrouped
from kvscope_kernels.cpu.linear import Int8Weight
from kvscope_kernels.quantized_linear.grouped_weight import rounded
from kvscope_telemetry.messages.commands import Submit, Tokens

SHAPES: Final = ((960, 576), (576, 576), (3072, 576), (576, 1536))
ROWS: Final = (1, 8, 32, 96, 512)
NUM_TRIES: Final = 7
MIN_SECONDS: Final = 0.03
BATCHES: Final = (1, 8)
HEAT_INTERVAL_STEPS: Final = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("part", choices=("products", "layers", "heat"))
    parser.add_argument("--context", type=int, default=1024, metavar="N", help="tokens of each request (heat)")
    parser.add_argument("--pairs", type=int, default=20, metavar="N", help="steps of each kind (layers, heat)")


def run(args: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    if args.part == "products":
        products()
    elif args.part == "layers":
        layers(args.pairs)
    else:
        heat(args.context, args.pairs)
    return 0


def products() -> None:
    """Print the speed of matmuls in billions of multiplications per second."""
    for outputs, inputs in SHAPES:
        weight = torch.randn(outputs, inputs).bfloat16()
        implementations: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
            NativeGrouped(rounded(weight)).product,
            NativeGrouped(rounded(weight), rounds_activations=True).product,
            Int8Weight(weight).product,
            PackedLinear(weight, None),
        )
        for rows in ROWS:
            x = torch.randn(rows, inputs).bfloat16()
            rates = [f"{rows * outputs * inputs / _min_seconds(product, x) / 1e9:.0f}" for product in implementations]
            rates_text = (
                f"4 bits {rates[0]}, with activations of 8 {rates[1]}, 8 bits with such {rates[2]}, bf16 {rates[3]}"
            )
            print(f"{outputs} x {inputs}, {rows} rows: {rates_text}")


def _min_seconds(product: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> float:
    product(x)
    times = []
    for _ in range(NUM_TRIES):
        count, started = 0, time.process_time()
        while time.process_time() - started < MIN_SECONDS:
            product(x)
            count += 1
        times.append((time.process_time() - started) / count)
    return min(times)


def layers(pairs: int) -> None:
    """Print milliseconds per step of a model with six random 8-bit layers, fused and as single operations."""
    with tempfile.TemporaryDirectory() as folder, _qwen3(Path(folder) / "config.json") as engine:
        fused_layers = [item for item in gc.get_objects() if type(item) is FusedLayer]
        runners = [layer.compiled for layer in fused_layers]
        for batch in BATCHES:
            _submit(engine, batch, tuple(range(5, 69)), 2 * pairs + 8)
            for _ in range(4):
                engine.step()
            step_times: dict[bool, list[float]] = {True: [], False: []}
            for number in range(2 * pairs):
                is_compiled = number % 4 in (0, 3)
                for layer, runner in zip(fused_layers, runners, strict=True):
                    layer.compiled = runner if is_compiled else None
                step_times[is_compiled].append(_step(engine))
            while engine.has_unfinished:
                engine.step()
            whole_ms, parts_ms = (1e3 * statistics.median(step_times[is_compiled]) for is_compiled in (True, False))
            print(
                f"batch {batch}: {whole_ms:.2f} ms a step in one call, {parts_ms:.2f} part by part: "
                f"{parts_ms / whole_ms:.2f} x"
            )


def heat(context: int, pairs: int) -> None:
    """Print milliseconds per step of 8 requests that share a prompt of `context` tokens, with and without measuring
    page heat.
    """
    newest, batch = NewestStep(), BATCHES[-1]
    blocks = context // 16 + batch * (2 * pairs // 16 + 8)
    config = EngineConfig(device="cpu", num_threads=1, page_heat=2, num_gpu_blocks_override=blocks)
    with Engine(config, publish=newest.receive) as engine:
        assert engine.tokenizer is not None, "the default model has a tokenizer"
        ids = engine.tokenizer.encode(sample_text())
        prompt = tuple((ids * (context // len(ids) + 1))[:context])
        _submit(engine, 1, prompt, 2 * pairs + 40)
        while not any(isinstance(message, Tokens) for message in engine.step()):
            pass
        _submit(engine, batch - 1, prompt, 2 * pairs + 40, first=1)
        step_times: dict[bool, list[float]] = {True: [], False: []}
        while engine.has_unfinished and min(map(len, step_times.values())) < pairs:
            newest.start_step(engine)
            seconds = _step(engine)
            if newest.num_decodes == batch:
                step_times[newest.is_measured].append(seconds)
    measured, other = (1e3 * statistics.median(step_times[is_measured]) for is_measured in (True, False))
    share = 100 * (measured / other - 1) / HEAT_INTERVAL_STEPS
    print(
        f"{batch} at {context}: measured {measured:.1f} ms, others {other:.1f}; one in {HEAT_INTERVAL_STEPS}: "
        f"{share:.2f} %"
    )


def _qwen3(path: Path) -> Engine:
    from transformers import AutoConfig

    sizes: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 6, "head_dim": 128}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 4096, "max_position_embeddings": 2048}
    AutoConfig.for_model("qwen3", **sizes, **heads, tie_word_embeddings=True).to_json_file(path, use_diff=False)
    options: dict[str, Any] = {"quantization": "int8", "num_gpu_blocks_override": 256, "max_model_len": 1024}
    return Engine(EngineConfig(model=f"dummy:{path}", device="cpu", num_threads=1, **options))


def _submit(engine: Engine, count: int, prompt: tuple[int, ...], num_tokens: int, first: int = 0) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    for number in range(first, first + count):
        engine.submit(Submit(request_id=f"{count}-{number}", prompt_token_ids=prompt, sampling=sampling))


def _step(engine: Engine) -> float:
    started = time.process_time()
    engine.step()
    return time.process_time() - started


if __name__ == "__main__":
    sys.exit(run_benchmark(__doc__, add_arguments, run))
