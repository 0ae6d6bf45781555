"""The probe process, `python -m kvscope_app.bench.prober`: it writes the monotonic time in ns to its output at regular
intervals.

Like a person's input, its output reaches the window from outside, through a file descriptor. It waits for nothing that
the window's process does, so it also measures that process's stalls. It ends when nobody reads its output.
"""

from __future__ import annotations

import os
import struct
import sys
import time
from typing import Final

PROBE_HZ: Final = 100.0
STAMP: Final = struct.Struct("<q")


def main() -> None:
    """Write times until nobody reads them."""
    due_s = time.monotonic()
    out = sys.stdout.fileno()
    try:
        while True:
            os.write(out, STAMP.pack(time.monotonic_ns()))
            due_s = max(due_s + 1 / PROBE_HZ, time.monotonic() - 1.0)
            time.sleep(max(0.0, due_s - time.monotonic()))
    except BrokenPipeError:
        return


if __name__ == "__main__":
    main()
