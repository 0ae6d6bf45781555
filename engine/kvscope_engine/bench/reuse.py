"""`kvscope-engine bench reuse`: measures what keeping blocks gains over computing their tokens again.

The first token of a prompt whose beginning was seen before; the next token of a preempted request that comes back;
the first tokens of several completions of one prompt. Each way in each round, one after the other; medians of the
rounds, ratios within a round. What was computed and what was read back is checked against the engine's counters.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import TYPE_CHECKING, Any, Final

from kvscope_engine.bench.measure import teller
from kvscope_engine.bench.table import table
from kvscope_engine.cli.parser import whole_number
from kvscope_telemetry.engine_config import DEVICES, DTYPES, EngineConfig
from kvscope_telemetry.errors import BadInput

if TYPE_CHECKING:
    from kvscope_engine.bench.reuse_cases.sizes import Setup

CASES: Final = ("prefix", "preemption", "completions")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    add = parser.add_argument
    add("--model", default="default", metavar="M", help="as for `serve`")
    add("--device", choices=DEVICES, default="auto", help="device to run on")
    add(
        "--dtype",
        action="append",
        choices=DTYPES,
        help="data type of weights and activations; repeatable (default: auto)",
    )
    add(
        "--num-threads",
        action="append",
        type=whole_number,
        metavar="N",
        help="CPU threads; repeatable (default: torch's choice)",
    )
    add("--repeats", type=whole_number, default=3, metavar="N", help="rounds")
    add("--prefix-tokens", type=whole_number, default=1500, metavar="N", help="tokens of the shared prefix")
    add("--own-tokens", type=whole_number, default=20, metavar="N", help="tokens of each prompt after the prefix")
    add("--preempted-tokens", type=whole_number, default=1000, metavar="N", help="tokens of the preempted request")
    add(
        "--prompt-tokens",
        type=whole_number,
        default=500,
        metavar="N",
        help="tokens of the prompt with many completions",
    )
    add("--completions", type=whole_number, default=8, metavar="N", help="completions of that prompt")
    add("--disk-path", metavar="FILE", help="a folder on the drive to measure (default: the cache folder)")
    add("--only", action="append", choices=CASES, help="a part of it; repeatable (default: all)")


def run(args: argparse.Namespace) -> int:
    """Measure and print; 0 when all ran."""
    _check(args)
    import torch

    threads = args.num_threads or [torch.get_num_threads()]
    runs = [_run(args, dtype, count) for dtype in args.dtype or ["auto"] for count in threads]
    report = {"load_average": os.getloadavg()[0], "runs": runs}
    print(json.dumps(report) if args.json else _text(report))
    return 0


def _check(args: argparse.Namespace) -> None:
    for name, least in (("repeats", 1), ("prefix-tokens", 16), ("own-tokens", 1), ("prompt-tokens", 1)):
        _at_least(least, name, getattr(args, name.replace("-", "_")))
    _at_least(2, "completions", args.completions)
    for count in args.num_threads or ():
        _at_least(1, "num-threads", count)


def _at_least(least: int, name: str, value: int) -> None:
    if value < least:
        raise BadInput(f"--{name} {value} is not accepted: at least {least}")


def _run(args: argparse.Namespace, dtype: str, num_threads: int) -> dict[str, Any]:
    """All that was asked for, in one dtype with one number of threads."""
    from kvscope_engine.bench.reuse_cases import completions, preemption, prefix

    tell = teller(args.json)
    found, setup = _setup(args, dtype, num_threads)
    wanted = args.only or CASES
    if "prefix" in wanted:
        found["prefix"] = prefix.measure(setup, args.prefix_tokens, args.own_tokens, tell)
    if "preemption" in wanted:
        found["preemption"] = preemption.measure(setup, args.preempted_tokens, tell)
    if "completions" in wanted:
        found["completions"] = completions.measure(setup, args.prompt_tokens, args.completions, tell)
    return found


def _setup(args: argparse.Namespace, dtype: str, num_threads: int) -> tuple[dict[str, Any], Setup]:
    """What a small engine says of itself: how large its blocks are in the first place."""
    from kvscope_engine.bench.reuse_cases.sizes import BLOCK_SIZE, Setup
    from kvscope_engine.engine import Engine

    config = EngineConfig(
        model=args.model,
        device=args.device,
        dtype=dtype,
        num_threads=num_threads,
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=64,
    )
    with Engine(config) as engine:
        hello, found_dtype = engine.hello, str(engine.dtype).removeprefix("torch.")
    setup = Setup(
        model=args.model,
        device=args.device,
        dtype=found_dtype,
        num_threads=num_threads,
        block_bytes=hello.cache.block_bytes,
        disk_path=args.disk_path,
        repeats=args.repeats,
    )
    heading = {"model": hello.model.name, "device": hello.device.kind, "dtype": found_dtype, "num_threads": num_threads}
    return heading | {"rounds": args.repeats}, setup


def _text(report: dict[str, Any]) -> str:
    lines = ["\r\033[K" if sys.stderr.isatty() else "", f"load average {report['load_average']:.1f}"]
    for one in report["runs"]:
        threads, rounds = _counted(one["num_threads"], "thread"), _counted(one["rounds"], "round")
        lines.append(f"\n{one['model']}, {one['dtype']}, {one['device']}, {threads}, {rounds}")
        lines += [text(one[case]) for case, text in TEXTS.items() if case in one]
    return "\n".join(lines)


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _prefix_text(found: dict[str, Any]) -> str:
    how = "direct I/O" if found["disk_is_direct"] else "through the page cache"
    title = f"first token, prefix of {found['num_prefix_tokens']} tokens and {found['num_own_tokens']} more ({how})"
    lines = ["", _table(title, "new over it", found["first_token"])]
    if found["tokenize_s"] is not None:
        lines.append(f"a prompt that comes as text is tokenized before: {1e3 * found['tokenize_s']:.1f} ms")
    return "\n".join(lines)


def _preemption_text(found: dict[str, Any]) -> str:
    title = f"next token, preempted with {found['num_tokens']} tokens in {found['num_blocks']} blocks"
    return "\n" + _table(title, "computed again over it", found["next_token"])


def _completions_text(found: dict[str, Any]) -> str:
    what = f"last first token, {found['num_completions']} completions of {found['num_prompt_tokens']} tokens"
    computed = found["computed_prompt_tokens"]
    rows = {f"{way}: {computed[way]} tokens computed": row for way, row in found["last_first_token"].items()}
    return "\n" + _table(what, "a request each over it", rows)


TEXTS: Final = {"prefix": _prefix_text, "preemption": _preemption_text, "completions": _completions_text}


def _table(title: str, ratio: str, ways: dict[str, dict[str, float]]) -> str:
    rows = [
        [
            way,
            f"{1e3 * row['wall_s']:.1f}",
            f"{1e3 * row['cpu_s']:.1f}",
            f"{row['wall_ratio']:.1f} x",
            f"{row['cpu_ratio']:.1f} x",
        ]
        for way, row in ways.items()
    ]
    return table([title, "ms", "CPU-ms", ratio, "by CPU time"], rows)
