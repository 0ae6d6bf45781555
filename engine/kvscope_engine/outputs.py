"""Converts sampled tokens to client messages: pieces of text, finish reason, usage and times. Independent of tensors
and blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msgspec.structs import replace

from kvscope_engine.policy.request import Request
from kvscope_telemetry.messages.commands import Finished, FinishReason, RequestTiming, TokenLogprobs, Tokens, Usage
from kvscope_telemetry.running_time import RunningTime

if TYPE_CHECKING:
    from kvscope_engine.answer_calls import AnswerCalls
    from kvscope_engine.tokenization.tokenizer import Detokenizer

NS_PER_S = 1e9


@dataclass(slots=True)
class OutputStream:
    """Output of one request, from admission to end. `detokenizer` is None for a model without a tokenizer."""

    request: Request
    client_id: str
    """Request id chosen by the client, shared by all completions of `n > 1`."""
    detokenizer: Detokenizer | None
    eos_token_ids: frozenset[int]
    token_text: Callable[[int], str] | None = None
    running_time: RunningTime = field(default_factory=RunningTime)
    """Converts time spans to running time, which excludes pauses and suspensions."""
    read_calls: Callable[[Sequence[int], Sequence[int], str], AnswerCalls] | None = None
    """Reads calls in the answer from the tokens of the prompt, those of the answer and its text; None without tools."""
    pending: list[Tokens | Finished] = field(default_factory=list)
    _num_scored: int = 0
    """Number of prompt tokens with log-probabilities so far, without the first token, which has none."""
    _texts_for_calls: list[str] = field(default_factory=list)
    """The answer's text in pieces, if calls are read in it."""

    def add_token(self, token_id: int, logprobs: TokenLogprobs | None, now_ns: int) -> FinishReason | None:
        """Append a sampled token. Returns the finish reason if the token ends the completion, else None."""
        request = self.request
        request.output_token_ids.append(token_id)
        if request.first_token_ns is None:
            request.first_token_ns = now_ns
        request.last_token_ns = now_ns
        reason, text = self.process_token(token_id)
        if self.read_calls is not None:
            self._texts_for_calls.append(text)
        self.pending.append(
            Tokens(
                request_id=self.client_id,
                index=request.index,
                token_ids=(token_id,),
                text=text,
                logprobs=() if logprobs is None else (logprobs,),
                logprob_texts=() if logprobs is None else self._texts(logprobs),
            )
        )
        return reason

    def add_prompt_logprobs(self, start: int, scores: Sequence[TokenLogprobs]) -> None:
        """Append log-probabilities of prompt tokens, which follow the tokens from position `start`.

        Tokens that were scored before are left out: a preempted prompt is computed again.
        """
        new = tuple(scores[max(0, self._num_scored - start) :])
        self._num_scored = max(self._num_scored, start + len(scores))
        if new:
            self.pending.append(
                Tokens(
                    request_id=self.client_id,
                    index=self.request.index,
                    token_ids=(),
                    text="",
                    prompt_logprobs=new,
                    prompt_logprob_texts=tuple(text for entry in new for text in self._texts(entry)),
                )
            )

    def finish(self, reason: FinishReason, now_ns: int, error: str = "") -> None:
        """Append the `Finished` message. Text that was held back for a possible stop string is sent before it."""
        held_back = self._flush()
        if held_back:
            self.pending.append(
                Tokens(request_id=self.client_id, index=self.request.index, token_ids=(), text=held_back)
            )
        self.pending.append(
            Finished(
                request_id=self.client_id,
                index=self.request.index,
                finish_reason=reason,
                usage=usage(self.request),
                timing=timing(self.request, now_ns, self.running_time),
                error=error,
            )
        )
        if self.read_calls is not None:
            self._add_calls(self.read_calls, held_back)

    def _add_calls(
        self, read_calls: Callable[[Sequence[int], Sequence[int], str], AnswerCalls], held_back: str
    ) -> None:
        """Add the calls to the `Finished` message. A request must end in any case, also if they cannot be read."""
        text = "".join(self._texts_for_calls) + held_back
        try:
            found = read_calls(self.request.prompt_token_ids, self.request.output_token_ids, text)
        except Exception:
            return
        last = self.pending[-1]
        if found.calls and isinstance(last, Finished):
            self.pending[-1] = replace(last, tool_calls=found.calls, content=found.content)

    def drain(self) -> list[Tokens | Finished]:
        pending, self.pending = self.pending, []
        return pending

    def _flush(self) -> str:
        """Return the text held back by the detokenizer; empty if decoding fails, because a request must end in any
        case.
        """
        detokenizer, self.detokenizer = self.detokenizer, None
        try:
            return detokenizer.flush() if detokenizer is not None else ""
        except Exception:
            return ""

    def process_token(self, token_id: int) -> tuple[FinishReason | None, str]:
        """Advance the grammar and the detokenizer by one token. Returns the finish reason (None to continue) and the
        new text.
        """
        request, sampling = self.request, self.request.sampling
        num_output = len(request.output_token_ids)
        may_stop = num_output > sampling.min_tokens
        if request.matcher is not None:
            request.matcher.accept(token_id)
            if request.matcher.has_ended and token_id in self.eos_token_ids:
                return "stop", ""
        if may_stop and self._is_end(token_id):
            return "stop", ""
        text, stopped = "", False
        if self.detokenizer is not None:
            text = self.detokenizer.add_token(token_id, may_stop=may_stop)
            stopped = self.detokenizer.stopped
        if stopped or (request.matcher is not None and request.matcher.has_ended):
            return "stop", text
        return ("length" if num_output >= request.max_tokens else None), text

    def _texts(self, logprobs: TokenLogprobs) -> tuple[tuple[str, ...], ...]:
        if self.token_text is None:
            return ()
        return (tuple(map(self.token_text, (logprobs.token_id, *(token for token, _ in logprobs.top)))),)

    def _is_end(self, token_id: int) -> bool:
        sampling = self.request.sampling
        return token_id in sampling.stop_token_ids or (not sampling.ignore_eos and token_id in self.eos_token_ids)


def usage(request: Request) -> Usage:
    return Usage(
        prompt_tokens=request.num_prompt_tokens,
        cached_tokens=request.num_cached_tokens,
        completion_tokens=len(request.output_token_ids),
    )


def timing(request: Request, now_ns: int, running_time: RunningTime) -> RequestTiming:
    """Return the request's times in seconds since its arrival.

    `queue_s` and `ttft_s` exclude pauses and suspensions. `total_s` includes them; `stopped_s` is their sum.
    """

    def since_arrival(end_ns: int | None) -> float | None:
        return None if end_ns is None else running_time.running_ns(request.arrival_ns, end_ns) / NS_PER_S

    return RequestTiming(
        queue_s=since_arrival(request.admitted_ns),
        ttft_s=since_arrival(request.first_token_ns),
        total_s=max(0, now_ns - request.arrival_ns) / NS_PER_S,
        stopped_s=running_time.stopped_ns(request.arrival_ns, now_ns) / NS_PER_S,
    )
