"""The process that knocks: `python -m kvscope_app.bench.prober`. Writes the monotonic time, ns, as it goes by.

As a person's input it comes from outside, through a file descriptor: it waits for nothing that the window's process
does, and so no stall of that process is left out. Ends when nobody reads.
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
    """Knock until nobody listens."""
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
