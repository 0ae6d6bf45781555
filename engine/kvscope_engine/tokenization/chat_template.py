"""Renders chat templates, with an end to the time that one conversation may take.

A template is the model's own program and its input is a client's: loops over all turns at each turn, over a large
`range`, or macros that call themselves take minutes. Nothing in jinja interrupts them, so a trace function watches the
lines that the compiled template executes and the functions that it calls. The limit is the thread's own time: a busy
machine refuses nobody.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

from kvscope_telemetry.errors import BadInput

MAX_TEMPLATE_S: Final = 2.0
_FILE: Final = "<template>"
"""File name that jinja gives to the code of a template."""


def render(template: str, variables: Mapping[str, Any]) -> str:
    """Return what `template` writes. Raises BadInput after `MAX_TEMPLATE_S`, and whatever the template raises."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    compiled: Any = _compile_jinja_template(template)
    with _limited_time(MAX_TEMPLATE_S):
        return str(compiled.render(**variables))


@contextmanager
def _limited_time(max_s: float) -> Iterator[None]:
    end_s = time.thread_time() + max_s

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if time.thread_time() > end_s:
            raise BadInput(f"it takes more than {max_s:g} s: shorter conversations and fewer tools are accepted")
        return trace if frame.f_code.co_filename == _FILE else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
