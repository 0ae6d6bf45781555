"""Replays a recording of a deterministic engine and finds where the recorded and the replayed run diverge.

Checks that the recording contains what a replay needs, configures an engine like the recorded one, and compares the KV
blocks and logits of the two runs. Blocks and logits are matched by the token prefix from which they were computed, so
the runs may differ in schedule, cache hits and recomputation.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from msgspec.structs import replace

from kvscope_telemetry.block_texts.block_texts import RecordedRequestParams, RecordedText
from kvscope_telemetry.engine_config import EngineConfig
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.commands import Finished, Submit, Tokens
from kvscope_telemetry.messages.telemetry import Fingerprints, Hello, TelemetryMessage
from kvscope_telemetry.recordings.layout import MESSAGES
from kvscope_telemetry.recordings.reader import FOREVER_NS, Recording

if TYPE_CHECKING:
    from kvscope_engine.engine import Engine

RECORDING_HINT: Final = "start the engine with --deterministic --fingerprints --record FILE.mcap --record-text"
_REQUIRED_EQUAL: Final = ("architecture", "num_layers", "vocab_size", "dtype", "quantization", "quantization_option")


@dataclass(frozen=True, slots=True)
class RecordedRun:
    hello: Hello
    requests: tuple[RecordedText, ...]
    """Requests that ended without an error, ordered by number."""
    fingerprints: tuple[Fingerprints, ...]
    failed: frozenset[int] = frozenset()
    """Numbers of requests that ended with an engine error."""


def read_run(path: Path) -> RecordedRun:
    recording = Recording.open(path)
    hello, name = recording.info.hello, str(path)
    if not hello.capabilities.deterministic:
        raise BadInput(f"recording {name!r} cannot be run again: its engine was not deterministic; {RECORDING_HINT}")
    if len(recording.info.epochs) > 1:
        raise BadInput(
            f"recording {name!r} cannot be run again: it holds {len(recording.info.epochs)} starts of an engine"
        )
    ended = {text.number: text for text in recording.texts() if text.request is not None}
    requests = tuple(text for _, text in sorted(ended.items()) if _generation_request(text).finish_reason != "error")
    if not requests:
        missing = "it holds no texts"
        if recording.has_texts:
            missing = "all its requests failed" if ended else "no request ended, or was aborted, while it was recorded"
        raise BadInput(f"recording {name!r} cannot be run again: {missing}; {RECORDING_HINT}")
    failed = ended.keys() - {text.number for text in requests}
    return RecordedRun(hello, requests, _fingerprints(recording), frozenset(failed))


def _fingerprints(recording: Recording) -> tuple[Fingerprints, ...]:
    """Return the recording's fingerprints in step order, without decoding its telemetry frames."""
    messages = (message for each in recording.segments for _, message in each.messages((MESSAGES,), 0, FOREVER_NS))
    return tuple(message for message in messages if isinstance(message, Fingerprints))


def config_of_run(hello: Hello, overrides: Mapping[str, Any]) -> EngineConfig:
    """Return the configuration of the recorded engine with the fields in `overrides` replaced.

    Raises BadInput if the configuration is not valid.
    """
    cache = hello.cache
    recorded: dict[str, Any] = {
        "model": hello.model.name,
        "device": hello.device.kind,
        "dtype": hello.model.dtype,
        "quantization": hello.model.quantization_option or ("auto" if hello.model.quantization else "none"),
        "max_model_len": hello.model.max_model_len,
        "num_threads": hello.device.num_threads or None,
        "block_size": cache.block_size,
        "num_gpu_blocks_override": cache.num_blocks,
        "max_num_seqs": cache.max_num_seqs,
        "max_num_batched_tokens": cache.max_num_batched_tokens,
        "deterministic": True,
        "fingerprints": True,
    }
    return EngineConfig(**{**recorded, **overrides})


def check_same_engine(recorded: Hello, replayed: Hello) -> None:
    """Raise BadInput if model, kind of device, number of threads or KV format differ from the recording."""
    pairs = [(name, getattr(recorded.model, name), getattr(replayed.model, name)) for name in _REQUIRED_EQUAL]
    pairs.append(("device", recorded.device.kind, replayed.device.kind))
    pairs.append(("num_threads", recorded.device.num_threads, replayed.device.num_threads))
    pairs.append(("block_size", recorded.cache.block_size, replayed.cache.block_size))
    pairs.append(("kv_cache_dtype", recorded.cache.dtype, replayed.cache.dtype))
    for name, expected, actual in pairs:
        if expected != actual:
            raise BadInput(
                f"model {replayed.model.name!r} cannot run the recording again: {name} is {actual!r}, and was"
                f" {expected!r}"
            )


def _environment(recorded: Hello, replayed: Hello) -> str:
    """Describe differences of processor, software and kvscope version, which may change the last bits of results.

    Empty if there are none.
    """
    pairs = (
        ("the CPU" if replayed.device.kind == "cpu" else "the GPU", recorded.device.name, replayed.device.name),
        ("the software", recorded.device.software, replayed.device.software),
        ("kvscope", recorded.engine_version, replayed.engine_version),
    )
    return "; ".join(
        f"{component} was {before!r}, and is {after!r}" for component, before, after in pairs if before != after
    )


class Moment(NamedTuple):
    """Point in a run at which a block or a token's logits were computed. Ordered by step, then by layer."""

    step: int
    layer: int
    number: int
    position: int
    """Index of the block in its request. For logits, the number of tokens that the request had generated before."""


@dataclass(frozen=True, slots=True)
class ReplayComparison:
    num_requests: int
    num_layers: int
    num_blocks: int
    """Number of blocks that both runs computed."""
    num_equal_blocks: int
    num_logits: int
    num_equal_logits: int
    num_same_tokens: int
    """Number of requests with the same output tokens in both runs."""
    first: str
    """Description of the earliest difference; empty if there is none."""
    left_out: tuple[str, ...] = ()
    """Numbers of requests, blocks and tokens that could not be compared, each as a text with the reason."""
    environment: str = ""

    @property
    def lines(self) -> list[str]:
        left_out = [f"not compared: {'; '.join(self.left_out)}"] if self.left_out else []
        counts = f"{self.num_requests} requests, {self.num_blocks} blocks, {self.num_layers} layers"
        if not self.first and not self.num_blocks and not self.num_logits:
            why = "no keys and values were computed in both runs"
            why = why if self.num_layers else "keys and values were not recorded (--fingerprints)"
            return [f"equal tokens: {self.num_requests} requests; {why}", *left_out]
        if not self.first:
            return [f"bit-equal: {counts}, {self.num_logits} tokens", *left_out]
        return [
            f"the runs part {self.first}",
            *([f"a likely reason: {self.environment}"] if self.environment else []),
            f"equal in both runs: {self.num_equal_blocks} of {self.num_blocks} blocks, the logits of "
            f"{self.num_equal_logits} of {self.num_logits} tokens, and all tokens of {self.num_same_tokens} of "
            f"{self.num_requests} requests",
            *left_out,
        ]


@dataclass(slots=True)
class RunDigests:
    """Digests of a run's KV blocks and logits, by the key of the token prefix from which they were computed."""

    blocks: defaultdict[bytes, dict[bytes, Moment]] = field(default_factory=lambda: defaultdict(dict))
    """For each prefix key, the digests of a block (all layers), and when each was first computed
    (`Moment.layer` is 0).
    """
    logits: defaultdict[bytes, dict[int, Moment]] = field(default_factory=lambda: defaultdict(dict))
    """For each prefix key, the checksums of a token's logits, and when each was first computed."""

    def add(self, message: Fingerprints, texts: dict[int, PrefixKeys], block_size: int) -> None:
        """Add the digests of one step. Requests that are not in `texts` are skipped."""
        numbers = np.frombuffer(message.number, "<u4").tolist()
        indices = np.frombuffer(message.place, "<u4").tolist()
        width = 8 * message.num_layers
        for row, (request, block) in enumerate(zip(numbers, indices, strict=True)):
            digests = message.digests[row * width : (row + 1) * width]
            key = _key(texts, request, (block + 1) * block_size)
            if key is not None and any(digests):  # all zeros: no digest is known
                self.blocks[key].setdefault(digests, Moment(message.step, 0, request, block))
        sampled = np.frombuffer(message.sampled_number, "<u4").tolist()
        token_indices = np.frombuffer(message.sampled_place, "<u4").tolist()
        sums = np.frombuffer(message.logit_sums, "<u8").tolist()
        for request, num_generated, total in zip(sampled, token_indices, sums, strict=True):
            text = texts.get(request)
            if text is not None and (key := text.key(text.num_prompt_tokens + num_generated)) is not None:
                self.logits[key].setdefault(total, Moment(message.step, message.num_layers, request, num_generated))


class PrefixKeys:
    def __init__(self, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        self.num_prompt_tokens = num_prompt_tokens
        digest = hashlib.blake2b(digest_size=16)
        self._keys = []
        for token in np.array(token_ids, "<i8"):
            digest.update(token.tobytes())
            self._keys.append(digest.digest())

    def key(self, num_tokens: int) -> bytes | None:
        """Return the key of the first `num_tokens` tokens; None if that is 0 or more than the request has."""
        return self._keys[num_tokens - 1] if 0 < num_tokens <= len(self._keys) else None


def _key(texts: dict[int, PrefixKeys], number: int, num_tokens: int) -> bytes | None:
    text = texts.get(number)
    return None if text is None else text.key(num_tokens)


class Replayer:
    def __init__(self, run: RecordedRun) -> None:
        self._run = run
        self._received: list[Fingerprints] = []

    def receive(self, message: TelemetryMessage) -> None:
        if isinstance(message, Fingerprints):
            self._received.append(message)

    def replay(self, engine: Engine) -> ReplayComparison:
        """Run all requests, as many at a time as the engine admits, and compare with the recording.

        Raises BadInput if a request is refused or fails, or if nothing can be compared.
        """
        check_same_engine(self._run.hello, engine.hello)
        numbers = {text.number: engine.submit(_submit(text)).numbers[0] for text in self._run.requests}
        output_ids: defaultdict[str, list[int]] = defaultdict(list)
        while engine.has_unfinished:
            for message in engine.step():
                if isinstance(message, Tokens):
                    output_ids[message.request_id] += message.token_ids
                elif isinstance(message, Finished) and message.error:
                    raise BadInput(f"request {message.request_id} could not be run again: {message.error}")
        truncated_ids = {
            text.number: output_ids[_replay_id(text)][: _num_output_tokens(text)] for text in self._run.requests
        }
        return self._compare(numbers, truncated_ids, engine.hello)

    def _compare(self, numbers: dict[int, int], output_ids: dict[int, list[int]], hello: Hello) -> ReplayComparison:
        run, size = self._run, self._run.hello.cache.block_size
        recorded = _digests(run.fingerprints, {text.number: list(text.token_ids) for text in run.requests}, run, size)
        replayed_tokens = {numbers[text.number]: [*_prompt(text), *output_ids[text.number]] for text in run.requests}
        prompts = {numbers[text.number]: _generation_request(text).num_prompt_tokens for text in run.requests}
        replayed = RunDigests()
        texts = {number: PrefixKeys(tokens, prompts[number]) for number, tokens in replayed_tokens.items()}
        for message in self._received:
            replayed.add(message, texts, size)
        blocks, equal_blocks, block_differences = _compare_blocks(recorded, replayed)
        logits, equal_logits, logit_differences = _compare_logits(recorded, replayed)
        different_texts = [
            text for text in run.requests if list(text.token_ids) != replayed_tokens[numbers[text.number]]
        ]
        num_layers = max((message.num_layers for message in run.fingerprints), default=0)
        moments = sorted((*block_differences, *logit_differences))
        first = (
            _difference_text(moments[0], run, num_layers, size)
            if moments
            else _token_difference_text(different_texts, output_ids)
        )
        num_requests = len(run.requests)
        if not (blocks or logits or any(_num_output_tokens(text) for text in run.requests)):
            raise BadInput(f"nothing of {num_requests} requests can be compared: each ended before its first token")
        return ReplayComparison(
            num_requests,
            num_layers,
            blocks,
            equal_blocks,
            logits,
            equal_logits,
            num_requests - len(different_texts),
            first,
            left_out=_exclusions(run, recorded, replayed),
            environment=_environment(run.hello, hello),
        )


def _exclusions(run: RecordedRun, recorded: RunDigests, replayed: RunDigests) -> tuple[str, ...]:
    fingerprints = {
        number for message in run.fingerprints for packed in _described_requests(message) for number in packed
    }
    without_end = len(fingerprints - run.failed - {text.number for text in run.requests})
    counts = (
        (len(run.failed), "request", "that failed in the recording"),
        (without_end, "request", "whose end was not recorded"),
        (len(recorded.blocks.keys() ^ replayed.blocks.keys()), "block", "that only one of the runs computed"),
        (len(recorded.logits.keys() ^ replayed.logits.keys()), "token", "that only one of the runs sampled"),
    )
    known_counts = counts if run.fingerprints else counts[:2]
    return tuple(f"{count} {noun}{'s' * (count > 1)} {reason}" for count, noun, reason in known_counts if count > 0)


def _described_requests(message: Fingerprints) -> tuple[list[int], list[int]]:
    """Return the numbers of the requests whose blocks the message describes, and those whose sampled tokens it
    describes.
    """
    return np.frombuffer(message.number, "<u4").tolist(), np.frombuffer(message.sampled_number, "<u4").tolist()


def _digests(
    fingerprints: Iterable[Fingerprints], tokens: dict[int, list[int]], run: RecordedRun, block_size: int
) -> RunDigests:
    prompts = {text.number: _generation_request(text).num_prompt_tokens for text in run.requests}
    texts = {number: PrefixKeys(ids, prompts[number]) for number, ids in tokens.items()}
    digests = RunDigests()
    for message in fingerprints:
        digests.add(message, texts, block_size)
    return digests


def _compare_blocks(recorded: RunDigests, replayed: RunDigests) -> tuple[int, int, list[Moment]]:
    """Return the number of blocks in both runs, the number of equal blocks, and where each unequal block first
    differs.
    """
    count, differences = 0, list[Moment]()
    for key, computed in recorded.blocks.items():
        replayed_digests = replayed.blocks.get(key)
        if not replayed_digests:
            continue
        count += 1
        different = [
            (moment, _first_layer(digests, other)) for digests, moment in computed.items() for other in replayed_digests
        ]
        layers = [moment._replace(layer=layer) for moment, layer in different if layer is not None]
        differences += layers and [min(layers)]
    return count, count - len(differences), differences


def _compare_logits(recorded: RunDigests, replayed: RunDigests) -> tuple[int, int, list[Moment]]:
    count, differences = 0, list[Moment]()
    for key, computed in recorded.logits.items():
        replayed_sums = replayed.logits.get(key)
        if not replayed_sums:
            continue
        count += 1
        different = [moment for total, moment in computed.items() if replayed_sums.keys() != {total}]
        differences += different and [min(different)]
    return count, count - len(differences), differences


def _first_layer(digests: bytes, other: bytes) -> int | None:
    """Return the lowest layer with different digests, or None. A digest of 0 means unknown."""
    digest_arrays = np.frombuffer(digests, "<u8"), np.frombuffer(other, "<u8")
    differing_layers = np.flatnonzero(
        (digest_arrays[0] != digest_arrays[1]) & (digest_arrays[0] != 0) & (digest_arrays[1] != 0)
    )
    return int(differing_layers[0]) if len(differing_layers) else None


def _difference_text(moment: Moment, run: RecordedRun, num_layers: int, block_size: int) -> str:
    text = next(text for text in run.requests if text.number == moment.number)
    of_request = f"of request {_generation_request(text).request_id!r}"
    if moment.layer == num_layers:
        position = _generation_request(text).num_prompt_tokens + moment.position
        return f"at step {moment.step} behind the last layer: other logits for token {position} {of_request}"
    start = moment.position * block_size
    return (
        f"at step {moment.step} in layer {moment.layer} of {num_layers}: other keys or values in block"
        f" {moment.position}"
        f" {of_request} (tokens {start} to {start + block_size - 1})"
    )


def _token_difference_text(different_texts: list[RecordedText], output_ids: dict[int, list[int]]) -> str:
    if not different_texts:
        return ""
    text = different_texts[0]
    recorded, replayed = list(text.token_ids[_generation_request(text).num_prompt_tokens :]), output_ids[text.number]
    num_equal = next(
        (i for i, pair in enumerate(zip(recorded, replayed, strict=False)) if pair[0] != pair[1]),
        min(len(recorded), len(replayed)),
    )
    request = _generation_request(text)
    return f"in token {request.num_prompt_tokens + num_equal} of request {request.request_id!r}"


def _submit(text: RecordedText) -> Submit:
    """Return the recorded request as a submission limited to its recorded number of tokens.

    The limit is needed because the reason why the request ended may not recur.
    """
    request = _generation_request(text)
    max_tokens = max(1, _num_output_tokens(text))
    sampling = replace(
        request.sampling,
        max_tokens=max_tokens,
        min_tokens=min(request.sampling.min_tokens, max_tokens),
        stop=(),
        logprobs=None,
        prompt_logprobs=None,
    )
    return Submit(
        request_id=_replay_id(text),
        prompt_token_ids=_prompt(text),
        raw=True,
        sampling=sampling,
        priority=request.priority,
        cache_salt=request.cache_salt,
    )


def _replay_id(text: RecordedText) -> str:
    """Return a unique request id. The recorded ids are not unique: clients reuse them, and completions of one
    prompt share one.
    """
    return str(text.number)


def _prompt(text: RecordedText) -> tuple[int, ...]:
    return text.token_ids[: _generation_request(text).num_prompt_tokens]


def _num_output_tokens(text: RecordedText) -> int:
    return len(text.token_ids) - _generation_request(text).num_prompt_tokens


def _generation_request(text: RecordedText) -> RecordedRequestParams:
    assert text.request is not None, "only whole requests are run again"
    return text.request
