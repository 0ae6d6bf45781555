"""Completions for the Python API: prompts in, whole answers out, on the engine's own step loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.commands import (
    Accepted,
    Finished,
    RequestTiming,
    Submit,
    TokenLogprobs,
    Tokens,
    Usage,
)
from kvscope_telemetry.messages.sampling_params import SamplingParams


class CompletionEngine(Protocol):
    """The part of an engine that `collect` needs."""

    is_closed: bool

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is unfinished."""

    def submit(self, submit: Submit) -> Accepted:
        """Take a request into the queue, or raise BadInput."""

    def abort(self, request_id: str) -> None:
        """End a request wherever it is."""

    def step(self) -> list[Tokens | Finished]:
        """One step; what there is to be told, oldest first."""


@dataclass(slots=True)
class Completion:
    """One answer. `index` is that of its prompt, `completion` which of the `n` it is."""

    index: int
    prompt: str
    completion: int = 0
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    usage: Usage = field(default_factory=Usage)
    timing: RequestTiming = field(default_factory=RequestTiming)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    error: str = ""
    logprob_texts: list[tuple[str, ...]] = field(default_factory=list)
    """For each of `logprobs` the text of its token, then of each of its `top`."""

    def add_output(self, message: Tokens | Finished) -> None:
        """Add what the engine said of it."""
        if isinstance(message, Tokens):
            self.token_ids.extend(message.token_ids)
            self.text += message.text
            self.logprobs.extend(message.logprobs)
            self.logprob_texts.extend(message.logprob_texts)
        else:
            self.finish_reason = message.finish_reason
            self.usage, self.timing, self.error = message.usage, message.timing, message.error


def collect(
    engine: CompletionEngine, prompts: Sequence[str | Submit], sampling: SamplingParams
) -> Iterator[Completion]:
    """Submit all prompts, step until each is done, yield completions in order as soon as that allows."""
    if engine.has_unfinished:
        raise BadInput("generate needs an idle engine: a request is unfinished; call step() until none is")
    waiting: list[Completion] = []
    by_key: dict[tuple[str, int], Completion] = {}
    for index, prompt in enumerate(prompts):
        for completion in _submit(engine, index, prompt, sampling):
            waiting.append(completion)
            by_key[f"generate-{index}", completion.completion] = completion
    try:
        while waiting:
            while waiting and waiting[0].finish_reason is not None:
                yield waiting.pop(0)
            if waiting:
                for message in engine.step():
                    by_key[message.request_id, message.index].add_output(message)
    finally:
        for completion in waiting:
            engine.abort(f"generate-{completion.index}")
        if waiting and not engine.is_closed:
            engine.step()


def _submit(engine: CompletionEngine, index: int, prompt: str | Submit, sampling: SamplingParams) -> list[Completion]:
    submit = prompt if isinstance(prompt, Submit) else Submit(request_id="-", prompt=prompt, sampling=sampling)
    text = submit.prompt or (submit.messages[-1].content if submit.messages else "")
    try:
        engine.submit(msgspec.structs.replace(submit, request_id=f"generate-{index}"))
    except BadInput as error:
        return [Completion(index, text, finish_reason="error", error=str(error))]
    return [Completion(index, text, completion) for completion in range(submit.sampling.n)]
