"""Requests and batches as packed little-endian columns, the way frames and snapshots carry them."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

from kvscope_engine.policy.plan import StepPlan
from kvscope_engine.policy.request import Request
from kvscope_telemetry.messages.telemetry import Batch, RequestInfo, RequestRows

MAX_U2 = (1 << 16) - 1


def request_info(request: Request) -> RequestInfo:
    """What never changes about a request."""
    return RequestInfo(
        number=request.number,
        request_id=request.request_id,
        arrival_ns=request.arrival_ns,
        num_prompt_tokens=request.num_prompt_tokens,
        max_tokens=request.max_tokens,
        priority=request.priority,
        index=request.index,
    )


def pack_requests(requests: Sequence[Request], tables: Mapping[int, int]) -> RequestRows:
    """A row a request. `tables`: of those whose block table changed, how many of its first blocks did not.

    A swapped-out request's table is that of its rows in lower tiers.
    """
    if not requests:
        return RequestRows()
    held = [request.saved_rows or request.block_table for request in requests]
    starts = [tables.get(request.number, len(table)) for request, table in zip(requests, held, strict=True)]
    tails = [table[start:] for table, start in zip(held, starts, strict=True)]
    return RequestRows(
        number=pack_u4([request.number for request in requests]),
        state=bytes([request.state for request in requests]),
        num_computed_tokens=pack_u4([request.num_computed_tokens for request in requests]),
        num_cached_tokens=pack_u4([request.num_cached_tokens for request in requests]),
        num_output_tokens=pack_u4([len(request.output_token_ids) for request in requests]),
        num_preemptions=_pack_u2([min(request.num_preemptions, MAX_U2) for request in requests]),
        table_start=pack_u4(starts),
        table_count=pack_u4([len(tail) for tail in tails]),
        table_blocks=pack_u4([block for tail in tails for block in tail]),
        num_draft_tokens=_pack_if_any([request.num_draft_tokens for request in requests]),
        num_accepted_tokens=_pack_if_any([request.num_accepted_tokens for request in requests]),
    )


def pack_batch(plan: StepPlan) -> Batch:
    """Who ran. Decode tokens are single ones past the prompt, and drafts that were right; every other is prefill."""
    scheduled = plan.scheduled
    decodes = sum(item.start >= item.request.num_prompt_tokens for item in scheduled[: plan.num_single_token])
    decodes += sum(item.num_tokens for item in scheduled[plan.num_single_token :] if item.drafts)
    return Batch(
        number=pack_u4([item.request.number for item in scheduled]),
        num_tokens=pack_u4([item.num_tokens for item in scheduled]),
        num_prefill_tokens=plan.num_tokens - decodes,
        num_decode_tokens=decodes,
    )


def pack_u4(values: Sequence[int]) -> bytes:
    """Numbers as little-endian u32."""
    return struct.pack(f"<{len(values)}I", *values)


def pack_u8(values: Sequence[int]) -> bytes:
    """Numbers as little-endian u64."""
    return struct.pack(f"<{len(values)}Q", *values)


def _pack_if_any(values: Sequence[int]) -> bytes:
    return pack_u4(values) if any(values) else b""


def _pack_u2(values: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(values)}H", *values)
