"""Whose request is whose, and what has been said about it. Knows neither the engine nor sockets."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from kvscope_telemetry.messages.commands import (
    Accepted,
    Finished,
    FinishReason,
    RequestTiming,
    Submit,
    Tokens,
    Usage,
)


@dataclass(slots=True)
class OpenRequest:
    """A request that was accepted and has completions that have not ended."""

    client: bytes
    request_id: str
    num_prompt_tokens: int
    num_tokens: dict[int, int]
    """Tokens said so far, for each completion that has not ended."""
    arrival_ns: int = field(default_factory=time.monotonic_ns)

    def ended(self, reason: FinishReason, error: str) -> list[Finished]:
        """The last words on each completion, where the engine cannot say them any more."""
        total_s = (time.monotonic_ns() - self.arrival_ns) / 1e9
        return [
            Finished(
                request_id=self.request_id,
                index=index,
                finish_reason=reason,
                usage=Usage(prompt_tokens=self.num_prompt_tokens, completion_tokens=count),
                timing=RequestTiming(total_s=total_s),
                error=error,
            )
            for index, count in self.num_tokens.items()
        ]


class OpenRequests:
    """All of them, by request id. An id is free again once its last completion has ended."""

    def __init__(self) -> None:
        self._requests: dict[str, OpenRequest] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def __len__(self) -> int:
        return len(self._requests)

    def open(self, client: bytes, submit: Submit, accepted: Accepted) -> None:
        """Remember who asked."""
        completions = dict.fromkeys(range(len(accepted.numbers)), 0)
        request = OpenRequest(client, submit.request_id, accepted.num_prompt_tokens, completions)
        self._requests[submit.request_id] = request

    def owner(self, output: Tokens | Finished) -> bytes | None:
        """The client an output goes to, None for nobody. A completion ends here with its `Finished`."""
        request = self._requests.get(output.request_id)
        if request is None or output.index not in request.num_tokens:
            return None
        if isinstance(output, Tokens):
            request.num_tokens[output.index] += len(output.token_ids)
            return request.client
        del request.num_tokens[output.index]
        if not request.num_tokens:
            del self._requests[output.request_id]
        return request.client

    def belongs_to(self, request_id: str, client: bytes) -> bool:
        """Whether the request is open and `client` asked for it."""
        request = self._requests.get(request_id)
        return request is not None and request.client == client

    def move(self, before: bytes, client: bytes) -> None:
        """A client has another connection now."""
        for request in self._requests.values():
            if request.client == before:
                request.client = client

    def of(self, client: bytes) -> list[str]:
        """Ids of the client's requests."""
        return [request.request_id for request in self._requests.values() if request.client == client]

    def ids(self) -> list[str]:
        """Ids of all."""
        return list(self._requests)

    def end_one(self, request_id: str, reason: FinishReason) -> list[tuple[bytes, Finished]]:
        """Last words on one request, and on nothing when it is not open."""
        request = self._requests.pop(request_id, None)
        return [] if request is None else [(request.client, last) for last in request.ended(reason, "")]

    def end_all(self, reason: FinishReason, error: str = "") -> list[tuple[bytes, Finished]]:
        """Last words on everything that is open; nothing is afterwards."""
        requests, self._requests = self._requests, {}
        return [(r.client, last) for r in requests.values() for last in r.ended(reason, error)]
