"""Inspector page of a block: its state, the requests that hold it, its neighbours and its text. Reads a mirror; imports
no Qt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from kvscope_app.session.chat_turns import ChatTurn
from kvscope_app.ui.number_text import count, num_bytes, plural
from kvscope_app.views.inspector.facts import Fact, FactsPage, block_link, page, request_link, turn_link
from kvscope_app.views.page_map.block_facts import BlockFacts, block_facts
from kvscope_telemetry.messages.commands import BlockContent
from kvscope_telemetry.messages.telemetry import CacheInfo
from kvscope_telemetry.mirror.mirror import Mirror

_MAX_TEXT_CHARS: Final = 2_000
_MAX_NOTES: Final = 16
_MAX_NOTE_CHARS: Final = 200
_OWNER_ROWS: Final = ("Owner", "Holds")


def block_page(
    mirror: Mirror,
    block: int,
    content: BlockContent | None = None,
    placeholder: str = "",
    find_turn: Callable[[int, int], ChatTurn | None] = lambda epoch, number: None,
) -> FactsPage:
    """Return the page of `block`, 0 <= block < mirror.num_rows.

    Args:
        content: The block's tokens and text, None if unknown.
        placeholder: Text shown if `content` is None, "" for none.
        find_turn: Function that returns the chat turn of a request by its epoch and number, None for other requests.
    """
    assert mirror.hello is not None, "there are blocks only once there is an engine"
    size = mirror.hello.cache.block_size
    facts = block_facts(mirror, block, size)
    return page(
        facts.title,
        ("Recurrent state" if facts.is_state else "Block", _state(mirror, facts, find_turn)),
        ("In block tables", _tables(mirror, facts, mirror.hello.cache)),
        ("Neighbours in memory", _neighbours(mirror, block, size)),
        ("Text", _text(content, placeholder)),
    )


def _state(mirror: Mirror, facts: BlockFacts, find_turn: Callable[[int, int], ChatTurn | None]) -> Iterator[Fact]:
    assert mirror.hello is not None, "there are blocks only once there is an engine"
    cache, ledger, block, capabilities = mirror.hello.cache, mirror.ledger, facts.block, mirror.capabilities
    yield Fact("State", facts.state, tip=facts.empty_text)
    yield from _turns(mirror, facts, find_turn)
    for name, value in facts.rows:
        if name == "Hash":
            yield Fact(name, f"{int(ledger.hash[block]):016x}", tip="Low 64 bits of the chained hash of its prefix")
        else:
            is_owner = name in _OWNER_ROWS and facts.owner is not None
            yield Fact(name, value, request_link(facts.owner) if is_owner and facts.owner is not None else None)
    if facts.empty_text:
        yield Fact("Holds", facts.empty_text)
    elif capabilities.filled and int(ledger.filled[block]) < cache.block_size and not facts.is_state:
        yield Fact(
            "Empty slots", f"{cache.block_size - int(ledger.filled[block])} of {plural(cache.block_size, 'slot')}"
        )
    if capabilities.ref_counts:
        yield Fact("References", count(int(ledger.ref_count[block])), tip="Number of block tables that hold it")
    if facts.is_state and cache.state_bytes:
        yield Fact("Size", num_bytes(cache.state_bytes), tip="The state of all recurrent layers")
    elif cache.block_bytes and not facts.is_state:
        yield Fact("Size", num_bytes(cache.block_bytes), tip="Keys and values of its tokens in all layers")
    yield Fact("Index", count(block), tip="Number of the block in recordings and exports, counted over all tiers")


def _turns(mirror: Mirror, facts: BlockFacts, find_turn: Callable[[int, int], ChatTurn | None]) -> Iterator[Fact]:
    numbers = dict.fromkeys([*([] if facts.owner is None else [facts.owner]), *facts.holders])
    for number in numbers:
        if (turn := find_turn(mirror.epoch or 0, number)) is not None:
            yield Fact("Computed in" if number == facts.owner else "Reused in", str(turn), turn_link(number))


def _tables(mirror: Mirror, facts: BlockFacts, cache: CacheInfo) -> Iterator[Fact]:
    for number in facts.holders:
        if facts.is_state:
            yield Fact(f"Request #{count(number)}", "its recurrent state", request_link(number))
            continue
        table_index = mirror.requests.index_in_tables(number, facts.block)
        if table_index is None:
            continue
        (group, index), table = table_index, mirror.requests.table(number, table_index[0])
        block_size = cache.block_sizes[group] if group < len(cache.block_sizes) else cache.block_size
        first = index * block_size
        tokens = f"tokens {count(first)} to {count(first + block_size - 1)}"
        position_text = f"{count(index + 1)} of {plural(len(table), 'block')}, {tokens}"
        yield Fact(f"Request #{count(number)}", position_text, request_link(number))
        for name, neighbor_index in (("Previous block", index - 1), ("Next block", index + 1)):
            if 0 <= neighbor_index < len(table) and table[neighbor_index] >= cache.num_reserved_blocks:
                neighbor = int(table[neighbor_index])
                yield Fact(name, _block_text(mirror, neighbor, block_size), block_link(neighbor))


def _neighbours(mirror: Mirror, block: int, block_size: int) -> Iterator[Fact]:
    if not mirror.capabilities.physical_rows:
        return
    for name, neighbor in (("Before", block - 1), ("After", block + 1)):
        if 0 <= neighbor < mirror.num_rows:
            yield Fact(name, _block_text(mirror, neighbor, block_size), block_link(neighbor))


def _block_text(mirror: Mirror, block: int, block_size: int) -> str:
    facts = block_facts(mirror, block, block_size)
    owner = f", request #{facts.owner}" if facts.owner is not None else ""
    return f"{facts.title}: {facts.state}{owner}"


def _text(content: BlockContent | None, placeholder: str) -> Iterator[Fact]:
    if content is None or not content.token_ids:
        if placeholder:
            yield Fact("Text", placeholder)
        return
    yield Fact("Text", content.text[:_MAX_TEXT_CHARS].replace("\n", "⏎\n") or "(no printable text)")
    yield Fact("Tokens", f"{count(content.start)} to {count(content.start + len(content.token_ids) - 1)}")
    for name, value in content.notes[:_MAX_NOTES]:
        yield Fact(name, value[:_MAX_NOTE_CHARS])
    yield Fact("Token ids", " ".join(map(str, content.token_ids)))
