"""Decode steps of a batch: with and without CUDA graphs, with other options, and by transformers' `generate`.

Each is compared with the time of reading the required bytes once (weights, and the batch's keys and values), at the
bandwidth of a plain read measured in the same run, and at the data sheet's bandwidth.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import numpy as np

from kvscope_engine.bench.measure import with_prefix
from kvscope_engine.bench.on_gpu.card import GpuClocks
from kvscope_engine.bench.on_gpu.setting import GIB, Setting, free_unused_memory
from kvscope_engine.bench.workloads import SAMPLINGS
from kvscope_engine.engine import Engine
from kvscope_engine.text_table import table
from kvscope_telemetry.messages.commands import Submit, Tokens
from kvscope_telemetry.messages.sampling_params import SamplingParams
from kvscope_telemetry.messages.telemetry import Frame, TelemetryMessage

WARM_STEPS: Final = 4
HOST_BOUND_KINDS: Final = ("eager", "transformers")
"""Kinds of table rows in which the host launches each kernel, so that on most machines the host's speed is measured."""
TAIL_PERCENTILE: Final = 99


def decode_steps(
    args: argparse.Namespace,
    setting: Setting,
    batches: list[int],
    engines: Mapping[str, dict[str, Any]],
    show_progress: Callable[[str], None],
    report: dict[str, Any],
) -> None:
    """Add the start time and memory of each engine to `report`, and a table row for each engine, batch size and
    sampling mode.
    """
    report |= {"engines": {}, "steps": []}
    for kind, options in engines.items():
        show_progress(f"{kind}: starts")
        started, rows = _engine(args, setting, options, batches, with_prefix(kind, show_progress))
        report["engines"][kind] = started
        report["steps"] += [{"kind": kind, **row} for row in rows]
    if args.transformers:
        report["steps"] += _transformers(args, setting, batches, show_progress)
        free_unused_memory()


def decode_steps_text(report: dict[str, Any]) -> str:
    read, sheet = report["read_gb_per_s"], report["data_sheet_gb_per_s"]
    lines = []
    if read is not None:
        of_sheet = "" if sheet is None else f", {read / sheet:.0%} of the data sheet's {sheet}"
        lines.append(f"a plain read takes {read:.0f} GB/s{of_sheet}")
    for kind, found in report["engines"].items():
        sizes = f"weights {found['weights_bytes'] / GIB:.2f} GiB, KV {found['kv_bytes'] / GIB:.2f} GiB"
        if "used_bytes" in found:
            used, allowed = found["used_bytes"] / GIB, found["allowed_bytes"] / GIB
            sizes += f", in all {used:.2f} GiB, {used / allowed:.1%} of the {allowed:.2f} GiB that it may use"
        lines.append(f"{kind}: started in {found['start_s']:.1f} s; {sizes}")
        lines += [f"  {line}" for line in (found["plan"], *found["notes"], found["overlaps"]) if line]
    lines.append(f"steps that decode, context {report['context']}")
    order = {(row["batch"], row["sampling"]): None for row in report["steps"]}
    rows = [_row(report, row) for key in order for row in report["steps"] if (row["batch"], row["sampling"]) == key]
    lines.append(table(HEADER, rows, left_aligned=(0, 1, 2)))
    if any(map(_is_below_batch_size, report["steps"])):
        lines.append(
            "N at once: the KV memory is too small for the whole batch, so only N of its requests ran together"
        )
    return "\n".join(lines)


HEADER: Final = (
    "batch",
    "",
    "sampling",
    "step ms",
    f"p{TAIL_PERCENTILE}",
    "tokens/s",
    "forward ms",
    "other ms",
    "host ms",
    "launches",
    "of a read",
    "of the sheet",
    "MHz, SM/memory",
)


def samplings(args: argparse.Namespace, batch: int, batches: list[int]) -> list[str]:
    """Return the sampling modes to measure for a batch: those requested or, by default, greedy, and for the largest
    batch also top-p.
    """
    if args.sampling:
        return list(dict.fromkeys(args.sampling))
    return list(SAMPLINGS) if batch == max(batches) else ["greedy"]


def needed_model_len(args: argparse.Namespace, batches: list[int], num_steps: int, max_tokens_per_step: int = 1) -> int:
    """Return the `max_model_len` needed for `num_steps` steps of the largest batch.

    It includes the tokens that requests generate while others are still being prefilled.
    """
    return int(args.context + max_tokens_per_step * (num_steps + 64 + max(batches) * args.context // 1024))


def max_tokens_per_step(options: Mapping[str, Any]) -> int:
    """Return the maximum number of tokens per step of one request, including speculative tokens."""
    speculative = options.get("speculative_config")
    return 1 if speculative is None else 1 + int(speculative.num_speculative_tokens)


@contextmanager
def decoding(
    engine: Engine, batch: int, args: argparse.Namespace, max_model_len: int, sampled: str = "greedy"
) -> Iterator[float]:
    """Run a batch of different prompts of --context tokens until all requests decode.

    Yields the seconds of the prefill. The requests are aborted at the end.
    """
    max_new_tokens = max_model_len - args.context
    sampling = SamplingParams(max_tokens=max_new_tokens, ignore_eos=True, **SAMPLINGS[sampled])
    ids = [f"{batch}-{index}" for index in range(batch)]
    for index, request_id in enumerate(ids):
        prompt = tuple((index * 7919 + position * 31) % 4000 + 3 for position in range(args.context))
        engine.submit(Submit(request_id=request_id, prompt_token_ids=prompt, sampling=sampling))
    started: set[str] = set()
    begin = time.perf_counter()
    while len(started) < batch:
        started |= {message.request_id for message in engine.step() if isinstance(message, Tokens)}
    prefill_s = time.perf_counter() - begin
    for _ in range(WARM_STEPS):
        engine.step()
    yield prefill_s
    for request_id in ids:
        engine.abort(request_id)
    while engine.has_unfinished:
        engine.step()


def step_ms(engine: Engine) -> float:
    begin = time.perf_counter()
    engine.step()
    return (time.perf_counter() - begin) * 1e3


def _engine(
    args: argparse.Namespace,
    setting: Setting,
    options: dict[str, Any],
    batches: list[int],
    show_progress: Callable[[str], None],
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    import torch

    frames: list[Frame] = []

    def collect_frame(message: TelemetryMessage) -> None:
        if isinstance(message, Frame):
            frames.append(message)

    max_model_len = needed_model_len(args, batches, args.steps, max_tokens_per_step(options))
    config = setting.engine_config(max_num_seqs=max(batches), max_model_len=max_model_len, **options)
    started = time.perf_counter()
    engine = Engine(config, publish=collect_frame)
    start_report: dict[str, Any] = {"start_s": time.perf_counter() - started}
    rows = []
    clocks = GpuClocks(args.device)
    with engine:
        memory = engine.memory()
        start_report |= {"weights_bytes": memory.weights_bytes, "kv_bytes": memory.kv_bytes, "plan": engine.memory_plan}
        if args.device == "cuda":
            free, total = torch.cuda.mem_get_info()
            start_report["used_bytes"], start_report["allowed_bytes"] = total - free, setting.share * total
        for batch in batches:
            for sampled in samplings(args, batch, batches):
                show_progress(f"batch {batch}, {sampled}")
                with decoding(engine, batch, args, max_model_len, sampled) as prefill_s:
                    measured = _measured(engine, frames, args.steps) | clocks.sample()
                rows.append({"batch": batch, "sampling": sampled, "prefill_s": prefill_s, **measured})
        start_report["overlaps"] = engine.overlaps.summary()
        start_report["notes"] = list(engine.notes)
    del engine
    free_unused_memory()
    return start_report, rows


def _measured(engine: Engine, frames: list[Frame], num_steps: int) -> dict[str, float]:
    """Measure `num_steps` steps. Returns median times in ms, tokens per second, and the median bytes that a step had to
    read.

    `requests` in the result is the median number of requests that got a token: below the batch size if the KV cache is
    too small.
    """
    frames.clear()
    overlap_ns, overlapped = engine.overlaps.overlap_ns, engine.overlaps.overlapped
    step_times_ms: list[float] = []
    num_requests: list[int] = []
    num_tokens = 0
    for _ in range(num_steps):
        begin = time.perf_counter()
        messages = engine.step()
        step_times_ms.append((time.perf_counter() - begin) * 1e3)
        tokens = [message for message in messages if isinstance(message, Tokens)]
        num_tokens += sum(len(message.token_ids) for message in tokens)
        num_requests.append(len({message.request_id for message in tokens}))
    overlapped = engine.overlaps.overlapped - overlapped
    parts = {
        name.removesuffix("_ns") + "_ms": statistics.median(getattr(each.timings, name) for each in frames) / 1e6
        for name in ("schedule_ns", "run_ns", "forward_ns", "commit_ns", "record_ns")
    }
    step_ms = statistics.median(step_times_ms)
    overlapped_host_ms = (engine.overlaps.overlap_ns - overlap_ns) / 1e6 / num_steps
    exposed_host_ms = max(0.0, step_ms - parts["forward_ms"]) * (1.0 - min(1.0, overlapped / num_steps))
    return {
        "requests": statistics.median_low(num_requests),
        "step_ms": step_ms,
        "p99_ms": float(np.percentile(step_times_ms, TAIL_PERCENTILE)),
        "tokens_per_second": num_tokens / sum(step_times_ms) * 1e3,
        **parts,
        "host_ms": overlapped_host_ms + exposed_host_ms,
        "launches": statistics.median(each.work.launches for each in frames),
        "read_once_bytes": statistics.median(each.work.weights_bytes + each.work.kv_read_bytes for each in frames),
    }


def _transformers(
    args: argparse.Namespace, setting: Setting, batches: list[int], show_progress: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Return the milliseconds per decoded token of each batch.

    They are computed from the difference of a long and a short run, which cancels the prompt.
    """
    import torch

    show_progress("transformers: starts")
    module = setting.transformers_module()

    def seconds(batch: int, count: int) -> float:
        ids = torch.arange(batch * args.context, device=args.device).view(batch, -1) % 4000 + 3
        options = {"do_sample": False, "min_new_tokens": count, "max_new_tokens": count, "pad_token_id": 0}
        begin = time.perf_counter()
        with torch.inference_mode():
            module.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)
        return time.perf_counter() - begin

    rows = []
    for batch in batches:
        show_progress(f"transformers: batch {batch}")
        seconds(batch, 2)
        step_ms = (seconds(batch, 26) - seconds(batch, 2)) / 24 * 1e3
        rate = batch / step_ms * 1e3
        rows.append(
            {
                "kind": "transformers",
                "batch": batch,
                "sampling": "greedy",
                "step_ms": step_ms,
                "tokens_per_second": rate,
            }
        )
    return rows


def _row(report: dict[str, Any], step: dict[str, Any]) -> list[str]:
    mark = " (a host's speed)" if step["kind"] in HOST_BOUND_KINDS and report["read_gb_per_s"] is not None else ""
    batch = f"{step['batch']} ({step['requests']} at once)" if _is_below_batch_size(step) else str(step["batch"])
    row = [batch, step["kind"] + mark, step["sampling"], f"{step['step_ms']:.2f}"]
    if "forward_ms" not in step:
        return [*row, "", f"{step['tokens_per_second']:.0f}", *[""] * 7]
    return [
        *row,
        f"{step['p99_ms']:.2f}",
        f"{step['tokens_per_second']:.0f}",
        f"{step['forward_ms']:.2f}",
        f"{step['step_ms'] - step['forward_ms']:.2f}",
        f"{step['host_ms']:.2f}",
        f"{step['launches']:.0f}" if step["launches"] else "",
        _share(step, report["read_gb_per_s"]),
        _share(step, report["data_sheet_gb_per_s"]),
        f"{step['sm_clock_mhz']}/{step['memory_clock_mhz']}" if "sm_clock_mhz" in step else "",
    ]


def _is_below_batch_size(step: dict[str, Any]) -> bool:
    return bool(step.get("requests", step["batch"]) < step["batch"])


def _share(step: dict[str, Any], gb_per_s: float | None) -> str:
    """Return the time of one read of the required bytes at `gb_per_s` as a share of the step time; "" if the bandwidth
    is unknown.
    """
    return "" if gb_per_s is None else f"{step['read_once_bytes'] / gb_per_s / 1e6 / step['step_ms']:.0%}"
