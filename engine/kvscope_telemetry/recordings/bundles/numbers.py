"""The numbers that each frame has, such as times and counters, as tables of a bundle: a table a part of the frame.

A column is told by its changes. What changes as others of its frame do, times a whole number, lies as what is left of
it then, in units of what divides it: the bytes that a step reads grow as the tokens do that it looks back at. A table
of an earlier version lacks its last columns, which are all 0. Knows names, no messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final

import numpy as np

from kvscope_telemetry.errors import ProtocolError
from kvscope_telemetry.messages.telemetry import Counters, Timings, Work
from kvscope_telemetry.recordings.bundles.integers import Ints, pack, unpack
from kvscope_telemetry.recordings.bundles.request_columns import Changed, Ran

TABLES: Final[dict[str, tuple[str, ...]]] = {
    "head": ("seq", "step", "time_ns", "late_ns", "batch.num_prefill_tokens", "batch.num_decode_tokens"),
    "timings": tuple(f"timings.{name}" for name in Timings.__struct_fields__),
    "counters": tuple(f"counters.{name}" for name in Counters.__struct_fields__),
    "work": tuple(f"work.{name}" for name in Work.__struct_fields__),
}
"""Columns of each, in their order; new ones come last."""
_LIKE: Final[dict[str, tuple[str, ...]]] = {
    "timings.run_ns": ("timings.forward_ns",),
    "counters.prompt_tokens": ("all_prefilled",),
    "counters.generation_tokens": ("all_decoded",),
    "work.attention_flops": ("attended",),
    "work.flops": ("work.attention_flops", "tokens", "ran"),
    "work.kv_read_bytes": ("context",),
    "work.kv_written_bytes": ("tokens",),
    "work.other_bytes": ("tokens", "ran"),
}
"""What foretells a column: those of its table that come before it here or are not here, and what the frame tells of
requests (`of_requests`). Files are read by this: none is ever changed, a new one is for a new column."""
_MAX_UNIT_BYTES: Final = 1 << 8
"""Changes below this are a byte each, and not looked at for what divides them."""


def of_requests(prefilled: Ints, decoded: Ints, ran: Ran, changed: Changed) -> dict[str, Ints]:
    """What may foretell numbers, an entry a frame, of which so many tokens each were `prefilled` and `decoded`."""
    computed, tokens = changed.computed, ran.tokens
    attended = tokens * (computed - tokens) + tokens * (tokens + 1) // 2
    return {
        "all_prefilled": np.cumsum(prefilled),
        "all_decoded": np.cumsum(decoded),
        "tokens": prefilled + decoded,
        "ran": ran.counts,
        "context": changed.groups.sums(np.where(tokens > 0, computed, 0)),
        "attended": changed.groups.sums(attended),
    }


def pack_table(table: str, columns: Sequence[Ints], others: Mapping[str, Ints] | None = None) -> bytes:
    """`columns` as in `TABLES`; `others` as `of_requests` gives them."""
    values = np.array(columns, np.int64)
    known = dict(others or {}) | dict(zip(TABLES[table], values, strict=True))
    left = values[:, 1:] - values[:, :-1]
    factors = [_take_off(left[place], [known[name] for name in _likes(name)]) for place, name in _in_order(table)]
    units = _units(left)
    left //= units[:, None]
    head = (values[:, 0], np.array([each for some in factors for each in some], np.int64), units)
    is_there: list[bool] = np.any(left, axis=1).tolist()
    told = [pack(changes) if has else b"\0" for changes, has in zip(left, is_there, strict=True)]
    return b"".join([bytes([len(values)]), *map(pack, head), *told])


def unpack_table(table: str, data: bytes, count: int, others: Mapping[str, Ints] | None = None) -> dict[str, Ints]:
    """The columns that `pack_table` was given, `count` numbers each, by name. Raises ProtocolError."""
    names = TABLES[table]
    num_there = data[0] if data else 0
    if not 0 < num_there <= len(names):
        raise ProtocolError(f"a bundle with {num_there} columns of {table}: 1 to {len(names)} are accepted")
    there = names[:num_there]
    in_order = [(place, name) for place, name in _in_order(table) if place < num_there]
    num_factors = sum(len(_likes(name)) for _, name in in_order)
    firsts, factors, units, *left = _cut(data, (num_there, num_factors, num_there, *([count - 1] * num_there)))
    told = iter(factors.tolist())
    known = dict(others or {})
    for place, name in in_order:
        changes = left[place] * units[place]
        for other in _likes(name):
            factor = next(told)
            changes += factor * np.diff(known[other]) if factor else 0
        known[name] = firsts[place] + np.concatenate((np.zeros(1, np.int64), np.cumsum(changes)))
    zeros = np.zeros(count, np.int64)
    return {name: known[name] if name in there else zeros for name in names}


def _likes(name: str) -> tuple[str, ...]:
    return _LIKE.get(name, ())


def _in_order(table: str) -> list[tuple[int, str]]:
    """Place and name of each column, none before those that foretell it."""
    places = {name: place for place, name in enumerate(TABLES[table])}
    foretold = [name for name in _LIKE if name in places]
    return [(places[name], name) for name in (*(name for name in places if name not in _LIKE), *foretold)]


def _take_off(changes: Ints, likes: Sequence[Ints]) -> list[int]:
    """How many times each of `likes` goes into `changes`, which are left without them."""
    factors = []
    for like in likes:
        factor = 0
        if changes.any():
            by = np.diff(like)
            factor = _factor(changes, by)
            rest = changes - factor * by
            if np.count_nonzero(rest) < np.count_nonzero(changes):
                changes[:] = rest
            else:
                factor = 0
        factors.append(factor)
    return factors


def _factor(changes: Ints, by: Ints) -> int:
    """By which most of `changes` are what `by` is; 0: by none."""
    is_there = (by != 0) & (changes != 0)
    some, by = changes[is_there], by[is_there]
    with np.errstate(over="ignore"):  # the lowest number there is, by -1
        quotients = np.sort((some // by)[some % by == 0])
    return int(quotients[quotients.size // 2]) if quotients.size else 0


def _units(changes: Ints) -> Ints:
    """What divides all numbers of each row, at least 1."""
    units = np.ones(len(changes), np.int64)
    if changes.shape[1]:
        large = np.flatnonzero((np.abs(changes) >= _MAX_UNIT_BYTES).any(axis=1))
        units[large] = np.maximum(np.gcd.reduce(changes[large], axis=1), 1)
    return units


def _cut(data: bytes, counts: Sequence[int]) -> list[Ints]:
    """The columns of so many numbers each, one after another behind the first byte."""
    ends = [1]
    for count in counts:
        at = ends[-1]
        ends.append(at + 1 + (data[at] if at < len(data) else 0) * count)
    if ends[-1] != len(data):
        raise ProtocolError(f"a bundle with a table of {len(data)} bytes: it claims {ends[-1]}")
    return [unpack(data[begin:end], count) for (begin, end), count in zip(pairwise(ends), counts, strict=True)]
