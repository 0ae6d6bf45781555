"""A request as allocation policies see it: how many tokens it has, and none of them."""

from __future__ import annotations

from typing import Final

from kvscope_engine.policy.request import Request
from kvscope_telemetry.messages.sampling_params import ResolvedSampling
from kvscope_telemetry.messages.what_if import Running

_SAMPLING: Final = ResolvedSampling()


class NumTokens(list[int]):
    """A list of which only the length is there, so that a long request costs no more than a short one."""

    __slots__ = ("count_",)

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count_ = count

    def __len__(self) -> int:
        return self.count_


def twin(running: Running) -> Request:
    """A request of which nothing is computed yet."""
    prompt = running.num_prompt_tokens
    request = Request(
        number=running.number,
        request_id=str(running.number),
        prompt_token_ids=NumTokens(prompt),
        sampling=_SAMPLING,
        max_tokens=max(0, running.max_tokens - prompt),
        arrival_ns=0,
    )
    tell_output(request, running)
    return request


def tell_output(request: Request, running: Running) -> None:
    """The output so far: once the prompt is computed there is one token more than are computed."""
    num_output = running.num_tokens + 1 - running.num_prompt_tokens
    request.output_token_ids = NumTokens(max(0, num_output))
