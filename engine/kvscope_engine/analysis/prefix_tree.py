"""The prefixes that several prompts share, as a tree."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvscope_engine.analysis.prompt_log import PromptLog


@dataclass(slots=True)
class SharedPrefix:
    """Consecutive blocks that the same prompts share, after the blocks of `parent`."""

    num_prompts: int
    start: int
    """Position of its first token in the prompts."""
    end: int
    """Position after its last token."""
    example: int
    """Index of the first prompt that begins with it."""
    children: list[SharedPrefix] = field(default_factory=list)

    @property
    def num_saved_tokens(self) -> int:
        """Tokens of these blocks that need not be computed again, if they stay cached."""
        return (self.num_prompts - 1) * (self.end - self.start)


def shared_prefixes(log: PromptLog, block_size: int) -> list[SharedPrefix]:
    """Return the roots of the tree, each with at least two prompts."""
    chains = list(log.block_hashes(block_size))
    everything = np.concatenate(chains) if chains else np.zeros(0, np.uint64)
    distinct, counts = np.unique(everything, return_counts=True)
    roots: list[SharedPrefix] = []
    nodes: dict[int, SharedPrefix] = {}  # by the hash of the last block
    for index, chain in enumerate(chains):
        uses = counts[np.searchsorted(distinct, chain)]
        uses = uses[: int(np.count_nonzero(uses > 1))]  # uses never increase along a prompt
        ends: list[int] = [*(np.flatnonzero(np.diff(uses)) + 1).tolist(), len(uses)] if len(uses) else []
        parent, start = None, 0
        for end in ends:
            node = nodes.get(int(chain[end - 1]))
            if node is None:
                node = SharedPrefix(int(uses[end - 1]), start * block_size, end * block_size, index)
                nodes[int(chain[end - 1])] = node
                (roots if parent is None else parent.children).append(node)
            parent, start = node, end
    _sort(roots)
    return roots


def _sort(roots: list[SharedPrefix]) -> None:
    pending = [roots]
    while pending:
        siblings = pending.pop()
        siblings.sort(key=lambda node: node.num_saved_tokens, reverse=True)
        pending += [node.children for node in siblings if node.children]


def largest_prefixes(
    roots: list[SharedPrefix], max_prefixes: int, min_saved_tokens: float = 1
) -> list[tuple[int, SharedPrefix]]:
    """Return (depth, prefix) of the prefixes that save most, with the prefixes that they continue, as a tree from top
    to bottom. Prefixes that save less than `min_saved_tokens` are left out.
    """
    ranked: list[tuple[int, int, SharedPrefix]] = []
    parents: dict[int, SharedPrefix] = {}
    pending = list(roots)
    while pending:
        node = pending.pop()
        if node.num_saved_tokens >= min_saved_tokens:
            ranked.append((-node.num_saved_tokens, len(ranked), node))
        for child in node.children:
            parents[id(child)] = node
        pending += node.children
    ranked.sort()
    shown: set[int] = set()
    for _, _, node in ranked[:max_prefixes]:
        current: SharedPrefix | None = node
        while current is not None and id(current) not in shown:
            shown.add(id(current))
            current = parents.get(id(current))
    result: list[tuple[int, SharedPrefix]] = []
    stack = [(0, node) for node in reversed(roots)]
    while stack:
        depth, node = stack.pop()
        if id(node) in shown:
            result.append((depth, node))
            stack += [(depth + 1, child) for child in reversed(node.children)]
    return result
