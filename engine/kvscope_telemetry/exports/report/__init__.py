"""HTML report of a recording in a single file, to send to other people."""
