"""Steps that decode a whole batch: with CUDA graphs, without, and by transformers' `generate`.

Each is held against the time that reading the weights and the batch's keys and values once takes, at the speed of a
plain read measured in the same run.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from kvscope_engine.bench.on_gpu.setting import GIB, Setting, empty
from kvscope_engine.bench.table import table
from kvscope_engine.engine import Engine
from kvscope_telemetry.messages.commands import Submit, Tokens
from kvscope_telemetry.messages.sampling_params import SamplingParams
from kvscope_telemetry.messages.telemetry import Frame, TelemetryMessage

READ_BYTES: Final = 1 << 30
BLOCK_SIZE: Final = 16
WARM_STEPS: Final = 4


def decode_steps(args: argparse.Namespace, setting: Setting, batches: list[int]) -> dict[str, Any]:
    """The speed of a plain read, and each kind's steps."""
    report: dict[str, Any] = {"read_gb_per_s": _read_rate(args.device)}
    kinds: dict[str, dict[str, Any]] = {"graphs": {}}
    if args.turns:
        kinds["turns"] = {"async_scheduling": False}
    if not args.no_eager and args.device != "cpu":
        kinds["eager"] = {"enforce_eager": True}
    for kind, options in kinds.items():
        report[kind] = _engine(args, setting, options, batches)
    if args.transformers:
        report["transformers"] = _transformers(args, setting, batches)
        empty()
    return report


def decode_steps_text(report: dict[str, Any], batches: list[int]) -> str:
    """Tables of it."""
    rate = report["read_gb_per_s"]
    lines = [f"a plain read takes {rate:.0f} GB/s; context {report['context']}"]
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


def room(args: argparse.Namespace, batches: list[int], num_steps: int) -> int:
    """`max_model_len` for so many steps of the largest batch: who is filled first decodes while others are filled."""
    return int(args.context + num_steps + 64 + max(batches) * args.context // 1024)


@contextmanager
def decoding(engine: Engine, batch: int, args: argparse.Namespace, max_model_len: int) -> Iterator[float]:
    """A batch of different prompts of --context tokens, all of which decode; the seconds that filling them took."""
    sampling = SamplingParams(temperature=0.0, max_tokens=max_model_len - args.context, ignore_eos=True)
    ids = [f"{batch}-{index}" for index in range(batch)]
    for index, request_id in enumerate(ids):
        prompt = tuple((index * 7919 + place * 31) % 4000 + 3 for place in range(args.context))
        engine.submit(Submit(request_id=request_id, prompt_token_ids=prompt, sampling=sampling))
    heard: set[str] = set()
    begin = time.perf_counter()
    while len(heard) < batch:
        heard |= {message.request_id for message in engine.step() if isinstance(message, Tokens)}
    prefill_s = time.perf_counter() - begin
    for _ in range(WARM_STEPS):
        engine.step()
    yield prefill_s
    for request_id in ids:
        engine.abort(request_id)
    while engine.num_unfinished:
        engine.step()


def step_ms(engine: Engine) -> float:
    """Milliseconds that one step takes, by the wall's clock."""
    begin = time.perf_counter()
    engine.step()
    return (time.perf_counter() - begin) * 1e3


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


def _engine(args: argparse.Namespace, setting: Setting, options: dict[str, Any], batches: list[int]) -> dict[str, Any]:
    """One engine: what its start took, and a median step for each batch."""
    import torch

    frames: list[Frame] = []

    def take(message: TelemetryMessage) -> None:
        if isinstance(message, Frame):
            frames.append(message)

    max_model_len = room(args, batches, args.steps)
    config = setting.engine_config(
        block_size=BLOCK_SIZE, max_num_seqs=max(batches), max_model_len=max_model_len, **options
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
            found["used_bytes"], found["allowed_bytes"] = total - free, setting.share * total
        found["steps"] = {str(batch): _steps(engine, batch, args, frames, max_model_len) for batch in batches}
        found["overlaps"] = engine.overlaps.summary()
        found["read_once_bytes"] = {str(batch): _read_once(engine, batch, args) for batch in batches}
    del engine
    empty()
    return found


def _steps(
    engine: Engine, batch: int, args: argparse.Namespace, frames: list[Frame], max_model_len: int
) -> dict[str, float]:
    """Median milliseconds of a step that decodes the whole batch, and of its parts."""
    with decoding(engine, batch, args, max_model_len) as prefill_s:
        frames.clear()
        taken_ms = [step_ms(engine) for _ in range(args.steps)]
        parts = {
            name.removesuffix("_ns") + "_ms": statistics.median(getattr(each.timings, name) for each in frames) / 1e6
            for name in ("schedule_ns", "run_ns", "forward_ns", "commit_ns", "record_ns")
        }
    return {"step_ms": statistics.median(taken_ms), "prefill_s": prefill_s, **parts}


def _read_once(engine: Engine, batch: int, args: argparse.Namespace) -> int:
    """Bytes that a decode step has to read: all weights but the input's embeddings, and the batch's keys and values."""
    loaded = engine.components.loaded
    module: Any = loaded.module
    weights = sum(each.numel() * each.element_size() for each in module.parameters())
    embedding = module.get_input_embeddings().weight
    if module.get_output_embeddings().weight is not embedding:
        weights -= embedding.numel() * embedding.element_size()
    memory = engine.memory()
    num_slots = engine.components.storage.num_blocks * BLOCK_SIZE
    return int(weights + batch * (args.context + args.steps // 2) * memory.kv_bytes // num_slots)


def _transformers(args: argparse.Namespace, setting: Setting, batches: list[int]) -> dict[str, Any]:
    """Milliseconds a decoded token of each batch: a long run less a short one, so that the prompt falls out."""
    import torch

    module = setting.transformers_module()

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


def _row(report: dict[str, Any], kind: str, batch: int) -> list[str]:
    step = report[kind]["steps"][str(batch)]
    row = [str(batch), kind, f"{step['step_ms']:.2f}", f"{batch / step['step_ms'] * 1e3:.0f}"]
    if "forward_ms" not in step:
        return [*row, "", "", ""]
    limit_ms = report[kind]["read_once_bytes"][str(batch)] / max(report["read_gb_per_s"], 1e-9) / 1e6
    share = f"{limit_ms / step['step_ms']:.0%}" if report["read_gb_per_s"] else ""
    return [*row, f"{step['forward_ms']:.2f}", f"{step['step_ms'] - step['forward_ms']:.2f}", share]
