"""Texts of what a prompt would cost, in several lengths. Imports no Qt."""

from __future__ import annotations

from typing import NamedTuple

from kvscope_app.ui.number_text import NOTHING, count, plural, seconds
from kvscope_telemetry.messages.commands import PromptEstimate


class PriceTexts(NamedTuple):
    """The same facts in texts of several lengths, longest first."""

    texts: tuple[str, ...]
    is_warning: bool
    """Whether the prompt does not fit, or the longest answer that is asked for does not fit after it."""


def price_texts(estimate: PromptEstimate, limit: int, max_answer_tokens: int | None) -> PriceTexts:
    """Return texts such as `draft 12 tokens · prompt 345 tokens, 288 cached · first token in about 210 ms · 1 703 left
    for the answer`.

    `limit` is the maximum number of tokens of prompt and answer, 0 if unknown; `max_answer_tokens` is the longest
    answer that is asked for, or None for as long as fits.
    """
    prompt, cached = plural(estimate.num_prompt_tokens, "token"), _count(estimate.num_cached_tokens)
    draft = () if estimate.num_draft_tokens is None else (f"draft {plural(estimate.num_draft_tokens, 'token')}",)
    time = NOTHING if estimate.ttft_s is None else f"about {seconds(estimate.ttft_s)}"
    known_time = () if estimate.ttft_s is None else (time,)
    queue = f" behind {plural(estimate.num_waiting, 'waiting request')}" if estimate.num_waiting else ""
    num_left = limit - estimate.num_prompt_tokens if limit else None
    left, short_left, is_warning = _left(num_left, max_answer_tokens)
    return PriceTexts(
        (
            " · ".join((*draft, f"prompt {prompt}, {cached} cached", f"first token in {time}{queue}", left)),
            " · ".join((f"{prompt}, {cached} cached", *known_time, short_left)),
            " · ".join((f"{prompt}, {cached} cached", short_left)),
            " · ".join((prompt, short_left)),
        )
        if not is_warning  # the warning first: the beginning is read even if the rest does not fit
        else (
            " · ".join((left, *draft, f"prompt {prompt}, {cached} cached", f"first token in {time}{queue}")),
            " · ".join((left, prompt)),
            short_left,
        ),
        is_warning,
    )


def _left(num_left: int | None, max_answer_tokens: int | None) -> tuple[str, str, bool]:
    """Return a long and a short text about the tokens left for the answer, and whether they are too few."""
    if num_left is None:
        return f"{NOTHING} left for the answer", f"{NOTHING} left", False
    if num_left < 1:
        return f"the prompt is {plural(1 - num_left, 'token')} too long", f"{count(1 - num_left)} too long", True
    if max_answer_tokens is not None and max_answer_tokens > num_left:
        long = f"only {count(num_left)} left for an answer of {plural(max_answer_tokens, 'token')}"
        return long, f"only {count(num_left)} left", True
    return f"{count(num_left)} left for the answer", f"{count(num_left)} left", False


def _count(number: int | None) -> str:
    return NOTHING if number is None else count(number)
