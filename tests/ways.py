"""Which of our files run while one thing goes from end to end: what the tests of the ways through the house share.

A way is counted on a real run. Between `begin` and `end` every file of ours is noted of which a function is called, on
every thread that was started inside the `with`. A test says of each of them what it is: a step of the way, in order, or
`beside` it, with the reason: it serves something else with the same message (figures, events, checks), or is what any
message needs. A file in neither list fails the test: a new door is either on the way or has a reason.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Final

import msgspec

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = tuple(str(folder) + "/" for folder in sorted(ROOT.glob("*/kvscope_*")) if folder.is_dir())
DEPTH: Final = 5
MANY: Final = 16
"""From here on a collection is a history."""


class Trace:
    """`ran` has the files, from the repository's root: `engine/kvscope_telemetry/ledger.py`. A context manager."""

    def __init__(self) -> None:
        self.ran: set[str] = set()
        self._codes: set[Any] = set()
        self._is_on = False

    def begin(self) -> None:
        """From now on."""
        self._is_on = True

    def end(self) -> None:
        """Not any more; what runs after it is not noted."""
        self._is_on = False
        names = {code.co_filename for code in tuple(self._codes) if code.co_name != "<module>"}
        self.ran |= {str(Path(name).relative_to(ROOT)) for name in names if name.startswith(PACKAGES)}
        self._codes.clear()

    def __enter__(self) -> Trace:
        self._before = sys.getprofile()
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        threading.setprofile(None)
        sys.setprofile(self._before)
        self._is_on = False

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        if self._is_on and event == "call":
            self._codes.add(frame.f_code)


def check_way(ran: Collection[str], way: Sequence[str], beside: Mapping[str, str]) -> None:
    """Whether what `ran` is the `way`, and nothing but what is `beside` it: files, or folders that end in a slash."""
    folders = tuple(name for name in beside if name.endswith("/"))
    unknown = sorted(name for name in ran if name not in way and name not in beside and not name.startswith(folders))
    assert not unknown, f"on the way, or beside it? {unknown}"
    assert not set(way) & set(beside), "each is one of the two"
    missing = [name for name in way if name not in ran]
    assert not missing, f"not on the way any more: {missing}"
    gone = [name for name in beside if not (ROOT / name).exists()]
    assert not gone, f"there is no such file any more: {gone}"


class Following(Trace):
    """Notes a file only where a function of it has the thing in hand as it returns: among its arguments, its locals or
    in what it gives back, alone or in what carries it from one function to the next (tuples, lists, messages, frozen
    results). `is_it` knows the thing in each of its forms. What lies in an object that is more than its carrier, such
    as a request with all its tokens, is in nobody's hand; nor is a collection of more than `MANY`.
    """

    def __init__(
        self, is_it: Callable[[Any], bool], *, but_not_in: Collection[str] = (), but_not_by: tuple[type, ...] = ()
    ) -> None:
        """`but_not_in`: functions, by their qualified names, from which on it is another thing's way.

        `but_not_by`: what carries it for another reason.
        """
        super().__init__()
        self._other_carriers = but_not_by
        self._is_it = is_it
        self._others = frozenset(but_not_in)
        self.functions: set[str] = set()
        """That have it in hand, each behind its file."""

    def _note(self, frame: FrameType, event: str, given: object) -> None:
        code = frame.f_code
        if not self._is_on or event != "return" or not code.co_filename.startswith(PACKAGES):
            return
        hands = [value for name, value in frame.f_locals.items() if name != "self"]
        if self._holds((given, *hands), DEPTH) and not self._is_of_another(frame):
            self._codes.add(code)
            self.functions.add(f"{Path(code.co_filename).relative_to(ROOT)} {code.co_qualname}")

    def _is_of_another(self, frame: FrameType | None) -> bool:
        while frame is not None:
            if frame.f_code.co_qualname in self._others:
                return True
            frame = frame.f_back
        return False

    def _holds(self, value: Any, depth: int) -> bool:
        if isinstance(value, self._other_carriers):
            return False
        if self._is_it(value):
            return True
        return bool(depth) and any(self._holds(part, depth - 1) for part in _carried(value))


def _carried(value: Any) -> Iterable[Any]:
    if isinstance(value, tuple | list | deque | set | dict):
        try:
            return list(value.values() if isinstance(value, dict) else value) if len(value) <= MANY else ()
        except RuntimeError:  # another thread changed it meanwhile
            return ()
    if isinstance(value, msgspec.Struct):
        return [getattr(value, name) for name in value.__struct_fields__]
    if is_dataclass(value) and not isinstance(value, type) and type(value).__dataclass_params__.frozen:
        return [getattr(value, one.name) for one in fields(value)]
    return ()
