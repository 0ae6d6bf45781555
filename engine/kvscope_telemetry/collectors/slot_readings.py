"""Parses answers of llama.cpp's server to `/slots`, with checks of all sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvscope_telemetry.collectors.server_facts import mapping, positive_int_or_zero
from kvscope_telemetry.collectors.slot_rows import MAX_CELLS
from kvscope_telemetry.errors import ProtocolError

MAX_SLOTS: Final = 1024
MAX_CONTEXT: Final = 1 << 24
MAX_CELL_TOKENS: Final = 1 << 15
MAX_COUNT: Final = 1 << 31


@dataclass(frozen=True, slots=True)
class SlotReading:
    slot: int
    num_ctx: int
    is_processing: bool
    task: int
    """Id of the slot's current or last task; -1 if it never had one."""
    num_tokens: int
    """Number of prompt and output tokens in the slot's KV cache."""
    num_processed: int
    num_cached: int
    num_decoded: int
    is_speculative: bool = False
    """Whether the server decodes speculatively. A step may then add several tokens, and the slot may contain tokens
    that are not part of the answer.
    """


def read_slots(answer: object) -> list[SlotReading]:
    """Parse an answer to `/slots`. Raises ProtocolError if it is malformed."""
    if not isinstance(answer, list) or not 0 < len(answer) <= MAX_SLOTS:
        raise ProtocolError("/slots is no list of slots")
    slots = [_slot(index, mapping(each)) for index, each in enumerate(answer)]
    if len(slots) * slots[0].num_ctx > MAX_CELLS * MAX_CELL_TOKENS:
        raise ProtocolError(f"{len(slots)} slots of {slots[0].num_ctx} tokens are more than can be drawn")
    return slots


def _slot(index: int, fields: Mapping[str, Any]) -> SlotReading:
    num_ctx, task = positive_int_or_zero(fields.get("n_ctx")), fields.get("id_task")
    if not 0 < num_ctx <= MAX_CONTEXT:
        raise ProtocolError(f"slot {index}: n_ctx={fields.get('n_ctx')!r:.40} is not from 1 to {MAX_CONTEXT}")
    next_tokens = fields.get("next_token")
    token = mapping(next_tokens[0] if isinstance(next_tokens, list) and next_tokens else next_tokens)
    is_task = isinstance(task, int) and not isinstance(task, bool) and 0 <= task < 1 << 62
    if is_task and "n_prompt_tokens" not in fields:
        raise ProtocolError(f"slot {index} does not say how many tokens it holds (n_prompt_tokens): newer servers do")
    return SlotReading(
        slot=index,
        num_ctx=num_ctx,
        is_processing=fields.get("is_processing") is True,
        task=int(task or 0) if is_task else -1,
        num_tokens=min(positive_int_or_zero(fields.get("n_prompt_tokens")), num_ctx),
        num_processed=_count(index, fields, "n_prompt_tokens_processed", MAX_CONTEXT),
        num_cached=_count(index, fields, "n_prompt_tokens_cache", MAX_CONTEXT),
        num_decoded=_count(index, token, "n_decoded", MAX_COUNT),
        is_speculative=fields.get("speculative") is True,
    )


def _count(index: int, fields: Mapping[str, Any], name: str, maximum: int) -> int:
    number = positive_int_or_zero(fields.get(name))
    if number > maximum:
        raise ProtocolError(f"slot {index}: {name}={number} is more than {maximum}")
    return number


def exceed_one_context(slots: list[SlotReading]) -> bool:
    """Return whether the slots hold more than one of them may, so that they cannot share one KV cache of that size."""
    return sum(slot.num_tokens for slot in slots) > slots[0].num_ctx
