"""Reads a recording's facts for its line in the list, and makes its small picture. No Qt.

A file without summaries is read through for a limited time; the facts are then what was found by the end of that time.
"""

from __future__ import annotations

import time
from typing import Final

import numpy as np
import numpy.typing as npt

from kvscope_app.library.entry import UNTOLD, Facts
from kvscope_app.look.model_name import model_name
from kvscope_telemetry.exports.digest import digest
from kvscope_telemetry.exports.report.png import png
from kvscope_telemetry.exports.span import span_of
from kvscope_telemetry.recordings.overview import read_overview, written_parts
from kvscope_telemetry.recordings.read_budget import OpeningCancelled, ProgressCallback
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.summaries.session_overview import SessionOverview
from kvscope_telemetry.summaries.summary import SECOND_NS

MAX_LOOK_S: Final = 20.0
PICTURE_SIZE: Final = (120, 44)
"""Columns and rows."""
_ACTIVE: Final = (0x3F, 0x8F, 0xF0)
_CACHED: Final = (0xCC, 0x98, 0x44)


def look_into(path: str, watch: ProgressCallback) -> tuple[Facts, bytes]:
    """Return facts and picture of a recording. Raises BadInput for what is no recording, OpeningCancelled when `watch`
    stops it.
    """
    recording = Recording.open(path, watch)
    overview = _overview(recording, watch)
    found = digest(recording, overview, span_of(recording))
    facts = Facts(
        model=model_name(recording.info.hello),
        device=found.device,
        start_ns=recording.start_ns,
        length_s=recording.info.duration_s,
        num_bytes=recording.path.stat().st_size,
        peak_usage=found.peak_usage,
        preemptions=_first_known(found.totals["preemptions"]),
        requests=_first_known(found.totals["admitted"], found.totals["finished"]),
        has_texts=recording.has_texts,
        is_complete=recording.info.is_complete,
        epoch=recording.info.hello.epoch,
    )
    return facts, picture(overview, found.pool.num_blocks)


def _first_known(*numbers: int | None) -> int:
    """Of an engine that does not tell who it admitted, those that finished; `UNTOLD` where it tells neither."""
    return next((number for number in numbers if number is not None), UNTOLD)


def picture(overview: SessionOverview, num_blocks: int) -> bytes:
    """A PNG of the pool's `num_blocks`: time across, address down, what is held and cached. Empty where none tells."""
    if not len(overview):
        return b""
    num_columns, num_rows = PICTURE_SIZE
    first_ns, last_ns = int(overview.time_ns[0]), int(overview.time_ns[-1]) + SECOND_NS
    times = first_ns + (np.arange(num_columns) + 0.5) * ((last_ns - first_ns) / num_columns)
    places = np.array([_place(overview, int(at_ns)) for at_ns in times.tolist()], np.int64)
    share = num_blocks / max(float(overview.column("num_rows")[-1]), 1.0)
    active, cached = (_resized(_pool(overview.bins(name, places), share), num_rows) for name in ("active", "cached"))
    if not active.size:
        return b""
    total = np.clip(active + cached, 0, 1)
    part = np.divide(active, active + cached, out=np.zeros_like(active), where=total > 0)[..., None]
    colour = part * np.array(_ACTIVE) + (1 - part) * np.array(_CACHED)
    pixels = np.concatenate((colour, 255 * np.sqrt(total)[..., None]), axis=2)
    return png(np.round(pixels).astype(np.uint8).transpose(1, 0, 2))


def _overview(recording: Recording, watch: ProgressCallback) -> SessionOverview:
    deadline_s = time.monotonic() + MAX_LOOK_S
    try:
        return read_overview(recording, lambda share: watch(share) and time.monotonic() < deadline_s)
    except OpeningCancelled:
        if not watch(1.0):
            raise
        overview = SessionOverview()
        for part in written_parts(recording):
            part.into(overview)
        return overview


def _place(overview: SessionOverview, time_ns: int) -> int:
    place = overview.place_at(time_ns)
    return place if place >= 0 and time_ns - int(overview.time_ns[place]) < 2 * SECOND_NS else -1


def _pool(shares: npt.NDArray[np.generic], share: float) -> npt.NDArray[np.generic]:
    """Without the lower tiers, whose rows come after those of the pool."""
    return shares[:, : max(1, round(min(share, 1.0) * shares.shape[1]))]


def _resized(shares: npt.NDArray[np.generic], num_rows: int) -> npt.NDArray[np.float64]:
    """Shape (columns, num_rows), 0 to 1: the mean where rows are put together."""
    values = shares.astype(np.float64) / 255
    num_bins = values.shape[1]
    if not num_bins:
        return values
    edges = np.arange(num_rows) * num_bins // num_rows
    if num_bins <= num_rows:
        return values[:, edges]
    sums: npt.NDArray[np.float64] = np.add.reduceat(values, edges, axis=1)
    return sums / np.diff(np.append(edges, num_bins))
