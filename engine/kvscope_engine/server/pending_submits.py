"""Submissions whose prompts are being made into tokens: known by their ids, and still their clients' to abort."""

from __future__ import annotations

from collections.abc import Callable

from kvscope_engine.server.limits import ServiceLimits
from kvscope_engine.server.preparation import Preparation, Prepared, TokenIdsOf
from kvscope_telemetry.messages.commands import Submit


class PendingSubmits:
    """By request id. Every method runs on the engine's thread; `put(client, prepared)` is called on another."""

    def __init__(
        self,
        token_ids_of: TokenIdsOf,
        has_form: Callable[[Submit], bool],
        put: Callable[[bytes, Prepared], None],
        limits: ServiceLimits,
    ) -> None:
        self._preparation = Preparation(token_ids_of, has_form, lambda done: put(done.client, done), limits)
        self._pending: dict[str, Prepared] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._pending

    def add(self, client: bytes, submit: Submit) -> str:
        """Begin; the reason when that is too much."""
        prepared = Prepared(client, submit)
        reason = self._preparation.put(prepared)
        if not reason:
            self._pending[submit.request_id] = prepared
        return reason

    def take(self, prepared: Prepared) -> bool:
        """It is through and pending no more; False when it was cancelled meanwhile."""
        if self._pending.get(prepared.submit.request_id) is not prepared:
            return False
        del self._pending[prepared.submit.request_id]
        return True

    def belongs_to(self, request_id: str, client: bytes) -> bool:
        """Whether it is here and `client` asked for it."""
        prepared = self._pending.get(request_id)
        return prepared is not None and prepared.client == client

    def of(self, client: bytes) -> list[str]:
        """Ids of the client's."""
        return [request_id for request_id, prepared in self._pending.items() if prepared.client == client]

    def move(self, before: bytes, client: bytes) -> None:
        """A client has another connection now: those that are through but not taken are its as well."""
        self._preparation.move(before, client)
        for request_id in self.of(before):
            self._pending[request_id].client = client

    def cancel(self, request_id: str) -> Prepared:
        """Nobody wants it any more. It must be here."""
        prepared = self._pending.pop(request_id)
        self._preparation.cancel(prepared)
        return prepared

    def cancel_all_of(self, client: bytes) -> None:
        """Everything of a client that is gone."""
        for request_id in self.of(client):
            self.cancel(request_id)

    def close(self) -> list[Prepared]:
        """End; returns what was not through, in the order it came."""
        self._preparation.close()
        pending, self._pending = list(self._pending.values()), {}
        return pending
