"""Loaded by SGLang in each of its processes (entry point `sglang.srt.plugins`); does something in a scheduler alone,
and only where `KVSCOPE_INSIDE` is set. Everything else of kvscope is imported then, not before.
"""

from __future__ import annotations

import os
from typing import Any, Final

from kvscope_inside.announcement import announce
from kvscope_inside.endpoints import ENDPOINT, RECORD
from kvscope_inside.engine_log import engine_log

SCHEDULER: Final = "sglang.srt.managers.scheduler.Scheduler.__init__"


def load() -> None:
    """Have each scheduler of this process watched from its making on."""
    if not os.environ.get(ENDPOINT):
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(SCHEDULER, made, HookType.AFTER)


def made(_: None, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """A scheduler is ready; the first of each group of ranks that do the same is watched."""
    try:
        from kvscope_inside.sglang.watch import watch

        watch(scheduler, os.environ[ENDPOINT], os.environ.get(RECORD))
        announce(os.environ[ENDPOINT])
    except Exception as error:
        engine_log("sglang").error(
            "kvscope: cannot watch this engine: %s", error, exc_info=bool(os.environ.get("KVSCOPE_DEBUG"))
        )
