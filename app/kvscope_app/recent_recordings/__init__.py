"""Recently opened or made recordings, and a window that lists the recordings of a folder."""
