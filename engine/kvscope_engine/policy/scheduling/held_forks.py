"""Further completions of a prompt that is not computed yet."""

from __future__ import annotations

from kvscope_engine.policy.plan import Scheduled
from kvscope_engine.policy.request import Request


class HeldForks:
    """Requests that wait for the prompt of another to be computed, whose blocks they will share.

    Children by the number of their parent, in the order they came. Knows nothing of blocks.
    """

    def __init__(self) -> None:
        self._children: dict[int, list[Request]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __bool__(self) -> bool:
        return self._count > 0

    def __contains__(self, child: Request) -> bool:
        return child in self._children.get(child.parent, ())

    def are_freed_by(self, item: Scheduled) -> bool:
        """Whether any wait for this request's prompt, the last of which is computed here."""
        request = item.request
        return request.number in self._children and item.start + item.num_tokens >= request.num_prompt_tokens

    def add_request(self, child: Request) -> None:
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
