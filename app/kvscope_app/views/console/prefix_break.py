"""Where the prompt of a turn stopped matching the prefix cache, and why. Imports no Qt.

The prompt of a turn contains all turns before it, so that the cache should have it up to the end of the previous turn.
Only reasons that follow from the engine's report, from block hashes or from what was sent are given.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from kvscope_app.ui.number_text import count
from kvscope_app.views.console.block_chains import Hashes
from kvscope_app.views.console.conversation import Message
from kvscope_app.views.console.text_body import split_reasoning
from kvscope_telemetry.messages.event_kinds import miss_text
from kvscope_telemetry.messages.telemetry import EventData

_MAX_QUOTE: Final = 24


@dataclass(frozen=True, slots=True)
class PrefixBreak:
    text: str
    """Sentence with position and reason, such as `Prefix found up to token 64: the system prompt was changed`."""
    offset: int | None = None
    """Index of the character of the prompt at which the prefix ended, if it is known and inside the prompt's text."""


@dataclass(frozen=True, slots=True, eq=False)
class TurnRequest:
    """The request that computed an answer, and how much of its prompt was in the cache. Unknown values are None."""

    answer: Message
    num_cached_tokens: int = 0
    """Prompt tokens found in the cache at its admission."""
    hashes: Hashes | None = None
    miss: EventData | None = None
    """Data of the event of its admission, None if it is unknown."""


def edit_offset(prompt: Message, earlier_version: Message | None) -> int | None:
    """Return the index of the first character in which the text sent for a prompt, with its attached files, differs
    from that of an earlier version; None if there is none, or an equal one.
    """
    if earlier_version is None or earlier_version.sent_text == prompt.sent_text:
        return None
    pairs = enumerate(zip(prompt.sent_text, earlier_version.sent_text, strict=False))
    shorter = min(len(prompt.sent_text), len(earlier_version.sent_text))
    return next((index for index, (own, other) in pairs if own != other), shorter)


def find_break(
    turn: TurnRequest,
    previous: TurnRequest | None,
    block_size: int,
    prompt: Message,
    earlier_version: Message | None = None,
) -> PrefixBreak | None:
    """Return where and why the prefix of a turn's prompt ended, or None if all of the previous turn was found.

    Args:
        turn: The turn's request, which must have been admitted.
        previous: The request of the previous answer that is part of the prompt; None for the first turn.
        block_size: Tokens per block.
        prompt: The turn's prompt.
        earlier_version: An earlier version of `prompt` that was sent to the same engine, if there is one.
    """
    stats, offset = turn.answer.stats, edit_offset(prompt, earlier_version)
    edited = None if offset is None else _edit_break(turn, prompt, offset)
    if previous is None:
        if edited is not None and turn.num_cached_tokens:
            return edited
        found = (
            f"{count(turn.num_cached_tokens)} tokens were cached" if turn.num_cached_tokens else "nothing was cached"
        )
        return PrefixBreak(f"First turn: {found}")
    if turn.num_cached_tokens >= _num_reusable_tokens(turn, previous, block_size):
        return edited
    is_restarted = previous.answer.stats.epoch != stats.epoch  # blocks on disk may be found all the same
    reason = "the engine was restarted" if is_restarted else _reason(turn, previous, block_size)
    return PrefixBreak(f"{_found_text(turn)}: {reason}") if reason else None


def _num_reusable_tokens(turn: TurnRequest, previous: TurnRequest, block_size: int) -> int:
    """Return the number of tokens of the previous turn that the turn could have found: full blocks, but not the last
    token of its prompt, which is computed in any case.
    """
    num_stored = previous.answer.stats.context_tokens - 1  # the last token that a request generates is never computed
    if previous.hashes is not None:
        num_stored = min(num_stored, int(np.count_nonzero(previous.hashes)) * block_size)
    num_prompt = turn.answer.stats.num_prompt_tokens or num_stored + 1
    return max(min(num_stored, num_prompt - 1) // block_size * block_size, 0)


def _position(turn: TurnRequest) -> int:
    if turn.miss is not None and turn.miss.missed == "differs":
        return turn.miss.missed_token
    return turn.num_cached_tokens


def _found_text(turn: TurnRequest) -> str:
    position = _position(turn)
    return f"Prefix found up to token {count(position)}" if position else "Prefix not found"


def _reason(turn: TurnRequest, previous: TurnRequest, block_size: int) -> str:
    stats, previous_stats = turn.answer.stats, previous.answer.stats
    if stats.adapter != previous_stats.adapter:
        return "another LoRA adapter was chosen"
    if reported := _reported_reason(turn):
        return reported
    next_block = turn.num_cached_tokens // block_size
    hashes = [_hash_at(chain, next_block) for chain in (turn.hashes, previous.hashes)]
    if all(hashes) and hashes[0] == hashes[1]:
        return "the next block was no longer cached" if next_block else "its blocks were no longer cached"
    if not all(hashes) and (turn.miss is None or turn.miss.missed != "differs"):
        return "" if turn.miss is None else miss_text(turn.miss)
    if stats.system and previous_stats.system and stats.system != previous_stats.system:
        return "the system prompt was changed"
    if _position(turn) < previous_stats.num_prompt_tokens:
        return "the tokens differ from those of the previous turn"
    as_text = "" if previous.answer.token_ids else ", since it was sent as text"
    reasoning = " or sent without its reasoning" if split_reasoning(previous.answer.content)[0] else ""
    return f"the previous answer was tokenised differently{as_text}{reasoning}"


def _reported_reason(turn: TurnRequest) -> str:
    """Return the reason that the engine reported if it is not a difference of tokens, otherwise ""."""
    is_other = turn.miss is not None and turn.miss.missed in ("evicted", "salt", "state", "adapter")
    return miss_text(turn.miss) if turn.miss is not None and is_other else ""


def _hash_at(chain: Hashes | None, index: int) -> int:
    return 0 if chain is None or index >= chain.size else int(chain[index])


def _edit_break(turn: TurnRequest, prompt: Message, offset: int) -> PrefixBreak:
    if reported := _reported_reason(turn):
        return PrefixBreak(f"{_found_text(turn)}: {reported}")
    offset -= len(prompt.sent_text) - len(prompt.content)  # attached files are sent before the text
    if offset < 0:
        return PrefixBreak("The prefix ends in the attached files: edited prompt")
    line = " ".join(prompt.content[:offset].split())
    end = line if len(line) <= _MAX_QUOTE else "…" + line[1 - _MAX_QUOTE :].partition(" ")[2]
    where = f"after “{end}”" if end else "where this prompt begins"
    return PrefixBreak(f"The prefix ends {where}: edited prompt", offset)
