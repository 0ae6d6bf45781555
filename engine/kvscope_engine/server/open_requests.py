"""Whose request is whose, what has been said about it, and how many a client may have.

Knows neither the engine nor sockets.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field

from kvscope_engine.server.allowance import Allowance
from kvscope_engine.server.limits import ServiceLimits
from kvscope_telemetry.messages.command_size import COMMAND_BYTES, NUMBER_BYTES, sampling_bytes
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
    whose: str
    """For whom the client asked, as in `Submit.client`."""
    request_id: str
    num_prompt_tokens: int
    num_tokens: dict[int, int]
    """Tokens said so far, for each completion that has not ended."""
    num_bytes: int = 0
    count: int = 1
    """What its client's allowance was charged for it."""
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

    def __init__(self, limits: ServiceLimits | None = None) -> None:
        limits = limits or ServiceLimits()
        self._requests: dict[str, OpenRequest] = {}
        self._of_client: dict[bytes, dict[str, None]] = {}
        self._allowance = Allowance("requests are open", limits.client_requests, limits.all_requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def __len__(self) -> int:
        return len(self._requests)

    def refusal(self, client: bytes, submit: Submit, num_prompt_tokens: int) -> str:
        """Why the client may not have this one as well; the empty string when it may."""
        return self._allowance.refusal(
            (client, submit.client), _num_bytes(submit, num_prompt_tokens), submit.sampling.n
        )

    def open(self, client: bytes, submit: Submit, accepted: Accepted) -> None:
        """Remember who asked."""
        completions = dict.fromkeys(range(len(accepted.numbers)), 0)
        num_bytes = _num_bytes(submit, accepted.num_prompt_tokens)
        request = OpenRequest(
            client,
            submit.client,
            submit.request_id,
            accepted.num_prompt_tokens,
            completions,
            num_bytes,
            submit.sampling.n,
        )
        self._allowance.take((client, submit.client), num_bytes, submit.sampling.n)
        self._requests[submit.request_id] = request
        self._of_client.setdefault(client, {})[submit.request_id] = None

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
            self._forget(request)
        return request.client

    def belongs_to(self, request_id: str, client: bytes) -> bool:
        """Whether the request is open and `client` asked for it."""
        request = self._requests.get(request_id)
        return request is not None and request.client == client

    def move(self, before: bytes, client: bytes) -> None:
        """A client has another connection now."""
        ids = self._of_client.pop(before, {})
        for request_id in ids:
            self._requests[request_id].client = client
        for whose in {self._requests[request_id].whose for request_id in ids}:
            self._allowance.move((before, whose), (client, whose))
        if ids:
            self._of_client[client] = ids | self._of_client.get(client, {})

    def of(self, client: bytes) -> list[str]:
        """Ids of the client's requests."""
        return list(self._of_client.get(client, ()))

    def ids(self) -> list[str]:
        """Ids of all."""
        return list(self._requests)

    def end_one(self, request_id: str, reason: FinishReason) -> list[tuple[bytes, Finished]]:
        """Last words on one request, and on nothing when it is not open."""
        request = self._requests.get(request_id)
        if request is None:
            return []
        self._forget(request)
        return [(request.client, last) for last in request.ended(reason, "")]

    def end_all(self, reason: FinishReason, error: str = "") -> list[tuple[bytes, Finished]]:
        """Last words on everything that is open; nothing is afterwards."""
        requests = list(self._requests.values())
        for request in requests:
            self._forget(request)
        return [(r.client, last) for r in requests for last in r.ended(reason, error)]

    def _forget(self, request: OpenRequest) -> None:
        del self._requests[request.request_id]
        self._allowance.give((request.client, request.whose), request.num_bytes, request.count)
        ids = self._of_client[request.client]
        del ids[request.request_id]
        if not ids:
            del self._of_client[request.client]


def _num_bytes(submit: Submit, num_prompt_tokens: int) -> int:
    """What is kept of it while it is open: the tokens of its prompt, and what it carries beside the prompt."""
    beside = sys.getsizeof(submit.request_id) + sampling_bytes(submit.sampling)
    return COMMAND_BYTES + NUMBER_BYTES * num_prompt_tokens + beside
