"""Computes how many blocks tokens need, and whether a request can be served at all."""

from __future__ import annotations

from kvscope_engine.policy.request import Request
from kvscope_telemetry.errors import BadInput


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)


def num_blocks_in_the_end(request: Request, block_size: int) -> int:
    """Blocks that hold its prompt and all it may generate."""
    return num_blocks_for(_length(request), block_size)


def check_fits(request: Request, *, num_blocks: int, block_size: int, max_model_len: int) -> None:
    """Raise BadInput with the numbers when the request could not run even with the engine to itself.

    One that passes can always run alone, so a scheduler that falls back to one request never gets stuck.
    """
    if not request.num_prompt_tokens:
        raise BadInput("the prompt is empty: at least 1 token is needed")
    length = _length(request)
    parts = f"{request.num_prompt_tokens} prompt tokens and {request.max_tokens} new ones"
    if length > max_model_len:
        raise BadInput(f"{parts} make {length} tokens: at most {max_model_len} are accepted (max_model_len)")
    needed = num_blocks_for(length, block_size)
    if needed > num_blocks:
        raise BadInput(
            f"{parts} need {needed} blocks of {block_size} tokens: the whole pool has {num_blocks}"
            f" ({num_blocks * block_size} tokens)"
        )


def _length(request: Request) -> int:
    return request.num_tokens + max(0, request.max_tokens - len(request.output_token_ids))
