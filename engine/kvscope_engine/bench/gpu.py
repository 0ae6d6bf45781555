"""`kvscope-engine bench gpu`: how near the GPU's memory speed each decoded token comes, and what starting takes.

Random weights of a configuration (Llama-3-8B's without one) or a model. For each batch: the median step with CUDA
graphs and without, beside the time that reading the weights and the batch's keys and values once takes at the speed
of a plain read measured in this run; then, with --transformers, the same batch by transformers' `generate`.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from kvscope_engine.bench.table import table
from kvscope_engine.cli.parser import parse_size
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.commands import Submit
from kvscope_telemetry.messages.sampling_params import SamplingParams
from kvscope_telemetry.messages.telemetry import Frame, TelemetryMessage

LLAMA_8B: Final[dict[str, Any]] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
READ_BYTES: Final = 1 << 30
GIB: Final = 1 << 30
BLOCK_SIZE: Final = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--model", metavar="M", help="as of `serve` (without it: random weights, Llama-3-8B's shape)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to see that it runs")
    parser.add_argument("--batch", type=int, action="append", metavar="N", help="repeatable (without it: 1, 16, 64)")
    parser.add_argument("--context", type=int, default=1024, metavar="TOKENS", help="cached by each request")
    parser.add_argument("--steps", type=int, default=64, metavar="N", help="measured for each batch")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.9, metavar="SHARE", help="as of `serve`")
    parser.add_argument(
        "--memory", type=parse_size, metavar="SIZE", help="as on a GPU of this size: torch is refused any more"
    )
    parser.add_argument("--kv-cache-dtype", default="auto", help="as of `serve`")
    parser.add_argument("--no-eager", action="store_true", help="leave out the steps without CUDA graphs")
    parser.add_argument("--turns", action="store_true", help="also with graphs and --no-async-scheduling")
    parser.add_argument("--transformers", action="store_true", help="also transformers' generate")


def run(args: argparse.Namespace) -> int:
    """Measure and print; 0 when all ran."""
    import torch

    if not 0.0 < args.gpu_memory_utilization <= 1.0:
        raise BadInput(f"--gpu-memory-utilization {args.gpu_memory_utilization} is not accepted: above 0, at most 1")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise BadInput("--device cuda is not accepted: torch finds no CUDA device")
    if args.context < 1 or args.steps < 1 or min(args.batch or [1]) < 1:
        raise BadInput("--context, --steps and --batch are at least 1 each")
    batches = args.batch or [1, 16, 64]
    share = _share(args)
    report: dict[str, Any] = {"device": _device_name(args.device), "torch": torch.__version__, "context": args.context}
    report["read_gb_per_s"] = _read_rate(args.device)
    with _model(args) as model:
        kinds: dict[str, dict[str, Any]] = {"graphs": {}}
        if args.turns:
            kinds["turns"] = {"async_scheduling": False}
        if not args.no_eager and args.device != "cpu":
            kinds["eager"] = {"enforce_eager": True}
        for kind, options in kinds.items():
            report[kind] = _engine(args, model, options, batches, share)
        if args.transformers:
            report["transformers"] = _transformers(args, model, batches)
    print(json.dumps(report) if args.json else _text(report, batches))
    return 0


def _device_name(device: str) -> str:
    import torch

    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


@contextmanager
def _model(args: argparse.Namespace) -> Iterator[str]:
    if args.model:
        yield args.model
        return
    with tempfile.TemporaryDirectory(prefix="kvscope-bench-") as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(LLAMA_8B))
        yield f"dummy:{path}"


def _read_rate(device: str) -> float:
    """Bytes a nanosecond of reading, which is GB/s: the limit that steps are held against."""
    import torch

    if device == "cpu":
        return 0.0
    from kvscope_kernels.benchmark.stream_read import stream_read, sums_for
    from kvscope_kernels.benchmark.timing import time_on_gpu

    data = torch.ones(READ_BYTES // 4, dtype=torch.int32, device=device)
    sums = sums_for(data)
    seconds = time_on_gpu({"read": [lambda: stream_read(data, sums)]})["read"]
    return float(READ_BYTES / seconds / 1e9)


def _share(args: argparse.Namespace) -> float:
    """Of the memory that is there, which may be more than the GPU that is meant has."""
    import torch

    share = float(args.gpu_memory_utilization)
    if args.memory is None or args.device == "cpu":
        return share
    total = torch.cuda.mem_get_info()[1]
    if args.memory > total:
        raise BadInput(f"--memory {args.memory / GIB:.0f} GiB is not accepted: the GPU has {total / GIB:.0f} GiB")
    torch.cuda.set_per_process_memory_fraction(args.memory / total)
    return float(share * args.memory / total)


def _engine(
    args: argparse.Namespace, model: str, options: dict[str, Any], batches: list[int], share: float
) -> dict[str, Any]:
    """One engine: what its start took, and a median step for each batch."""
    import torch

    from kvscope_engine.config import EngineConfig
    from kvscope_engine.engine import Engine

    frames: list[Frame] = []

    def take(message: TelemetryMessage) -> None:
        if isinstance(message, Frame):
            frames.append(message)

    config = EngineConfig(
        model=model,
        device=args.device,
        dtype="bfloat16",
        block_size=BLOCK_SIZE,
        kv_cache_dtype=args.kv_cache_dtype,
        max_num_seqs=max(batches),
        max_model_len=args.context + args.steps + 64,
        gpu_memory_utilization=share,
        enable_prefix_caching=False,
        **options,
    )
    started = time.perf_counter()
    engine = Engine(config, publish=take)
    found: dict[str, Any] = {"start_s": time.perf_counter() - started}
    with engine:
        memory = engine.memory()
        found |= {"weights_bytes": memory.weights_bytes, "kv_bytes": memory.kv_bytes, "plan": engine.memory_plan}
        found["notes"] = list(engine.notes)
        if args.device == "cuda":
            free, total = torch.cuda.mem_get_info()
            found["used_bytes"], found["allowed_bytes"] = total - free, share * total
        found["steps"] = {str(batch): _steps(engine, batch, args, frames) for batch in batches}
        found["overlaps"] = engine.overlaps.summary()
        found["read_once_bytes"] = {str(batch): _read_once(engine, batch, args) for batch in batches}
    del engine
    _empty()
    return found


def _steps(engine: Any, batch: int, args: argparse.Namespace, frames: list[Frame]) -> dict[str, float]:
    """Median milliseconds of a step that decodes the whole batch, and of its parts."""
    sampling = SamplingParams(temperature=0.0, max_tokens=args.steps + 16, ignore_eos=True)
    for index in range(batch):
        prompt = tuple((index * 7919 + place * 31) % 4000 + 3 for place in range(args.context))
        engine.submit(Submit(request_id=f"{batch}-{index}", prompt_token_ids=prompt, sampling=sampling))
    num_before = frames[-1].counters.generation_tokens if frames else 0
    begin = time.perf_counter()
    while not frames or frames[-1].counters.generation_tokens - num_before < batch:
        engine.step()
    prefill_s = time.perf_counter() - begin
    for _ in range(4):
        engine.step()
    taken_ms = []
    frames.clear()
    for _ in range(args.steps):
        begin = time.perf_counter()
        engine.step()
        taken_ms.append((time.perf_counter() - begin) * 1e3)
    parts = {
        name.removesuffix("_ns") + "_ms": statistics.median(getattr(each.timings, name) for each in frames) / 1e6
        for name in ("schedule_ns", "run_ns", "forward_ns", "commit_ns", "record_ns")
    }
    while engine.num_unfinished:
        engine.step()
    return {"step_ms": statistics.median(taken_ms), "prefill_s": prefill_s, **parts}


def _read_once(engine: Any, batch: int, args: argparse.Namespace) -> int:
    """Bytes that a decode step has to read: all weights but the input's embeddings, and the batch's keys and values."""
    loaded = engine._parts.loaded
    module = loaded.module
    weights = sum(each.numel() * each.element_size() for each in module.parameters())
    embedding = module.get_input_embeddings().weight
    if module.get_output_embeddings().weight is not embedding:
        weights -= embedding.numel() * embedding.element_size()
    memory = engine.memory()
    num_slots = engine._parts.storage.num_blocks * BLOCK_SIZE
    return int(weights + batch * (args.context + args.steps // 2) * memory.kv_bytes // num_slots)


def _transformers(args: argparse.Namespace, model: str, batches: list[int]) -> dict[str, Any]:
    """Milliseconds a decoded token of each batch: a long run less a short one, so that the prompt falls out."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    if model.startswith("dummy:"):
        with torch.device(args.device):
            hf_config = AutoConfig.from_pretrained(model.removeprefix("dummy:"))
            module = auto.from_config(hf_config, dtype=torch.bfloat16)
    else:
        module = auto.from_pretrained(model, dtype=torch.bfloat16).to(args.device)
    module.eval()

    def seconds(batch: int, count: int) -> float:
        ids = torch.arange(batch * args.context, device=args.device).view(batch, -1) % 4000 + 3
        options = {"do_sample": False, "min_new_tokens": count, "max_new_tokens": count, "pad_token_id": 0}
        begin = time.perf_counter()
        with torch.inference_mode():
            module.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)
        return time.perf_counter() - begin

    found = {}
    for batch in batches:
        seconds(batch, 2)
        found[str(batch)] = {"step_ms": (seconds(batch, 26) - seconds(batch, 2)) / 24 * 1e3}
    return {"steps": found}


def _empty() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _text(report: dict[str, Any], batches: list[int]) -> str:
    rate = report["read_gb_per_s"]
    lines = [
        f"{report['device']}, torch {report['torch']}; a plain read takes {rate:.0f} GB/s; context {report['context']}"
    ]
    kinds = [kind for kind in ("graphs", "turns", "eager", "transformers") if kind in report]
    for kind in kinds:
        found = report[kind]
        if "start_s" in found:
            sizes = f"weights {found['weights_bytes'] / GIB:.2f} GiB, KV {found['kv_bytes'] / GIB:.2f} GiB"
            if "used_bytes" in found:
                used, allowed = found["used_bytes"] / GIB, found["allowed_bytes"] / GIB
                sizes += f", in all {used:.2f} GiB, {used / allowed:.1%} of the {allowed:.2f} GiB that it may use"
            lines.append(f"{kind}: started in {found['start_s']:.1f} s; {sizes}")
            lines += [f"  {line}" for line in (found["plan"], *found["notes"], found["overlaps"]) if line]
    rows = [_row(report, kind, batch) for batch in batches for kind in kinds]
    header = ("batch", "", "step ms", "tokens/s", "forward ms", "other ms", "of the limit")
    return "\n".join([*lines, table(header, rows)])


def _row(report: dict[str, Any], kind: str, batch: int) -> list[str]:
    step = report[kind]["steps"][str(batch)]
    row = [str(batch), kind, f"{step['step_ms']:.2f}", f"{batch / step['step_ms'] * 1e3:.0f}"]
    if "forward_ms" not in step:
        return [*row, "", "", ""]
    limit_ms = report[kind]["read_once_bytes"][str(batch)] / max(report["read_gb_per_s"], 1e-9) / 1e6
    share = f"{limit_ms / step['step_ms']:.0%}" if report["read_gb_per_s"] else ""
    return [*row, f"{step['forward_ms']:.2f}", f"{step['step_ms'] - step['forward_ms']:.2f}", share]


if __name__ == "__main__":
    sys.exit("run it as `kvscope-engine bench gpu`")
