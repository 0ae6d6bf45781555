"""Puts our functions around an engine's methods, and takes them away again.

Owns the rules of running inside somebody else's process: what the method does and returns is never changed; a method
that is not there is noted by name; the first exception of ours removes all hooks and is told once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

Note = Callable[..., None]


class Hooks:
    """`on_failure` is given the hook's name and the exception, once, after all hooks are gone."""

    def __init__(self, on_failure: Callable[[str, Exception], None]) -> None:
        self.missing: list[str] = []
        """Methods that this version of the engine does not have."""
        self._on_failure = on_failure
        self._undo: list[Callable[[], None]] = []
        self.are_on = True
        """Whether notes are taken; one that somebody else has put theirs around stays, and only calls on, when not."""

    def find(self, owner: Any, name: str) -> Callable[..., Any] | None:
        """A method of `owner`; None, which is noted, where this version of the engine does not have it."""
        original: Callable[..., Any] | None = getattr(owner, name, None)
        if original is None:
            self.missing.append(name)
        return original

    def after(self, owner: Any, name: str, note: Note) -> bool:
        """`note(result, *args, **kwargs)` after each call of a method of `owner`, an object or a class. Whether there
        is such a method."""
        original = self.find(owner, name)
        if original is None:
            return False

        @functools.wraps(original)
        def hooked(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if self.are_on:
                try:
                    note(result, *args, **kwargs)
                except Exception as error:
                    self.fail(name, error)
            return result

        self.put(owner, name, hooked)
        return True

    def before(self, owner: Any, name: str, note: Note) -> bool:
        """`note(*args, **kwargs)` before each call."""
        original = self.find(owner, name)
        if original is None:
            return False

        @functools.wraps(original)
        def hooked(*args: Any, **kwargs: Any) -> Any:
            if self.are_on:
                try:
                    note(*args, **kwargs)
                except Exception as error:
                    self.fail(name, error)
            return original(*args, **kwargs)

        self.put(owner, name, hooked)
        return True

    def around(self, owner: Any, name: str, look: Callable[..., Any], note: Note) -> bool:
        """`look(*args, **kwargs)` before each call, and `note(seen, result, *args, **kwargs)` after it with what that
        returned."""
        original = self.find(owner, name)
        if original is None:
            return False

        @functools.wraps(original)
        def hooked(*args: Any, **kwargs: Any) -> Any:
            if not self.are_on:
                return original(*args, **kwargs)
            seen = None
            try:
                seen = look(*args, **kwargs)
            except Exception as error:
                self.fail(name, error)
            result = original(*args, **kwargs)
            if self.are_on:
                try:
                    note(seen, result, *args, **kwargs)
                except Exception as error:
                    self.fail(name, error)
            return result

        self.put(owner, name, hooked)
        return True

    def put(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        """Put a function in the place of a method, until `remove`; it only calls on while not `are_on`."""
        own = vars(owner).get(name)
        setattr(owner, name, function)

        def undo() -> None:
            if vars(owner).get(name) is not function:
                return  # somebody else's is around it
            if own is None:
                delattr(owner, name)
            else:
                setattr(owner, name, own)

        self._undo.append(undo)

    def fail(self, name: str, error: Exception) -> None:
        """A hook of this name raised: none of them runs any more."""
        if not self.are_on:
            return
        self.remove()
        self._on_failure(name, error)

    def remove(self) -> None:
        """The engine is as it was."""
        self.are_on = False
        while self._undo:
            self._undo.pop()()
