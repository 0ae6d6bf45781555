"""The end of an MCAP file that has no room for its index: readers go through such a file from its beginning.

Format: mcap.dev/spec, "Data End" and "Footer" with no summary section.
"""

from __future__ import annotations

import struct
from typing import Final

from kvscope_telemetry.recordings.chunks import FOOTER, MAGIC, RECORD

_DATA_END: Final = 15
_NO_CRC: Final = struct.pack("<I", 0)
_NO_SUMMARY: Final = struct.pack("<QQ", 0, 0)

EARLY_END: Final = (
    RECORD.pack(_DATA_END, len(_NO_CRC))
    + _NO_CRC
    + RECORD.pack(FOOTER, len(_NO_SUMMARY + _NO_CRC))
    + _NO_SUMMARY
    + _NO_CRC
    + MAGIC
)
"""Behind the last chunk it makes a whole file."""
