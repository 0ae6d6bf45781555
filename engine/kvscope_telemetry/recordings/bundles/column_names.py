"""Columns of a bundle by number: a hundred names would weigh more than what most of them say.

Owns which number stands for which name. What has no number keeps its name. Knows no columns but by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kvscope_telemetry.errors import ProtocolError

NAMES: Final = (
    "is_there",
    "rows",
    "batch.ran_rows",
    "batch.num_tokens",
    "batch.ran",
    "batch.new_ran",
    "requests.rows",
    "requests.number",
    "requests.new_number",
    "requests.state",
    "requests.num_cached_tokens",
    "requests.num_preemptions",
    "requests.num_draft_tokens",
    "requests.num_accepted_tokens",
    "requests.ends_at_0",
    "requests.num_computed_tokens",
    "requests.num_output_tokens",
    "requests.block_size",
    "requests.table_count",
    "requests.table_start",
    "requests.table",
    "requests.new_table",
    "blocks.ids",
    "blocks.new_ids",
    "blocks.state",
    "blocks.tier",
    "blocks.prefix_hits",
    "blocks.full",
    "blocks.filled",
    "blocks.owner",
    "blocks.age",
    "blocks.ref_count",
    "blocks.hash",
    "blocks.hash_list",
    "blocks.hash_places",
    "blocks.parent",
    "blocks.parents",
    "blocks.parent_places",
    "head",
    "timings",
    "counters",
    "work",
    "moves.evicted_rows",
    "moves.evicted",
    "moves.new_evicted",
    "moves.copied_rows",
    "moves.copied",
    "moves.new_copied",
    "moves.saved_rows",
    "moves.saved",
    "moves.new_saved",
    "moves.loaded_rows",
    "moves.loaded",
    "moves.new_loaded",
    "first_token_ns_rows",
    "first_token_ns",
    "inter_token_ns_rows",
    "inter_token_ns",
    "blocks.attention",
    "blocks.attention_step",
    "blocks.skipped",
    "requests.table_rows",
    "events.rows",
    "events.kind",
    "events.kind_which",
    "events.time_ns",
    "events.number",
    "events.other",
    "events.cause",
    "events.cause_which",
    "events.num_blocks",
    "events.num_tokens",
    "events.data",
    "events.data_which",
    "new_requests.rows",
    "new_requests.number",
    "new_requests.request_id",
    "new_requests.request_id_which",
    "new_requests.arrival_ns",
    "new_requests.num_prompt_tokens",
    "new_requests.max_tokens",
    "new_requests.priority",
    "new_requests.index",
)
"""A name's number is its place: new ones come at the end, and none is ever taken away."""
_NUMBERS: Final = {name: number for number, name in enumerate(NAMES)}


def numbered(columns: Mapping[str, bytes]) -> dict[str | int, bytes]:
    """As they lie in a file."""
    return {_NUMBERS.get(name, name): column for name, column in columns.items()}


def named(columns: Mapping[str | int, bytes]) -> dict[str, bytes]:
    """Those columns by their names, as earlier versions wrote them. Raises ProtocolError for a number without one."""
    try:
        return {name if isinstance(name, str) else NAMES[name]: column for name, column in columns.items()}
    except IndexError:
        unknown = max(name for name in columns if isinstance(name, int))
        raise ProtocolError(f"a bundle with column {unknown}: 0 to {len(NAMES) - 1} are accepted") from None
