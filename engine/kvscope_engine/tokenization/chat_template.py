"""Renders chat templates with a time limit.

A template is a program that is part of the model, and its input comes from a client: nested loops over all turns, loops
over a large `range`, or recursive macros can take minutes. Jinja cannot interrupt them, so a trace function checks the
time at each line that the compiled template executes and at each function that it calls. The limit is CPU time of the
thread, so that load on the machine never causes a refusal.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

from kvscope_telemetry.errors import BadInput

MAX_TEMPLATE_S: Final = 2.0
TOOLS_VARIABLE: Final = re.compile(r"\btools\b")
"""Matches the template variable `tools` in the source of a chat template that shows tools to the model."""
_TEMPLATE_FILE_NAME: Final = "<template>"
"""File name that Jinja gives to the compiled code of a template. The trace function recognizes template code by it."""


def render(template: str, variables: Mapping[str, Any]) -> str:
    """Render `template`.

    Raises BadInput after `MAX_TEMPLATE_S` seconds of CPU time, and any exception that the template raises.
    """
    from transformers.utils.chat_template_utils import _compile_jinja_template

    # This function is private, but has transformers' sandbox and its functions for templates. The public one also
    # renders the template, which must be a separate step here, because only rendering is limited.
    compiled: Any = _compile_jinja_template(template)
    with _limited_time(MAX_TEMPLATE_S):
        return str(compiled.render(**variables))


@contextmanager
def _limited_time(max_s: float) -> Iterator[None]:
    end_s = time.thread_time() + max_s

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if time.thread_time() > end_s:
            raise BadInput(f"it takes more than {max_s:g} s: shorter conversations and fewer tools are accepted")
        return trace if frame.f_code.co_filename == _TEMPLATE_FILE_NAME else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
