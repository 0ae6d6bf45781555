"""Plugin that vLLM loads in each of its processes (entry point `vllm.general_plugins`).

Acts only in an engine core, and only if `KVSCOPE_INSIDE` is set. Other modules of kvscope are imported only then.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from typing import Any, Final

from kvscope_inside.announcement import announce
from kvscope_inside.endpoints import ENDPOINT, RECORD, hook_api_server
from kvscope_inside.engine_log import engine_log

_HOOKED: Final = "_kvscope_is_hooked"


def load() -> None:
    """Patch vLLM so that each scheduler created in this process is watched. Idempotent."""
    if not os.environ.get(ENDPOINT):
        return
    from vllm.v1.core.sched.scheduler import Scheduler

    if getattr(Scheduler, _HOOKED, False):
        return
    setattr(Scheduler, _HOOKED, True)
    _hook_engine_config()
    announce(os.environ[ENDPOINT])
    original = Scheduler.__init__

    def init_and_watch(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        try:
            from kvscope_inside.vllm.vllm_watch import watch

            watch(self, os.environ[ENDPOINT], os.environ.get(RECORD))
        except Exception as error:
            engine_log("vllm").error("kvscope: cannot watch this engine: %s", error)

    Scheduler.__init__ = init_and_watch


def _hook_engine_config() -> None:
    """Hook the creation of vLLM's configuration, in order to record the address of the HTTP API.

    At that time the server has bound its port, and no engine core has been started.
    """
    engine_args = getattr(sys.modules.get("vllm.engine.arg_utils"), "EngineArgs", None)
    original = getattr(engine_args, "create_engine_config", None)
    if engine_args is None or original is None:
        return

    @functools.wraps(original)
    def create_engine_config(*args: Any, **kwargs: Any) -> Any:
        with contextlib.suppress(Exception):
            hook_api_server()
        return original(*args, **kwargs)

    engine_args.create_engine_config = create_engine_config
