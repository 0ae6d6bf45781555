"""Trace which of our files run while one thing passes through the code, for the tests of code paths.

A path is traced in a real run. Between `begin` and `end` every file of ours with a called function is recorded, in
every thread that was started inside the `with` block. A test lists each of them either as a step of the path, in
order, or `beside` it with a reason: it uses the same message for something else (figures, events, checks), or every
message needs it. A file in neither list fails the test, so a new file must be added to one of them.
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
"""From this size on a collection counts as a history."""


class Trace:
    """Context manager; `ran` has the files, from the root of the repository: `engine/kvscope_telemetry/ledger.py`."""

    def __init__(self) -> None:
        self.ran: set[str] = set()
        self._codes: set[Any] = set()
        self._is_on = False

    def begin(self) -> None:
        """Start recording."""
        self._is_on = True

    def end(self) -> None:
        """Stop recording."""
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
    """Check that `ran` is the `way` and otherwise only `beside` it: files, or folders that end with a slash."""
    folders = tuple(name for name in beside if name.endswith("/"))
    unknown = sorted(name for name in ran if name not in way and name not in beside and not name.startswith(folders))
    assert not unknown, f"on the way, or beside it? {unknown}"
    assert not set(way) & set(beside), "each is one of the two"
    missing = [name for name in way if name not in ran]
    assert not missing, f"not on the way any more: {missing}"
    gone = [name for name in beside if not (ROOT / name).exists()]
    assert not gone, f"there is no such file any more: {gone}"


class Following(Trace):
    """Records a file only if one of its functions has the thing when it returns: in its arguments, locals or result,
    alone or in what carries it between functions (tuples, lists, messages, frozen results). `is_it` recognizes the
    thing in each of its forms. Something in a larger object, such as a request with all its tokens, does not count,
    nor does a collection of more than `MANY`.
    """

    def __init__(
        self, is_it: Callable[[Any], bool], *, but_not_in: Collection[str] = (), but_not_by: tuple[type, ...] = ()
    ) -> None:
        """Leave out what belongs to other things: `but_not_in` are functions, by qualified name, in which another path
        begins, and `but_not_by` are types that carry it for another reason.
        """
        super().__init__()
        self._other_carriers = but_not_by
        self._is_it = is_it
        self._others = frozenset(but_not_in)
        self.functions: set[str] = set()
        """Functions that handle the traced value, as "file:function"."""

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
        except RuntimeError:  # another thread has changed it meanwhile
            return ()
    if isinstance(value, msgspec.Struct):
        return [getattr(value, name) for name in value.__struct_fields__]
    if is_dataclass(value) and not isinstance(value, type) and type(value).__dataclass_params__.frozen:
        return [getattr(value, one.name) for one in fields(value)]
    return ()
