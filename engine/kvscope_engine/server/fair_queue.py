"""Fair queue of work items, with clients and their batches as levels.

Not thread-safe: the owner locks the queue or uses it on one thread. Independent of the kind of work.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

_Work = TypeVar("_Work")


class FairQueue(Generic[_Work]):
    """Queue of work items. Clients are served round-robin, each client's batches round-robin within its turns.

    Within a batch, items are served in order.
    """

    def __init__(self) -> None:
        self._clients: OrderedDict[str, OrderedDict[str, deque[_Work]]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[_Work]:
        for batches in self._clients.values():
            for waiting in batches.values():
                yield from waiting

    @property
    def clients(self) -> list[str]:
        return list(self._clients)

    def append(self, client: str, batch: str, work: _Work) -> None:
        self._clients.setdefault(client, OrderedDict()).setdefault(batch, deque()).append(work)
        self._count += 1

    def extend(self, other: FairQueue[_Work]) -> None:
        for client, batches in other._clients.items():
            for batch, waiting in batches.items():
                for work in waiting:
                    self.append(client, batch, work)

    def pop(self, is_ready: Callable[[str, _Work], bool] = lambda client, work: True) -> tuple[str, _Work] | None:
        """Pop the next work item that `is_ready` accepts, with its client; None if there is none.

        Clients and batches whose first item is not accepted are skipped and keep their turn.
        """
        for client, batches in self._clients.items():
            for batch, waiting in batches.items():
                if is_ready(client, waiting[0]):
                    return client, self._popleft(client, batch)
        return None

    def remove_if(self, is_wanted: Callable[[_Work], bool]) -> list[_Work]:
        """Remove and return all matching work items. Other items keep their position."""
        matching = [work for work in self if is_wanted(work)]
        if matching:
            removed_ids = set(map(id, matching))
            for client, batches in list(self._clients.items()):
                for batch, waiting in list(batches.items()):
                    batches[batch] = deque(work for work in waiting if id(work) not in removed_ids)
                    self._drop_if_empty(client, batch)
            self._count -= len(matching)
        return matching

    def _popleft(self, client: str, batch: str) -> _Work:
        batches = self._clients[client]
        work = batches[batch].popleft()
        self._count -= 1
        batches.move_to_end(batch)
        self._clients.move_to_end(client)
        self._drop_if_empty(client, batch)
        return work

    def _drop_if_empty(self, client: str, batch: str) -> None:
        batches = self._clients[client]
        if not batches[batch]:
            del batches[batch]
        if not batches:
            del self._clients[client]
