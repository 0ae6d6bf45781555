"""Command `kvscope-engine analyze FILE`: how much the prompts of a request file share, and what cache that needs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from kvscope_engine.command_parser import parse_int
from kvscope_telemetry.errors import KvscopeError
from kvscope_telemetry.printable import print_text

if TYPE_CHECKING:
    from kvscope_engine.analysis.analysis_report import PromptAnalysis
    from kvscope_engine.analysis.prompt_tokens import PromptEncoder


def add_parser(commands: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "analyze",
        help="find out how much the prompts of a file share",
        description="Read requests from a file, and print how much of their prompts a prefix cache finds: by the size"
        " of the pool, by block size, and by which prefixes.",
    )
    parser.add_argument(
        "file",
        metavar="FILE",
        help="requests, one JSON object per line or in one JSON array: bodies of OpenAI's API, prompts for `vllm bench"
        " serve`, ShareGPT conversations, or a Mooncake trace",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--html", metavar="FILE.html", help="write the analysis to an HTML page as well")
    parser.add_argument(
        "--model", metavar="M", default="default", help="model whose tokenizer and chat template are used"
    )
    parser.add_argument(
        "--block-size",
        type=parse_int,
        metavar="TOKENS",
        help="tokens per block (default: 16; 512 for a Mooncake trace)",
    )
    parser.add_argument(
        "--pool-blocks",
        type=parse_int,
        action="append",
        metavar="BLOCKS",
        help="pool size for which the hit rate is computed; repeatable (default: eight sizes that suit the file)",
    )
    parser.add_argument("--requests", type=parse_int, metavar="N", help="number of prompts to read (default: all)")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    from kvscope_engine.analysis.analysis_text import analysis_text

    analysis = _analyze(args)
    # The analysis may have taken minutes: print it even if the page cannot be written.
    print_text(msgspec.json.encode(analysis).decode() if args.json else analysis_text(analysis))
    if args.html is not None:
        _write_page(analysis, Path(args.html))
    return 0


def _analyze(args: argparse.Namespace) -> PromptAnalysis:
    from kvscope_engine.analysis.prompt_analysis import AnalysisOptions, analyze_file
    from kvscope_engine.model.loader.download.progress import Meter, TerminalProgress

    options = AnalysisOptions(
        block_size=args.block_size, pool_blocks=tuple(args.pool_blocks or ()), max_prompts=args.requests
    )
    bar = TerminalProgress()
    meters: dict[str, Meter] = {}

    def report(stage: str, share: float) -> None:
        if stage not in meters:
            meters[stage] = Meter(bar, stage, Path(args.file).name, 100, "%")
        meters[stage].reach(round(100 * share), 100)

    def make_encoder() -> PromptEncoder:
        from kvscope_engine.analysis.prompt_tokens import PromptEncoder, model_tokenizer

        return PromptEncoder(model_tokenizer(args.model, bar))

    try:
        return analyze_file(Path(args.file), options, make_encoder, args.model, report)
    finally:
        bar.close()


def _write_page(analysis: PromptAnalysis, path: Path) -> None:
    from kvscope_engine.analysis.analysis_page import analysis_page

    try:
        path.write_text(analysis_page(analysis), encoding="utf-8")
    except OSError as error:
        raise KvscopeError(f"page {str(path)!r} cannot be written: {error.strerror}") from None
