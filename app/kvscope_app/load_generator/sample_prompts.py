"""Sample prompts that come with kvscope, for the console and the load generator."""

from __future__ import annotations

import json
from importlib import resources
from typing import Final

SHORT_CHARACTERS: Final = 120
LONG_CHARACTERS: Final = 800


def sample_prompts() -> tuple[str, ...]:
    """Return all prompts of `prompts.jsonl`, which has an object `{"prompt": ...}` per line."""
    text = (resources.files("kvscope_resources") / "prompts.jsonl").read_text(encoding="utf-8")
    return tuple(json.loads(line)["prompt"] for line in text.splitlines() if line.strip())


def short_prompts(prompts: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(prompt for prompt in prompts if len(prompt) <= SHORT_CHARACTERS)


def long_prompts(prompts: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(prompt for prompt in prompts if len(prompt) >= LONG_CHARACTERS)
