"""Command-line options for alarms: rules for this run, and the webhook. Imports no Qt."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kvscope_telemetry.alarms.rules import Rule

_DEFAULT: Final = "default"


def add_alarm_options(parser: argparse.ArgumentParser, rules_help: str) -> None:
    """Add `--alarm` and `--alarm-webhook`. `rules_help` is inserted into the help of `--alarm`."""
    parser.add_argument(
        "--alarm",
        metavar="RULE",
        action="append",
        default=[],
        help="an alarm for this run: '[NAME:] EXPRESSION [for N s]', such as 'Slow: ttft_p99_ms > 500 for 10 s' "
        f"(repeatable; {rules_help}). An unknown figure name prints the list of figures; see docs/alarms.md",
    )
    parser.add_argument(
        "--alarm-webhook",
        metavar="URL",
        default="",
        help="http:// or https:// URL that receives a JSON POST when an alarm fires or ends",
    )


def alarm_rules(args: argparse.Namespace, *, has_saved_rules: bool) -> tuple[Rule, ...]:
    """Return the rules of `--alarm`, where `default` stands for all predefined rules.

    Without saved rules (`has_saved_rules`), `--alarm-webhook` alone implies the predefined rules. Raises BadInput for
    an invalid rule.
    """
    texts: list[str] = args.alarm or ([_DEFAULT] if args.alarm_webhook and not has_saved_rules else [])
    if not texts:
        return ()
    from kvscope_telemetry.alarms.rules import DEFAULT_RULES, checked, parse_rule
    from kvscope_telemetry.errors import BadInput

    rules: list[Rule] = []
    for text in texts:
        try:
            rules += DEFAULT_RULES if text.strip() == _DEFAULT else [parse_rule(text)]
        except BadInput as error:
            raise BadInput(f"--alarm {text!r:.80}: {error}") from None
    return checked(rules)


def alarm_webhook(args: argparse.Namespace) -> str:
    """Return the webhook URL, empty if none is given. Raises BadInput for an invalid URL."""
    if not args.alarm_webhook:
        return ""
    from kvscope_telemetry.alarms.webhook import checked_url

    return checked_url(args.alarm_webhook)
