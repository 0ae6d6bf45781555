"""Command line of the desktop. Error messages have one line. Imports no Qt."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final, NoReturn

from kvscope_app.access_options import add_access_options, parse_addresses
from kvscope_app.alarm_options import add_alarm_options, alarm_rules, alarm_webhook
from kvscope_telemetry.addresses import Address, accepted_addresses
from kvscope_telemetry.engine_config import EngineConfig
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.options import options_of

if TYPE_CHECKING:
    from kvscope_telemetry.alarms.rules import Rule
    from kvscope_telemetry.fleet.list_texts import ListText

PROGRAM: Final = "kvscope"
THEME_CHOICES: Final = ("auto", "dark", "light")
_COMMANDS_HELP: Final = "without a command the window opens; commands need no display (see `COMMAND --help`)"

SELECTABLE: Final = ("request", "block")
_MAX_S: Final = 1e9
_MAX_DIGITS: Final = 18
_HELP: Final = ("-h", "--help")

Command = Callable[[], "int | Options"]
"""Function that runs a command. Returns the exit code, or the options of the desktop to open."""
AddParser = Callable[["argparse._SubParsersAction[Any]"], argparse.ArgumentParser]
"""Function that adds a command's parser. The parser's default for `run` is the function that runs the command."""


@dataclass(frozen=True, slots=True)
class FleetOptions:
    text: ListText
    """Where the list of engines is read from, again every `every_s` seconds."""
    every_s: float
    api_key: str = field(default="", repr=False)
    """API key for HTTP servers (such as vLLM's) that have no saved key; empty if there is none."""


@dataclass(frozen=True, slots=True)
class Options:
    attach: tuple[Address, ...] = ()
    engine: tuple[str, ...] = ()
    """Command-line arguments for the engine that the desktop starts, such as `--model=NAME`."""
    keep_engine: bool = False
    theme: str | None = None
    """Theme for this run, or None for the saved theme."""
    debug: bool = False
    recordings: tuple[str, ...] = ()
    at_s: float | None = None
    """Initial time in seconds from the recording's start, where playback is paused. None plays from the start."""
    selects: tuple[tuple[str, int], ...] = ()
    """Initial selection: pairs of "request" or "block" and the number of that request or block."""
    layout: str = ""
    is_comparison: bool = False
    """Whether to open the two `recordings` in one window that compares them."""
    fleet: FleetOptions | None = None
    """If not None, open a table of many engines instead of a window for one."""
    alarms: tuple[Rule, ...] = ()
    """Alarm rules for this run, in addition to the saved ones."""
    alarm_webhook: str = ""
    """Webhook URL for alarms of this run; empty for the saved URL."""


class Parser(argparse.ArgumentParser):
    """Argument parser that raises BadInput instead of printing its usage and exiting."""

    def error(self, message: str) -> NoReturn:
        raise BadInput(f"{message} (see `{self.prog} --help`)")


def parse(arguments: Sequence[str], commands: Sequence[AddParser] = ()) -> Options | Command:
    """Return the options of the window, or a function that runs the named command.

    Raises BadInput for invalid arguments. Prints and exits for --help and --version.
    """
    first = next((word for word in arguments if word != "--debug"), "-")
    # An option comes first, so no command follows. The parser for commands would take the value of an unknown option,
    # as in `kvscope --wrong top`, for a command, and report a wrong error.
    if first.startswith("-") and first not in _HELP:
        return _options(build_parser().parse_args(arguments))
    args = build_parser(commands).parse_args(arguments)
    return partial(args.run, args)


def _options(args: argparse.Namespace) -> Options:
    engine = engine_arguments(args)
    if args.attach and (engine or args.keep_engine):
        option = engine[0].partition("=")[0] if engine else "--keep-engine"
        raise BadInput(f"{option} applies to the engine that kvscope starts and cannot be used with --attach")
    if args.open:
        _check_open_alone(args, engine)
    elif args.at is not None or args.select:
        raise BadInput(f"{'--select' if args.at is None else '--at'} needs --open FILE.mcap")
    addresses = parse_addresses(args, args.attach, "--attach")
    return Options(
        attach=addresses,
        engine=tuple(engine),
        keep_engine=args.keep_engine,
        theme=args.theme,
        debug=args.debug,
        recordings=tuple(args.open),
        at_s=args.at,
        selects=tuple(args.select),
        layout=args.layout,
        alarms=alarm_rules(args, has_saved_rules=True),
        alarm_webhook=alarm_webhook(args),
    )


def build_parser(commands: Sequence[AddParser] = ()) -> argparse.ArgumentParser:
    parser = Parser(
        prog=PROGRAM,
        usage=f"{PROGRAM} [options]\n       {PROGRAM} COMMAND ...",
        allow_abbrev=False,
        description="See inside the KV cache of language-model inference. Starts its own engine with the default "
        "model, unless --attach names a running one.",
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {version('kvscope')}")
    parser.add_argument(
        "--attach",
        metavar="ADDRESS",
        action="append",
        default=[],
        help=f"watch a running engine: {accepted_addresses()}; other engines by their HTTP port, with ?ranks=N for all "
        "ranks of one server; each gets a window (repeatable)",
    )
    add_access_options(parser, "--attach")
    parser.add_argument(
        "--open",
        metavar="FILE.mcap",
        action="append",
        default=[],
        help=(
            "play a recording instead of starting an engine; each gets a window (repeatable). Two recordings come "
            "with kvscope: `sample` (an engine under memory pressure) and `sample-hybrid` (a model with recurrent "
            "layers)"
        ),
    )
    parser.add_argument(
        "--at",
        metavar="SECONDS",
        type=_moment,
        help="with --open: start paused, SECONDS after the recording's start",
    )
    parser.add_argument(
        "--select",
        metavar="KIND:NUMBER",
        type=_selection,
        action="append",
        default=[],
        help="with --open: select a request or a block, such as request:7 or block:123 (one of each)",
    )
    parser.add_argument("--keep-engine", action="store_true", help="leave the engine running when the desktop closes")
    parser.add_argument(
        "--layout",
        metavar="FILE",
        default="",
        help="arrange the views as in FILE (View > Layouts > Save layout to file)",
    )
    parser.add_argument("--theme", choices=THEME_CHOICES, help="colour theme (default: the last one, at first auto)")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    add_alarm_options(parser, "these are added to the alarms set in the window")
    add_engine_options(parser)
    if commands:
        _add_commands(parser, commands)
    return parser


def _add_commands(parser: argparse.ArgumentParser, commands: Sequence[AddParser]) -> None:
    choices = parser.add_subparsers(
        prog=PROGRAM, title="commands", metavar="COMMAND", dest="command", description=_COMMANDS_HELP
    )
    for add_parser in commands:
        command = add_parser(choices)
        command.add_argument(
            "--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error"
        )


def _moment(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < _MAX_S:
        raise argparse.ArgumentTypeError(f"{text!r} is not accepted: seconds from the start, such as 12.5")
    return seconds


def _selection(text: str) -> tuple[str, int]:
    kind, _, number = text.partition(":")
    if kind not in SELECTABLE or not number.isdecimal() or not number.isascii() or len(number) > _MAX_DIGITS:
        raise argparse.ArgumentTypeError(f"{text!r} is not accepted: request:NUMBER or block:NUMBER, such as request:7")
    return kind, int(number)


def _check_open_alone(args: argparse.Namespace, engine: Sequence[str]) -> None:
    if args.attach:
        raise BadInput("--open plays recordings and cannot be used with --attach, which watches an engine")
    if engine or args.keep_engine:
        option = engine[0].partition("=")[0] if engine else "--keep-engine"
        raise BadInput(
            f"{option} applies to the engine that kvscope starts and cannot be used with --open, which starts none"
        )


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that are passed on to the engine, which also checks the values that depend on the device
    or model.
    """
    group = parser.add_argument_group("engine", "options for the engine that the desktop starts")
    for name, option in options_of(EngineConfig).items():
        option.add_passed_on(group, name)


def engine_arguments(args: argparse.Namespace) -> list[str]:
    return [
        word
        for name, option in options_of(EngineConfig).items()
        for word in option.command_line_arguments(getattr(args, name))
    ]
