"""Completions for the Python API: runs prompts on the engine's own step loop and collects complete completions."""

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
    is_closed: bool

    @property
    def has_unfinished(self) -> bool: ...

    def submit(self, submit: Submit) -> Accepted: ...

    def abort(self, request_id: str) -> None: ...

    def step(self) -> list[Tokens | Finished]:
        """Run one step and return its outputs, oldest first."""


@dataclass(slots=True)
class Completion:
    """Completion of a prompt.

    Attributes:
        index: Index of the prompt in the call.
        prompt: The prompt's text, or the last message of a conversation.
        completion: Index among the `n` completions of the prompt.
        finish_reason: Why the completion ended; None while it is running, "error" if it was refused or failed.
        error: Reason of the refusal or failure; empty otherwise.
    """

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
    """For each entry of `logprobs`, the text of its token, followed by the texts of its `top` tokens."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Log-probabilities of the prompt's tokens from the second one on, if `SamplingParams.prompt_logprobs` was set."""

    def add_output(self, message: Tokens | Finished) -> None:
        if isinstance(message, Tokens):
            self.token_ids.extend(message.token_ids)
            self.text += message.text
            self.logprobs.extend(message.logprobs)
            self.logprob_texts.extend(message.logprob_texts)
            self.prompt_logprobs.extend(message.prompt_logprobs)
        else:
            self.finish_reason = message.finish_reason
            self.usage, self.timing, self.error = message.usage, message.timing, message.error


def collect(
    engine: CompletionEngine, prompts: Sequence[str | Submit], sampling: SamplingParams
) -> Iterator[Completion]:
    """Submit all prompts and step the engine until they are done.

    Yields completions in prompt order, each once it and all completions before it have ended. Unfinished completions
    are aborted when the caller stops iterating. Raises BadInput while the engine has other unfinished requests.
    """
    if engine.has_unfinished:
        raise BadInput("generate needs an idle engine: a request is unfinished; call step() until none is")
    pending: list[Completion] = []
    by_key: dict[tuple[str, int], Completion] = {}
    for index, prompt in enumerate(prompts):
        for completion in _submit(engine, index, prompt, sampling):
            pending.append(completion)
            by_key[f"generate-{index}", completion.completion] = completion
    try:
        while pending:
            while pending and pending[0].finish_reason is not None:
                yield pending.pop(0)
            if pending:
                for message in engine.step():
                    by_key[message.request_id, message.index].add_output(message)
    finally:
        for completion in pending:
            engine.abort(f"generate-{completion.index}")
        if pending and not engine.is_closed:
            engine.step()


def _submit(engine: CompletionEngine, index: int, prompt: str | Submit, sampling: SamplingParams) -> list[Completion]:
    submit = prompt if isinstance(prompt, Submit) else Submit(request_id="-", prompt=prompt, sampling=sampling)
    prompt_text = submit.prompt or (submit.messages[-1].content if submit.messages else "")
    try:
        engine.submit(msgspec.structs.replace(submit, request_id=f"generate-{index}"))
    except BadInput as error:
        return [Completion(index, prompt_text, finish_reason="error", error=str(error))]
    return [Completion(index, prompt_text, completion) for completion in range(submit.sampling.n)]
