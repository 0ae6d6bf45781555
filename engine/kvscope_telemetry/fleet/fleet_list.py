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

from kvscope_telemetry.addresses import Address, each_rank
from kvscope_telemetry.credentials.api_keys import read_api_keys
from kvscope_telemetry.errors import BadInput

MAX_ENTRIES: Final = 512
_SHOWN_LETTERS: Final = 200


@dataclass(frozen=True, slots=True)
class FleetEntry:
    address: Address
    name: str = ""
    """Display name; empty to use the address."""


@dataclass(frozen=True, slots=True)
class FleetList:
    entries: tuple[FleetEntry, ...] = ()
    trouble: str = ""
    """Lines that were left out and the reasons, as one line of text; empty if none was."""


def parse_list(text: str, api_key: str = "") -> FleetList:
    """Parse the addresses in `text`, each once. `api_key` is used for other engines for which no key is stored.

    Raises BadInput if the text is not empty and contains no valid address: then it is not a list.
    """
    lines = [(number, line) for number, raw in enumerate(text.splitlines(), 1) if (line := _without_comment(raw))]
    kept = read_api_keys()
    entries: dict[str, FleetEntry] = {}
    refused: list[str] = []
    num_over = 0
    for number, line in lines:
        given, _, name = line.partition(" ")
        try:
            for where in each_rank(given):
                if where in entries:
                    continue
                if len(entries) >= MAX_ENTRIES:
                    num_over += 1
                    continue
                own_key = kept.get(where, "") or kept.get(given, "") or api_key
                entries[where] = _entry(where, name.strip(), own_key)
        except BadInput as error:
            refused.append(f"line {number}: {error}"[:_SHOWN_LETTERS])
    if refused and not entries:
        raise BadInput(f"there is no address in it: {refused[0]}")
    return FleetList(tuple(entries.values()), _error_text(refused, num_over))


def _entry(where: str, name: str, api_key: str) -> FleetEntry:
    address = Address(where)
    if address.is_external:
        address = Address(where, api_key=api_key)
    address.check()
    return FleetEntry(address, name[:_SHOWN_LETTERS])


def _without_comment(line: str) -> str:
    """Remove a comment. A `#` begins one only at the start of a line or after white space, because addresses may
    contain one."""
    words = line.split()
    ends = [place for place, word in enumerate(words) if word.startswith("#")]
    return " ".join(words[: ends[0]] if ends else words)


def _error_text(refused: list[str], num_over: int) -> str:
    faults = []
    if refused:
        more = f" (and {len(refused) - 1:,} more lines)" if len(refused) > 1 else ""
        faults.append(f"left out: {refused[0]}{more}")
    if num_over:
        faults.append(f"{num_over:,} addresses ignored: at most {MAX_ENTRIES} are watched")
    return "; ".join(faults)
