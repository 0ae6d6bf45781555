"""What a person looks for in the prefix tree: `#12` a request's, `345` a block's, anything else words of its text."""

from __future__ import annotations

from collections.abc import Set

import numpy as np

from kvscope_app.views.prefixes.columns import Moment
from kvscope_app.views.prefixes.shown_nodes import Mask
from kvscope_telemetry.ledger import NO_OWNER
from kvscope_telemetry.state.mirror import Mirror

_MAX_DIGITS = 10


def find(moment: Moment, words: str, mirror: Mirror, containing: Set[int]) -> Mask:
    """Nodes that match, shape (nodes,). `containing`: hashes of the blocks known to have the words."""
    tree = moment.tree
    found = np.zeros(len(tree), np.bool_)
    number = words.removeprefix("#").strip()
    is_number = number.isdecimal() and len(number) <= _MAX_DIGITS
    if words.startswith("#"):
        wanted = int(number) if is_number else NO_OWNER - 1
        found |= tree.owner == wanted
        found[tree.nodes_of(mirror.requests.table(wanted))] = True
        return found
    if is_number:
        found[tree.nodes_of(np.array([int(number)]))] = True
    there = np.isin(tree.row_hash, np.array(list(containing), np.uint64))
    found[tree.nodes_of(tree.rows[there])] = True
    return found
