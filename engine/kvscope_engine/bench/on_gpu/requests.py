"""Concurrent requests of mixed lengths, by kvscope's engine and by transformers' continuous batching.

They run one after another, each alone on the device, and after a warm-up with different prompts of the same lengths.
kvscope also warms up each batch size that has a CUDA graph, so that no graph is captured during the measurement. On a
GPU, transformers chooses its pages, blocks and batches; if that fails, it gets values that fit the workload.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, Final

import numpy as np

from kvscope_engine.bench.contenders.ours import OurEngine
from kvscope_engine.bench.contenders.transformers_continuous import TransformersContinuous
from kvscope_engine.bench.measure import shortened, with_prefix
from kvscope_engine.bench.on_gpu.setting import Setting, free_unused_memory
from kvscope_engine.bench.workloads import BenchWorkload, mixed, sample_text
from kvscope_engine.model.cuda_graphs.decode_graphs import captured_sizes
from kvscope_engine.text_table import table
from kvscope_telemetry.messages.telemetry import Frame

MAX_NUM_SEQS: Final = 256
NUM_RANDOM_IDS: Final = 4096
SMALLER_BATCH_TOKENS: Final = 2048
PAGE_SIZE: Final = 256
"""Default page size of transformers, in tokens."""
WARM_TOKENS: Final = 8
"""Number of output tokens per warm-up request. It is large enough that the CUDA graph of each batch size is
captured.
"""
LATENCIES: Final = {
    "ttft_p50_ms": "first token p50, ms",
    "ttft_p99_ms": "p99",
    "between_p50_ms": "between tokens p50, ms",
    "between_p99_ms": "p99",
}


class _TooSlow(Exception):
    """Raised if no token was generated within the time limit. Another attempt would take as long, so none is made."""


def requests(
    setting: Setting,
    engines: Mapping[str, dict[str, Any]],
    count: int,
    limit_s: float,
    show_progress: Callable[[str], None],
) -> dict[str, Any]:
    """Measure kvscope's engine with its default options and with each of `engines`, then transformers.

    transformers is stopped after `limit_s` seconds, and the tokens that it generated until then are counted. If it
    fails, the report has the reason.
    """
    workload, ours = _measure_ours(setting, {}, count, show_progress)
    free_unused_memory()
    others = {}
    for kind, options in engines.items():
        others[kind] = _measure_ours(setting, options, count, with_prefix(kind, show_progress))[1]
        free_unused_memory()
    report = {
        "num_requests": count,
        "prompt_tokens": sum(len(prompt) for prompt in workload.prompts),
        "output_tokens": workload.num_output_tokens,
        "limit_s": limit_s,
        "kvscope": ours,
        "with": others,
        "vllm": "not measured here" if find_spec("vllm") else "not installed",
    }
    theirs, report["failed"] = _measure_transformers(setting, workload, limit_s, show_progress)
    free_unused_memory()
    if theirs is not None:
        report["transformers"] = theirs
        report["ours_over_theirs"] = ours["tokens_per_second"] / theirs["tokens_per_second"]
    return report


def requests_text(report: dict[str, Any]) -> str:
    """Return the results as a table, followed by transformers' settings or the reason for its absence."""
    rows = [_row("kvscope", report["kvscope"], "")]
    rows += [_row(f"kvscope, {kind}", rated, "") for kind, rated in report["with"].items()]
    if "transformers" in report:
        rows.append(_row("transformers", report["transformers"], f"{report['ours_over_theirs']:.2f} x"))
    asked = f"{report['prompt_tokens']:,} tokens of prompts, {report['output_tokens']:,} asked for"
    lines = [f"{report['num_requests']} requests at once: {asked}"]
    lines.append(table(("", "seconds", "tokens", "tokens/s", *LATENCIES.values(), "ours against it"), rows))
    if theirs := report.get("transformers"):
        settings_text = f"{theirs['num_blocks']:,} blocks, up to {theirs['max_batch_tokens']:,} tokens a batch"
        lines.append(
            f"transformers {theirs['version']}: continuous batching, attention {theirs['attention']}, {settings_text}"
        )
        if theirs["is_stopped"]:
            lines.append(f"transformers: stopped after {report['limit_s']:g} s; its tokens up to there are counted")
    lines.append(f"vLLM: {report['vllm']}")
    return "\n".join([*lines, *(f"transformers failed: {reason}" for reason in report["failed"])])


def _row(name: str, rated: dict[str, Any], ratio: str) -> list[str]:
    latencies = [f"{rated[key]:.1f}" if key in rated else "" for key in LATENCIES]
    return [
        name,
        f"{rated['seconds']:.2f}",
        f"{rated['tokens']:,}",
        f"{rated['tokens_per_second']:.0f}",
        *latencies,
        ratio,
    ]


def _measure_ours(
    setting: Setting, options: dict[str, Any], count: int, show_progress: Callable[[str], None]
) -> tuple[BenchWorkload, dict[str, Any]]:
    show_progress("kvscope starts")
    ours = OurEngine(setting.engine_config(max_num_seqs=MAX_NUM_SEQS, **options))
    with ours.engine:
        workload = mixed(count, _ids(ours))
        for size in captured_sizes(min(count, MAX_NUM_SEQS)):
            show_progress(f"kvscope warms up batches of {size}")
            ours.run(BenchWorkload(f"{size} short", workload.prompts[:1] * size, (WARM_TOKENS,) * size))
        show_progress("kvscope warms up")
        ours.run(_warm_up(workload))
        show_progress(f"kvscope runs {workload.name}")
        frames: list[Frame] = []
        ours.publish_to(lambda message: frames.append(message) if isinstance(message, Frame) else None)
        begin = time.perf_counter()
        ours.run(workload)
        seconds = time.perf_counter() - begin
        return workload, _rate_figures(workload.num_output_tokens, seconds) | _latencies(frames)


def _latencies(frames: list[Frame]) -> dict[str, float]:
    """Return latency percentiles in ms under the keys of `LATENCIES`.

    Inter-token latencies are missing if no request has a second token.
    """
    first, between = (
        np.frombuffer(b"".join(getattr(frame, name) for frame in frames), "<u8") / 1e6
        for name in ("first_token_ns", "inter_token_ns")
    )
    percentiles = {"ttft_p50_ms": (first, 50), "ttft_p99_ms": (first, 99)}
    percentiles |= {"between_p50_ms": (between, 50), "between_p99_ms": (between, 99)}
    return {name: float(np.percentile(times, share)) for name, (times, share) in percentiles.items() if times.size}


def _ids(ours: OurEngine) -> list[int]:
    """Return the token ids of a real text, or random ids if the model has random weights and no tokenizer."""
    tokenizer = ours.engine.tokenizer
    if tokenizer is not None:
        return list(tokenizer.encode(sample_text()))
    rng = random.Random(0)
    return [rng.randrange(ours.engine.hello.model.vocab_size) for _ in range(NUM_RANDOM_IDS)]


def _warm_up(workload: BenchWorkload) -> BenchWorkload:
    """Return a warm-up workload with reversed prompts, so that no prefix cache contains the measured ones."""
    backwards = tuple(prompt[::-1] for prompt in workload.prompts)
    return replace(shortened(workload), name="warm-up", prompts=backwards)


def _measure_transformers(
    setting: Setting, workload: BenchWorkload, limit_s: float, show_progress: Callable[[str], None]
) -> tuple[dict[str, Any] | None, list[str]]:
    """Return transformers' results, or None if all attempts failed, and the reasons of failed attempts."""
    attempts: list[dict[str, int] | None] = [None]
    if setting.device == "cuda":
        attempts = [{}, {"max_batch_tokens": SMALLER_BATCH_TOKENS, "num_blocks": _num_blocks(workload)}]
    failed: list[str] = []
    for batching in attempts:
        try:
            return _run_transformers(setting, workload, limit_s, batching, show_progress), failed
        except _TooSlow as error:
            return None, [*failed, str(error)]
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            failed.append(reason if not batching else f"with {batching}: {reason}")
        free_unused_memory()
    return None, failed


def _num_blocks(workload: BenchWorkload) -> int:
    requested = zip(workload.prompts, workload.output_tokens, strict=True)
    return sum((len(prompt) + count) // PAGE_SIZE + 2 for prompt, count in requested)


def _run_transformers(
    setting: Setting,
    workload: BenchWorkload,
    limit_s: float,
    batching: dict[str, int] | None,
    show_progress: Callable[[str], None],
) -> dict[str, Any]:
    import transformers

    show_progress("transformers starts")
    contender = TransformersContinuous(setting.transformers_module(), batching)
    with contender.session(workload) as session:
        show_progress("transformers warms up")
        if not session.generate(_warm_up(workload), limit_s).is_whole:
            raise _TooSlow(f"not all requests had four tokens after {limit_s:g} s")
        show_progress(f"transformers runs {workload.name}")
        generated = session.generate(workload, limit_s)
        if not generated.num_tokens:
            raise _TooSlow(f"no request had a token after {limit_s:g} s")
        run_facts = {"version": transformers.__version__, "is_stopped": not generated.is_whole}
        return _rate_figures(generated.num_tokens, generated.seconds) | run_facts | session.settings


def _rate_figures(num_tokens: int, seconds: float) -> dict[str, Any]:
    return {"seconds": seconds, "tokens": num_tokens, "tokens_per_second": num_tokens / seconds}
