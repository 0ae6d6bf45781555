"""Which of our files run while one thing goes from end to end: what the tests of the ways through the house share.

A way is counted on a real run. Between `begin` and `end` every file of ours is noted of which a function is called, on
every thread that was started inside the `with`. A test says of each of them what it is: a step of the way, in order, or
`beside` it, with the reason: it serves something else with the same message (figures, events, checks), or is what any
message needs. A file in neither list fails the test: a new door is either on the way or has a reason.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = tuple(str(folder) + "/" for folder in sorted(ROOT.glob("*/kvscope_*")) if folder.is_dir())


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


def check_way(ran: Collection[str], way: Sequence[str], beside: Mapping[str, str], at_most: int) -> None:
    """Whether what `ran` is the `way`, and nothing but what is `beside` it: files, or folders that end in a slash."""
    folders = tuple(name for name in beside if name.endswith("/"))
    unknown = sorted(name for name in ran if name not in way and name not in beside and not name.startswith(folders))
    assert not unknown, f"on the way, or beside it? {unknown}"
    assert not set(way) & set(beside), "each is one of the two"
    missing = [name for name in way if name not in ran]
    assert not missing, f"not on the way any more: {missing}"
    gone = [name for name in beside if not (ROOT / name).exists()]
    assert not gone, f"there is no such file any more: {gone}"
    assert len(way) <= at_most, f"{len(way)} files instead of {at_most}: {way}"
