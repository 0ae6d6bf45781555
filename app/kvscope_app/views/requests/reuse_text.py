"""Text on the tokens that a request reused, and why it did not reuse more. Imports no Qt.

All facts come from the request's events; an event of an older engine has no data, and then no reasons are given.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvscope_app.ui.number_text import count, plural
from kvscope_telemetry.messages.event_kinds import cause_text, miss_text, reuse_clauses
from kvscope_telemetry.messages.telemetry import Event
from kvscope_telemetry.mirror.mirror import Mirror


@dataclass(frozen=True, slots=True)
class PromptReuse:
    """Prompt length and reused tokens of a request, and whether its engine has a prefix cache."""

    num_tokens: int
    num_reused: int
    has_cache: bool


def prompt_of(mirror: Mirror, number: int) -> PromptReuse | None:
    """Return the reuse of request `number`, or None if the request is unknown."""
    row = mirror.requests.row_of(number)
    if row is None or mirror.hello is None:
        return None
    requests, cache = mirror.requests, mirror.hello.cache
    return PromptReuse(int(requests.num_prompt_tokens[row]), int(requests.num_cached_tokens[row]), cache.prefix_caching)


def reuse_text(events: Iterable[Event], number: int, prompt: PromptReuse) -> str:
    """Describe what request `number` reused when it was admitted and when it last resumed; "" before admission.

    `events`: oldest first.
    """
    own = [event for event in events if event.number == number]
    admitted = next((event for event in own if event.kind == "admitted"), None)
    resumed = next((event for event in reversed(own) if event.kind == "resumed"), None)
    lines = [_begun(admitted, prompt)] if admitted is not None else _from_counts(prompt)
    return "\n".join(lines + ([_resumed(resumed)] if resumed is not None else []))


def _begun(event: Event, prompt: PromptReuse) -> str:
    if event.other:
        return _sentence(cause_text(event) or f"forked from request #{event.other}")
    if not event.num_tokens:
        return _nothing(prompt, event)
    whole = f"Reused {count(event.num_tokens)} of {plural(prompt.num_tokens, 'prompt token')}"
    return _sentence("; ".join([whole, *_reasons(event)]))


def _nothing(prompt: PromptReuse, event: Event) -> str:
    if not prompt.has_cache:
        return f"Reused nothing: prefix caching is off. {_all_of(prompt)} computed."
    why = "" if event.data is None else "; ".join([*reuse_clauses(event.data), *filter(None, [miss_text(event.data)])])
    said = f"Reused none of its {plural(prompt.num_tokens, 'prompt token')}"
    return _sentence(f"{said}: {why}" if why else said)


def _all_of(prompt: PromptReuse) -> str:
    return f"All {plural(prompt.num_tokens, 'prompt token')}" if prompt.num_tokens > 1 else "Its prompt token"


def _resumed(event: Event) -> str:
    what = f"with {plural(event.num_tokens, 'token')} already cached" if event.num_tokens else "and computes everything"
    return _sentence("; ".join([f"Came back {what}", *_reasons(event)]))


def _from_counts(prompt: PromptReuse) -> list[str]:
    """Return the text if the admission event is not available, because kvscope connected later or the event was
    dropped."""
    if not prompt.num_reused:
        return []
    return [f"Reused {count(prompt.num_reused)} of {plural(prompt.num_tokens, 'prompt token')}."]


def _reasons(event: Event) -> list[str]:
    """Return clauses that say where tokens came from, and why not more were available."""
    if event.data is None:
        return []
    missed = miss_text(event.data)
    return [*reuse_clauses(event.data), *([f"not more, since {missed}"] if missed else [])]


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:].rstrip('.')}."
