"""Computes how many blocks a request needs, and whether it can be served at all."""

from __future__ import annotations

from collections.abc import Sequence

from kvscope_engine.policy.kv_groups import GroupRule
from kvscope_engine.policy.request import Request
from kvscope_telemetry.errors import BadInput, PromptTooLong
from kvscope_telemetry.plural import counted


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


class BlockNeeds:
    """Computes the maximum number of blocks that requests hold, summed over all KV groups.

    `max_chunk` is the maximum number of tokens of one request that run in a step.
    """

    def __init__(self, groups: Sequence[GroupRule], block_size: int, max_chunk: int) -> None:
        self._groups = groups
        self._block_size = block_size
        self._max_chunk = max_chunk

    def max_blocks(self, num_tokens: int) -> int:
        return sum(rule.max_held_blocks(num_tokens, self._max_chunk, self._block_size) for rule in self._groups)

    def max_blocks_of_request(self, request: Request) -> int:
        """Return the maximum number of blocks for a request's prompt and all tokens that it may generate."""
        return self.max_blocks(_max_length(request))

    def max_tokens(self, num_blocks: int, max_tokens: int) -> int:
        """Return the length, up to `max_tokens`, of the longest request that never holds more than `num_blocks`
        blocks.
        """
        low, high = 0, max_tokens
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.max_blocks(middle) <= num_blocks else (low, middle - 1)
        return low

    def check_fits(self, request: Request, num_blocks: int, max_model_len: int) -> None:
        """Raise BadInput if the request could not run even alone in the engine.

        A request that passes can always run alone, so a scheduler that falls back to one request always makes progress.
        """
        if not request.num_prompt_tokens:
            raise BadInput("the prompt is empty: at least 1 token is needed")
        length = _max_length(request)
        length_text = describe_length(request)
        if length > max_model_len:
            raise PromptTooLong(
                f"{length_text} make {length} tokens: at most {max_model_len} are accepted (max_model_len)"
            )
        needed = self.max_blocks(length)
        if needed > num_blocks:
            size, num_groups = self._block_size, len(self._groups)
            groups = f" in {num_groups} KV groups" if num_groups > 1 else ""
            capacity = self.max_tokens(num_blocks, num_blocks * size)
            blocks = f"{counted(needed, 'block')} of {counted(size, 'token')}{groups}"
            raise PromptTooLong(
                f"{length_text} need {blocks}: the whole pool has {num_blocks} ({counted(capacity, 'token')})"
            )


def describe_length(request: Request) -> str:
    """Return the prompt tokens and the new tokens of `request` as text for a refusal, such as "5 prompt tokens and 3
    new ones".
    """
    return f"{counted(request.num_prompt_tokens, 'prompt token')} and {counted(request.max_tokens, 'new one')}"


def _max_length(request: Request) -> int:
    return request.num_tokens + max(0, request.max_tokens - len(request.output_token_ids))
