"""Heading above each section of the page map: title, details, and a rule to the right edge."""

from __future__ import annotations

from typing import NamedTuple

from PySide6.QtCore import QPointF, QRectF, Qt
from PySide6.QtGui import QFont, QFontMetricsF, QPainter

from kvscope_app.ui.fonts import sans
from kvscope_app.ui.number_text import count, num_bytes, plural
from kvscope_app.ui.theme import Theme
from kvscope_app.views.block_locations import map_sections, section_sizes, tier_title
from kvscope_app.views.page_map.drawing.scene import Scene
from kvscope_telemetry.ledger import NO_OWNER, STATE_TIERS, BlockState, Tier
from kvscope_telemetry.messages.telemetry import CacheInfo, DeviceInfo
from kvscope_telemetry.mirror.mirror import Mirror

_DETAILS_GAP = 10.0
_TEXT_LIFT = 4.0


class Heading(NamedTuple):
    """Title of a section and details about it, most informative first. Details that do not fit are omitted."""

    title: str
    details: tuple[str, ...]


def headings(mirror: Mirror, cache: CacheInfo, device: DeviceInfo) -> tuple[Heading, ...]:
    """Return one heading per section (tier, or slot of the pool); empty if the map is a single section."""
    tiers, sections = section_sizes(cache), map_sections(cache)
    if len(tiers) == 1:
        return tuple(_slot_heading(mirror, slot, size) for slot, size in enumerate(sections))
    return tuple(Heading(tier_title(tier, device), _details(mirror, cache, tier, size)) for tier, size in tiers.items())


def _slot_heading(mirror: Mirror, slot: int, size: int) -> Heading:
    rows = slice(slot * size, (slot + 1) * size)
    num_filled, owners = int(mirror.ledger.filled[rows].sum()), mirror.ledger.owner[rows]
    assert mirror.hello is not None, "it has slots"
    limit = mirror.hello.model.max_model_len or size * mirror.hello.cache.block_size
    details = [f"{count(num_filled)} of {plural(limit, 'token')}"]
    number = int(owners.max(initial=NO_OWNER))
    if number != NO_OWNER and num_filled:
        is_running = bool((mirror.ledger.state[rows] == BlockState.ACTIVE).any())
        details.append(f"{mirror.requests.request_id(number) or f'#{number}'}{'' if is_running else ', ended'}")
    return Heading(f"Slot {slot}", tuple(details))


def _details(mirror: Mirror, cache: CacheInfo, tier: Tier, size: int) -> tuple[str, ...]:
    is_state = tier in STATE_TIERS
    parts = [plural(size, "state" if is_state else "block")]
    if row_bytes := cache.row_bytes(tier):
        parts.append(num_bytes(size * row_bytes))
    if tier is Tier.HBM:  # its other numbers are shown above the map
        return tuple(parts)
    num_held, num_cached = mirror.count(BlockState.ACTIVE, tier), mirror.count(BlockState.CACHED, tier)
    if tier is Tier.STATES:
        return (f"{count(num_held)} of requests", f"{count(num_cached)} cached", *parts)
    return (f"{count(num_held)} swapped out", f"{count(num_cached)} cached", *parts)


def draw_headings(
    painter: QPainter,
    scene: Scene,
    theme: Theme,
    section_headings: tuple[Heading, ...],
    dirty: QRectF,
    gutter: int,
    ratio: float,
) -> None:
    height = scene.heading_height / ratio
    if not section_headings or height < painter.fontMetrics().height() - 2:  # a bare separator
        return
    for heading, section in zip(section_headings, scene.grid.sections, strict=False):
        x, y = scene.camera.corner_of(section.first_row, 0)
        left = gutter + max(0.0, x / ratio)
        right = gutter + min(float(scene.width), x + scene.grid.columns * scene.camera.pitch) / ratio
        box = QRectF(left, y / ratio - height, right - left, height - _TEXT_LIFT)
        if box.intersects(dirty):
            _draw(painter, theme, heading, box)


def _draw(painter: QPainter, theme: Theme, heading: Heading, box: QRectF) -> None:
    bottom = Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignBottom
    painter.setFont(sans(0.88, QFont.Weight.DemiBold))
    painter.setPen(theme.color("text"))
    painter.drawText(box, bottom, heading.title)
    x = box.left() + QFontMetricsF(painter.font()).horizontalAdvance(heading.title) + _DETAILS_GAP
    painter.setFont(sans(0.82))
    text, width = _fitting_details(heading.details, QFontMetricsF(painter.font()), box.right() - x)
    if text:
        painter.setPen(theme.color("muted"))
        painter.drawText(QRectF(x, box.top(), width + 1, box.height()), bottom, text)
        x += width + _DETAILS_GAP
    middle = round(box.bottom() - painter.fontMetrics().height() / 2) + 0.5
    painter.setPen(theme.color("border"))
    if x < box.right():
        painter.drawLine(QPointF(x, middle), QPointF(box.right(), middle))


def _fitting_details(details: tuple[str, ...], metrics: QFontMetricsF, max_width: float) -> tuple[str, float]:
    """Return the leading details that fit into `max_width` pixels, joined, and the width of the resulting text."""
    for number in range(len(details), 0, -1):
        text = "  ·  ".join(details[:number])
        if (width := metrics.horizontalAdvance(text)) <= max_width:
            return text, width
    return "", 0.0
