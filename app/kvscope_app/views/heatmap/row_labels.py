"""The words beside the rows: which addresses, or how long a run. Must not know how they are drawn."""

from __future__ import annotations

from kvscope_app.look.number_text import count
from kvscope_app.views.heatmap.address_rows import num_cells
from kvscope_app.views.heatmap.canvas import RowLabel
from kvscope_app.views.places import section_sizes, tier_title
from kvscope_telemetry.messages.telemetry import Hello


def address_labels(num_addresses: int, hello: Hello | None) -> list[RowLabel]:
    """Where each memory begins; of one memory alone, its first and last address."""
    cells = num_cells(num_addresses)
    if hello is None or hello.cache.num_rows != num_addresses:
        return [RowLabel(0, "0"), RowLabel(cells, count(num_addresses - 1))]
    sizes, begin, labels = section_sizes(hello.cache), 0, []
    for tier, size in sizes.items():
        name = tier_title(tier, hello.device) if len(sizes) > 1 else "0"
        labels.append(RowLabel(begin * cells / num_addresses, name, line=begin > 0))
        begin += size
    return [*labels, RowLabel(cells, count(num_addresses - 1))] if len(sizes) == 1 else labels


def run_labels(num_sizes: int) -> list[RowLabel]:
    """The shortest run of each row, the longest row first."""
    top = num_sizes - 1
    return [RowLabel(top - power, f"{count(1 << power)}" + ("+" if power else "")) for power in range(top, -1, -1)]
