"""Which alarms there are, and when each rings as its person set it.

Owns defaults and what is accepted. How a second is judged is `alarm_engine`'s.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import msgspec

from kvscope_telemetry.errors import BadInput

KV_USAGE, PREEMPTIONS, WAITING, RUN_OUT = "kv_usage", "preemptions", "waiting", "run_out"
HOT, FRAMES_LOST, STUCK = "hot", "frames_lost", "stuck"


class Rule(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """When one alarm rings."""

    kind: str
    is_on: bool = True
    threshold: float
    """In the unit of its `Kind`."""
    seconds: float = 0.0
    """How long it must be over; of sums and means, over how long they are."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What an alarm is about."""

    name: str
    title: str
    condition: str
    """Before the threshold: `KV usage over`."""
    unit: str
    threshold: float
    """As it is at first."""
    accepted: tuple[float, float]
    """The least and greatest threshold."""
    seconds: float = 0.0
    has_seconds: bool = True
    """Whether a person sets them."""
    before_seconds: str = "for"
    """What stands between threshold and seconds."""
    is_below: bool = False
    """It rings below the threshold and not above."""
    clears_at: float = 1.0
    """Part of the threshold at which the trouble may be over."""
    calm_s: float = 5.0
    """How long it must be so calm: one trouble is one alarm."""

    @property
    def rule(self) -> Rule:
        """As it is at first."""
        return Rule(kind=self.name, threshold=self.threshold, seconds=self.seconds)


KINDS: Final = {
    kind.name: kind
    for kind in (
        Kind(KV_USAGE, "KV usage high", "KV usage over", "%", 95.0, (1.0, 99.9), 5.0, clears_at=0.95, calm_s=10.0),
        Kind(
            PREEMPTIONS,
            "Many preemptions",
            "Preemptions over",
            "/s",
            1.0,
            (0.01, 1e4),
            5.0,
            before_seconds="on average over",
            clears_at=0.5,
        ),
        Kind(
            WAITING,
            "Request waits long",
            "A request waits for its first step for over",
            "s",
            10.0,
            (0.5, 3600.0),
            has_seconds=False,
            clears_at=0.5,
        ),
        Kind(
            RUN_OUT,
            "Blocks run out",
            "At the present rate no free or cached block is left in under",
            "s",
            30.0,
            (1.0, 600.0),
            5.0,
            is_below=True,
            clears_at=2.0,
            calm_s=10.0,
        ),
        Kind(HOT, "Device hot", "Temperature over", "°C", 85.0, (20.0, 150.0), 10.0, clears_at=0.95, calm_s=10.0),
        Kind(
            FRAMES_LOST,
            "Frames lost",
            "More frames lost than",
            "",
            0.0,
            (0.0, 1e6),
            10.0,
            before_seconds="within",
            calm_s=20.0,
        ),
        Kind(
            STUCK,
            "Engine stuck",
            "No step ends, with requests to run, for over",
            "s",
            30.0,
            (3.0, 3600.0),
            2.0,
            has_seconds=False,
            clears_at=0.1,
            calm_s=2.0,
        ),
    )
}
SECONDS: Final = (0.0, 600.0)
"""What is accepted of `Rule.seconds`."""
DEFAULT_RULES: Final = tuple(kind.rule for kind in KINDS.values())
_decoder: Final = msgspec.json.Decoder(list[Rule])


def checked(rule: Rule) -> Rule:
    """Raises BadInput for what makes no sense."""
    kind = KINDS.get(rule.kind)
    if kind is None:
        raise BadInput(f"alarm {rule.kind!r} is not known: {', '.join(KINDS)}")
    for what, value, (least, most) in (
        ("threshold", rule.threshold, kind.accepted),
        ("seconds", rule.seconds, SECONDS),
    ):
        if not (math.isfinite(value) and least <= value <= most):
            raise BadInput(f"{what} {value:g} of alarm {rule.kind!r} is not accepted: {least:g} to {most:g}")
    return rule


def encode_rules(rules: tuple[Rule, ...]) -> str:
    """As JSON."""
    return msgspec.json.encode(rules).decode()


def decode_rules(text: str) -> tuple[Rule, ...]:
    """One of each kind, in their order: those that are missing, or make no sense, are as at first."""
    said: dict[str, Rule] = {}
    try:
        for rule in _decoder.decode(text or "[]"):
            try:
                said[rule.kind] = checked(rule)
            except BadInput:  # of another version, or written by hand
                continue
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError):
        said = {}
    return tuple(said.get(kind.name, kind.rule) for kind in KINDS.values())
