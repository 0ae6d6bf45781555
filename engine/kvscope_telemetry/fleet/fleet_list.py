"""Parses a list of addresses, as a user or a command writes it: one address per line, an optional name, `#` comments.

    # our two boxes
    tcp://10.0.0.5:7710      box one
    vllm://10.0.0.6:8000/?rank=1
    sglang://10.0.0.7:30000/?ranks=4     ranks 0 to 3

Decides which lines are accepted, and reports the others. Opens no connections.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvscope_telemetry.addresses import Address, each_rank, saved_key
from kvscope_telemetry.credentials.api_keys import read_api_keys
from kvscope_telemetry.errors import BadInput

MAX_ENTRIES: Final = 512
_MAX_SHOWN_CHARS: Final = 200


@dataclass(frozen=True, slots=True)
class FleetEntry:
    address: Address
    name: str = ""
    """Display name; empty to use the address."""


@dataclass(frozen=True, slots=True)
class FleetList:
    entries: tuple[FleetEntry, ...] = ()
    trouble: str = ""
    """Lines that were left out and the reasons, as one line of text; empty if no line was left out."""


def parse_list(text: str, api_key: str = "") -> FleetList:
    """Parse the addresses in `text`. A repeated address is included only once. `api_key` is used for external engines
    for which no key is stored.

    Raises BadInput if `text` contains addresses but none of them is valid, because it is then probably not an address
    list.
    """
    lines = [(number, line) for number, raw in enumerate(text.splitlines(), 1) if (line := _without_comment(raw))]
    stored_keys = read_api_keys()
    entries: dict[str, FleetEntry] = {}
    refused: list[str] = []
    num_ignored = 0
    for number, line in lines:
        address_text, _, name = line.partition(" ")
        try:
            for rank_address in each_rank(address_text):
                if rank_address in entries:
                    continue
                if len(entries) >= MAX_ENTRIES:
                    num_ignored += 1
                    continue
                own_key = saved_key(stored_keys, rank_address) or saved_key(stored_keys, address_text) or api_key
                entries[rank_address] = _entry(rank_address, name.strip(), own_key)
        except BadInput as error:
            refused.append(f"line {number}: {error}"[:_MAX_SHOWN_CHARS])
    if refused and not entries:
        raise BadInput(f"there is no address in it: {refused[0]}")
    return FleetList(tuple(entries.values()), _error_text(refused, num_ignored))


def _entry(text: str, name: str, api_key: str) -> FleetEntry:
    address = Address(text)
    if address.is_external:
        address = Address(text, api_key=api_key)
    address.check()
    return FleetEntry(address, name[:_MAX_SHOWN_CHARS])


def _without_comment(line: str) -> str:
    """Remove a comment. A `#` begins a comment only at the start of a line or after white space, because
    addresses may contain `#`.
    """
    words = line.split()
    comment_starts = [index for index, word in enumerate(words) if word.startswith("#")]
    return " ".join(words[: comment_starts[0]] if comment_starts else words)


def _error_text(refused: list[str], num_ignored: int) -> str:
    errors = []
    if refused:
        more = f" (and {len(refused) - 1:,} more lines)" if len(refused) > 1 else ""
        errors.append(f"left out: {refused[0]}{more}")
    if num_ignored:
        errors.append(f"{num_ignored:,} addresses ignored: at most {MAX_ENTRIES} are watched")
    return "; ".join(errors)
