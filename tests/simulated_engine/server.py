"""Serve a simulated engine on real sockets, with the engine's own server."""

from __future__ import annotations

import threading

from tests.simulated_engine.engine import SimulatedEngine
from tests.simulated_engine.served import ServedSimulation

from kvscope_engine.server.service import EngineService
from kvscope_telemetry.credentials.key_ring import KeyRing
from kvscope_telemetry.messages.roles import Role

START_S = 60.0
"""Seconds that the server may take to answer."""


class SimulatedServer:
    """Serve `engine` on `endpoint` with `rate` steps a second until `close`, or until a client shuts it down.

    `hold()` stops stepping between two steps, so that a test can compare; `release()` continues.
    """

    def __init__(
        self,
        engine: SimulatedEngine,
        endpoint: str,
        *,
        rate: float = 100.0,
        keys: KeyRing | None = None,
        keyless: Role = Role.OPERATOR,
    ) -> None:
        self.engine = engine
        self._served = ServedSimulation(engine, rate)
        self._service = EngineService(
            endpoint,
            lambda progress, publish, messages_dropped: self._served,
            keys=keys,
            keyless=keyless,
        )
        self.sockets = self._service.sockets
        engine.publish_to(self.sockets.publish)
        self.sockets.publish(engine.hello)
        self._thread = threading.Thread(target=self._service.run, name="kvscope-simulated", daemon=True)
        self._thread.start()
        assert self._served.is_served.wait(START_S), "the server did not start"

    def hold(self) -> None:
        """Stop stepping; when this returns no step is in progress. Commands are still answered."""
        with self._served.between_steps:
            self._served.is_held = True

    def release(self) -> None:
        """Step again."""
        self._served.is_held = False
        self._service.receiver.tick()

    def wait(self, seconds: float | None) -> bool:
        """Wait up to `seconds` for the end; return whether it came."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def close(self, *, goodbye: bool = True) -> None:
        """Stop; without `goodbye` clients receive nothing more, as if the process had been killed."""
        if not goodbye:
            self.sockets.publish = lambda message: None  # type: ignore[method-assign]
            self.sockets.reply = lambda client, message: None  # type: ignore[method-assign]
        self._service.stop()
        self._thread.join()
