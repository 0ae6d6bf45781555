"""Formats simulation reports as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvscope_engine.simulator.simulation_limits import SimulatedLimits
from kvscope_engine.simulator.simulation_report import Percentiles, SimulationReport
from kvscope_engine.simulator.tier_use import TierUse
from kvscope_engine.simulator.workloads.workload import Workload
from kvscope_engine.text_table import table

UNKNOWN_TEXT = "–"
MIB = 1 << 20


def report_text(
    workload: Workload, limits: SimulatedLimits, reports: Sequence[SimulationReport], notes: Sequence[str] = ()
) -> str:
    """Return a description of the run with `notes`, and tables of memory, throughput and latency with a row per
    allocator.
    """
    sections = [
        "\n".join([_setup(workload, limits), *notes]),
        "KV slots under load (mean over steps with waiting requests), % of all\n" + _memory(reports),
        "Throughput (recomputed: tokens computed again after a preemption)\n" + _throughput(reports),
        "Latency, s (p50 / p90 / p99)\n" + _latency(reports),
    ]
    parts = (_groups(reports), _states(reports), tier_tables(reports), _pages(reports), _refusals(reports))
    return "\n\n".join([*sections, *(line for lines in parts for line in lines)])


def policy_label(report: SimulationReport) -> str:
    return f"{report.allocator}, {report.question}" if report.question else report.allocator


def _setup(workload: Workload, limits: SimulatedLimits) -> str:
    return (
        f"{workload.name}: {len(workload.requests)} requests, {workload.mean_prompt_tokens:.1f} prompt and"
        f" {workload.mean_output_tokens:.1f} output tokens on average; {limits.num_blocks} blocks of"
        f" {limits.block_size} slots, at most {limits.max_model_len} tokens a request"
    )


def _memory(reports: Sequence[SimulationReport]) -> str:
    header = ["policy", "token states", "reserved", "internal", "external, others", "cached", "steps"]
    return table(
        header, [[policy_label(report), *_shares(report), str(report.num_steps_under_load)] for report in reports]
    )


def _shares(report: SimulationReport) -> list[str]:
    memory = report.memory
    if memory is None:
        return [UNKNOWN_TEXT] * 5
    parts = (memory.states, memory.reserved, memory.internal, memory.external_and_others, memory.cached)
    return [f"{100 * part:.1f}" for part in parts]


def _throughput(reports: Sequence[SimulationReport]) -> str:
    header = [
        "policy",
        "batch",
        "under load",
        "requests/s",
        "tokens/s",
        "preemptions",
        "recomputed",
        "evicted",
        "hit %",
        "time, s",
    ]
    rows = [
        [
            policy_label(report),
            _number(report.mean_batch, 2),
            _number(report.mean_batch_under_load, 2),
            _number(report.requests_per_s, 3),
            _number(report.output_tokens_per_s, 1),
            str(report.num_preemptions),
            str(report.num_recomputed_tokens),
            str(report.num_evicted_blocks),
            _number(None if report.prefix_hit_rate is None else 100 * report.prefix_hit_rate, 1),
            f"{report.simulated_s:.1f}",
        ]
        for report in reports
    ]
    return table(header, rows)


def _latency(reports: Sequence[SimulationReport]) -> str:
    header = ["policy", "first token", "whole request", "per output token"]
    rows = [
        [
            policy_label(report),
            *(
                _percentiles(percentiles)
                for percentiles in (report.ttft_s, report.latency_s, report.normalized_latency_s)
            ),
        ]
        for report in reports
    ]
    return table(header, rows)


def _groups(reports: Sequence[SimulationReport]) -> Iterator[str]:
    rows = [
        [
            f"{policy_label(report)} ({report.num_blocks})",
            f"{group.kind} of {group.window}" if group.window else group.kind,
            str(group.num_layers),
            f"{group.token_bytes:.0f}",
            f"{group.mean_blocks:.1f}",
            str(group.most_blocks),
            f"{group.most_blocks * report.block_bytes / MIB:.1f}",
        ]
        for report in reports
        for group in report.groups
    ]
    if rows:
        header = ["policy (blocks)", "group", "layers", "bytes/token", "mean", "most", "most, MiB"]
        yield "KV groups, blocks that requests held\n" + table(header, rows, left_aligned=(0, 1))


def _states(reports: Sequence[SimulationReport]) -> Iterator[str]:
    rows = [
        [
            policy_label(report),
            *map(
                str, (report.num_states, report.num_states_kept, report.num_states_restored, report.num_states_evicted)
            ),
        ]
        for report in reports
        if report.num_states
    ]
    if rows:
        yield "States of recurrent layers\n" + table(["policy", "slots", "saved", "reused", "evicted"], rows)


def _pages(reports: Sequence[SimulationReport]) -> list[str]:
    return [
        f"{policy_label(report)}: a page in each layer holds {report.tokens_per_page_group:.1f} tokens;"
        " a request's last is never full but by chance"
        for report in reports
        if report.tokens_per_page_group is not None
    ]


def _refusals(reports: Sequence[SimulationReport]) -> list[str]:
    return [
        f"{policy_label(report)}: {report.num_refused} requests refused; the first: {report.first_refusal}"
        for report in reports
        if report.num_refused
    ]


def _number(value: float | None, digits: int) -> str:
    return UNKNOWN_TEXT if value is None else f"{value:.{digits}f}"


def _percentiles(percentiles: Percentiles | None) -> str:
    return (
        UNKNOWN_TEXT
        if percentiles is None
        else f"{percentiles.p50:.3f} / {percentiles.p90:.3f} / {percentiles.p99:.3f}"
    )


def tier_tables(reports: Sequence[SimulationReport]) -> Iterator[str]:
    """Yield two tables on the lower tiers, and then a line that names the allocators without lower tiers; yield
    nothing if no allocator has lower tiers.
    """
    uses = [(policy_label(report), report.tiers) for report in reports if report.tiers is not None]
    if not uses:
        return
    yield "Lower tiers, blocks\n" + _blocks(uses)
    yield "Lower tiers, % of prompt tokens found in each, and s that the run stood still\n" + _times(uses)
    without = [policy_label(report) for report in reports if report.tiers is None]
    if without:
        yield f"{', '.join(without)}: ran without lower tiers, which only paged has"


def _blocks(uses: Sequence[tuple[str, TierUse]]) -> str:
    header = ["policy", "host", "disk", "swapped out", "offloaded to host", "to disk", "loaded", "loaded from disk"]
    rows = [
        (
            use.num_host_blocks,
            use.num_disk_blocks,
            use.swapped_blocks,
            use.offloaded_blocks,
            use.disk_blocks,
            use.loaded_blocks,
            use.loaded_from_disk_blocks,
        )
        for _, use in uses
    ]
    return table(header, [[name, *map(str, row)] for (name, _), row in zip(uses, rows, strict=True)])


def _times(uses: Sequence[tuple[str, TierUse]]) -> str:
    header = ["policy", "pool %", "host %", "disk %", "loading, s", "reading disk", "saving", "writing disk"]
    return table(header, [[name, *_hits(use), *_seconds(use)] for name, use in uses])


def _hits(use: TierUse) -> list[str]:
    rates = (use.pool_hit_rate, use.host_hit_rate, use.disk_hit_rate)
    return ["–" if rate is None else f"{100 * rate:.1f}" for rate in rates]


def _seconds(use: TierUse) -> list[str]:
    return [f"{seconds:.3f}" for seconds in (use.load_s, use.disk_read_s, use.save_s, use.disk_write_s)]
