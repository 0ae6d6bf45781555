"""Latencies of a second in buckets that are 1 % wide: percentiles of any range are right to half of that, wherever its
seconds begin and however they are put together. (A percentile made of those of each second was up to a quarter off.)

Owns how buckets lie in a summary. DDSketch (Masson et al., VLDB 2019) without its bounds on memory: times have some.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
_BUCKET: Final = np.dtype([("place", "<u2"), ("count", "<u4")])
_GROWTH: Final = 0.01
_LEAST_S: Final = 1e-6
"""What is shorter is in the first bucket."""


def pack(values_s: FloatArray) -> bytes:
    """Buckets of latencies, those that have any."""
    if not values_s.size:
        return b""
    places = np.rint(np.log(np.maximum(values_s, _LEAST_S) / _LEAST_S) / np.log1p(_GROWTH))
    found, counts = np.unique(places.clip(0, np.iinfo(np.uint16).max).astype(np.uint16), return_counts=True)
    packed = np.empty(found.size, _BUCKET)
    packed["place"], packed["count"] = found, counts
    return packed.tobytes()


def unpack(packed: bytes) -> tuple[FloatArray, FloatArray]:
    """The middle of each bucket in seconds and how many there are in it, shape (n,) each."""
    buckets = np.frombuffer(packed, _BUCKET, count=len(packed) // _BUCKET.itemsize)
    return _LEAST_S * np.exp(buckets["place"] * np.log1p(_GROWTH)), buckets["count"].astype(np.float64)
