"""A list of addresses, as a person or a command writes it: one a line, a name after it if one likes, `#` comments.

    # our two boxes
    tcp://10.0.0.5:7710      box one
    vllm://10.0.0.6:8000/?rank=1
    sglang://10.0.0.7:30000/?ranks=4     ranks 0 to 3

Owns what is accepted, and the words for what is not. Asks nobody.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvscope_telemetry.addresses import Address, each_rank
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.keys.api_keys import read_api_keys

MAX_ENTRIES: Final = 512
_SHOWN_LETTERS: Final = 200


@dataclass(frozen=True, slots=True)
class FleetEntry:
    """An engine, or a rank of one, to be watched."""

    address: Address
    name: str = ""
    """What a person calls it; empty: its address."""


@dataclass(frozen=True, slots=True)
class FleetList:
    """What was read."""

    entries: tuple[FleetEntry, ...] = ()
    trouble: str = ""
    """What of it was left out and why, in one line; empty where nothing was."""


def parse_list(text: str, api_key: str = "") -> FleetList:
    """The addresses in `text`, each once. `api_key` is for those of other engines for which none is kept.

    Raises BadInput where there is something, and no address in it: then it is no list.
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
    return FleetList(tuple(entries.values()), _trouble(refused, num_over))


def _entry(where: str, name: str, api_key: str) -> FleetEntry:
    address = Address(where)
    if address.is_external:
        address = Address(where, api_key=api_key)
    address.check()
    return FleetEntry(address, name[:_SHOWN_LETTERS])


def _without_comment(line: str) -> str:
    """A # begins one at the start of a line, and after a space: addresses may have one of their own."""
    words = line.split()
    ends = [place for place, word in enumerate(words) if word.startswith("#")]
    return " ".join(words[: ends[0]] if ends else words)


def _trouble(refused: list[str], num_over: int) -> str:
    faults = []
    if refused:
        more = f" (and {len(refused) - 1:,} more lines)" if len(refused) > 1 else ""
        faults.append(f"left out: {refused[0]}{more}")
    if num_over:
        faults.append(f"{num_over:,} addresses ignored: at most {MAX_ENTRIES} are watched")
    return "; ".join(faults)
