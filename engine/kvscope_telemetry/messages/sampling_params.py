"""How a completion is sampled: vLLM's names and meanings, checked where they are made."""

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
"""Fields whose None means what the model's makers say."""


class ModelSampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a model's makers would have it sampled: what holds for requests that do not say. None: they do not either."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None
    """A limit for every request, as vLLM has it: also for one that asks for more."""

    def __post_init__(self) -> None:
        SamplingParams(**{name: getattr(self, name) for name in (*LEFT_TO_THE_MODEL, "max_tokens")})


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling options of one request.

    Raises BadInput (msgspec.ValidationError when decoded from the wire) for a value outside its range.
    """

    temperature: float | None = None
    """0 is greedy; otherwise logits are divided by it. 0 to 100. None: as the model's makers say, else 1."""
    top_p: float | None = None
    """Smallest set of tokens whose probability reaches it. Above 0, at most 1. None: the model's, else 1."""
    top_k: int | None = None
    """Number of most likely tokens kept; 0 or -1 keeps all. None: the model's, else all."""
    min_p: float | None = None
    """Tokens less likely than this share of the most likely one are dropped. 0 to 1. None: the model's, else 0."""
    seed: int | None = None
    """The same seed draws the same random numbers whatever else runs beside the request. The tokens are the same as
    far as the logits are: without `--deterministic` their last bits may depend on the batch."""
    n: int = 1
    """Completions of the same prompt, 1 to 64."""
    stop: tuple[str, ...] = ()
    """Strings that end the completion; the text ends before them."""
    max_tokens: int | None = 256
    """Tokens to generate at most; None means as many as the model's limit leaves."""
    min_tokens: int = 0
    """Tokens to generate before an end-of-sequence token or stop string may end it."""
    presence_penalty: float = 0.0
    """Taken from the logit of each token generated already. -2 to 2."""
    frequency_penalty: float = 0.0
    """The same, times how often it was generated. -2 to 2."""
    repetition_penalty: float | None = None
    """Divides positive, multiplies negative logits of tokens seen so far. Above 0, at most 10. None: the model's,
    else 1."""
    logprobs: int | None = None
    """Log-probabilities of the chosen token and this many of the most likely, 0 to 20."""
    ignore_eos: bool = False
    """Go on past the end-of-sequence token."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the completion, also with `ignore_eos`; their text is not told. At most 256."""
    logit_bias: dict[int, float] = {}
    """Added to the logits of these tokens. -100 to 100, for at most 1,024 tokens."""
    structured: Structured | None = None
    """What form the text has to have."""

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
        _stop_strings(self.stop)
        _token_ids(self.stop_token_ids)
        _biases(self.logit_bias)
        if not isinstance(self.structured, Structured | None):
            raise BadInput(f"structured={_shown(self.structured)} is not accepted: a Structured or None")

    def resolved(self, model: ModelSampling | None = None) -> ResolvedSampling:
        """With the model's defaults where nothing is said."""
        said = {name: getattr(self, name) for name in self.__struct_fields__}
        for name in LEFT_TO_THE_MODEL:
            if said[name] is None:
                said[name] = getattr(model, name, None)
        open_yet = {name for name in LEFT_TO_THE_MODEL if said[name] is None}
        return ResolvedSampling(**{name: value for name, value in said.items() if name not in open_yet})


class ResolvedSampling(SamplingParams, frozen=True, kw_only=True, omit_defaults=False):
    """Options that leave nothing open: what a request runs with."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0


def _number(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if is_number and low <= value <= high and not (open_low and value == low):  # NaN is in no range
        return
    bounds = f"above {low:g} and at most {high:g}" if open_low else f"from {low:g} to {high:g}"
    raise BadInput(f"{name}={_shown(value)} is not accepted: a number {bounds}")


def _integer(name: str, value: int, low: int, high: int) -> None:
    if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
        return
    raise BadInput(f"{name}={_shown(value)} is not accepted: a whole number from {low} to {high}")


def _shown(value: object) -> str:
    try:
        return f"{value!r:.80}"
    except ValueError:  # Python writes out no whole number of more than 4,300 digits
        return "(thousands of digits)"


def _stop_strings(stop: tuple[str, ...]) -> None:
    if not isinstance(stop, tuple) or not all(isinstance(text, str) for text in stop):
        raise BadInput(f"stop={_shown(stop)} is not accepted: a tuple of strings")
    if len(stop) > MAX_STOP_STRINGS:
        raise BadInput(f"stop has {len(stop)} strings: at most {MAX_STOP_STRINGS} are accepted")
    for text in stop:
        if not 0 < len(text) <= MAX_STOP_LENGTH:
            raise BadInput(f"stop string {text!r:.40} is not accepted: 1 to {MAX_STOP_LENGTH} characters")


def _token_ids(ids: tuple[int, ...]) -> None:
    if not isinstance(ids, tuple):
        raise BadInput(f"stop_token_ids={_shown(ids)} is not accepted: a tuple of token ids")
    if len(ids) > MAX_STOP_TOKENS:
        raise BadInput(f"stop_token_ids has {len(ids)} tokens: at most {MAX_STOP_TOKENS} are accepted")
    for token in ids:
        _integer("stop_token_ids", token, 0, MAX_TOKEN_ID)


def _biases(biases: dict[int, float]) -> None:
    if not isinstance(biases, dict):
        raise BadInput(f"logit_bias={_shown(biases)} is not accepted: a bias by token id")
    if len(biases) > MAX_BIASED_TOKENS:
        raise BadInput(f"logit_bias has {len(biases)} tokens: at most {MAX_BIASED_TOKENS} are accepted")
    for token, bias in biases.items():
        _integer("a token of logit_bias", token, 0, MAX_TOKEN_ID)
        _number(f"logit_bias of token {token}", bias, -MAX_BIAS, MAX_BIAS)
