"""The prompts of one HTTP request at the engine: submitted, taken in, told of, and aborted when nobody wants them."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TypeAlias

from kvscope_engine.http.engine_client import EngineClient
from kvscope_engine.http.inbox import Inbox
from kvscope_engine.http.shapes.answers import CachedTokens, UsageInfo
from kvscope_engine.http.shapes.errors import ApiError, failed, refused
from kvscope_telemetry.errors import BadInput, EngineDead
from kvscope_telemetry.messages.commands import Accepted, Finished, Refused, Submit, Tokens

News: TypeAlias = list[tuple[int, Tokens | Finished]]
"""(number of the choice, what was said of it)"""
TOO_SLOW = "too much of the answer is unread: the client reads too slowly, or the answer is too large for one response"


class Generation:
    """A context manager: what has not ended at its end is aborted."""

    def __init__(self, line: EngineClient, submits: Sequence[Submit], *, is_stream: bool) -> None:
        self._line = line
        self._request_ids = [submit.request_id for submit in submits]
        self._submits = list(submits)
        """Those to be sent; their prompts are not kept longer."""
        self._inbox = Inbox(is_stream=is_stream)
        self._early: News = []
        self._num_each = submits[0].sampling.n
        self._num_left = len(submits) * self._num_each
        self._finished: list[Finished] = []
        self._num_prompt_tokens = self._num_new_tokens = 0

    async def begin(self) -> None:
        """Submit all; returns once the engine has taken all in. Raises ApiError for the first that it refuses."""
        try:
            submits, self._submits = self._submits, []
            for number, submit in enumerate(submits):
                self._line.submit(submit, self._inbox, number)
        except BadInput as error:
            raise ApiError(400, str(error)) from error
        except EngineDead as error:
            raise ApiError(503, str(error), code="engine_away") from error
        num_waiting = len(self._request_ids)
        del submits
        while num_waiting:
            for number, said in await self._inbox.take():
                if isinstance(said, Refused):
                    raise refused(said.reason)
                if isinstance(said, Accepted):
                    num_waiting -= 1
                    self._num_prompt_tokens += said.num_prompt_tokens
                else:
                    self._early += self._news(number, said)
            self._check()

    async def begin_or_close(self) -> None:
        """The same for who goes on with it later: nothing is left behind when it raises."""
        try:
            await self.begin()
        except BaseException:
            self.close()
            raise

    async def next(self) -> News:
        """What was said since; empty once everything has ended. Raises ApiError when the engine failed."""
        early, self._early = self._early, []
        if early or not self._num_left:
            return early
        news: News = []
        for number, said in await self._inbox.take():
            if isinstance(said, Tokens | Finished):
                news += self._news(number, said)
        self._check()
        return news

    async def rest(self) -> News:
        """All that is said to the end."""
        news: News = []
        while more := await self.next():
            news += more
        return news

    @property
    def usage(self) -> UsageInfo:
        """Of what has ended; a prompt counts once, however many answers it got."""
        firsts = [one.usage for one in self._finished if one.index == 0]
        prompt = sum(usage.prompt_tokens for usage in firsts)
        completion = sum(one.usage.completion_tokens for one in self._finished)
        cached = sum(usage.cached_tokens for usage in firsts)
        return UsageInfo(prompt, completion, prompt + completion, CachedTokens(cached))

    @property
    def usage_so_far(self) -> UsageInfo:
        """Of what was said up to now; what was found in the cache is known at the end."""
        prompt, new = self._num_prompt_tokens, self._num_new_tokens
        return UsageInfo(prompt, new, prompt + new)

    def close(self) -> None:
        """Abort what has not ended."""
        for request_id in self._request_ids:
            self._line.abandon(request_id)

    def __enter__(self) -> Generation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _news(self, number: int, said: Tokens | Finished) -> News:
        if isinstance(said, Finished):
            if said.finish_reason == "error":
                raise failed(said.error)
            self._num_left -= 1
            self._finished.append(said)
        else:
            self._num_new_tokens += len(said.token_ids)
        return [(number * self._num_each + said.index, said)]

    def _check(self) -> None:
        if self._inbox.overflowed:
            raise ApiError(400, TOO_SLOW)
