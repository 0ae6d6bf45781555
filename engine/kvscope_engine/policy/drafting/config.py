"""How tokens are guessed ahead: `--speculative-config` with vLLM's fields and their meaning."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.json_option import read_json_option

OPTION: Final = "--speculative-config"
DEFAULT_LOOKUP: Final = 5
_Count = Annotated[int, Meta(ge=1, le=64)]


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Guesses by n-grams, vLLM's `ngram`: what followed the same tokens earlier in the request's own text."""

    num_speculative_tokens: _Count
    """Tokens guessed in a step at most, of one request."""
    method: Literal["ngram"] = "ngram"
    prompt_lookup_max: _Count | None = None
    """Last tokens that must have been there before, at most and at least; without either both are 5, without one
    both are the other."""
    prompt_lookup_min: _Count | None = None

    @property
    def longest(self) -> int:
        """`prompt_lookup_max`, resolved."""
        return self.prompt_lookup_max or self.prompt_lookup_min or DEFAULT_LOOKUP

    @property
    def shortest(self) -> int:
        """`prompt_lookup_min`, resolved."""
        return self.prompt_lookup_min or self.prompt_lookup_max or DEFAULT_LOOKUP


def parse_speculative_config(text: str) -> SpeculativeConfig:
    """The configuration in a JSON object. Raises BadInput, in one line, for anything else."""
    config = read_json_option(OPTION, text, SpeculativeConfig)
    if config.shortest > config.longest:
        raise BadInput(
            f"{OPTION}: prompt_lookup_min={config.shortest} is not accepted: at most prompt_lookup_max"
            f" ({config.longest})"
        )
    return config
