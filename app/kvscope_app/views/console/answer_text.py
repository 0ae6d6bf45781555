"""Texts about an answer: its figures, its ending and its time. Imports no Qt."""

from __future__ import annotations

import time

from kvscope_app.ui.number_text import count, grouped, plural, seconds, short
from kvscope_app.views.console.conversation import AnswerStats, Message

_ENDING_TEXT = {
    "length": "token limit reached",
    "stopped": "stopped",
    "refused": "not accepted",
    "error": "failed",
    "interrupted": "interrupted",
}

_MIN_QUEUE_S_SHOWN = 0.01


def stats_text(stats: AnswerStats) -> str:
    """Return a line such as `120 tokens · 45.2 tok/s · first after 120 ms · prompt 345 tokens, 128 cached`.

    Until the engine reports the time to first token, the line has the time measured here: `first seen after 130 ms`.
    """
    parts = []
    if stats.num_tokens:
        parts.append(plural(stats.num_tokens, "token"))
    if stats.tokens_per_s is not None:
        parts.append(f"{short(stats.tokens_per_s)} tok/s")
    if stats.queue_s is not None and stats.queue_s >= _MIN_QUEUE_S_SHOWN:
        parts.append(f"queued {seconds(stats.queue_s)}")
    if stats.ttft_s is not None:
        parts.append(f"first after {seconds(stats.ttft_s)}")
    elif stats.first_seen_s is not None:
        parts.append(f"first seen after {seconds(stats.first_seen_s)}")
    if stats.num_prompt_tokens:
        cached = f", {count(stats.num_cached_tokens)} cached" if stats.num_cached_tokens else ""
        parts.append(f"prompt {plural(stats.num_prompt_tokens, 'token')}{cached}")
    if stats.total_s is not None:
        paused = f", {seconds(stats.stopped_s)} of it paused" if stats.stopped_s else ""
        parts.append(f"{seconds(stats.total_s)} in total{paused}")
    return "  ·  ".join(parts)


def ending_text(message: Message) -> str:
    ending = _ENDING_TEXT.get(message.ending, "")
    ending = ending[:1].upper() + ending[1:]
    return f"{ending}: {grouped(message.note)}" if ending and message.note else ending


def exact_time(time_s: float) -> str:
    """Return a local date and time such as `2026-11-29 16:05:09`, or "" if `time_s` is 0, which means unknown."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_s)) if time_s else ""
