"""Outputs of a request: its end, stop strings, log probabilities and usage."""

from __future__ import annotations

from kvscope_engine.outputs import OutputStream
from kvscope_engine.policy.request import Request
from kvscope_engine.tokenization.tokenizer import Detokenizer
from kvscope_telemetry.messages.commands import Finished, TokenLogprobs, Tokens
from kvscope_telemetry.messages.sampling_params import SamplingParams

LETTERS = "abcdefghijklmnopqrstuvwxyz"
EOS = 99


def _decode(ids: list[int]) -> str:
    return "".join(LETTERS[i] for i in ids if i != EOS)


def _stream(sampling: SamplingParams, max_tokens: int = 10) -> OutputStream:
    request = Request(1, "r", [0, 1], sampling, max_tokens, arrival_ns=1_000)
    detokenizer = Detokenizer(lambda ids: _decode(list(ids)), sampling.stop)
    return OutputStream(request, "client", detokenizer, frozenset({EOS}))


def _feed(stream: OutputStream, ids: list[int]) -> tuple[str | None, str]:
    reason = None
    for time_ns, token in enumerate(ids, start=2_000):
        reason = stream.add_token(token, None, time_ns)
        if reason is not None:
            break
    stream.finish(reason or "abort", 9_000)
    text = "".join(message.text for message in stream.drain() if isinstance(message, Tokens))
    return reason, text


def test_request_ends_after_max_tokens() -> None:
    assert _feed(_stream(SamplingParams(), max_tokens=3), [0, 1, 2, 3]) == ("length", "abc")


def test_end_of_sequence_stops_without_text() -> None:
    assert _feed(_stream(SamplingParams()), [0, EOS, 2]) == ("stop", "a")


def test_ignored_end_of_sequence_continues() -> None:
    assert _feed(_stream(SamplingParams(ignore_eos=True), max_tokens=3), [0, EOS, 2]) == ("length", "ac")


def test_end_of_sequence_before_min_tokens_continues() -> None:
    assert _feed(_stream(SamplingParams(min_tokens=2)), [EOS, 1, EOS]) == ("stop", "b")


def test_stop_token_stops_without_text_even_if_end_of_sequence_is_ignored() -> None:
    sampling = SamplingParams(stop_token_ids=(7, 2), ignore_eos=True, min_tokens=1)
    assert _feed(_stream(sampling), [2, 0, EOS, 2, 3]) == ("stop", "ca")


def test_log_probabilities_come_with_the_texts_of_their_tokens() -> None:
    stream = _stream(SamplingParams(logprobs=2))
    stream.token_text = lambda token: LETTERS[token]
    stream.add_token(1, TokenLogprobs(token_id=1, logprob=-1.0, top=((3, -0.5), (1, -1.0))), 2_000)
    (said,) = stream.drain()
    assert isinstance(said, Tokens)
    assert said.logprob_texts == (("b", "d", "b"),)


def test_stop_string_across_tokens_is_not_sent() -> None:
    assert _feed(_stream(SamplingParams(stop=("cde",))), [0, 1, 2, 3, 4, 5]) == ("stop", "ab")


def test_held_back_text_is_sent_at_the_end() -> None:
    assert _feed(_stream(SamplingParams(stop=("cdz",)), max_tokens=4), [0, 1, 2, 3]) == ("length", "abcd")


def test_stop_string_before_min_tokens_does_not_stop() -> None:
    sampling = SamplingParams(stop=("b",), min_tokens=3)
    assert _feed(_stream(sampling, max_tokens=4), [0, 1, 2, 1]) == ("stop", "abc")


def test_last_message_has_usage_and_times() -> None:
    stream = _stream(SamplingParams(), max_tokens=2)
    stream.request.admitted_ns = 1_500
    _feed_result = [stream.add_token(token, None, 2_000 + token * 500) for token in (0, 1)]
    assert _feed_result == [None, "length"]
    stream.finish("length", 3_000)
    last = stream.drain()[-1]
    assert isinstance(last, Finished)
    assert (last.request_id, last.finish_reason) == ("client", "length")
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (2, 2)
    assert (last.timing.queue_s, last.timing.ttft_s, last.timing.total_s) == (5e-7, 1e-6, 2e-6)
    assert stream.drain() == []
