"""What is known about one block, in words. Reads a mirror; knows no Qt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from kvscope_app.views.format import count, plural
from kvscope_app.views.page_map.block_texts import Stamp
from kvscope_telemetry.ledger import NO_OWNER, BlockState, Ledger, Tier
from kvscope_telemetry.mirror import Mirror

MAX_HOLDERS_NAMED: Final = 4
_TIERS: Final = {Tier.HBM: "device memory", Tier.HOST: "host memory", Tier.DISK: "disk"}
_STATES: Final = {BlockState.FREE: "free", BlockState.ACTIVE: "active", BlockState.CACHED: "cached"}


@dataclass(frozen=True, slots=True)
class BlockFacts:
    """One block as its card and a screen reader tell it."""

    block: int
    state: str
    """"free", "active", "cached" or "shared"."""
    rows: tuple[tuple[str, str], ...]
    """(label, value), the most telling first."""
    holders: tuple[int, ...]
    """Requests whose block tables hold it, at most `MAX_HOLDERS_NAMED`."""
    owner: int | None
    stamp: Stamp | None
    """None when the block holds nothing that could be asked for."""

    @property
    def sentence(self) -> str:
        """All of it in one line."""
        return ", ".join([f"Block {self.block}: {self.state}", *(f"{k.lower()} {v}" for k, v in self.rows)])


def block_facts(mirror: Mirror, block: int, block_size: int) -> BlockFacts:
    """Facts about `block`, 0 <= block < ledger.num_blocks."""
    ledger = mirror.ledger
    state = _state(ledger, block)
    owner = int(ledger.owner[block])
    holders = _holders(mirror, block) if ledger.ref_count[block] > 0 else ()
    return BlockFacts(
        block=block,
        state=state,
        rows=tuple(_rows(mirror, block, block_size, holders)) if state != "free" else (),
        holders=holders,
        owner=None if owner == NO_OWNER or state == "free" else owner,
        stamp=_stamp(mirror, block) if state != "free" else None,
    )


def _state(ledger: Ledger, block: int) -> str:
    state = BlockState(int(ledger.state[block]))
    return "shared" if state is BlockState.ACTIVE and ledger.ref_count[block] > 1 else _STATES[state]


def _rows(mirror: Mirror, block: int, block_size: int, holders: tuple[int, ...]) -> list[tuple[str, str]]:
    ledger = mirror.ledger
    rows = [("Owner", _owner(mirror, block, holders))]
    if (refs := int(ledger.ref_count[block])) > 1:
        rows.append(("Held by", f"{refs} requests: {_named(holders, refs)}"))
    rows.append(("Filled", f"{int(ledger.filled[block])} of {plural(block_size, 'token')}"))
    if (tier := Tier(int(ledger.tier[block]))) is not Tier.HBM:
        rows.append(("In", _TIERS[tier]))
    rows.append(("Last used", _age(mirror, block)))
    if heat := int(ledger.heat[block]):
        rows.append(("Prefix hits", count(heat)))
    if block_hash := int(ledger.hash[block]):
        rows.append(("Hash", f"{block_hash:016x}"[:12]))
    return rows


def _owner(mirror: Mirror, block: int, holders: tuple[int, ...]) -> str:
    owner = int(mirror.ledger.owner[block])
    if owner == NO_OWNER:
        return "none"
    return f"request {owner}" if holders else f"request {owner}, which let go of it"


def _named(holders: tuple[int, ...], refs: int) -> str:
    names = ", ".join(str(number) for number in holders)
    return names + (" …" if refs > len(holders) else "")


def _age(mirror: Mirror, block: int) -> str:
    last_used = int(mirror.ledger.last_used_step[block])
    age = max(0, mirror.step - last_used)
    return f"step {count(last_used)}, {'now' if age == 0 else plural(age, 'step') + ' ago'}"


def _holders(mirror: Mirror, block: int) -> tuple[int, ...]:
    found: list[int] = []
    requests = mirror.requests
    for number in requests.number[requests.num_blocks > 0].tolist():
        if np.any(mirror.requests.table(number) == block):
            found.append(number)
            if len(found) == MAX_HOLDERS_NAMED:
                break
    return tuple(found)


def _stamp(mirror: Mirror, block: int) -> Stamp:
    ledger = mirror.ledger
    return Stamp(mirror.epoch or 0, int(ledger.owner[block]), int(ledger.filled[block]), int(ledger.hash[block]))
