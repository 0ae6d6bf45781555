"""Sampling options of a completion, with vLLM's names and meanings. Values are validated on construction."""

from __future__ import annotations

from typing import Final

import msgspec

from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.structured import Structured

MAX_COMPLETIONS: Final = 64
MAX_STOP_STRINGS: Final = 16
MAX_STOP_LENGTH: Final = 256
MAX_LOGPROBS: Final = 20
MAX_TOKENS: Final = 1 << 24
MAX_STOP_TOKENS: Final = 256
MAX_BIASED_TOKENS: Final = 1024
MAX_TOKEN_ID: Final = (1 << 31) - 1
MAX_BIAS: Final = 100.0
LEFT_TO_THE_MODEL: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Fields for which None selects the model's default (from its `generation_config.json` or GGUF file)."""


class ModelSampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A model's default sampling options, for requests that leave them unset. None means that the model has no
    default.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None
    """Maximum number of generated tokens for all requests, even for those that ask for more (as in vLLM)."""

    def __post_init__(self) -> None:
        SamplingParams(**{name: getattr(self, name) for name in (*LEFT_TO_THE_MODEL, "max_tokens")})


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling options of one request.

    Raises BadInput (msgspec.ValidationError when decoded from the wire) for a value outside its range.
    """

    temperature: float | None = None
    """Divisor of the logits, 0 to 100. 0 selects greedy sampling. None selects the model's default, or 1 if it has
    none.
    """
    top_p: float | None = None
    """Sample from the smallest set of tokens with at least this total probability. Above 0, at most 1. None selects the
    model's default, or 1 if it has none.
    """
    top_k: int | None = None
    """Number of most likely tokens to sample from. 0 and -1 allow all tokens. None selects the model's default, or all
    tokens if it has none.
    """
    min_p: float | None = None
    """Drop tokens less likely than this share of the most likely token's probability. 0 to 1. None selects the model's
    default, or 0 if it has none.
    """
    seed: int | None = None
    """Seed of the request's random numbers, which are the same whatever other requests are in the batch.

    The sampled tokens may still differ: without `--deterministic`, the last bits of the logits depend on the batch.
    """
    n: int = 1
    """Number of completions of the same prompt, 1 to 64."""
    stop: tuple[str, ...] = ()
    """Strings that end the completion; its text ends before them."""
    max_tokens: int | None = 256
    """Maximum number of generated tokens. If None, only the model's context length limits it."""
    min_tokens: int = 0
    """Number of tokens before an end-of-sequence token or stop string can end the completion."""
    presence_penalty: float = 0.0
    """Value subtracted from the logit of each token that was generated. -2 to 2."""
    frequency_penalty: float = 0.0
    """Value subtracted from the logit of each generated token, once per occurrence. -2 to 2."""
    repetition_penalty: float | None = None
    """Divides positive and multiplies negative logits of tokens in the prompt or output. Above 0, at most 10. None
    selects the model's default, or 1 if it has none.
    """
    logprobs: int | None = None
    """Number of most likely tokens, 0 to 20, for which log-probabilities are returned in addition to that of the chosen
    token. If None, no log-probabilities are returned.
    """
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the completion, even with `ignore_eos`; their text is not returned. At most 256."""
    logit_bias: dict[int, float] = {}
    """Values added to the logits, by token id. -100 to 100, for at most 1,024 tokens."""
    structured: Structured | None = None
    prompt_logprobs: int | None = None
    """Number of most likely tokens, 0 to 20, for which log-probabilities are returned at each position of the prompt
    but the first, in addition to that of the prompt's own token. If None, none are returned. The prompt is then
    computed without the prefix cache.
    """

    def __post_init__(self) -> None:
        if self.temperature is not None:
            _number("temperature", self.temperature, 0.0, 100.0)
        if self.top_p is not None:
            _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        if self.top_k is not None:
            _integer("top_k", self.top_k, -1, 1 << 31)
        if self.min_p is not None:
            _number("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _integer("seed", self.seed, -(1 << 63), (1 << 63) - 1)
        _integer("n", self.n, 1, MAX_COMPLETIONS)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, MAX_TOKENS)
        _integer("min_tokens", self.min_tokens, 0, self.max_tokens or MAX_TOKENS)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.repetition_penalty is not None:
            _number("repetition_penalty", self.repetition_penalty, 0.0, 10.0, open_low=True)
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            _integer("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        _stop_strings(self.stop)
        _token_ids(self.stop_token_ids)
        _biases(self.logit_bias)
        if not isinstance(self.structured, Structured | None):
            raise BadInput(f"structured={_shortened(self.structured)} is not accepted: must be a Structured or None")

    def resolved(self, model: ModelSampling | None = None) -> ResolvedSampling:
        """Return the options with unset ones replaced by the defaults of `model`, then by general defaults."""
        values = {name: getattr(self, name) for name in self.__struct_fields__}
        for name in LEFT_TO_THE_MODEL:
            if values[name] is None:
                values[name] = getattr(model, name, None)
        unset = {name for name in LEFT_TO_THE_MODEL if values[name] is None}
        return ResolvedSampling(**{name: value for name, value in values.items() if name not in unset})


class ResolvedSampling(SamplingParams, frozen=True, kw_only=True, omit_defaults=False):
    """Sampling options of a running request, without unset values."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


def _number(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if is_number and low <= value <= high and not (open_low and value == low):  # NaN is in no range
        return
    bounds = f"above {low:g} and at most {high:g}" if open_low else f"from {low:g} to {high:g}"
    raise BadInput(f"{name}={_shortened(value)} is not accepted: must be a number {bounds}")


def _integer(name: str, value: int, low: int, high: int) -> None:
    if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
        return
    raise BadInput(f"{name}={_shortened(value)} is not accepted: must be a whole number from {low} to {high}")


def _shortened(value: object) -> str:
    try:
        return f"{value!r:.80}"
    except ValueError:  # Python writes out no whole number of more than 4,300 digits
        return "(thousands of digits)"


def _stop_strings(stop: tuple[str, ...]) -> None:
    if not isinstance(stop, tuple) or not all(isinstance(text, str) for text in stop):
        raise BadInput(f"stop={_shortened(stop)} is not accepted: must be a tuple of strings")
    if len(stop) > MAX_STOP_STRINGS:
        raise BadInput(f"stop has {len(stop)} strings: at most {MAX_STOP_STRINGS} are accepted")
    for text in stop:
        if not 0 < len(text) <= MAX_STOP_LENGTH:
            raise BadInput(f"stop string {text!r:.40} is not accepted: must be 1 to {MAX_STOP_LENGTH} characters")


def _token_ids(ids: tuple[int, ...]) -> None:
    if not isinstance(ids, tuple):
        raise BadInput(f"stop_token_ids={_shortened(ids)} is not accepted: must be a tuple of token ids")
    if len(ids) > MAX_STOP_TOKENS:
        raise BadInput(f"stop_token_ids has {len(ids)} tokens: at most {MAX_STOP_TOKENS} are accepted")
    for token in ids:
        _integer("stop_token_ids", token, 0, MAX_TOKEN_ID)


def _biases(biases: dict[int, float]) -> None:
    if not isinstance(biases, dict):
        raise BadInput(f"logit_bias={_shortened(biases)} is not accepted: must map token ids to biases")
    if len(biases) > MAX_BIASED_TOKENS:
        raise BadInput(f"logit_bias has {len(biases)} tokens: at most {MAX_BIASED_TOKENS} are accepted")
    for token, bias in biases.items():
        _integer("a token of logit_bias", token, 0, MAX_TOKEN_ID)
        _number(f"logit_bias of token {token}", bias, -MAX_BIAS, MAX_BIAS)
