"""Queue of further completions of prompts that are not computed yet."""

from __future__ import annotations

from kvscope_engine.policy.request import Request
from kvscope_engine.policy.step_plan import Scheduled


class WaitingForks:
    """Requests that wait for another request, their parent, to compute the same prompt, whose blocks they will share.

    They are stored by the number of the parent, in order of arrival. Independent of blocks.
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

    def are_released_by(self, item: Scheduled) -> bool:
        """Whether this scheduled item completes a prompt for which other requests wait."""
        request = item.request
        return request.number in self._children and item.start + item.num_tokens >= request.num_prompt_tokens

    def add_request(self, child: Request) -> None:
        self._children.setdefault(child.parent, []).append(child)
        self._count += 1

    def remove(self, child: Request) -> None:
        """Remove a request that ends before its parent's prompt is computed. It must be present."""
        siblings = self._children[child.parent]
        siblings.remove(child)
        self._count -= 1
        if not siblings:
            del self._children[child.parent]

    def pop_children(self, parent: Request) -> list[Request]:
        children = self._children.pop(parent.number, [])
        self._count -= len(children)
        return children
