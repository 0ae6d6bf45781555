"""`kvscope info`: prints a summary of a recording, as text or JSON."""

from __future__ import annotations

import argparse
import json
import math
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvscope_app.commands.progress import ProgressBar
from kvscope_app.option_values import add_goodput_option
from kvscope_app.ui.number_text import seconds
from kvscope_telemetry.plural import counted
from kvscope_telemetry.printable import print_text, printable
from kvscope_telemetry.recordings.sample import named_recording

if TYPE_CHECKING:
    from kvscope_telemetry.exports.goodput import GoodputReport
    from kvscope_telemetry.exports.requests_at_start import RequestsAtStart
    from kvscope_telemetry.exports.run_summary import RunSummary
    from kvscope_telemetry.recordings.reader import Recording

_MAX_IN_TEXT: Final = 5
_MAX_IN_JSON: Final = 1_000
"""Maximum number of requests that are listed for missing a latency goal (`--goodput`) in the JSON output."""


def add_info_parser(commands: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "info",
        help="summarize a recording",
        description="Show a recording's engine, pool, length and peaks, and what is missing or damaged.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "file",
        metavar="FILE.mcap",
        type=Path,
        help="a recording, complete or truncated; or the word sample or sample-hybrid",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object (units are in the names)")
    add_goodput_option(parser, "list finished requests that missed them, and what delayed each")
    parser.set_defaults(run=info)
    return parser


def info(args: argparse.Namespace) -> int:
    from kvscope_telemetry.exports.content import Content
    from kvscope_telemetry.exports.goodput import evaluate_goals
    from kvscope_telemetry.exports.requests_at_start import requests_at_start
    from kvscope_telemetry.exports.run_summary import summarize_run
    from kvscope_telemetry.exports.span import span_of
    from kvscope_telemetry.recordings.overview import read_overview
    from kvscope_telemetry.recordings.reader import Recording
    from kvscope_telemetry.slo import read_goals

    goals, goodput = read_goals(args.goodput), None
    with ProgressBar("reading") as progress:
        recording = Recording.open(named_recording(args.file))
        overview, span = read_overview(recording, progress.report_progress), span_of(recording)
        if goals:
            histories = Content(recording, overview, span, watch=progress.report_progress).histories()
            max_missed = _MAX_IN_JSON if args.json else _MAX_IN_TEXT
            goodput = evaluate_goals(histories, overview, recording, span, goals, max_missed)
    summary, at_start = summarize_run(recording, overview, span), requests_at_start(recording, span)
    if args.json:
        goodput_fields = {} if goodput is None else {"goodput": _goals_as_json(goodput)}
        print(json.dumps(_as_json(recording, summary, at_start) | goodput_fields))
    else:
        print_text(
            "\n".join([_as_text(recording, summary, at_start), *([] if goodput is None else _goals_as_text(goodput))])
        )
    return 0


def _goals_as_json(goodput: GoodputReport) -> dict[str, object]:
    return {
        "goals_ms": dict(goodput.goals),
        "share": goodput.results.goodput,
        "num_finished": goodput.num_finished,
        "num_judged": goodput.results.num_judged,
        "num_missed": goodput.num_missed,
        "missed": [
            {
                "number": each.history.info.number,
                "request_id": each.history.info.request_id,
                "epoch": each.history.epoch,
                **{f"{name}_ms": None if math.isnan(took_s) else took_s * 1e3 for name, took_s in each.took_s.items()},
                "missed": list(each.missed),
                "chain": list(each.chain),
            }
            for each in goodput.missed
        ],
    }


def _goals_as_text(goodput: GoodputReport) -> list[str]:
    lines = [f"{'goodput':<12} {goodput.share_text} {goodput.result_text}"]
    for each in goodput.missed:
        lines.append(f"{'missed':<12} #{each.history.info.number} {'; '.join(each.missed)}")
        lines += [f"{'':<14} {printable(link)}" for link in each.chain]
    num_unlisted = goodput.num_missed - len(goodput.missed)
    return [*lines, *([f"{'':<12} {num_unlisted:,} more missed a goal; --json lists them"] if num_unlisted else [])]


def _as_json(recording: Recording, summary: RunSummary, at_start: RequestsAtStart | None) -> dict[str, object]:
    import msgspec

    return {
        "file": str(recording.path),
        "file_bytes": recording.path.stat().st_size,
        "is_complete": recording.info.is_complete,
        "num_frames": recording.info.num_frames,
        "has_texts": recording.has_texts,
        "damage": recording.damage_details.splitlines(),
        **msgspec.to_builtins(summary),
        "at_start": msgspec.to_builtins(at_start),
    }


def _as_text(recording: Recording, summary: RunSummary, at_start: RequestsAtStart | None) -> str:
    info, pool = recording.info, summary.pool
    totals = {name: "unknown" if total is None else f"{total:,}" for name, total in summary.totals.items()}
    start_time = datetime.fromtimestamp(summary.start_ns / 1e9, UTC)
    other_counts = (
        (pool.num_host_blocks, "host blocks"),
        (pool.num_disk_blocks, "disk blocks"),
        (pool.num_states, "recurrent states"),
        (pool.num_host_states, "recurrent states in host memory"),
    )
    tiers = "".join(f", {count:,} {noun}" for count, noun in other_counts if count)
    starts = len(summary.epochs)
    # A frame may also carry changes made between two steps, so there may be more frames than steps.
    steps = "" if summary.num_steps is None else f", {summary.num_steps:,} steps"
    rows = [
        ("model", " ".join(filter(None, (summary.model, f"on {summary.device}" * bool(summary.device))))),
        (
            "pool",
            f"{pool.num_blocks:,} blocks of {pool.block_size_tokens} tokens{tiers}, allocator {pool.allocator},"
            f" prefix caching {'on' if pool.prefix_caching else 'off'}",
        ),
        ("length", f"{summary.length_s:,.1f} s from {start_time:%Y-%m-%d %H:%M:%S} UTC"),
        ("frames", f"{info.num_frames:,} of {starts} engine start{'s' * (starts != 1)}{steps}"),
        ("usage", _usage_text(summary)),
        (
            "requests",
            f"{_at_start_text(at_start)}{totals['admitted']} admitted, {totals['finished']} finished, "
            f"{totals['aborted']} aborted, {totals['refused']} refused; peak {summary.peak_waiting:,} waiting",
        ),
        *([("", at_start.missing_text)] if at_start and at_start.num_started else []),
        (
            "preemptions",
            f"{totals['preemptions']}; then {totals['restored_tokens']} tokens restored and "
            f"{totals['recomputed_tokens']} recomputed",
        ),
        ("tokens", f"{totals['prefill_tokens']} prefill, {totals['decode_tokens']} decode"),
        ("hit rate", _hit_rate_text(summary, at_start)),
        ("first token", _first_token_text(summary, at_start)),
        ("between tokens", _latency_text(summary.inter_token_p50_s, summary.inter_token_p95_s, summary)),
        ("paused", _paused_text(summary)),
        ("gaps", _gaps_text(summary)),
        ("texts", "contains prompt and answer text" if recording.has_texts else "none"),
        ("file", _file_text(recording)),
    ]
    return "\n".join(f"{name:<12} {printable(text)}" for name, text in rows)


def _paused_text(summary: RunSummary) -> str:
    stopped_s = summary.figures["stopped_s"]
    return f"{seconds(stopped_s)}, excluded from latencies and rates" if stopped_s else "never"


def _hit_rate_text(summary: RunSummary, at_start: RequestsAtStart | None) -> str:
    share, cached, prompts = (summary.figures[key] for key in ("hit_rate", "cached_tokens", "new_prompt_tokens"))
    if share is None and prompts is not None and at_start is not None and at_start.num_prompt_tokens:
        cached, prompts = at_start.num_cached_tokens or 0, at_start.num_prompt_tokens
        return f"no new prompt; of the prompts running at the start, {cached:,} of {prompts:,} tokens were in the cache"
    if share is None:
        return "unknown" if prompts is None else "no request arrived"
    return f"{share:.1%} of new prompts' tokens were in the cache, {cached:,.0f} of {prompts:,.0f}"


def _usage_text(summary: RunSummary) -> str:
    if summary.peak_usage is None or summary.mean_usage is None:
        return "unknown"
    return f"peak {summary.peak_usage:.1%} of the pool at {summary.peak_usage_s:.0f} s; mean {summary.mean_usage:.1%}"


def _at_start_text(at_start: RequestsAtStart | None) -> str:
    return f"{at_start.text} at the start, " if at_start and at_start.text else ""


def _first_token_text(summary: RunSummary, at_start: RequestsAtStart | None) -> str:
    p50_s, p95_s = summary.first_token_p50_s, summary.first_token_p95_s
    if p50_s is None and p95_s is None and at_start is not None and at_start.num_with_first_token:
        return "none in the recording"
    return _latency_text(p50_s, p95_s, summary)


def _latency_text(p50_s: float | None, p95_s: float | None, summary: RunSummary) -> str:
    if p50_s is None and p95_s is None:
        return "unknown"
    at_most = "≤ " if summary.latencies_are_bounds else ""
    bounds = ("unknown" if value is None else f"{at_most}{value * 1e3:,.1f} ms" for value in (p50_s, p95_s))
    return "p50 {}, p95 {}".format(*bounds)


def _gaps_text(summary: RunSummary) -> str:
    parts = [f"{summary.num_lost_frames:,} frames lost"] if summary.num_lost_frames else []
    if summary.num_silences:
        parts.append(f"{counted(summary.num_silences, 'silence')}, {summary.silent_s:,.0f} s in all")
    return "; ".join(parts) or "none"


def _file_text(recording: Recording) -> str:
    """Return the size of the file, followed by "complete" or a description of the damage."""
    size = f"{recording.path.stat().st_size / 1e6:,.1f} MB"
    return " ".join(
        [size + ("," if recording.damage_details else ", complete"), *recording.damage_details.splitlines()]
    )
