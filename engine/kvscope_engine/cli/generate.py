"""Command `kvscope-engine generate`: runs prompts together on one engine and prints their completions."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import msgspec

from kvscope_engine.cli.arguments.engine_options import add_engine_options, engine_config
from kvscope_engine.cli.arguments.prompt_options import read_prompts
from kvscope_engine.cli.arguments.sampling_options import add_sampling_options, sampling_params
from kvscope_engine.cli.completion_printers import JsonPrinter, PrintedCompletion, Printer, StreamPrinter, TextPrinter
from kvscope_engine.cli.lazy_engine import engine_class
from kvscope_engine.cli.notices import print_notices
from kvscope_engine.cli.other_ranks import run_as_follower
from kvscope_engine.cli.start_times import StartTimes
from kvscope_engine.command_parser import parse_int
from kvscope_engine.model.loader.download.progress import IMPORT, TerminalProgress
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.commands import Submit
from kvscope_telemetry.messages.telemetry import Progress
from kvscope_telemetry.termination import INTERRUPTED, handling_signals

if TYPE_CHECKING:
    from kvscope_engine.engine import Engine


def add_parser(commands: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "generate",
        help="run prompts and print completions",
        description="Runs prompts together and prints their completions in the given order.",
    )
    parser.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="a prompt; repeatable")
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE.jsonl",
        help='one JSON object per line: {"prompt": TEXT} or {"messages": [{"role": ROLE, "content": '
        "TEXT}]}; sampling options in it override the command's",
    )
    parser.add_argument("--raw", action="store_true", help="send prompts as they are, without the chat template")
    parser.add_argument("--priority", type=parse_int, default=0, metavar="N", help="higher runs first; -1000 to 1000")
    parser.add_argument(
        "--cache-salt",
        default="",
        metavar="TEXT",
        help="share cached prefixes only among prompts with the same salt",
    )
    parser.add_argument(
        "--adapter", default="", metavar="NAME", help="the LoRA adapter of --lora-modules to use (default: none)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per completion, one per line")
    add_sampling_options(parser)
    add_engine_options(parser)
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the prompts. Returns 0, 2 if a prompt was refused or failed, or 130 after Ctrl-C."""
    config = engine_config(args)
    if (code := run_as_follower(config)) is not None:
        return code
    submits = read_prompts(
        args.prompt,
        args.prompts,
        sampling_params(args),
        raw=args.raw,
        priority=args.priority,
        cache_salt=args.cache_salt,
        adapter=args.adapter,
    )

    bar = TerminalProgress()
    report = StartTimes(bar) if args.debug else bar
    report(Progress(stage=IMPORT))
    with engine_class()(config, progress=report) as engine:
        bar.close()
        code = _generate(engine, submits, _printer(args, submits))
    print_notices(engine.notes)
    return code


def _printer(args: argparse.Namespace, submits: list[Submit]) -> Printer:
    if args.json:
        return JsonPrinter()
    if len(submits) == 1 and submits[0].sampling.n == 1:
        return StreamPrinter()
    return TextPrinter(sum(submit.sampling.n for submit in submits))


def _generate(engine: Engine, submits: list[Submit], printer: Printer) -> int:
    answers = [answer for index, submit in enumerate(submits) for answer in _submit(engine, index, submit)]
    by_key = {(answer.request_id, answer.completion): answer for answer in answers}
    printer.show(answers)
    with _record_interrupts() as interrupted:
        while engine.has_unfinished:
            if interrupted:
                for submit in submits:
                    engine.abort(submit.request_id)
            for output in engine.step():
                answer = by_key[output.request_id, output.index]
                answer.add_output(output)
            printer.show(answers)
    printer.close(answers)
    if interrupted:
        return INTERRUPTED
    return 2 if any(answer.finish_reason == "error" for answer in answers) else 0


def _submit(engine: Engine, index: int, submit: Submit) -> list[PrintedCompletion]:
    from kvscope_engine.inputs import prompt_token_ids

    model = engine.hello.model
    ids: list[int] = []
    try:
        ids = prompt_token_ids(submit, engine.tokenizer, model.vocab_size, model.max_model_len)
        raw = submit.raw and submit.messages is None  # cannot be derived from the ids
        tokens = msgspec.structs.replace(submit, prompt=None, messages=None, prompt_token_ids=tuple(ids), raw=raw)
        accepted = engine.submit(tokens)
    except BadInput as error:
        return [PrintedCompletion(index, submit, ids, 0, finish_reason="error", error=str(error))]
    return [PrintedCompletion(index, submit, ids, completion) for completion in range(len(accepted.numbers))]


@contextmanager
def _record_interrupts() -> Iterator[list[int]]:
    """Yield a list to which the first Ctrl-C appends an entry. A second Ctrl-C raises KeyboardInterrupt."""
    interrupted: list[int] = []

    def record_interrupt(number: int, frame: FrameType | None) -> None:
        if interrupted:
            raise KeyboardInterrupt
        interrupted.append(number)

    with handling_signals(record_interrupt, (signal.SIGINT,)):
        yield interrupted
