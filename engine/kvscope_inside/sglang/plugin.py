"""Plugin that SGLang loads in each of its processes (entry point `sglang.srt.plugins`).

Acts only in a scheduler process, and only if `KVSCOPE_INSIDE` is set. Other modules of kvscope are imported only then.
"""

from __future__ import annotations

import os
from typing import Any, Final

from kvscope_inside.announcement import announce
from kvscope_inside.endpoints import ENDPOINT, RECORD
from kvscope_inside.engine_log import engine_log

SCHEDULER: Final = "sglang.srt.managers.scheduler.Scheduler.__init__"


def load() -> None:
    """Register a hook on the creation of schedulers, so that each scheduler in this process is watched."""
    if not os.environ.get(ENDPOINT):
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(SCHEDULER, watch_scheduler, HookType.AFTER)


def watch_scheduler(_: None, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    try:
        from kvscope_inside.sglang.sglang_watch import watch

        watch(scheduler, os.environ[ENDPOINT], os.environ.get(RECORD))
        announce(os.environ[ENDPOINT])
    except Exception as error:
        engine_log("sglang").error(
            "kvscope: cannot watch this engine: %s", error, exc_info=bool(os.environ.get("KVSCOPE_DEBUG"))
        )
