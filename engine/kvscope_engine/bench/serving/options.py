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
    add("--base-url", metavar="URL", help="measure this server, which runs already, and start none: http://HOST:PORT")
    add("--api-key-file", type=Path, metavar="FILE", help="its API key (without it: the variable KVSCOPE_API_KEY)")
    add("--tls-ca", type=Path, metavar="FILE", help="who signed its certificate, where the system does not know")
    add("--served-model-name", metavar="NAME", help="what it calls its model (without it: the first of /v1/models)")
    add("--model", metavar="M", default="default", help="of the servers that are started (as `serve --model`)")
    add("--device", choices=DEVICES, default="auto", help="where they run it")
    add("--num-threads", type=whole_number, metavar="N", help="of the model on a CPU, for each (without it: its cores)")
    add("--engine-args", metavar="OPTIONS", help="more options of our `serve`, in one word: '--dtype float32'")
    add("--only", action="append", choices=NAMES, help="start this one; repeatable (without it: all that are there)")
    add("--repeats", type=whole_number, metavar="N", help="rounds (without it: 3, with --base-url 1)")
    add(
        "--ready-check-timeout-sec",
        type=number,
        default=600.0,
        metavar="S",
        help="for a server to load its model",
    )


def _add_workload(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--dataset-name",
        choices=("random", "prefix_repetition", "conversations"),
        default="random",
        help="random tokens of given lengths; a few prefixes that many prompts share; or short questions and longer"
        " answers with long tails, like those of ShareGPT",
    )
    add("--num-prompts", type=whole_number, default=32, metavar="N", help="requests of a round")
    add("--num-warmups", type=whole_number, default=2, metavar="N", help="requests before, which count nowhere")
    add("--request-rate", type=number, default=float("inf"), metavar="R", help="requests a second; inf: all at once")
    add(
        "--burstiness",
        type=number,
        default=1.0,
        metavar="B",
        help="of their gaps, a gamma distribution: 1 is a Poisson process, less comes in bursts, more evenly",
    )
    add("--max-concurrency", type=whole_number, metavar="N", help="at a time; others wait here, untimed")
    add("--seed", type=whole_number, default=0, metavar="N", help="of prompts, lengths and gaps; a round adds 1")
    add("--endpoint", choices=ENDPOINTS, default=ENDPOINTS[0], help="which way they are asked")
    add(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="answers are as long as asked; servers that do not know the field need --no-ignore-eos",
    )
    add("--temperature", type=number, default=0.0, metavar="T", help="of sampling")
    add("--tokenizer", type=Path, metavar="DIR", help="of prompts (without it: the server's /tokenize, else words)")
    add("--timeout", type=number, default=3600.0, metavar="S", help="for one request, its wait in a queue included")


def _add_shapes(group: argparse._ArgumentGroup) -> None:
    def tokens(name: str, default: int, what: str) -> None:
        group.add_argument(name, type=whole_number, default=default, metavar="TOKENS", help=what)

    tokens("--random-input-len", 128, "of a prompt, behind the prefix")
    tokens("--random-output-len", 64, "of an answer")
    group.add_argument(
        "--random-range-ratio", type=number, default=0.0, metavar="X", help="lengths from 1 - X to 1 + X times these"
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
        help="also requests a second that keep all of these limits, of ttft, tpot and e2el: ttft:200 tpot:50",
    )
    group.add_argument(
        "--percentile-metrics", default="ttft,tpot,itl,e2el", metavar="NAMES", help="in the table, of these four"
    )
    group.add_argument("--metric-percentiles", default="90,99", metavar="P,…", help="beside mean and median")
