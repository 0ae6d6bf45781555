"""Works around a crash of PySide 6.11 on Python 3.11: an error that a Python override of a Qt method raises.

The crash happens if Qt calls the override while Python waits for a call of Qt. An example is `focusNextPrevChild`,
which Qt calls during `super().event(event)`. shiboken stores the error and prepends the override's name to its message
(`prependToExceptionMessage` in `sbkerrors.cpp`). Before Python 3.12, `PyErr_Fetch` returns a bare string instead of an
exception object for most errors raised in C, among them "Internal C++ object already deleted" and `int("x")`. shiboken
reads the string as if it were an exception, and the process ends with a segmentation fault.

Python creates the exception object immediately if another exception is being handled, because it then has to set the
new exception's context. `call_with_exception_objects` therefore calls functions while it handles a placeholder
exception.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeVar

_Result = TypeVar("_Result")


class _Placeholder(Exception):
    """Exception that is being handled while `call_with_exception_objects` runs. It is never reported."""


def call_with_exception_objects(function: Callable[[], _Result]) -> _Result:
    """Return `function()`. Each error raised in this thread during the call is an exception object from the start.

    Pass errors to `remove_placeholder` before reporting them.
    """
    if sys.version_info >= (3, 12):
        return function()
    try:
        raise _Placeholder
    except _Placeholder as placeholder:
        placeholder.__traceback__ = None  # it would hold `function` as long as any error is held
        try:
            return function()
        except BaseException as error:
            remove_placeholder(error)
            raise


def remove_placeholder(error: BaseException | None) -> None:
    """Remove the context that `call_with_exception_objects` added to `error` and the errors that led to it."""
    pending, seen = [error], set[int]()
    while pending:
        current = pending.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        if isinstance(current.__context__, _Placeholder):
            current.__context__ = None
        pending += (current.__context__, current.__cause__)
