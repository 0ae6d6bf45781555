"""What a request did not have to compute, and why not more of it was there: sentences from its events. No Qt.

Numbers are the event's fields; the reason is taken from its cause as it stands.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from kvscope_app.look.number_text import count, plural
from kvscope_telemetry.messages.telemetry import Event
from kvscope_telemetry.state.mirror import Mirror

_SINCE: Final = "not more, since "
_TOLD_OTHERWISE: Final = ("waited ", "came back ", "all ")
"""How clauses of a cause begin that are no part of the sentence: how long it waited, and that it computes all."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the mirror knows of a request, and whether its engine has a prefix cache."""

    num_tokens: int
    num_reused: int
    has_cache: bool


def prompt_of(mirror: Mirror, number: int) -> Prompt | None:
    """Of request `number`; None when it is not known."""
    row = mirror.requests.row_of(number)
    if row is None or mirror.hello is None:
        return None
    requests, cache = mirror.requests, mirror.hello.cache
    return Prompt(int(requests.num_prompt_tokens[row]), int(requests.num_cached_tokens[row]), cache.prefix_caching)


def reuse_text(events: Iterable[Event], number: int, prompt: Prompt) -> str:
    """How request `number` began, and how it came back the last time; "" before it began. `events`: oldest first."""
    own = [event for event in events if event.number == number]
    admitted = next((event for event in own if event.kind == "admitted"), None)
    resumed = next((event for event in reversed(own) if event.kind == "resumed"), None)
    lines = [_begun(admitted, prompt)] if admitted is not None else _from_counts(prompt)
    return "\n".join(lines + ([_resumed(resumed)] if resumed is not None else []))


def _begun(event: Event, prompt: Prompt) -> str:
    if event.other:
        return _sentence(event.cause or f"forked from request {event.other}")
    if not event.num_tokens:
        return _nothing(prompt, _reasons(event.cause))
    whole = f"Reused {count(event.num_tokens)} of {plural(prompt.num_tokens, 'prompt token')}"
    return _sentence("; ".join([whole, *_reasons(event.cause)]))


def _nothing(prompt: Prompt, reasons: list[str]) -> str:
    if not prompt.has_cache:
        return f"Reused nothing: the engine keeps no prefixes. {_all_of(prompt)} computed."
    why = "; ".join(reason.removeprefix(_SINCE) for reason in reasons)
    said = f"Reused none of its {plural(prompt.num_tokens, 'prompt token')}"
    return _sentence(f"{said}: {why}" if why else said)


def _all_of(prompt: Prompt) -> str:
    return f"All {plural(prompt.num_tokens, 'prompt token')}" if prompt.num_tokens > 1 else "Its prompt token"


def _resumed(event: Event) -> str:
    what = f"with {plural(event.num_tokens, 'token')} it need not compute" if event.num_tokens else "and computes all"
    return _sentence("; ".join([f"Came back {what}", *_reasons(event.cause)]))


def _from_counts(prompt: Prompt) -> list[str]:
    """Where the event was not seen: the desktop came later, or it was long ago."""
    if not prompt.num_reused:
        return []
    return [f"Reused {count(prompt.num_reused)} of {plural(prompt.num_tokens, 'prompt token')}."]


def _reasons(cause: str) -> list[str]:
    """The clauses that say where tokens came from, and why not more were there."""
    return [clause for clause in cause.split("; ") if clause and not _is_told_otherwise(clause)]


def _is_told_otherwise(clause: str) -> bool:
    return clause.startswith(_TOLD_OTHERWISE) or clause.endswith(" needed") or "were there already" in clause


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:].rstrip('.')}."
