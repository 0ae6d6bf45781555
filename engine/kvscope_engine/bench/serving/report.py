"""A run as JSON, by vLLM's names, and as tables. Pure: everything is given."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Final

from kvscope_engine.bench.serving.metrics import METRICS
from kvscope_engine.bench.serving.plan import Plan
from kvscope_engine.bench.serving.rounds import Round
from kvscope_engine.bench.table import table

BUSY_CLIENT: Final = 0.7
"""Of a core: from there on times are partly the client's own."""
Report = dict[str, Any]


def contender_report(rounds: Sequence[Round], ours: Sequence[Round] | None) -> Report:
    """The median of each figure over its rounds, all rounds, and our throughput over its own within a round."""
    told = [round_.metrics.as_json() | {"client_cpu_share": round_.client_cpu_share} for round_ in rounds]
    failures: dict[str, int] = {}
    for round_ in rounds:
        for reason, count in round_.metrics.failures.items():
            failures[reason] = failures.get(reason, 0) + count
    names = [name for name in told[0] if name != "failures"]
    report: Report = {name: _median([one.get(name) for one in told]) for name in names}
    report |= {"failed": sum(round_.metrics.failed for round_ in rounds), "failures": failures, "rounds": told}
    report["completed"] = sum(round_.metrics.completed for round_ in rounds)
    report["wrong_prompt_lengths"] = sum(round_.wrong_prompt_lengths for round_ in rounds)
    if ours is not None:
        report["ours_over_it"] = _ratio(ours, rounds)
    return report


def plan_report(plan: Plan) -> Report:
    """What was asked."""
    limits = plan.goodput_ms or None
    return {
        "dataset": {"name": plan.dataset.name, **_fields(plan.dataset)},
        "num_prompts": plan.num_prompts,
        "num_rounds": plan.repeats,
        "request_rate": "inf" if plan.rate == float("inf") else plan.rate,
        "burstiness": "inf" if plan.burstiness == float("inf") else plan.burstiness,
        "max_concurrency": plan.max_concurrency,
        "seed": plan.seed,
        "endpoint": plan.asking.endpoint,
        "ignore_eos": plan.asking.ignore_eos,
        "temperature": plan.asking.temperature,
        "goodput_ms": limits,
    }


def text(report: Report, plan: Plan) -> str:
    """For a terminal."""
    parts = [_heading(report), _throughputs(report), _latencies(report, plan), *_notes(report)]
    return "\n".join(part for part in parts if part)


def _heading(report: Report) -> str:
    asked, dataset = report["workload"], report["workload"]["dataset"]
    lengths = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in dataset.items() if name != "name")
    rate = "all at once" if asked["request_rate"] == "inf" else f"{asked['request_rate']:g} requests/s"
    limit = f", at most {asked['max_concurrency']} at a time" if asked["max_concurrency"] else ""
    rounds = "1 round" if asked["num_rounds"] == 1 else f"medians of {asked['num_rounds']} rounds"
    return (
        f"{report['model']} on {report['device']}, {report['cores']} cores, load average"
        f" {report['load_average']:.1f}, {report['date']}\n"
        f"{asked['num_prompts']} requests, {dataset['name']} ({lengths}), {rate}{limit}; {rounds}; tokens by"
        f" {report['tokenizer']}\n"
    )


def _throughputs(report: Report) -> str:
    servers: Mapping[str, Report] = report["servers"]
    has_goodput = any(one["request_goodput"] is not None for one in servers.values())
    has_ratio = any("ours_over_it" in one for one in servers.values())
    header = ["", "version", "requests/s", "output tokens/s", "total tokens/s"]
    header += ["good requests/s"] if has_goodput else []
    header += ["whole", "failed", "client CPU"] + (["ours against it"] if has_ratio else [])
    rows = []
    for name, one in servers.items():
        row = [name, one["version"], f"{one['request_throughput']:.2f}"]
        row += [f"{one[rate]:.1f}" for rate in ("output_throughput", "total_token_throughput")]
        row += [f"{one['request_goodput']:.2f}"] if has_goodput else []
        row += [f"{one['completed']}", f"{one['failed']}", f"{100 * one['client_cpu_share']:.1f} %"]
        rows.append(row + ([_times(one.get("ours_over_it"))] if has_ratio else []))
    return table(header, rows, words=(0, 1))


def _latencies(report: Report, plan: Plan) -> str:
    header = ["milliseconds", "", "mean", "median", *(f"p{percentile:g}" for percentile in plan.percentiles)]
    stats = ["mean", "median", *(f"p{percentile:g}" for percentile in plan.percentiles)]
    rows = [
        [f"{METRICS[metric]} ({metric.upper()})", name, *(_ms(one.get(f"{stat}_{metric}_ms")) for stat in stats)]
        for metric in plan.metrics
        for name, one in report["servers"].items()
    ]
    return "\n" + table(header, rows, words=(0, 1)) if rows else ""


def _notes(report: Report) -> list[str]:
    lines = []
    for name, one in report["servers"].items():
        lines += [f"{name}: {one['note']}"] if one.get("note") else []
        lines += [f"{name}: {count} failed: {reason}" for reason, count in one["failures"].items()]
        if one["wrong_prompt_lengths"]:
            lines.append(f"{name}: counts other prompt tokens than were meant in {one['wrong_prompt_lengths']} answers")
        if one["client_cpu_share"] > BUSY_CLIENT:
            lines.append(f"{name}: the client was busy: its times are partly the client's own")
    lines += [f"{name}: skipped: {why}" for name, why in report["skipped"].items()]
    return ["", *lines] if lines else []


def _fields(dataset: Any) -> dict[str, Any]:
    return {name: getattr(dataset, name) for name in dataset.__slots__}


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _ratio(ours: Sequence[Round], theirs: Sequence[Round]) -> float | None:
    pairs = ((a.metrics.output_throughput, b.metrics.output_throughput) for a, b in zip(ours, theirs, strict=True))
    return _median([a / b if b else None for a, b in pairs])


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f} x"


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"
