"""What the fleet's window says of its engines together, and of its list. Knows no Qt."""

from __future__ import annotations

from collections.abc import Sequence

from kvscope_app.look.number_text import count, plural, seconds
from kvscope_telemetry.fleet.list_reader import Listed
from kvscope_telemetry.fleet.own_member import TELLING
from kvscope_telemetry.fleet.row import FleetRow


def counts_text(rows: Sequence[FleetRow], num_shown: int) -> str:
    """How many there are, how many of them tell of themselves, and what they do together."""
    if not rows:
        return ""
    told = [row for row in rows if row.state in TELLING]
    words = [f"{count(len(told))} of {plural(len(rows), 'engine')} heard"]
    running, waiting = (
        [n for n in numbers if n is not None]
        for numbers in ([row.num_running for row in told], [row.num_waiting for row in told])
    )
    if running:
        words.append(f"{count(sum(running))} running, {count(sum(waiting))} waiting")
    if num_shown != len(rows):
        words.append(f"{count(num_shown)} shown")
    return " · ".join(words)


def list_text(name: str, told: Listed, now_ns: int) -> str:
    """Where the list is from, how old it is, and what is wrong with it."""
    if not told.num_tries:
        return f"Reading {name} …"
    if not told.read_ns:
        return f"The list could not be read: {told.trouble}"
    age = _age(now_ns - told.read_ns)
    if told.is_old:
        return f"The list is {age} old: {told.trouble}"
    return f"List: {name}, read {age} ago" + (f"; {told.trouble}" if told.trouble else "")


def _age(age_ns: int) -> str:
    whole_s = max(0, age_ns) // 1_000_000_000
    return f"{whole_s} s" if whole_s < 60 else seconds(whole_s)
