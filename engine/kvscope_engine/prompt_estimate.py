"""Estimates what a prompt would cost if it were submitted now. Reads the scheduler and changes nothing in it."""

from __future__ import annotations

from kvscope_engine.policy.adapter import Adapter
from kvscope_engine.policy.request import Request
from kvscope_engine.policy.scheduling.scheduler import Scheduler
from kvscope_telemetry.messages.commands import PromptEstimate, Submit


def estimate_prompt(
    scheduler: Scheduler, submit: Submit, token_ids: list[int], adapter: Adapter | None
) -> PromptEstimate:
    """Return the estimate for a prompt of `token_ids` with the cache salt of `submit`.

    The time to the first token is that of computing the uncached tokens, and before them the tokens of all unfinished
    prompts, at the measured prefill speed. It is None if all places among the running requests are taken, because
    nothing is known about when one becomes free.
    """
    request = Request(
        number=0,
        request_id=submit.request_id,
        prompt_token_ids=tuple(token_ids),
        sampling=submit.sampling.resolved(None),
        max_tokens=1,
        arrival_ns=0,
        cache_salt=submit.cache_salt,
        adapter=adapter,
    )
    num_cached = scheduler.num_reusable_tokens(request)
    num_ahead = sum(other.num_tokens - other.num_computed_tokens for other in scheduler.requests.values())
    num_requests = scheduler.num_running + scheduler.num_waiting
    must_wait = num_requests >= scheduler.limits.max_num_seqs
    return PromptEstimate(
        num_prompt_tokens=len(token_ids),
        num_cached_tokens=num_cached,
        max_request_tokens=scheduler.max_request_tokens,
        ttft_s=None if must_wait else scheduler.prefill_rate.seconds(len(token_ids) - num_cached + num_ahead),
        num_waiting=scheduler.num_waiting,
    )
