"""Texts on the prompt tokens that a request reused, and why it did not reuse more. Imports no Qt.

All facts are read from the request's events. Events of older engines lack the data for reasons, which are then omitted.
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
    """Prompt length and reused tokens of a request. `has_cache` says whether the request's engine has a prefix
    cache.
    """

    num_tokens: int
    num_reused: int
    has_cache: bool


def prompt_of(mirror: Mirror, number: int) -> PromptReuse | None:
    row = mirror.requests.row_of(number)
    if row is None or mirror.hello is None:
        return None
    requests, cache = mirror.requests, mirror.hello.cache
    return PromptReuse(int(requests.num_prompt_tokens[row]), int(requests.num_cached_tokens[row]), cache.prefix_caching)


def reuse_text(events: Iterable[Event], number: int, prompt: PromptReuse) -> str:
    """Return what request `number` reused at its admission and when it last resumed; "" before admission.

    `events` must be in order, oldest first; events of other requests are ignored.
    """
    own_events = [event for event in events if event.number == number]
    admitted = next((event for event in own_events if event.kind == "admitted"), None)
    resumed = next((event for event in reversed(own_events) if event.kind == "resumed"), None)
    lines = [_admission_text(admitted, prompt)] if admitted is not None else _from_counts(prompt)
    return "\n".join(lines + ([_resumption_text(resumed)] if resumed is not None else []))


def _admission_text(event: Event, prompt: PromptReuse) -> str:
    if event.other:  # for an admission: the request from which this one was forked
        return _sentence(cause_text(event) or f"forked from request #{event.other}")
    if not event.num_tokens:
        return _no_reuse_text(prompt, event)
    reused_text = f"Reused {count(event.num_tokens)} of {plural(prompt.num_tokens, 'prompt token')}"
    return _sentence("; ".join([reused_text, *_reasons(event)]))


def _no_reuse_text(prompt: PromptReuse, event: Event) -> str:
    if not prompt.has_cache:
        return f"Reused nothing: prefix caching is off. {_all_tokens_text(prompt)} computed."
    reasons = ""
    if event.data is not None:
        reasons = "; ".join([*reuse_clauses(event.data), *filter(None, [miss_text(event.data)])])
    text = f"Reused none of its {plural(prompt.num_tokens, 'prompt token')}"
    return _sentence(f"{text}: {reasons}" if reasons else text)


def _all_tokens_text(prompt: PromptReuse) -> str:
    return f"All {plural(prompt.num_tokens, 'prompt token')}" if prompt.num_tokens > 1 else "Its prompt token"


def _resumption_text(event: Event) -> str:
    cached = f"with {plural(event.num_tokens, 'token')} already cached"
    reuse = cached if event.num_tokens else "and computes everything"
    return _sentence("; ".join([f"Came back {reuse}", *_reasons(event)]))


def _from_counts(prompt: PromptReuse) -> list[str]:
    if not prompt.num_reused:
        return []
    return [f"Reused {count(prompt.num_reused)} of {plural(prompt.num_tokens, 'prompt token')}."]


def _reasons(event: Event) -> list[str]:
    """Return text clauses on where the reused tokens came from, and on why no more were reused."""
    if event.data is None:
        return []
    miss = miss_text(event.data)
    return [*reuse_clauses(event.data), *([f"not more, since {miss}"] if miss else [])]


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:].rstrip('.')}."
