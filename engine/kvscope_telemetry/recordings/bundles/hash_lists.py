"""Hashes of blocks, each told once in a recording: numbers that nothing foretells, and so the most of its bytes.

They lie in lists, a list in parts; what needs a hash (a bundle, a leap) gives its place in a list, of which the parts
lie in the file before it. A list is of some seconds and refers to nothing, so that damage costs no more than these, and
the keyframes that name it. Knows no files. What is read is checked: a place that no part of the list tells is a
ProtocolError.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np

from kvscope_telemetry.errors import ProtocolError
from kvscope_telemetry.recordings.bundles.integers import Ints

MAX_LISTED: Final = 1 << 20
"""Hashes of a list. Ours are much shorter."""
MAX_LISTS: Final = 512
MAX_KEPT: Final = 2 << 20
"""Lists, and hashes in them, that are kept of a file that is read: who reads goes on, or comes back, and a keyframe
refers to a dozen or two."""
NAMED_BY: Final = 3
"""Keyframes that name a list: blocks live longer than from one to the next."""
MAX_EARLIER_LISTS: Final = 64
MAX_EARLIER: Final = 1 << 18
"""Lists that are over, and hashes in them, which a keyframe may refer to: the newest."""

HashesOf = Callable[[int, int], Ints]
"""The first hashes of a list, by its name and how many; 0 stands for one that is not there."""


class HashPart(msgspec.Struct, frozen=True):
    """A part of a list, as it lies in a recording."""

    list: int
    """Its name: the log time, in ns, of what told first in it."""
    first: int
    """The place of the first of these; 0 begins the list."""
    hashes: bytes
    """u8 each."""


_PARTS: Final = msgspec.msgpack.Decoder(HashPart)
_NONE: Final[Ints] = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class ToldList:
    """A list that lies in the file."""

    name: int
    hashes: Ints


class HashList:
    """The list that is written: what was told, in order."""

    def __init__(self) -> None:
        self._earlier: list[ToldList] = []
        self._keyframes_ns: deque[int] = deque(maxlen=NAMED_BY)
        self._begin()

    def begin_next(self) -> None:
        """The next list; this one is for keyframes to refer to."""
        self._earlier = _newest((*self._earlier, *self._own))
        self._begin()

    def begin_at_keyframe(self, log_time_ns: int) -> None:
        """The next list, behind a keyframe: what was told until then is named by a few keyframes more, so that damage
        costs no more of them."""
        self.begin_next()
        self._keyframes_ns.append(log_time_ns)
        if len(self._keyframes_ns) == NAMED_BY:
            self._earlier = [each for each in self._earlier if each.name >= self._keyframes_ns[0]]

    @property
    def all_told(self) -> Sequence[ToldList]:
        """This list and those before it, the newest."""
        return (*self._earlier, *self._own)

    @property
    def _own(self) -> Sequence[ToldList]:
        return (ToldList(self.name, self.hashes),) if self.hashes.size else ()

    def _begin(self) -> None:
        self.name = 0
        """0: nothing was told yet."""
        self.hashes = self._order = _NONE
        self._num_taken = 0
        self._since_ns = 0

    def __len__(self) -> int:
        return int(self.hashes.size)

    def places(self, hashes: Ints) -> Ints:
        """Where each of `hashes` stands; -1 where it was not told."""
        if self._order.size < self.hashes.size:
            self._order = np.argsort(self.hashes, kind="stable")
        return places_among(self.hashes, self._order, hashes)

    def tell(self, hashes: Ints, log_time_ns: int) -> None:
        """Others than those that were told, at the time of what needs them."""
        if self._num_taken == self.hashes.size:
            self._since_ns = log_time_ns
        self.name = self.name or max(log_time_ns, 1)
        self.hashes = np.concatenate((self.hashes, hashes))

    def take(self) -> tuple[int, bytes] | None:
        """Log time and data of the part that is not in the file yet; None where all is."""
        first, self._num_taken = self._num_taken, self.hashes.size
        if first == self._num_taken:
            return None
        return self._since_ns, encode_part(HashPart(self.name, first, self.hashes[first:].tobytes()))


class HashLists:
    """The lists of a file that is read. `parts` gives the parts from a log time on, in order, not decoded."""

    def __init__(self, parts: Callable[[int], Iterable[bytes]]) -> None:
        self._parts = parts
        self._lists: OrderedDict[int, Ints] = OrderedDict()
        self._num_kept = 0

    def hashes(self, name: int, count: int) -> Ints:
        """The first `count` hashes of a list; 0 for each that is not there. Raises ProtocolError for too many."""
        if not 0 <= count <= MAX_LISTED:
            raise ProtocolError(f"a list of {count} hashes: at most {MAX_LISTED} are accepted")
        known = self._lists.get(name, _NONE)
        if known.size < count:
            self._num_kept -= known.size
            known = self._lists[name] = self._read(name, count)
            self._num_kept += known.size
        if known.size:
            self._lists.move_to_end(name)
        while len(self._lists) > MAX_LISTS or self._num_kept > MAX_KEPT:
            self._num_kept -= self._lists.popitem(last=False)[1].size
        return known[:count]

    def _read(self, name: int, count: int) -> Ints:
        """The list as far as it is there now, at least so many."""
        found: dict[int, Ints] = {}
        for data in self._parts(name):
            part = decode_part(data)
            if part is None or part.list < name:
                continue
            if part.list != name:
                break
            found[part.first] = np.frombuffer(part.hashes, "<i8")
        return _joined(found, count)


def joined_part(parts: Collection[HashPart]) -> HashPart | None:
    """The parts of one list from its beginning as one; None where some between them are missing."""
    found = {part.first: np.frombuffer(part.hashes, "<i8") for part in parts}
    names = {part.list for part in parts}
    whole = _joined(found, 0)
    return HashPart(names.pop(), 0, whole.astype("<i8").tobytes()) if len(names) == 1 and whole.all() else None


def encode_part(part: HashPart) -> bytes:
    """As it lies in a recording."""
    return msgspec.msgpack.encode(part)


def _joined(found: Mapping[int, Ints], count: int) -> Ints:
    """Pieces of a list by their places, at least so many; 0 for each that is not there."""
    whole = np.zeros(max([count, *(first + hashes.size for first, hashes in found.items())]), np.int64)
    for first, hashes in found.items():
        whole[first : first + hashes.size] = hashes
    return whole


def places_among(told: Ints, order: Ints, hashes: Ints) -> Ints:
    """Where each of `hashes` stands in `told`, which `order` sorts; -1 where it does not."""
    if not told.size:
        return np.full(hashes.size, -1)
    at = order[np.minimum(np.searchsorted(told[order], hashes), order.size - 1)]
    found: Ints = np.where(told[at] == hashes, at, -1)
    return found


def _newest(lists: Sequence[ToldList]) -> list[ToldList]:
    """As many as are kept, in their order."""
    kept: list[ToldList] = []
    room = MAX_EARLIER
    for each in reversed(lists[-MAX_EARLIER_LISTS:]):
        room -= int(each.hashes.size)
        if room < 0:
            break
        kept.insert(0, each)
    return kept


def decode_part(data: bytes) -> HashPart | None:
    """None for what cannot be read: what needs it will say so."""
    try:
        part = _PARTS.decode(data)
    except (msgspec.DecodeError, ValueError, OverflowError, RecursionError):
        return None
    end = part.first + len(part.hashes) // 8
    return part if part.first >= 0 and len(part.hashes) % 8 == 0 and end <= MAX_LISTED else None


def no_lists(name: int, count: int) -> Ints:
    """`HashesOf` of a file without any."""
    raise ProtocolError(f"{count} hashes of list {name}, which is nowhere")
