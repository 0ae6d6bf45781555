"""Requests that wait for the prompt of another to be computed, whose blocks they will share."""

from __future__ import annotations

from kvscope_engine.policy.request import Request


class HeldForks:
    """Children by the number of their parent, in the order they came. Knows nothing of blocks."""

    def __init__(self) -> None:
        self._children: dict[int, list[Request]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __bool__(self) -> bool:
        return self._count > 0

    def __contains__(self, child: Request) -> bool:
        return child in self._children.get(child.parent, ())

    def any_of(self, parent: Request) -> bool:
        """Whether anybody waits for `parent`."""
        return parent.number in self._children

    def add(self, child: Request) -> None:
        """`child.parent` says whom it waits for."""
        self._children.setdefault(child.parent, []).append(child)
        self._count += 1

    def remove(self, child: Request) -> None:
        """It ends before its parent is ready. It must be here."""
        siblings = self._children[child.parent]
        siblings.remove(child)
        self._count -= 1
        if not siblings:
            del self._children[child.parent]

    def take(self, parent: Request) -> list[Request]:
        """All that waited for `parent`; they wait no more."""
        children = self._children.pop(parent.number, [])
        self._count -= len(children)
        return children
