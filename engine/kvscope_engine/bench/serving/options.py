"""The options of `bench serve`: those of vLLM's benchmark client by its names, with its meanings."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvscope_engine.bench.serving.contenders import NAMES
from kvscope_engine.bench.serving.target import ENDPOINTS
from kvscope_engine.cli.parser import number, whole_number
from kvscope_engine.config import DEVICES


def add_options(parser: argparse.ArgumentParser) -> None:
    """In groups."""
    _add_servers(parser.add_argument_group("servers"))
    _add_workload(parser.add_argument_group("workload"))
    _add_shapes(parser.add_argument_group("its shapes"))
    _add_figures(parser.add_argument_group("figures"))


def _add_servers(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--base-url", metavar="URL", help="measure this running server instead of starting any: http://HOST:PORT")
    add("--api-key-file", type=Path, metavar="FILE", help="its API key (default: the variable KVSCOPE_API_KEY)")
    add("--tls-ca", type=Path, metavar="FILE", help="file with its certificate authority, if not known to the system")
    add("--served-model-name", metavar="NAME", help="the server's model name (default: the first of /v1/models)")
    add(
        "--model", metavar="M", default="default", help="model of the servers that are started (as for `serve --model`)"
    )
    add("--device", choices=DEVICES, default="auto", help="device of the servers")
    add("--num-threads", type=whole_number, metavar="N", help="CPU threads of each server (default: its cores)")
    add("--engine-args", metavar="OPTIONS", help="more options for kvscope's `serve`, quoted: '--dtype float32'")
    add(
        "--only", action="append", choices=NAMES, help="start this server; repeatable (default: all that are installed)"
    )
    add("--repeats", type=whole_number, metavar="N", help="rounds (default: 3; with --base-url 1)")
    add(
        "--ready-check-timeout-sec",
        type=number,
        default=600.0,
        metavar="S",
        help="seconds to wait for a server to load its model",
    )


def _add_workload(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--dataset-name",
        choices=("random", "prefix_repetition", "conversations"),
        default="random",
        help="random tokens of given lengths; a few prefixes shared by many prompts; or short questions and "
        "longer answers with long tails, like ShareGPT",
    )
    add("--num-prompts", type=whole_number, default=32, metavar="N", help="requests per round")
    add("--num-warmups", type=whole_number, default=2, metavar="N", help="warm-up requests, not counted")
    add("--request-rate", type=number, default=float("inf"), metavar="R", help="requests per second; inf: all at once")
    add(
        "--burstiness",
        type=number,
        default=1.0,
        metavar="B",
        help="burstiness of arrivals (gamma distribution): 1 is a Poisson process, less is burstier, more is more even",
    )
    add(
        "--max-concurrency",
        type=whole_number,
        metavar="N",
        help="maximum concurrent requests; others wait in the client, untimed",
    )
    add(
        "--seed",
        type=whole_number,
        default=0,
        metavar="N",
        help="seed for prompts, lengths and arrivals; each round adds 1",
    )
    add("--endpoint", choices=ENDPOINTS, default=ENDPOINTS[0], help="API endpoint to use")
    add(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="generate exactly the requested length; servers without this field need --no-ignore-eos",
    )
    add("--temperature", type=number, default=0.0, metavar="T", help="of sampling")
    add("--tokenizer", type=Path, metavar="DIR", help="of prompts (without it: the server's /tokenize, else words)")
    add(
        "--timeout",
        type=number,
        default=3600.0,
        metavar="S",
        help="time limit of one request, including its time in the queue",
    )


def _add_shapes(group: argparse._ArgumentGroup) -> None:
    def tokens(name: str, default: int, what: str) -> None:
        group.add_argument(name, type=whole_number, default=default, metavar="TOKENS", help=what)

    tokens("--random-input-len", 128, "of a prompt, behind the prefix")
    tokens("--random-output-len", 64, "of an answer")
    group.add_argument(
        "--random-range-ratio",
        type=number,
        default=0.0,
        metavar="X",
        help="vary lengths from 1 - X to 1 + X times these",
    )
    tokens("--random-prefix-len", 0, "of a prefix that all prompts share")
    tokens("--prefix-repetition-prefix-len", 256, "of each prefix")
    tokens("--prefix-repetition-suffix-len", 64, "of a prompt behind its prefix")
    group.add_argument("--prefix-repetition-num-prefixes", type=whole_number, default=4, metavar="N", help="prefixes")
    tokens("--prefix-repetition-output-len", 64, "of an answer")


def _add_figures(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--goodput",
        nargs="+",
        metavar="NAME:MS",
        help="also count requests per second that meet all of these limits in ms (ttft, tpot, e2el): ttft:200 tpot:50",
    )
    group.add_argument(
        "--percentile-metrics", default="ttft,tpot,itl,e2el", metavar="NAMES", help="latencies to show in the table"
    )
    group.add_argument(
        "--metric-percentiles", default="90,99", metavar="P,…", help="percentiles to show beside mean and median"
    )
