"""Time steps of a model on this device and fit the simulator's cost model to them (`kvscope-engine simulate --costs`).

The steps are decodes with several batch sizes and contexts, and prefill chunks with several sizes and starts. A step is
the model and the sampler, without scheduler and telemetry. Each step is repeated, and its fastest time is used.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from benchmarks.command_line import run_benchmark
from kvscope_engine.command_parser import parse_int
from kvscope_engine.policy.request import Request
from kvscope_engine.policy.step_plan import Scheduled, StepPlan
from kvscope_engine.simulator.costs.cost_file import CostFile, save_costs
from kvscope_engine.simulator.costs.cost_fit import Fit, ModelSizes, Sample, fit_costs
from kvscope_engine.text_table import table
from kvscope_telemetry.engine_config import DEVICES, DTYPES, EngineConfig
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.sampling_params import ResolvedSampling

if TYPE_CHECKING:
    from kvscope_engine.components import EngineComponents

BATCHES: Final = (1, 4, 16, 64)
CONTEXTS: Final = (64, 256, 1024)
CHUNKS: Final = (16, 64, 256)
STARTS: Final = (0, 512)
SAMPLING: Final = ResolvedSampling(temperature=0.0, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Case:
    """A step whose requests are all alike: each has `start` computed tokens and computes `num_tokens` more."""

    num_requests: int
    start: int
    num_tokens: int

    @property
    def name(self) -> str:
        if self.num_tokens == 1:
            return f"{self.num_requests} x decode at {self.start + 1}"
        return f"prefill {self.num_tokens} after {self.start}"

    def sample(self, seconds: float) -> Sample:
        pairs_per_request = self.num_tokens * self.start + self.num_tokens * (self.num_tokens + 1) // 2
        context = self.num_requests * (self.start + self.num_tokens)
        return Sample(self.num_requests * self.num_tokens, context, self.num_requests * pairs_per_request, seconds)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default="default", metavar="M", help="as for `serve`")
    add("--device", choices=DEVICES, default="auto", help="device to run on")
    add("--dtype", choices=DTYPES, default="auto", help="data type of weights and activations")
    add("--num-threads", type=parse_int, metavar="N", help="CPU threads (default: torch's choice)")
    add("--repeats", type=parse_int, default=5, metavar="N", help="runs of each step")
    add("--save", metavar="FILE.json", help="write the costs to this file, for `simulate --costs`")
    add("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    """Measure, fit and print the costs; with `--save`, write them to a file."""
    if args.repeats < 1:
        raise BadInput(f"repeats={args.repeats} is not accepted: 1 or more")
    from kvscope_engine.components import build_components

    config = EngineConfig(
        model=args.model, device=args.device, dtype=args.dtype, num_threads=args.num_threads, max_num_seqs=max(BATCHES)
    )
    parts = build_components(config, 0, lambda progress: None)
    try:
        timed = [(case, case.sample(_fastest_s(parts, case, args.repeats))) for case in _cases(parts)]
        fit = fit_costs([sample for _, sample in timed], _sizes(parts))
        costs = _file(parts, fit)
    finally:
        parts.close()
    if args.save is not None:
        save_costs(Path(args.save), costs)
    report = _report(timed, fit, costs)
    print(json.dumps(report) if args.json else _text(report))
    return 0


def _cases(parts: EngineComponents) -> Iterator[Case]:
    storage, longest = parts.storage, parts.loaded.max_model_len
    decodes = (Case(batch, context - 1, 1) for batch in BATCHES for context in CONTEXTS)
    prefills = (Case(1, start, chunk) for start in STARTS for chunk in CHUNKS)
    for case in (*decodes, *prefills):
        end = case.start + case.num_tokens
        if end <= longest and case.num_requests * -(-end // storage.block_size) <= storage.num_blocks:
            yield case


def _fastest_s(parts: EngineComponents, case: Case, repeats: int) -> float:
    plan = _plan(case, parts.storage.block_size, parts.loaded.info.vocab_size)
    parts.runner.run(plan)  # warm: graphs, caches, products
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        parts.runner.run(plan)  # a sampled token is read back, so the device is done
        times.append(time.perf_counter() - started)
    return min(times)


def _plan(case: Case, block_size: int, vocab_size: int) -> StepPlan:
    """Return a plan of requests with separate blocks, from the first block of the pool. The blocks' contents do not
    matter.
    """
    end = case.start + case.num_tokens
    blocks = -(-end // block_size)
    scheduled = []
    for index in range(case.num_requests):
        request = Request(
            number=index + 1,
            request_id=str(index + 1),
            prompt_token_ids=tuple((index + token) % vocab_size for token in range(end)),
            sampling=SAMPLING,
            max_tokens=1,
            arrival_ns=0,
            block_tables=(list(range(index * blocks, (index + 1) * blocks)),),
            num_computed_tokens=case.start,
        )
        scheduled.append(Scheduled(request, case.start, case.num_tokens, True))
    return StepPlan(tuple(scheduled), case.num_requests if case.num_tokens == 1 else 0)


def _sizes(parts: EngineComponents) -> ModelSizes:
    info, storage = parts.loaded.info, parts.storage
    return ModelSizes(
        weight_bytes=parts.runner.weights_bytes,
        kv_bytes_per_token=storage.block_bytes / storage.block_size,
        flops_per_token=2 * info.num_parameters,
        attention_flops_per_pair=4 * info.num_layers * info.num_query_heads * info.head_dim,
    )


def _file(parts: EngineComponents, fit: Fit) -> CostFile:
    storage, device = parts.storage, parts.hello.device
    return CostFile(
        model=parts.loaded.info.name,
        device=f"{device.name}, {device.num_threads} threads" if device.kind == "cpu" else device.name,
        num_slots=storage.num_blocks * storage.block_size,
        max_model_len=parts.loaded.max_model_len,
        num_layers=parts.loaded.info.num_layers,
        cost_model=fit.cost,
    )


def _report(timed: list[tuple[Case, Sample]], fit: Fit, costs: CostFile) -> dict[str, Any]:
    steps = [
        {
            "step": case.name,
            "measured_s": sample.seconds,
            "fitted_s": fitted,
            "error": fitted / sample.seconds - 1,
        }
        for (case, sample), fitted in zip(timed, fit.predicted_s, strict=True)
    ]
    errors = [abs(fitted / sample.seconds - 1) for (_, sample), fitted in zip(timed, fit.predicted_s, strict=True)]
    return {
        **msgspec.to_builtins(costs),
        "steps": steps,
        "median_error": statistics.median(errors),
        "largest_error": max(errors),
    }


def _text(report: dict[str, Any]) -> str:
    rows = [
        [
            step["step"],
            f"{1e3 * step['measured_s']:.2f}",
            f"{1e3 * step['fitted_s']:.2f}",
            f"{100 * step['error']:+.1f}",
        ]
        for step in report["steps"]
    ]
    header = ["step", "measured, ms", "fitted, ms", "error, %"]
    return f"{report['model']} on {report['device']}\n\n{table(header, rows)}\n\n{_rates(report)}"


def _rates(report: dict[str, Any]) -> str:
    cost = report["cost_model"]
    return (
        f"weights {cost['weight_bytes'] / 1e6:.1f} MB and {cost['kv_bytes_per_token'] / 1e3:.1f} KB a token of context"
        f" at {cost['memory_bandwidth'] / 1e9:.2f} GB/s\n"
        f"{cost['flops_per_token'] / 1e6:.1f} MFLOP a token and {cost['attention_flops_per_pair'] / 1e3:.1f} KFLOP a"
        f" pair at {cost['flops_per_second'] / 1e9:.1f} GFLOP/s\n"
        f"{1e3 * cost['step_overhead_s']:.2f} ms a step; error {100 * report['median_error']:.1f} % in the median,"
        f" {100 * report['largest_error']:.1f} % at most"
    )


if __name__ == "__main__":
    sys.exit(run_benchmark(__doc__, add_arguments, run))
