"""Engine requests of one HTTP request: submitted together, and aborted if the client hangs up."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TypeAlias

from kvscope_engine.http.engine_client import EngineClient, ReplyInbox
from kvscope_engine.http.schemas.api_errors import ApiError, failure_error, refusal_error
from kvscope_engine.http.schemas.responses import CachedTokens, UsageInfo
from kvscope_telemetry.errors import BadInput, EngineDead
from kvscope_telemetry.messages.commands import Accepted, Finished, Refused, Submit, Tokens

ChoiceReplies: TypeAlias = list[tuple[int, Tokens | Finished]]
"""Replies of the engine, each with the index of its choice."""
TOO_SLOW_MESSAGE = (
    "too much of the answer is unread: the client reads too slowly, or the answer is too large for one response"
)


class Generation:
    """Engine requests of one HTTP request. A context manager that aborts unfinished requests on exit."""

    def __init__(self, client: EngineClient, submits: Sequence[Submit], *, is_stream: bool) -> None:
        self._client = client
        self._request_ids = [submit.request_id for submit in submits]
        self._submits = list(submits)
        """Submissions not sent yet. Emptied by `start`, so that their prompts are freed."""
        self._inbox = ReplyInbox(is_stream=is_stream)
        self._early_replies: ChoiceReplies = []
        self._choices_per_prompt = submits[0].sampling.n
        self._num_left = len(submits) * self._choices_per_prompt
        self._finished: list[Finished] = []
        self._num_prompt_tokens = self._num_new_tokens = 0

    async def start(self) -> None:
        """Submit all prompts and wait until the engine has accepted them. Raises ApiError if it refuses one of them."""
        try:
            submits, self._submits = self._submits, []
            for number, submit in enumerate(submits):
                self._client.submit(submit, self._inbox, number)
        except BadInput as error:
            raise ApiError(400, str(error)) from error
        except EngineDead as error:
            raise ApiError(503, str(error), code="engine_away") from error
        num_waiting = len(self._request_ids)
        del submits
        while num_waiting:
            for number, reply in await self._inbox.pop_all():
                if isinstance(reply, Refused):
                    raise refusal_error(reply.reason)
                if isinstance(reply, Accepted):
                    num_waiting -= 1
                    self._num_prompt_tokens += reply.num_prompt_tokens
                else:
                    self._early_replies += self._record(number, reply)
            self._check()

    async def start_or_close(self) -> None:
        """Call `start`, and abort all requests if it raises. For callers that enter the context manager only later."""
        try:
            await self.start()
        except BaseException:
            self.close()
            raise

    async def next(self) -> ChoiceReplies:
        """Wait for new replies and return them; empty once all completions have ended. Raises ApiError if the engine
        fails.
        """
        early, self._early_replies = self._early_replies, []
        if early or not self._num_left:
            return early
        replies: ChoiceReplies = []
        for number, reply in await self._inbox.pop_all():
            if isinstance(reply, Tokens | Finished):
                replies += self._record(number, reply)
        self._check()
        return replies

    async def collect(self) -> ChoiceReplies:
        replies: ChoiceReplies = []
        while new_replies := await self.next():
            replies += new_replies
        return replies

    @property
    def usage(self) -> UsageInfo:
        """Usage of the finished completions. A prompt counts once, regardless of its number of completions."""
        firsts = [one.usage for one in self._finished if one.index == 0]
        prompt = sum(usage.prompt_tokens for usage in firsts)
        completion = sum(one.usage.completion_tokens for one in self._finished)
        cached = sum(usage.cached_tokens for usage in firsts)
        return UsageInfo(prompt, completion, prompt + completion, CachedTokens(cached))

    @property
    def usage_so_far(self) -> UsageInfo:
        """Current usage, without cached tokens, whose number is known only at the end."""
        prompt, new = self._num_prompt_tokens, self._num_new_tokens
        return UsageInfo(prompt, new, prompt + new)

    def close(self) -> None:
        for request_id in self._request_ids:
            self._client.abandon(request_id)

    def __enter__(self) -> Generation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _record(self, number: int, reply: Tokens | Finished) -> ChoiceReplies:
        if isinstance(reply, Finished):
            if reply.finish_reason == "error":
                raise failure_error(reply.error)
            self._num_left -= 1
            self._finished.append(reply)
        else:
            self._num_new_tokens += len(reply.token_ids)
        return [(number * self._choices_per_prompt + reply.index, reply)]

    def _check(self) -> None:
        if self._inbox.overflowed:
            raise ApiError(400, TOO_SLOW_MESSAGE)
