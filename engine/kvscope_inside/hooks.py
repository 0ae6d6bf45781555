"""Wraps methods of a host engine with hooks, and removes them again.

Enforces the rules of running inside another engine's process: a method's behaviour and result never change; missing
methods are collected by name; the first exception in a hook removes all hooks and is reported once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

HookCallback = Callable[..., None]


class Hooks:
    """Hooks on the methods of one engine.

    `on_failure` is called once with the hook's name and the exception, after all hooks were removed.
    """

    def __init__(self, on_failure: Callable[[str, Exception], None]) -> None:
        self.missing: list[str] = []
        """Names of methods that could not be hooked because this version of the engine does not have them."""
        self._on_failure = on_failure
        self._undo: list[Callable[[], None]] = []
        self.is_enabled = True
        """Whether hooks are called.

        If other code has wrapped a hooked method since, the hook cannot be removed. With False, such a hook only calls
        the original method.
        """

    def lookup(self, owner: Any, name: str) -> Callable[..., Any] | None:
        """Return a method of `owner`. If it does not exist, record its name in `missing` and return None."""
        original: Callable[..., Any] | None = getattr(owner, name, None)
        if original is None:
            self.missing.append(name)
        return original

    def after(self, owner: Any, name: str, callback: HookCallback) -> bool:
        """Call `callback(result, *args, **kwargs)` after each call of a method of `owner`, an object or a class.

        Returns whether the method exists.
        """
        original = self.lookup(owner, name)
        if original is None:
            return False

        @functools.wraps(original)
        def hooked(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if self.is_enabled:
                try:
                    callback(result, *args, **kwargs)
                except Exception as error:
                    self.fail(name, error)
            return result

        self.install(owner, name, hooked)
        return True

    def before(self, owner: Any, name: str, callback: HookCallback) -> bool:
        """Call `callback(*args, **kwargs)` before each call of a method. Returns whether the method exists."""
        original = self.lookup(owner, name)
        if original is None:
            return False

        @functools.wraps(original)
        def hooked(*args: Any, **kwargs: Any) -> Any:
            if self.is_enabled:
                try:
                    callback(*args, **kwargs)
                except Exception as error:
                    self.fail(name, error)
            return original(*args, **kwargs)

        self.install(owner, name, hooked)
        return True

    def around(self, owner: Any, name: str, before_call: Callable[..., Any], callback: HookCallback) -> bool:
        """Call `before_call(*args, **kwargs)` before each call of a method, and `callback(seen, result, *args,
        **kwargs)` after it.

        `seen` is the return value of `before_call`. Returns whether the method exists.
        """
        original = self.lookup(owner, name)
        if original is None:
            return False

        @functools.wraps(original)
        def hooked(*args: Any, **kwargs: Any) -> Any:
            if not self.is_enabled:
                return original(*args, **kwargs)
            seen = None
            try:
                seen = before_call(*args, **kwargs)
            except Exception as error:
                self.fail(name, error)
            result = original(*args, **kwargs)
            if self.is_enabled:
                try:
                    callback(seen, result, *args, **kwargs)
                except Exception as error:
                    self.fail(name, error)
            return result

        self.install(owner, name, hooked)
        return True

    def install(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        """Replace a method by `function` until `remove` is called.

        While `is_enabled` is False, `function` must only call the original method.
        """
        own_attribute = vars(owner).get(name)
        setattr(owner, name, function)

        def undo() -> None:
            if vars(owner).get(name) is not function:
                return  # other code has wrapped it
            if own_attribute is None:
                delattr(owner, name)
            else:
                setattr(owner, name, own_attribute)

        self._undo.append(undo)

    def fail(self, name: str, error: Exception) -> None:
        """Remove all hooks and report that the hook on the method `name` raised `error`. Later failures are ignored."""
        if not self.is_enabled:
            return
        self.remove()
        self._on_failure(name, error)

    def remove(self) -> None:
        self.is_enabled = False
        while self._undo:
            self._undo.pop()()
