"""The meaning of the rows of a block's history."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvscope_telemetry.ledger import NO_OWNER, BlockState
from kvscope_telemetry.summaries.block_changes import HISTORY_DTYPE, ChangeKind, Moved
from kvscope_telemetry.summaries.block_moments import MomentKind, moments_of

FREE: dict[str, Any] = {"state": BlockState.FREE, "owner": NO_OWNER}
HELD: dict[str, Any] = {"state": BlockState.ACTIVE, "owner": 4, "ref_count": 1, "filled": 9}
FULL: dict[str, Any] = {**HELD, "filled": 16, "hash": 77}
KEPT: dict[str, Any] = {**FULL, "state": BlockState.CACHED, "ref_count": 0}


def rows_of(*rows: dict[str, Any]) -> Any:
    made = np.zeros(len(rows), HISTORY_DTYPE)
    made["taker"] = NO_OWNER
    made["epoch"] = 1
    for place, row in enumerate(rows):
        made["time_ns"][place] = made["step"][place] = place
        for name, value in row.items():
            made[name][place] = value
    made["how"][0] = rows[0].get("how", ChangeKind.KNOWN)
    return made


@pytest.mark.parametrize(
    ("rows", "kinds"),
    [
        ([FREE, {**HELD, "taker": 4}], [MomentKind.ALLOCATED]),
        ([FREE, {**HELD, "filled": 16}], [MomentKind.ALLOCATED, MomentKind.FILLED]),
        ([FREE, {**HELD, "moved": Moved.COPIED}], [MomentKind.COPIED]),
        ([FREE, {**HELD, "moved": Moved.LOADED}], [MomentKind.LOADED]),
        ([FREE, {**KEPT, "moved": Moved.SAVED}], [MomentKind.SAVED]),
        ([HELD, {**HELD, "filled": 12}], []),
        ([HELD, FULL], [MomentKind.FILLED]),
        ([FULL, {**FULL, "ref_count": 2, "taker": 9}], [MomentKind.SHARED]),
        ([{**FULL, "ref_count": 2}, FULL], [MomentKind.RELEASED]),
        ([FULL, KEPT], [MomentKind.IDLE]),
        ([KEPT, {**FULL, "taker": 9}], [MomentKind.REUSED]),
        ([KEPT, {**HELD, "owner": 9, "moved": Moved.EVICTED}], [MomentKind.EVICTED, MomentKind.ALLOCATED]),
        ([KEPT, FREE], [MomentKind.EVICTED]),
        ([HELD, FREE], [MomentKind.FREED]),
        ([HELD, {**HELD, "owner": 5}], [MomentKind.REWRITTEN]),
        ([FREE, {**FREE, "state": BlockState.UNMAPPED}], [MomentKind.UNMAPPED]),
        ([{**FREE, "state": BlockState.UNMAPPED}, FREE], [MomentKind.MAPPED]),
        ([HELD, {"how": ChangeKind.LOST}, {**FULL, "how": ChangeKind.KNOWN}], [MomentKind.LOST, MomentKind.KNOWN]),
        ([HELD, {**FREE, "how": ChangeKind.KNOWN, "epoch": 2}], [MomentKind.RESTARTED]),
    ],
)
def test_each_change_of_a_block_is_described_as_the_right_kind_of_moment(
    rows: list[dict[str, Any]], kinds: list[MomentKind]
) -> None:
    first, *others = moments_of(rows_of(*rows), 16)
    assert first.kind is MomentKind.KNOWN
    assert [moment.kind for moment in others] == kinds


def test_moment_in_a_block_history_names_the_request_that_caused_it() -> None:
    shared, reused, unseen = (
        moments_of(rows_of(before, after), 16)[-1]
        for before, after in (
            (FULL, {**FULL, "ref_count": 2, "taker": 9}),
            (KEPT, {**FULL, "taker": 8}),
            (FULL, {**FULL, "ref_count": 2}),
        )
    )
    assert (shared.request, reused.request, unseen.request) == (9, 8, NO_OWNER)
    assert shared.ref_count == 2
