"""`kvscope-engine bench serve`: an OpenAI-compatible server under load, ours beside others that are installed.

Requests a second, tokens a second, and mean, median and percentiles of first token, time per output token, time
between tokens and end to end, by the names and meanings of vLLM's benchmark client. Each server runs in a process of
its own, started anew for each round with the same weights, one after the other; --base-url measures one that runs
already.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

from kvscope_engine.bench.measure import teller
from kvscope_engine.bench.serving.contenders import OURS, Absent, Contender, contender
from kvscope_engine.bench.serving.machine import machine
from kvscope_engine.bench.serving.options import add_options
from kvscope_engine.bench.serving.plan import Plan, address, names, plan_of, wanted
from kvscope_engine.bench.serving.report import Report, contender_report, plan_report, text
from kvscope_engine.bench.serving.rounds import Requests, measure_started, measure_there
from kvscope_telemetry.errors import BadInput


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    add_options(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and print; 0 when every server gave whole answers, 1 when one gave none."""
    plan = plan_of(args)
    tell = teller(args.json)
    report = _there(args, plan, tell) if args.base_url is not None else _started(args, plan, tell)
    tell("")
    print(json.dumps(report) if args.json else text(report, plan))
    return 0 if all(one["completed"] for one in report["servers"].values()) else 1


def _started(args: argparse.Namespace, plan: Plan, tell: Callable[[str], None]) -> Report:
    asked = wanted(args, plan.dataset)
    found = [contender(name, asked) for name in names(args.only)]
    absent = {one.name: one.why for one in found if isinstance(one, Absent)}
    there = [one for one in found if isinstance(one, Contender)]
    if not there:
        raise BadInput("; ".join(f"{name}: {why}" for name, why in absent.items()))
    rounds, failed, requests = measure_started(plan, asked.model, there, tell)
    ours = rounds.get(OURS)
    servers = {
        one.name: {"version": one.version, "note": one.note}
        | contender_report(rounds[one.name], None if one.name == OURS else ours)
        for one in there
        if one.name in rounds
    }
    return _report(plan, requests, asked.model.text, servers, absent | failed)


def _there(args: argparse.Namespace, plan: Plan, tell: Callable[[str], None]) -> Report:
    where = address(args)
    rounds, target, requests = measure_there(plan, where, args.served_model_name or "", tell)
    servers = {where.url(""): {"version": "", "note": ""} | contender_report(rounds, None)}
    return _report(plan, requests, target.model, servers, {})


def _report(plan: Plan, requests: Requests, model: str, servers: dict[str, Any], skipped: dict[str, str]) -> Report:
    assert requests.codec is not None, "there were requests"
    told = {"model": model, "tokenizer": requests.codec.name, "workload": plan_report(plan)}
    return machine() | told | {"servers": servers, "skipped": skipped}
